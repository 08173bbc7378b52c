"""What hosts and ports are worth in predictions: models of one node of 8 H100, steps by data sheets, in bfloat16.

No card was measured. That a host issues an operator's forward, or its backward, in `LAUNCH_S` is an assumption, of the
order that eager PyTorch takes. Memory is not limited, so that all batches can be compared.

Of each network and batch: the step of data parallelism by its devices alone, with hosts, and with hosts but a link for
each pair of GPUs in place of ports; and two strategies found, by a search that knows of hosts and one that does not,
both simulated with them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement
from scripts.benchmarks.simulator import Datasheet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graph.calls import LocalCall
    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from graph.topology import DeviceKind, Topology
    from search.cost.cost_table import OperatorCost
    from search.simulate.simulator import Simulation

TOPOLOGY, PRECISION = "hgx-h100", "bfloat16"
LAUNCH_S = 10e-6
NETWORKS = ("inception", "bert-large", "hf-llama")
# Samples of a GPU and step.
BATCHES = (1, 8, 64)
PROPOSALS = 2000


class LaunchedDatasheet(Datasheet):
    """Costs by data sheets, of devices whose hosts take `LAUNCH_S` for each operator and phase."""

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost]:
        """Return the estimate of each call."""
        return [
            replace(cost, forward_launch_s=LAUNCH_S, backward_launch_s=LAUNCH_S if call.has_backward else 0.0)
            for call, cost in zip(calls, super().resolve(calls, kind_name), strict=True)
        ]


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
    graph: OperatorGraph, strategy: Strategy, topology: Topology, batch_size: int, source: Datasheet
) -> Simulation:
    from graph.training import Training
    from search.cost.cost_table import CostTable
    from search.simulate.simulator import simulate

    return simulate(graph, strategy, topology, CostTable(source), Training(batch_size, PRECISION))


def _found(
    graph: OperatorGraph, topology: Topology, batch_size: int, source: Datasheet, proposals: int
) -> Strategy:
    from graph.training import Training
    from search.algorithms.chain import SearchOptions
    from search.algorithms.mcmc import search
    from search.algorithms.moves import shares_for
    from search.cost.cost_table import CostTable
    from search.problem import Problem

    options = SearchOptions(proposals=proposals, shares=shares_for(len(topology.devices)))
    return search(
        Problem(graph, topology, CostTable(source), Training(batch_size, PRECISION)), options, workers=2
    ).strategy


def _row(
    graph: OperatorGraph, topology: Topology, batch_size: int, proposals: int
) -> tuple[dict[str, str], float]:
    from search.space.baselines import data_parallel

    kinds: tuple[DeviceKind, ...] = topology.kinds
    alone, with_hosts = Datasheet(kinds), LaunchedDatasheet(kinds)
    start = data_parallel(graph, len(topology.devices))
    devices_ms = _simulated(graph, start, topology, batch_size, alone).step_time_s * 1e3
    with_host = _simulated(graph, start, topology, batch_size, with_hosts)
    no_ports = _simulated(graph, start, without_ports(topology), batch_size, with_hosts)
    blind = _found(graph, topology, batch_size, alone, proposals)
    aware = _found(graph, topology, batch_size, with_hosts, proposals)
    blind_step, aware_step = (
        _simulated(graph, strategy, topology, batch_size, with_hosts) for strategy in (blind, aware)
    )
    aware_no_ports = _simulated(graph, aware, without_ports(topology), batch_size, with_hosts)
    gain = blind_step.step_time_s / aware_step.step_time_s
    row = {
        "devices alone": f"{devices_ms:.2f}",
        "with hosts": f"{with_host.step_time_s * 1e3:.2f}",
        "host busy": f"{max(with_host.launch_s) / with_host.step_time_s:.0%}",
        "no ports": f"{no_ports.step_time_s * 1e3:.2f}",
        "found blind": f"{blind_step.step_time_s * 1e3:.2f}",
        "found": f"{aware_step.step_time_s * 1e3:.2f}",
        "found, no ports": f"{aware_no_ports.step_time_s * 1e3:.2f}",
        "tasks a GPU": " / ".join(
            f"{_tasks(strategy) / len(topology.devices):.0f}" for strategy in (start, blind, aware)
        ),
    }
    return row, gain


def _tasks(strategy: Strategy) -> int:
    """Return how many forward tasks there are."""
    return sum(len(configuration.devices) for configuration in strategy.configurations)
