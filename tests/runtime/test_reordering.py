"""Proven rules on imported graphs: every offered one, executed, forward and backward, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from graph.errors import StrategyError
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.substitutions.reordering import directions
from graph.substitutions.rewriting import compatible, every_substitution, matches, rewritten
from graph.substitutions.rules import load_rules
from graph.substitutions.substitution import Substitution
from graph.substitutions.terms import Term
from graph.zoo import build
from profiler.operators import ExecutionContext
from runtime.jobs.models import tensors_of
from runtime.jobs.verified_program import in_double, in_double_on
from runtime.jobs.verify import interpret
from scripts.substitutions.offering import Direction
from tests.reference.substitutions import Parts, execute

Built = tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]


class Terms(nn.Module):
    """The sources of rules, each computed from variables of its own; all results are squared and added up."""

    def __init__(self, rules: Mapping[str, Direction], *, whole: bool) -> None:
        super().__init__()
        self.rules = rules
        generator = torch.Generator().manual_seed(3)
        for number, rule in enumerate(rules.values()):
            for name, type_ in rule.types.items():
                shape = type_.shape(sizes(rule))
                drawn = torch.randint(-3, 4, shape, generator=generator).float()
                value = drawn if whole else torch.randn(shape, generator=generator)
                self.register_parameter(f"{name}_{number}", nn.Parameter(value))

    def forward(self, factor: Tensor) -> Tensor:
        """Return the sum of the squares of all results."""
        squares = [factor.sum()]
        for number, rule in enumerate(self.rules.values()):
            values = {name: Parts((), {(): getattr(self, f"{name}_{number}")}) for name in rule.types}
            memo: dict[Term, Parts] = {}
            for term in rule.source:
                result = execute(term, values, rule.types, sizes(rule), memo).of[()]
                squares.append(result.square().sum())
        return torch.stack(squares).sum()


def sizes(rule: Direction) -> dict[str, int]:
    """Return extents for which the rule makes its source cheaper."""
    return rule.cheaper[0][0]


def offered() -> dict[str, Direction]:
    """Return the directions that are offered, by name."""
    return {
        name: Direction(name, "", one.source, one.target, one.rule.types)
        for name, one in directions().items()
    }


def agree(built: Built, graph: OperatorGraph, other: OperatorGraph, *, exact: bool) -> None:
    """Assert that two graphs of a module have equal losses, gradients and buffers."""
    context = ExecutionContext(seed=3)
    tensors = tensors_of(graph, built).map(in_double_on(context.device))
    expected, actual = (interpret(in_double(of), tensors, context) for of in (graph, other))
    tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-9, "atol": 1e-9}
    assert actual.loss == pytest.approx(expected.loss, rel=0.0 if exact else 1e-9)
    for ours, theirs in ((actual.gradients, expected.gradients), (actual.buffers, expected.buffers)):
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, **tolerances)


@pytest.mark.parametrize("whole", [True, False])
def test_every_offered_rule_gives_the_loss_and_gradients_of_the_operators_in_whose_place_it_stands(
    *, whole: bool
) -> None:
    rules = offered()
    torch.manual_seed(0)
    built: Built = (Terms(rules, whole=whole), (torch.zeros(2),), {})
    graph = import_module(*built, name="terms")
    found = every_substitution(graph)
    other = rewritten(graph, found)
    assert other.substitutions == tuple(sorted(found))
    agree(built, graph, other, exact=whole)
