"""The three orders of simulation: the kernels give exactly what the slow reference gives."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.calls import LocalCall
from graph.collectives import CollectiveKind
from graph.intervals import volume
from graph.plan import build_plan
from graph.training import Training
from search.cost.cost_table import CostTable, OperatorCost, Origin, UpdateCost
from search.cost.link_costs import LinkCosts
from search.kernels.records import ResourceSets
from search.orders import Order
from search.simulate.arrays import operator_values
from search.simulate.simulator import Simulation, simulate, simulate_tasks
from search.simulate.task_graph import TaskGraph, TaskKind
from search.space.baselines import data_parallel, single_device
from tests.reference import simulate as reference
from tests.search.builders import (
    MadeUpCosts,
    all_reduces,
    branches,
    cluster,
    devices,
    local_calls,
    random_mesh,
    two_layers,
)

DEVICES, LINKS = 3, 4
TRAINING = Training(8)


def flat(tasks: list[reference.Task], contention_ppm: list[int]) -> TaskGraph:
    """Return a task graph with one resource set a task, after those of the devices."""
    graph, topology = two_layers(), devices(DEVICES)
    resources = [(device,) for device in range(DEVICES)] + [task.resources for task in tasks]
    ends: list[tuple[int, ...]] = [()] * DEVICES + [task.ends for task in tasks]
    count = len(tasks)
    resource_set = [
        task.device if task.device is not None else DEVICES + place for place, task in enumerate(tasks)
    ]

    def pointers(rows: list[tuple[int, ...]]) -> np.ndarray:
        return np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)

    def items(rows: list[tuple[int, ...]]) -> np.ndarray:
        return np.array([item for row in rows for item in row], np.int64)

    zeros = np.zeros(count, np.int64)
    return TaskGraph(
        graph=graph,
        topology=topology,
        kind_T=zeros,
        run_ns_T=np.array([task.run_ns for task in tasks], np.int64),
        resource_set_T=np.array(resource_set, np.int64),
        origin_T=zeros,
        subject_T=zeros,
        part_T=zeros,
        size_bytes_T=zeros,
        launch_ns_T=np.array([task.launch_ns for task in tasks], np.int64),
        pred_ptr_T1=pointers([task.predecessors for task in tasks]),
        pred_E=items([task.predecessors for task in tasks]),
        contention_ppm_D=np.array(contention_ppm, np.int64),
        peak_memory_D=np.zeros(DEVICES, np.int64),
        resource_sets=ResourceSets(
            pointers(resources),
            items(resources),
            pointers(ends),
            items(ends),
            np.zeros((len(resources), 2)),
            np.zeros((len(resources), 2)),
            np.zeros((len(resources), 2), np.int64),
            np.zeros(len(resources), np.int64),
            np.full(len(resources), -1, np.int64),
            np.array([1] * DEVICES + [task.flows for task in tasks], np.int64),
            np.zeros((0, 3)),
            np.zeros(len(resources), np.int64),
        ),
    )


@st.composite
def task_lists(draw: st.DrawFn) -> list[reference.Task]:
    """Random tasks: dependencies point backwards, durations collide often, transfers hold several links."""
    tasks: list[reference.Task] = []
    launches = draw(st.booleans())
    for place in range(draw(st.integers(1, 40))):
        earlier = st.integers(max(0, place - 8), place - 1) if place else st.nothing()
        predecessors = tuple(draw(st.sets(earlier, max_size=3))) if place else ()
        run_ns, launch_ns = draw(st.integers(0, 9)), draw(st.integers(0, 9)) if launches else 0
        if draw(st.booleans()):
            device = draw(st.integers(0, DEVICES - 1))
            tasks.append(reference.Task(run_ns, predecessors, (device,), device, launch_ns=launch_ns))
        else:
            links = draw(st.sets(st.integers(DEVICES, DEVICES + LINKS - 1), min_size=1, max_size=3))
            ends = draw(st.sets(st.integers(0, DEVICES - 1), min_size=2, max_size=3))
            flows = draw(st.integers(1, 2))
            tasks.append(
                reference.Task(run_ns, predecessors, tuple(links), None, tuple(ends), flows, launch_ns)
            )
    return tasks


ORDERS: dict[Order, Callable[[list[reference.Task], list[int]], list[tuple[int, int]]]] = {
    "program": reference.program_order,
    "fifo": reference.fifo_order,
}


def by_priority(tasks: list[reference.Task], contention_ppm: list[int], numbers: list[int]) -> Simulation:
    return simulate_tasks(flat(tasks, contention_ppm), "priority", priority_T=np.array(numbers, np.int64))


@pytest.mark.parametrize("order", ORDERS)
@given(
    tasks=task_lists(),
    contention_ppm=st.lists(st.sampled_from([0, 300_000, 1_000_000, 1_750_001]), min_size=3, max_size=3),
)
def test_kernel_equals_reference(
    order: Order, tasks: list[reference.Task], contention_ppm: list[int]
) -> None:
    simulation = simulate_tasks(flat(tasks, contention_ppm), order)
    expected = ORDERS[order](tasks, contention_ppm)
    found = list(zip(simulation.start_ns.tolist(), simulation.end_ns.tolist(), strict=True))
    assert found == expected
    assert simulation.step_time_ns == max(end for _, end in expected)


@given(
    tasks=task_lists(),
    contention_ppm=st.lists(st.sampled_from([0, 300_000, 1_000_000, 1_750_001]), min_size=3, max_size=3),
    data=st.data(),
)
def test_kernel_equals_reference_by_priority(
    tasks: list[reference.Task], contention_ppm: list[int], data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, 5), min_size=len(tasks), max_size=len(tasks)))
    simulation = by_priority(tasks, contention_ppm, numbers)
    expected = reference.priority_order(tasks, contention_ppm, numbers)
    found = list(zip(simulation.start_ns.tolist(), simulation.end_ns.tolist(), strict=True))
    assert found == expected
    assert simulation.step_time_ns == max(end for _, end in expected)


@given(tasks=task_lists())
def test_priority_by_time_of_readiness_is_fifo(tasks: list[reference.Task]) -> None:
    # Of tasks that take time, and where communication slows nothing: a debt is due when a transfer starts, in fifo
    # order already when it is ready.
    tasks = [replace(task, run_ns=task.run_ns + 1) for task in tasks]
    times = reference.fifo_order(tasks, [0] * DEVICES)
    numbers = [
        max([launched_ns, *(times[p][1] for p in task.predecessors)])
        for task, launched_ns in zip(tasks, reference.launched(tasks), strict=True)
    ]
    simulation = by_priority(tasks, [0] * DEVICES, numbers)
    assert list(zip(simulation.start_ns.tolist(), simulation.end_ns.tolist(), strict=True)) == times


@pytest.mark.parametrize("order", ["program", "fifo", "priority"])
@given(tasks=task_lists())
def test_critical_path_has_no_gap(order: Order, tasks: list[reference.Task]) -> None:
    if order == "priority":
        simulation = by_priority(tasks, [500_000] * DEVICES, [7 * place % 5 for place in range(len(tasks))])
    else:
        simulation = simulate_tasks(flat(tasks, [500_000] * DEVICES), order)
    path = simulation.critical_path
    assert simulation.end_ns[path[-1]] == simulation.step_time_ns
    # Before it there is its host alone, which had issued nothing sooner.
    assert simulation.start_ns[path[0]] == simulation.tasks.launched_ns_T[path[0]]
    for before, after in itertools.pairwise(path):
        assert simulation.end_ns[before] == simulation.start_ns[after]


def compute(run_ns: int, device: int, *predecessors: int) -> reference.Task:
    return reference.Task(run_ns, predecessors, (device,), device)


def transfer(run_ns: int, *predecessors: int) -> reference.Task:
    return reference.Task(run_ns, predecessors, (DEVICES,), None, (0, 1))


def test_orders_differ_where_program_order_waits() -> None:
    # Task 2 stands before task 3 on device 1, but is ready only after the long task 0.
    tasks = [compute(100, 0), transfer(10, 0), compute(5, 1, 1), compute(7, 1)]
    program = simulate_tasks(flat(tasks, [0] * 3), "program")
    fifo = simulate_tasks(flat(tasks, [0] * 3), "fifo")
    assert program.start_ns.tolist() == [0, 100, 110, 115]
    assert fifo.start_ns.tolist() == [0, 100, 110, 0]


def test_communication_slows_the_compute_beside_it() -> None:
    # Transfer of 10 from 0; device 1 computes 20 at the same time and owes half of 10.
    tasks = [compute(0, 0), transfer(10, 0), compute(20, 1), compute(20, 1)]
    simulation = simulate_tasks(flat(tasks, [500_000] * 3))
    assert simulation.end_ns.tolist() == [0, 10, 25, 45]


def test_compute_that_waits_for_the_transfer_is_not_slowed() -> None:
    tasks = [compute(0, 0), transfer(10, 0), compute(20, 1, 1)]
    assert simulate_tasks(flat(tasks, [1_000_000] * 3)).end_ns.tolist() == [0, 10, 30]


def step(count: int, *, data: bool, memory_bytes: int = 1 << 40) -> Simulation:
    graph = two_layers()
    strategy = data_parallel(graph, count) if data else single_device(graph)
    return simulate(
        graph,
        strategy,
        devices(count, memory_bytes=memory_bytes),
        CostTable(MadeUpCosts()),
        TRAINING,
        local_calls=local_calls,
    )


class HalfSpeed(MadeUpCosts):
    """The costs of calls and updates twice as long."""

    def _cost(self, call: LocalCall, kind_name: str) -> OperatorCost:
        cost = super()._cost(call, kind_name)
        return replace(cost, forward_s=2 * cost.forward_s, backward_s=2 * cost.backward_s)

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        cost = super().update_cost(optimizer, dtype, kind_name)
        return cost._replace(seconds=2 * cost.seconds)


@pytest.mark.parametrize("order", ["program", "fifo", "priority"])
@pytest.mark.parametrize("seed", range(4))
def test_at_half_the_speed_a_step_is_that_of_costs_twice_as_long(order: Order, seed: int) -> None:
    graph, topology = branches(), devices(3, contention=0.5)
    strategy = random_mesh(graph, 3, np.random.default_rng(seed))

    def simulated(costs: MadeUpCosts) -> Simulation:
        return simulate(
            graph, strategy, topology, CostTable(costs), TRAINING, order=order, local_calls=local_calls
        )

    usual, slow = simulated(MadeUpCosts()), simulated(HalfSpeed())
    assert usual.at_speed(0.5).end_ns.tolist() == slow.end_ns.tolist()
    assert usual.step_time_ns < slow.step_time_ns <= 2 * usual.step_time_ns
    assert usual.at_speed(1.0).step_time_ns == usual.step_time_ns


def test_what_only_waits_for_a_wire_takes_as_long_at_any_speed() -> None:
    computation, message = compute(10, 0), transfer(1_000, 0)
    tasks = replace(
        flat([computation, message], [0] * 3), kind_T=np.array([TaskKind.FORWARD, TaskKind.TRANSFER])
    )
    simulation = simulate_tasks(tasks)
    assert [simulation.at_speed(speed).step_time_ns for speed in (0.5, 1.0, 2.0)] == [1_020, 1_010, 1_005]


def test_one_device_takes_the_sum_of_its_costs() -> None:
    simulation = step(1, data=False)
    assert simulation.compute_s == (simulation.step_time_s,)
    assert simulation.bytes_moved == 0
    assert simulation.step_time_ns == int(simulation.tasks.run_ns_T.sum())


def test_data_parallel_moves_gradients_and_partial_losses() -> None:
    simulation = step(2, data=True)
    weights_bytes = 2 * 16 * 16 * 4
    # Sum and count of the loss go to device 0; only the sum's gradient comes back if the count has one too.
    partial = simulation.bytes_moved - 2 * weights_bytes
    assert partial == 4 * 4
    assert sum(simulation.shares.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in simulation.shares.values())


def test_collectives_move_what_their_algorithms_send() -> None:
    """Two all-reduces of a weight send 2 (p - 1) bytes a byte, the reduce and broadcast of two scalars p - 1."""
    simulation = step(4, data=True)
    weights_bytes = 2 * 16 * 16 * 4
    assert simulation.bytes_moved == 2 * 3 * weights_bytes + 2 * 2 * 3 * 4


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 6, 7])
def test_collectives_but_all_reduces_send_what_messages_would(seed: int) -> None:
    graph, topology = branches(), cluster()
    strategy = random_mesh(graph, 8, np.random.default_rng(seed))
    simulation = simulate(
        graph, strategy, topology, CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls
    )
    tasks = simulation.tasks
    plan = build_plan(graph, strategy, [device.node for device in topology.devices])
    collectives = np.flatnonzero(tasks.kind_T == TaskKind.COLLECTIVE).tolist()
    assert len(collectives) == sum(len(found) for found in plan.collectives.values()) > 0
    for task in collectives:
        value = operator_values(graph)[int(tasks.subject_T[task])]
        collective = plan.collectives[value.name][int(tasks.part_T[task])]
        pieces = [
            piece
            for number in collective.assemblies
            for piece in plan.exchanges[value.name][number].remote_pieces
        ]
        messages = sum(volume(piece.region) * value.spec.item_bytes for piece in pieces)
        if collective.kind is CollectiveKind.ALL_REDUCE:
            messages = 2 * messages // len(collective.devices)
        assert simulation.sent_bytes(task) == messages, collective


def test_shares_are_all_there() -> None:
    assert set(step(1, data=False).shares) == set(Origin)


def test_memory_beyond_a_device_is_infeasible() -> None:
    weights_bytes = 2 * 16 * 16 * 4
    state = 2 * weights_bytes + 8 * 16 * 4  # weights, gradients, input
    # The relu's output, the softmax of the second layer's, and the parts of the loss.
    activations = 2 * 8 * 16 * 4 + 2 * 4
    assert step(1, data=False).peak_memory_bytes == (state + activations,)
    assert step(1, data=False, memory_bytes=state + activations).feasible
    small = step(1, data=False, memory_bytes=state + activations - 1)
    assert small.infeasible_devices == (0,)
    assert not small.feasible


def test_measured_all_reduce_takes_precedence() -> None:
    graph, topology = two_layers(), cluster()
    strategy = data_parallel(graph, 8)
    slow = all_reduces({8: (1.0, 0.0)})

    def simulated(links: LinkCosts | None) -> Simulation:
        return simulate(
            graph,
            strategy,
            topology,
            CostTable(MadeUpCosts()),
            TRAINING,
            links=links,
            local_calls=local_calls,
        )

    assert simulated(slow).step_time_s > 1.0 > simulated(None).step_time_s
