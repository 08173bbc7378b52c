"""Efficiency and potential of recorded steps: known ones, and those of a simulation whose timeline is recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.db.store import Store
from app.services.timeline.recorded_scheduling import (
    RecordedScheduling,
    recorded_scheduling,
    step_schedulings,
)
from app.services.timeline.store import Recording, read_recording, recording_path, write_recording
from app.services.timeline.timeline import Slice, StepTimeline, simulated_timeline, with_waits
from graph.errors import DamagedDataError
from graph.topology import Topology
from graph.training import Training
from runtime.observe.spans import MESSAGE, Label, Span, TimedCommunication
from search.cost.cost_table import CostTable
from search.orders import Order
from search.simulate.scheduling import Scheduling
from search.simulate.simulator import Simulation, simulate
from search.simulate.task_graph import COMPUTE_KINDS
from search.space.baselines import data_parallel, single_device
from tests.app.db import samples
from tests.app.db.samples import Scene
from tests.search.builders import (
    MadeUpCosts,
    branches,
    cluster,
    devices,
    joined,
    local_calls,
    random_anywhere,
    random_mesh,
    statistics,
    two_layers,
    unrolled,
)

GRAPHS = (two_layers, branches, joined, unrolled, statistics)


def work(start_ns: int, end_ns: int, kind: str = "forward") -> Slice:
    return Slice(kind, "fc", "fc", start_ns, end_ns)


def seen(operation: str, ranks: tuple[int, ...], start_ns: int, end_ns: int) -> TimedCommunication:
    return TimedCommunication(operation, ranks, "x", start_ns, end_ns)


def message(source: int, destination: int, start_ns: int, end_ns: int) -> dict[int, TimedCommunication]:
    """Return a message as its ends see it: the sender does not see its end."""
    ranks = (source, destination)
    return {
        source: seen(MESSAGE, ranks, start_ns, start_ns),
        destination: seen(MESSAGE, ranks, start_ns, end_ns),
    }


def step(
    step_ns: int, by_device: list[tuple[Slice, ...]], *communications: dict[int, TimedCommunication]
) -> StepTimeline:
    by_rank = tuple(
        tuple(by_end[rank] for by_end in communications if rank in by_end) for rank in range(len(by_device))
    )
    return StepTimeline(step_ns, tuple(by_device), communications=by_rank)


def found(recorded: StepTimeline, topology: Topology | None = None) -> Scheduling:
    (scheduling,) = step_schedulings([recorded], topology or devices(len(recorded.devices)))
    return scheduling


def test_two_branches_have_the_efficiency_of_their_order() -> None:
    """Device 1 sends what takes 3 and 1, device 0 computes 1 and 3 with it."""
    good = step(
        5,
        [(work(0, 1, "wait"), work(1, 4), work(4, 5)), ()],
        message(1, 0, 0, 1),
        message(1, 0, 1, 4),
    )
    bad = step(
        7,
        [(work(0, 3, "wait"), work(3, 4), work(4, 7)), ()],
        message(1, 0, 0, 3),
        message(1, 0, 3, 4),
    )
    for recorded, efficiency in ((good, 0.75), (bad, 0.25)):
        scheduling = found(recorded)
        assert (scheduling.busiest_ns, scheduling.total_ns) == (4, 8)
        assert scheduling.efficiency == efficiency
        assert scheduling.speedup_potential == 1


def test_a_collective_counts_once_and_from_its_last_start() -> None:
    both = {0: seen("all-reduce", (0, 1), 2, 9), 1: seen("all-reduce", (0, 1), 6, 10)}
    recorded = step(10, [(work(0, 2), work(2, 9, "wait")), (work(0, 6), work(6, 10, "wait"))], both)
    # 2 and 6 of computation, 4 of the sum, on both links at once.
    assert found(recorded) == Scheduling(10, 6, 12)


def test_the_nth_of_a_group_is_the_nth_on_all_its_ranks() -> None:
    pairs = ((0, 2), (3, 7))
    sums = [
        {0: seen("all-reduce", (0, 1), start, end), 1: seen("all-reduce", (0, 1), start, end)}
        for start, end in pairs
    ]
    assert found(step(7, [(work(0, 7),), (work(0, 7),)], *sums)) == Scheduling(7, 7, 14 + 2 + 4)


def test_what_is_under_way_on_one_link_at_once_does_not_count_twice() -> None:
    recorded = step(
        10,
        [(), (work(0, 1),)],
        message(0, 1, 0, 10),
        message(0, 1, 2, 4),  # ends while the first is under way
        message(0, 1, 5, 8),
        message(1, 0, 0, 10),  # the way back is a link of its own
    )
    assert found(recorded) == Scheduling(10, 10, 1 + 10 + 10)


def test_a_collective_waits_for_what_holds_any_of_its_links() -> None:
    both = {rank: seen("all-reduce", (0, 1), 1, 12) for rank in range(2)}
    recorded = step(12, [(), ()], message(0, 1, 0, 10), message(1, 0, 2, 4), both)
    assert found(recorded) == Scheduling(12, 10 + 2, 10 + 2 + 2)


def test_messages_share_what_their_routes_share() -> None:
    topology = cluster()
    pairs = [
        (first, second)
        for first in topology.routes
        for second in topology.routes
        if first != second and set(topology.routes[first]) & set(topology.routes[second])
    ]
    (first, second) = pairs[0]
    by_device: list[tuple[Slice, ...]] = [() for _ in topology.devices]
    recorded = step(6, by_device, message(*first, 0, 4), message(*second, 1, 6))
    assert found(recorded, topology) == Scheduling(6, 6, 6)


def test_one_device_alone_is_as_efficient_as_can_be() -> None:
    scheduling = found(step(3, [(work(0, 1), work(1, 3, "update"))]))
    assert (scheduling.efficiency, scheduling.speedup_potential) == (1, 0)


def test_time_in_which_nothing_runs_is_part_of_all_there_is() -> None:
    recorded = step(9, [(work(0, 2), work(2, 9, "wait")), (work(0, 9, "wait"),)])
    assert found(recorded) == Scheduling(9, 2, 9)
    assert found(recorded).efficiency == 0


def test_medians_are_over_the_recorded_steps() -> None:
    steps = (
        step(4, [(work(0, 4),), (work(0, 2),)]),
        step(6, [(work(0, 2), work(4, 6)), (work(2, 6),)]),
        step(6, [(work(0, 3),), (work(3, 6),)]),
    )
    one_by_one = [found(recorded) for recorded in steps]
    assert [item.efficiency for item in one_by_one] == [1, 0.5, 0]
    assert [item.speedup_potential for item in one_by_one] == [0.5, 1, 1]
    assert recorded_scheduling(Recording(1, steps), devices(2)) == RecordedScheduling(0.5, 1)


def as_recorded(simulation: Simulation, rng: np.random.Generator) -> StepTimeline:
    """Return a simulated step as ranks would record it: of a collective one rank is the last, others wait for it."""
    tasks, timeline = simulation.tasks, with_waits(simulation, simulated_timeline(simulation))
    by_rank: list[list[TimedCommunication]] = [[] for _ in timeline.devices]
    # Each rank has those of the same ranks in the order of their starts.
    for task in np.lexsort((simulation.end_ns, simulation.start_ns)).tolist():
        if tasks.kind_T[task] in COMPUTE_KINDS:
            continue
        ranks, operation = tasks.ends(task), tasks.operation(task)
        start_ns, end_ns = int(simulation.start_ns[task]), int(simulation.end_ns[task])
        last = int(rng.integers(len(ranks)))
        for place, rank in enumerate(ranks):
            own_ns = start_ns if operation is None or place == last else int(rng.integers(start_ns + 1))
            ends = operation is not None or place == 1
            by_rank[rank].append(seen(operation or MESSAGE, ranks, own_ns, end_ns if ends else own_ns))
    return StepTimeline(
        timeline.step_ns, timeline.devices, communications=tuple(tuple(items) for items in by_rank)
    )


@pytest.mark.parametrize("order", ["program", "fifo", "priority"])
@pytest.mark.parametrize("seed", range(30))
def test_a_recorded_simulation_is_as_efficient_as_the_simulation(seed: int, order: Order) -> None:
    rng = np.random.default_rng(seed)
    graph = GRAPHS[seed % len(GRAPHS)]()
    contention = float(rng.choice([0.0, 0.4]))
    topology = cluster() if rng.random() < 0.5 else devices(int(rng.integers(2, 5)), contention)
    count = len(topology.devices)
    strategies = (
        random_mesh(graph, count, rng),
        random_anywhere(graph, count, rng),
        data_parallel(graph, count),
        single_device(graph),
    )
    for strategy in strategies:
        costs = CostTable(MadeUpCosts(float(10 ** rng.uniform(-8, -5))))
        simulation = simulate(
            graph, strategy, topology, costs, Training(8), order=order, local_calls=local_calls
        )
        scheduling = found(as_recorded(simulation, rng), topology)
        assert scheduling == simulation.scheduling
        assert scheduling.efficiency == simulation.efficiency
        assert scheduling.speedup_potential == simulation.speedup_potential


SPANS = (Span(Label("forward", "fc", "forward fc[0]"), 0, 9),)
SEEN = (seen("all-reduce", (0, 1), 1, 5), seen(MESSAGE, (1, 0), 2, 7))


def stored_step(
    path: Path, communications: tuple[tuple[TimedCommunication, ...], ...]
) -> tuple[Store, Path, int]:
    store = Store.open(path)
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 1))
    execution = store.execution(store.start_execution(scene.execution(strategy)))
    write_recording(store, execution, ((SPANS, SPANS),), (communications,))
    return store, recording_path(store, execution), execution.id


def test_communications_are_read_as_they_were_written(tmp_path: Path) -> None:
    store, _, number = stored_step(tmp_path / "test.sqlite", (SEEN, SEEN[:1]))
    with store:
        (read,) = read_recording(store, store.execution(number)).steps
    assert read.communications == (SEEN, SEEN[:1])
    assert [len(slices) for slices in read.devices] == [1, 1]
    assert read.step_ns == 9


def test_a_recording_of_an_earlier_version_has_spans_alone(tmp_path: Path) -> None:
    from pyarrow import parquet

    store, path, number = stored_step(tmp_path / "test.sqlite", ((), ()))
    table = parquet.read_table(path)
    parquet.write_table(table.drop_columns(["operation", "ranks"]), path, write_page_checksum=True)
    with store:
        recording = read_recording(store, store.execution(number))
    assert recording.steps == (
        StepTimeline(9, ((Slice("forward", "fc", "forward fc[0]", 0, 9),),) * 2, communications=None),
    )
    assert recorded_scheduling(recording, devices(2)) is None


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (seen("all-reduce", (0, 2), 1, 5), "rank that has no step"),
        (seen("all-reduce", (-1, 0), 1, 5), "rank that has no step"),
        (seen(MESSAGE, (0, 1, 1), 1, 5), "'message' of 3 ranks"),
        (seen("sum of all", (0, 1), 1, 5), "'sum of all' of 2 ranks"),
    ],
)
def test_a_recording_that_no_run_leaves_is_damaged(
    tmp_path: Path, damaged: TimedCommunication, reason: str
) -> None:
    store, _, number = stored_step(tmp_path / "test.sqlite", ((damaged,), ()))
    with store, pytest.raises(DamagedDataError, match=reason):
        read_recording(store, store.execution(number))
