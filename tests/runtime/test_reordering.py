"""Proven rules on imported graphs: every offered one, executed, forward and backward, before and after."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.substitutions.reordering import directions
from graph.substitutions.rewriting import compatible, every_substitution, matches, rewritten
from graph.substitutions.terms import Term
from graph.zoo import build, zoo_names
from profiler.operators import ExecutionContext
from runtime.jobs.models import tensors_of
from runtime.jobs.verified_program import in_double, in_double_on
from runtime.jobs.verify import interpret
from scripts.substitutions.offering import Direction
from search.space.baselines import data_parallel
from search.space.carried import carried
from tests.quick import seeds
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


SIZES = {"conv-scale-3c8d2592": {"b": 32, "t": 3}}
"""Extents unlike the first ones of a rule, for which another rule makes its source cheaper still."""


def sizes(rule: Direction) -> dict[str, int]:
    """Return extents for which the rule makes its source cheaper, and no other rule as cheap."""
    return rule.cheaper[0][0] | SIZES.get(rule.name, {})


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
    tolerance = 0.0 if exact else 1e-9
    assert actual.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    for ours, theirs in ((actual.gradients, expected.gradients), (actual.buffers, expected.buffers)):
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=tolerance, atol=tolerance)


PARTS = 6


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))]
)
def test_every_offered_rule_gives_the_loss_and_gradients_of_the_operators_in_whose_place_it_stands(
    part: int,
) -> None:
    every = offered()
    rules = {name: every[name] for name in list(every)[part::PARTS]}
    built: Built = (Terms(rules, whole=True), (torch.zeros(2),), {})
    graph = import_module(*built, name="terms")
    applied = [match for match in matches(graph) if match.rule in every]
    # Each source is rewritten by its own rule: none is offered that another one always comes before.
    assert sorted(match.rule for match in applied) == sorted(rules)
    other = rewritten(graph, applied)
    assert len(other.operators) <= len(graph.operators)
    agree(built, graph, other, exact=True)
    agree((Terms(rules, whole=False), *built[1:]), graph, other, exact=False)


class Branches(nn.Module):
    """Activations that are joined, two products of one input, transposes that cancel; dropout behind all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 5, 3)
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)

    def forward(self, image: Tensor, vectors: Tensor) -> Tensor:
        """Return a loss of images [N, 3, 5, 5] and vectors [N, L, 6]."""
        left, right = nn.functional.gelu(self.left(image)), nn.functional.gelu(self.right(image))
        images = nn.functional.dropout(torch.cat([left, right, left * 0], 1), 0.5)
        both = self.first(vectors) + self.second(vectors)
        turned = both.transpose(1, 2).relu().transpose(1, 2)
        return images.square().mean() + nn.functional.dropout(turned, 0.5).square().mean()


class Joined(Branches):
    """As `Branches`, where nobody else reads what is joined."""

    def forward(self, image: Tensor, vectors: Tensor) -> Tensor:
        """Return a loss of images [N, 3, 5, 5] and vectors [N, L, 6]."""
        both = self.left(image)
        left, right = nn.functional.gelu(both), nn.functional.gelu(self.right(image))
        third = nn.functional.gelu(both * 2)
        images = nn.functional.dropout(torch.cat([left, right, third], 1), 0.5)
        both = self.first(vectors) + self.second(vectors)
        turned = both.transpose(1, 2).relu().transpose(1, 2)
        return images.square().mean() + nn.functional.dropout(turned, 0.5).square().mean()


def branches(module: nn.Module) -> Built:
    torch.manual_seed(5)
    return module, (torch.randn(2, 3, 5, 5), torch.randn(2, 4, 6)), {}


def reorderings(graph: OperatorGraph) -> dict[str, tuple[str, ...]]:
    """Return the operators of each match of a graph, by the sources of the rules."""
    return {
        " ; ".join(map(str, directions()[match.rule].source)): match.operators
        for match in matches(graph)
        if match.rule in directions()
    }


def test_values_that_others_read_stay_and_what_is_behind_draws_as_before() -> None:
    kept = import_module(*branches(Branches()), name="branches")
    built = branches(Joined())
    graph = import_module(*built, name="joined")
    alike = {
        "add(matmul(x1, x2), matmul(x1, x3))": ("linear", "linear_1", "add"),
        "transpose(relu(transpose(x1)))": ("transpose", "relu", "transpose_1"),
    }
    assert reorderings(kept) == alike
    assert reorderings(graph) == {
        "concat[1](relu(x1), relu(x2))": ("gelu", "gelu_1", "gelu_2", "cat"),
        **alike,
    }
    # The two linear layers can be merged or summed, not both.
    found = matches(graph)
    assert not compatible(graph, found)
    chosen = [match for match in found if match.rule in directions()]
    assert compatible(graph, chosen)
    other = rewritten(graph, chosen)
    assert [
        operator.target for operator in other.operators if operator.name not in graph.operator_by_name
    ] == [
        "aten.cat.default",
        "aten.gelu.default",
        "aten.add.Tensor",
        "aten.linear.default",
        "aten.relu.default",
    ]
    drawing = [name for name in graph.operator_by_name if name.startswith("dropout")]
    assert len(drawing) == 2
    for name in drawing:
        assert other.draw_numbers[name] == graph.draw_numbers[name]
    agree(built, graph, other, exact=False)


class Drawn(nn.Module):
    """Operators of a seed, of two or three kinds, on 4 x 4 matrices; results that none reads are squared and added up.

    Most read what none has read yet, so that groups of operators are closed, as rules need them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def _made(self, kind: str, one: Tensor, other: Tensor) -> Tensor:
        bias, narrow = self.linear.bias, one.shape[-1] < 4
        made: dict[str, Callable[[], Tensor]] = {
            "linear": lambda: nn.functional.linear(one, self.linear.weight, bias),
            "matmul": lambda: one @ self.weight,
            "times": lambda: one @ other,
            "bias": lambda: one + bias,
            "relu": lambda: torch.relu(one),
            "transpose": lambda: one.t(),
            "add": lambda: one + other,
            "multiply": lambda: one * other,
            "scale": lambda: one * 0.5,
            "join": lambda: torch.cat([one, other], 1),
            "part": lambda: one if narrow else one.split(2, 1)[0],
            "fold": lambda: one.view(2, 2, -1),
            "flat": lambda: one.reshape(4, -1),
        }
        return made[kind]()

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss of a matrix [4, 4]."""
        draw = random.Random(self.seed)
        kinds = draw.sample(KINDS, draw.choice([2, 3]))
        made = [self.linear(x), x @ self.weight, x]
        unread = [0, 1, 2]
        for _ in range(8):
            kind = draw.choice(kinds)
            places = [
                draw.choice(unread if unread and draw.random() < 0.8 else range(len(made))) for _ in range(2)
            ]
            one, other = (made[place] for place in places)
            fits = one.shape == (4, 4) == other.shape or (
                kind in ("flat", "relu", "scale") and one.dim() == 3
            )
            if not fits and not (one.shape == other.shape and kind in ("add", "multiply")):
                continue
            used = places if kind in ("times", "add", "multiply", "join") else places[:1]
            unread = [place for place in unread if place not in used] + [len(made)]
            made.append(self._made(kind, one, other))
        return torch.stack([made[place].square().mean() for place in unread]).sum()


KINDS = (
    "linear", "matmul", "times", "bias", "relu", "transpose", "add", "multiply", "scale", "join", "part", "fold", "flat"
)  # fmt: skip


@pytest.mark.parametrize("seed", seeds(10, 300))
def test_any_match_of_a_drawn_network_can_be_applied_and_computes_the_same(seed: int) -> None:
    """Each by itself, and all that go together."""
    torch.manual_seed(seed)
    built: Built = (Drawn(seed), (torch.randn(4, 4),), {})
    graph = import_module(*built, name=f"drawn{seed}")
    for match in matches(graph):
        agree(built, graph, rewritten(graph, [match]), exact=False)
    agree(built, graph, rewritten(graph, every_substitution(graph)), exact=False)


class Turned(nn.Module):
    """A sum of what is transposed once and of what is transposed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss of a matrix [4, 4]."""
        once = torch.relu(self.linear(x)).t()
        return (once + once.t()).square().mean()


def test_a_match_reads_nothing_that_it_makes_itself() -> None:
    """Here the sum of two transposed matrices would be that of `relu` and of `t`, which would be gone with it."""
    torch.manual_seed(5)
    built: Built = (Turned(), (torch.randn(4, 4),), {})
    graph = import_module(*built, name="turned")
    assert [operator.name for operator in graph.operators][2:5] == ["t", "t_1", "add"]
    for match in matches(graph):
        assert "add" not in match.operators
        agree(built, graph, rewritten(graph, [match]), exact=False)


class Viewed(nn.Module):
    """A matrix product and a scaling of rows, which a view makes two dims of; either operator may be the first."""

    def __init__(self, *, product_first: bool) -> None:
        super().__init__()
        self.product_first = product_first
        self.weight = nn.Parameter(torch.randn(3, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """Return a loss of rows [20, 3]."""
        if self.product_first:
            result = (rows @ self.weight).view(4, 5, 2) * 0.5
        else:
            result = (rows * 0.5).view(4, 5, 3) @ self.weight
        return result.square().mean()


@pytest.mark.parametrize(
    ("product_first", "source"),
    [
        (False, "matmul(unflatten(scale[s](x1)), x2)"),
        (True, "scale[s](unflatten(matmul(x1, x2)))"),
    ],
)
def test_where_rows_are_viewed_as_two_dims_the_smaller_weight_is_scaled(
    product_first: bool,  # noqa: FBT001
    source: str,
) -> None:
    torch.manual_seed(5)
    built: Built = (Viewed(product_first=product_first), (torch.randn(20, 3),), {})
    graph = import_module(*built, name="viewed")
    assert source in reorderings(graph)
    other = rewritten(graph, matches(graph))
    (scaled,) = (operator for operator in other.operators if operator.target == "aten.mul.Tensor")
    assert [spec.shape for spec in other.output_specs(scaled)] == [(3, 2)]
    agree(built, graph, other, exact=False)


def test_a_strategy_of_a_graph_is_carried_over_to_a_rewritten_one() -> None:
    graph = import_module(*branches(Joined()), name="joined")
    other = rewritten(graph, [match for match in matches(graph) if match.rule in directions()])
    result = carried(data_parallel(graph, 2), graph, other)
    result.validate(other, 2)
    degrees = dict(zip(other.operator_by_name, (one.degrees for one in result.configurations), strict=True))
    assert degrees["gelu+gelu_1+gelu_2+cat"][0] == degrees["gelu+gelu_1+gelu_2+cat.cat"][0] == 2


@pytest.mark.slow
def test_of_the_zoo_inception_alone_has_matches_and_they_hold() -> None:
    for name in zoo_names():
        torch.manual_seed(7)
        built = build(name, "small", None)
        graph = import_module(*built, name=name)
        found = reorderings(graph)
        assert set(found) == ({"concat[1](relu(x1), relu(x2))"} if name == "inception" else set()), name
        if name == "inception":
            agree(built, graph, rewritten(graph, every_substitution(graph)), exact=False)
