"""The memory of a step: what is measured is what is there, and what is predicted is what is measured."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from graph.axes import AxisKind
from graph.errors import RuntimeFailure
from graph.importer import import_module
from graph.operators import OperatorGraph, ValueKind
from graph.plan import Plan, build_plan
from graph.schedule import GradientSums, MicroBatches, Schedule
from graph.strategy import Sharding, Strategy, with_whole_weights
from graph.training import Training
from profiler.operators.counter_rng import keep_mask
from runtime.jobs.job import Job
from runtime.jobs.models import ModelReference
from runtime.observe.measured_peak import bytes_alive, measure_peak
from runtime.observe.memory_trace import PARTS, trace_memory
from runtime.ranks import watchdog
from tests.quick import few, seeds
from tests.runtime.oracle import SEED, graph_of, reference
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import (
    by_kind,
    groups_of,
    in_micro_batches,
    in_turn,
    random_groups,
    random_strategy,
    staged,
)

MEGABYTE = 1 << 20
# What a process keeps between jobs is not there in a walk.
RELATIVE, KEPT_BYTES = 0.02, 32 * 1024
# Temporaries of kernels that are not predicted: oneDNN's for convolutions of few channels.
TEMPORARIES = {"convolutions": 0.4}
# Batch sizes at which activations, not weights, are what takes memory.
BATCHES = {"perceptron": 5000, "convolutions": 200, "recurrent": 2000, "dropped": 500}
SIZES = {**BATCHES, "viewed": 2000, "blocked": 8}


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    """Processes of these tests alone: what modules of others hold for good would be measured too."""
    with LocalPool(4, timeout_s=120) as processes:
        yield processes


def plan_of(graph: OperatorGraph, strategy: Strategy) -> Plan:
    """Return the plan on devices of one node."""
    return build_plan(graph, strategy, (0,) * strategy.device_count)


def check_against_a_run(
    pool: LocalPool, name: str, strategy: Strategy, optimizer: str, *, at_most: bool = False
) -> None:
    """Check the walk of every rank against what the rank measures; `at_most`: which may be less."""
    graph, training = graph_of(name, batch_size=SIZES[name]), Training(1, optimizer=optimizer)
    plan = plan_of(graph, strategy)
    result = pool.run(
        Job(
            graph=graph,
            strategy=strategy,
            node_of=(0,) * strategy.device_count,
            training=training,
            model=reference(name, batch_size=SIZES[name] * strategy.micro_batches.count),
            seed=SEED,
            # Nothing is timed: beside a step that is, the speed of the core would be measured.
            iterations=0,
            warmup=1,
            peak=True,
        )
    )
    assert len(result.peaks) == strategy.device_count
    for rank, peak in enumerate(result.peaks):
        predicted = trace_memory(plan, training, rank).peak_bytes
        assert at_most or predicted <= peak.tensor_bytes * (1 + RELATIVE), f"rank {rank}"
        least = peak.tensor_bytes * (1 - TEMPORARIES.get(name, RELATIVE)) - KEPT_BYTES
        assert predicted >= least, f"rank {rank}"
        assert peak.process_bytes > peak.tensor_bytes


@pytest.mark.parametrize("name", BATCHES)
def test_a_split_batch_takes_what_the_walk_says(pool: LocalPool, name: str) -> None:
    graph = graph_of(name, batch_size=BATCHES[name])
    check_against_a_run(pool, name, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), "adam")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("seed", seeds(1, 8))
def test_random_strategies_take_what_the_walk_says(pool: LocalPool, name: str, seed: int) -> None:
    strategy = random_strategy(graph_of(name, batch_size=BATCHES[name]), 2 + 2 * (seed % 2), seed)
    check_against_a_run(pool, name, strategy, "momentum")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_what_is_made_again_takes_what_the_walk_says(pool: LocalPool, name: str, size: int) -> None:
    graph = graph_of(name, batch_size=BATCHES[name])
    plain = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    check_against_a_run(pool, name, replace(plain, recomputation=groups_of(graph, size)), "adam")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("seed", seeds(0, 8))
def test_random_groups_take_what_the_walk_says(pool: LocalPool, name: str, seed: int) -> None:
    graph = graph_of(name, batch_size=BATCHES[name])
    strategy = replace(random_strategy(graph, 2, seed), recomputation=random_groups(graph, seed))
    check_against_a_run(pool, name, strategy, "momentum")


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
@pytest.mark.parametrize("name", BATCHES)
def test_micro_batches_take_what_the_walk_says(pool: LocalPool, name: str, schedule: Schedule) -> None:
    graph = graph_of(name, batch_size=BATCHES[name])
    plain = staged(graph, [[0], [1]], 1, 1, split=False)
    check_against_a_run(pool, name, in_micro_batches(plain, 4, schedule), "momentum")


def on_two_devices(graph: OperatorGraph, sharding: Sharding, gradients: GradientSums) -> Strategy:
    """Return data parallelism in four micro-batches, without or with a shared optimizer."""
    return replace(
        by_kind(graph, [AxisKind.SAMPLE], [0, 1]),
        sharding=(sharding,) * len(graph.weights),
        micro_batches=MicroBatches(4, gradients=gradients),
    )


@pytest.mark.parametrize("sharding", Sharding)
def test_gradients_summed_in_each_micro_batch_take_what_the_walk_says(
    pool: LocalPool, sharding: Sharding
) -> None:
    graph = graph_of("perceptron", batch_size=BATCHES["perceptron"])
    check_against_a_run(pool, "perceptron", on_two_devices(graph, sharding, GradientSums.EACH), "momentum")
    # Where weights are most of what there is, in several buckets, shares take less than whole gradients.
    small = graph_of("perceptron", batch_size=2)
    plans = (
        build_plan(small, on_two_devices(small, sharding, gradients), (0, 0), bucket_bytes=64)
        for gradients in GradientSums
    )
    last, each = (trace_memory(plan, Training(1), 0).peak_bytes for plan in plans)
    assert (each < last) == (sharding is not Sharding.NONE)


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("name", few(("perceptron",), ["viewed", *BATCHES]))
def test_weights_in_shares_of_two_stages_take_what_the_walk_says(
    pool: LocalPool, name: str, schedule: Schedule
) -> None:
    graph = graph_of(name, batch_size=SIZES[name])
    strategy = replace(
        staged(graph, [[0, 1], [2, 3]], 1, 1),
        sharding=(Sharding.PARAMETERS,) * len(graph.weights),
        micro_batches=MicroBatches(4, schedule),
    )
    check_against_a_run(pool, name, with_whole_weights(graph, strategy), "momentum")


@pytest.mark.parametrize("credits_S", [(1, 1), (2, 1), (4, 4)])
@pytest.mark.parametrize("name", BATCHES)
def test_actors_take_at_most_their_registers(pool: LocalPool, name: str, credits_S: tuple[int, ...]) -> None:
    """With one register a stage, the order is the walk's."""
    graph = graph_of(name, batch_size=BATCHES[name])
    plain = staged(graph, [[0], [1]], 1, 1, split=False)
    strategy = replace(plain, micro_batches=MicroBatches(4, Schedule.ACTORS, credits_S))
    check_against_a_run(pool, name, strategy, "momentum", at_most=credits_S != (1, 1))


def test_a_stage_keeps_no_more_micro_batches_than_stages_follow_it() -> None:
    """Of gpipe every stage keeps all; what is in flight is what makes the difference."""
    graph = graph_of("blocked", batch_size=64)
    plain = staged(graph, [[0], [1], [2]], 1, 1, split=False)

    def peaks(count: int, schedule: Schedule) -> list[int]:
        plan = plan_of(graph, in_micro_batches(plain, count, schedule))
        inputs = sum(value.spec.size_bytes for value in graph.values if value.kind is ValueKind.INPUT)
        # Inputs of all micro-batches are there, on the first stage.
        return [
            trace_memory(plan, Training(1), rank).peak_bytes - (count * inputs if rank == 0 else 0)
            for rank in range(3)
        ]

    weights = sum(weight.spec.size_bytes for weight in graph.weights)
    # Gradients of weights are there, too, where a forward follows a backward.
    for of_many, of_few in zip(peaks(8, Schedule.ONE_F_ONE_B), peaks(3, Schedule.ONE_F_ONE_B), strict=True):
        assert of_few <= of_many <= of_few + weights
    all_kept, in_turn_kept = peaks(8, Schedule.GPIPE), peaks(8, Schedule.ONE_F_ONE_B)
    assert all(most > 1.9 * least for most, least in zip(all_kept, in_turn_kept, strict=True))


def test_what_an_earlier_job_drew_takes_no_memory(pool: LocalPool) -> None:
    """A process that runs many jobs keeps the positions that dropout draws from while a job lasts, not longer."""
    graph = graph_of("dropped", batch_size=20_000)
    strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    model = reference("dropped", batch_size=20_000)
    pool.run(Job(graph=graph, strategy=strategy, node_of=(0, 0), training=Training(1), model=model))
    perceptron = graph_of("perceptron", batch_size=BATCHES["perceptron"])
    check_against_a_run(pool, "perceptron", by_kind(perceptron, [AxisKind.SAMPLE], [0, 1]), "adam")


def wide() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Make a layer of one weight of 4 MiB."""
    return Wide(), (torch.zeros(2, 1024),), {}


def test_what_an_earlier_job_brought_back_takes_no_memory(pool: LocalPool) -> None:
    module, args, kwargs = wide()
    graph = import_module(module, args, kwargs, name="wide")
    strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    model = ModelReference(f"{__name__}:wide")
    job = Job(graph=graph, strategy=strategy, node_of=(0, 0), training=Training(2), model=model, collect=True)
    assert pool.run(job).weights is not None
    perceptron = graph_of("perceptron", batch_size=BATCHES["perceptron"])
    check_against_a_run(pool, "perceptron", by_kind(perceptron, [AxisKind.SAMPLE], [0, 1]), "adam")


def test_convolutions_take_what_they_copy_into_blocks(pool: LocalPool) -> None:
    graph = graph_of("blocked", batch_size=SIZES["blocked"])
    check_against_a_run(pool, "blocked", by_kind(graph, [AxisKind.SAMPLE], [0, 1]), "sgd")


def test_one_device_takes_what_the_walk_says(pool: LocalPool) -> None:
    graph = graph_of("convolutions", batch_size=BATCHES["convolutions"])
    check_against_a_run(pool, "convolutions", in_turn(graph, [0]), "sgd")


class Wide(torch.nn.Module):
    """One weight of 4 MiB, and activations that are nothing beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1024, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight).sum()


@pytest.mark.parametrize(
    ("optimizer", "count", "tensors"),
    [("sgd", 1, 2), ("momentum", 1, 3), ("adam", 1, 4), ("sgd", 2, 3), ("momentum", 2, 4), ("adam", 2, 5)],
)
def test_a_wide_layer_takes_so_many_tensors_of_its_weight(optimizer: str, count: int, tensors: int) -> None:
    """Weight, gradient and state; no update needs more.

    On two devices the gradient is copied into a flat tensor to be summed.
    """
    graph = import_module(Wide(), (torch.zeros(2, 1024),), {}, name="wide")
    strategy = by_kind(graph, [AxisKind.SAMPLE], range(count))
    found = trace_memory(plan_of(graph, strategy), Training(2, optimizer=optimizer), 0)
    assert found.peak_bytes == pytest.approx(tensors * 4 * MEGABYTE, abs=64 * 1024)
    parts = dict(found.parts)
    assert sum(parts.values()) == found.peak_bytes
    assert tuple(parts) == PARTS
    assert parts["weights"] == 4 * MEGABYTE
    assert parts["optimizer"] == {"sgd": 0, "momentum": 4, "adam": 8}[optimizer] * MEGABYTE


def test_blocks_of_a_gpu_are_rounded_up() -> None:
    graph = graph_of("perceptron")
    plan = plan_of(graph, in_turn(graph, [0]))
    on_cpu, on_cuda = (trace_memory(plan, Training(1), 0, processor) for processor in ("cpu", "cuda"))
    assert on_cuda.peak_bytes % 512 == 0
    assert on_cuda.peak_bytes > on_cpu.peak_bytes


def test_a_walk_leaves_no_tensor_without_data_behind() -> None:
    """Positions that dropout draws from are kept from call to call."""
    graph = graph_of("dropped")
    trace_memory(plan_of(graph, in_turn(graph, [0])), Training(1), 0)
    size = graph.value_by_name[graph.inputs[0]].spec.shape
    region = tuple(((0, length),) for length in size)
    mask = keep_mask(region, size, 0.5, (0, 0, 0), torch.device("cpu"))
    assert type(mask) is torch.Tensor


class Chosen(torch.nn.Module):
    """Rows of which data says how many are multiplied by which weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 16, 16, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight, offs=ends).float().sum()


def test_what_depends_on_data_is_refused_in_one_line() -> None:
    inputs = (torch.zeros(8, 16, dtype=torch.bfloat16), torch.tensor([4, 8], dtype=torch.int32))
    graph = import_module(Chosen(), inputs, {}, name="chosen")
    expert = by_kind(graph, [AxisKind.PARAMETER], [0, 1])
    with pytest.raises(RuntimeFailure, match="cannot be found without data"):
        trace_memory(plan_of(graph, expert), Training(8, precision="bfloat16"), 0)


def peak_of(step: Callable[[], None]) -> int:
    """Return the measured bytes of a step on this process's CPU."""
    return measure_peak(step, torch.device("cpu")).tensor_bytes


def test_a_measured_peak_is_the_most_that_is_there_at_once() -> None:
    def nothing() -> None:
        pass

    def step() -> None:
        first = torch.zeros(MEGABYTE, dtype=torch.uint8)
        second = torch.zeros(2 * MEGABYTE, dtype=torch.uint8)
        del first
        third = torch.zeros(MEGABYTE // 2, dtype=torch.uint8)
        del second, third
        torch.zeros(2 * MEGABYTE, dtype=torch.uint8)

    held = torch.zeros(MEGABYTE, dtype=torch.uint8)
    before = peak_of(nothing)
    assert peak_of(step) - before == 3 * MEGABYTE
    del held
    assert before - peak_of(nothing) == MEGABYTE


def test_memory_that_tensors_share_counts_once() -> None:
    whole = torch.zeros(100)
    assert bytes_alive([whole, whole[3:], whole.view(10, 10), torch.zeros(5)]) == 420


def test_a_watched_thread_keeps_nothing_that_its_functions_have_left() -> None:
    """The watch looks at the thread's frames again and again; a frame that it kept would keep the frame's tensors."""
    references = []

    def work() -> None:
        tensor = torch.zeros(10)
        references.append(weakref.ref(tensor))
        time.sleep(0.3)

    def run() -> None:
        with watchdog.under_watchdog(1.0, lambda _reason: None):
            work()
            gone.append(references[0]() is None)

    gone: list[bool] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert gone == [True]


@pytest.mark.cuda
def test_a_gpu_takes_what_the_walk_says() -> None:
    """Beside the walk's tensors cuBLAS and cuDNN have workspaces: the network is large enough to outweigh them."""
    from runtime.launch.torchrun import launch

    graph = graph_of("convolutions", batch_size=20_000)
    strategy, training = in_turn(graph, [0]), Training(1)
    job = Job(
        graph=graph,
        strategy=strategy,
        node_of=(0,),
        training=training,
        model=reference("convolutions", batch_size=20_000),
        iterations=1,
        peak=True,
    )
    result = launch(replace(job, warmup=1), [0], "cuda", timeout_s=120)
    assert result is not None
    predicted = trace_memory(plan_of(graph, strategy), training, 0, "cuda").peak_bytes
    assert predicted == pytest.approx(result.peaks[0].tensor_bytes, rel=0.1)
