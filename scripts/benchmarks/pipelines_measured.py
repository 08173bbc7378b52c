"""Pipelines as executed on this machine's cores: predicted beside measured, step and peak memory, by schedule.

Every network is trained in one batch by data parallelism, by data parallelism that adds up the gradients of four
micro-batches, and in two pipeline stages, balanced by measured costs, of four micro-batches in either schedule and of
eight. Each strategy is executed twice, the second time backwards, and its step is the mean of the two medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from graph.schedule import Schedule
from scripts.benchmarks.prediction import database, executed
from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number

if TYPE_CHECKING:
    from app.services.run.report import RunReport
    from graph.zoo import Built

# Sizes for which a step takes 0.3 to 2 s on two cores; the batch is eight samples or a multiple.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"sequence": 128, "layers": 4},
    "bert_large": {"sequence": 128, "layers": 4, "hidden": 512, "heads": 8},
    "resnet50": {"image_size": 128, "blocks": (3, 4, 6, 3)},
    "nmt": {"steps": 6, "hidden": 256, "vocabulary": 8000},
}
BATCHES = {"gpt2": 8, "bert_large": 8, "resnet50": 8, "nmt": 32}
BUILDERS = {"bert_large": "bert-large", "resnet50": "resnet101"}
QUICK = ("nmt",)
# Strategy, micro-batches, schedule.
WAYS = (
    ("data-parallel", 1, None),
    ("data-parallel", 4, Schedule.GPIPE),
    ("3d-1x1x2-gpipe", 4, Schedule.GPIPE),
    ("3d-1x1x2", 4, Schedule.ONE_F_ONE_B),
    ("3d-1x1x2", 8, Schedule.ONE_F_ONE_B),
)
DEVICES, ITERATIONS = 2, 5
ERROR, MEMORY_ERROR = 10.0, 5.0
# Steps that are this close are of no order.
NOISE = 0.02


def _network(name: str, batch_size: int) -> Built:
    from graph.zoo import build

    return build(BUILDERS.get(name, name), batch_size=batch_size, **SIZES[name])


# As `--model scripts.benchmarks.pipelines_measured:NAME`.
def gpt2(batch_size: int) -> Built:
    """Return GPT-2 of four layers."""
    return _network("gpt2", batch_size)


def bert_large(batch_size: int) -> Built:
    """Return BERT of four layers."""
    return _network("bert_large", batch_size)


def resnet50(batch_size: int) -> Built:
    """Return ResNet-50."""
    return _network("resnet50", batch_size)


def nmt(batch_size: int) -> Built:
    """Return the translation network of six steps."""
    return _network("nmt", batch_size)


@dataclass(slots=True)
class _Executed:
    """What the two executions of one way are: predicted and measured seconds, and bytes of the fullest device."""

    predicted_s: list[float]
    measured_s: list[float]
    predicted_bytes: int = 0
    measured_bytes: int = 0

    def add(self, report: RunReport) -> None:
        self.predicted_s.append(report.predicted_s)
        undisturbed_s = report.result.undisturbed_s
        self.measured_s.append(report.result.median_s if undisturbed_s is None else undisturbed_s)
        fullest = max(report.memory, key=lambda memory: memory.measured)
        self.predicted_bytes, self.measured_bytes = fullest.predicted, fullest.measured


def run(*, quick: bool) -> BenchmarkResult:
    """Execute every network in every way.

    Raises:
        SoapstoneError: a run failed.
    """
    from app.services.models.models import requested_model

    table: list[Row] = []
    orders: list[bool] = []
    with database():
        for name in QUICK if quick else SIZES:
            done = {way: _Executed([], []) for way in WAYS}
            model = requested_model(f"{__name__}:{name}", "paper", BATCHES[name])
            for way in (*WAYS, *reversed(WAYS)):
                strategy, count, schedule = way
                report = executed(
                    model,
                    strategy,
                    DEVICES,
                    ITERATIONS,
                    batch_norm="local",
                    micro_batches=count,
                    schedule=schedule,
                )
                done[way].add(report)
            rows = [_row(name, way, both) for way, both in done.items()]
            table += rows
            orders += in_order(rows)
    return BenchmarkResult(
        benchmark="pipelines_measured",
        conditions={"devices": DEVICES, "steps a run": ITERATIONS},
        measurements=[
            measurement("largest error of a step", 100 * max(abs(number(row, "off")) for row in table), "%",
                        at_most=ERROR),
            measurement("mean error of a step", 100 * statistics.mean(abs(number(row, "off")) for row in table), "%"),
            measurement("largest error of a peak", 100 * max(abs(number(row, "peak off")) for row in table), "%",
                        at_most=MEMORY_ERROR),
            measurement("pairs in the right order", 100 * statistics.mean(orders), "%", at_least=100.0),
        ],
        table=table,
        formats={
            "predicted ms": ".1f", "measured ms": ".1f", "off": "+.1%", "peak MB": ".1f", "peak off": "+.1%",
        },
    )  # fmt: skip


def in_order(rows: Sequence[Row]) -> list[bool]:
    """Return, of each two rows whose measured steps differ by more than noise, whether predictions differ alike."""
    return [
        (number(one, "predicted ms") - number(other, "predicted ms"))
        * (number(one, "measured ms") - number(other, "measured ms"))
        > 0
        for one, other in combinations(rows, 2)
        if abs(number(one, "measured ms") / number(other, "measured ms") - 1) > NOISE
    ]


def _row(name: str, way: tuple[str, int, Schedule | None], both: _Executed) -> Row:
    strategy, count, schedule = way
    predicted_s, measured_s = statistics.mean(both.predicted_s), statistics.mean(both.measured_s)
    return {
        "network": name,
        "strategy": "two stages" if strategy.startswith("3d-") else strategy,
        "micro-batches": count,
        "schedule": "-" if schedule is None else schedule.value,
        "predicted ms": predicted_s * 1e3,
        "measured ms": measured_s * 1e3,
        "off": predicted_s / measured_s - 1,
        "peak MB": both.measured_bytes / 1e6,
        "peak off": both.predicted_bytes / both.measured_bytes - 1,
    }
