"""What merging and fusing bring on this machine: all of either kind that a network allows, against it as imported.

Data parallelism on one and on two devices; both sides take turns in the same processes, so that what else the machine
does meets both. Beside it what the simulator predicts, by costs that are measured for this benchmark.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from graph.training import Training
from scripts.benchmarks.pairs import StepPair, time_pair
from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number
from scripts.benchmarks.runtime import LEARNING_RATE, executor_of, numbered

NETWORKS: dict[str, dict[str, Any]] = {
    "inception": {"batch_size": 4},
    "bert-large": {"batch_size": 2, "layers": 2},
    "resnet101": {"batch_size": 4, "blocks": (1, 1, 1, 1)},
    "hf-llama": {"preset": "small", "batch_size": 4},
    "hf-t5": {"preset": "small", "batch_size": 4},
}
MERGED, FUSED = KINDS = ("merged", "fused")
QUICK: dict[str, dict[str, Any]] = {"bert-large": {"preset": "small", "batch_size": 4}}


def run(*, quick: bool) -> BenchmarkResult:
    """Time all networks; in quick mode one, small.

    Raises:
        RuntimeError: a process failed.
    """
    blocks, steps = (3, 1) if quick else (9, 2)
    rows: list[Row] = []
    for name, sizes in (QUICK if quick else NETWORKS).items():
        for kind in KINDS:
            for devices in (1, 2):
                rows.append(compared(name, sizes, kind, devices, (blocks, steps)))
    off = [abs(number(row, "predicted ratio") / number(row, "ratio") - 1) for row in rows]
    formats = {column: ".1f" for column in rows[0] if column.endswith("(ms)")}
    return BenchmarkResult(
        benchmark="substitutions",
        conditions={"blocks": blocks, "steps a block": steps, "strategy": "data parallel"},
        measurements=[
            measurement("predicted ratio beside measured: mean error", 100 * sum(off) / len(off), "%")
        ],
        table=rows,
        formats=formats | {"ratio": ".3f", "predicted ratio": ".3f"},
    )


def compared(name: str, sizes: dict[str, Any], kind: str, devices: int, length: tuple[int, int]) -> Row:
    """Return the row of a network with substitutions of a kind; `length`: blocks, and steps a block."""
    blocks, steps = length
    timing = time_pair(pair, devices, blocks=blocks, steps=steps, name=name, sizes=sizes, kind=kind)
    plain_s, other_s = predicted(name, sizes, kind, devices)
    return {
        "network": name,
        "substitutions": kind,
        "devices": devices,
        "as imported (ms)": min(timing.theirs_s) * 1e3,
        "with them (ms)": min(timing.ours_s) * 1e3,
        "ratio": timing.ratio,
        "predicted (ms)": plain_s * 1e3,
        "predicted, with them (ms)": other_s * 1e3,
        "predicted ratio": other_s / plain_s,
    }


def graphs(name: str, sizes: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """Return the graph of a network as imported, and with all substitutions of a kind."""
    import torch

    from graph.importer import import_module
    from graph.substitutions.rewriting import (
        WITH_COMPILER,
        WITHOUT_COMPILER,
        every_substitution,
        rewritten,
    )
    from graph.zoo import build

    with torch.device("meta"):
        module, args, kwargs = build(name, **sizes)
    graph = import_module(module, args, kwargs, name=name)
    rules = WITH_COMPILER if kind == FUSED else WITHOUT_COMPILER
    return graph, rewritten(graph, every_substitution(graph, rules))


def pair(device: str, name: str, sizes: dict[str, Any], kind: str) -> StepPair:
    """Prepare data parallelism of a network on all processes: with substitutions of a kind, and as imported."""
    import torch
    import torch.distributed as dist

    from graph.zoo import build
    from search.space.baselines import data_parallel

    size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    built = build(name, **sizes)
    training = Training(batch_size=sizes["batch_size"])
    graph, other = graphs(name, sizes, kind)
    return StepPair(
        *(
            numbered(executor_of(each, data_parallel(each, size), built, training, device, LEARNING_RATE))
            for each in (other, graph)
        )
    )


def predicted(name: str, sizes: dict[str, Any], kind: str, devices: int) -> tuple[float, float]:
    """Return the predicted step in seconds as imported and with substitutions, by costs measured now."""
    from app.db.store import Store
    from app.services.models.models import ImportedModel, ModelRequest
    from app.services.predict.predict import find_target, prepare
    from app.services.predict.problem import problem_of
    from app.services.progress import Progress
    from search.algorithms.best_tracker import simulated
    from search.space.baselines import data_parallel

    seconds = []
    with tempfile.TemporaryDirectory() as folder, Store.open(str(Path(folder) / "costs.sqlite")) as store:
        progress = Progress()
        target = find_target(store, "local", progress, devices=devices)
        training = Training(batch_size=sizes["batch_size"])
        for graph in graphs(name, sizes, kind):
            model = ImportedModel(ModelRequest(name), graph, sizes["batch_size"])
            with prepare(store, model, target, training, "measure", progress) as setting:
                problem = problem_of(setting)
                seconds.append(simulated(problem, data_parallel(graph, devices), "program").seconds)
    return seconds[0], seconds[1]
