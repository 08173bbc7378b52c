"""Where a step's time went: every device counts, also one that had nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.db.store import Store
from app.services.timeline.attribution import attribute
from app.services.timeline.store import Recording, read_recording, write_recording
from graph.errors import DatabaseError
from graph.training import Training
from runtime.observe.spans import Label, Span
from search.cost.cost_table import CostTable
from search.simulate.simulator import simulate
from search.space.baselines import single_device
from tests.app.db import samples
from tests.app.db.samples import Scene
from tests.search.builders import MadeUpCosts, branches, devices, local_calls


@pytest.mark.parametrize("busy", [0, 1])
def test_a_device_without_work_waits_all_along(tmp_path: Path, busy: int) -> None:
    graph = branches()
    simulation = simulate(
        graph,
        single_device(graph),
        devices(2),
        CostTable(MadeUpCosts()),
        Training(8),
        local_calls=local_calls,
    )
    spans = tuple(
        Span(Label("forward", "fc", f"forward fc[{n}]"), 1000 * n, 1000 * (n + 1)) for n in range(3)
    )
    ranks = ((), spans) if busy else (spans, ())
    with Store.open(tmp_path / "test.sqlite") as store:
        scene = Scene.stored(store)
        strategy = store.put_strategy(samples.strategy(scene.graph_id, 1))
        execution = store.execution(store.start_execution(scene.execution(strategy)))
        write_recording(store, execution, (ranks, ranks))
        recording: Recording = read_recording(store, execution)
    assert [len(slices) for slices in recording.typical.devices][busy] == 3
    found = attribute(simulation, recording)
    rows = {(row.kind, row.subject): row for row in found.rows}
    assert rows["forward", "fc"].measured_s == pytest.approx(1.5e-6)
    waiting = rows["wait", "the end of the step"]
    assert waiting.measured_s == pytest.approx(1.5e-6)
    assert waiting.predicted_s == pytest.approx(simulation.step_time_s / 2)
    assert sum(row.measured_s for row in found.rows) == pytest.approx(found.measured_s) == pytest.approx(3e-6)
    assert sum(row.predicted_s for row in found.rows) == pytest.approx(found.predicted_s)


def test_a_recording_is_not_written_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "test.traces").mkdir()
    (tmp_path / "test.traces" / "executions").symlink_to(tmp_path / "elsewhere")
    with Store.open(tmp_path / "test.sqlite") as store:
        scene = Scene.stored(store)
        strategy = store.put_strategy(samples.strategy(scene.graph_id, 1))
        execution = store.execution(store.start_execution(scene.execution(strategy)))
        with pytest.raises(DatabaseError, match="executions: is a link, must be a folder"):
            write_recording(store, execution, (((),),))
    assert list((tmp_path / "elsewhere").iterdir()) == []
