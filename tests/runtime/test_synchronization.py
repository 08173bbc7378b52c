"""Slices and late updates (p3), and late gathers (tic), on real processes: order, weights bit by bit, whole steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from graph.operators import OperatorGraph
from graph.plan import build_plan
from graph.strategy import Sharding, Strategy
from graph.synchronization import Policy, Synchronization, p3, slice_bounds
from graph.training import Training
from runtime.instructions.state import StepState
from runtime.jobs.job import Job, JobResult
from runtime.jobs.models import ModelReference
from search.space.baselines import data_parallel, shared
from tests.gpu.ranks import run_ranks
from tests.quick import half, seeds
from tests.runtime.oracle import SEED, assert_equal, graph_of, make_job, reference, train_plain
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import random_pulls, random_strategy, randomly_shared, without_kept_shares

POLICIES = {
    "buckets of 64 bytes": Synchronization(Policy.FIFO, 64),
    "p3": p3(64),
    "p3, whole layers": p3(1024),
    "p3 of shared updates": p3(16),
    "p3 of whole layers with shared updates": p3(1024),
    "tic": Synchronization(Policy.TIC, 64),
}


def tic(bucket_bytes: int) -> Synchronization:
    return Synchronization(Policy.TIC, bucket_bytes)


def with_shared_updates(graph: OperatorGraph, devices: int) -> Strategy:
    """Return data parallelism of which all updates are shared."""
    return shared(graph, data_parallel(graph, devices), Sharding.OPTIMIZER)


def shuffled(strategy: Strategy, job: Job, seed: int) -> Job:
    """Return the job with its slices and gathers in a random order, which is one that a simulation may find."""
    plan = build_plan(job.graph, strategy, job.node_of)
    slices, gathers = list(plan.slice_order), list(plan.gather_order)
    random.Random(seed).shuffle(slices)
    random.Random(seed).shuffle(gathers)
    pulls = random_pulls(plan, slices, seed)
    return replace(job, slice_order=tuple(slices), gather_order=tuple(gathers), pulls=pulls)


def late(whole: Strategy, shared_one: Strategy, kind: str, size_bytes: int) -> Strategy:
    """Return the strategy with late updates, or the one that shares updates with late gathers or with pulls."""
    if kind == "updates":
        return replace(whole, synchronization=p3(size_bytes))
    if kind == "gathers":
        return replace(shared_one, synchronization=tic(size_bytes))
    return replace(without_kept_shares(shared_one), synchronization=p3(size_bytes))


@pytest.mark.parametrize(
    ("name", "optimizer", "kind"),
    half(["perceptron", "convolutions", "recurrent"], ["momentum", "adam"], ["updates", "gathers", "pulls"]),
)
def test_what_is_late_gives_what_the_plain_module_gives(
    pool: LocalPool, name: str, optimizer: str, kind: str
) -> None:
    model, graph = reference(name), graph_of(name)
    for seed, devices in enumerate((2, 4)):
        strategy = late(data_parallel(graph, devices), with_shared_updates(graph, devices), kind, 100)
        plan = build_plan(graph, strategy, (0,) * devices)
        assert len(plan.gather_order) > 1 or kind == "updates"
        assert len(plan.pulls) > 1 or kind != "pulls"
        job = shuffled(strategy, make_job(graph, strategy, model, optimizer), seed)
        result = pool.run(job)
        assert result.verification is not None
        assert result.verification.ok, result.verification.worst
        assert_equal(result, train_plain(model, optimizer))


@pytest.mark.parametrize("kind", ["updates", "gathers", "pulls"])
@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "viewed"])
def test_random_strategies_with_what_is_late_give_what_the_plain_module_gives(
    pool: LocalPool, name: str, seed: int, kind: str
) -> None:
    """Weights that are split, kept in shares, read as copies of parts, through views, or by several, among them."""
    model, graph = reference(name), graph_of(name)
    drawn = random_strategy(graph, 4, seed)
    strategy = late(drawn, randomly_shared(drawn, graph, seed), kind, 60)
    job = shuffled(strategy, make_job(graph, strategy, model), seed)
    assert_equal(pool.run(job), train_plain(model))


def integers(pool: LocalPool, synchronization: Synchronization, devices: int, *, sharing: bool) -> JobResult:
    graph = graph_of("integers")
    whole = with_shared_updates if sharing else data_parallel
    strategy = replace(whole(graph, devices), synchronization=synchronization)
    job = Job(
        graph=graph,
        strategy=strategy,
        node_of=(0,) * devices,
        training=Training(batch_size=1, optimizer="sgd"),
        model=ModelReference("tests.runtime.models:integers", {}),
        seed=SEED,
        iterations=3,
        warmup=0,
        learning_rate=0.25,
        collect=True,
    )
    return pool.run(shuffled(strategy, job, devices))


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_those_of_plain_sgd_bit_by_bit(pool: LocalPool, policy: str, devices: int) -> None:
    """On whole numbers and halves of halves, of which every sum is exact in any order."""
    found = integers(pool, POLICIES[policy], devices, sharing="shared" in policy or policy == "tic")
    module, args, _ = reference("integers").build(SEED)
    losses = []
    for _ in range(3):
        loss = module(*args)
        losses.append(float(loss.detach()))
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.25 * parameter.grad)
    # The loss has more digits than float32.
    assert found.losses == pytest.approx(tuple(losses), rel=1e-6)
    assert found.weights is not None
    for name, parameter in module.named_parameters():
        assert torch.equal(torch.as_tensor(found.weights[name]), parameter.detach())


@pytest.mark.parametrize("policy", ["p3", "tic", "p3 of shared updates"])
def test_steps_in_succession_have_a_time_each_and_lost_time_with_it(pool: LocalPool, policy: str) -> None:
    graph, model = graph_of("perceptron"), reference("perceptron")
    strategy = replace(data_parallel(graph, 2), synchronization=p3(100))
    if policy != "p3":
        late = tic(100) if policy == "tic" else p3(100)
        strategy = replace(with_shared_updates(graph, 2), synchronization=late)
    job = replace(
        make_job(graph, strategy, model), iterations=5, warmup=2, collect=False, recorded=1, peak=True
    )
    result = pool.run(job)
    assert len(result.step_times_s) == 5
    assert min(result.step_times_s) > 0
    assert result.lost_s is None or len(result.lost_s) == 5
    assert result.reference_s is not None
    assert result.reference_s > 0
    assert len(result.losses) == 7
    assert len(result.recorded) == 1
    assert len(result.peaks) == 2
    plain = pool.run(replace(job, strategy=data_parallel(graph, 2)))
    assert result.losses == pytest.approx(plain.losses)


def _delayed(count: int, name: str) -> Strategy:
    """Return the strategy of p3 whose ranks are delayed: a random one of a network, or one that shares its updates."""
    graph = graph_of(name)
    strategy = (
        random_strategy(graph, count, 3) if name == "convolutions" else with_shared_updates(graph, count)
    )
    return replace(strategy, synchronization=p3(60))


def _issued_shared(rank: int, count: int, meeting: str) -> list[list[Any]]:
    """Return what `_issued` returns where updates are shared."""
    return _issued(rank, count, meeting, "perceptron")


def _issued(rank: int, count: int, meeting: str, name: str = "convolutions") -> list[list[Any]]:
    """Return the sums and pulls that a rank starts in three steps and at their end, where each rank is late at random.

    One list a step, and one of what the last step leaves.
    """
    import torch.distributed as dist

    from runtime.communication import World, make_groups
    from runtime.execution.executor import Executor
    from runtime.jobs.models import tensors_of
    from runtime.launch.processes import join_group

    join_group("cpu", 60.0, store=dist.FileStore(meeting, count), rank=rank, size=count)  # type: ignore[attr-defined]
    graph, model, strategy = graph_of(name), reference(name), _delayed(count, name)
    job = shuffled(strategy, make_job(graph, strategy, model), 7)
    plan = job.plan()
    make_groups(plan.device_groups, 60.0)
    issued: list[list[Any]] = []
    delays = random.Random(rank)

    class Delayed(World):
        """A world whose ranks are late before each sum, each by times of its own."""

        def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
            time.sleep(delays.random() * 5e-3)
            issued[-1].append((ranks, tensor.numel()))
            return super().all_reduce(tensor, ranks)

        def reduce_scatter_in_place(
            self, result: torch.Tensor, parts: torch.Tensor, ranks: tuple[int, ...]
        ) -> Any:
            time.sleep(delays.random() * 5e-3)
            issued[-1].append((ranks, parts.numel(), "push"))
            return super().reduce_scatter_in_place(result, parts, ranks)

        def all_gather_in_place(self, slices: torch.Tensor, ranks: tuple[int, ...]) -> Any:
            time.sleep(delays.random() * 5e-3)
            issued[-1].append((ranks, slices.numel(), "pull"))
            return super().all_gather_in_place(slices, ranks)

    executor = Executor(
        plan, Delayed(count), tensors_of(graph, model.build(SEED)), job.training,
        seed=SEED, learning_rate=0.05, device=torch.device("cpu"),
    )  # fmt: skip
    for number in range(3):
        issued.append([])
        executor.step(number)
    issued.append([])
    executor.finish()
    return issued


@cache
def _of_three_ranks(body: Callable[[int, int, str], list[list[Any]]]) -> list[list[list[Any]]]:
    """Return what each of three ranks has started in each step, of one run for several tests."""
    return run_ranks(body, 3)


@pytest.mark.parametrize("body", [_issued, _issued_shared])
def test_delays_leave_the_order_of_sums_and_pulls_as_it_is(
    body: Callable[[int, int, str], list[list[Any]]],
) -> None:
    ranks = _of_three_ranks(body)
    for steps in ranks:
        # A step begins with what the one before it has left.
        assert steps[1] == steps[2] == [*steps[3], *steps[0]]
        assert steps[0]
        assert steps[3] or body is _issued
    for group in {started[0] for steps in ranks for started in steps[1]}:
        of_members = [[started for started in ranks[rank][1] if started[0] == group] for rank in group]
        assert all(of_rank == of_members[0] for of_rank in of_members)


def test_slices_of_shared_updates_are_pushed_and_pulled_once_in_the_order_of_the_plan() -> None:
    graph, strategy = graph_of("perceptron"), _delayed(3, "perceptron")
    plan = shuffled(strategy, make_job(graph, strategy, reference("perceptron")), 7).plan()
    expected = []
    for start in (start for of_place in plan.starts for start in of_place):
        bucket = plan.buckets[start.bucket]
        length = bucket.size_bytes // 4 // len(bucket.devices)
        first, last = slice_bounds(length, plan.slice_counts[start.bucket])[start.part]
        sent = len(bucket.devices) * (last - first)
        expected.append((bucket.devices, sent, "pull" if start.is_pull else "push"))
    for steps in _of_three_ranks(_issued_shared):
        assert [*steps[0], *steps[3]] == expected
        # All bytes of all buckets, there and back.
        assert 4 * sum(sent for _, sent, _ in expected) == 2 * sum(
            bucket.size_bytes for bucket in plan.buckets
        )


def _under_way_at_the_peak(rank: int, count: int, meeting: str) -> list[bool]:
    """Return, for p3, tic, and p3 of shared updates, whether anything is under way where memory is measured."""
    import torch.distributed as dist

    from runtime.communication import make_groups
    from runtime.jobs.run import JobRun
    from runtime.launch.processes import join_group
    from runtime.observe import measured_peak

    join_group("cpu", 60.0, store=dist.FileStore(meeting, count), rank=rank, size=count)  # type: ignore[attr-defined]
    graph, model = graph_of("perceptron"), reference("perceptron")
    measure, found = measured_peak.measure_peak, []
    for strategy in (
        replace(data_parallel(graph, count), synchronization=p3(60)),
        replace(with_shared_updates(graph, count), synchronization=tic(60)),
        replace(with_shared_updates(graph, count), synchronization=p3(60)),
    ):
        job = replace(make_job(graph, strategy, model), collect=False, verify=False, peak=True)
        plan = job.plan()
        make_groups(plan.device_groups, 60.0)
        run = JobRun(job, plan, "cpu")
        state = run._executor._state

        def measured(step: Callable[[], None], device: torch.device, state: StepState = state) -> Any:
            peak = measure(step, device)
            waiting = (state.all_reduces, state.all_gathers, state.gathers_due, state.pushes, state.pulls)
            found.append(any(waiting))
            return peak

        measured_peak.measure_peak = measured
        run.result()
        measured_peak.measure_peak = measure
    return found


def test_the_memory_of_a_step_is_measured_until_nothing_is_under_way() -> None:
    """Where torch's profiler ends beside a thread of gloo, that thread writes to memory that it has freed."""
    assert run_ranks(_under_way_at_the_peak, 2) == [[False] * 3] * 2
