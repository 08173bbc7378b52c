"""`app search --algorithm unity`: which substitutions, and which strategy for the graph that they make, together.

The graph as imported is searched as any network is; then `search.algorithms.joint` goes on from what that found, and
from strategies with substitutions that are stored, over sets of substitutions and strategies for the graphs that they
make.

Source: Unity (OSDI 2022) section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from app.db.store import Store
from app.services.models.models import ImportedModel, rewritten_model
from app.services.predict.compiled_stretches import check_compiler
from app.services.predict.problem import problem_of
from app.services.progress import Progress
from app.services.search.joint_starts import (
    StoredStart,
    given_joint_starts,
    joint_start,
    known_joint_starts,
)
from app.services.search.micro_batches import check_options
from app.services.search.report import RelatedSearches, SearchReport
from app.services.search.request import SearchRequest, algorithm_names, search_options
from app.services.search.run_algorithms import ProgressObserver, worker_count
from app.services.search.search import (
    check_topology,
    imported_model,
    keep_search,
    measure_missing,
    run_search,
    search_setting,
)
from app.services.search.start_strategies import start_of
from app.services.search.substitution_moves import OfferedMoves, moves_of, rewritings_of, substitutions_of
from graph.errors import UsageError
from graph.substitutions.rewriting import WITH_COMPILER, WITHOUT_COMPILER
from graph.substitutions.substitution import Substitution, substitutions_to_json
from search.algorithms.algorithm import AlgorithmResult
from search.algorithms.chain import SearchOptions
from search.algorithms.joint import JointResult, JointStart, search_jointly
from search.algorithms.registry import UNITY


@dataclass(frozen=True, slots=True)
class SubstitutionSearches(RelatedSearches[tuple[Substitution, ...]]):
    """The reports of the searches, of the graph as imported and the joint one, with the substitutions that each found.

    evaluated: all sets that backtracking considered, the best first, each with the seconds of a step that it costs.
    """

    evaluated: tuple[tuple[tuple[Substitution, ...], float], ...]

    @property
    def chosen(self) -> tuple[Substitution, ...]:
        """The substitutions of the best strategy."""
        return next(of for of, report in self.reports if report is self.best)

    def to_json(self) -> dict[str, Any]:
        """Return the evaluated sets, a row for each search, and the report of the best one, as a JSON document."""
        return {
            "evaluated": [
                {"substitutions": substitutions_to_json(substitutions), "step_time_s": cost_s}
                for substitutions, cost_s in self.evaluated
            ],
            "searches": [
                {
                    "search": report.search_id,
                    "substitutions": substitutions_to_json(substitutions),
                    "predicted_step_time_s": report.best.step_time_s,
                    "digest": report.best.digest,
                }
                for substitutions, report in self.reports
            ],
            "best": self.best.to_json(),
        }


def run_substitution_searches(
    request: SearchRequest,
    database: str | None,
    progress: Progress,
    imported: Callable[[], ImportedModel] | None = None,
) -> SubstitutionSearches:
    """Search for substitutions and strategies together; never worse than the search for the graph as imported.

    Ctrl-C ends both with the best so far.

    Args:
        request: the search; its `algorithm` is that of each graph. `fuse`: with rules that take a compiler, too.
        database: as for `run_search`.
        progress: as for `run_search`.
        imported: returns the model as imported.

    Raises:
        UsageError: no rule applies to the network.
        SoapstoneError: as `run_search`.
    """
    options = search_options(request)
    if request.substitute:
        raise UsageError(
            f"--substitute: is what --algorithm {UNITY} chooses itself, must be left out; leave it out"
        )
    if request.model.micro_batches != 1:
        raise UsageError(
            f"--micro-batches: is {request.model.micro_batches}, must be left out with --algorithm {UNITY}, which is "
            "for a step in one batch; leave it out"
        )
    check_topology(request, database)
    names, workers = algorithm_names(request), worker_count(request.workers)
    check_options(request, names)
    if request.compile_stretches:
        check_compiler()
    if request.fuse:
        check_compiler("--fuse")
    rules = (*WITHOUT_COMPILER, *(WITH_COMPILER if request.fuse else ()))
    request = replace(request, fuse=False)
    model = imported_model(request, names, workers, progress, imported)
    moves = moves_of(model.graph, rules)
    if not moves:
        raise UsageError(
            f"--algorithm {UNITY}: no rule applies to {model.graph.name}, at least one must; choose mcmc, which "
            "searches the same strategies"
        )
    given: list[StoredStart] = []
    if request.starts:
        with Store.open(database, create=False) as store:
            given = given_joint_starts(store, model, moves, request.starts)
    # Who names strategies wants no others.
    of_imported = replace(
        request,
        starts=tuple(start.record.digest for start in given if not start.rewriting),
        fresh=request.fresh or bool(given),
    )
    plain = run_search(of_imported, database, progress, lambda: model)
    if plain.interrupted or plain.unconfirmed:
        return SubstitutionSearches((((), plain),), ())
    try:
        return _go_on_jointly(request, options, model, moves, given, plain, database, progress)
    except KeyboardInterrupt:
        return SubstitutionSearches((((), plain),), (), ended=True)


def _go_on_jointly(
    request: SearchRequest,
    options: SearchOptions,
    model: ImportedModel,
    moves: OfferedMoves,
    given: Sequence[StoredStart],
    plain: SearchReport,
    database: str | None,
    progress: Progress,
) -> SubstitutionSearches:
    """Search jointly from the best strategy of the search for the graph as imported and from stored ones; store it."""
    with Store.open(database) as store:
        with search_setting(store, request, model, progress) as setting:
            stored = [start for start in given if start.rewriting]
            if not (given or request.fresh):
                stored = known_joint_starts(store, setting, moves, options.order)
            used = [joint_start(store, setting, moves, start) for start in stored]
            imported = start_of(setting, store.strategy(plain.best.digest)).strategy
            rewritings = rewritings_of(problem_of(setting), moves, partial(measure_missing, setting))
            progress.begin(f"searching {model.graph.name} and its substitutions", options.proposals)
            try:
                joint = search_jointly(
                    rewritings,
                    (JointStart("imported", (), imported), *(start for _, start in used)),
                    options,
                    observer=ProgressObserver(
                        progress, f"searching {model.graph.name} and its substitutions"
                    ),
                    workers=worker_count(request.workers),
                )
            finally:
                progress.end()
        evaluated = tuple((substitutions_of(moves, one.moves), one.cost_s) for one in joint.evaluated)
        reports: list[tuple[tuple[Substitution, ...], SearchReport]] = [((), plain)]
        # Of strategies that share weights or recompute to fit, what the joint search knows may not fit.
        if joint.step_time_s < float("inf"):
            best = rewritten_model(model, substitutions_of(moves, joint.rewriting))
            each = replace(request, model=best.request)
            with search_setting(store, each, best, progress) as setting:
                starts = [start for start, _ in used]
                report = keep_search(each, UNITY, store, setting, algorithm_result(joint), starts, progress)
            reports.append((best.graph.substitutions, report))
        else:
            progress.warn(
                "with substitutions nothing was found that fits the memories by its configurations alone, without "
                "shared weights and recomputation"
            )
    return SubstitutionSearches(tuple(reports), evaluated)


def algorithm_result(joint: JointResult) -> AlgorithmResult:
    """Return a joint result as that of a search of its best strategy's graph."""
    return AlgorithmResult(
        UNITY,
        joint.strategy,
        joint.step_time_s,
        joint.proposals,
        joint.accepted,
        joint.interrupted,
        joint.seconds,
        () if joint.chain is None else (joint.chain,),
    )
