"""The interface: every algorithm gives a strategy that takes what it says, and chains hand on what they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import pytest

from graph.calls import LocalCall
from graph.errors import CostError, StrategyError, UsageError
from graph.training import Training
from search.algorithms.algorithm import AlgorithmContext, AlgorithmResult
from search.algorithms.best_tracker import simulated
from search.algorithms.chain import SearchOptions
from search.algorithms.registry import ALGORITHMS, best_of, parsed, run
from search.cost.cost_table import CostTable, OperatorCost
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from tests.search.builders import MadeUpCosts, branches, devices, local_calls, two_layers


def problem(count: int = 2, memory_bytes: int = 1 << 40) -> Problem:
    topology = devices(count, contention=0.3, memory_bytes=memory_bytes)
    return Problem(branches(), topology, CostTable(MadeUpCosts(1e-7)), Training(4), LinkCosts(), local_calls)


# One of them needs the solver of the extra `exact`.
INSTALLED = tuple(name for name in ALGORITHMS if name != "placement" or find_spec("highspy") is not None)
OPTIONS = SearchOptions(proposals=300, chains=2, seed=1)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_strategy_takes_the_time_that_is_reported(name: str) -> None:
    one = problem()
    (found,) = run((name,), one, AlgorithmContext(OPTIONS))
    found.strategy.validate(one.graph, 2)
    assert found.algorithm == name
    assert found.step_time_s == simulated(one, found.strategy, "program").seconds
    assert found.proposals >= 1


def test_exhaustive_is_not_worse_than_any_other_and_says_of_what_it_is_the_optimum() -> None:
    one = problem()
    results = {name: run((name,), one, AlgorithmContext(OPTIONS))[0] for name in INSTALLED}
    optimum = results["exhaustive"]
    # The walk starts from strategies that are outside of the space too.
    assert all(optimum.step_time_s <= results[name].step_time_s for name in ("optcnn", "greedy", "random"))
    assert optimum.proven == "the optimum of 800000 strategies: all degrees on all lists of devices"
    assert optimum.bound_s == optimum.step_time_s
    assert results["optcnn"].proven.startswith("the least additive cost (")
    assert results["mcmc"].proven == ""


def test_what_one_finds_is_a_start_of_the_next() -> None:
    one = problem(4)
    few = replace(OPTIONS, proposals=4)
    told: list[tuple[str, int]] = []
    first, second, third = run(
        ("optcnn", "greedy", "mcmc"),
        one,
        AlgorithmContext(few),
        lambda name, starts: told.append((name, starts)),
    )
    assert told == [("optcnn", 0), ("greedy", 1), ("mcmc", 2)]
    assert third.step_time_s <= second.step_time_s <= first.step_time_s
    assert [chain.start for chain in third.chains][-2:] == ["known 0", "known 1"]
    assert best_of((first, second, third)).step_time_s == third.step_time_s


def test_the_walk_makes_the_proposals_that_it_makes_without_the_others() -> None:
    one = problem(4)
    (alone,) = run(("mcmc",), one, AlgorithmContext(OPTIONS))
    *_, chained = run(("optcnn", "mcmc"), one, AlgorithmContext(OPTIONS))
    assert chained.chains[: len(alone.chains)] == alone.chains


def test_an_interrupt_keeps_what_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(problem: Problem, context: AlgorithmContext) -> AlgorithmResult:
        raise KeyboardInterrupt

    monkeypatch.setitem(ALGORITHMS, "random", interrupted)
    (found,) = run(("optcnn", "random", "greedy"), problem(), AlgorithmContext(OPTIONS))
    assert (found.algorithm, found.interrupted) == ("optcnn", True)
    with pytest.raises(KeyboardInterrupt):
        run(("random", "optcnn"), problem(), AlgorithmContext(OPTIONS))


def test_nothing_that_fits_is_an_error_after_the_last() -> None:
    with pytest.raises(
        StrategyError, match="what optcnn, random found exceeds the devices' memories, must fit"
    ):
        run(("optcnn", "random"), problem(memory_bytes=100), AlgorithmContext(OPTIONS))


def test_names_are_checked() -> None:
    assert parsed("optcnn, mcmc") == ("optcnn", "mcmc")
    with pytest.raises(
        UsageError, match="algorithm annealing: is unknown, must be one of exhaustive, greedy"
    ):
        parsed("mcmc,annealing")
    with pytest.raises(UsageError, match="are mcmc, mcmc, must be at most 4 different ones"):
        parsed("mcmc,mcmc")
    for text in ("", "optcnn,", " , mcmc"):
        with pytest.raises(UsageError, match=f"algorithms: are '{text}', must be names"):
            parsed(text)
    for text in ("mcmc,unity", "unity, greedy"):
        with pytest.raises(UsageError, match="algorithm unity: is joined with others, must be alone"):
            parsed(text)


@pytest.mark.parametrize("name", INSTALLED)
def test_a_missing_cost_is_named(name: str) -> None:
    class Nothing(MadeUpCosts):
        def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
            return [None for _ in super().resolve(calls, kind_name)]

    one = replace(problem(), graph=two_layers(), costs=CostTable(Nothing()))
    with pytest.raises(CostError, match=r"aten\.\w+\.\w+ .* not measured on made-up"):
        run((name,), one, AlgorithmContext(OPTIONS))
