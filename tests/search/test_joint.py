"""Substitutions and configurations searched together, against brute force over all sets and configurations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

from app.services.search.substitution_moves import moves_of, substitutions_of
from app.services.search.substitution_searches import algorithm_result
from graph.calls import LocalCall
from graph.errors import StrategyError, UsageError
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.substitutions.rewriting import rewritten
from graph.training import Training
from search.algorithms.backtracking import backtrack
from search.algorithms.chain import SearchOptions
from search.algorithms.joint import JointResult, JointStart, RewritingCosts, search_jointly, walk_jointly
from search.algorithms.mcmc import search as walk_alone
from search.algorithms.moves import shares_for
from search.algorithms.rewritings import Rewriting, Rewritings
from search.cost.calls_to_profile import rule_calls
from search.cost.cost_table import CostTable, OperatorCost
from search.cost.link_costs import LinkCosts
from search.orders import Order
from search.outcome import Outcome
from search.problem import Problem
from search.space.baselines import data_parallel, single_device, usual_baselines
from tests.quick import few, seeds
from tests.search.builders import MadeUpCosts, devices
from tests.search.merging import Twice
from tests.search.small import MOST_OPERATORS, brute_force


class Pair(torch.nn.Module):
    """Two products that may be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = (self.left(x) * self.right(x)).mean()
        return mean


NETWORKS = {"Pair": Pair, "Twice": Twice}


class Drawn(torch.nn.Module):
    """Up to five operators of a seed, the last of which is the mean.

    Two products, of one weight or two, of one input or two, their sum or product, and maybe one more; or a product,
    two activations or transposes of it, of which the second reads the first or not, and their sum or product.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.left = torch.nn.Linear(4, 4, bias=bool(rng.random() < 0.5))
        self.right = self.left if rng.random() < 0.3 else torch.nn.Linear(4, 4, bias=bool(rng.random() < 0.5))
        self.products, self.other = rng.random(2) < 0.5
        unary, binary = ("t", "relu"), ("add", "mul")
        self.joined = getattr(torch, str(rng.choice(binary)))
        self.of_one, self.last = (getattr(torch, str(name)) for name in rng.choice(unary, 2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.products:
            joined = self.joined(self.left(x), self.right(y if self.other else x))
            joined = self.last(joined) if self.other else joined
        else:
            made = self.left(x)
            first = self.of_one(made)
            joined = self.joined(first, self.of_one(first if self.other else made))
        mean: torch.Tensor = joined.mean()
        return mean


# Of the first 60 seeds those whose networks some rule applies to, and one of each set of rules.
DRAWN = (0, 1, 3, 4, 8, 17, 18, 21, 32, 37, 40, 41, 43, 46, 52, 58)
DRAWN_OF_EACH_KIND = (1, 3, 4, 17, 18, 43)


class MergingCosts(MadeUpCosts):
    """Costs of which it is drawn whether to start a call is dear or cheap, and how well a merged operator computes."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(float(10 ** rng.uniform(-8, -6)), float(10 ** rng.uniform(-8, -5)))
        self.merged = float(rng.uniform(1, 4))

    def _cost(self, call: LocalCall, kind_name: str) -> OperatorCost:
        cost = super()._cost(call, kind_name)
        factor = self.merged if "merged" in call.target else 1.0
        return replace(cost, forward_s=factor * cost.forward_s, backward_s=factor * cost.backward_s)


@cache
def imported(name: str) -> OperatorGraph:
    return import_module(NETWORKS[name](), (torch.randn(4, 4),), {}, name=name)


def problem(of: type[torch.nn.Module], seed: int) -> Problem:
    """Return the problem of a network on two devices, with costs of a seed."""
    return problem_of_graph(imported(of.__name__), seed)


def problem_of_graph(graph: OperatorGraph, seed: int) -> Problem:
    costs = CostTable(MergingCosts(np.random.default_rng(seed)))
    return Problem(graph, devices(2), costs, Training(4), LinkCosts(), rule_calls())


def rewritings(one: Problem, most_kept: int = 32, excluded: Sequence[Rewriting] = ()) -> Rewritings:
    moves = moves_of(one.graph)

    def problem_of(rewriting: Rewriting) -> Problem | None:
        if rewriting in excluded:
            return None
        try:
            return replace(one, graph=rewritten(one.graph, substitutions_of(moves, rewriting)))
        except StrategyError:
            return None  # moves of one operator

    return Rewritings(one, len(moves), problem_of, shares_for(one.device_count), most_kept)


def brute_force_over_both(of: Rewritings, order: Order) -> Outcome:
    best = []
    for size in range(of.count + 1):
        for rewriting in itertools.combinations(range(of.count), size):
            graph = of.graph(rewriting)
            if graph is not None:
                best.append(brute_force(graph.problem, order))
    return min(best)


def imported_start(of: Rewritings) -> JointStart:
    graph = of.imported.graph
    return JointStart("imported", (), data_parallel(graph, of.imported.problem.device_count))


def outcome_of(of: Rewritings, result: JointResult, order: Order = "program") -> float:
    """The result's step, simulated from nothing."""
    graph = of.graph(result.rewriting)
    assert graph is not None
    result.strategy.validate(graph.graph, of.imported.problem.device_count)
    return graph.outcome(result.strategy, order).seconds


def alone_s(of: Rewritings, rewriting: Rewriting) -> float:
    """Return the step of a rewriting on one device."""
    graph = of.graph(rewriting)
    assert graph is not None
    return graph.outcome(single_device(graph.graph), "program").seconds


@pytest.mark.parametrize("seed", range(20))
def test_the_rewriting_that_is_best_on_one_device_is_that_of_brute_force(seed: int) -> None:
    of = rewritings(problem(Twice, seed))

    sets = [each for size in range(of.count + 1) for each in itertools.combinations(range(of.count), size)]
    assert len(sets) > 2
    best = RewritingCosts(of, "program").best_alone
    assert alone_s(of, best) == min(alone_s(of, each) for each in sets)


@pytest.mark.parametrize("seed", seeds(4, 40))
@pytest.mark.parametrize("order", ["program", "fifo"])
def test_it_finds_what_brute_force_over_sets_and_configurations_finds(seed: int, order: Order) -> None:
    of = rewritings(problem(Pair, seed))
    result = search_jointly(of, (), SearchOptions(proposals=300, beta=30.0, order=order))
    assert result.step_time_s == brute_force_over_both(of, order).seconds
    assert result.step_time_s == outcome_of(of, result, order)


@pytest.mark.parametrize("seed", seeds(1, 8))
def test_it_finds_what_brute_force_finds_of_several_moves(seed: int) -> None:
    of = rewritings(problem(Twice, seed))
    assert of.count == 2
    result = search_jointly(of, (), SearchOptions(proposals=4000, beta=30.0))
    assert result.step_time_s == brute_force_over_both(of, "program").seconds


@pytest.mark.parametrize("seed", few(DRAWN_OF_EACH_KIND, DRAWN))
def test_it_finds_what_brute_force_finds_of_drawn_networks(seed: int) -> None:
    drawn = Drawn(seed)
    graph = import_module(drawn, (torch.randn(4, 4), torch.randn(4, 4)), {}, name=f"drawn{seed}")
    of = rewritings(problem_of_graph(graph, seed))
    assert of.count
    assert len(graph.operators) <= MOST_OPERATORS
    result = search_jointly(of, (), SearchOptions(proposals=300, beta=30.0))
    # Better is possible: a strategy that is carried over need not let operators follow others, as brute force does.
    assert result.step_time_s <= brute_force_over_both(of, "program").seconds
    assert result.step_time_s == outcome_of(of, result)


def test_the_walk_alone_comes_to_any_set_and_back() -> None:
    """From either graph it finds the same: what is best is with substitutions for some costs, without for others."""
    chosen = set()
    for seed in range(6):
        of = rewritings(problem(Pair, seed))
        merged = of.graph((0,))
        assert merged is not None
        starts = (imported_start(of), JointStart("merged", (0,), single_device(merged.graph)))
        options = SearchOptions(proposals=600, beta=30.0)
        results = [walk_jointly(of, start, options, share=0.2) for start in starts]
        assert (
            results[0].step_time_s == results[1].step_time_s == brute_force_over_both(of, "program").seconds
        )
        chosen |= {result.rewriting for result in results}
    assert chosen == {(), (0,)}


@pytest.mark.parametrize("seed", range(6))
def test_more_proposals_are_never_worse(seed: int) -> None:
    of = rewritings(problem(Twice, seed))
    steps = [
        walk_jointly(of, imported_start(of), SearchOptions(proposals=count, seed=seed)).step_time_s
        for count in (0, 1, 10, 40, 100, 300)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == of.imported.outcome(imported_start(of).strategy, "program").seconds


@pytest.mark.parametrize("proposals", [0, 60])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_no_worse_than_one_after_the_other_from_where_that_ends(seed: int, proposals: int) -> None:
    of = rewritings(problem(Twice, seed))

    first = backtrack(of.count, partial(alone_s, of), budget=9)[0].moves
    graph = of.graph(first)
    assert graph is not None
    in_turn = walk_alone(graph.problem, SearchOptions(proposals=60, seed=seed))
    start = JointStart("in turn", first, in_turn.strategy)
    options = SearchOptions(proposals=proposals, seed=seed)
    assert walk_jointly(of, start, options).step_time_s <= in_turn.step_time_s
    assert search_jointly(of, (start,), options).step_time_s <= in_turn.step_time_s


@pytest.mark.parametrize("rewriting", [(), (0,), (1,), (0, 1)])
def test_a_known_strategy_of_any_rewriting_is_found_again_where_time_is_up(rewriting: Rewriting) -> None:
    of = rewritings(problem(Twice, 1))
    graph = of.graph(rewriting)
    assert graph is not None
    known = walk_alone(graph.problem, SearchOptions(proposals=400, beta=30.0))
    start = JointStart("known", rewriting, known.strategy)
    late = search_jointly(of, (start,), SearchOptions(proposals=0, time_limit_s=0.0))
    assert {(), rewriting} <= {one.moves for one in late.evaluated}
    assert late.step_time_s <= known.step_time_s
    assert {one.moves: one.cost_s for one in late.evaluated}[rewriting] <= known.step_time_s


@pytest.mark.parametrize("seed", range(4))
def test_more_proposals_of_the_whole_search_are_never_worse(seed: int) -> None:
    of = rewritings(problem(Twice, seed))
    steps = [
        search_jointly(of, (), SearchOptions(proposals=count, seed=seed)).step_time_s
        for count in (0, 5, 40, 200)
    ]
    assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize("seed", range(6))
def test_a_result_is_stored_with_a_chain_of_its_own_graph(seed: int) -> None:
    of = rewritings(problem(Twice, seed))
    joint = walk_jointly(of, imported_start(of), SearchOptions(proposals=100, beta=30.0), share=0.5)
    (chain,) = algorithm_result(joint).chains
    assert chain.strategy == joint.strategy


@pytest.mark.parametrize("order", ["program", "fifo"])
def test_it_is_deterministic_and_does_not_depend_on_the_graphs_that_are_kept(order: Order) -> None:
    """With one graph kept they are made again all the time, and simulated in full; else derived by what differs."""
    options = SearchOptions(proposals=300, beta=30.0, seed=3, order=order)
    results = []
    for most_kept in (32, 32, 1):
        of = rewritings(problem(Twice, 2), most_kept)
        result = walk_jointly(of, imported_start(of), options, share=0.3)
        results.append((result.rewriting, result.strategy.digest, result.step_time_s, result.accepted))
        assert result.proposals == 300
    assert results[0] == results[1] == results[2]


class Interrupting:
    """An observer that interrupts when it is told of progress for the second time."""

    def __init__(self) -> None:
        self.told = 0

    def on_start(self, *_: object) -> None:
        raise AssertionError("the starts of a joint walk are not told")

    def on_proposals(self, *_: object) -> None:
        raise AssertionError("its proposals are not told")

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        assert 0 <= accepted <= proposals
        assert best_s > 0
        self.told += 1
        if self.told == 2:
            raise KeyboardInterrupt


def test_an_interrupt_keeps_the_best_so_far_and_a_time_limit_what_it_began_with() -> None:
    of = rewritings(problem(Twice, 1))
    known = imported_start(of)
    known_s = of.imported.outcome(known.strategy, "program").seconds
    result = search_jointly(of, (known,), SearchOptions(proposals=10_000), observer=Interrupting())
    assert result.interrupted
    assert 0 < result.proposals < 10_000
    assert outcome_of(of, result) == result.step_time_s <= known_s
    late = search_jointly(of, (known,), SearchOptions(proposals=10_000, time_limit_s=0.0))
    assert (late.interrupted, late.proposals, len(late.evaluated)) == (False, 0, 1)
    assert late.step_time_s <= known_s


class Classifier(torch.nn.Module):
    """A layer of many classes, and their cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.classes = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4096)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.classes(torch.relu(self.first(x))), targets)


def test_a_set_costs_no_more_than_the_experts_strategy_for_its_graph() -> None:
    """Of a loss that a substitution lets split by classes that is better than data parallelism, before any walk."""
    inputs = (torch.randn(4, 4), torch.randint(4096, (4,)))
    imported = import_module(Classifier(), inputs, {}, name="classifier")
    of = rewritings(problem_of_graph(imported, 0))
    assert of.count == 1
    split = of.graph((0,))
    assert split is not None
    data_parallel_s, expert_s, single_s = (
        split.outcome(one.strategy, "program").seconds for one in usual_baselines(split.graph, 2)
    )
    assert expert_s < data_parallel_s < single_s
    # Without time for OptCNN's program.
    assert RewritingCosts(of, "program", deadline=0.0).seconds((0,)) == expert_s


def test_moves_that_exclude_each_other_are_never_together() -> None:
    of = rewritings(problem(Twice, 0), excluded=[(0, 1)])
    result = search_jointly(of, (), SearchOptions(proposals=400, beta=30.0), share=0.5)
    assert result.proposals == 400
    assert result.rewriting != (0, 1)
    assert {one.moves: one.cost_s for one in result.evaluated}[0, 1] == float("inf")
    strategy = imported_start(of).strategy
    both = JointStart("both", (0, 1), strategy)
    with pytest.raises(StrategyError, match=r"moves \(0, 1\) of a start exclude each other"):
        walk_jointly(of, both, SearchOptions())
    with pytest.raises(StrategyError, match=r"moves \(0, 1\) of a start exclude each other"):
        search_jointly(of, (both,), SearchOptions())


def test_a_share_that_is_none_is_refused() -> None:
    of = rewritings(problem(Pair, 0))
    with pytest.raises(UsageError, match=r"share of moves that rewrite is 1\.5"):
        walk_jointly(of, imported_start(of), SearchOptions(), share=1.5)
