"""The worth of each kind of move: the zoo searched with all of them, and with one left out, in equal time.

And what the temperature is worth: walks with all kinds of moves that are hotter and colder. Every chain has as much
processor time, begins with nothing in the memo, and is alone: what it has found by then is compared with what the
full set of `search.algorithms.moves.shares_for` has found from the same start with the same seed. Costs are estimates
for the devices of the topology p100-cluster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp, inf, log
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, Row, measurement
from scripts.benchmarks.zoo import zoo_graph

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from search.algorithms.moves import Moves, MoveShares

DEVICES = 16
NETWORKS = (
    "mlp", "alexnet", "vgg16", "inception", "resnet101", "densenet121", "rnntc", "rnnlm", "nmt", "bert-large",
    "gpt2", "dlrm", "candle-uno",
)  # fmt: skip
# Of those of which 16 devices hold no strategy at the published batch.
BATCHES = {"bert-large": 64, "gpt2": 16}
STARTS = ("data parallel", "random")
SEEDS = (0, 1)
SECONDS = 4.0
QUICK_NETWORKS, QUICK_SECONDS, QUICK_DEVICES = ("mlp", "rnnlm"), 0.2, 4
# Proposals between two looks at the clock.
TURN = 8
# Two best times within this are as good.
EQUAL = 0.005
ALL = "all"
BETAS = (100.0, 1000.0, 3000.0)


@dataclass(frozen=True, slots=True)
class Variant:
    """The settings of a chain: its moves, and its beta (`search.algorithms.chain.SearchOptions.beta`)."""

    shares: MoveShares
    beta: float


@dataclass(frozen=True, slots=True)
class MovesRow:
    """The result of one chain within its time; the best time is infinite where nothing fitted the memories."""

    network: str
    start: str
    seed: int
    variant: str
    initial_s: float
    best_s: float
    proposals: int
    accepted: int


def variants() -> dict[str, Variant]:
    """Return walks by name: with all moves, all but a kind, of one group, drawn afresh alone; at other temperatures."""
    from search.algorithms.chain import SearchOptions
    from search.algorithms.moves import MoveShares, shares_for

    full, beta = shares_for(DEVICES), SearchOptions().beta
    shares = {ALL: full}
    for field in fields(full):
        if getattr(full, field.name):
            shares[f"without {field.name}"] = replace(full, **{field.name: 0.0})
    shares["one group at a time"] = replace(full, alike=0.0, sharing=0.0, spread=0.0, hybrid=0.0)
    shares["fresh draws alone"] = MoveShares(**{field.name: 0.0 for field in fields(full)})
    by_name = {name: Variant(move_shares, beta) for name, move_shares in shares.items()}
    return by_name | {f"beta {other:g}": Variant(full, other) for other in BETAS if other != beta}


def run(*, quick: bool) -> BenchmarkResult:
    """Walk every chain; in quick mode a moment each, of two small networks."""
    seconds = QUICK_SECONDS if quick else SECONDS
    devices = QUICK_DEVICES if quick else DEVICES
    preset = "small" if quick else "paper"
    rows: list[MovesRow] = []
    for name in QUICK_NETWORKS if quick else NETWORKS:
        graph, batch_size = imported(name, preset)
        for start in STARTS:
            for seed in SEEDS[:1] if quick else SEEDS:
                rows += walked(graph, batch_size, devices, start, seed, seconds, variants())
    lines = compared(rows)
    return BenchmarkResult(
        benchmark="moves",
        conditions={"topology": "p100-cluster", "devices": devices, "processor seconds a chain": seconds},
        measurements=[
            measurement(f"{variant}: step time over that of all moves, geometric mean", ratio(own.time), "")
            for variant, own in lines.groupby("variant", sort=False)
        ],
        table=table(lines),
    )


def imported(name: str, preset: str) -> tuple[OperatorGraph, int]:
    """Return the graph of a network of the zoo, and its batch size."""
    from graph.zoo import zoo_entry

    entry = zoo_entry(name)
    published = int(entry.presets[preset].get("batch_size", entry.batch_size))
    batch_size = published if preset == "small" else BATCHES.get(name, published)
    return zoo_graph(name, preset, batch_size), batch_size


def walked(
    graph: OperatorGraph,
    batch_size: int,
    devices: int,
    start: str,
    seed: int,
    seconds: float,
    chosen: Mapping[str, Variant],
) -> list[MovesRow]:
    """Return the result of a chain of each variant from one start."""
    import numpy as np

    from scripts.benchmarks.simulator import builder_of
    from search.algorithms.chain import SearchOptions, start_chain
    from search.algorithms.moves import Moves
    from search.algorithms.proposal_log import Recorder

    rows: list[MovesRow] = []
    # What is worked out once a graph would be charged to the first: it walks twice, and the second walk counts.
    for name in (next(iter(chosen)), *chosen):
        variant = chosen[name]
        options = SearchOptions(proposals=10**12, chains=1, beta=variant.beta)
        moves, rng = Moves(graph, devices, variant.shares), np.random.default_rng(seed)
        began = started(moves, start, rng)
        builder = builder_of(graph, devices, batch_size)
        recorder = Recorder(None)
        deadline = time.process_time() + seconds
        chain = start_chain(builder, 0, start, began, rng, options)
        while time.process_time() < deadline:
            for _ in range(TURN):
                chain.step(moves, recorder.add)
        rows.append(
            MovesRow(
                network=graph.name,
                start=start,
                seed=seed,
                variant=name,
                initial_s=chain.initial.seconds,
                best_s=chain.best.outcome.seconds,
                proposals=chain.proposals,
                accepted=chain.accepted,
            )
        )
    return rows[1:]


def started(moves: Moves, start: str, rng: np.random.Generator) -> Strategy:
    """Return data parallelism, or a random configuration of every group."""
    from search.space.baselines import data_parallel
    from search.space.configurations import random_configuration
    from search.space.groups import following

    graph, count = moves.graph, moves.device_count
    if start == "data parallel":
        return data_parallel(graph, count)
    return following(
        graph,
        ((group, random_configuration(graph.operators[group.head], count, rng)) for group in moves.groups),
    )


def compared(rows: Sequence[MovesRow]) -> pd.DataFrame:
    """Return, for each chain of another variant, best time and proposals over those of the full set from its start.

    The time is 1 where nothing fitted for both, infinite where nothing fitted for it alone, 0 for the full set alone.
    """
    import numpy as np
    import pandas as pd

    chains = pd.DataFrame([asdict(row) for row in rows])
    full = chains[chains.variant == ALL].drop(columns="variant")
    both = chains[chains.variant != ALL].merge(full, on=["network", "start", "seed"], suffixes=("", "_full"))
    over = np.where(np.isinf(both.best_s_full), 0.0, both.best_s / both.best_s_full)
    both["time"] = np.where(both.best_s == both.best_s_full, 1.0, over)
    both["proposals"] = both.proposals / both.proposals_full
    return both[["variant", "network", "time", "proposals"]]


def ratio(times: pd.Series[float]) -> float:
    """Return the geometric mean of the times that both have; 1 if there are none."""
    logs = [log(time_ratio) for time_ratio in times if 0 < time_ratio < inf]
    return exp(statistics.fmean(logs)) if logs else 1.0


def table(lines: pd.DataFrame) -> list[Row]:
    """Return a row for each variant: the geometric mean by network and over all, and how often it is better."""
    rows: list[Row] = []
    for variant, own in lines.groupby("variant", sort=False):
        better, worse = (own.time < 1 - EQUAL).sum(), (own.time > 1 + EQUAL).sum()
        rows.append(
            {
                "moves": str(variant),
                **{str(name): f"{ratio(of.time):.2f}" for name, of in own.groupby("network", sort=False)},
                "all": f"{ratio(own.time):.3f}",
                "better / worse": f"{better} / {worse} of {len(own)}",
                "proposals": f"{statistics.geometric_mean(own.proposals):.2f}",
            }
        )
    return rows
