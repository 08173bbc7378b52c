"""Steps in micro-batches, by every schedule and any stages: loss, gradients and weights of the plain module."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from graph.errors import RuntimeFailure, StrategyError
from graph.operator_ranges import OperatorRange
from graph.operators import OperatorGraph
from graph.plan import build_plan
from graph.schedule import ONE_BATCH, GradientSums, MicroBatches, Schedule, group_orders, stages_of
from graph.strategy import Configuration, Sharding, Strategy, never_in_shares, with_whole_weights
from graph.training import Training
from runtime.instructions.sharded_weights import StartAllGather, StartReduceScatter
from runtime.jobs.job import Job
from runtime.jobs.models import split_batch
from runtime.lowering.loss_count import counted_loss
from runtime.lowering.program import compile_program
from search.cost.cost_table import CostTable
from search.simulate.task_graph import TaskGraphBuilder, TaskKind
from search.space.baselines import fsdp
from tests.quick import few, seeds
from tests.runtime.oracle import SEED, assert_equal, graph_of, make_job, reference, train_plain
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import (
    by_kind,
    groups_of,
    in_micro_batches,
    random_groups,
    random_strategy,
    randomly_shared,
    staged,
)
from tests.search.builders import MadeUpCosts, devices

NAMES = ("branches", "convolutions", "mixed", "perceptron", "recurrent")
# Of a micro-batch.
SAMPLES = 3


def job_of(name: str, graph: OperatorGraph, strategy: Strategy, optimizer: str = "momentum") -> Job:
    count = strategy.micro_batches.count
    return make_job(graph, strategy, reference(name, batch_size=count * SAMPLES), optimizer)


def check(pool: LocalPool, name: str, strategy: Strategy, optimizer: str = "momentum") -> None:
    graph = graph_of(name, batch_size=SAMPLES)
    strategy.validate(graph, strategy.device_count)
    result = pool.run(job_of(name, graph, strategy, optimizer))
    assert result.verification is not None
    assert result.verification.failure is None
    count = strategy.micro_batches.count
    model = reference(name, batch_size=count * SAMPLES)
    expected = train_plain(model, optimizer, of_one=graph, count=count)
    # A frozen parameter is a buffer of the graph.
    assert_equal(result, replace(expected, buffers={**expected.weights, **expected.buffers}))


@pytest.mark.parametrize(
    "schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE, Schedule.ACTORS]
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", seeds(1, 8))
def test_stages_of_any_splits_train_as_the_plain_module(
    pool: LocalPool, name: str, schedule: Schedule, seed: int
) -> None:
    graph = graph_of(name, batch_size=SAMPLES)
    groups: list[list[int]] = [[[0], [1]], [[0, 1], [2, 3]], [[0], [1, 2, 3]], [[2], [0], [3, 1]]][seed % 4]
    strategy = staged(graph, groups, 1, seed)
    check(
        pool, name, in_micro_batches(strategy, 2 + 3 * (seed % 2), schedule), ("momentum", "adam")[seed % 2]
    )


@pytest.mark.parametrize("name", few(("branches", "recurrent"), NAMES))
@pytest.mark.parametrize("seed", seeds(1, 8))
def test_actors_of_any_credits_train_as_the_plain_module(pool: LocalPool, name: str, seed: int) -> None:
    graph, rng = graph_of(name, batch_size=SAMPLES), random.Random(seed)
    groups: list[list[int]] = [[[0, 1], [2, 3]], [[0], [1], [2, 3]], [[0], [1, 2, 3]]][seed % 3]
    strategy = staged(graph, groups, 1, seed)
    stages = len(stages_of(graph, strategy.configurations, Schedule.ACTORS))
    registers = tuple(rng.randint(1, 5) for _ in range(stages))
    check(pool, name, replace(strategy, micro_batches=MicroBatches(5, Schedule.ACTORS, registers)))


def test_credits_of_another_number_of_stages_are_refused() -> None:
    graph = graph_of("perceptron", batch_size=SAMPLES)
    plain = staged(graph, [[0], [1]], 1, 1, split=False)
    strategy = replace(plain, micro_batches=MicroBatches(4, Schedule.ACTORS, (3, 2, 1)))
    with pytest.raises(StrategyError, match="has credits for 3 stages, must have them for its 2"):
        strategy.validate(graph, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_interleaved_stages_train_as_the_plain_module(pool: LocalPool, name: str, seed: int) -> None:
    graph = graph_of(name, batch_size=SAMPLES)
    groups: list[list[int]] = [[[0], [1]], [[0, 1], [2, 3]], [[0], [1], [2]]][seed % 3]
    # One task an operator: a group's stages must all have its devices.
    strategy = staged(graph, [[group[0]] for group in groups], 2, seed, split=False)
    check(pool, name, in_micro_batches(strategy, 2 * len(groups), Schedule.INTERLEAVED))


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", seeds(1, 9))
def test_any_strategy_may_accumulate_gradients(
    pool: LocalPool, name: str, seed: int, *, is_shared: bool
) -> None:
    graph = graph_of(name, batch_size=SAMPLES)
    schedule = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE, Schedule.ACTORS)[seed % 4]
    strategy = in_micro_batches(random_strategy(graph, 2 + 2 * (seed % 2), seed), 3, schedule)
    check(pool, name, randomly_shared(strategy, graph, seed) if is_shared else strategy)


@pytest.mark.parametrize(
    "schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE, Schedule.ACTORS]
)
@pytest.mark.parametrize("name", few(("recurrent",), ["branches", "recurrent"]))
def test_shared_optimizers_and_recomputation_go_with_micro_batches(
    pool: LocalPool, name: str, schedule: Schedule
) -> None:
    graph = graph_of(name, batch_size=SAMPLES)
    plain = replace(
        staged(graph, [[0, 1], [2, 3]], 1, 3),
        sharding=(Sharding.OPTIMIZER,) * len(graph.weights),
        recomputation=random_groups(graph, 7),
    )
    check(pool, name, in_micro_batches(plain, 4, schedule), "adam")


@pytest.mark.parametrize("gradients", GradientSums)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "name", ["perceptron", "viewed", *few((), ["branches", "convolutions", "recurrent"])]
)
def test_weights_in_shares_are_gathered_for_every_micro_batch(
    pool: LocalPool, name: str, count: int, gradients: GradientSums
) -> None:
    """On two devices, also where activations are made again."""
    graph = graph_of(name, batch_size=SAMPLES)
    strategy = replace(
        fsdp(graph, 2),
        recomputation=groups_of(graph, 5) if count == 4 else (),
        micro_batches=MicroBatches(count, gradients=gradients),
    )
    assert Sharding.PARAMETERS in strategy.sharding
    check(pool, name, strategy, "adam")


@pytest.mark.parametrize("gradients", GradientSums)
@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED])
@pytest.mark.parametrize("name", ["perceptron", "viewed", "convolutions"])
def test_ranks_gather_and_sum_shares_as_the_simulator_says(
    name: str, schedule: Schedule, gradients: GradientSums
) -> None:
    """As many bytes, in the same order, for every micro-batch; each pair of a collective's name and its bytes."""
    graph, count = graph_of(name, batch_size=SAMPLES), 4
    strategy = replace(
        replicated_stages(graph, schedule, 1),
        sharding=(Sharding.PARAMETERS,) * len(graph.weights),
        micro_batches=MicroBatches(count, schedule, gradients=gradients),
    )
    strategy = with_whole_weights(graph, strategy)
    topology = devices(4)
    tasks = TaskGraphBuilder(
        graph, topology, CostTable(MadeUpCosts(1e-7)), Training(count), bucket_bytes=200
    ).build(strategy)
    names = {
        TaskKind.FORWARD_GATHER: "gather",
        TaskKind.BACKWARD_GATHER: "gather",
        TaskKind.SYNCHRONIZE: "sum",
    }
    plan = build_plan(graph, strategy, (0,) * 4, bucket_bytes=200)
    shared_sums = {
        number for number, bucket in enumerate(plan.buckets) if bucket.sharding is not Sharding.NONE
    }
    gathers = 0
    for rank in range(4):
        predicted = [
            (names[TaskKind(kind)], int(tasks.size_bytes_T[task]))
            for task, kind in enumerate(tasks.kind_T.tolist())
            if kind in names and rank in tasks.ends(task)
            if kind != TaskKind.SYNCHRONIZE or int(tasks.subject_T[task]) in shared_sums
        ]
        issued = [
            (
                "sum" if isinstance(item, StartReduceScatter) else "gather",
                item.group.length * len(item.group.ranks) * item.group.dtype.itemsize,
            )
            for item in compile_program(plan, rank, torch.device("cpu")).instructions
            if isinstance(item, StartReduceScatter | StartAllGather)
        ]
        assert issued == predicted
        own = [one for one in issued if one[0] == "gather"]
        assert len(own) % count == 0
        gathers += len(own)
    assert gathers


@pytest.mark.parametrize("gradients", GradientSums)
@pytest.mark.parametrize(
    "schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ACTORS]
)
@pytest.mark.parametrize("name", few(("perceptron",), NAMES))
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_every_stage_gathers_its_own_weights(
    pool: LocalPool, name: str, seed: int, schedule: Schedule, gradients: GradientSums
) -> None:
    graph = graph_of(name, batch_size=SAMPLES)
    strategy = replicated_stages(graph, schedule, 1 + seed)
    strategy = replace(
        strategy,
        sharding=(Sharding.PARAMETERS,) * len(graph.weights),
        recomputation=random_groups(graph, seed) if seed % 2 else (),
        micro_batches=MicroBatches(4, schedule, gradients=gradients),
    )
    check(pool, name, with_whole_weights(graph, strategy), "adam")


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("name", ["branches", "recurrent"])
@pytest.mark.parametrize("seed", seeds(1, 6))
def test_gradients_summed_in_every_micro_batch_train_as_the_plain_module(
    pool: LocalPool, name: str, schedule: Schedule, seed: int
) -> None:
    """Weights are shared or not, and are held whole, in parts, or by several stages."""
    graph = graph_of(name, batch_size=SAMPLES)
    each = MicroBatches(4, schedule, gradients=GradientSums.EACH)
    strategy = replace(replicated_stages(graph, schedule, seed), micro_batches=each)
    strategy = randomly_shared(strategy, graph, seed)
    # Weights of the recurrent network are those of several stages, where there are several.
    assert any(build_plan(graph, strategy, (0,) * 4).summed_each) or name == "recurrent"
    check(pool, name, strategy, "momentum")


def replicated_stages(graph: OperatorGraph, schedule: Schedule, seed: int) -> Strategy:
    """Return stages on two devices each, every third time one on four, with something to sum."""
    if schedule is Schedule.INTERLEAVED:
        strategy = staged(graph, [[0], [1]], 2, seed, split=False)
        # On all devices of its group, so that there is something to sum.
        doubled = [
            Configuration((*one.degrees[:-1], 2), (2 * one.devices[0], 2 * one.devices[0] + 1))
            for one in strategy.configurations
        ]
        return strategy.with_configurations(tuple(doubled))
    return staged(graph, [[0, 1], [2, 3]] if seed % 3 else [[0, 1, 2, 3]], 1, seed)


def test_buckets_over_several_stages_are_summed_once() -> None:
    graph = graph_of("recurrent", batch_size=SAMPLES)
    strategy = replace(
        staged(graph, [[0, 1], [2, 3]], 1, 3),
        micro_batches=MicroBatches(4, gradients=GradientSums.EACH),
    )
    plan = build_plan(graph, strategy, (0,) * 4)
    over_stages = [
        not any(set(bucket.devices) <= stage.devices for stage in plan.stages) for bucket in plan.buckets
    ]
    assert plan.summed_each == tuple(not over for over in over_stages)
    once = replace(strategy, micro_batches=MicroBatches(4))
    assert not any(build_plan(graph, once, (0,) * 4).summed_each)


@pytest.mark.parametrize("name", ["ignoring", "perceptron"])
@pytest.mark.parametrize("groups", [[[0]], [[0], [1]], [[0, 1], [2, 3]]])
def test_a_mean_over_targets_is_that_of_the_whole_batch(
    pool: LocalPool, name: str, groups: list[list[int]]
) -> None:
    """Micro-batches have different numbers of targets that count; the plain module sees all of them at once."""
    graph = graph_of(name, batch_size=SAMPLES)
    strategy = in_micro_batches(staged(graph, groups, 1, 4), 4, Schedule.ONE_F_ONE_B)
    result = pool.run(job_of(name, graph, strategy))
    assert result.verification is not None
    assert result.verification.failure is None
    assert_equal(result, train_plain(reference(name, batch_size=4 * SAMPLES)))


def test_a_sum_of_several_means_is_averaged_over_micro_batches() -> None:
    assert counted_loss(graph_of("ignoring")) is not None
    assert counted_loss(graph_of("recurrent")) is None


def test_every_micro_batch_drops_out_by_itself(pool: LocalPool) -> None:
    """Verification draws for each micro-batch as for a step; were they alike, two equal ones would add up to twice."""
    graph = graph_of("dropped", batch_size=SAMPLES)
    strategy = in_micro_batches(staged(graph, [[0], [1]], 1, 2, split=False), 3, Schedule.ONE_F_ONE_B)
    result = pool.run(job_of("dropped", graph, strategy))
    assert result.verification is not None
    assert result.verification.failure is None


def test_the_order_of_every_rank_is_a_part_of_the_common_order() -> None:
    graph = graph_of("perceptron", batch_size=SAMPLES)
    strategy = in_micro_batches(staged(graph, [[0], [1], [2]], 1, 5, split=False), 4, Schedule.ONE_F_ONE_B)
    plan = build_plan(graph, strategy, (0,) * 3)
    assert [stage.devices for stage in plan.stages] == [{0}, {1}, {2}]
    for stage, own in enumerate(group_orders(MicroBatches(4, Schedule.ONE_F_ONE_B), 3, 1)):
        assert own == tuple(unit for unit in plan.units if unit.stage == stage)


def test_compiled_operators_do_not_go_with_micro_batches() -> None:
    graph = graph_of("perceptron", batch_size=SAMPLES)
    plain = in_micro_batches(by_kind(graph, [], [0]), 2, Schedule.GPIPE)
    with pytest.raises(StrategyError, match="compiled operators, must have one of the two"):
        replace(plain, compiled=random_groups(graph, 7)).validate(graph, 1)


@pytest.mark.parametrize(
    ("name", "schedule", "groups", "message"),
    [
        (
            "perceptron",
            Schedule.ZERO_BUBBLE,
            (),
            "in shares with schedule zero-bubble, must be whole for the weight",
        ),
        (
            "recurrent",
            Schedule.GPIPE,
            (),
            "read by several pipeline stages, or made again behind its own, must be of",
        ),
        (
            "perceptron",
            Schedule.GPIPE,
            "all",
            "or made again behind its own, must be of one with 2 micro-batches",
        ),
    ],
)
def test_weights_that_one_stage_cannot_gather_stay_whole(
    name: str, schedule: Schedule, groups: str, message: str
) -> None:
    graph = graph_of(name, batch_size=SAMPLES)
    plain = in_micro_batches(staged(graph, [[0, 1], [2, 3]], 1, 3), 2, schedule)
    if groups:
        plain = replace(plain, recomputation=(OperatorRange(0, len(graph.operators) - 1),))
    strategy = replace(plain, sharding=(Sharding.PARAMETERS,) * len(graph.weights))
    with pytest.raises(StrategyError, match=message):
        strategy.validate(graph, 4)
    legal = with_whole_weights(graph, strategy)
    legal.validate(graph, 4)
    whole = never_in_shares(graph, strategy)
    assert legal.sharding == tuple(
        Sharding.OPTIMIZER if weight.name in whole else Sharding.PARAMETERS for weight in graph.weights
    )
    once = replace(strategy, micro_batches=ONE_BATCH)
    once.validate(graph, 4)
    assert with_whole_weights(graph, once) is once


def test_a_buffer_that_the_loss_needs_renewed_is_refused() -> None:
    graph = graph_of("accumulating", batch_size=SAMPLES)
    with pytest.raises(StrategyError, match="reads buffer offset, which the micro-batch before renews"):
        in_micro_batches(by_kind(graph, [], [0]), 2, Schedule.GPIPE).validate(graph, 1)


def test_interleaving_needs_groups_in_turn_and_a_multiple_of_them() -> None:
    graph = graph_of("perceptron", batch_size=SAMPLES)
    two = staged(graph, [[0], [1]], 2, 1, split=False)
    with pytest.raises(StrategyError, match="3 micro-batches, must have a multiple of its 2 groups"):
        in_micro_batches(two, 3, Schedule.INTERLEAVED).validate(graph, 2)
    uneven = staged(graph, [[0], [1], [0], [2]], 1, 1, split=False)
    with pytest.raises(StrategyError, match="do not take turns"):
        in_micro_batches(uneven, 4, Schedule.INTERLEAVED).validate(graph, 3)


def test_inputs_of_another_number_of_samples_are_refused() -> None:
    graph = graph_of("perceptron", batch_size=SAMPLES)
    with pytest.raises(RuntimeFailure, match=r"input.0: has shape \(7, 6\) for 2 micro-batches of \(3, 6\)"):
        split_batch(graph, reference("perceptron", batch_size=7).build(SEED), 2)
