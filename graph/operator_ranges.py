"""Ranges of operators that a strategy treats together: runs that follow each other in the graph's order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph.errors import StrategyError
from graph.operators import OperatorGraph


@dataclass(frozen=True, slots=True, order=True)
class OperatorRange:
    """A range: operators `first` to `last` of the graph, both included."""

    first: int
    last: int


OperatorRanges = tuple[OperatorRange, ...]
"""Ranges that do not overlap, in the graph's order."""


def check_ranges(graph: OperatorGraph, ranges: OperatorRanges, what: str) -> None:
    """Check that ranges are of the graph's operators and do not overlap; `what` is their key in a strategy's document.

    Raises:
        StrategyError: naming the range and what does not fit.
    """
    count = len(graph.operators)
    for group in ranges:
        if not 0 <= group.first <= group.last < count:
            raise StrategyError(
                f"{what}: a group goes from operator {group.first} to {group.last}, must go from an operator to "
                f"the same or a later one, below {count}; correct the strategy"
            )
    for before, after in itertools.pairwise(ranges):
        if after.first <= before.last:
            raise StrategyError(
                f"{what}: the group of {graph.operators[after.first].name} begins before that of "
                f"{graph.operators[before.first].name} has ended, must begin after it; correct the strategy"
            )


def group_numbers(graph: OperatorGraph, ranges: OperatorRanges) -> list[int]:
    """Return, for each operator, the number of its range, or -1."""
    numbers = [-1] * len(graph.operators)
    for number, group in enumerate(ranges):
        for index in range(group.first, group.last + 1):
            numbers[index] = number
    return numbers


def ranges_to_json(names: Sequence[str], ranges: OperatorRanges) -> list[list[str]]:
    """Return ranges as a document: the first and the last operator of each. `names` are those of all operators."""
    return [[names[group.first], names[group.last]] for group in ranges]


def ranges_from_json(document: object, places: Mapping[str, int], what: str) -> OperatorRanges:
    """Return the ranges of a document (`ranges_to_json`); `places` are operators' positions by name.

    Raises:
        StrategyError: it is no list of pairs, or names an operator that is not there.
    """
    if not isinstance(document, list):
        raise StrategyError(
            f"strategy file: {what} is no list, must list pairs of a first and a last operator; correct it"
        )
    return tuple(_range(entry, places, what) for entry in document)


def _range(entry: Any, places: Mapping[str, int], what: str) -> OperatorRange:
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(name, str) for name in entry):
        raise StrategyError(
            f"strategy file: {what} has the entry {str(entry)[:80]}, must have pairs of a first and a last "
            "operator; correct it"
        )
    for name in entry:
        if name not in places:
            raise StrategyError(
                f"strategy file: operator {name} of {what} is unknown, must be one of the network's; see "
                "`app models show`"
            )
    return OperatorRange(places[entry[0]], places[entry[1]])
