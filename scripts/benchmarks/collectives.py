"""Algorithms of all-reduces between hosts: predicted and measured, alone and in steps of data parallelism.

Of every bandwidth of the wire between two hosts of two devices (`scripts/testbed`, so it needs root): the probe's own
measurements of one all-reduce of the gradients' size, and steps of networks under data parallelism with gloo's flat
all-reduce, with each algorithm that the probe measured, and with whatever is cheapest. A gain is the share of the
library's step that an algorithm saves.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.on_testbed import app, hosts
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, Row, measurement

if TYPE_CHECKING:
    from graph.zoo import Built

BANDWIDTHS = ("1gbit", "200mbit")
HOSTS, DEVICES = 2, 2
LIBRARY, CHEAPEST = "library", "cheapest"
ALGORITHMS = (LIBRARY, "halving-doubling", "leaders-2x2", CHEAPEST)
# Sizes for which a step takes 0.2 to 5 s: two ranks share a core.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": ("resnet101", {"batch_size": 4, "image_size": 96, "blocks": (3, 4, 6, 3)}),
    "vgg16": ("vgg16", {"batch_size": 4, "image_size": 64, "pooled_size": 2, "hidden": 1024}),
    "transformer": ("gpt2", {"batch_size": 4, "sequence": 64, "layers": 2}),
}
QUICK = ("transformer",)
ITERATIONS = 7
GAIN_POINTS = 10.0


def _network(name: str) -> Built:
    """Return a network at the size of this benchmark."""
    from graph.zoo import build

    zoo_name, sizes = SIZES[name]
    return build(zoo_name, **sizes)


# As `--model scripts.benchmarks.collectives:NAME`.
resnet50, vgg16, transformer = (partial(_network, name) for name in SIZES)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Seconds of a network's step over a wire, as predicted and as measured, in one of the ways that are compared."""

    network: str
    bandwidth: str
    way: str
    predicted_s: float
    measured_s: float


def run(*, quick: bool) -> BenchmarkResult:
    """Measure all networks; in quick mode one, at one bandwidth.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        runs = on_wires(ALGORITHMS, lambda *way: ("--strategy", _written(Path(folder), *way)), quick=quick)
    return gains("collectives", "algorithm", lambda _: LIBRARY, runs)


def on_wires(
    ways: Sequence[str], arguments: Callable[[str, str], Sequence[str]], *, quick: bool
) -> list[ComparedRun]:
    """Run all networks over all wires in several ways; in quick mode one network, at one bandwidth.

    arguments: of `app run`, for a network and one of the ways.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    networks, bandwidths = (QUICK, BANDWIDTHS[:1]) if quick else (tuple(SIZES), BANDWIDTHS)
    runs = []
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        command = partial(app, f"sqlite:///{folder}/x.sqlite")
        for network in networks:
            command("profile", "--model", f"{__name__}:{network}", "--device", "cpu", "--devices", "2")
        for bandwidth in bandwidths:
            name = f"wire-{bandwidth}"
            with hosts(bandwidth, devices=DEVICES) as on_hosts:
                on_hosts(command, "topology", "probe", "--device", "cpu", "--name", name)
                for network, way in product(networks, ways):
                    ran = on_hosts(
                        command, "run", "--model", f"{__name__}:{network}", "--topology", name,
                        "--iterations", str(ITERATIONS), *arguments(network, way),
                    )  # fmt: skip
                    times = ran["predicted_step_time_s"], ran["median_s"]
                    runs.append(ComparedRun(network, bandwidth, way, *times))
    return runs


def _written(folder: Path, network: str, algorithm: str) -> str:
    """Write data parallelism with an algorithm of its all-reduces; return the path of the file."""
    from app.services.models.models import import_graph, requested_model
    from graph.collective_algorithms import read_algorithm
    from search.space.baselines import data_parallel

    graph = import_graph(
        requested_model(f"{__name__}:{network}", "paper", None), batch_norm="synchronized"
    ).graph
    count = HOSTS * DEVICES
    strategy = data_parallel(graph, count)
    if algorithm != CHEAPEST:
        chosen = ((tuple(range(count)), read_algorithm(algorithm, count)),)
        strategy = replace(strategy, collective_algorithms=chosen)
    file = folder / f"{network}-{algorithm}.json"
    file.write_text(json.dumps(strategy.to_json(graph)))
    return str(file)


def gains(
    benchmark: str, what: str, base_of: Callable[[str], str], runs: list[ComparedRun]
) -> BenchmarkResult:
    """Return the gains of some runs beside their targets, and a row for each run.

    what: the name of the ways' column. base_of: the way that each is compared with, itself of such a one.
    """
    measurements: list[MeasuredValue] = []
    rows: list[Row] = []
    by_way = {(ran.network, ran.bandwidth, ran.way): ran for ran in runs}
    for ran in runs:
        whole = by_way[ran.network, ran.bandwidth, base_of(ran.way)]
        predicted, measured = 1 - ran.predicted_s / whole.predicted_s, 1 - ran.measured_s / whole.measured_s
        rows.append(
            {
                "network": ran.network,
                "wire": ran.bandwidth,
                what: ran.way,
                "predicted ms": ran.predicted_s * 1e3,
                "measured ms": ran.measured_s * 1e3,
                "error": ran.predicted_s / ran.measured_s - 1,
                "predicted gain": predicted,
                "measured gain": measured,
            }
        )
        if ran is not whole:
            measurements.append(
                measurement(
                    f"{ran.network}, {ran.bandwidth}, {ran.way}: gain, error",
                    100 * abs(predicted - measured),
                    "points",
                    at_most=GAIN_POINTS,
                )
            )
    return BenchmarkResult(
        benchmark=benchmark,
        conditions={"hosts": HOSTS, "devices a host": DEVICES},
        measurements=measurements,
        table=rows,
        formats={
            **dict.fromkeys(("predicted ms", "measured ms"), ",.0f"),
            **dict.fromkeys(("error", "predicted gain", "measured gain"), "+.1%"),
        },
    )
