"""The gain of a second core in a search: the same chains with one process and with two, recorded as `app search` does.

Both make the same proposals. Beside it stands what the machine gives: two searches of half the proposals each, at the
same time, that have nothing to do with each other. Costs are estimates for the devices of the topology p100-cluster,
asked for anew by each search; a search is timed from its first chain's start to its result, its trace written.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from scripts.benchmarks.result import BenchmarkResult, measurement

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from app.services.models.models import ImportedModel

Way = Literal["one", "two", "strangers"]

RATIO = 1.9
CHAINS = 4
# Networks, their batch sizes, and devices.
CASES = (("alexnet", 256, 16), ("nmt", 64, 16), ("inception", 64, 64))
QUICK = (("alexnet", 256, 16),)
# About how long a search with one process takes, between which moments is looked how fast it is, and pairs of searches.
SECONDS, PROBES_S, PAIRS = 18.0, (2.0, 6.0), 3


@dataclass(frozen=True, slots=True)
class ChainsRow:
    """One network on so many devices: proposals of each search, and proposals a second by way.

    The ways: a process, two processes, and two searches with a process each.
    """

    network: str
    devices: int
    proposals: int
    accepted: float
    rates: dict[Way, list[float]]

    def ratio(self, way: Way) -> float:
        """How many times the proposals of one process are made, pair by pair, the median."""
        return statistics.median(
            rate / single for single, rate in zip(self.rates["one"], self.rates[way], strict=True)
        )


def run(*, quick: bool) -> BenchmarkResult:
    """Measure every case; in quick mode a small one."""
    rows = [measured(*case) for case in (QUICK if quick else CASES)]
    return BenchmarkResult(
        benchmark="chains",
        conditions={"topology": "p100-cluster", "chains": CHAINS, "seconds a search": SECONDS},
        measurements=[
            measurement(
                f"{row.network}, {row.devices} devices: two processes over one",
                row.ratio("two"),
                "",
                at_least=RATIO,
            )
            for row in rows
        ],
        table=[
            {
                "network": row.network,
                "devices": row.devices,
                "proposals": row.proposals,
                "accepted": row.accepted,
                **{f"a second, {way}": statistics.median(rates) for way, rates in row.rates.items()},
                "two": row.ratio("two"),
                "strangers": row.ratio("strangers"),
            }
            for row in rows
        ],
        formats={
            "proposals": ",d", "accepted": ".1%", "two": ".2f", "strangers": ".2f",
            **dict.fromkeys((f"a second, {way}" for way in get_args(Way)), ",.0f"),
        },
    )  # fmt: skip


def measured(name: str, batch_size: int, devices: int) -> ChainsRow:
    """Time one case: which way comes first alternates."""
    from app.services.models.models import import_graph, requested_model

    model = import_graph(requested_model(name, "paper", batch_size), batch_norm="synchronized")
    ways: tuple[Way, ...] = get_args(Way)
    rates: dict[Way, list[float]] = {way: [] for way in ways}
    searched(model, devices, CHAINS * 8, 1)  # compiles
    # Two, since what comes before the first proposal is no part of the pace.
    (made, _, seconds), (more, _, longer) = (
        searched(model, devices, 10**9, 1, time_limit_s=limit) for limit in PROBES_S
    )
    budget = max(CHAINS, round((more - made) / (longer - seconds) * SECONDS))
    accepted = 0
    for number in range(PAIRS):
        for way in ways if number % 2 == 0 else ways[::-1]:
            if way == "strangers":
                rates[way].append(_by_strangers(model, devices, budget))
            else:
                made, accepted, seconds = searched(model, devices, budget, 1 if way == "one" else 2)
                rates[way].append(made / seconds)
    return ChainsRow(name, devices, budget, accepted / budget, rates)


def _by_strangers(model: ImportedModel, devices: int, budget: int) -> float:
    """Return the proposals a second of two searches at once."""
    from search.parallel.fork import fork

    def search(connection: Connection) -> None:
        connection.send(searched(model, devices, budget // 2, 1)[0])

    began = time.perf_counter()
    searches = [fork(search) for _ in range(2)]
    made = sum(forked.connection.recv() for forked in searches)
    for forked in searches:
        forked.wait()
    seconds: float = time.perf_counter() - began
    return int(made) / seconds


def searched(
    model: ImportedModel, devices: int, proposals: int, workers: int, time_limit_s: float | None = None
) -> tuple[int, int, float]:
    """Search, with a trace in a database of its own; return proposals, those accepted, and seconds."""
    from graph.training import Training
    from scripts.benchmarks.database import begun, temporary_store
    from scripts.benchmarks.recording import trace_recorder
    from scripts.benchmarks.simulator import Datasheet, topology_of
    from search.algorithms.chain import SearchOptions
    from search.algorithms.mcmc import search
    from search.cost.cost_table import CostTable
    from search.problem import Problem

    topology = topology_of(devices)
    options = SearchOptions(proposals=proposals, chains=CHAINS, time_limit_s=time_limit_s)
    with temporary_store() as store:
        search_id = begun(store, model, devices)
        began = time.perf_counter()
        with trace_recorder(store, search_id, model, devices) as recorder:
            outcome = search(
                Problem(
                    model.graph, topology, CostTable(Datasheet(topology.kinds)), Training(model.batch_size)
                ),
                options,
                observer=recorder,
                workers=workers,
            )
        seconds = time.perf_counter() - began
    return outcome.proposals, outcome.accepted, seconds
