"""Our runtime against PyTorch's own: data parallelism, one device, and a column + row split pair of layers.

Data parallelism against DistributedDataParallel on the same two processes, the same network, batch normalization
local on both sides, torch's SGD on both sides' terms (forward, backward, synchronization, update). One device: the
planned graph against the plain module. The pair of layers against `parallelize_module`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.pairs import TIMEOUT_S, StepPair, time_pair
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement

if TYPE_CHECKING:
    import torch
    from torch import nn

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


def run(*, quick: bool) -> BenchmarkResult:
    """Time all pairs: on CPU cores; one device also on a GPU, in published sizes, where there is one.

    Raises:
        RuntimeError: a process failed.
    """
    import torch

    from scripts.benchmarks.tensor_parallel_pair import measure

    blocks, steps = (3, 1) if quick else (9, 2)
    rows: list[MeasuredValue] = []

    def add(what: str, pair: Callable[..., StepPair], processes: int, **keywords: Any) -> None:
        timing = time_pair(pair, processes, blocks=blocks, steps=steps, **keywords)
        rows.append(measurement(what, timing.ratio, "x", at_most=AT_MOST))
        rows.append(measurement("    our step, fastest block", min(timing.ours_s) * 1e3, "ms"))

    for name, sizes in DATA_PARALLEL.items():
        if not quick or name in QUICK:
            what = f"{name}, ours / DistributedDataParallel"
            add(what, data_parallel_pair, PROCESSES, name=name, sizes=sizes)
    for name, sizes in ONE_DEVICE.items():
        if not quick or name in QUICK:
            add(f"{name}, one core, ours / plain", one_device_pair, 1, name=name, sizes=sizes)
            if torch.cuda.is_available():
                what = f"{name}, one GPU, ours / plain"
                add(what, one_device_pair, 1, processor="cuda", name=name, sizes={})
    pair = measure(quick=quick)
    rows.append(
        measurement("column + row pair, ours / parallelize_module", pair["ratio"], "x", at_most=AT_MOST)
    )
    return BenchmarkResult(
        benchmark="runtime",
        conditions={"processes": PROCESSES, "blocks": blocks, "steps a block": steps, "batch norm": "local"},
        measurements=rows,
    )


def data_parallel_pair(device: str, name: str, sizes: dict[str, Any]) -> StepPair:
    """Prepare data parallelism of a network of the zoo on all processes, by us and by DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours, module, args = _prepared(device, name, sizes, world_size)
    # Its part of the samples, as a sampler would hand it out.
    part = tuple(tensor.tensor_split(world_size)[rank].contiguous() for tensor in args)
    replica = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(replica.parameters(), lr=LEARNING_RATE)

    def theirs() -> None:
        optimizer.zero_grad()
        replica(*part).backward()
        optimizer.step()

    return StepPair(ours, theirs)


def one_device_pair(device: str, name: str, sizes: dict[str, Any]) -> StepPair:
    """Prepare a network of the zoo on one device, through our program and as the plain module."""
    import torch

    ours, module, args = _prepared(device, name, sizes, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)

    def theirs() -> None:
        optimizer.zero_grad()
        module(*args).backward()
        optimizer.step()

    return StepPair(ours, theirs)


def _prepared(
    device: str, name: str, sizes: dict[str, Any], devices: int
) -> tuple[Callable[[], None], nn.Module, list[torch.Tensor]]:
    """Return our step, the plain module and its inputs, on `device`."""
    import torch

    from graph.importer import import_module
    from graph.plan import build_plan
    from graph.training import Training
    from graph.zoo import build
    from runtime.communication import World, make_groups
    from runtime.execution.executor import Executor
    from runtime.jobs.models import tensors_of
    from search.space.baselines import data_parallel

    torch.manual_seed(0)
    built = build(name, **sizes)
    with torch.device("meta"):
        module, args, kwargs = build(name, **sizes)
    graph = import_module(module, args, kwargs, name=name, batch_norm="local")
    plan = build_plan(graph, data_parallel(graph, devices), (0,) * devices)
    make_groups(plan.device_groups, TIMEOUT_S)
    executor = Executor(
        plan,
        World(devices),
        tensors_of(graph, built),
        Training(batch_size=int(built[1][0].shape[0]), batch_norm="local"),
        seed=0,
        learning_rate=LEARNING_RATE,
        device=torch.device(device),
    )
    numbers = itertools.count()
    return (
        lambda: executor.step(next(numbers)),
        built[0].to(device),
        [tensor.to(device) for tensor in built[1]],
    )
