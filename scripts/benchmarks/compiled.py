"""What torch.compile brings: data parallelism with all stretches compiled, against `torch.compile(DDP)` and without.

On two processes, the same network, batch normalization local on both sides, torch's SGD on both sides' terms. Dropout
draws as each side does: ours is the same in any split, torch's is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graph.training import Training
from scripts.benchmarks.pairs import StepPair, time_pair
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement
from scripts.benchmarks.runtime import LEARNING_RATE, PROCESSES, executor_of, numbered

AT_MOST = 1.05
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch_size": 4, "sequence": 128, "layers": 4},
    "hf-resnet": {"batch_size": 8, "image_size": 128},
}
QUICK: dict[str, dict[str, Any]] = {"mlp": {"batch_size": 128}}


def run(*, quick: bool) -> BenchmarkResult:
    """Time ours, compiled, against torch.compile(DDP), and against ours as it is.

    Raises:
        RuntimeError: a process failed.
    """
    blocks, steps = (3, 1) if quick else (9, 2)
    rows: list[MeasuredValue] = []
    for name, sizes in (QUICK if quick else NETWORKS).items():
        for other in ("torch.compile(DDP)", "not compiled"):
            timing = time_pair(
                compiled_pair, PROCESSES, blocks=blocks, steps=steps, name=name, sizes=sizes, other=other
            )
            at_most = AT_MOST if other.startswith("torch") else None
            rows.append(measurement(f"{name}, compiled / {other}", timing.ratio, "x", at_most=at_most))
            rows.append(measurement("    compiled step, fastest block", min(timing.ours_s) * 1e3, "ms"))
    return BenchmarkResult(
        benchmark="compiled",
        conditions={"processes": PROCESSES, "blocks": blocks, "steps a block": steps, "batch norm": "local"},
        measurements=rows,
    )


def compiled_pair(device: str, name: str, sizes: dict[str, Any], other: str) -> StepPair:
    """Prepare data parallelism of a network on all processes: ours with all stretches compiled, and another's."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from graph.importer import import_module
    from graph.plan import build_plan
    from graph.stretches import stretches
    from graph.zoo import build
    from search.space.baselines import data_parallel

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    built = build(name, **sizes)
    with torch.device("meta"):
        module, args, kwargs = build(name, **sizes)
    graph = import_module(module, args, kwargs, name=name, batch_norm="local")
    training = Training(batch_size=sizes["batch_size"], batch_norm="local")
    strategy = data_parallel(graph, world_size)
    compiled = replace(strategy, compiled=stretches(build_plan(graph, strategy, (0,) * world_size)))
    ours = numbered(executor_of(graph, compiled, built, training, device, LEARNING_RATE))
    if other == "not compiled":
        return StepPair(ours, numbered(executor_of(graph, strategy, built, training, device, LEARNING_RATE)))
    whole, args, kwargs = built
    theirs = torch.compile(DistributedDataParallel(whole.to(device)))
    optimizer = torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE)
    # Its part of the samples, as a sampler would hand it out.
    part = [tensor.tensor_split(world_size)[rank].contiguous().to(device) for tensor in args]
    named = {
        key: tensor.tensor_split(world_size)[rank].contiguous().to(device) for key, tensor in kwargs.items()
    }

    def step() -> None:
        optimizer.zero_grad()
        output = theirs(*part, **named)
        (output if isinstance(output, torch.Tensor) else output["loss"]).backward()
        optimizer.step()

    return StepPair(ours, step)
