"""`app search`: find a strategy, and store every proposal, the result, and the baselines beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from app.db import chunks
from app.db.failures import as_written
from app.db.records import SearchOutcome, SearchStatus
from app.db.store import Store
from app.services.costs.topologies import LOCAL, find_topology
from app.services.models.micro_batches import check_graph
from app.services.models.models import ImportedModel, import_graph, with_all_substitutions
from app.services.predict.compiled_stretches import check_compiler, faster_stretches
from app.services.predict.micro_batch_report import micro_batch_report
from app.services.predict.predict import (
    Setting,
    cost_environments,
    find_target,
    prepare,
    resolve_costs,
)
from app.services.progress import Progress
from app.services.search.confirmation import Confirmation, Confirmed, Finalist, confirm, finalists
from app.services.search.fitting_starts import fitting_starts, recomputed_starts, sharded_starts
from app.services.search.lower_bound import LowerBoundTask
from app.services.search.micro_batches import check_options
from app.services.search.policies import with_policy
from app.services.search.predictions import SearchPredictions
from app.services.search.report import AlgorithmReport, SearchReport
from app.services.search.request import (
    SearchRequest,
    algorithm_names,
    check_same,
    request_of,
    search_options,
    search_record,
    searched_on,
)
from app.services.search.run_algorithms import SearchPlan, run_algorithms, worker_count
from app.services.search.start_strategies import StartStrategy, given_starts, known_starts, start_of
from app.services.stored import strategy_of
from app.services.trace.replay import TraceReader, resumed_chains
from graph.errors import RuntimeFailure, UsageError
from graph.operators import OperatorGraph
from graph.synchronization import Policy
from graph.training import Training
from search.algorithms import registry
from search.algorithms.algorithm import AlgorithmResult
from search.algorithms.moves import ONE_GROUP, MoveShares, shares_for
from search.cost.calls_to_profile import calls_to_profile

# Searches that follow one whose winner does not hold, at most.
MOST_SEARCHES_ON = 2


def run_search(
    request: SearchRequest,
    database: str | None,
    progress: Progress,
    imported: Callable[[], ImportedModel] | None = None,
) -> SearchReport:
    """Import the model, search, and store the result.

    Args:
        request: the search.
        database: path or URL; None: the default one.
        progress: shows the stages.
        imported: returns the imported model; None: it is imported here.

    Raises:
        SoapstoneError: a model, topology or option that cannot be used, or a missing cost under on_miss "fail".
    """
    options, names = search_options(request), algorithm_names(request)
    check_options(request, names)
    if request.compile_stretches:
        check_compiler()
    if request.fuse:
        check_compiler("--fuse")
    workers = worker_count(request.workers)
    check_topology(request, database)
    with Store.open(database) as store:
        chunks.check_next_folder(store)
        model = imported_model(request, names, workers, progress, imported)
        with search_setting(store, request, model, progress) as setting:
            starts = _starts(store, setting, request, progress)
            options = replace(options, shares=shares_for(len(setting.topology.devices)))
            search_id = store.start_search(search_record(request, options, setting, starts))
            plan = SearchPlan(
                search_id,
                names,
                options,
                tuple(starts),
                compare_baselines=request.compare_baselines,
                workers=workers,
            )
            return _search_and_confirm(store, setting, request, plan, progress)


def keep_search(
    request: SearchRequest,
    algorithm: str,
    store: Store,
    setting: Setting,
    result: AlgorithmResult,
    starts: Sequence[StartStrategy],
    progress: Progress,
) -> SearchReport:
    """Store a search that has been made, without its proposals, as `run_search` stores one; confirm what it found.

    Args:
        request: the search, of the algorithms that would go on from its result.
        algorithm: that made it. A search of that name cannot be resumed.
        store: open.
        setting: of the graph that the result is for.
        result: of the search.
        starts: known strategies that it began with, maybe of other graphs.
        progress: shows the stages.

    Raises:
        SoapstoneError: as `run_search`.
    """
    options, names = search_options(request), algorithm_names(request)
    record = replace(search_record(request, options, setting, starts), algorithm=algorithm)
    plan = SearchPlan(
        store.start_search(record),
        names,
        options,
        (),
        compare_baselines=request.compare_baselines,
        workers=worker_count(request.workers),
        result=result,
    )
    report = _search_and_confirm(store, setting, request, plan, progress)
    return replace(report, starts=tuple(starts), resumable=False)


def resume_search(
    search_id: int, database: str | None, progress: Progress, *, workers: int | None = None
) -> SearchReport:
    """Resume a search that was stopped or killed, with the same chains, and store the result.

    How many processes walked them before does not matter.

    Raises:
        UsageError: the search is finished or running, or its model, topology or costs are others now.
        SoapstoneError: as `run_search`.
    """
    processes = worker_count(workers)
    with Store.open(database, create=False) as store:
        record = store.search(search_id)
        if record.status in ("finished", "running"):
            store.resume_search(search_id)  # says why not
        if record.algorithm == registry.UNITY:
            raise UsageError(
                f"search {search_id}: is of algorithm {registry.UNITY}, whose proposals are not recorded, must be of "
                "another one to go on; start a new search"
            )
        request = request_of(record)
        with as_written(f"table searches, row {record.id}, column options"):
            shares = MoveShares(**record.options["moves"]) if "moves" in record.options else ONE_GROUP
            stored_starts = [(start["digest"], start["found_for"]) for start in record.options["known"]]
        options, names = replace(search_options(request), shares=shares), algorithm_names(request)
        check_topology(request, database)
        model = imported_model(request, names, processes, progress)
        with search_setting(store, request, model, progress) as setting:
            check_same(record, setting)
            starts = tuple(
                replace(start_of(setting, store.strategy(digest)), found_for=found_for)
                for digest, found_for in stored_starts
            )
            store.resume_search(search_id)
            try:
                chunks.recover(store, search_id)
                reader = TraceReader(store, search_id)
                strategies = [start.strategy for start in starts]
                resumed = resumed_chains(reader, model.graph.digest, strategies) if reader.has_starts else []
            except BaseException:
                store.halt_search(search_id, "interrupted")
                raise
            if resumed:
                # The algorithms before the walk gave some of its chains their starts.
                names = names[names.index("mcmc") :]
            plan = SearchPlan(
                search_id, names, options, starts, tuple(resumed), request.compare_baselines, processes
            )
            return _search_and_confirm(store, setting, request, plan, progress)


def check_topology(request: SearchRequest, database: str | None) -> None:
    """Refuse a topology that does not exist or is too small, before the model is imported, which takes longer."""
    if request.topology != LOCAL:
        find_topology(request.topology, database, devices=request.devices, nodes=request.nodes)


def imported_model(
    request: SearchRequest,
    names: Sequence[str],
    workers: int,
    progress: Progress,
    imported: Callable[[], ImportedModel] | None = None,
) -> ImportedModel:
    """Import the model, and compile the simulator meanwhile, and to its end: nothing is measured beside that."""
    from search.parallel.kernel_warm_up import KernelWarmUp, needed_kernels

    with KernelWarmUp(needed_kernels(request.order, names)) as warm_up:
        if workers > 1:
            warm_up.start_helper()
        meanwhile = (
            " (once after an installation, compiling the simulator meanwhile)" if warm_up.helper else ""
        )
        with progress.stage(f"importing {request.model.name}{meanwhile}"):
            model = imported() if imported else import_graph(request.model, batch_norm=request.batch_norm)
        model = with_all_substitutions(model, substitute=request.substitute, fuse=request.fuse)
        if warm_up.remaining:
            with progress.stage("compiling the simulator, once after an installation"):
                warm_up.finish()
    return model


@contextmanager
def search_setting(
    store: Store, request: SearchRequest, model: ImportedModel, progress: Progress
) -> Iterator[Setting]:
    """Find topology and costs; on this machine, costs that are missing are measured."""
    check_graph(model, progress)
    training = Training(model.batch_size, request.model.precision, request.optimizer, request.batch_norm)
    target = find_target(
        store,
        request.topology,
        progress,
        devices=request.devices,
        nodes=request.nodes,
        processor=request.processor,
        gpus=request.gpus,
        precision=request.model.precision,
    )
    # Of other machines there are only estimates.
    on_miss = request.on_miss or ("estimate" if target.machine is None else "measure")
    with prepare(store, model, target, training, on_miss, progress) as setting:
        measure_missing(setting, model.graph)
        yield replace(
            setting,
            schedule=request.schedule,
            gradients=request.gradients,
            shares_weights=request.share_weights,
        )


def measure_missing(setting: Setting, graph: OperatorGraph) -> None:
    """Measure what is missing of a graph's costs at once, where a setting measures, as `app profile` does.

    The walk then seldom meets a call without a cost.
    """
    if setting.on_miss == "measure":
        calls = calls_to_profile(graph, len(setting.topology.devices))
        resolve_costs(setting, {kind.name: calls for kind in setting.topology.kinds})


def _starts(
    store: Store, setting: Setting, request: SearchRequest, progress: Progress
) -> list[StartStrategy]:
    """Return the strategies that chains start from beside the usual ones."""
    if request.starts:
        starts = given_starts(store, setting, request.starts)
    else:
        starts = [] if request.fresh else known_starts(store, setting, request.order)
    if request.share_weights:
        starts += sharded_starts(store, setting, starts)
    if not starts:
        starts = fitting_starts(store, setting, request.order)
    if request.recompute:
        with progress.stage("searching what to make again in the backward"):
            starts += recomputed_starts(store, setting, request.order, starts)
    return starts


def _search_and_confirm(
    store: Store, setting: Setting, request: SearchRequest, plan: SearchPlan, progress: Progress
) -> SearchReport:
    """Search, and confirm the winner; where that changes much, search on from the strategies that were compared.

    Each search has a row of its own: its numbers rest on the same costs.
    """
    confirmations: list[Confirmation] = []
    while True:
        report, compared = _search(store, setting, plan, progress)
        if not request.confirm or report.interrupted:
            break
        try:
            confirmed = confirm(setting, plan.search_id, compared, plan.options.order)
        except KeyboardInterrupt:
            report = replace(report, unconfirmed=True)
            break
        except RuntimeFailure as failure:
            progress.warn(f"the winner is not confirmed: {failure}")
            break
        if confirmed is None:
            break
        setting = confirmed.setting
        confirmations.append(confirmed.confirmation)
        report, starts = _predicted_again(store, confirmed, plan, report, progress)
        if confirmed.confirmation.holds or len(confirmations) > MOST_SEARCHES_ON:
            break
        options = searched_on(plan.options)
        request = replace(request, proposals=options.proposals)
        search_id = store.start_search(search_record(request, options, setting, starts))
        progress.say(f"search {plan.search_id}: {confirmed.confirmation.says()}; searching on")
        plan = replace(plan, search_id=search_id, options=options, starts=starts, resumed=(), result=None)
    report = replace(report, confirmations=tuple(confirmations))
    if request.policy != Policy.FIFO and not (report.interrupted or report.unconfirmed):
        report = with_policy(store, setting, plan, report, request.policy, progress)
    if request.compile_stretches and not (report.interrupted or report.unconfirmed):
        report = _with_stretches_compiled(store, setting, plan, report, progress)
    if setting.model.request.micro_batches == 1:
        return report
    graph, size = setting.model.graph, setting.model.micro_batch_size
    best = strategy_of(store.strategy(report.best.digest), graph)
    return replace(report, micro_batches=micro_batch_report(graph, best, size))


def _with_stretches_compiled(
    store: Store, setting: Setting, plan: SearchPlan, report: SearchReport, progress: Progress
) -> SearchReport:
    """Return the report with those stretches of the best strategy compiled that are measured to be faster so.

    Missing costs are measured; of devices that this machine does not have, the database's costs are all there is.
    """
    graph, topology = setting.model.graph, setting.topology
    strategy = strategy_of(store.strategy(report.best.digest), graph, len(topology.devices))
    with progress.stage("measuring what is faster compiled"):
        ranges = faster_stretches(graph, strategy, topology, setting.table)
    compiled = report.best
    if ranges:
        compiled = SearchPredictions(store, setting, plan).predict(replace(strategy, compiled=ranges))
    if compiled.rank >= report.best.rank:
        unmeasured = (
            "" if setting.measurers else f": {topology.name} has no device of this machine to measure it on"
        )
        progress.say(f"nothing of the best strategy was measured to be faster compiled{unmeasured}")
        return report
    names = [operator.name for operator in graph.operators]
    searched_s = report.best.step_time_s if report.searched_s is None else report.searched_s
    return replace(
        report,
        predictions=(compiled, *report.predictions[1:]),
        searched_s=searched_s,
        compiled=tuple((names[stretch.first], names[stretch.last]) for stretch in ranges),
    )


def _predicted_again(
    store: Store, confirmed: Confirmed, plan: SearchPlan, report: SearchReport, progress: Progress
) -> tuple[SearchReport, tuple[StartStrategy, ...]]:
    """Return a search's report by the costs measured again, and the strategies compared as starts of another."""
    predictions = SearchPredictions(store, confirmed.setting, plan)
    with progress.stage("simulating what was compared"):
        baselines = predictions.baselines(progress)
        # Also those that are not reported: what is stored of them rests on the old costs.
        digests = [predictions.predict(finalist.strategy).digest for finalist in confirmed.compared]
    best = predictions.best(confirmed.compared[0].strategy, baselines, progress)
    starts = tuple(start_of(confirmed.setting, store.strategy(digest)) for digest in digests)
    searched_s = report.best.step_time_s if report.searched_s is None else report.searched_s
    return (
        replace(
            report,
            predictions=(best, *baselines),
            searched_s=searched_s,
            recomputation=predictions.recomputation(best),
            cost_environments=cost_environments(store, confirmed.setting),
        ),
        starts,
    )


def _search(
    store: Store, setting: Setting, plan: SearchPlan, progress: Progress
) -> tuple[SearchReport, list[Finalist]]:
    """Run the algorithms, and store how the search ended; return the report, and the strategies to confirm."""
    status: SearchStatus = "failed"
    outcome: SearchOutcome | None = None
    # Strategies that share weights are in the space; whether one came from a baseline alone, is known at the end.
    shared = "sharding" in plan.names or any(start.strategy.sharding for start in plan.starts)
    try:
        with closing(LowerBoundTask(store, setting)) as lower_bound:
            # The bound is on a step in one batch.
            is_bounded = setting.model.request.micro_batches == 1
            if plan.workers > 1 and is_bounded:
                lower_bound.begin(shared=shared)
            # First, so that a baseline that the search finds again keeps its name.
            with progress.stage("simulating the baselines"):
                predictions = SearchPredictions(store, setting, plan)
                baselines = predictions.baselines(progress)
            results = (
                run_algorithms(store, setting, plan, progress) if plan.result is None else (plan.result,)
            )
            # A user who interrupts a search waits neither for another one nor for a bound.
            interrupted = results[-1].interrupted
            found = registry.best_of(results).strategy
            best = predictions.best(found, baselines, progress, again=not interrupted)
            shared = shared or any(
                baseline.digest == best.digest and baseline.name in ("zero", "fsdp") for baseline in baselines
            )
            recomputed = "recomputation" in plan.names or any(
                result.strategy.recomputation for result in results
            )
            bound = None
            if is_bounded and not interrupted:
                bound = lower_bound.bound(results, progress, shared=shared, recomputed=recomputed)
        chains = [chain for result in results for chain in result.chains]
        outcome = SearchOutcome(
            proposals=sum(result.proposals for result in results),
            accepted=sum(result.accepted for result in results),
            initial_time_s=chains[0].initial_s if chains else None,
            best_time_s=best.step_time_s,
            best_strategy_id=best.strategy_id,
            lower_bound_s=bound.seconds if bound is not None and bound.time_ns else None,
        )
        status = "interrupted" if interrupted else "finished"
    except (KeyboardInterrupt, SystemExit):
        status = "interrupted"
        raise
    finally:
        if outcome is None:
            store.halt_search(plan.search_id, status)
        else:
            store.finish_search(plan.search_id, status, outcome)
    report = SearchReport(
        search_id=plan.search_id,
        model=setting.model.graph.name,
        topology=setting.topology.name,
        devices=len(setting.topology.devices),
        batch_size=setting.training.batch_size,
        proposals=outcome.proposals,
        accepted=outcome.accepted,
        interrupted=interrupted,
        seconds=sum(result.seconds for result in results),
        predictions=(best, *baselines),
        unsplit=setting.model.graph.unsplit,
        starts=plan.starts,
        resumed_at=sum(chain.snapshot.proposals for chain in plan.resumed) if plan.resumed else None,
        algorithms=tuple(_algorithm_report(result) for result in results),
        bound=bound,
        estimate_errors=setting.source.estimate_errors,
        cost_environments=cost_environments(store, setting),
        recomputation=predictions.recomputation(best),
    )
    strategy = start_of(setting, store.strategy(best.digest)).strategy
    return report, finalists(setting, strategy, results, predictions.strategies, plan.options.order)


def _algorithm_report(result: AlgorithmResult) -> AlgorithmReport:
    time_s = result.step_time_s if result.step_time_s < float("inf") else None
    return AlgorithmReport(result.algorithm, time_s, result.proposals, result.seconds, result.proven)
