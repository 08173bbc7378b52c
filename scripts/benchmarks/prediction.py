"""Predicted against measured step times of many strategies, executed for real on CPU devices of this machine: two, and
four where it has so many cores.

Of every network: the strategies that a user names, the one that a search finds, and data parallelism with a part of its
operators configured at random, so that there is much to put in order. All of it is stored as any run is; the figures
are those of the view `prediction_accuracy`. SOAPSTONE_DATABASE_URL keeps the database; else it is a temporary one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement

if TYPE_CHECKING:
    import numpy as np

    from app.services.models.models import ModelRequest
    from app.services.run.report import RunReport
    from graph.operators import OperatorGraph
    from graph.schedule import Schedule
    from graph.strategy import Strategy

DEVICES = (2, 4)
OUTSIDE = "scripts.benchmarks.outside"
# Batch sizes for which a step takes 0.1 to 2 s on one core, at published sizes otherwise.
NETWORKS = {
    "mlp": 64, "alexnet": 16, "inception": 4, "resnet101": 2, "densenet121": 2,
    f"{OUTSIDE}:unet": 4, f"{OUTSIDE}:gru": 32, f"{OUTSIDE}:moe": 8,
}  # fmt: skip
NAMED = ("data-parallel", "single-device", "expert", "megatron")
# The share of the groups of operators that are configured at random.
RANDOM_SHARES = (0.05, 0.2, 0.5)
MEAN_ERROR, P95_ERROR, TAU, LOSS_OF_CHOICE = 0.05, 0.10, 0.9, 0.02

EVERY = """
SELECT avg(abs(relative_error)) AS mean, quantile_cont(abs(relative_error), 0.95) AS p95, count(*) AS n
FROM predicted_vs_measured WHERE relative_error IS NOT NULL
"""


def run(*, quick: bool) -> BenchmarkResult:
    """Search, execute and compare; in quick mode one small network.

    Raises:
        SoapstoneError: a run failed.
    """
    from profiler.pinning import usable_cores

    networks = {"mlp": 8} if quick else NETWORKS
    # Devices that share a core take turns, which no prediction knows.
    counts = [count for count in DEVICES if count <= max(DEVICES[0], len(usable_cores()))]
    with database(), tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        for devices in counts[:1] if quick else counts:
            for name, batch_size in networks.items():
                _execute_all(name, "small" if quick else "paper", batch_size, devices, Path(folder))
        rows = _measurements()
    conditions: dict[str, str | int | float] = {"devices": " and ".join(map(str, counts)), "steps a run": 10}
    return BenchmarkResult(benchmark="prediction", conditions=conditions, measurements=rows)


@contextmanager
def database() -> Iterator[None]:
    """Use the database that the environment names, else a new one for this benchmark alone."""
    if os.environ.get("SOAPSTONE_DATABASE_URL"):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        os.environ["SOAPSTONE_DATABASE_URL"] = f"sqlite:///{folder}/x.sqlite"
        try:
            yield
        finally:
            del os.environ["SOAPSTONE_DATABASE_URL"]


def _execute_all(name: str, preset: str, batch_size: int, devices: int, folder: Path) -> None:
    from app.services.models.models import import_graph, requested_model
    from app.services.progress import Progress
    from app.services.search.request import SearchRequest
    from app.services.search.search import run_search

    model = requested_model(name, preset, batch_size)
    search = run_search(
        SearchRequest(
            model=model, topology="local", devices=devices, nodes=None, processor="cpu",
            optimizer="sgd", batch_norm="synchronized", proposals=300, chains=4, seed=0, beta=300.0, order="program",
            time_limit_s=None, on_miss="measure",
        ),
        None,
        Progress(),
    )  # fmt: skip
    by_digest = {executed(model, reference, devices).strategy_digest: reference for reference in NAMED}
    references = [*by_digest.values()]
    best = search.predictions[0].digest
    graph = import_graph(model, batch_norm="synchronized").graph
    drawn = []
    for number, strategy in enumerate(_partly_random(graph, devices)):
        if strategy.digest not in {best, *by_digest}:
            file = folder / f"{name}-{devices}-{number}.json"
            file.write_text(json.dumps(strategy.to_json(graph)))
            drawn.append(str(file))
    others = [*([best] if best not in by_digest else []), *drawn]
    for reference in others:
        executed(model, reference, devices)
    # Once more, backwards: a machine's speed drifts, and how far belongs to the noise of a measurement.
    for reference in reversed([*references, *others]):
        executed(model, reference, devices)


def executed(
    model: ModelRequest,
    reference: str,
    devices: int = DEVICES[0],
    iterations: int = 10,
    *,
    batch_norm: str = "synchronized",
    micro_batches: int | None = None,
    schedule: Schedule | None = None,
) -> RunReport:
    """Execute a strategy on CPU devices and return the report; costs that are missing are measured first."""
    from app.services.progress import Progress
    from app.services.run.run import RunRequest, run_strategy

    report = run_strategy(
        RunRequest(
            model=model, strategy=reference, devices=devices, processor="cpu", optimizer="sgd",
            batch_norm=batch_norm, iterations=iterations, warmup=2, seed=0, verify=False, on_miss="measure",
            timeout_s=600, micro_batches=micro_batches, schedule=schedule,
        ),
        None,
        Progress(),
    )  # fmt: skip
    if report is None:
        raise RuntimeError("benchmark: must run alone, not under torchrun")
    return report


def _partly_random(graph: OperatorGraph, devices: int) -> Iterator[Strategy]:
    import numpy as np

    for seed, share in enumerate(RANDOM_SHARES):
        yield partly_random(graph, devices, share, np.random.default_rng(seed))


def partly_random(graph: OperatorGraph, devices: int, share: float, rng: np.random.Generator) -> Strategy:
    """Return data parallelism with a share of the groups of operators (one at least) configured at random."""
    from search.space.baselines import data_parallel
    from search.space.configurations import random_configuration
    from search.space.groups import find_groups, following

    groups = find_groups(graph)
    chosen = rng.choice(len(groups), max(1, round(share * len(groups))), replace=False).tolist()
    drawn = [
        (groups[number], random_configuration(graph.operators[groups[number].head], devices, rng))
        for number in chosen
    ]
    return following(graph, drawn, data_parallel(graph, devices).configurations)


def _measurements() -> list[MeasuredValue]:
    from app import open_database

    rows: list[MeasuredValue] = []
    with open_database() as database:
        accuracies = database.frame("SELECT * FROM prediction_accuracy ORDER BY topology_id, model").to_dict(
            "records"
        )
        (every,) = database.frame(EVERY).to_dict("records")
    for accuracy in accuracies:
        what = f"{accuracy['model']}, {accuracy['strategies']} strategies"
        rows += [
            measurement(f"{what}: mean error", accuracy["mean_error"] * 100, "%"),
            measurement("    with its sign", accuracy["bias"] * 100, "%"),
            measurement("    noise of a measurement", accuracy["noise"] * 100, "%"),
            measurement(
                f"    Kendall's tau over {accuracy['pairs']} pairs", accuracy["kendall_tau"], "", at_least=TAU
            ),
            measurement(
                "    loss of choosing by prediction",
                accuracy["loss_of_choice"] * 100,
                "%",
                at_most=LOSS_OF_CHOICE * 100,
            ),
        ]
    rows += [
        measurement(
            f"all {every['n']} strategies: mean error", every["mean"] * 100, "%", at_most=MEAN_ERROR * 100
        ),
        measurement("    95th percentile", every["p95"] * 100, "%", at_most=P95_ERROR * 100),
    ]
    return rows
