"""`app search --algorithm unity`: which substitutions, and which strategy for the graph that they make, together.

The outer level goes through sets of substitutions, cheapest first, by the simulated step of what is known for their
graphs. The best sets and the graph as imported are searched then as any network is.

Source: Unity (OSDI 2022) section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from app.db.store import Store
from app.services.models.models import ImportedModel, rewritten_model
from app.services.predict.compiled_stretches import check_compiler
from app.services.predict.problem import problem_of
from app.services.progress import Progress
from app.services.search.micro_batches import check_options
from app.services.search.report import RelatedSearches, SearchReport
from app.services.search.request import SearchRequest, algorithm_names, search_options
from app.services.search.run_algorithms import worker_count
from app.services.search.search import check_topology, imported_model, run_search, search_setting
from graph.errors import UsageError
from graph.operators import OperatorGraph
from graph.rules import whole_call
from graph.strategy import Strategy
from graph.substitutions.rewriting import WITH_COMPILER, WITHOUT_COMPILER, compatible, matches
from graph.substitutions.substitution import Substitution, substitutions_to_json
from search.algorithms.backtracking import Evaluated, backtrack
from search.algorithms.best_tracker import simulated
from search.algorithms.optcnn import optcnn
from search.orders import Order
from search.problem import Problem
from search.space.baselines import data_parallel, single_device
from search.space.carried import carried

NAME = "unity"
# Sets of substitutions that are evaluated, and those of them that are searched, beside the graph as imported.
BUDGET = 40
MOST_SEARCHED = 2


@dataclass(frozen=True, slots=True)
class SubstitutionSearches(RelatedSearches[tuple[Substitution, ...]]):
    """The reports of the searches, by sets of substitutions.

    evaluated: all sets that were considered, the best first, each with the seconds of a step that it costs.
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
    if request.model.micro_batches != 1 or request.substitute:
        raise UsageError(
            f"--algorithm {NAME}: chooses substitutions for a step in one batch, must be without --micro-batches and "
            "--substitute; leave them out"
        )
    check_topology(request, database)
    if request.starts:
        raise UsageError(
            f"--start: names strategies for one graph, must be left out with --algorithm {NAME}, which searches "
            "several; leave it out"
        )
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
            f"--algorithm {NAME}: no rule applies to {model.graph.name}, must one; choose mcmc, which searches the "
            "same strategies"
        )
    with Store.open(database) as store:
        with search_setting(store, request, model, progress) as setting:
            costs = SetCosts(problem_of(setting), options.order)

        def cost(chosen: tuple[int, ...]) -> float:
            if not compatible(model.graph, _chosen(moves, chosen)):
                return inf
            with search_setting(store, request, _rewritten(model, moves, chosen), progress) as setting:
                return costs.seconds(problem_of(setting))

        evaluated = backtrack(len(moves), cost, budget=BUDGET)
    reports: list[tuple[tuple[Substitution, ...], SearchReport]] = []
    for chosen in _searched(evaluated):
        rewritten = _rewritten(model, moves, chosen)
        each = replace(request, model=rewritten.request)
        report = run_search(each, database, progress, partial(_given, rewritten))
        reports.append((rewritten.graph.substitutions, report))
        if report.interrupted or report.unconfirmed:
            break
    return SubstitutionSearches(
        tuple(reports), tuple((_chosen(moves, one.moves), one.cost_s) for one in evaluated)
    )


def moves_of(graph: OperatorGraph, rules: Sequence[str] = WITHOUT_COMPILER) -> list[tuple[Substitution, ...]]:
    """Return the moves of a search: each applies a rule at all of those of its matches whose calls are the same."""
    alike: dict[object, list[Substitution]] = {}
    for match in matches(graph, rules):
        calls = [whole_call(graph, graph.operator_by_name[name]).key for name in match.operators]
        alike.setdefault((match.rule, *calls), []).append(match)
    return [tuple(group) for group in alike.values()]


class SetCosts:
    """What the graph of a set of substitutions costs: the simulated step of the best of three strategies for it.

    That of OptCNN's dynamic program for the graph as imported, carried over; data parallelism; one device. The
    program's cost is additive; the simulator knows what overlaps, so that it has the last word.
    """

    def __init__(self, problem: Problem, order: Order) -> None:
        self._graph = problem.graph
        self._order: Order = order
        self._found: tuple[Strategy, ...] = ()
        with suppress(UsageError):  # too wide for it: the others count
            self._found = (optcnn(problem).strategy,)

    def seconds(self, problem: Problem) -> float:
        """Return the step of a rewritten graph; infinite where none of the strategies fits the memory."""
        graph = problem.graph
        strategies = [
            single_device(graph),
            data_parallel(graph, problem.device_count),
            *[carried(strategy, self._graph, graph) for strategy in self._found],
        ]
        return min(simulated(problem, strategy, self._order).seconds for strategy in strategies)


def _searched(evaluated: Sequence[Evaluated]) -> list[tuple[int, ...]]:
    best = [one.moves for one in evaluated[:MOST_SEARCHED]]
    return best if () in best else [(), *best]


def _chosen(moves: Sequence[tuple[Substitution, ...]], chosen: Sequence[int]) -> tuple[Substitution, ...]:
    return tuple(substitution for move in chosen for substitution in moves[move])


def _given(model: ImportedModel) -> ImportedModel:
    return model


def _rewritten(
    model: ImportedModel, moves: Sequence[tuple[Substitution, ...]], chosen: Sequence[int]
) -> ImportedModel:
    return rewritten_model(model, _chosen(moves, chosen))
