"""What a rule is that rewrites the graphs of networks; each kind of them has a file beside this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graph.importing.building import DraftOperator, GraphBuilder
from graph.operators import Operator, OperatorGraph


@dataclass(frozen=True, slots=True)
class RewritingRule:
    """A rule: `matches` returns the groups of operators that it can be applied to, each as large as can be.

    They do not overlap; those of two rules may.

    `rewrite` returns the operators in place of a group's of a graph, and adds to the builder the values that they make
    beside those that were there. Of a `divisible` rule a part of a group, of two operators or more, is a match too.
    `wanted`: what a match is, in words. `sides`: the proven rule that it rests on, for two operators
    (`graph.substitutions.rules`); the identity, where it has no terms there; or one side twice where the operators are
    executed as before.
    """

    wanted: str
    sides: tuple[str, str]
    matches: Callable[[OperatorGraph], list[tuple[Operator, ...]]]
    rewrite: Callable[[GraphBuilder, OperatorGraph, Sequence[Operator]], Sequence[DraftOperator]]
    divisible: bool = False
