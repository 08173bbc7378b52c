"""Steps in micro-batches, compared with a slow reference that goes through the plan's units."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from graph.axes import Axis, AxisKind, along
from graph.errors import StrategyError
from graph.operator_ranges import OperatorRange
from graph.operators import OperatorGraph, ValueKind
from graph.schedule import GradientSums, MicroBatches, Schedule, stages_of
from graph.strategy import Configuration, Sharding, Strategy, with_whole_weights
from graph.topology import Topology
from search.algorithms.best_tracker import BestTracker
from search.cost.cost_table import CostTable
from search.evaluate.evaluator import evaluation
from search.orders import ORDERS, Order
from search.outcome import NEVER_NS
from search.problem import Problem
from search.simulate.micro_batches import pipeline_of, unrolled
from search.simulate.simulator import simulate_tasks
from search.simulate.task_graph import COMPUTE_KINDS, TaskGraph, TaskGraphBuilder, TaskKind
from search.space.baselines import data_parallel, zero
from tests.reference import policies
from tests.reference import simulate as reference
from tests.reference.micro_batches import StepDeriver
from tests.reference.taskgraph import Deriver
from tests.search.builders import (
    ISSUED,
    GraphBuilder,
    LaunchedCosts,
    branches,
    cluster,
    devices,
    joined,
    local_calls,
    random_anywhere,
    two_layers,
)
from tests.search.builders import (
    unrolled as unrolled_layers,
)
from tests.search.chains import chain
from tests.search.test_delta import BUCKET_BYTES, TRAINING, builder_of
from tests.search.test_recomputation import random_groups

GPIPE, IN_TURN, INTERLEAVED, ZERO_BUBBLE, ACTORS = Schedule


def random_stages(
    graph: OperatorGraph, device_count: int, rng: np.random.Generator, schedule: Schedule
) -> Strategy:
    """Return a strategy of runs of operators on groups of devices of their own, split at random within them."""
    groups = int(rng.integers(1, min(3, device_count) + 1))
    of_loss = graph.order.of_loss
    chunks = int(rng.integers(1, 3)) if schedule is INTERLEAVED and 2 * groups <= len(of_loss) else 1
    runs = groups * chunks
    cuts = sorted(rng.choice(np.array(of_loss[1:]), runs - 1, replace=False).tolist())
    order = rng.permutation(device_count)
    bounds = [0, *sorted(rng.choice(np.arange(1, device_count), groups - 1, replace=False).tolist())]
    members = [part.tolist() for part in np.split(order, bounds[1:])]
    configurations = []
    for index, operator in enumerate(graph.operators):
        own = members[sum(cut <= index for cut in cuts) % groups]
        axes, degrees = operator.space.axes, [1] * len(operator.space.axes)
        first = index in (of_loss[0], *cuts)
        if schedule is INTERLEAVED and first:
            # All devices of the group, so that it is the same in all of its runs.
            degrees[-1] = len(own)
        else:
            for _ in range(int(rng.integers(0, 3))):
                axis = int(rng.integers(len(axes)))
                room = len(own) // int(np.prod(degrees))
                degrees[axis] = max(1, min(axes[axis].size, room, int(rng.choice([2, 3, room]))))
        placed = tuple(own[task % len(own)] for task in range(int(np.prod(degrees))))
        configurations.append(Configuration(tuple(degrees), placed))
    rounds = int(rng.integers(1 + (groups == 1), 4))
    count = groups * rounds if schedule is INTERLEAVED else int(rng.integers(2, 6))
    micro_batches = MicroBatches(count, schedule)
    if schedule is ACTORS and rng.random() < 0.5:
        stages = len(stages_of(graph, configurations, schedule))
        micro_batches = replace(micro_batches, credits=tuple(rng.integers(1, 5, stages).tolist()))
    return Strategy(graph.digest, tuple(configurations), micro_batches=micro_batches)


def varied(strategy: Strategy, graph: OperatorGraph, rng: np.random.Generator) -> Strategy:
    """Return a strategy with weights shared, groups made again, gradients summed in each, now and then."""
    if rng.random() < 0.5:
        levels = [tuple(Sharding)[rng.integers(3)] for _ in graph.weights]
        strategy = replace(strategy, sharding=tuple(levels))
    if rng.random() < 0.5:
        strategy = replace(strategy, recomputation=random_groups(graph, rng))
    if rng.random() < 0.5:
        each = replace(strategy.micro_batches, gradients=GradientSums.EACH)
        strategy = replace(strategy, micro_batches=each)
    return with_whole_weights(graph, strategy)


def counted() -> OperatorGraph:
    """Return a graph in which two operators that renew buffers, one of each, read both of them."""
    builder = GraphBuilder()
    samples, features = 12, 8
    x = builder.linear("first", builder.value("input.0", (samples, features), ValueKind.INPUT), features)
    both = (along(0, samples), along(1, features))
    line = (along(0, features),)
    axes = (Axis("sample", samples, AxisKind.SAMPLE), Axis("channel", features, AxisKind.PARAMETER))
    builder.operator(
        "sum",
        "aten.sum.dim_IntList",
        (x,),
        [("sum", (features,))],
        axes,
        [both],
        [(along(1, features),)],
    )
    buffers = [builder.value(f"buffer{number}", (features,), ValueKind.BUFFER) for number in range(2)]
    for number, buffer in enumerate(buffers):
        builder.operator(
            f"renewed{number}",
            "aten.add.Tensor",
            ("sum", *buffers),
            [(f"renewed{number}", (features,))],
            (Axis("channel", features, AxisKind.PARAMETER),),
            [line] * 3,
            [line],
            differentiable=False,
        )
        builder.buffer_updates.append((buffer, f"renewed{number}"))
    builder.loss(builder.linear("last", builder.pointwise("relu", x), 5))
    return builder.finish()


GRAPHS = {"two_layers": two_layers(), "branches": branches(), "joined": joined(), "shared": unrolled_layers()}
TOPOLOGIES = {"one node": devices(4, contention=0.5), "two nodes": cluster()}


def strategies_of(graph: OperatorGraph, count: int, seed: int, times: int) -> list[Strategy]:
    rng = np.random.default_rng(seed)
    found = []
    for schedule in list(Schedule) * times:
        found.append(varied(random_stages(graph, count, rng, schedule), graph, rng))
        found[-1].validate(graph, count)
    # One stage of everything, or of most.
    anywhere = replace(random_anywhere(graph, count, rng), micro_batches=MicroBatches(3, GPIPE))
    return [*found, varied(anywhere, graph, rng)]


def step_deriver(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> StepDeriver:
    return StepDeriver(
        Deriver(graph, strategy, topology, LaunchedCosts(), TRAINING, local_calls, BUCKET_BYTES, ISSUED)
    )


def reference_times(tasks: TaskGraph, listed: list[reference.Task], order: Order) -> list[tuple[int, int]]:
    contention_ppm = tasks.contention_ppm_D.tolist()
    if order == "priority":
        return reference.priority_order(listed, contention_ppm, policies.layer(tasks))
    simulated = {"program": reference.program_order, "fifo": reference.fifo_order}[order]
    return simulated(listed, contention_ppm)


def all_waits(waits: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each task, all that it waits for, directly or by way of others, as the bits of a number."""
    found: list[int] = []
    for before in waits:
        mask = 0
        for task in before:
            mask |= found[task] | 1 << task
        found.append(mask)
    return found


def check_step(builder: TaskGraphBuilder, strategy: Strategy) -> TaskGraph:
    """Tasks, what they wait for, times in three orders, and peaks are those of the slow reference."""
    tasks, step = builder.build(strategy), step_deriver(builder.graph, strategy, builder.topology)
    if strategy.micro_batches.schedule is ACTORS and builder.topology.acts:
        layout = builder.layout(strategy)
        once, sets = layout.assemble()
        flows = sets.flows[once.resource_set[: layout.task_count]]
        step.act(flows.tolist(), builder.contention_ppm_D.tolist())
    expected = step.derive()
    assert tasks.run_ns_T.tolist() == [found.task.run_ns for found in expected]
    assert [tasks.resources(task) for task in range(tasks.task_count)] == [
        found.task.resources for found in expected
    ]
    place = {found.key: number for number, found in enumerate(expected)}
    preds = np.split(tasks.pred_E, tasks.pred_ptr_T1[1:-1])
    assert all_waits([before.tolist() for before in preds]) == all_waits(
        [[place[key] for key in found.predecessors] for found in expected]
    )
    listed = step.simulated(tasks.resource_sets.flows[tasks.resource_set_T].tolist())
    assert tasks.launched_ns_T.tolist() == reference.launched(listed)
    for order in ("program", "fifo", "priority"):
        simulation = simulate_tasks(tasks, order)
        found_times = list(zip(simulation.start_ns.tolist(), simulation.end_ns.tolist(), strict=True))
        assert found_times == reference_times(tasks, listed, order)
    assert tasks.peak_memory_D.tolist() == step.peak_memory()
    return tasks


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_steps_are_those_of_the_slow_reference(graph: OperatorGraph, topology: Topology) -> None:
    builder = builder_of(graph, topology, LaunchedCosts())
    for strategy in strategies_of(graph, len(topology.devices), 7, 3):
        check_step(builder, strategy)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_peaks_of_groups_in_stages_of_the_same_devices_are_those_of_the_slow_reference(
    graph: OperatorGraph,
) -> None:
    topology, rng = TOPOLOGIES["one node"], np.random.default_rng(31)
    builder = builder_of(graph, topology)
    for _ in range(30):
        strategy = replace(random_stages(graph, 4, rng, INTERLEAVED), recomputation=random_groups(graph, rng))
        step = step_deriver(graph, strategy, topology)
        assert builder.build(strategy).peak_memory_D.tolist() == step.peak_memory()


def test_a_backward_waits_for_shared_sums_of_another_stage_that_stand_before_it() -> None:
    """Two layers a stage, two stages a group: after the sums of the later stage comes an earlier micro-batch."""
    graph = chain([16] * 9)
    stages = [number // 2 % 2 for number in range(8)] + [1, 1]
    configurations = tuple(
        Configuration((1,) * (len(operator.space.axes) - 1) + (2,), (2 * stage, 2 * stage + 1))
        for operator, stage in zip(graph.operators, stages, strict=True)
    )
    strategy = Strategy(
        graph.digest,
        configurations,
        sharding=(Sharding.OPTIMIZER,) * len(graph.weights),
        micro_batches=MicroBatches(4, INTERLEAVED),
    )
    tasks = check_step(builder_of(graph, TOPOLOGIES["one node"], LaunchedCosts()), strategy)
    assert tasks.micro_batch_T is not None
    waiting_E = np.repeat(np.arange(tasks.task_count), np.diff(tasks.pred_ptr_T1))
    earlier = (tasks.kind_T == TaskKind.BACKWARD) & (tasks.micro_batch_T < 3)
    assert (tasks.kind_T[tasks.pred_E[earlier[waiting_E]]] == TaskKind.SYNCHRONIZE).any()


def test_what_renews_buffers_waits_for_the_micro_batch_before() -> None:
    graph, topology = counted(), TOPOLOGIES["one node"]
    builder, rng = builder_of(graph, topology, LaunchedCosts()), np.random.default_rng(17)
    renewed = 0
    for schedule in list(Schedule) * 4:
        strategy = random_stages(graph, 4, rng, schedule)
        tasks = check_step(builder, strategy)
        renewed += int(np.isin(tasks.kind_T, (TaskKind.BUFFER_TRANSFER, TaskKind.BUFFER_COLLECTIVE)).sum())
    assert renewed


def test_strategies_of_the_slow_reference_have_stages_chunks_shares_and_groups() -> None:
    drawn = [
        (strategy, step_deriver(graph, strategy, topology).plan)
        for graph in GRAPHS.values()
        for topology in TOPOLOGIES.values()
        for strategy in strategies_of(graph, len(topology.devices), 7, 3)
    ]
    groups = {
        (strategy.micro_batches.schedule, len(plan.stages), 1 + max(stage.group for stage in plan.stages))
        for strategy, plan in drawn
    }
    assert {(GPIPE, 3, 3), (IN_TURN, 3, 3), (INTERLEAVED, 4, 2), (INTERLEAVED, 2, 2)} <= groups
    assert any(strategy.recomputation and len(plan.stages) > 1 for strategy, plan in drawn)
    each = {
        (strategy.micro_batches.schedule, bucket.sharding)
        for strategy, plan in drawn
        for bucket, is_each in zip(plan.buckets, plan.summed_each, strict=True)
        if is_each
    }
    assert len(each) > 7
    assert any(
        len(set(plan.summed_each)) == 2 for strategy, plan in drawn if strategy.micro_batches.sums_each
    )
    for sharding in (Sharding.OPTIMIZER, Sharding.PARAMETERS):
        assert any(
            bucket.sharding is sharding
            for strategy, plan in drawn
            if len(plan.stages) > 1
            for bucket in plan.buckets
        )
    gathering = [(strategy.micro_batches, plan) for strategy, plan in drawn if plan.forward_gathers]
    assert {micro_batches.schedule for micro_batches, _ in gathering} == {*Schedule} - {ZERO_BUBBLE}
    assert {micro_batches.gradients for micro_batches, _ in gathering} == {*GradientSums}
    assert {len(plan.stages) > 1 for _, plan in gathering if len(plan.forward_gathers) > 1} == {False, True}


@pytest.mark.parametrize("order", ORDERS)
def test_every_device_keeps_to_its_schedule_in_every_order(order: Order) -> None:
    graph, topology = GRAPHS["branches"], TOPOLOGIES["one node"]
    builder = builder_of(graph, topology, LaunchedCosts())
    for strategy in strategies_of(graph, len(topology.devices), 13, 1):
        simulation = simulate_tasks(builder.build(strategy), order)
        for device in range(len(topology.devices)):
            own = np.flatnonzero(simulation.tasks.resource_set_T == device)
            assert (np.diff(simulation.start_ns[own]) >= 0).all()


# ---- one stage, one micro-batch, layouts


@pytest.mark.parametrize("schedule", [GPIPE, IN_TURN])
def test_gradient_accumulation_computes_each_micro_batch_and_synchronizes_once(schedule: Schedule) -> None:
    graph, topology, count = GRAPHS["branches"], TOPOLOGIES["one node"], 5
    builder = builder_of(graph, topology)
    once = replace(zero(graph, 4), recomputation=(OperatorRange(2, 4),))
    one, step = (
        builder.build(strategy)
        for strategy in (once, replace(once, micro_batches=MicroBatches(count, schedule)))
    )
    for kind in TaskKind:
        times = 1 if kind in (TaskKind.SYNCHRONIZE, TaskKind.UPDATE, TaskKind.UPDATE_GATHER) else count
        in_one, in_step = (tasks.run_ns_T[tasks.kind_T == kind] for tasks in (one, step))
        assert len(in_step) == times * len(in_one), kind
        if kind is TaskKind.BACKWARD:
            # They also add to the gradients of other micro-batches.
            assert in_step.sum() > times * in_one.sum()
        else:
            assert in_step.sum() == times * in_one.sum(), kind
    assert (one.kind_T == TaskKind.SYNCHRONIZE).any()
    computed = np.isin(step.kind_T, COMPUTE_KINDS)
    assert simulate_tasks(step).busy_ns[computed].sum() >= step.run_ns_T[computed].sum()


def test_one_micro_batch_is_its_own_task_graph() -> None:
    graph, topology = GRAPHS["branches"], TOPOLOGIES["two nodes"]
    builder = builder_of(graph, topology, LaunchedCosts())
    for strategy in strategies_of(graph, len(topology.devices), 3, 2):
        layout = builder.layout(replace(strategy, micro_batches=MicroBatches(1)))
        once, micro_batch_T = layout.step()
        assert micro_batch_T is None
        pipeline = pipeline_of(graph, layout.configurations, MicroBatches(1), layout.groups.last_O)
        sets = builder.store.resource_sets.arrays()
        step = unrolled(once, sets, len(topology.devices), pipeline).tasks
        for name, column in once._asdict().items():
            if name not in ("pred_ptr", "pred"):
                assert getattr(step, name).tolist() == column.tolist(), name
        for task in range(len(once.kind)):
            before, after = (
                set(tasks.pred[tasks.pred_ptr[task] : tasks.pred_ptr[task + 1]].tolist())
                for tasks in (once, step)
            )
            assert before <= after


def test_every_proposal_of_a_layout_costs_what_its_step_does() -> None:
    graph, topology = GRAPHS["joined"], TOPOLOGIES["one node"]
    builder = builder_of(graph, topology)
    first, *others = strategies_of(graph, len(topology.devices), 11, 2)
    for order in ("program", "fifo"):
        costs = evaluation(builder.layout(first), order)
        for other in others:
            changed = dict(enumerate(other.configurations))
            found = costs.propose(changed, NEVER_NS)
            tasks = builder.build(first.with_configurations(other.configurations))
            over = np.maximum(tasks.peak_memory_D - builder.capacity_bytes_D, 0).sum()
            assert found is not None
            assert found.step_time_ns == simulate_tasks(tasks, order).step_time_ns
            assert found.excess_bytes == over
            costs.roll_back()


def test_best_tracker_simulates_strategies_of_any_micro_batches() -> None:
    graph, topology = GRAPHS["joined"], devices(4, memory_bytes=6_000)
    problem = Problem(graph, topology, CostTable(LaunchedCosts()), TRAINING, ISSUED, local_calls)
    best = BestTracker(problem, "program")
    for strategy in (data_parallel(graph, 4), *strategies_of(graph, 4, 5, 2), data_parallel(graph, 4)):
        best.take(strategy)
        tasks = best.builder.build(strategy)
        assert best.latest.step_time_ns == simulate_tasks(tasks).step_time_ns
        assert best.latest_peak_bytes_D.tolist() == tasks.peak_memory_D.tolist()


def test_stages_that_take_no_turns_are_refused() -> None:
    graph, topology = GRAPHS["two_layers"], TOPOLOGIES["one node"]
    interleaved = replace(data_parallel(graph, 2), micro_batches=MicroBatches(2, INTERLEAVED))
    layout = builder_of(graph, topology).layout(interleaved)
    # The stages behind and before it are both on the first group: the second one has no further turn.
    layout.change({1: Configuration((1,) * len(graph.operators[1].space.axes), (3,))})
    with pytest.raises(StrategyError, match="do not take turns"):
        layout.run("program")
