"""Carry factors of dims through the graph, so that a split of heads or of the sequence reaches every operator.

A cut of a dim is a stride at which it becomes a product: a cut at s makes a dim of n elements (n / s, s). A view that
joins batch and sequence cuts the dim that it makes; the cut flows through all operators that follow that dim point by
point, to weights too. The cuts of one dim form a divisor chain; of two that do not, the first in program order stays.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from graph.axes import IterationSpace, refinable, refine
from graph.importing.building import DraftOperator, GraphBuilder
from graph.importing.labels import labelled
from graph.rules.registry import rule_for


@dataclass(slots=True)
class _Node:
    """An operator, its space, and the cuts of its axes so far."""

    operator: DraftOperator
    space: IterationSpace
    pure: frozenset[int]
    cuts: dict[int, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Propagation:
    """Cuts of all dims, and the conflicts met, by operator name."""

    cuts: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)


def refined_spaces(builder: GraphBuilder) -> tuple[list[IterationSpace], dict[str, str]]:
    """Return the refined space of every operator, and why some could not be refined, by operator name."""
    nodes = [_node(builder, operator) for operator in builder.operators]
    users: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in dict.fromkeys((*node.operator.inputs, *node.operator.outputs)):
            users.setdefault(name, []).append(index)
    state = Propagation()
    queue = deque(range(len(nodes)))
    is_queued = [True] * len(nodes)
    while queue:
        index = queue.popleft()
        is_queued[index] = False
        for name in _exchange_cuts(nodes[index], builder, state):
            for user in users[name]:
                if not is_queued[user]:
                    is_queued[user] = True
                    queue.append(user)
    spaces = [_refined(node) for node in nodes]
    return labelled(builder, spaces), state.conflicts


def _node(builder: GraphBuilder, operator: DraftOperator) -> _Node:
    rule = rule_for(operator.target)
    space = rule.space(builder.signature(operator))
    pure = frozenset(axis for axis in refinable(space) if space.axes[axis].name not in rule.rigid)
    return _Node(operator, space, pure)


def _chained(cuts: list[int], cut: int, size: int) -> bool:
    """True where `cut` joins the divisor chain `cuts` of a dim of `size`."""
    return size % cut == 0 and all(max(cut, other) % min(cut, other) == 0 for other in cuts)


def _exchange_cuts(node: _Node, builder: GraphBuilder, state: Propagation) -> list[str]:
    """Carry cuts between an operator's operands and its axes; return the values that got new ones."""
    operands = [
        (name, dim, factors)
        for names, maps in (
            (node.operator.inputs, node.space.inputs),
            (node.operator.outputs, node.space.outputs),
        )
        for name, operand in zip(names, maps, strict=True)
        for dim, factors in enumerate(operand)
    ]
    changed: list[str] = []

    def cut_dim(name: str, dim: int, cut: int) -> bool:
        size = builder.values[name].spec.shape[dim]
        dim_cuts = state.cuts.setdefault((name, dim), [])
        if cut in dim_cuts or not 1 < cut < size:
            return False
        if not _chained(dim_cuts, cut, size):
            state.conflicts.setdefault(
                node.operator.name,
                f"dim {dim} of {name} is already a product with strides {sorted(dim_cuts)}, a further one of {cut} "
                "does not fit",
            )
            return False
        dim_cuts.append(cut)
        changed.append(name)
        return True

    for name, dim, factors in operands:
        stride = 1
        for factor in reversed(factors[1:]):
            stride *= factor.size
            cut_dim(name, dim, stride)
    again = True
    while again:
        again = False
        for name, dim, factors in operands:
            stride = 1
            for factor in reversed(factors):
                if factor.axis in node.pure:
                    axis_cuts = node.cuts.setdefault(factor.axis, [])
                    for cut in list(state.cuts.get((name, dim), ())):
                        inner = cut // stride
                        if not stride < cut < stride * factor.size or inner in axis_cuts:
                            continue
                        if cut % stride or not _chained(axis_cuts, inner, factor.size):
                            state.conflicts.setdefault(
                                node.operator.name,
                                f"dim {dim} of {name} is a product with a stride of {cut}, which does not fit here",
                            )
                            continue
                        axis_cuts.append(inner)
                        again = True
                    for inner in axis_cuts:
                        again |= cut_dim(name, dim, inner * stride)
                stride *= factor.size
    return changed


def _refined(node: _Node) -> IterationSpace:
    factors = {}
    for axis, cuts in node.cuts.items():
        bounds = [node.space.axes[axis].size, *sorted(cuts, reverse=True), 1]
        factors[axis] = [larger // smaller for larger, smaller in itertools.pairwise(bounds)]
    return refine(node.space, factors)
