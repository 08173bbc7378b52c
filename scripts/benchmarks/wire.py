"""Strategies found for two hosts of this machine, against the expert's, data parallelism and DistributedDataParallel.

Of every network and bandwidth of the wire between two hosts (`scripts/testbed`, so it needs root): operators and links
are measured and the strategies executed while two other processes work on and off at random; then the same strategies
and DistributedDataParallel itself are executed again on the quiet machine. A prediction is compared with what a step
takes but for what other processes took of its cores, at the speed of its costs; the loss of choosing by prediction
likewise.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.on_testbed import app, hosts, said
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, Row, measurement

if TYPE_CHECKING:
    from graph.zoo import Built

BANDWIDTHS = ("1gbit", "200mbit")
STRATEGIES = ("best", "expert", "data-parallel")
# Sizes for which a step takes 0.1 to 3 s on one core.
SIZES: dict[str, dict[str, Any]] = {
    "alexnet": {"batch_size": 16},
    "vgg16": {"batch_size": 4, "image_size": 128, "pooled_size": 4},
    "rnnlm": {"batch_size": 16, "steps": 10},
    "nmt": {"batch_size": 16, "steps": 10},
    "dlrm": {"batch_size": 256, "rows": 10000},
    "gpt2": {"batch_size": 4, "sequence": 128, "layers": 4},
}
QUICK = ("dlrm",)
# A run is given about so many seconds, within these numbers of steps.
SECONDS, FEWEST_STEPS, MOST_STEPS = 20.0, 3, 10
ERROR, LOSS_OF_CHOICE, GAIN = 0.10, 0.02, 1.3
# Works and rests for 1 to 4 s in turn, drawn at random.
RESTLESS = """
import random, sys, time
draw = random.Random(int(sys.argv[1]))
while True:
    until = time.monotonic() + draw.uniform(1, 4)
    while time.monotonic() < until:
        sum(range(10_000))
    time.sleep(draw.uniform(1, 4))
"""


def _network(name: str) -> Built:
    """Return a network of the zoo at the size of this benchmark."""
    from graph.zoo import build

    return build(name, **SIZES[name])


# As `--model scripts.benchmarks.wire:NAME`.
alexnet, vgg16, rnnlm, nmt, dlrm, gpt2 = (partial(_network, name) for name in SIZES)


@dataclass(frozen=True, slots=True)
class WireRun:
    """One strategy on the hosts: predicted, beside others' work, on the quiet machine; seconds of a step.

    restless_s: as measured. undisturbed_s: the mean, less what others took, at equal speed.
    """

    strategy: str
    predicted_s: float
    restless_s: float
    undisturbed_s: float
    quiet_s: float

    @property
    def error(self) -> float:
        """By what share the prediction is above the undisturbed step."""
        return self.predicted_s / self.undisturbed_s - 1


@dataclass(frozen=True, slots=True)
class WireCase:
    """The runs of one network at one bandwidth, the found strategy first; DistributedDataParallel's step.

    luck: by what share the strategy that the search found is slower by the costs that confirming it measured again.
    """

    network: str
    bandwidth: str
    runs: tuple[WireRun, ...]
    ddp_s: float
    luck: float

    @property
    def order_is_right(self) -> bool:
        """Whether the runs are in the same order by prediction and by undisturbed step."""
        by_time = sorted(self.runs, key=lambda run: run.undisturbed_s)
        return by_time == sorted(self.runs, key=lambda run: run.predicted_s)

    @property
    def loss_of_choice(self) -> float:
        """By what share the fastest by prediction is slower than the fastest."""
        chosen = min(self.runs, key=lambda run: run.predicted_s)
        return chosen.undisturbed_s / min(run.undisturbed_s for run in self.runs) - 1


def run(*, quick: bool) -> BenchmarkResult:
    """Measure all cases; in quick mode one, at one bandwidth.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    networks, bandwidths = (QUICK, BANDWIDTHS[:1]) if quick else (tuple(SIZES), BANDWIDTHS)
    cases = [case for network in networks for case in measured(network, bandwidths)]
    return summary(cases)


def measured(network: str, bandwidths: Sequence[str]) -> Iterator[WireCase]:
    """Measure a network at some bandwidths; operators are measured once.

    Raises:
        RuntimeFailure: a command failed.
    """
    model = ("--model", f"{__name__}:{network}")
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        command = partial(app, f"sqlite:///{folder}/x.sqlite")
        with _restless(0):
            command("profile", *model, "--device", "cpu", "--devices", "2")
        for number, bandwidth in enumerate(bandwidths):
            wire = ("--topology", f"wire-{bandwidth}")
            with hosts(bandwidth, devices=1) as on_hosts:
                with _restless(2 * number + 1):
                    on_hosts(command, "topology", "probe", "--device", "cpu", "--name", wire[1])
                    found = command("search", *model, *wire)
                predicted = {prediction["name"]: prediction for prediction in found["predictions"]}
                steps = {
                    strategy: predicted["found" if strategy == "best" else strategy]["predicted_step_time_s"]
                    for strategy in STRATEGIES
                }
                executions = {
                    strategy: (
                        "run", *model, *wire, "--strategy", strategy, "--iterations",
                        str(min(MOST_STEPS, max(FEWEST_STEPS, round(SECONDS / step_s)))),
                    )
                    for strategy, step_s in steps.items()
                }  # fmt: skip
                with _restless(2 * number + 2):
                    restless = {strategy: on_hosts(command, *executions[strategy]) for strategy in STRATEGIES}
                quiet = {strategy: on_hosts(command, *executions[strategy]) for strategy in STRATEGIES}
                ddp_s = on_hosts(_ddp, network, str(FEWEST_STEPS))["median_s"]
            runs = {
                ran["digest"]: WireRun(
                    "found" if strategy == "best" else strategy,
                    ran["predicted_step_time_s"],
                    ran["median_s"],
                    ran["at_usual_speed_s"] or ran["undisturbed_s"] or ran["median_s"],
                    quiet[strategy]["median_s"],
                )
                # A baseline that was found again stands once, under its own name.
                for strategy, ran in restless.items()
            }
            yield WireCase(network, bandwidth, tuple(runs.values()), ddp_s, _luck(found["confirmations"]))


def _luck(confirmations: Sequence[dict[str, Any]]) -> float:
    """Return how much slower the first winner became when it was confirmed."""
    if not confirmations:
        return 0.0
    winner = confirmations[0]["steps"][0]
    return float(winner["after_s"] / winner["before_s"] - 1)


def summary(cases: Sequence[WireCase]) -> BenchmarkResult:
    """Return the figures of some cases beside their targets, and a row for each run."""
    measurements: list[MeasuredValue] = []
    for case in cases:
        what = f"{case.network}, {case.bandwidth}"
        chosen = min(case.runs, key=lambda run: run.predicted_s)
        others_s = {run.strategy: run.quiet_s for run in case.runs}
        measurements += [
            measurement(f"{what}: order right", float(case.order_is_right), "", at_least=1.0),
            measurement(
                "    loss of choosing by prediction",
                100 * case.loss_of_choice,
                "%",
                at_most=100 * LOSS_OF_CHOICE,
            ),
            measurement(
                "    largest error",
                100 * max(abs(run.error) for run in case.runs),
                "%",
                at_most=100 * ERROR,
            ),
            measurement(
                "    data parallelism over found, quiet",
                others_s["data-parallel"] / chosen.quiet_s,
                "x",
                at_least=GAIN,
            ),
            measurement("    DistributedDataParallel over found, quiet", case.ddp_s / chosen.quiet_s, "x"),
            measurement("    found, slower by costs measured again", 100 * case.luck, "%"),
        ]
    return BenchmarkResult(
        benchmark="wire",
        conditions={"hosts": 2, "devices a host": 1, "busy processes": 2},
        measurements=measurements,
        table=[_row(case, run) for case in cases for run in case.runs],
        formats={
            **dict.fromkeys(("predicted ms", "restless ms", "undisturbed ms", "quiet ms", "DDP ms"), ",.0f"),
            "error": "+.1%",
        },
    )


def _row(case: WireCase, run: WireRun) -> Row:
    return {
        "network": case.network,
        "wire": case.bandwidth,
        "strategy": run.strategy,
        "predicted ms": run.predicted_s * 1e3,
        "restless ms": run.restless_s * 1e3,
        "undisturbed ms": run.undisturbed_s * 1e3,
        "error": run.error,
        "quiet ms": run.quiet_s * 1e3,
        "DDP ms": case.ddp_s * 1e3,
    }


@contextmanager
def _restless(seed: int) -> Iterator[None]:
    """Let two processes work on and off, wherever the system puts them."""
    busy = [subprocess.Popen([sys.executable, "-c", RESTLESS, str(2 * seed + number)]) for number in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _ddp(network: str, steps: str, before: Sequence[str] = ()) -> dict[str, Any]:
    """Run DistributedDataParallel on the hosts."""
    return said([*before, sys.executable, "-m", "scripts.benchmarks.wire_ddp", network, steps])
