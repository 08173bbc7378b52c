"""Our runtime against PyTorch's own: data parallelism, one device, and a column + row split pair of layers.

Data parallelism against DistributedDataParallel on the same two processes, the same network, torch's SGD on both
sides' terms (forward, backward, synchronization, update); batch normalization local on both sides, or synchronized on
both (`synchronized_batch_norm.py`). One device: the planned graph against the plain module. The pair of layers against
`parallelize_module`. Launches: of one step of one process, operators that run a kernel.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from graph.training import Training
from scripts.benchmarks.pairs import TIMEOUT_S, StepPair, time_pair
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from graph.zoo import Built
    from runtime.execution.executor import Executor

AT_MOST = 1.05
LEARNING_RATE = 1e-4
PROCESSES = 2
# Batch sizes and sizes for which a step takes 50 ms to 3 s on one core of a laptop.
DATA_PARALLEL: dict[str, dict[str, Any]] = {
    "mlp": {"batch_size": 128},
    "inception": {"batch_size": 8},
    "resnet101": {"batch_size": 8, "image_size": 128},
    "gpt2": {"batch_size": 4, "sequence": 128, "layers": 4},
}
# With synchronized batch norm: the options with which both sides draw nothing, so that their gradients can be compared.
SYNCHRONIZED: dict[str, dict[str, Any]] = {"inception": {"dropout": 0.0}, "resnet101": {}}
ONE_DEVICE: dict[str, dict[str, Any]] = {
    **DATA_PARALLEL,
    "alexnet": {"batch_size": 16},
    "vgg16": {"batch_size": 4, "image_size": 128, "pooled_size": 4},
    "densenet121": {"batch_size": 4, "image_size": 128},
    "rnntc": {"batch_size": 16, "steps": 10},
    "rnnlm": {"batch_size": 16, "steps": 10},
    "nmt": {"batch_size": 16, "steps": 10},
    "bert-large": {"batch_size": 2, "sequence": 128, "layers": 4},
    "dlrm": {"batch_size": 256, "rows": 10000},
    "candle-uno": {"batch_size": 64},
}
QUICK = ("mlp",)
# How far a gradient may differ with synchronized batch norm, in float64, of its largest number.
ALLOWED_GRADIENTS = 1e-6
# Of the pair of layers: widths, batch sizes, and how far the two sides' losses of the first steps may differ.
WIDTHS, PAIR_BATCHES = (1024, 4096, 1024), (64, 256)
PAIR_LEARNING_RATE, ALLOWED, COMPARED_STEPS = 1e-2, 1e-4, 3


def run(*, quick: bool) -> BenchmarkResult:
    """Time all pairs: on CPU cores; one device also on a GPU, in published sizes, where there is one.

    Raises:
        RuntimeError: a process failed.
    """
    import torch

    blocks, steps = (3, 1) if quick else (9, 2)
    rows: list[MeasuredValue] = []

    def add(what: str, pair: Callable[..., StepPair], processes: int, **keywords: Any) -> None:
        timing = time_pair(pair, processes, blocks=blocks, steps=steps, counted=True, **keywords)
        rows.append(measurement(what, timing.ratio, "x", at_most=AT_MOST))
        rows.append(measurement("    our step, fastest block", min(timing.ours_s) * 1e3, "ms"))
        rows.append(measurement("    processor time, ours / theirs", timing.processor_ratio, "x"))
        for whose, launches in (("our", timing.ours_launches), ("their", timing.theirs_launches)):
            rows.append(measurement(f"    {whose} launches", launches.kernels, ""))
            rows.append(measurement(f"    {whose} collectives and messages", launches.communication, ""))

    for name, sizes in DATA_PARALLEL.items():
        if not quick or name in QUICK:
            what = f"{name}, ours / DistributedDataParallel"
            add(what, data_parallel_pair, PROCESSES, name=name, sizes=sizes)
            if name in SYNCHRONIZED:
                what = f"{name}, synchronized batch norm, ours / DistributedDataParallel"
                add(what, synchronized_pair, PROCESSES, name=name, sizes=sizes)
    for name, sizes in ONE_DEVICE.items():
        if not quick or name in QUICK:
            add(f"{name}, one core, ours / plain", one_device_pair, 1, name=name, sizes=sizes)
            if torch.cuda.is_available():
                what = f"{name}, one GPU, ours / plain"
                add(what, one_device_pair, 1, processor="cuda", name=name, sizes={})
    pair_blocks, pair_steps = (3, 3) if quick else (15, 5)
    timings = [
        time_pair(
            column_row_pair, PROCESSES, blocks=pair_blocks, steps=pair_steps, warmup=3, batch_size=batch_size
        )
        for batch_size in (PAIR_BATCHES[:1] if quick else PAIR_BATCHES)
    ]
    ratio = statistics.median(ratio for timing in timings for ratio in timing.ratios)
    rows.append(measurement("column + row pair, ours / parallelize_module", ratio, "x", at_most=AT_MOST))
    return BenchmarkResult(
        benchmark="runtime",
        conditions={
            "processes": PROCESSES,
            "blocks": blocks,
            "steps a block": steps,
            "batch norm": "local, if not said otherwise",
        },
        measurements=rows,
    )


def data_parallel_pair(device: str, name: str, sizes: dict[str, Any]) -> StepPair:
    """Prepare data parallelism of a network of the zoo on all processes, by us and by DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    executor, module, args = _prepared(device, name, sizes, dist.get_world_size(), "local")
    theirs = sgd_step(DistributedDataParallel(module), _own_part(args), LEARNING_RATE)
    return StepPair(numbered(executor), theirs)


def synchronized_pair(device: str, name: str, sizes: dict[str, Any]) -> StepPair:
    """As `data_parallel_pair`, with statistics of the whole batch on both sides.

    Raises:
        RuntimeError: a gradient of a step in float64 differs.
    """
    import torch

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    _compare_gradients(name, *_synchronized_sides(device, name, {**sizes, **SYNCHRONIZED[name]}))
    torch.set_default_dtype(usual)
    executor, module, args = _synchronized_sides(device, name, sizes)
    return StepPair(numbered(executor), sgd_step(module, args, LEARNING_RATE))


def _synchronized_sides(
    device: str, name: str, sizes: dict[str, Any]
) -> tuple[Executor, DistributedDataParallel, list[Tensor]]:
    """Return our executor, DistributedDataParallel of the module, and this rank's part of the samples."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from scripts.benchmarks.synchronized_batch_norm import with_synchronized_batch_norm

    executor, module, args = _prepared(device, name, sizes, dist.get_world_size(), "synchronized")
    if device == "cpu":
        module = with_synchronized_batch_norm(module)
    else:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    return executor, DistributedDataParallel(module), _own_part(args)


def _compare_gradients(
    name: str, executor: Executor, module: DistributedDataParallel, args: list[Tensor]
) -> None:
    """Compare all gradients of a step of ours, which has whole weights on every rank, with those of a module."""
    executor.differentiate(0)
    module(*args).backward()
    theirs = dict(module.module.named_parameters())
    for weight, ((_, gradient),) in executor.gradients().items():
        expected = theirs[weight].grad
        difference = float((gradient - expected).abs().max() / expected.abs().max())
        if not difference <= ALLOWED_GRADIENTS:
            raise RuntimeError(
                f"{name}: the gradient of {weight} differs by {difference:g} of its largest number, must be "
                f"DistributedDataParallel's within {ALLOWED_GRADIENTS:g}"
            )


def _own_part(args: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of the samples, as a sampler would hand it out."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [tensor.tensor_split(world_size)[rank].contiguous() for tensor in args]


def one_device_pair(device: str, name: str, sizes: dict[str, Any]) -> StepPair:
    """Prepare a network of the zoo on one device, through our program and as the plain module."""
    executor, module, args = _prepared(device, name, sizes, 1, "local")
    return StepPair(numbered(executor), sgd_step(module, args, LEARNING_RATE))


def column_row_pair(device: str, batch_size: int) -> StepPair:
    """Prepare a pair of linear layers on all processes, by us and by DTensor's `parallelize_module`.

    The first layer is split by outputs, the second by inputs: one all-reduce of partial sums forward, none backward
    (the input needs no gradient). Source: Megatron-LM (arXiv:1909.08053) section 3.

    Raises:
        RuntimeError: the losses of the first steps differ.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from graph.importer import import_module
    from search.space.baselines import megatron

    built = _layers_and_input(batch_size)
    graph = import_module(*built, name="column row pair")
    executor = executor_of(
        graph, megatron(graph, PROCESSES), built, Training(batch_size), device, PAIR_LEARNING_RATE
    )
    ours = numbered(executor)
    module, args, _ = _layers_and_input(batch_size)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    module = parallelize_module(module.to(device), init_device_mesh(device, (PROCESSES,)), plan)
    theirs = sgd_step(module, [tensor.to(device) for tensor in args], PAIR_LEARNING_RATE)
    for number in range(COMPARED_STEPS):
        ours()
        loss, expected = executor.loss(), float(theirs())
        if not torch.isclose(torch.tensor(loss), torch.tensor(expected), rtol=ALLOWED):
            raise RuntimeError(f"step {number}: our loss is {loss}, must be DTensor's, {expected}")
    return StepPair(ours, theirs)


def sgd_step(module: nn.Module, args: Sequence[Tensor], learning_rate: float) -> Callable[[], Tensor]:
    """Return a step of plain SGD on a module, which returns its loss."""
    import torch

    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(*args)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _layers_and_input(batch_size: int) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """Return two layers whose loss is the mean square of their output, and an input, equal on every process."""
    import torch
    from torch import nn

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTHS[0], WIDTHS[1])
            self.second = nn.Linear(WIDTHS[1], WIDTHS[2])

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x))
            return result.square().mean()

    torch.manual_seed(0)
    return Layers(), (torch.randn(batch_size, WIDTHS[0]),), {}


def _prepared(
    device: str, name: str, sizes: dict[str, Any], devices: int, batch_norm: str
) -> tuple[Executor, nn.Module, list[Tensor]]:
    """Return our executor, the plain module and its inputs, on `device`."""
    import torch

    from graph.importer import import_module
    from graph.zoo import build
    from search.space.baselines import data_parallel

    torch.manual_seed(0)
    built = build(name, **sizes)
    with torch.device("meta"):
        module, args, kwargs = build(name, **sizes)
    graph = import_module(module, args, kwargs, name=name, batch_norm=batch_norm)
    training = Training(batch_size=int(built[1][0].shape[0]), batch_norm=batch_norm)
    executor = executor_of(graph, data_parallel(graph, devices), built, training, device, LEARNING_RATE)
    return executor, built[0].to(device), [tensor.to(device) for tensor in built[1]]


def executor_of(
    graph: OperatorGraph,
    strategy: Strategy,
    built: Built,
    training: Training,
    device: str,
    learning_rate: float,
) -> Executor:
    """Return this rank's executor of a strategy on the tensors of a built network."""
    import torch

    from graph.plan import build_plan
    from runtime.communication import World
    from runtime.execution.executor import Executor
    from runtime.jobs.models import tensors_of
    from runtime.ranks.ranks import prepare_groups

    plan = build_plan(graph, strategy, (0,) * strategy.device_count)
    prepare_groups(plan, strategy.device_count, TIMEOUT_S)
    return Executor(
        plan,
        World(strategy.device_count),
        tensors_of(graph, built, strategy.micro_batches.count),
        training,
        seed=0,
        learning_rate=learning_rate,
        device=torch.device(device),
    )


def numbered(executor: Executor) -> Callable[[], None]:
    numbers = itertools.count()
    return lambda: executor.step(next(numbers))
