"""The steady state of p3: recurrences, a slow channel, and what a window of any strategy must hold."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from graph.collective_algorithms import BY_LIBRARY, read_algorithm
from graph.collectives import CollectiveKind
from graph.plan import build_plan
from graph.pulls import SliceStart, slice_starts
from graph.strategy import Sharding, Strategy
from graph.synchronization import Policy, Synchronization, p3, slice_bounds
from graph.training import Training
from search.cost.cost_table import CostTable
from search.cost.link_costs import Curve, LinkCosts
from search.simulate.simulator import Simulation, simulate, simulate_tasks
from search.simulate.steady_state import in_steady_state, pulls, slice_order
from search.simulate.task_graph import COMPUTE_KINDS, TaskGraph, TaskKind
from search.space.baselines import data_parallel, shared
from tests.search.builders import all_reduces, check_bounds, devices, local_calls, random_mesh
from tests.search.chains import UNIT_NS, LayerCosts, chain
from tests.search.test_delta import BUCKET_BYTES, GRAPHS, TOPOLOGIES, builder_of

# A unit of the paper's examples: 16 elements of float32 to send, or a millisecond to compute.
UNIT_BYTES = 64
SUM_S = 1e-3 / UNIT_BYTES
# Sums in two halves, and the parts of the loss go from device to device in no time.
LINKS = LinkCosts(
    {
        (CollectiveKind.ALL_REDUCE, 2): Curve.line(0.0, SUM_S),
        (CollectiveKind.REDUCE_SCATTER, 2): Curve.line(0.0, SUM_S / 2),
        (CollectiveKind.ALL_GATHER, 2): Curve.line(0.0, SUM_S / 2),
    },
    messages={(0, 1): Curve.line(0.0, 0.0), (1, 0): Curve.line(0.0, 0.0)},
)
TRAINING = Training(2, optimizer="sgd")


def step(
    widths: Sequence[int],
    f: Sequence[int],
    b: Sequence[int],
    synchronization: Synchronization,
    sharding: Sharding = Sharding.NONE,
    links: LinkCosts = LINKS,
) -> Simulation:
    """Return the step of data parallelism over two devices that communication does not slow.

    Layer i of the chain computes f[i] units forward and b[i] backward; layers are told apart by the sizes of their
    weights.
    """
    units = dict(zip(pairwise(widths), zip(f, b, strict=True), strict=True))
    graph = chain(widths)
    strategy = replace(shared(graph, data_parallel(graph, 2), sharding), synchronization=synchronization)
    costs = CostTable(LayerCosts(lambda call: units[call.inputs[1].shape[1], call.inputs[1].shape[0]]))
    return simulate(
        graph, strategy, devices(2, contention=0.0), costs, TRAINING, links=links, local_calls=local_calls
    )


def fifo_units(f: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
    """The specification's recurrence of whole layers in the order of the backward."""
    now = released = 0.0
    for layer in reversed(range(len(c))):
        released += b[layer]
        now = max(now, released) + c[layer]
    return now + sum(f)


def fluid_units(f: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
    """The specification's limit of p3: slices of no size, the lowest pending layer first."""
    left = list(c)
    now, layers = 0.0, len(c)
    for layer in reversed(range(layers)):
        # While this layer's backward runs, what is released already is sent.
        budget = b[layer]
        for other in range(layer + 1, layers):
            sent = min(left[other], budget)
            left[other] -= sent
            budget -= sent
        now += b[layer]
    finished = now
    for layer in range(layers):
        finished = max(finished, now + sum(left[: layer + 1])) + f[layer]
    return finished


def sliced_ns(f: Sequence[int], b: Sequence[int], slices_ns: Sequence[Sequence[int]]) -> int:
    """A slow channel: whenever it is free it takes a slice of the lowest layer that is released."""
    layers = len(f)
    released, now = [0] * layers, 0
    for layer in reversed(range(layers)):
        now += b[layer]
        released[layer] = now
    left = [list(of) for of in slices_ns]
    channel, done = 0, [0] * layers
    while any(left):
        ready = [layer for layer in range(layers) if left[layer] and released[layer] <= channel]
        if not ready:
            channel = min(released[layer] for layer in range(layers) if left[layer])
            continue
        channel += left[ready[0]].pop(0)
        done[ready[0]] = channel
    finished = now
    for layer in range(layers):
        finished = max(finished, done[layer]) + f[layer]
    return finished


ROWS = {
    "1, 1, 2 on 3 layers": ((4, 8, 4, 8), (1, 1, 2), 3, (10, 9, 8)),
    "1, 2, 3 on 4 layers": ((4, 12, 4, 12, 4), (1, 2, 3), 4, (18, 17, 15)),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_papers_small_cases(row: str) -> None:
    widths, (f, b, c), layers, (fifo, whole, fluid) = ROWS[row]
    times = [f] * layers, [b] * layers
    assert step(widths, *times, Synchronization(Policy.FIFO, 1)).step_time_ns == fifo * UNIT_NS
    assert step(widths, *times, p3(c * UNIT_BYTES)).step_time_ns == whole * UNIT_NS
    assert step(widths, *times, p3(UNIT_BYTES)).step_time_ns == fluid * UNIT_NS


def test_a_large_layer_behind_small_ones_is_sent_while_these_compute() -> None:
    widths, times = (4, 4, 4, 24), ([1] * 3, [1] * 3)
    assert step(widths, *times, Synchronization(Policy.FIFO, 1)).step_time_ns == 12 * UNIT_NS
    assert step(widths, *times, p3(UNIT_BYTES)).step_time_ns == 10 * UNIT_NS
    assert fifo_units(*times, (1, 1, 6)) == 12
    assert fluid_units(*times, (1, 1, 6)) == 10


@pytest.mark.parametrize("seed", range(12))
def test_chains_take_what_a_slow_channel_takes_and_near_the_limit_with_small_slices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 6))
    widths = rng.choice(np.arange(3, 40), layers + 1, replace=False).tolist()
    f, b = (rng.integers(0, 9, layers).tolist() for _ in range(2))
    elements = [inner * out for inner, out in pairwise(widths)]
    c = [4 * count / UNIT_BYTES for count in elements]
    fifo = step(widths, f, b, Synchronization(Policy.FIFO, 1))
    assert fifo.step_time_ns == pytest.approx(fifo_units(f, b, c) * UNIT_NS, abs=layers)
    least = 4 * min(elements)
    for size_bytes in (8, 64, least):
        # A slice larger than a layer would put several layers into a bucket.
        sliced = step(widths, f, b, p3(size_bytes)).step_time_ns
        slices_ns = []
        for count in elements:
            bounds = slice_bounds(4 * count, -(-4 * count // size_bytes))
            slices_ns.append([int((last - first) * 1e-3 / UNIT_BYTES * 1e9 + 0.5) for first, last in bounds])
        expected = sliced_ns([item * UNIT_NS for item in f], [item * UNIT_NS for item in b], slices_ns)
        assert sliced == expected
        slice_ns = size_bytes * UNIT_NS / UNIT_BYTES
        limit_ns = fluid_units(f, b, c) * UNIT_NS
        # Each layer may wait for one slice that is under way; and times are rounded, slice by slice.
        assert limit_ns - 1e4 <= sliced <= limit_ns + layers * slice_ns + 1e4
        assert sliced <= fifo_units(f, b, c) * UNIT_NS + slice_ns + 1e4


def test_a_slice_takes_what_sums_that_follow_each_other_were_measured_to_take() -> None:
    """By the algorithm that its size has; no more than it takes alone, and no less than its share of the whole sum."""
    widths, (f, b, _), layers, _ = ROWS["1, 1, 2 on 3 layers"]
    # A unit alone takes 1 ms, a layer's two units together 1.5.
    alone = replace(LINKS, by_size=all_reduces({2: (0.5e-3, 0.5e-3 / UNIT_BYTES)}).by_size)
    ring = read_algorithm("ring", 2)
    for successive, unit_ns in (
        ({BY_LIBRARY: Curve.line(0.8e-3, 0.0), ring: Curve.line(0.0, 0.0)}, 800_000),
        ({BY_LIBRARY: Curve.line(0.5e-3, 0.0)}, 750_000),
        ({BY_LIBRARY: Curve.line(2e-3, 0.0)}, 1_000_000),
        ({ring: Curve.line(0.5e-3, 0.0)}, 1_000_000),
    ):
        links = replace(alone, successive={(0, 1): successive})
        expected = sliced_ns([f * UNIT_NS] * layers, [b * UNIT_NS] * layers, [[unit_ns] * 2] * layers)
        of = step(widths, [f] * layers, [b] * layers, p3(UNIT_BYTES), links=links)
        assert of.step_time_ns == expected


Window = tuple[Strategy, TaskGraph, TaskGraph]


def windowed(name: str, topology_name: str, strategy: Strategy) -> Window:
    """Return a strategy, the task graph of one step, and the window."""
    builder = builder_of(GRAPHS[name], TOPOLOGIES[topology_name])
    tasks = builder.build(strategy)
    return strategy, tasks, in_steady_state(tasks, strategy, builder)


def window_of(name: str, topology_name: str, seed: int, size_bytes: int) -> Window:
    """Return the window of a random strategy of p3."""
    rng = np.random.default_rng(seed)
    mesh = random_mesh(GRAPHS[name], len(TOPOLOGIES[topology_name].devices), rng)
    return windowed(name, topology_name, replace(mesh, synchronization=p3(size_bytes)))


def pulled_window(name: str, topology_name: str, seed: int, size_bytes: int) -> Window:
    """Return the window of a random strategy of p3 that shares the updates of some weights."""
    graph, rng = GRAPHS[name], np.random.default_rng(seed)
    mesh = random_mesh(graph, len(TOPOLOGIES[topology_name].devices), rng)
    strategy = shared(graph, mesh, Sharding.OPTIMIZER)
    # Of every second strategy some weights are summed whole.
    levels = tuple(level if seed % 2 or rng.random() < 0.7 else Sharding.NONE for level in strategy.sharding)
    return windowed(name, topology_name, replace(strategy, sharding=levels, synchronization=p3(size_bytes)))


WINDOWS = {"whole updates": window_of, "shared updates": pulled_window}


def updates_ns(tasks: TaskGraph) -> np.ndarray:
    """Return how long each device updates weights."""
    updates = tasks.kind_T == TaskKind.UPDATE
    return np.bincount(tasks.resource_set_T[updates], tasks.run_ns_T[updates], minlength=9)


@pytest.mark.parametrize("updates", WINDOWS)
@pytest.mark.parametrize("topology_name", TOPOLOGIES)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_window_has_the_work_of_a_step_in_another_order(
    name: str, topology_name: str, updates: str
) -> None:
    for seed in range(4):
        strategy, step, window = WINDOWS[updates](name, topology_name, seed, BUCKET_BYTES)
        for kind in TaskKind:
            own, moved = (tasks.kind_T == kind for tasks in (step, window))
            if kind not in (TaskKind.SYNCHRONIZE, TaskKind.UPDATE, TaskKind.UPDATE_GATHER):
                assert sorted(step.run_ns_T[own]) == sorted(window.run_ns_T[moved])
            assert step.size_bytes_T[own].sum() == window.size_bytes_T[moved].sum()
        slices = window.kind_T == TaskKind.SYNCHRONIZE
        assert (window.size_bytes_T[slices] <= BUCKET_BYTES).all()
        own, moved = (updates_ns(tasks) for tasks in (step, window))
        units = len(strategy.configurations) + int(np.count_nonzero(window.kind_T == TaskKind.UPDATE_GATHER))
        assert np.abs(own - moved).max() <= units  # rounded once a unit
        check_bounds(window)


@pytest.mark.parametrize("name", GRAPHS)
def test_an_update_waits_for_its_slices_and_a_forward_for_the_updates_of_what_it_reads(name: str) -> None:
    strategy, _, window = window_of(name, "one node", 5, 40)
    plan = build_plan(GRAPHS[name], strategy, [0] * 3)
    simulation = simulate_tasks(window)
    ends: dict[tuple[int, int], int] = {}
    for task in range(window.task_count):
        kind, subject = TaskKind(int(window.kind_T[task])), int(window.subject_T[task])
        preds = window.pred_E[window.pred_ptr_T1[task] : window.pred_ptr_T1[task + 1]]
        assert all(simulation.end_ns[pred] <= simulation.start_ns[task] for pred in preds)
        if kind is TaskKind.UPDATE:
            kinds = {TaskKind(int(window.kind_T[pred])) for pred in preds}
            assert kinds <= {TaskKind.SYNCHRONIZE, *COMPUTE_KINDS}
            ends[subject, len(ends)] = int(simulation.end_ns[task])
    held = {device for of in plan.held.values() for device in of}
    if any(plan.updated_before.values()):
        assert {device for device, _ in ends} <= held


def test_all_slices_are_in_the_order_and_start_once_their_buckets_are_full() -> None:
    strategy, _, window = window_of("branches", "two nodes", 1, 40)
    order = slice_order(window)
    plan = build_plan(
        GRAPHS["branches"], strategy, [d.node for d in TOPOLOGIES["two nodes"].devices], slice_order=order
    )
    assert plan.slice_order == order
    started = [start for of in plan.starts for start in of]
    assert [start.bucket for start in started] == list(order)
    assert len(set(started)) == len(started) == sum(plan.slice_counts)
    for full, of in enumerate(plan.starts):
        assert all(start.bucket <= full for start in of)


def started(order: Sequence[int], buckets: int) -> list[list[tuple[int, int]]]:
    return [[(start.bucket, start.part) for start in of] for of in slice_starts(order, (), (), buckets)]


def test_slices_start_no_sooner_than_those_before_them() -> None:
    assert started([0, 0, 2, 1, 2], 3) == [[(0, 0), (0, 1)], [], [(2, 0), (1, 0), (2, 1)]]
    assert started([1, 0], 2) == [[], [(1, 0), (0, 0)]]


def test_an_order_of_other_slices_is_refused() -> None:
    graph = GRAPHS["two_layers"]
    strategy = replace(data_parallel(graph, 2), synchronization=p3(64))
    with pytest.raises(ValueError, match=r"^slice_order: is of 1 slices, must be of "):
        build_plan(graph, strategy, [0, 0], slice_order=(0,))


@pytest.mark.parametrize("size_bytes", [1024, 100_000])
def test_buckets_of_another_size_are_those_of_the_plan(size_bytes: int) -> None:
    graph = GRAPHS["branches"]
    strategy = replace(data_parallel(graph, 3), synchronization=Synchronization(Policy.FIFO, size_bytes // 8))
    _, tasks, window = windowed("branches", "one node", strategy)
    sums = tasks.size_bytes_T[tasks.kind_T == TaskKind.SYNCHRONIZE].tolist()
    assert sums == [bucket.size_bytes for bucket in build_plan(graph, strategy, [0] * 3).buckets]
    assert window is tasks


# ---- pulls of shared slices


def shared_step(widths: Sequence[int], f: Sequence[int], b: Sequence[int], size_bytes: int) -> Simulation:
    """Return a step of p3 with shared updates."""
    return step(widths, f, b, p3(size_bytes), Sharding.OPTIMIZER)


def gathers_ns(widths: Sequence[int], f: Sequence[int], b: Sequence[int], policy: Policy) -> int:
    """Return what a step takes that gathers shared updates, each weight in a bucket of its own."""
    return step(widths, f, b, Synchronization(policy, 1), Sharding.OPTIMIZER).step_time_ns


def unrolled_ns(simulation: Simulation, strategy: Strategy, f: Sequence[int], b: Sequence[int]) -> int:
    """Execute four steps one behind the other, instruction by instruction; return what the last one takes.

    From the end of a forward to that of the next, on devices that all do the same, beside one channel.
    """
    tasks = simulation.tasks
    plan = build_plan(tasks.graph, strategy, [0, 0], slice_order=slice_order(tasks), pulls=pulls(tasks))
    layers = [
        index
        for index, operator in enumerate(tasks.graph.operators)
        if operator.target.endswith("linear.default")
    ]
    compute = channel = 0
    ends: dict[SliceStart, int] = {}
    marks: list[int] = []

    def start(started: SliceStart) -> None:
        nonlocal compute, channel
        size_bytes = plan.buckets[started.bucket].size_bytes
        first, last = slice_bounds(size_bytes, plan.slice_counts[started.bucket])[started.part]
        if started.is_pull:
            compute = max(compute, ends[replace(started, is_pull=False)])
        channel = max(channel, compute) + int((last - first) * 0.5e-3 / UNIT_BYTES * 1e9 + 0.5)
        ends[started] = channel

    for step in range(4):
        for index in tasks.graph.order.of_loss:
            if step:
                for started in plan.starts_before(index):
                    start(started)
                for number in plan.pulls_awaited.get(index, ()):
                    for part in range(plan.slice_counts[number]):
                        compute = max(compute, ends[SliceStart(number, part, is_pull=True)])
            compute += f[layers.index(index)] * UNIT_NS if index in layers else 0
        marks.append(compute)
        for index in reversed(tasks.graph.order.of_loss):
            compute += b[layers.index(index)] * UNIT_NS if index in layers else 0
            for number in plan.buckets_after.get(index, ()):
                for started in plan.starts[number]:
                    start(started)
    return marks[-1] - marks[-2]


@pytest.mark.parametrize("row", ROWS)
def test_pushes_and_pulls_take_what_sums_take_in_the_papers_small_cases(row: str) -> None:
    """Each is half an all-reduce. A device updates between operators alone: a pull may wait for the end of one."""
    widths, (f, b, _), layers, (_, _, fluid) = ROWS[row]
    taken = shared_step(widths, [f] * layers, [b] * layers, UNIT_BYTES // 4).step_time_ns
    assert fluid * UNIT_NS <= taken <= (fluid + 0.5) * UNIT_NS
    assert taken <= gathers_ns(widths, [f] * layers, [b] * layers, Policy.TIC)


def test_a_large_layer_behind_small_ones_is_pushed_and_pulled_while_these_compute() -> None:
    simulation = shared_step((4, 4, 4, 24), [1] * 3, [1] * 3, UNIT_BYTES)
    assert simulation.step_time_ns == 10 * UNIT_NS
    # Sums of the large layer go behind the pulls of the small ones.
    assert min(pull.sums for pull in pulls(simulation.tasks)) < len(slice_order(simulation.tasks))


@pytest.mark.parametrize("seed", range(12))
def test_the_steady_state_of_pulls_is_the_difference_of_unrolled_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(2, 6))
    # Even widths: the two shares of a weight are equal.
    widths = (2 * rng.choice(np.arange(2, 24), layers + 1, replace=False)).tolist()
    f, b = (rng.integers(0, 9, layers).tolist() for _ in range(2))
    c = [4 * inner * out / UNIT_BYTES for inner, out in pairwise(widths)]
    for size_bytes in (64, 256, 4096):
        simulation = shared_step(widths, f, b, size_bytes)
        graph = simulation.tasks.graph
        strategy = replace(
            shared(graph, data_parallel(graph, 2), Sharding.OPTIMIZER), synchronization=p3(size_bytes)
        )
        assert simulation.step_time_ns == unrolled_ns(simulation, strategy, f, b)
        assert simulation.step_time_ns >= fluid_units(f, b, c) * UNIT_NS - 1e5
        if size_bytes == 64:
            # All sums before all updates, and gathers behind them.
            assert simulation.step_time_ns <= (fifo_units(f, b, c) + max(*f, *b)) * UNIT_NS + 1e5


@pytest.mark.parametrize("topology_name", TOPOLOGIES)
@pytest.mark.parametrize("name", GRAPHS)
def test_pulls_are_in_the_order_of_the_window_and_forwards_wait_for_them(
    name: str, topology_name: str
) -> None:
    graph, nodes = GRAPHS[name], [device.node for device in TOPOLOGIES[topology_name].devices]
    for seed in range(6):
        strategy, _, window = pulled_window(name, topology_name, seed, 40)
        order, pulled = slice_order(window), pulls(window)
        plan = build_plan(graph, strategy, nodes, slice_order=order, pulls=pulled)
        simulation = simulate_tasks(window)
        both = np.flatnonzero(np.isin(window.kind_T, (TaskKind.SYNCHRONIZE, TaskKind.UPDATE_GATHER)))
        is_pull = window.kind_T[both] == TaskKind.UPDATE_GATHER
        columns = window.subject_T[both].tolist(), window.part_T[both].tolist(), is_pull.tolist()
        assert [start for of in plan.starts for start in of] == [
            SliceStart(*of_start) for of_start in zip(*columns, strict=True)
        ]
        # Bytes are those of the buckets, once pushed and once pulled.
        for number, bucket in enumerate(plan.buckets):
            own = window.subject_T[both] == number
            assert window.size_bytes_T[both[own & ~is_pull]].sum() == bucket.size_bytes
            shares_update = bucket.sharding is Sharding.OPTIMIZER
            assert window.size_bytes_T[both[own & is_pull]].sum() == shares_update * bucket.size_bytes
        ends_ns = simulation.end_ns[both[is_pull]].tolist()
        for task in np.flatnonzero(window.kind_T == TaskKind.FORWARD).tolist():
            operator, device = int(window.subject_T[task]), int(window.resource_set_T[task])
            for pull, end_ns in zip(pulled, ends_ns, strict=True):
                bucket = plan.buckets[pull.bucket]
                reads = any(entry.weight in graph.operators[operator].inputs for entry in bucket.entries)
                if reads and device in bucket.devices and operator in graph.order.of_loss:
                    assert simulation.start_ns[task] >= end_ns
