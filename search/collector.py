"""Python's garbage collector while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def leaving_alone_what_is_there() -> Iterator[None]:
    """Let the collector look at new objects only.

    A walk makes so many that it looks at all of them every few seconds: millions, of modules and models, that stay.
    """
    if gc.get_freeze_count():  # the caller's own
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def paused() -> Iterator[None]:
    """Let the collector rest while imports and exports make a million objects of which few are garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
