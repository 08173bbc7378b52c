"""What hosts and ports are worth in predictions: models of one node of 8 H100, steps by data sheets, in bfloat16.

No card was measured. That a host issues an operator's forward, or its backward, in `LAUNCH_S` is an assumption, of the
order that eager PyTorch takes; so is that it issues a collective, a sum of gradients or the update in as much, a
message in half of it. Memory is not limited, so that all batches can be compared.

Of each network and batch: the step of data parallelism by its devices alone, with hosts that issue operators, with
hosts that issue communications and updates too, and with these but a link for each pair of GPUs in place of ports; and
strategies found by three searches, one that knows of no hosts, one that knows what operators take them, and one that
knows all, each simulated with all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement
from scripts.benchmarks.simulator import Datasheet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graph.calls import LocalCall
    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from graph.topology import DeviceKind, Topology
    from search.cost.cost_table import OperatorCost, UpdateCost
    from search.simulate.simulator import Simulation

TOPOLOGY, PRECISION = "hgx-h100", "bfloat16"
LAUNCH_S = 10e-6
NETWORKS = ("inception", "bert-large", "hf-llama")
# Samples of a GPU and step.
BATCHES = (1, 8, 64)
PROPOSALS = 2000


class LaunchedDatasheet(Datasheet):
    """Costs by data sheets, of devices whose hosts take `LAUNCH_S` for each operator and phase; for updates as said."""

    def __init__(self, kinds: Sequence[DeviceKind], update_launch_s: float) -> None:
        super().__init__(kinds)
        self._update_launch_s = update_launch_s

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost]:
        """Return the estimate of each call."""
        return [
            replace(cost, forward_launch_s=LAUNCH_S, backward_launch_s=LAUNCH_S if call.has_backward else 0.0)
            for call, cost in zip(calls, super().resolve(calls, kind_name), strict=True)
        ]

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the estimate of an update."""
        return super().update_cost(optimizer, dtype, kind_name)._replace(launch_s=self._update_launch_s)


@dataclass(frozen=True)
class KnownCosts:
    """What a simulation knows: costs of operators, and seconds in which a host issues a communication."""

    source: Datasheet
    issue_s: float = 0.0


def run(*, quick: bool) -> BenchmarkResult:
    """Simulate and search; in quick mode one small network."""
    topology = unlimited()
    rows: list[dict[str, str]] = []
    measurements: list[MeasuredValue] = []
    for name in ("mlp",) if quick else NETWORKS:
        for batch in (8,) if quick else BATCHES:
            began = time.perf_counter()
            graph = _imported(name, "small" if quick else "paper", batch * len(topology.devices))
            row, gain = _row(graph, topology, batch * len(topology.devices), 50 if quick else PROPOSALS)
            seconds = time.perf_counter() - began
            rows.append({"network": name, "batch a GPU": str(batch), **row, "seconds": f"{seconds:.0f}"})
            measurements.append(measurement(f"{name}, {batch} a GPU: gain of knowing of hosts", gain, "x"))
    return BenchmarkResult(
        benchmark="hosts",
        conditions={"topology": TOPOLOGY, "precision": PRECISION, "launch": f"{LAUNCH_S * 1e6:g} us"},
        measurements=measurements,
        table=rows,
    )


def unlimited() -> Topology:
    """Return one node whose GPUs have memory for anything."""
    from graph.topology import LARGEST_MEMORY_BYTES, load_topology

    topology = load_topology(TOPOLOGY, 1)
    kinds = tuple(replace(kind, memory_bytes=LARGEST_MEMORY_BYTES) for kind in topology.kinds)
    return replace(topology, kinds=kinds)


def without_ports(topology: Topology) -> Topology:
    """Return the same GPUs with a link for each pair, as fast as a GPU's port, and no ports."""
    from graph.topology import local_topology

    kind = topology.kind_of(0)
    route = [topology.links[link] for link in topology.routes[0, 1]]
    return local_topology(
        len(topology.devices),
        kind,
        min(link.bandwidth_bytes_per_s for link in route),
        sum(link.latency_s for link in route),
        link_kind="nvlink",
        ports=False,
    )


def _imported(name: str, preset: str, batch_size: int) -> OperatorGraph:
    from app.services.models.models import import_graph, requested_model

    return import_graph(requested_model(name, preset, batch_size, PRECISION), batch_norm="synchronized").graph


def _simulated(
    graph: OperatorGraph, strategy: Strategy, topology: Topology, batch_size: int, costs: KnownCosts
) -> Simulation:
    from graph.training import Training
    from search.cost.cost_table import CostTable
    from search.cost.link_costs import LinkCosts
    from search.simulate.simulator import simulate

    training, links = Training(batch_size, PRECISION), LinkCosts(issue_s=costs.issue_s)
    return simulate(graph, strategy, topology, CostTable(costs.source), training, links=links)


def _found(
    graph: OperatorGraph, topology: Topology, batch_size: int, costs: KnownCosts, proposals: int
) -> Strategy:
    from graph.training import Training
    from search.algorithms.chain import SearchOptions
    from search.algorithms.mcmc import search
    from search.algorithms.moves import shares_for
    from search.cost.cost_table import CostTable
    from search.cost.link_costs import LinkCosts
    from search.problem import Problem

    options = SearchOptions(proposals=proposals, shares=shares_for(len(topology.devices)))
    training, links = Training(batch_size, PRECISION), LinkCosts(issue_s=costs.issue_s)
    return search(
        Problem(graph, topology, CostTable(costs.source), training, links), options, workers=2
    ).strategy


def _row(
    graph: OperatorGraph, topology: Topology, batch_size: int, proposals: int
) -> tuple[dict[str, str], float]:
    from search.space.baselines import data_parallel

    kinds = topology.kinds
    levels = (
        KnownCosts(Datasheet(kinds)),
        KnownCosts(LaunchedDatasheet(kinds, 0.0)),
        KnownCosts(LaunchedDatasheet(kinds, LAUNCH_S), LAUNCH_S),
    )
    every = levels[-1]
    start = data_parallel(graph, len(topology.devices))
    alone, operators, whole = (_simulated(graph, start, topology, batch_size, costs) for costs in levels)
    no_ports = _simulated(graph, start, without_ports(topology), batch_size, every)
    strategies = [_found(graph, topology, batch_size, costs, proposals) for costs in levels]
    steps_s = [
        _simulated(graph, strategy, topology, batch_size, every).step_time_s for strategy in strategies
    ]
    last_no_ports = _simulated(graph, strategies[-1], without_ports(topology), batch_size, every)
    row = {
        "devices alone": f"{alone.step_time_s * 1e3:.2f}",
        "operators' hosts": f"{operators.step_time_s * 1e3:.2f}",
        "all of hosts": f"{whole.step_time_s * 1e3:.2f}",
        "host busy": f"{max(whole.launch_s) / whole.step_time_s:.0%}",
        "no ports": f"{no_ports.step_time_s * 1e3:.2f}",
        "found blind": f"{steps_s[0] * 1e3:.2f}",
        "found by operators": f"{steps_s[1] * 1e3:.2f}",
        "found": f"{steps_s[2] * 1e3:.2f}",
        "found, no ports": f"{last_no_ports.step_time_s * 1e3:.2f}",
        "tasks a GPU": " / ".join(
            f"{_tasks(strategy) / len(topology.devices):.0f}" for strategy in (start, *strategies)
        ),
    }
    return row, steps_s[0] / steps_s[2]


def _tasks(strategy: Strategy) -> int:
    """Return how many forward tasks there are."""
    return sum(len(configuration.devices) for configuration in strategy.configurations)
