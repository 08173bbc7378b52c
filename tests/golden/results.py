"""What the simulators and chains give for networks of the zoo, as nanoseconds and digests.

python -m tests.golden.results          # say what differs from golden.json
python -m tests.golden.results --write  # write it anew, where a change of the semantics is meant

A change of how the search is written leaves all of it as it is. Costs are made up from the sizes of calls
(`MadeUpCosts`), so that nothing here depends on a machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from graph.operators import OperatorGraph
from graph.strategy import Configuration, Strategy
from graph.training import Training
from search.algorithms.activation_checkpointing import everything
from search.algorithms.chain import SearchOptions
from search.algorithms.mcmc import search
from search.algorithms.moves import shares_for
from search.algorithms.proposal_log import ProposalBatch
from search.cost.cost_table import CostTable
from search.orders import Order
from search.problem import Problem
from search.simulate.simulator import simulate
from search.space.baselines import data_parallel, expert, fsdp, random_strategy, zero
from search.space.placements import ProposalOrigin
from tests.graphs import small_graph
from tests.search.builders import MadeUpCosts, cluster, random_anywhere

FILE = Path(__file__).with_name("golden.json")
NETWORKS = ("alexnet", "dlrm", "gpt2", "inception", "mlp", "nmt")
ORDERS: tuple[Order, ...] = ("program", "fifo", "priority")
DEVICES = 8
TRAINING = Training(4)
OPTIONS = SearchOptions(proposals=60, chains=2, seed=1, beta=30.0, shares=shares_for(DEVICES))


def strategies(graph: OperatorGraph) -> dict[str, Strategy]:
    """Return strategies of all kinds: usual, random, with shared weights, with recomputation, with both."""
    rng = np.random.default_rng(7)
    anywhere = random_anywhere(graph, DEVICES, rng)
    return {
        "data-parallel": data_parallel(graph, DEVICES),
        "expert": expert(graph, DEVICES),
        "random": random_strategy(graph, DEVICES, rng),
        "anywhere": anywhere,
        "zero": zero(graph, DEVICES),
        "fsdp": fsdp(graph, DEVICES),
        "recomputed": replace(anywhere, recomputation=everything(graph)),
        "fsdp-recomputed": replace(fsdp(graph, DEVICES), recomputation=everything(graph)),
    }


def digits(configuration: Configuration) -> str:
    """Return a configuration as hexadecimal digits: number of degrees, degrees, devices, each little-endian."""
    items = (len(configuration.degrees), *configuration.degrees, *configuration.devices)
    return np.array(items, "<u4").tobytes().hex()


@dataclass
class Walked:
    """The proposals of a search, as it made them, and the names and digests of its starts."""

    texts: list[str] = field(default_factory=list)

    def on_start(
        self, chain: int, name: str, strategy: Strategy, heads: Mapping[int, ProposalOrigin] | None
    ) -> None:
        """Keep where a chain begins."""
        self.texts.append(f"{chain} {name} {strategy.digest} {heads}")

    def on_proposals(self, batch: ProposalBatch) -> None:
        """Keep each proposal: what changed, what it was given, its time, and whether it was accepted."""
        columns = zip(
            batch.chain.tolist(),
            batch.step.tolist(),
            batch.operator.tolist(),
            [digits(configuration) for configuration in batch.configurations],
            map(str, batch.origin),
            batch.simulated_ns.tolist(),
            batch.bound_ns.tolist(),
            batch.accepted.tolist(),
            [batch.others.get(place) for place in range(len(batch))],
            strict=True,
        )
        self.texts += map(str, columns)

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Keep nothing: how often it is called depends on the clock."""


def digest(content: bytes) -> str:
    """Return a short digest."""
    return hashlib.sha256(content).hexdigest()[:16]


def results(name: str) -> Iterator[tuple[str, Any]]:
    """Give all results of a network, each with its name."""
    graph, topology = small_graph(name), cluster()
    yield "graph", graph.digest
    chosen = strategies(graph)
    for title, strategy in chosen.items():
        yield f"strategy {title}", strategy.digest
        for order in ORDERS:
            simulation = simulate(graph, strategy, topology, CostTable(MadeUpCosts()), TRAINING, order=order)
            times = np.stack([simulation.start_ns, simulation.end_ns]).astype("<i8").tobytes()
            yield (
                f"simulation {title} {order}",
                [simulation.step_time_ns, digest(times), digest(str(simulation.peak_memory_bytes).encode())],
            )
    for order in ORDERS:
        walked = Walked()
        # In program order alone a walk carries what is shared and what is made again.
        known = [chosen["fsdp"], chosen["recomputed"]] if order == "program" else [chosen["random"]]
        found = search(
            Problem(graph, topology, CostTable(MadeUpCosts()), TRAINING),
            replace(OPTIONS, order=order),
            known=known,
            observer=walked,
        )
        yield (
            f"search {order}",
            [found.strategy.digest, found.accepted, digest("\n".join(walked.texts).encode())],
        )


def golden() -> dict[str, dict[str, Any]]:
    """Return the results that are kept."""
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    made = {name: dict(results(name)) for name in NETWORKS}
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(made, indent=1) + "\n")
    else:
        kept = golden()
        different = [
            f"{name}: {title}: {kept[name].get(title)} is now {now}"
            for name, found in made.items()
            for title, now in found.items()
            if kept[name].get(title) != now
        ]
        sys.stdout.write("\n".join(different or ["all as it was"]) + "\n")
        sys.exit(bool(different))
