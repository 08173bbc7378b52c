"""The user's folders, in which Soapstone keeps files: the same wherever a command is run.

A relative one would lie in whatever folder the user is in, which may be somebody else's: what is found there would be
taken for the user's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from graph.errors import UsageError


def user_folder(kind: Literal["data", "cache", "state"], variable: str | None = None) -> Path | None:
    """Return the user's data, cache or state folder, which need not exist; an environment variable may name another.

    None: the user has none, as in a container under a number that has no name, where HOME is not set.

    Raises:
        UsageError: the variable names a folder by a relative path, or one of a user that is not there.
    """
    named = os.environ.get(variable, "") if variable else ""
    if named:
        folder = _absolute(Path(named))
        if folder is None:
            raise UsageError(f"{variable}: is {named}, must be an absolute path; write it from / on")
        return folder
    import platformdirs

    try:
        return _absolute(Path(getattr(platformdirs, f"user_{kind}_dir")("soapstone", appauthor=False)))
    except RuntimeError:  # older ones return a path from ~ on
        return None


def _absolute(path: Path) -> Path | None:
    try:
        path = path.expanduser()
    except RuntimeError:
        return None
    return path if path.is_absolute() else None
