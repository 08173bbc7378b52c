"""Predicted against measured: the DuckDB query equals numbers worked out by hand, over every backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from app.analytics.compare import Comparison, ComparisonRow, compare
from app.analytics.duck import connect
from app.db.models import executions
from app.db.records import RunSpeed, SearchOutcome, StrategySource
from app.db.store import Store
from app.services.report.data import Filter, read_report_data
from graph.errors import UsageError
from tests.app.conftest import Command
from tests.app.db import samples
from tests.app.db.samples import Scene


def run(
    store: Store,
    scene: Scene,
    strategy_id: int,
    step_times_s: list[float],
    *,
    at: int = 0,
    undisturbed_s: float | None = None,
    speed: RunSpeed | None = None,
) -> None:
    """Store a finished execution."""
    execution = store.start_execution(scene.execution(strategy_id, at=at))
    store.finish_execution(execution, step_times_s, undisturbed_s=undisturbed_s, speed=speed)


def strategy(store: Store, scene: Scene, number: int, source: StrategySource = "search") -> int:
    """Store a strategy."""
    return store.put_strategy(samples.strategy(scene.graph_id, number, source))


@pytest.fixture
def scene(store: Store) -> Scene:
    """Batch 8 on two devices: data parallel, a searched strategy, one only predicted, one only measured.

    Data parallel is predicted to take 2 s (after an older prediction of 9 s, and 7 s in fifo order) and takes
    2.5 s in its newest run; the searched strategy is predicted to take 1 s and takes 0.8 s.
    """
    scene = Scene.stored(store)
    search = store.start_search(scene.search())
    data_parallel = strategy(store, scene, 1, "data-parallel")
    searched, predicted_only, measured_only = (strategy(store, scene, number) for number in (2, 3, 4))
    store.put_simulation(scene.simulation(data_parallel, 9.0, at=0, costs="old"))
    store.put_simulation(scene.simulation(data_parallel, 2.0, at=1, costs="new"))
    fifo = replace(scene.simulation(data_parallel, 7.0, at=2), task_order="fifo")
    store.put_simulation(fifo)
    store.put_simulation(scene.simulation(searched, 1.0, search_id=search))
    store.put_simulation(replace(scene.simulation(predicted_only, 4.0), feasible=False))
    run(store, scene, data_parallel, [6.0, 6.0, 6.0], at=0)
    run(store, scene, data_parallel, [2.5, 2.0, 4.0], at=1, undisturbed_s=1.6)
    run(store, scene, searched, [0.8, 0.5, 0.9], undisturbed_s=0.75, speed=RunSpeed(0.95, 1.04))
    run(store, scene, measured_only, [5.0, 5.0, 5.0])
    store.fail_execution(store.start_execution(scene.execution(searched, at=9)), "rank 1: killed")
    store.finish_search(search, "finished", SearchOutcome(10, 5, 2.0, 1.0, searched))
    return scene


def test_compare_equals_numbers_by_hand(store: Store, scene: Scene) -> None:
    def row(number: int, source: StrategySource, **values: float | bool | None) -> ComparisonRow:
        shares = {
            "measured_share": 0.75, "estimated_share": 0.25, "datasheet_share": 0.0, "feasible": True,
            "predicted_scheduling_efficiency": 0.9, "predicted_speedup_potential": 0.5,
        }  # fmt: skip
        return ComparisonRow(
            model="inception",
            topology="local",
            topology_devices=2,
            topology_id=scene.topology_id,
            graph_id=scene.graph_id,
            batch_size=8,
            precision="float32",
            optimizer="sgd",
            batch_norm="synchronized",
            strategy=samples.strategy(scene.graph_id, number).digest,
            source=source,
            device_count=2,
            micro_batches=1,
            schedule=None,
            recorded_scheduling_efficiency=None,
            recorded_speedup_potential=None,
            **{**shares, **values},  # type: ignore[arg-type]
        )

    # The mean step; what others took of it is not known.
    at_usual_speed_s = (0.8 + 0.5 + 0.9) / 3 / 1.04
    searched = row(
        2,
        "search",
        predicted_s=1.0,
        measured_median_s=0.8,
        measured_minimum_s=0.5,
        measured_noise_s=0.10000000000000003,
        predicted_throughput_samples_per_s=8.0,
        measured_throughput_samples_per_s=10.0,
        relative_error=(1.0 - 0.8) / 0.8,
        relative_error_to_minimum=1.0,
        measured_undisturbed_s=0.75,
        relative_error_undisturbed=(1.0 - 0.75) / 0.75,
        measured_speed=0.95,
        measured_at_usual_speed_s=at_usual_speed_s,
        relative_error_at_usual_speed=(1.0 - at_usual_speed_s) / at_usual_speed_s,
        predicted_speedup=2.0,
        measured_speedup=3.125,
        executions=1,
    )
    data_parallel = row(
        1,
        "data-parallel",
        predicted_s=2.0,
        measured_median_s=2.5,
        measured_minimum_s=2.0,
        measured_noise_s=1.75,
        predicted_throughput_samples_per_s=4.0,
        measured_throughput_samples_per_s=3.2,
        relative_error=-0.2,
        relative_error_to_minimum=0.0,
        measured_undisturbed_s=1.6,
        relative_error_undisturbed=(2.0 - 1.6) / 1.6,
        measured_speed=None,
        measured_at_usual_speed_s=None,
        relative_error_at_usual_speed=None,
        predicted_speedup=1.0,
        measured_speedup=1.0,
        executions=2,
    )
    measured_only = row(
        4,
        "search",
        predicted_s=None,
        measured_median_s=5.0,
        measured_minimum_s=5.0,
        measured_noise_s=0.0,
        predicted_throughput_samples_per_s=None,
        measured_throughput_samples_per_s=1.6,
        relative_error=None,
        relative_error_to_minimum=None,
        measured_undisturbed_s=None,
        relative_error_undisturbed=None,
        measured_speed=None,
        measured_at_usual_speed_s=None,
        relative_error_at_usual_speed=None,
        predicted_speedup=None,
        measured_speedup=0.5,
        measured_share=None,
        estimated_share=None,
        datasheet_share=None,
        feasible=None,
        predicted_scheduling_efficiency=None,
        predicted_speedup_potential=None,
        executions=1,
    )
    predicted_only = row(
        3,
        "search",
        predicted_s=4.0,
        measured_median_s=None,
        measured_minimum_s=None,
        measured_noise_s=None,
        predicted_throughput_samples_per_s=2.0,
        measured_throughput_samples_per_s=None,
        relative_error=None,
        relative_error_to_minimum=None,
        measured_undisturbed_s=None,
        relative_error_undisturbed=None,
        measured_speed=None,
        measured_at_usual_speed_s=None,
        relative_error_at_usual_speed=None,
        predicted_speedup=0.5,
        measured_speedup=None,
        feasible=False,
        executions=0,
    )
    assert compare(store.database).rows == (searched, data_parallel, measured_only, predicted_only)
    # Of data parallelism's 2.5 s others took 0.9; the searched strategy ran at 0.95 of the usual speed.
    assert [row.is_restless for row in compare(store.database).rows] == [False, True, False, False]


def test_compare_takes_what_is_asked_for(store: Store, scene: Scene) -> None:
    other = Scene.stored(store, 1, model="alexnet", batch_size=16)
    lone = strategy(store, other, 50)
    store.put_simulation(other.simulation(lone, 4.0))
    (row,) = compare(store.database, model="alexnet").rows
    assert (row.batch_size, row.predicted_throughput_samples_per_s, row.predicted_speedup) == (16, 4.0, None)
    assert [row.model for row in compare(store.database).rows] == ["alexnet"] + ["inception"] * 4
    nothing = Comparison((), ())
    assert compare(store.database, model="vgg") == compare(store.database, topology="dgx") == nothing
    assert len(compare(store.database, topology="local").rows) == 5
    # The search's best and the baseline, not the strategies of others.
    found = [row.source for row in compare(store.database, search=1).rows]
    assert found == ["search", "data-parallel"]
    assert compare(store.database, model="alexnet", search=1) == nothing
    with pytest.raises(UsageError, match="search 99: is not in database"):
        compare(store.database, search=99)


def test_a_run_that_others_disturbed_is_named(command: Command, database: Path) -> None:
    with Store.open(database) as store:
        scene = Scene.stored(store)
        disturbed, quiet = strategy(store, scene, 1, "data-parallel"), strategy(store, scene, 2)
        slow = strategy(store, scene, 3)
        for strategy_id, undisturbed_s, speed in (
            (disturbed, 1.5, None),
            (quiet, 1.9, RunSpeed(0.95, 1.05)),
            (slow, 2.0, RunSpeed(0.8, 1.25)),
        ):
            store.put_simulation(scene.simulation(strategy_id, 1.2))
            run(store, scene, strategy_id, [2.0], undisturbed_s=undisturbed_s, speed=speed)
    printed = command("compare").output.split("restless")[1].split("measured: median")[0]
    assert samples.strategy(scene.graph_id, 1).digest[:12] in printed
    assert "1500.0 ms" in printed
    assert "-20.0 %" in printed
    # At usual speed the slow one takes 1.6 s, predicted are 1.2.
    assert samples.strategy(scene.graph_id, 3).digest[:12] in printed
    assert "-25.0 %" in printed
    assert samples.strategy(scene.graph_id, 2).digest[:12] not in printed


def test_a_run_of_which_no_slowdown_is_stored_slows_down_as_its_cores(database: Path) -> None:
    with Store.open(database) as store:
        scene = Scene.stored(store)
        number = strategy(store, scene, 1)
        store.put_simulation(scene.simulation(number, 1.2))
        run(store, scene, number, [2.0], speed=RunSpeed(0.8, 1.1))
        (row,) = compare(store.database).rows
        assert row.measured_at_usual_speed_s == pytest.approx(2.0 / 1.1)
        with store.write() as connection:
            connection.execute(sa.update(executions).values(slowdown=None))
        (row,) = compare(store.database).rows
    assert (row.measured_speed, row.measured_at_usual_speed_s) == (0.8, 1.6)


def test_precisions_stand_apart_in_tables_and_documents(command: Command, database: Path) -> None:
    with Store.open(database) as store:
        for number, precision in enumerate(("float32", "bfloat16")):
            scene = Scene.stored(store, precision=precision)
            baseline = strategy(store, scene, 1, "data-parallel")
            searched = strategy(store, scene, 2)
            for strategy_id, predicted_s in ((baseline, 2.0), (searched, 1.0)):
                store.put_simulation(scene.simulation(strategy_id, predicted_s / (number + 1)))
                run(store, scene, strategy_id, [predicted_s / (number + 1)])
    document = command("compare", "--json").document
    for rows in document.values():
        found = [(row["precision"], row["optimizer"], row["batch_norm"]) for row in rows]
        assert found == sorted(found)
        assert {precision for precision, _, _ in found} == {"float32", "bfloat16"}
    times = {(row["precision"], row["source"]): row["predicted_s"] for row in document["strategies"]}
    assert times == {
        ("float32", "data-parallel"): 2.0,
        ("float32", "search"): 1.0,
        ("bfloat16", "data-parallel"): 1.0,
        ("bfloat16", "search"): 0.5,
    }
    printed = command("compare").output
    half, rest = printed.split("inception on local, batch size 8, float32, sgd")
    assert "inception on local, batch size 8, bfloat16, sgd" in half
    assert ("500.0 ms" in half, "500.0 ms" in rest) == (True, False)
    assert ("2000.0 ms" in half, "2000.0 ms" in rest) == (False, True)
    # Those of the errors say it too.
    assert "8, bfloat16, sgd" in rest.split("errors of the predictions")[1]
    assert max(map(len, half.splitlines())) <= 120


def test_topologies_of_one_name_stand_apart(command: Command, database: Path) -> None:
    """Probes of other numbers of devices, and of as many at another time."""
    numbers = []
    with Store.open(database) as store:
        for probe, (devices, step_s) in enumerate(((2, 1.0), (4, 0.5), (2, 3.0))):
            scene = Scene.stored(store)
            topology_id = store.put_topology(replace(samples.topology(probe), device_count=devices))
            scene = replace(scene, topology_id=topology_id)
            for number in (1, 2):
                strategy_id = strategy(store, scene, number)
                store.put_simulation(scene.simulation(strategy_id, step_s * number))
                run(store, scene, strategy_id, [step_s * number])
            numbers.append(topology_id)
            if probe == 0:
                alone = command("compare").output
    assert "inception on local, batch size 8" in alone
    printed, errors = command("compare").output.split("errors of the predictions")
    first, _, second = (f"topology {number}, 2 devices" for number in numbers)
    groups = printed.split("inception on ")[1:]
    assert [group.partition(", float32")[0] for group in groups] == [
        f"local ({text}), batch size 8" for text in (first, second, "4 devices")
    ]
    for group, shown in zip(groups, ("1000.0 ms", "3000.0 ms", "500.0 ms"), strict=True):
        assert shown in group
    for text in (first, second, "4 devices"):
        assert f"local ({text})" in " ".join(errors.split())
    document = command("compare", "--json").document
    for rows in document.values():
        assert {row["topology_id"] for row in rows} == set(numbers)
    with Store.open(database) as store:
        reported = read_report_data(store.database, Filter())
    shown_as = {f"local ({text})" for text in (first, second, "4 devices")}
    assert {summary.topology for summary in reported.summaries} == shown_as
    assert sorted(pair.topology for pair in reported.pairs) == sorted(2 * [*shown_as])


def test_rows_come_from_the_fastest_to_those_that_were_not_measured(store: Store, scene: Scene) -> None:
    assert [row.measured_median_s for row in compare(store.database).rows] == [0.8, 2.5, 5.0, None]
    assert compare(store.database, model="vgg").rows == ()


def test_best_per_model_equals_numbers_by_hand(store: Store, scene: Scene) -> None:
    with connect(store.database) as connection:
        rows = connection.execute(
            "SELECT model, topology, batch_size, micro_batches, best_predicted_strategy, best_predicted_s,"
            " predicted_speedup,"
            " best_measured_strategy, best_measured_median_s, measured_speedup, strategies FROM best_per_model"
        ).fetchall()
    best = samples.strategy(scene.graph_id, 2).digest
    assert rows == [("inception", "local", 8, 1, best, 1.0, 2.0, best, 0.8, 3.125, 4)]


def test_a_name_that_is_no_text_is_that_of_no_model(store: Store, scene: Scene) -> None:
    """Arguments of a command line are bytes."""
    assert compare(store.database, "\udcff").rows == ()
    assert compare(store.database, topology="\udcff").rows == ()
