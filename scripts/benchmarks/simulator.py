"""How fast strategies are simulated and searched: a chain's proposals, one core, from two starts.

Of every network and number of devices: how long a simulation from scratch takes (task graph included), and what a
proposal takes in a chain, drawing and deriving included, and how many times as long the same proposals take when each
is simulated in full; and what a proposal takes without each of the mechanisms that save time. The chain begins at data
parallelism, or at 200 random moves away from it; how long a step of that start is in each order is there too. Moves are
those of one group (`search.algorithms.moves.ONE_GROUP`): a proposal is what others call one. On 64 devices the same
is said of a whole search as `app search` makes it, of chains from its own starts with all its moves. Costs are
estimates for the devices of the topology p100-cluster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, Row, measurement, number
from scripts.benchmarks.zoo import zoo_graph

if TYPE_CHECKING:
    from graph.calls import LocalCall
    from graph.operators import OperatorGraph
    from graph.rules.least import LeastWork, WorkPhase
    from graph.strategy import Strategy
    from graph.topology import DeviceKind, Topology
    from graph.training import Training
    from search.algorithms.chain import Chain
    from search.algorithms.moves import Moves
    from search.cost.cost_table import OperatorCost, UpdateCost
    from search.orders import Order
    from search.problem import Problem
    from search.simulate.task_graph import TaskGraphBuilder

TOPOLOGY, DEVICES_A_NODE = "p100-cluster", 4
# Preset or sizes, and batch size, of each network; "nmt-40" is the size that FlexFlow's public code has.
NETWORKS: dict[str, tuple[str, dict[str, int], int]] = {
    "alexnet": ("alexnet", {}, 256),
    "inception": ("inception", {}, 64),
    "resnet101": ("resnet101", {}, 64),
    "nmt-40": ("nmt", {"steps": 5, "layers": 2}, 64),
    "nmt": ("nmt", {}, 64),
    "bert-large": ("bert-large", {}, 256),
}
DEVICES = (4, 16, 64, 256)
QUICK = (("alexnet", 16), ("nmt-40", 16))
STARTS = ("data parallel", "random")
# The orders of which a step of the start is simulated, and proposals are timed.
IN_TABLE: tuple[Order, ...] = ("program", "fifo", "priority")
RANDOM_MOVES = 200
# Random strategies on more devices exchange so many pieces that their units outgrow the store of
# `search.simulate.fragment_cache`.
MOST_DEVICES_AT_RANDOM = 64
# Microseconds a proposal, one core, program order.
TARGETS_US = {
    ("inception", 64, "random"): 60.0,
    ("inception", 64, "data parallel"): 25.0,
    ("nmt-40", 16, "random"): 10.0,
    ("nmt-40", 16, "data parallel"): 10.0,
    ("resnet101", 64, "random"): 45.0,
    ("resnet101", 64, "data parallel"): 45.0,
}
SPEEDUP = 10.0
# A whole search, of so many proposals in each of its chains.
WHOLE_DEVICES, WHOLE_NETWORKS, WHOLE_PROPOSALS = 64, ("inception", "resnet101"), 1_000
# Columns of the second table: what is turned off of `search.evaluate.incremental.Mechanisms`.
MECHANISMS = {
    "all": None,
    "no bound": "bound",
    "no part first": "optimistic_bound",
    "no folding": "folding",
}
# What is timed of a row, after as much again that warms the memo up, in seconds and at least so many proposals.
SECONDS, LEAST_PROPOSALS = 4.0, 20
PROBE_SECONDS = 2.0


FORMATS = {
    "tasks": ",d", "ns a task": ".1f", "accepted": ".1%", "times in full": ".1f", "a second": ",.0f",
    **dict.fromkeys((f"{order} ms" for order in IN_TABLE), ",.2f"),
    **dict.fromkeys((f"{name} us" for name in ("full", "median", "p95", "mean", "fifo", "priority")), ",.0f"),
    **dict.fromkeys((f"{name} us" for name in MECHANISMS), ",.0f"),
}  # fmt: skip


class Datasheet:
    """Costs of local calls by the data sheets of a topology's devices, see `profiler.estimate`."""

    def __init__(self, kinds: Sequence[DeviceKind]) -> None:
        self._kinds = {kind.name: kind for kind in kinds}

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost]:
        """Return the estimate of each call."""
        from profiler.estimate import estimate
        from search.cost.cost_table import OperatorCost, Origin

        kind = self._kinds[kind_name]
        return [OperatorCost(*estimate(call, kind), Origin.DATASHEET) for call in calls]

    def copies(self) -> bool:
        """Costs are the same in a copy of this process."""
        return True

    def given(self) -> None:
        """Nothing is kept of what is given out."""

    def take(self, given: None) -> None:
        """Nothing is kept of what is given out."""

    def least_s(self, call: LocalCall, phase: WorkPhase, work: LeastWork, kind_name: str) -> float:
        """Return seconds that no calls into which a call may be cut take together."""
        from profiler.estimate import Estimator

        return Estimator.fit(self._kinds[kind_name], ()).least_s(call, phase, work)

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the estimate of an update."""
        from profiler.estimate import estimate
        from profiler.updates import update_call, update_s_per_element
        from search.cost.cost_table import Origin, UpdateCost

        estimated_s, _ = estimate(update_call(optimizer, dtype=dtype), self._kinds[kind_name])
        return UpdateCost(update_s_per_element(estimated_s), Origin.DATASHEET)


def run(*, quick: bool) -> BenchmarkResult:
    """Measure every row; in quick mode two small ones."""
    rows: list[Row] = []
    parts: list[Row] = []
    whole: list[MeasuredValue] = []
    for name in NETWORKS:
        wanted = [count for count in DEVICES if not quick or (name, count) in QUICK]
        graph = imported(name) if wanted else None
        for count in wanted:
            for start in STARTS:
                if graph is not None and fits(name, count, start):
                    row, without_us = measured(name, graph, count, start)
                    rows.append(row)
                    parts.append({"network": name, "devices": count, "start": start, **without_us})
        if graph is not None and name in WHOLE_NETWORKS and not quick:
            whole += _whole_search(name, graph)
    return BenchmarkResult(
        benchmark="simulator",
        conditions={
            "topology": TOPOLOGY,
            "random moves": RANDOM_MOVES,
            "moves": "of one group",
            "order": "program",
        },
        measurements=[*(measured_value for row in rows for measured_value in _measurements(row)), *whole],
        table=rows,
        parts=parts,
        formats=FORMATS,
    )


def fits(name: str, device_count: int, start: str) -> bool:
    """Return whether a row can be measured."""
    return start != "random" or device_count <= MOST_DEVICES_AT_RANDOM or name in ("alexnet", "nmt-40")


def imported(name: str) -> OperatorGraph:
    """Return the graph of a network of the table."""
    zoo_name, sizes, batch_size = NETWORKS[name]
    return replace(zoo_graph(zoo_name, "paper", batch_size, **sizes), name=name)


def topology_of(device_count: int) -> Topology:
    """Return as many nodes as have so many devices."""
    from graph.topology import load_topology

    return load_topology(TOPOLOGY, max(1, device_count // DEVICES_A_NODE)).subset(device_count)


def datasheet_problem(
    graph: OperatorGraph, topology: Topology, training: Training, micro_batches: int = 1
) -> Problem:
    """Return a problem with costs by data sheets, and with its builder."""
    from graph.rules import first_call
    from graph.rules.least import least_work
    from search.algorithms import best_tracker
    from search.cost.cost_table import CostTable
    from search.problem import Problem

    costs = CostTable(Datasheet(topology.kinds))
    problem = Problem(
        graph,
        topology,
        costs,
        training,
        first_call=first_call,
        least_work=least_work,
        micro_batches=micro_batches,
    )
    return replace(problem, builder=best_tracker.builder_of(problem))


def builder_of(graph: OperatorGraph, device_count: int, batch_size: int = 64) -> TaskGraphBuilder:
    """Return a builder with estimated costs."""
    from graph.training import Training
    from search.cost.cost_table import CostTable
    from search.simulate.task_graph import TaskGraphBuilder

    topology = topology_of(device_count)
    return TaskGraphBuilder(graph, topology, CostTable(Datasheet(topology.kinds)), Training(batch_size))


def chain_of(
    builder: TaskGraphBuilder,
    strategy: Strategy,
    order: Order,
    *,
    in_full: bool = False,
    without: str | None = None,
) -> Chain:
    """Return a chain of endless budget from a strategy; `without`: one of `search.evaluate.incremental.Mechanisms`."""
    import numpy as np

    from search.algorithms.chain import SearchOptions, start_chain
    from search.evaluate.incremental import IncrementalEvaluation, Mechanisms

    options = SearchOptions(proposals=10**12, chains=1, order=order)
    chain = start_chain(builder, 0, "", strategy, np.random.default_rng(2), options, in_full=in_full)
    if without is not None:
        chain.evaluation = IncrementalEvaluation(builder.layout(strategy), Mechanisms(**{without: False}))
    return chain


def started(graph: OperatorGraph, device_count: int, start: str) -> Strategy:
    """Return data parallelism, or the strategy after so many moves from it, all accepted."""
    import numpy as np

    from graph.strategy import Strategy
    from search.algorithms.moves import ONE_GROUP, Moves
    from search.space.baselines import data_parallel

    strategy = data_parallel(graph, device_count)
    if start == "data parallel":
        return strategy
    moves, rng = Moves(graph, device_count, ONE_GROUP), np.random.default_rng(1)
    configurations = list(strategy.configurations)
    for _ in range(RANDOM_MOVES):
        for index, configuration in moves.propose(configurations, rng).changed.items():
            configurations[index] = configuration
    return Strategy(graph.digest, tuple(configurations))


def measured(name: str, graph: OperatorGraph, device_count: int, start: str) -> tuple[Row, Row]:
    """Time one row; return it, and what `without_one` says."""
    from search.algorithms.moves import ONE_GROUP, Moves
    from search.space.groups import find_groups

    moves, strategy = Moves(graph, device_count, ONE_GROUP), started(graph, device_count, start)
    layout = builder_of(graph, device_count).layout(strategy)
    steps_ms: Row = {f"{order} ms": layout.run(order)[0] / 1e6 for order in IN_TABLE}
    full_s = statistics.median(timed(lambda: layout.run("program"), PROBE_SECONDS / 2, 3))

    def chain(order: Order, *, in_full: bool = False) -> Chain:
        # Its own builder: what one chain has met, another would find in the memo.
        return chain_of(builder_of(graph, device_count), strategy, order, in_full=in_full)

    times_s, acceptance = timed_chain(chain("program"), moves, SECONDS)
    fifo_s, _ = timed_chain(chain("fifo"), moves, PROBE_SECONDS)
    priority_s, _ = timed_chain(chain("priority"), moves, PROBE_SECONDS)
    # The same proposals, simulated in full and not.
    in_full_s = timed(stepping(chain("program", in_full=True), moves), 2 * PROBE_SECONDS, LEAST_PROPOSALS)
    same_s = timed(stepping(chain("program"), moves), 0.0, len(in_full_s))
    row: Row = {
        "network": name,
        "devices": device_count,
        "start": start,
        "operators (groups)": f"{len(graph.operators)} ({len(find_groups(graph))})",
        "tasks": layout.task_count,
        "full us": full_s * 1e6,
        "ns a task": full_s * 1e9 / layout.task_count,
        **microseconds(times_s),
        "a second": len(times_s) / sum(times_s),
        "accepted": acceptance,
        "times in full": sum(in_full_s) / sum(same_s),
        **steps_ms,
        "fifo us": statistics.fmean(fifo_s) * 1e6,
        "priority us": statistics.fmean(priority_s) * 1e6,
    }
    return row, without_one(graph, device_count, strategy, moves)


def microseconds(times_s: Sequence[float]) -> Row:
    """Return median, 95th percentile and mean of the times of a proposal."""
    return {
        "median us": statistics.median(times_s) * 1e6,
        "p95 us": sorted(times_s)[int(0.95 * len(times_s))] * 1e6,
        "mean us": statistics.fmean(times_s) * 1e6,
    }


def without_one(graph: OperatorGraph, device_count: int, strategy: Strategy, moves: Moves) -> Row:
    """Return the mean microseconds of a proposal with all mechanisms, and without each of them.

    The chains make the same proposals, one after the other: what else the machine does slows all of them.
    """
    steps = {
        name: stepping(
            chain_of(builder_of(graph, device_count), strategy, "program", without=MECHANISMS[name]), moves
        )
        for name in MECHANISMS
    }
    times_s: dict[str, list[float]] = {name: [] for name in steps}

    order = list(steps)

    def turn() -> None:
        # The first to meet a local call finds it out for all of them.
        order.append(order.pop(0))
        for name in order:
            times_s[name] += timed(steps[name], 0.0, 1)

    seconds = len(steps) * PROBE_SECONDS
    timed(turn, seconds, LEAST_PROPOSALS)
    for times in times_s.values():
        times.clear()
    timed(turn, seconds, LEAST_PROPOSALS)
    return {f"{name} us": statistics.fmean(times) * 1e6 for name, times in times_s.items()}


def _whole_search(name: str, graph: OperatorGraph) -> list[MeasuredValue]:
    """Say how many times as long the chains of a search take where every proposal is simulated in full."""
    import numpy as np

    from scripts.benchmarks.moves import started as started_at_random
    from search.algorithms.chain import SearchOptions, start_chain
    from search.algorithms.moves import Moves, shares_for
    from search.parallel.gc_pause import frozen_heap
    from search.space.baselines import starting_baselines

    moves = Moves(graph, WHOLE_DEVICES, shares_for(WHOLE_DEVICES))
    starts = [baseline.strategy for baseline in starting_baselines(graph, WHOLE_DEVICES)]
    starts = [*starts, started_at_random(moves, "random", np.random.default_rng(1))][: SearchOptions().chains]

    def seconds(*, in_full: bool) -> float:
        builder = builder_of(graph, WHOLE_DEVICES)
        began = time.perf_counter()
        with frozen_heap():
            for number, strategy in enumerate(starts):
                rng, options = np.random.default_rng(number), SearchOptions(proposals=10**12)
                chain = start_chain(builder, number, "", strategy, rng, options, in_full=in_full)
                timed(stepping(chain, moves), 0.0, WHOLE_PROPOSALS)
        return time.perf_counter() - began

    # What is worked out once a graph is charged to neither.
    seconds(in_full=False)
    exact_s, full_s = seconds(in_full=False), seconds(in_full=True)
    count = len(starts) * WHOLE_PROPOSALS
    what = f"{name}, {WHOLE_DEVICES} devices, a search of {count:,} proposals"
    return [
        measurement(f"{what}: a proposal, mean", exact_s / count * 1e6, "us"),
        measurement("    times as fast as in full", full_s / exact_s, "", at_least=SPEEDUP),
    ]


def stepping(chain: Chain, moves: Moves) -> Callable[[], None]:
    """Return the function of one proposal, without a record."""
    from search.algorithms.proposal_log import Recorder

    recorder = Recorder(None)
    return lambda: chain.step(moves, recorder.add)


def timed_chain(chain: Chain, moves: Moves, seconds: float) -> tuple[list[float], float]:
    """Return how long each proposal took, after as many seconds of warming up, and the share that was accepted."""
    step = stepping(chain, moves)
    timed(step, seconds, LEAST_PROPOSALS)
    accepted = chain.accepted
    times_s = timed(step, seconds, LEAST_PROPOSALS)
    return times_s, (chain.accepted - accepted) / len(times_s)


def timed(call: Callable[[], object], seconds: float, least: int) -> list[float]:
    """Return the seconds of each call, of as many as fill a time, and of so many at least."""
    times_s: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_s) < least or time.perf_counter() < end:
        began = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began)
    return times_s


def _measurements(row: Row) -> list[MeasuredValue]:
    place = str(row["network"]), int(number(row, "devices")), str(row["start"])
    what = f"{row['network']}, {row['devices']} devices, {row['start']}"
    mean_us, speedup = number(row, "mean us"), number(row, "times in full")
    values = [measurement(f"{what}: a proposal, mean", mean_us, "us", at_most=TARGETS_US.get(place))]
    if row["devices"] == 64:
        values.append(measurement("    times as fast as in full", speedup, "", at_least=SPEEDUP))
    return values
