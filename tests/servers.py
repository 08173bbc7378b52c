"""Processes for tests from a server that has imported torch and the packages already, rather than from nothing.

A process that multiprocessing starts afresh ("spawn") imports them for two seconds of processor time, as long as most
of these tests work. The server is such a process itself, and forks before anything is computed: its children have no
threads of torch's and no state of the tests'. They share one seed of hashes. Commands that tests start as processes of
their own, and the training example, start theirs as a user's do.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

import pytest

from profiler.pinning import child_variables, started_with

PRELOADED = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.distributed_c10d",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "app.db.store",
    "profiler.link_worker",
    "profiler.operators",
    "profiler.workers",
    "runtime.jobs.run",
    "runtime.launch.torchrun",
    "search.algorithms.mcmc",
)


_get_context = multiprocessing.get_context


@contextmanager
def fresh_processes() -> Iterator[None]:
    """Let processes be spawned from nothing while the context lasts, within one of `warm_processes` too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", _get_context)
        yield


@contextmanager
def warm_processes() -> Iterator[None]:
    """Let processes that are to be spawned be forked from the server while the context lasts."""

    def from_server(method: str | None = None) -> BaseContext:
        if method != "spawn":
            return _get_context(method)
        forkserver.set_forkserver_preload(list(PRELOADED))
        # Its children have its variables, whatever those of the moment are.
        with started_with({"TORCH_CPP_LOG_LEVEL": "ERROR", **child_variables()}):
            forkserver.ensure_running()
        return _get_context("forkserver")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", from_server)
        yield
