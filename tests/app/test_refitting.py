"""What was found and does not fit by its programs is shared more, until it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.db.store import Store
from app.services.predict.predict import Setting, Target
from app.services.predict.problem import problem_of
from app.services.progress import Progress
from app.services.search.memory_repair import SearchAgain, repair_memory
from app.services.search.run_algorithms import SearchPlan
from graph.strategy import Strategy
from search.algorithms.chain import SearchOptions
from search.algorithms.weight_sharding import share_weights
from search.cost.cost_table import CostTable
from search.evaluate.evaluator import outcome
from search.outcome import Outcome
from search.problem import Problem
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import data_parallel
from tests.app.test_reusing import setting_of
from tests.search.builders import MadeUpCosts, devices, two_layers


def summed(setting: Setting, strategy: Strategy) -> tuple[int, ...]:
    """Return the bytes of each device by the search's own sum."""
    costs = CostTable(MadeUpCosts())
    tasks = TaskGraphBuilder(setting.model.graph, setting.topology, costs, setting.training).build(strategy)
    return tuple(tasks.peak_memory_D.tolist())


def outcome_of(problem: Problem, strategy: Strategy) -> Outcome:
    """Return the simulated outcome of a strategy."""
    assert problem.builder is not None
    return outcome(problem.builder.layout(strategy), "program")


def test_as_much_is_shared_as_programs_take_beyond_the_sum(tmp_path: Path) -> None:
    graph = two_layers()
    with Store.open(tmp_path / "x.sqlite") as store:
        plenty = setting_of(store, graph, 2, 8)
    found = data_parallel(graph, 2)
    most = max(summed(plenty, found))
    # Programs that take 200 bytes more than the sum: of the plain strategy 100 more than there is.
    setting = replace(plenty, target=Target(devices(2, memory_bytes=most + 100), None, None))

    def walked(strategy: Strategy) -> tuple[int, ...]:
        return tuple(size + 200 for size in summed(setting, strategy))

    assert max(walked(found)) > most + 100

    def shared(problem: Problem, strategy: Strategy) -> Strategy:
        return share_weights(problem, (strategy,), most=100, order="program").strategy

    fitted = repair_memory(setting, found, shared, walked, lambda one: summed(setting, one))
    assert fitted.sharding
    assert max(walked(fitted)) <= most + 100
    # What fits is left as it is.
    again = repair_memory(setting, fitted, shared, walked, lambda one: summed(setting, one))
    assert again == fitted


class Interrupting(Progress):
    """Interrupts a search as soon as it says how far it is; keeps the texts of the bars that were begun."""

    def __init__(self, *, interrupts: bool) -> None:
        self.begun: list[str] = []
        self.interrupts = interrupts

    def begin(self, text: str, total: int | None) -> None:
        super().begin(text, total)
        self.begun.append(text)

    def advance(self, steps: int = 1, text: str | None = None) -> None:
        super().advance(steps, text)
        if self.interrupts:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("interrupts", "searches"), [(True, 1), (False, 2)])
def test_a_search_again_is_shown_and_none_follows_one_that_is_interrupted(
    tmp_path: Path, *, interrupts: bool, searches: int
) -> None:
    graph = two_layers()
    with Store.open(tmp_path / "x.sqlite") as store:
        setting = setting_of(store, graph, 2, 8)
    progress = Interrupting(interrupts=interrupts)
    plan = SearchPlan(1, ("mcmc",), SearchOptions(proposals=40, chains=1), ())
    again = SearchAgain(setting, plan, progress)
    problem, given = problem_of(setting), data_parallel(graph, 2)
    found = again(problem, given)
    assert outcome_of(problem, found) <= outcome_of(problem, given)
    assert (again(problem, given) == given) or not interrupts
    assert progress.begun == [f"searching {graph.name} with less memory"] * searches
