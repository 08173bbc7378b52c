"""What searches with pipelines choose for BERT-large and GPT-2 XL on 16 P100, and for Llama-3-8B on 64 H100.

Models of FlexFlow's P100 cluster, in float32, and of 8 HGX H100, in bfloat16; Adam, steps by data sheets, nothing is
measured. As in `app search --micro-batches auto` each number of micro-batches has a search of its own, with one global
batch. Each is compared with the best 3-D parallelism within the memories: all degrees of Megatron-LM, under
GPipe and 1F1B, without and with ZeRO-2, and where activations must be made again, as much as must. These are simulated
apart from the search, in full but for those of which a device or link is busy for longer than the best step so far.

A search takes one core; its seconds are those of that core, since others may use the machine. That none is worse than
the best baseline must hold, else the benchmark fails.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from graph.errors import SoapstoneError
from graph.schedule import Schedule
from scripts.benchmarks.pipelines import chosen_text
from scripts.benchmarks.result import BenchmarkResult, Row, measurement
from scripts.benchmarks.simulator import datasheet_problem

if TYPE_CHECKING:
    from search.algorithms.staging import Staging, Stagings
    from search.outcome import Outcome
    from search.problem import Problem


class Case(NamedTuple):
    """A network of the zoo and its preset, on nodes of a packaged topology, and the samples of a step."""

    network: str
    preset: str
    topology: str
    nodes: int
    batch_size: int
    precision: str


CASES = (
    Case("bert-large", "paper", "p100-cluster", 4, 128, "float32"),
    Case("gpt2", "xl", "p100-cluster", 4, 128, "float32"),
    Case("hf-llama", "paper", "hgx-h100", 8, 128, "bfloat16"),
)
QUICK = (Case("gpt2", "small", "p100-cluster", 1, 16, "float32"),)
MICRO_BATCHES = (8,)
QUICK_MICRO_BATCHES = (1, 4)
MOST_SECONDS = 60.0
BASELINE_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.GPIPE)


def run(*, quick: bool) -> BenchmarkResult:
    """Search; in quick mode a small network, in two numbers of micro-batches.

    Raises:
        SoapstoneError: a search is worse than the best baseline.
    """
    rows: list[Row] = []
    worse: list[str] = []
    for case in QUICK if quick else CASES:
        for micro_batches in QUICK_MICRO_BATCHES if quick else MICRO_BATCHES:
            row, is_worse = _row(case, micro_batches)
            rows.append(row)
            if is_worse:
                worse.append(f"{case.network} in {micro_batches}")
    if worse:
        raise SoapstoneError(
            f"pipelines at scale: searches are worse than the best 3-D parallelism ({', '.join(worse)} micro-batches), "
            "must not be; correct the algorithm pipeline"
        )
    seconds = [float(row["core s"] or 0) for row in rows]
    return BenchmarkResult(
        benchmark="pipelines_at_scale",
        conditions={"costs": "data sheets", "optimizer": "adam", "seed": 0},
        measurements=[
            measurement("longest search", max(seconds), "s of a core", at_most=MOST_SECONDS),
            measurement("all searches of a network: longest", _longest_together(rows), "s of a core"),
        ],
        table=rows,
        formats={
            "best 3-D (ms)": ".1f",
            "found (ms)": ".1f",
            "ratio": ".3f",
            "core s": ".0f",
            "peak GB": ".1f",
        },
    )


def _longest_together(rows: list[Row]) -> float:
    together: dict[str, float] = {}
    for row in rows:
        network = str(row["network"])
        together[network] = together.get(network, 0.0) + float(row["core s"] or 0)
    return max(together.values())


def _problem(case: Case, micro_batches: int) -> Problem:
    from app.services.models.models import import_graph, requested_model
    from graph.topology import load_topology
    from graph.training import Training

    model = requested_model(case.network, case.preset, case.batch_size // micro_batches, case.precision)
    graph = import_graph(model, batch_norm="synchronized").graph
    training = Training(case.batch_size, case.precision, optimizer="adam")
    return datasheet_problem(graph, load_topology(case.topology, case.nodes), training, micro_batches)


def _row(case: Case, micro_batches: int) -> tuple[Row, bool]:
    """Return a row of the table, and whether the search is worse than the best baseline."""
    from search.algorithms.best_tracker import builder_of
    from search.algorithms.pipeline import pipeline

    problem = _problem(case, micro_batches)
    began = time.process_time()
    result = pipeline(problem, most=1 << 16, seed=0)
    seconds = time.process_time() - began
    layout = builder_of(problem).layout(result.strategy)
    layout.run("program")
    best = best_baseline(problem)
    found = result.outcome
    capacity = int(builder_of(problem).capacity_bytes_D.min())
    row: Row = {
        "network": case.network,
        "GPUs": f"{problem.device_count} {case.topology}",
        "M": micro_batches,
        "best 3-D": "none fits" if best is None else best[1],
        "best 3-D (ms)": None if best is None else best[0].step_time_ns / 1e6,
        "found (ms)": None if found.excess_bytes else found.step_time_ns / 1e6,
        "ratio": None if best is None or found.excess_bytes else found.step_time_ns / best[0].step_time_ns,
        "peak GB": f"{int(layout.peak_memory_D.max()) / 1e9:.1f} of {capacity / 1e9:.1f}",
        "core s": seconds,
        "simulated": result.simulated,
        "chosen": chosen_text(problem, result.strategy),
    }
    return row, best is not None and best[0] < found


def best_baseline(problem: Problem) -> tuple[Outcome, str] | None:
    """Return the best 3-D parallelism that fits the memories, and its name; None where none does.

    As little is made again as makes each fit.
    """
    from search.algorithms.staging import Stagings
    from search.space.pipelines import triples

    stagings = Stagings(problem)
    best: tuple[Outcome, str] | None = None
    for split, stages in triples(stagings.splits, problem.device_count, stagings.most_stages):
        for schedule in (
            BASELINE_SCHEDULES if problem.micro_batches > 1 and stages > 1 else BASELINE_SCHEDULES[:1]
        ):
            for shares in (False, True):
                staging = replace(stagings.of_triple(split, stages, schedule), shares_optimizer=shares)
                best = _better(problem, stagings, staging, best)
    return best


def _better(
    problem: Problem, stagings: Stagings, staging: Staging, best: tuple[Outcome, str] | None
) -> tuple[Outcome, str] | None:
    """Return the better of the best and a staging with the least share made again that fits, if one does."""
    from search.algorithms.best_tracker import builder_of
    from search.algorithms.pipeline import RECOMPUTED_SHARES
    from search.evaluate.evaluator import outcome

    for share in RECOMPUTED_SHARES:
        strategy = stagings.strategy(stagings.recomputing(staging, share))
        if strategy is None:
            return best
        least = None if best is None else best[0]
        own = outcome(builder_of(problem).layout(strategy), "program", least)
        if not own.excess_bytes:
            name = staging.name + (f", {share:.0%} made again" if share else "")
            return (own, name) if least is None or own < least else best
        # What is made again only adds to what devices and links are busy for.
        if least is not None and own.step_time_ns >= least.step_time_ns:
            return best
    return best
