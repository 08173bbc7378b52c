"""Several processes write to one database at once: nothing is lost, nobody fails."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

from app.db.store import Store
from tests.app.db import samples, writers
from tests.processes import start_process


def run_together(count: int, target: Callable[[str, Barrier, int], None], url: str) -> None:
    """Run `target(url, barrier, number)` in processes that begin together; fail if one of them does."""
    start = multiprocessing.get_context("spawn").Barrier(count)
    processes = [start_process(target, url, start, number) for number in range(count)]
    for process in processes:
        process.join(writers.WAIT_S)
    assert [process.exitcode for process in processes] == [0] * count


def test_two_writers_of_the_same_costs_lose_nothing(database_url: str) -> None:
    run_together(2, writers.write_costs, database_url)
    expected: dict[str, int] = {}
    for writer in range(2):
        for key, at in [pair for batch in writers.written(writer) for pair in batch]:
            digest = samples.cost_key(key).digest
            expected[digest] = max(at, expected.get(digest, at))
    with Store.open(database_url) as store:
        found = store.op_costs(1, None, expected)
        assert {digest: cost.measured_at for (digest, _), cost in found.items()} == {
            digest: samples.moment(at) for digest, at in expected.items()
        }
        assert all(cost.minimum_s == expected[digest] for (digest, _), cost in found.items())
        counts = store.table_counts()
        assert counts["op_costs"] == counts["op_signatures"] == len(expected)
        # One graph a writer and round; the one that both store with every scene is the first of writer 0.
        assert counts["graphs"] == 2 * writers.ROUNDS
        assert counts["device_kinds"] == counts["environments"] == counts["topologies"] == 1


def test_a_new_database_opened_by_four_at_once_is_made_once(database_url: str) -> None:
    run_together(4, writers.open_new, database_url)
    with Store.open(database_url) as store:
        assert store.table_counts()["environments"] == 4
