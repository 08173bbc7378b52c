"""A search that does nothing but write and merge its trace, in a process of its own. Imported by that process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from app.db import chunks, trace
from app.db.rows import ConfigurationEntry, ProposalRows, StartEntry
from app.db.store import Store
from app.db.trace import ProposalTrace

ROWS = 50
"""Proposals of a batch, each of which is a chunk of its own at first."""


def proposals(first: int) -> ProposalRows:
    """Return the proposals `first` to `first + ROWS - 1` of one chain, each of a configuration of its own."""
    step = np.arange(first, first + ROWS)
    return ProposalRows(
        chain=np.zeros(ROWS, dtype=np.int16),
        step=step,
        operator=np.zeros(ROWS, dtype=np.int32),
        configuration=step,
        simulated_ns=step + 1,
        bound_ns=np.full(ROWS, -1),
        accepted=np.ones(ROWS, dtype=bool),
    )


def add(trace_: ProposalTrace, first: int) -> None:
    """Add `proposals(first)`, and what their configurations mean, in one flush."""
    trace_.add_entries(
        [
            ConfigurationEntry(code, "strided", 1, (1,), start=0, stride=1)
            for code in range(first, first + ROWS)
        ]
    )
    trace_.add(proposals(first))


def write_and_merge(url: str, search_id: int, seed: int, count: Any, stop: Any) -> None:
    """Write until told to stop, or killed; `count` is how many proposals are surely registered.

    Chunks are merged by threes; the trace is closed, which merges all, and gone on with now and then. A search that was
    killed is gone on with after what was registered last.
    """
    rng = random.Random(seed)
    with Store.open(url) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "FLUSH_ROWS", 1)
        patch.setattr(trace, "FLUSH_INTERVAL_S", 3600.0)
        patch.setattr(trace, "MOST_SMALL", 3)
        if store.search(search_id).status == "interrupted":
            store.resume_search(search_id)
        while not stop.value:
            with ProposalTrace(store, search_id) as trace_:
                done = sum(chunk.rows for chunk in chunks.registered(store, search_id, "proposals"))
                if not done:
                    trace_.add_starts([StartEntry(0, "random", 0, 0)])
                for _ in range(rng.randrange(1, 30)):
                    add(trace_, done)
                    done += ROWS
                    count.value = done


def write_then_merge(url: str, search_id: int, batches: int, told: Any) -> None:
    """Write so many chunks and say so; merge them all when told to, and say so."""
    with Store.open(url) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "FLUSH_ROWS", 1)
        patch.setattr(trace, "FLUSH_INTERVAL_S", 3600.0)
        with ProposalTrace(store, search_id) as trace_:
            trace_.add_starts([StartEntry(0, "random", 0, 0)])
            for number in range(batches):
                add(trace_, number * ROWS)
            told.send("written")
            told.recv()
        told.send("merged")
        told.recv()
