"""What the processes of the concurrency tests do. Imported by those processes, so apart from the tests."""

from __future__ import annotations

import random
from multiprocessing.synchronize import Barrier

from app.db.store import Store
from tests.app.db import samples
from tests.app.db.samples import Scene

KEYS = 60
ROUNDS = 25
WAIT_S = 120.0


def written(writer: int) -> list[list[tuple[int, int]]]:
    """Return the batches of one writer, as (key, moment), each key and each moment many times."""
    generator = random.Random(writer)
    return [
        [(generator.randrange(1, KEYS + 1), generator.randrange(10**6)) for _ in range(30)]
        for _ in range(ROUNDS)
    ]


def write_costs(url: str, start: Barrier, writer: int) -> None:
    """Write the batches of one writer, and a graph for each."""
    with Store.open(url) as store:
        start.wait(WAIT_S)
        kind = store.put_device_kind(samples.device_kind())
        environment = store.put_environment(samples.environment())
        for number, batch in enumerate(written(writer)):
            store.put_op_costs(
                kind, environment, [samples.op_cost(key, time_s=at, at=at) for key, at in batch]
            )
            store.put_graph(samples.graph(1000 * writer + number))
            Scene.stored(store)


def open_new(url: str, start: Barrier, writer: int) -> None:
    """Open a database that does not exist yet, and write to it."""
    start.wait(WAIT_S)
    with Store.open(url) as store:
        store.put_environment(samples.environment(writer))
