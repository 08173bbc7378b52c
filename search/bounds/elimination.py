"""The least sum of functions of few variables each, by eliminating one variable after the other.

Eliminating a variable adds up the functions that it is in, and replaces them by their least value over it. A variable
in two functions of two variables is OptCNN's node elimination, two functions of the same variables are its edge
elimination; a variable in more makes a function of more variables, so that what those two leave over (the core) is
enumerated, with every intermediate result kept. Exact for any functions; only their sizes are bounded.

The least sums after the least one come from the same eliminations, run again without what was found (`smallest`).

Sources: OptCNN (arXiv:1802.04924) section 5; Bertele and Brioschi, "Nonserial dynamic programming" (1972); Lawler, "A
procedure for computing the k best solutions" (Management Science 18, 1972).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Entries of the largest function that is made (8 bytes each).
LARGEST_TABLE = 1 << 23


@dataclass(frozen=True, slots=True, eq=False)
class CostFunction:
    """A function of some variables (ascending): `table` has one dim a variable, in that order."""

    scope: tuple[int, ...]
    table: Array


class TooWide(Exception):
    """Eliminating any variable that is left takes a table beyond the limit.

    Attributes:
        left: how many variables are left. entries: of the smallest such table.
    """

    def __init__(self, left: int, entries: int) -> None:
        super().__init__(f"{left} variables are left, the next table has {entries} entries")
        self.left = left
        self.entries = entries


@dataclass(frozen=True, slots=True)
class Minimum:
    """The least sum, and a value of every variable that has it. `widest`: most variables of a function made."""

    value: int
    chosen: tuple[int, ...]
    widest: int


def minimize(sizes: Sequence[int], factors: Sequence[CostFunction], limit: int = LARGEST_TABLE) -> Minimum:
    """Return the least sum of `factors` (integers) over all values of the variables; of equals, always the same.

    Args:
        sizes: for each variable, how many values it has.
        factors: the functions; a scope is ascending.
        limit: entries of the largest table.

    Raises:
        TooWide: a table would have more entries.
    """
    # A variable of one value is no dim of a table, which has 64 at most.
    live = {key: _without_single(factor, sizes) for key, factor in enumerate(factors)}
    left = {variable for variable, size in enumerate(sizes) if size > 1}
    eliminated: list[tuple[int, tuple[int, ...], Array]] = []
    widest = 0
    while left:
        variable, scope = _cheapest(left, sizes, live)
        entries = prod(sizes[other] for other in scope)
        if entries > limit:
            raise TooWide(len(left), entries)
        taken = [key for key, factor in live.items() if variable in factor.scope]
        least, best = _eliminate(variable, scope, sizes, [live.pop(key) for key in taken])
        live[len(factors) + len(eliminated)] = CostFunction(scope, least)
        eliminated.append((variable, scope, best))
        left.remove(variable)
        widest = max(widest, len(scope))
    chosen = dict.fromkeys(set(range(len(sizes))) - {variable for variable, _, _ in eliminated}, 0)
    for variable, scope, best in reversed(eliminated):
        chosen[variable] = int(best[tuple(chosen[other] for other in scope)])
    value = sum(int(factor.table) for factor in live.values())
    return Minimum(value, tuple(chosen[variable] for variable in range(len(sizes))), widest)


def smallest(
    sizes: Sequence[int], factors: Sequence[CostFunction], count: int, limit: int = LARGEST_TABLE
) -> list[Minimum]:
    """Return the `count` least sums of `factors`, ascending, each of other values; all of them where there are fewer.

    What is left without a minimum falls into as many parts as there are variables: in each one some variables have the
    minimum's values and the next one has another. So every further sum takes an elimination a variable.

    Args:
        sizes: for each variable, how many values it has.
        factors: as for `minimize`.
        count: how many sums, at least 1.
        limit: entries of the largest table.

    Raises:
        TooWide: a table would have more entries.
    """
    everything = tuple(tuple(range(size)) for size in sizes)
    first = minimize(sizes, factors, limit)
    # By value and then by what was chosen, so that of equals always the same come first.
    waiting = [(first.value, first.chosen, 0, everything, first.widest)]
    found: list[Minimum] = []
    while waiting:
        value, chosen, decided, allowed, widest = heapq.heappop(waiting)
        found.append(Minimum(value, chosen, widest))
        if len(found) == count:
            break
        for variable in range(decided, len(sizes)):
            others = tuple(other for other in allowed[variable] if other != chosen[variable])
            if others:
                fixed = tuple((chosen[before],) for before in range(variable))
                part = (*fixed, others, *allowed[variable + 1 :])
                least = _restricted(part, factors, limit)
                heapq.heappush(waiting, (least.value, least.chosen, variable, part, least.widest))
    return found


def _restricted(allowed: Sequence[tuple[int, ...]], factors: Sequence[CostFunction], limit: int) -> Minimum:
    """Return the least sum where each variable has some of its values."""
    cut = [
        CostFunction(factor.scope, factor.table[np.ix_(*(allowed[variable] for variable in factor.scope))])
        for factor in factors
    ]
    least = minimize([len(values) for values in allowed], cut, limit)
    return Minimum(
        least.value,
        tuple(values[number] for values, number in zip(allowed, least.chosen, strict=True)),
        least.widest,
    )


def _without_single(factor: CostFunction, sizes: Sequence[int]) -> CostFunction:
    """Return a function without its variables that have one value."""
    scope = tuple(variable for variable in factor.scope if sizes[variable] > 1)
    return CostFunction(scope, factor.table.reshape(tuple(sizes[variable] for variable in scope)))


def _cheapest(
    left: set[int], sizes: Sequence[int], live: Mapping[int, CostFunction]
) -> tuple[int, tuple[int, ...]]:
    """Return the variable whose elimination makes the smallest table, the first of equals, and its neighbours."""
    neighbours: dict[int, set[int]] = {variable: set() for variable in left}
    for factor in live.values():
        for variable in factor.scope:
            neighbours[variable].update(factor.scope)
    scopes = {variable: tuple(sorted(neighbours[variable] - {variable})) for variable in sorted(left)}
    best = min(
        scopes, key=lambda candidate: prod(sizes[other] for other in scopes[candidate]) * sizes[candidate]
    )
    return best, scopes[best]


def _eliminate(
    variable: int, scope: tuple[int, ...], sizes: Sequence[int], factors: Sequence[CostFunction]
) -> tuple[Array, Array]:
    """Return the least sum of `factors` over `variable`, and where it is, for all values of `scope`."""
    shape = tuple(sizes[other] for other in scope)
    aligned = []
    for factor in factors:
        # The variable first, then the scope; a variable that the factor lacks has one entry.
        order = sorted(range(len(factor.scope)), key=lambda dim: (factor.scope[dim] != variable, dim))
        table = np.transpose(factor.table, order)
        aligned.append(
            table.reshape(sizes[variable], *(sizes[other] if other in factor.scope else 1 for other in scope))
        )
    least = np.full(shape, np.iinfo(np.int64).max, np.int64)
    best = np.zeros(shape, np.int64)
    for value in range(sizes[variable]):
        total: Array = np.zeros(shape, np.int64)
        for table in aligned:
            total = total + table[value]
        better = total < least
        least = np.where(better, total, least)
        best = np.where(better, value, best)
    return least, best
