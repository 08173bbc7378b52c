"""`app search`: find a strategy, and keep every proposal, the result, and the baselines beside it."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from app.db import chunks
from app.db.failures import as_written
from app.db.records import (
    TASK_ORDERS,
    SearchOutcome,
    SearchRecord,
    SearchStatus,
    StrategyRecord,
    StrategySource,
    TaskOrder,
)
from app.db.store import Store
from app.services.costs.machine import Processor
from app.services.costs.operator_costs import OnMiss
from app.services.models.models import ImportedModel, ModelRequest, import_graph, stored_request
from app.services.predict.predict import (
    LOCAL,
    MemoryWalk,
    Setting,
    cost_environments,
    find_target,
    named_topology,
    predict,
    prepare,
    resolve_costs,
    source_of,
)
from app.services.predict.recomputation_report import RecomputationReport, recomputation_report
from app.services.progress import Progress
from app.services.search.fitting_starts import fitting_starts, recomputed_starts
from app.services.search.lower_bound import bounding
from app.services.search.memory_repair import made_to_fit
from app.services.search.run_algorithms import SearchPlan, find, worker_count
from app.services.search.start_strategies import KnownStart, given_starts, known_starts, start_of
from app.services.trace.replay import TraceReader, resumed_chains
from graph.errors import UsageError
from graph.strategy import Strategy, strategy_text
from graph.training import Training
from search.algorithms import registry
from search.algorithms.activation_checkpointing import recompute
from search.algorithms.moves import ONE_GROUP, MoveShares, shares_for
from search.algorithms.weight_sharding import share_weights
from search.cost.calls_to_profile import needed_calls
from search.cost.cost_table import Origin
from search.space import baselines

if TYPE_CHECKING:
    from search.algorithms import mcmc
    from search.bounds.lower_bound import Bound
    from search.simulate.simulator import Simulation


# What a column holds, what no search comes near, and what a float can still multiply.
LARGEST_INTEGER = 2**63 - 1
LARGEST_BUDGET = 10**12
LARGEST_CHAIN_COUNT = 1024
LARGEST_BETA = 1e12


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """What `app search` was asked for. `time_limit_s` makes a result that cannot be reproduced.

    Chains start from what is known beside those of the budget, unless `fresh`; `starts` names strategies to take
    for what is known. `algorithm` names algorithms joined by commas, each of which starts from what those before it
    found. `compare_baselines` simulates all baselines that the network has, and not only what chains start from.
    `share_weights`: chains start also from data parallelism that shares its weights, and of what is found in the end
    it is searched what to share. `recompute`: where a strategy does not fit, it is searched what to make again in the
    backward, for a start of a chain and for what is found in the end.
    """

    model: ModelRequest
    topology: str
    devices: int | None
    nodes: int | None
    processor: Processor | None
    optimizer: str
    batch_norm: str
    proposals: int
    chains: int
    seed: int
    beta: float
    order: TaskOrder
    time_limit_s: float | None
    on_miss: OnMiss | None
    fresh: bool = False
    starts: tuple[str, ...] = ()
    algorithm: str = "mcmc"
    compare_baselines: bool = False
    workers: int | None = None
    share_weights: bool = False
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class AlgorithmReport:
    """What one algorithm of a search found. `step_time_s`: None where the memory does not suffice."""

    name: str
    step_time_s: float | None
    proposals: int
    seconds: float
    proven: str

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prediction:
    """One strategy's predicted step. Efficiency and potential are those of `search.simulate.simulator.Simulation`."""

    name: str
    strategy_id: int
    digest: str
    step_time_s: float
    throughput: float
    shares: dict[str, float]
    bytes_moved: int
    scheduling_efficiency: float
    speedup_potential: float
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
            "scheduling_efficiency": self.scheduling_efficiency,
            "speedup_potential": self.speedup_potential,
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
    known: tuple[KnownStart, ...] = field(default=())
    resumed_at: int | None = None
    algorithms: tuple[AlgorithmReport, ...] = field(default=())
    bound: Bound | None = None
    estimate_errors: tuple[float, ...] = field(default=())
    cost_environments: tuple[Mapping[str, Any], ...] = field(default=())
    recomputation: RecomputationReport | None = None

    @property
    def estimate_error(self) -> float | None:
        """The median error of the costs that were estimated, by leaving measurements out; None without any."""
        return statistics.median(self.estimate_errors) if self.estimate_errors else None

    @property
    def gap(self) -> float | None:
        """By what share the best strategy is above the best possible at most; None where no bound is known."""
        return None if self.bound is None or not self.bound.time_ns else self.bound.gap(self.best.step_time_s)

    @property
    def best_baseline(self) -> Prediction:
        """The fastest baseline that was simulated, one that fits if there is one."""
        return min(self.predictions[1:], key=lambda one: (not one.feasible, one.step_time_s))

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
            "known": [start.to_json() for start in self.known],
            "resumed_at": self.resumed_at,
            "algorithms": [algorithm.to_json() for algorithm in self.algorithms],
            "lower_bound_s": self.bound.seconds if self.bound is not None else None,
            "lower_bound_by": self.bound.kind if self.bound is not None else None,
            "gap": self.gap,
            "estimated_costs": len(self.estimate_errors),
            "estimate_error": self.estimate_error,
            "cost_environments": [dict(one) for one in self.cost_environments],
            "best_baseline": self.best_baseline.name,
            "recomputation": None if self.recomputation is None else self.recomputation.to_json(),
            "gain_over_best_baseline": self.best_baseline.step_time_s / self.best.step_time_s,
        }


def run_search(request: SearchRequest, database: str | None, progress: Progress) -> SearchReport:
    """Import the model, search, and store what was found.

    Raises:
        SoapstoneError: a model, topology or option that cannot be used, or a missing cost under on_miss "fail".
    """
    options, names = _options(request), _algorithms(request)
    workers = worker_count(request.workers)
    _named_topology(request)
    model = _imported(request, names, workers, progress)
    with Store.open(database) as store:
        chunks.check_next_folder(store)
        with _setting(store, request, model, progress) as setting:
            if request.starts:
                known = given_starts(store, setting, request.starts)
            else:
                known = [] if request.fresh else known_starts(store, setting, request.order)
            if request.share_weights:
                known = [*known, *_shared_starts(store, setting, {one.strategy for one in known})]
            if not known:
                known = fitting_starts(store, setting, request.order)
            if request.recompute:
                progress.begin("searching what to make again in the backward", None)
                known = [*known, *recomputed_starts(store, setting, request.order, known)]
                progress.end()
            options = replace(options, shares=shares_for(len(setting.topology.devices)))
            search_id = store.start_search(_record(request, options, setting, known))
            return _search(
                store,
                setting,
                SearchPlan(
                    search_id,
                    names,
                    options,
                    tuple(known),
                    compare_baselines=request.compare_baselines,
                    workers=workers,
                ),
                progress,
            )


def resume_search(
    search_id: int, database: str | None, progress: Progress, *, workers: int | None = None
) -> SearchReport:
    """Go on with a search that was stopped or killed, with the same chains, and store what is found.

    How many processes walked them before does not matter.

    Raises:
        UsageError: the search is finished or running, or its model, topology or costs are others now.
        SoapstoneError: as `run_search`.
    """
    processes = worker_count(workers)
    with Store.open(database) as store:
        stored = store.search(search_id)
        if stored.status in ("finished", "running"):
            store.resume_search(search_id)  # says why not
        request = _request(stored)
        with as_written(f"table searches, row {stored.id}, column options"):
            shares = MoveShares(**stored.options["moves"]) if "moves" in stored.options else ONE_GROUP
            begun_with = [(one["digest"], one["found_for"]) for one in stored.options["known"]]
        options, names = replace(_options(request), shares=shares), _algorithms(request)
        _named_topology(request)
        model = _imported(request, names, processes, progress)
        with _setting(store, request, model, progress) as setting:
            _check_same(stored, setting)
            known = [_known_again(store, setting, *one) for one in begun_with]
            store.resume_search(search_id)
            try:
                chunks.recover(store, search_id)
                reader = TraceReader(store, search_id)
                begun = [one.strategy for one in known]
                resumed = resumed_chains(reader, model.graph.digest, begun) if reader.has_starts else []
            except BaseException:
                store.halt_search(search_id, "interrupted")
                raise
            if resumed:
                # Those before the walk are what some of its chains started from.
                names = names[names.index("mcmc") :]
            plan = SearchPlan(
                search_id,
                names,
                options,
                tuple(known),
                tuple(resumed),
                request.compare_baselines,
                processes,
            )
            return _search(store, setting, plan, progress)


def _named_topology(request: SearchRequest) -> None:
    """Refuse a topology that does not exist or is too small, before the model is imported, which takes longer."""
    if request.topology != LOCAL:
        named_topology(request.topology, devices=request.devices, nodes=request.nodes)


def _imported(
    request: SearchRequest, names: Sequence[str], workers: int, progress: Progress
) -> ImportedModel:
    """Import the model, and compile the simulator meanwhile, and to its end: nothing is measured beside that."""
    from search.parallel.kernel_warm_up import KernelWarmUp, needed_kernels

    with KernelWarmUp(needed_kernels(request.order, names)) as warm_up:
        if workers > 1:
            warm_up.start_helper()
        meanwhile = (
            " (once after an installation, compiling the simulator meanwhile)" if warm_up.helper else ""
        )
        progress.begin(f"importing {request.model.name}{meanwhile}", None)
        model = import_graph(request.model, batch_norm=request.batch_norm)
        progress.end()
        if warm_up.remaining:
            progress.begin("compiling the simulator, once after an installation", None)
            warm_up.finish()
            progress.end()
    return model


@contextmanager
def _setting(
    store: Store, request: SearchRequest, model: ImportedModel, progress: Progress
) -> Iterator[Setting]:
    """Find topology and costs; what this machine can measure and nobody did is measured."""
    training = Training(model.batch_size, request.model.precision, request.optimizer, request.batch_norm)
    target = find_target(
        store,
        request.topology,
        progress,
        devices=request.devices,
        nodes=request.nodes,
        processor=request.processor,
        precision=request.model.precision,
    )
    # What this machine can measure it measures; of other machines there are only estimates.
    on_miss = request.on_miss or ("measure" if request.topology == LOCAL else "estimate")
    with prepare(store, model, target, training, on_miss, progress) as setting:
        if on_miss == "measure":
            # As `app profile` does; the walk then seldom meets a call that nobody measured.
            calls = needed_calls(model.graph, len(target.topology.devices))
            resolve_costs(setting, {kind.name: calls for kind in target.topology.kinds})
        yield setting


def _record(
    request: SearchRequest, options: mcmc.SearchOptions, setting: Setting, known: Sequence[KnownStart]
) -> SearchRecord:
    """Return the row of a search that begins, with all that it takes to go on with it or to repeat it."""
    asked = asdict(request)
    del asked["model"]["folder"], asked["workers"]
    return SearchRecord(
        graph_id=setting.graph_id,
        topology_id=setting.topology_id,
        training_id=setting.training_id,
        algorithm=",".join(_algorithms(request)),
        seed=options.seed,
        options={
            "proposals": options.proposals,
            "chains": options.chains,
            "beta": options.beta,
            "order": options.order,
            "time_limit_s": options.time_limit_s,
            "moves": asdict(options.shares),
            "known": [start.to_json() for start in known],
            "request": {**asked, "starts": list(request.starts)},
        },
    )


def _request(stored: SearchRecord) -> SearchRequest:
    """Return what a stored search was asked for.

    Raises:
        UsageError: a Soapstone stored it that did not keep that.
    """
    asked = stored.options.get("request")
    if asked is None:
        raise UsageError(
            f"search {stored.id}: was started by an older Soapstone, must have been started by one that keeps what it "
            "was asked for; start a new search"
        )
    with as_written(f"table searches, row {stored.id}, column options"):
        model = stored_request(asked["model"], f"search {stored.id}")
        given = {**asked, "model": model, "starts": tuple(asked["starts"])}
        given.pop("precision", None)  # beside the model, in searches of older Soapstones: all of float32
        return SearchRequest(**given)


def _check_same(stored: SearchRecord, setting: Setting) -> None:
    for what, before, now in (
        ("model", stored.graph_id, setting.graph_id),
        ("topology", stored.topology_id, setting.topology_id),
        ("training", stored.training_id, setting.training_id),
    ):
        if before != now:
            raise UsageError(
                f"search {stored.id}: its {what} is another now than when it was started, must be the same to go on; "
                "start a new search"
            )


def _algorithms(request: SearchRequest) -> tuple[str, ...]:
    """Return the algorithms of a search: at its end those that say which weights to share and what to make again."""
    names = registry.parsed(request.algorithm)
    for name, option, asked in (
        ("sharding", "--share-weights", request.share_weights),
        ("recomputation", "--recompute", request.recompute),
    ):
        if name in names and "mcmc" in names[names.index(name) :]:
            # The trace of the walk says what was shared, or made again, of a known strategy alone.
            raise UsageError(
                f"--algorithm: {name} comes before mcmc, must come after it; give {option}, from whose strategies "
                "mcmc starts too"
            )
        if asked and name not in names:
            names = (*names, name)
    return names


def _shared_starts(store: Store, setting: Setting, there: Collection[Strategy]) -> list[KnownStart]:
    """Store the baselines that share weights, and return those that are not among the starts yet."""
    graph, count = setting.model.graph, len(setting.topology.devices)
    result = []
    sources: tuple[tuple[StrategySource, Strategy], ...] = (
        ("zero", baselines.zero(graph, count)),
        ("fsdp", baselines.fsdp(graph, count)),
    )
    for source, strategy in sources:
        if strategy in there or not strategy.sharding:
            continue
        store.put_strategy(
            StrategyRecord(strategy.digest, setting.graph_id, count, strategy_text(strategy, graph), source)
        )
        result.append(KnownStart(strategy.digest, strategy, f"baseline {source}"))
    return result


def _known_again(store: Store, setting: Setting, digest: str, found_for: str) -> KnownStart:
    return replace(start_of(setting, store.strategy(digest)), found_for=found_for)


def _options(request: SearchRequest) -> mcmc.SearchOptions:
    """Check what the command line gave, before anything is imported or written."""
    from search.algorithms import mcmc

    if request.order not in TASK_ORDERS:
        raise UsageError(
            f"--order: is {request.order}, must be one of {', '.join(TASK_ORDERS)}; choose one of them"
        )
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


def _search(store: Store, setting: Setting, plan: SearchPlan, progress: Progress) -> SearchReport:
    """MemoryWalk, and store how it ended."""
    search_id = plan.search_id
    status: SearchStatus = "failed"
    outcome: SearchOutcome | None = None
    # Strategies that share weights are in the space; where one came from a baseline alone, that is known at the end.
    shared = "sharding" in plan.names or any(start.strategy.sharding for start in plan.known)
    try:
        with bounding(store, setting) as below:
            if plan.workers > 1:
                below.begin(shared=shared)
            # First, so that a baseline that the search finds again keeps its name.
            progress.begin("simulating the baselines", None)
            baseline_of, known = _baselines(store, setting, plan, progress)
            progress.end()
            found = find(store, setting, plan, progress)
            best = _best(store, setting, plan, registry.best_of(found).strategy, baseline_of, known)
            chains = [chain for one in found for chain in one.chains]
            shared = shared or best.digest in {one.digest for one in known if one.name in ("zero", "fsdp")}
            # Whoever interrupts a search does not wait for more.
            recomputed = "recomputation" in plan.names or any(one.strategy.recomputation for one in found)
            bound = (
                None
                if found[-1].interrupted
                else below.bound(found, progress, shared=shared, recomputed=recomputed)
            )
        outcome = SearchOutcome(
            proposals=sum(one.proposals for one in found),
            accepted=sum(one.accepted for one in found),
            initial_time_s=chains[0].initial_s if chains else None,
            best_time_s=best.step_time_s,
            best_strategy_id=best.strategy_id,
            lower_bound_s=bound.seconds if bound is not None and bound.time_ns else None,
        )
        status = "interrupted" if found[-1].interrupted else "finished"
    except (KeyboardInterrupt, SystemExit):
        status = "interrupted"
        raise
    finally:
        if outcome is None:
            store.halt_search(search_id, status)
        else:
            store.finish_search(search_id, status, outcome)
    return SearchReport(
        search_id=search_id,
        model=setting.model.graph.name,
        topology=setting.topology.name,
        devices=len(setting.topology.devices),
        batch_size=setting.training.batch_size,
        proposals=outcome.proposals,
        accepted=outcome.accepted,
        interrupted=status == "interrupted",
        seconds=sum(one.seconds for one in found),
        predictions=(best, *known),
        unsplit=setting.model.graph.unsplit,
        known=plan.known,
        resumed_at=sum(one.checkpoint.proposals for one in plan.resumed) if plan.resumed else None,
        algorithms=tuple(_algorithm_report(one) for one in found),
        bound=bound,
        estimate_errors=setting.source.estimate_errors,
        cost_environments=cost_environments(store, setting),
        recomputation=_recomputation(store, setting, plan, best),
    )


def _recomputation(
    store: Store, setting: Setting, plan: SearchPlan, best: Prediction
) -> RecomputationReport | None:
    """Return what the best strategy makes again, with what that costs and saves; None: nothing."""
    from search.simulate.simulator import simulate

    graph = setting.model.graph
    strategy = start_of(setting, store.strategy(best.digest)).strategy
    if not strategy.recomputation:
        return None
    made_again, kept = (
        simulate(
            graph,
            one,
            setting.topology,
            setting.table,
            setting.training,
            links=setting.target.link_costs,
            order=plan.options.order,
        )
        for one in (strategy, replace(strategy, recomputation=()))
    )
    return recomputation_report(graph, strategy, made_again, kept)


def _algorithm_report(found: registry.AlgorithmResult) -> AlgorithmReport:
    time_s = found.step_time_s if found.step_time_s < float("inf") else None
    return AlgorithmReport(found.algorithm, time_s, found.proposals, found.seconds, found.proven)


def _best(
    store: Store,
    setting: Setting,
    plan: SearchPlan,
    strategy: Strategy,
    baseline_of: Mapping[str, Strategy],
    known: list[Prediction],
) -> Prediction:
    """Store what the chains found; return it, or the baseline that beats it (few chains do not start from all).

    The memory of a baseline that would beat it is looked at first, and `known` corrected: see `_baselines`. Where the
    search's own sum of a memory was too low, and what was found does not fit, a known start that does is taken.
    """
    found = _predicted("found", strategy, "search", store, setting, plan)
    changes = (("sharding", share_weights), ("recomputation", recompute))
    for change in [one for name, one in changes if name in plan.names]:
        if found.feasible:
            break

        def peaks(one: Strategy, walk: MemoryWalk) -> tuple[int, ...]:
            return _predicted("found", one, "search", store, setting, plan, walk).peak_memory_bytes

        strategy = made_to_fit(
            setting,
            strategy,
            change,
            plan.options,
            lambda one: peaks(one, "nearly full"),
            lambda one: peaks(one, "never"),
        )
        found = _predicted("found", strategy, "search", store, setting, plan)
    if not found.feasible:
        starts = {start.strategy: None for start in plan.known if start.strategy != strategy}
        tried = [found, *(_predicted("found", one, "search", store, setting, plan) for one in starts)]
        found = min(tried, key=lambda one: (not one.feasible, one.step_time_s))
    for place, one in enumerate(known):
        if one.feasible and (one.step_time_s < found.step_time_s or not found.feasible):
            known[place] = _predicted(
                one.name, baseline_of[one.name], source_of(one.name), store, setting, plan
            )
    best = min([found, *known], key=lambda one: (not one.feasible, one.step_time_s))
    return replace(best, name="found")


def _baselines(
    store: Store, setting: Setting, plan: SearchPlan, progress: Progress
) -> tuple[dict[str, Strategy], list[Prediction]]:
    """Predict the baselines, and store them: those that chains start from, or all that there are.

    Where nobody asked for a comparison, their memory is the search's own sum: most are slower than what is found, and
    to walk their programs would take longer than many a search.
    """
    graph, count = setting.model.graph, len(setting.topology.devices)
    found = (
        baselines.all_baselines(graph, count)
        if plan.compare_baselines
        else baselines.starting_baselines(graph, count)
    )
    walk: MemoryWalk = "nearly full" if plan.compare_baselines else "never"
    predictions = []
    for one in found:
        source = source_of(one.name)
        predictions.append(_predicted(one.name, one.strategy, source, store, setting, plan, walk))
        progress.advance(text=f"simulating the baselines: {one.name}")
    return {one.name: one.strategy for one in found}, predictions


def _predicted(
    name: str,
    strategy: Strategy,
    source: StrategySource,
    store: Store,
    setting: Setting,
    plan: SearchPlan,
    walk: MemoryWalk = "nearly full",
) -> Prediction:
    """Predict a strategy's step, and store it."""
    predicted = predict(
        store, setting, strategy, source, order=plan.options.order, search_id=plan.search_id, walk=walk
    )
    return _prediction(name, strategy, setting, *predicted)


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
        scheduling_efficiency=simulation.efficiency,
        speedup_potential=simulation.speedup_potential,
        peak_memory_bytes=simulation.peak_memory_bytes,
        feasible=simulation.feasible,
    )
