"""The view of recorded steps, over every backend: what their files say, and no more than is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.analytics.duck import connect
from app.db.recordings import FOLDER
from app.db.store import Store
from app.services.timeline.store import recording_path, write_recording
from runtime.observe.spans import Label, Span, TimedCommunication
from tests.app.db import samples
from tests.app.db.samples import Scene
from tests.search.builders import devices

COLUMNS = "execution, step, step_s, busiest_s, total_s, scheduling_efficiency, speedup_potential"


def query(store: Store, sql: str) -> list[tuple[Any, ...]]:
    with connect(store.database) as connection:
        return connection.execute(sql).fetchall()


def recorded(store: Store, scene: Scene, strategy: int) -> tuple[int, Path]:
    """Store an execution of one recorded step: ranks compute 3 and 1 s, and sum for 2 s until the end after 5 s."""
    execution = store.execution(store.start_execution(scene.execution(strategy)))
    ends = (3_000_000_000, 1_000_000_000)
    spans = tuple(
        (
            Span(Label("forward", "fc", "forward fc[0]"), 0, end),
            Span(Label("wait", "x", "wait for x"), end, 5_000_000_000),
        )
        for end in ends
    )
    sums = tuple((TimedCommunication("all-reduce", (0, 1), "x", end, 5_000_000_000),) for end in ends)
    write_recording(store, execution, (spans, spans), (sums, sums), devices(2))
    return execution.id, recording_path(store, execution)


def test_each_step_has_its_efficiency(store: Store) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 1))
    number, _ = recorded(store, scene, strategy)
    # L is rank 0's 3 s, U 3 + 1 + 2.
    expected = [(number, step, 5.0, 3.0, 6.0, pytest.approx(1 / 3), 1.0) for step in range(2)]
    assert query(store, f"SELECT {COLUMNS} FROM recorded_steps ORDER BY ALL") == expected
    of_it = f"SELECT model, topology, strategy_id FROM recorded_steps WHERE execution = {number} AND step = 0"
    assert query(store, of_it) == [("inception", "local", strategy)]


def test_files_that_are_damaged_or_of_none_do_not_hide_the_rest(store: Store) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 1))
    (_, damaged), (whole, path), (_, empty) = (recorded(store, scene, strategy) for _ in range(3))
    damaged.write_bytes(damaged.read_bytes()[:100])
    empty.write_bytes(b"")
    path.with_name(path.name.replace("0000", "9000")).write_bytes(path.read_bytes())
    assert query(store, "SELECT DISTINCT execution FROM recorded_steps") == [(whole,)]


def test_recordings_behind_a_link_are_not_read(store: Store, tmp_path: Path) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 1))
    recorded(store, scene, strategy)
    folder = store.database.trace_folder / FOLDER
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert query(store, "FROM recorded_steps") == []
