"""`app search`: find a strategy, and keep every proposal, the result, and the baselines beside it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from app.db.records import SearchOutcome, SearchRecord, SearchStatus, StrategySource, TaskOrder
from app.db.store import Store
from app.db.trace import ConfigurationName, ProposalBatch, ProposalTrace
from app.services.costs import OnMiss
from app.services.machine import Processor
from app.services.models import ModelRequest, import_graph
from app.services.predicting import LOCAL, Setting, find_target, predict, prepare, resolve_costs
from app.services.progress import Progress
from graph.canonical import canonical_json
from graph.errors import UsageError
from graph.strategy import Strategy
from graph.training import Training
from search import baselines
from search.costs import Origin
from search.needed import needed_calls

if TYPE_CHECKING:
    from search import mcmc
    from search.simulator import Simulation


# What a column holds, what no search comes near, and what a float can still multiply.
LARGEST_INTEGER = 2**63 - 1
LARGEST_BUDGET = 10**12
LARGEST_CHAIN_COUNT = 1024
LARGEST_BETA = 1e12


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What `app search` was asked for. `time_limit_s` makes a result that cannot be reproduced."""

    model: ModelRequest
    topology: str
    devices: int | None
    nodes: int | None
    processor: Processor | None
    precision: str
    optimizer: str
    batch_norm: str
    proposals: int
    chains: int
    seed: int
    beta: float
    order: TaskOrder
    time_limit_s: float | None
    on_miss: OnMiss | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One strategy's predicted step."""

    name: str
    strategy_id: int
    digest: str
    step_time_s: float
    throughput: float
    shares: dict[str, float]
    bytes_moved: int
    peak_memory_bytes: tuple[int, ...]
    feasible: bool

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as a JSON document."""
        return {
            "name": self.name,
            "strategy": self.strategy_id,
            "digest": self.digest,
            "predicted_step_time_s": self.step_time_s,
            "predicted_throughput_samples_per_s": self.throughput,
            "shares": self.shares,
            "bytes_moved": self.bytes_moved,
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "feasible": self.feasible,
        }


@dataclass(frozen=True, slots=True)
class SearchReport:
    """What a search found. `predictions` holds the best strategy first, then the baselines."""

    search_id: int
    model: str
    topology: str
    devices: int
    batch_size: int
    proposals: int
    accepted: int
    interrupted: bool
    seconds: float
    predictions: tuple[Prediction, ...]
    unsplit: tuple[tuple[str, str], ...] = field(default=())

    @property
    def best(self) -> Prediction:
        """The strategy that was found."""
        return self.predictions[0]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "search": self.search_id,
            "model": self.model,
            "topology": self.topology,
            "devices": self.devices,
            "batch_size": self.batch_size,
            "proposals": self.proposals,
            "accepted": self.accepted,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "predictions": [prediction.to_json() for prediction in self.predictions],
            "unsplit": dict(self.unsplit),
        }


def run_search(request: SearchRequest, database: str | None, progress: Progress) -> SearchReport:
    """Import the model, search, and store what was found.

    Raises:
        SoapstoneError: a model, topology or option that cannot be used, or a missing cost under on_miss "fail".
    """
    options = _options(request)
    progress.begin(f"importing {request.model.name}", None)
    model = import_graph(request.model, batch_norm=request.batch_norm)
    progress.end()
    training = Training(model.batch_size, request.precision, request.optimizer, request.batch_norm)
    with Store.open(database) as store:
        target = find_target(
            store,
            request.topology,
            progress,
            devices=request.devices,
            nodes=request.nodes,
            processor=request.processor,
        )
        # What this machine can measure it measures; of other machines there are only estimates.
        on_miss = request.on_miss or ("measure" if request.topology == LOCAL else "estimate")
        with prepare(store, model, target, training, on_miss, progress) as setting:
            if on_miss == "measure":
                # As `app profile` does; the walk then seldom meets a call that nobody measured.
                calls = needed_calls(model.graph, len(target.topology.devices))
                resolve_costs(setting, {kind.name: calls for kind in target.topology.kinds})
            search_id, result, found = _search(store, setting, options, progress)
    return SearchReport(
        search_id=search_id,
        model=model.graph.name,
        topology=setting.topology.name,
        devices=len(setting.topology.devices),
        batch_size=training.batch_size,
        proposals=result.proposals,
        accepted=result.accepted,
        interrupted=result.interrupted,
        seconds=result.seconds,
        predictions=found,
        unsplit=model.graph.unsplit,
    )


def _options(request: SearchRequest) -> mcmc.SearchOptions:
    """Check what the command line gave, before anything is imported or written."""
    from search import mcmc

    if request.order not in ("program", "fifo"):
        raise UsageError(f"--order: is {request.order}, must be program or fifo; choose one")
    for name, value, most in (
        ("--proposals", request.proposals, LARGEST_BUDGET),
        ("--chains", request.chains, LARGEST_CHAIN_COUNT),
        ("--seed", request.seed, LARGEST_INTEGER),
        ("--beta", request.beta, LARGEST_BETA),
        ("--time", request.time_limit_s or 0, LARGEST_BUDGET),
    ):
        if not value <= most:
            raise UsageError(f"{name}: is {value}, must be at most {most}; choose another")
    return mcmc.SearchOptions(
        proposals=request.proposals,
        chains=request.chains,
        seed=request.seed,
        beta=request.beta,
        order=request.order,
        time_limit_s=request.time_limit_s,
    )


def _search(
    store: Store, setting: Setting, options: mcmc.SearchOptions, progress: Progress
) -> tuple[int, mcmc.SearchResult, tuple[Prediction, ...]]:
    from search import mcmc

    search_id = store.start_search(
        SearchRecord(
            graph_id=setting.graph_id,
            topology_id=setting.topology_id,
            training_id=setting.training_id,
            algorithm="mcmc",
            seed=options.seed,
            options={
                "proposals": options.proposals,
                "chains": options.chains,
                "beta": options.beta,
                "order": options.order,
                "time_limit_s": options.time_limit_s,
            },
        )
    )
    status: SearchStatus = "failed"
    outcome = SearchOutcome(0, 0, None, None)
    try:
        # First, so that a baseline that the search finds again keeps its name.
        progress.begin(
            "simulating the baselines (after an installation, compiling the simulator first)", None
        )
        known = _baselines(store, setting, options.order, search_id)
        progress.end()
        with ProposalTrace(store, search_id) as trace:
            progress.begin(f"searching {setting.model.graph.name}", options.proposals)
            try:
                result = mcmc.search(
                    setting.model.graph,
                    setting.topology,
                    setting.table,
                    setting.training,
                    options,
                    links=setting.target.link_costs,
                    observer=_Recorder(trace, progress, setting.model.graph.name),
                )
            finally:
                progress.end()
        best = _best(store, setting, result.strategy, known, options.order, search_id)
        outcome = SearchOutcome(
            proposals=result.proposals,
            accepted=result.accepted,
            initial_time_s=result.chains[0].initial_s,
            best_time_s=best.step_time_s,
            best_strategy_id=best.strategy_id,
        )
        status = "interrupted" if result.interrupted else "finished"
    except (KeyboardInterrupt, SystemExit):
        status = "interrupted"
        raise
    finally:
        store.finish_search(search_id, status, outcome)
    return search_id, result, (best, *known)


def _best(
    store: Store,
    setting: Setting,
    strategy: Strategy,
    known: Sequence[Prediction],
    order: TaskOrder,
    search_id: int,
) -> Prediction:
    """Store what the chains found; return it, or the baseline that beats it (few chains do not start from all)."""
    found = predict(store, setting, strategy, "search", order=order, search_id=search_id)
    candidates = [_prediction("found", strategy, setting, *found), *known]
    best = min(candidates, key=lambda one: (not one.feasible, one.step_time_s))
    return replace(best, name="found")


class _Recorder:
    """Writes every proposal to the trace, with a number for each distinct configuration of an operator."""

    def __init__(self, trace: ProposalTrace, progress: Progress, name: str) -> None:
        self._trace = trace
        self._progress = progress
        self._name = name
        self._codes: dict[tuple[int, bytes], int] = {}
        self._reported = 0
        # Chains may report from several threads.
        self._lock = threading.Lock()

    def on_proposals(self, batch: mcmc.ProposalBatch) -> None:
        """Store a batch."""
        from search.mcmc import decode_configuration

        names: list[ConfigurationName] = []
        codes = np.empty(len(batch.configuration), dtype=np.int64)
        with self._lock:
            for position, (operator, code) in enumerate(
                zip(batch.operator.tolist(), batch.configuration, strict=True)
            ):
                number = self._codes.get((operator, code))
                if number is None:
                    number = len(self._codes)
                    self._codes[operator, code] = number
                    configuration = decode_configuration(code)
                    document = {
                        "degrees": list(configuration.degrees),
                        "devices": list(configuration.devices),
                    }
                    names.append(ConfigurationName(operator, number, canonical_json(document)))
                codes[position] = number
            if names:
                self._trace.name_configurations(names)
            self._trace.add(
                ProposalBatch(
                    chain=batch.chain,
                    step=batch.step,
                    operator=batch.operator,
                    configuration=codes,
                    simulated_ns=batch.simulated_ns,
                    bound_ns=batch.bound_ns,
                    accepted=batch.accepted,
                )
            )

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Move the bar."""
        text = f"searching {self._name}: best {best_s * 1e3:.1f} ms, {accepted} accepted"
        self._progress.advance(proposals - self._reported, text)
        self._reported = proposals


def _baselines(store: Store, setting: Setting, order: TaskOrder, search_id: int) -> list[Prediction]:
    """Predict the baselines, and store them."""
    graph, count = setting.model.graph, len(setting.topology.devices)
    strategies: list[tuple[StrategySource, Strategy]] = [
        ("data-parallel", baselines.data_parallel(graph, count)),
        ("expert", baselines.expert(graph, count)),
        ("single-device", baselines.single_device(graph)),
    ]
    return [
        _prediction(
            source,
            strategy,
            setting,
            *predict(store, setting, strategy, source, order=order, search_id=search_id),
        )
        for source, strategy in strategies
    ]


def _prediction(
    name: str, strategy: Strategy, setting: Setting, strategy_id: int, simulation: Simulation
) -> Prediction:
    return Prediction(
        name=name,
        strategy_id=strategy_id,
        digest=strategy.digest,
        step_time_s=simulation.step_time_s,
        throughput=setting.training.batch_size / simulation.step_time_s,
        shares={origin.value: simulation.shares[origin] for origin in Origin},
        bytes_moved=simulation.bytes_moved,
        peak_memory_bytes=simulation.peak_memory_bytes,
        feasible=simulation.feasible,
    )
