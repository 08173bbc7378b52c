"""Recomputation: groups of operators whose activations are dropped in the forward and made again in the backward.

A group is a run of operators that follow each other in the graph's order, so that what leaves it never comes back: in
the backward it is made again as a whole, just before the backward of its last operator. What is made again are the
tasks that have a backward. What enters the group is kept: what they read that is made outside, or by tasks without a
backward, and what other devices have sent.

Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost (arXiv:1604.06174); PyTorch's
torch.utils.checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph.errors import StrategyError
from graph.operators import OperatorGraph


@dataclass(frozen=True, slots=True, order=True)
class Recomputed:
    """A group: operators `first` to `last` of the graph, both included."""

    first: int
    last: int


Recomputation = tuple[Recomputed, ...]
"""Groups that do not overlap, in the graph's order."""


def check_recomputation(graph: OperatorGraph, groups: Recomputation) -> None:
    """Check groups against the graph's operators.

    Raises:
        StrategyError: naming the group and what does not fit.
    """
    count = len(graph.operators)
    for group in groups:
        if not 0 <= group.first <= group.last < count:
            raise StrategyError(
                f"recomputation: a group goes from operator {group.first} to {group.last}, must go from an operator to "
                f"the same or a later one, below {count}; correct the strategy"
            )
    for before, after in itertools.pairwise(groups):
        if after.first <= before.last:
            raise StrategyError(
                f"recomputation: the group of {graph.operators[after.first].name} begins before that of "
                f"{graph.operators[before.first].name} has ended, must begin after it; correct the strategy"
            )


def group_numbers(graph: OperatorGraph, groups: Recomputation) -> list[int]:
    """Return, for each operator, the number of its group, or -1."""
    numbers = [-1] * len(graph.operators)
    for number, group in enumerate(groups):
        for index in range(group.first, group.last + 1):
            numbers[index] = number
    return numbers


def needed_at(groups: Recomputation, index: int) -> int:
    """Return the operator before whose backward an operator's inputs are needed: the last of its group, or itself."""
    return next((group.last for group in groups if group.first <= index <= group.last), index)


def recomputation_to_json(names: Sequence[str], groups: Recomputation) -> list[list[str]]:
    """Return groups as a document: the first and the last operator of each. `names` are those of all operators."""
    return [[names[group.first], names[group.last]] for group in groups]


def recomputation_from_json(document: object, places: Mapping[str, int]) -> Recomputation:
    """Return the groups of a document (`recomputation_to_json`); `places` are operators' positions by name.

    Raises:
        StrategyError: it is no list of pairs, or names an operator that is not there.
    """
    if not isinstance(document, list):
        raise StrategyError(
            "strategy file: recomputation is no list, must list pairs of a first and a last operator; correct it"
        )
    return tuple(_group(entry, places) for entry in document)


def _group(entry: Any, places: Mapping[str, int]) -> Recomputed:
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(name, str) for name in entry):
        raise StrategyError(
            f"strategy file: recomputation has the entry {str(entry)[:80]}, must have pairs of a first and a last "
            "operator; correct it"
        )
    for name in entry:
        if name not in places:
            raise StrategyError(
                f"strategy file: operator {name} of recomputation is unknown, must be one of the network's; see "
                "`app models show`"
            )
    return Recomputed(places[entry[0]], places[entry[1]])
