"""Pipelines over a slow wire: two hosts of this machine with a core each, joined at 200 Mbit/s (so it needs root).

Networks of `scripts/bench pipelines_measured`, trained by data parallelism and in two pipeline stages, one a host, of
four micro-batches; predicted by the links and costs that are measured first.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial

from graph.schedule import Schedule
from scripts.benchmarks.on_testbed import app, hosts
from scripts.benchmarks.pipelines_measured import BATCHES, ERROR, QUICK, in_order
from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number

BANDWIDTH, TOPOLOGY = "200mbit", "wire"
# Strategy, micro-batches and schedule.
WAYS = (
    ("data-parallel", 1, None),
    ("data-parallel", 4, Schedule.GPIPE),
    ("3d-1x1x2-gpipe", 4, Schedule.GPIPE),
    ("3d-1x1x2", 4, Schedule.ONE_F_ONE_B),
    ("3d-1x1x2-zero-bubble", 4, Schedule.ZERO_BUBBLE),
    ("3d-1x1x2", 4, Schedule.ACTORS),
)


def run(*, quick: bool) -> BenchmarkResult:
    """Execute every network in every way; in quick mode one network.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    table: list[Row] = []
    orders: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        command = partial(app, f"sqlite:///{folder}/x.sqlite")
        with hosts(BANDWIDTH, devices=1) as on_hosts:
            on_hosts(command, "topology", "probe", "--device", "cpu", "--name", TOPOLOGY)
            for name in QUICK if quick else BATCHES:
                model = ("--model", f"scripts.benchmarks.pipelines_measured:{name}")
                rows: list[Row] = []
                for strategy, count, schedule in WAYS:
                    options = (
                        ()
                        if schedule is None
                        else ("--micro-batches", str(count), "--schedule", schedule.value)
                    )
                    report = on_hosts(
                        command, "run", *model, "--batch-size", str(BATCHES[name]), "--topology", TOPOLOGY,
                        "--strategy", strategy, "--iterations", "3", "--batch-norm", "local", *options,
                    )  # fmt: skip
                    predicted_s, measured_s = report["predicted_step_time_s"], report["median_s"]
                    rows.append(
                        {
                            "network": name,
                            "strategy": "two stages" if strategy.startswith("3d-") else strategy,
                            "micro-batches": count,
                            "schedule": "-" if schedule is None else schedule.value,
                            "predicted ms": predicted_s * 1e3,
                            "measured ms": measured_s * 1e3,
                            "off": predicted_s / measured_s - 1,
                        }
                    )
                orders += in_order(rows)
                table += rows
    largest = 100 * max(abs(number(row, "off")) for row in table)
    return BenchmarkResult(
        benchmark="pipelines_on_wire",
        conditions={"hosts": 2, "wire": BANDWIDTH},
        measurements=[
            measurement("largest error of a step", largest, "%", at_most=ERROR),
            measurement("pairs in the right order", 100 * statistics.mean(orders), "%", at_least=100.0),
        ],
        table=table,
        formats={"predicted ms": ".1f", "measured ms": ".1f", "off": "+.1%"},
    )
