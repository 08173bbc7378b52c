"""Recorded steps: spans fill each rank's step and bear the plan's names, and recording changes no result."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from graph.axes import AxisKind
from graph.collectives import CollectiveKind
from graph.plan import Plan, build_plan
from graph.strategy import Configuration, Sharding, Strategy
from runtime.communication import World
from runtime.execution.executor import Executor
from runtime.jobs.models import tensors_of
from runtime.lowering.program import compile_program
from runtime.observe.recorder import _Names, record_step
from runtime.observe.spans import KINDS, MESSAGE, WEIGHT_GRADIENTS, WEIGHTS, Span
from search.space.baselines import shared
from tests.quick import seeds
from tests.runtime.oracle import SEED, graph_of, make_job, reference
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, in_turn, random_strategy

CPU = torch.device("cpu")
NETWORKS = ("perceptron", "convolutions", "recurrent", "branches")


def named(spans: tuple[Span, ...] | list[Span], kind: str) -> set[str]:
    return {span.label.name for span in spans if span.label.kind == kind}


def tasks_of(plan: Plan, rank: int, *, backward: bool) -> set[str]:
    """Return the names of a rank's tasks: of all, or of those that have a backward."""
    word = "backward" if backward else "forward"
    return {
        f"{word} {operator.name}[{task}]"
        for index, operator in enumerate(plan.graph.operators)
        for task, device in enumerate(plan.strategy.configurations[index].devices)
        if device == rank and (plan.active[index][task] or not backward)
    }


def assert_filled(spans: tuple[Span, ...] | list[Span]) -> None:
    assert spans[0].start_ns == 0
    assert all(before.end_ns == after.start_ns for before, after in pairwise(spans))
    assert all(span.start_ns < span.end_ns for span in spans)
    assert {span.label.kind for span in spans} <= set(KINDS)


def executor_of(name: str) -> tuple[Executor, Plan]:
    graph, model = graph_of(name), reference(name)
    job = make_job(graph, in_turn(graph, [0]), model)
    plan = build_plan(graph, job.strategy, (0,))
    tensors = tensors_of(graph, model.build(SEED))
    executor = Executor(plan, World(1), tensors, job.training, seed=1, learning_rate=0.1, device=CPU)
    return executor, plan


@pytest.mark.parametrize("name", NETWORKS)
def test_recorded_steps_train_as_other_steps_do(name: str) -> None:
    plain, _ = executor_of(name)
    recorded, plan = executor_of(name)
    for number in range(3):
        plain.step(number)
        record_step(recorded, plan, World(1), CPU, number)
        assert recorded.loss() == plain.loss()
    for weight, ((_, value),) in plain.weights().items():
        assert torch.equal(recorded.weights()[weight][0][1], value)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_task_of_a_device_has_its_spans(name: str) -> None:
    executor, plan = executor_of(name)
    spans = record_step(executor, plan, World(1), CPU, 0).spans
    assert_filled(spans)
    assert named(spans, "forward") == tasks_of(plan, 0, backward=False)
    assert named(spans, "backward") == tasks_of(plan, 0, backward=True)
    assert named(spans, "update") == {"update device 0"}
    assert not named(spans, "wait")


def test_a_step_after_a_recorded_one_is_not_recorded_any_more() -> None:
    executor, plan = executor_of("perceptron")
    instructions = executor.program.instructions
    first = record_step(executor, plan, World(1), CPU, 0).spans
    count = len(first)
    executor.step(1)
    assert executor.program.instructions is instructions
    assert len(first) == count


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", seeds(6, 60))
def test_every_instruction_of_a_random_strategy_has_a_label(name: str, seed: int) -> None:
    graph = graph_of(name)
    plan = build_plan(graph, random_strategy(graph, 3, seed), (0, 0, 1))
    values = {value.name for value in graph.values} | {WEIGHT_GRADIENTS}
    for rank in range(3):
        program = compile_program(plan, rank, CPU)
        names = _Names(plan, rank, program)
        labels = [names.labels(instruction) for instruction in program.instructions]
        forward = {label.name for label, _, _ in labels if label.kind == "forward"}
        assert forward == tasks_of(plan, rank, backward=False)
        for label, waits_for, _ in labels:
            for one in (label, waits_for):
                if one.kind in ("wait", "copy"):
                    assert one.subject.removeprefix("gradient of ").removeprefix("new ") in values, one


def test_two_ranks_record_what_they_do_and_what_they_wait_for(pool: LocalPool) -> None:
    graph = graph_of("convolutions")
    degrees = [tuple(2 if axis.name == "sample" else 1 for axis in o.space.axes) for o in graph.operators]
    configurations = tuple(Configuration(d, (0, 1) if 2 in d else (0,)) for d in degrees)
    job = make_job(graph, Strategy(graph.digest, configurations), reference("convolutions"))
    job = replace(job, iterations=2, warmup=1, recorded=2, verify=False, collect=False)
    result = pool.run(job)
    plan = build_plan(graph, job.strategy, (0, 0))
    assert len(result.recorded) == 2
    for step in result.recorded:
        assert len(step) == 2
        for rank, spans in enumerate(step):
            assert_filled(spans)
            assert named(spans, "forward") == tasks_of(plan, rank, backward=False)
            assert named(spans, "backward") == tasks_of(plan, rank, backward=True)
            assert any(name.startswith("wait for all-reduce bucket") for name in named(spans, "wait"))
    assert len(result.step_times_s) == job.iterations
    # Nobody asked for its communications.
    assert result.communications == ()


@pytest.mark.parametrize("name", ["perceptron", "branches"])
@pytest.mark.parametrize("seed", seeds(4, 40))
def test_all_ends_of_a_communication_record_it(pool: LocalPool, name: str, seed: int) -> None:
    """Each message at both its ends, each collective on all members, as many of the same on each; within the step."""
    graph, model = graph_of(name), reference(name)
    strategy = random_strategy(graph, 2 + seed % 3, seed)
    job = replace(make_job(graph, strategy, model), recorded=2, communications=True, verify=False)
    result = pool.run(job)
    assert len(result.communications) == len(result.recorded) == 2
    for by_rank, spans in zip(result.communications, result.recorded, strict=True):
        counts = [Counter((item.operation, item.ranks) for item in items) for items in by_rank]
        for rank, items in enumerate(by_rank):
            assert_filled(spans[rank])
            for item in items:
                assert 0 <= item.start_ns <= item.end_ns <= spans[rank][-1].end_ns
                assert rank in item.ranks
                assert len({counts[member][item.operation, item.ranks] for member in item.ranks}) == 1
                if item.operation == MESSAGE and rank == item.ranks[0]:
                    assert item.start_ns == item.end_ns
                else:
                    assert item.operation in (MESSAGE, *CollectiveKind)
    plan = build_plan(graph, strategy, job.node_of)
    among = {item.ranks for by_rank in result.communications for items in by_rank for item in items}
    assert {bucket.devices for bucket in plan.buckets if len(bucket.devices) > 1} <= among


@pytest.mark.parametrize("level", [Sharding.OPTIMIZER, Sharding.PARAMETERS])
def test_a_recorded_step_says_when_shared_weights_are_gathered(pool: LocalPool, level: Sharding) -> None:
    graph = graph_of("perceptron")
    strategy = shared(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), level)
    job = make_job(graph, strategy, reference("perceptron"))
    result = pool.run(replace(job, recorded=1, communications=True, verify=False))
    (by_rank,), (spans_by_rank,) = result.communications, result.recorded
    for items, spans in zip(by_rank, spans_by_rank, strict=True):
        assert WEIGHTS in {item.subject for item in items}
        assert WEIGHT_GRADIENTS in {item.subject for item in items}
        names = {span.label.name for span in spans}
        assert "pack gradients to share" in names
        assert ("pack shares of weights" in names) == (level is Sharding.PARAMETERS)
        assert "wait for weights" in names


@pytest.mark.cuda
def test_a_gpu_is_recorded_by_its_own_clock() -> None:
    device = torch.device("cuda", 0)
    graph, model = graph_of("convolutions"), reference("convolutions")
    job = make_job(graph, in_turn(graph, [0]), model)
    plan = build_plan(graph, job.strategy, (0,))
    executor = Executor(
        plan,
        World(1),
        tensors_of(graph, model.build(SEED)),
        job.training,
        seed=1,
        learning_rate=0.1,
        device=device,
    )
    executor.step(0)
    spans = record_step(executor, plan, World(1), device, 1).spans
    assert_filled(spans)
    assert named(spans, "forward") <= tasks_of(plan, 0, backward=False)
    assert named(spans, "backward") <= tasks_of(plan, 0, backward=True)
