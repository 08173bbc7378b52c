"""Predicted against measured step times of every network of the zoo on one CPU device of this machine.

What an operator costs is the only thing that such a prediction rests on. The costs that the database does not hold are
measured first, each network's right before its run. SOAPSTONE_DATABASE_URL keeps the database; else it is a temporary
one.
"""

from __future__ import annotations

from scripts.benchmarks.prediction import database, executed
from scripts.benchmarks.result import BenchmarkResult, measurement
from scripts.benchmarks.zoo import networks

ITERATIONS = 8
MEAN_ERROR_PERCENT, WORST_ERROR_PERCENT = 5.0, 10.0


def run(*, quick: bool) -> BenchmarkResult:
    """Profile, predict and execute each network on one device; in quick mode a small one.

    Raises:
        SoapstoneError: a run failed.
    """
    from app.services.models.models import requested_model

    chosen, preset = networks(quick=quick)
    rows, errors = [], []
    with database():
        for name, batch_size in chosen.items():
            report = executed(requested_model(name, preset, batch_size), "single-device", 1, ITERATIONS)
            error = report.predicted_s / report.result.median_s - 1
            errors.append(abs(error))
            rows.append(
                {
                    "network": name,
                    "batch": str(batch_size),
                    "predicted": f"{report.predicted_s * 1e3:,.1f} ms",
                    "measured": f"{report.result.median_s * 1e3:,.1f} ms",
                    "error": f"{100 * error:+.1f} %",
                }
            )
    return BenchmarkResult(
        benchmark="single_device",
        conditions={"networks": len(chosen), "steps a run": ITERATIONS},
        measurements=[
            measurement("mean error", 100 * sum(errors) / len(errors), "%", at_most=MEAN_ERROR_PERCENT),
            measurement("worst error", 100 * max(errors), "%", at_most=WORST_ERROR_PERCENT),
        ],
        table=rows,
    )
