"""A search in a process of its own, to be killed. Imported by that process, so apart from the tests."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from app.db.store import Store
from search.algorithms.chain import SearchOptions
from search.algorithms.proposal_log import Recorder
from tests.app.walks import begin, walk
from tests.search.builders import branches, random_anywhere

DEVICES = 6
MOST = 1_000_000


def options(seed: int) -> SearchOptions:
    """Return those of a search that goes on until it is killed."""
    return SearchOptions(proposals=MOST, chains=4, seed=seed, beta=20)


def search_until_killed(url: str, seed: int, search_id: Any, count: Any, made_s: Any) -> None:
    """Search; say which search it is, how many proposals were made, and when each was.

    When: in seconds of this process's processor time, of which a busy machine gives it less.
    """
    add = Recorder.add

    def add_and_tell(recorder: Recorder, *arguments: Any, **named: Any) -> None:
        add(recorder, *arguments, **named)
        made_s[count.value] = time.process_time()
        count.value += 1

    with Store.open(url) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "add", add_and_tell)
        search_id.value = begin(store, options(seed))
        graph = branches()
        known = [random_anywhere(graph, DEVICES, np.random.default_rng(seed))]
        walk(store, search_id.value, graph, DEVICES, options(seed), known=known)
