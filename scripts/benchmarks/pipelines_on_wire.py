"""Pipelines over a slow wire: two hosts of this machine with a core each, joined at 200 Mbit/s (so it needs root).

Networks of `scripts/bench pipelines_measured`, trained by data parallelism and in two pipeline stages, one a host, of
four micro-batches; predicted by the links and costs that are measured first.
"""

from __future__ import annotations

import tempfile
from functools import partial

from scripts.benchmarks.on_testbed import app, hosts
from scripts.benchmarks.pipelines_measured import BATCHES, ERROR
from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number

BANDWIDTH, TOPOLOGY = "200mbit", "wire"
NETWORKS = ("resnet50", "nmt")
# Strategy, and what else a run is asked for.
WAYS = (
    ("data-parallel", ()),
    ("data-parallel", ("--micro-batches", "4")),
    ("3d-1x1x2-gpipe", ("--micro-batches", "4", "--schedule", "gpipe")),
    ("3d-1x1x2", ("--micro-batches", "4")),
)


def run(*, quick: bool) -> BenchmarkResult:
    """Execute every network in every way; in quick mode one network.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    table: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        command = partial(app, f"sqlite:///{folder}/x.sqlite")
        with hosts(BANDWIDTH, devices=1) as on_hosts:
            on_hosts(command, "topology", "probe", "--device", "cpu", "--name", TOPOLOGY)
            for name in NETWORKS[-1:] if quick else NETWORKS:
                model = ("--model", f"scripts.benchmarks.pipelines_measured:{name}")
                for strategy, options in WAYS:
                    report = on_hosts(
                        command, "run", *model, "--batch-size", str(BATCHES[name]), "--topology", TOPOLOGY,
                        "--strategy", strategy, "--iterations", "3", "--batch-norm", "local", *options,
                    )  # fmt: skip
                    predicted_s, measured_s = report["predicted_step_time_s"], report["median_s"]
                    table.append(
                        {
                            "network": name,
                            "strategy": strategy,
                            "micro-batches": 4 if options else 1,
                            "predicted ms": predicted_s * 1e3,
                            "measured ms": measured_s * 1e3,
                            "off": predicted_s / measured_s - 1,
                        }
                    )
    largest = 100 * max(abs(number(row, "off")) for row in table)
    return BenchmarkResult(
        benchmark="pipelines_on_wire",
        conditions={"hosts": 2, "wire": BANDWIDTH},
        measurements=[measurement("largest error of a step", largest, "%", at_most=ERROR)],
        table=table,
        formats={"predicted ms": ".1f", "measured ms": ".1f", "off": "+.1%"},
    )
