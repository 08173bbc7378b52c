"""Less than a proposal's strategy: one that takes no longer, of which most is known already.

What a proposal costs is mostly deriving what it changes: local calls and their costs, exchanges, holdings of weights.
Without the computing of its changed operators, and without what they make going anywhere, a strategy takes no longer:
the simulation is a longest path over an order that is the same, so it grows with every duration. Where that exceeds the
bound already, as it does for most proposals to a good strategy, the rest is never derived.

What else runs must be what runs in the proposal. That goes by which tasks have a backward (and so gradients, and
weights in buckets), which depends on what reads what they make. So changed operators are taken to have the backwards
that they have in every strategy; where that is not known, a proposal is not relaxed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

from graph.axes import OperandMap, operand_region
from graph.holdings import cell_elements, cells
from graph.operators import OperatorGraph
from graph.strategy import Configuration
from search.kernels import ACTIVE, PARTLY_ACTIVE

if TYPE_CHECKING:
    from search.layout import Layout, Undo

# Where it seldom decides, it is tried for one proposal of so many.
SELDOM, TRIED_EACH = 0.25, 16
# Weight of the latest proposal in the share that was decided.
NEWEST = 0.05


class Relaxation:
    """Puts less than a proposal's strategy into a layout, where that promises to decide."""

    def __init__(self, layout: Layout) -> None:
        graph = layout.builder.graph
        self._layout = layout
        self._is_surely_active = active_operators(graph, surely=True)
        self._is_perhaps_active = active_operators(graph, surely=False)
        # For each operator, those that make what gets a gradient from it.
        self._sources = [
            {
                graph.producer[name][0]
                for name, wanted in zip(operator.inputs, graph.gradient_inputs(operator), strict=True)
                if wanted and name in graph.producer
            }
            for operator in graph.operators
        ]
        self._share = 1.0
        self._proposals = 0

    def replace(self, changed: Mapping[int, Configuration]) -> Undo | None:
        """Change the layout to less than a proposal's strategy, in time; its memory says nothing.

        Returns None where that is not known, or does not promise to decide. Whether it is tried changes no result.
        """
        self._proposals += 1
        if self._share < SELDOM and self._proposals % TRIED_EACH:
            return None
        codes = {}
        for index, configuration in changed.items():
            is_sure, replicas = self._is_surely_active[index], configuration.degrees[-1]
            if self._is_perhaps_active[index] != is_sure:
                return None
            if is_sure and replicas > 1 and self._are_replicated(self._sources[index] - changed.keys()):
                return None
            codes[index] = 0 if not is_sure else ACTIVE if replicas == 1 else PARTLY_ACTIVE
        return self._layout.replace(changed, codes)

    def _are_replicated(self, operators: Iterable[int]) -> bool:
        """Return whether any of them has replicas now: which of these have a backward then goes by their readers'."""
        configurations = self._layout.configurations
        return any(configurations[index].degrees[-1] > 1 for index in operators)

    def decided(self, *, exceeds: bool) -> None:
        """Note whether part of the latest proposal was enough to reject it."""
        self._share += NEWEST * (exceeds - self._share)


def active_operators(graph: OperatorGraph, *, surely: bool) -> list[bool]:
    """Return, for each operator, whether in every strategy each of its parts has a backward; or in some, some part.

    Each has where the loss depends on all of some output, by operators of which that is true: every part then makes
    something that one of their parts reads. Of replicas of a part only some may have one.
    """
    found = [False] * len(graph.operators)
    for index in reversed(range(len(graph.operators))):
        for name in graph.operators[index].outputs:
            if not graph.value_by_name[name].requires_gradient:
                continue
            readers = [
                (reader, slot)
                for reader, slot in graph.readers[name]
                if found[reader] and graph.gradient_inputs(graph.operators[reader])[slot]
            ]
            found[index] = (
                found[index]
                or name == graph.loss
                or (_read_whole(graph, name, readers) if surely else bool(readers))
            )
    return found


def _read_whole(graph: OperatorGraph, name: str, readers: list[tuple[int, int]]) -> bool:
    """Return whether some readings together touch every element of a value, however the readers are split."""
    regions = {}
    for place, (reader, slot) in enumerate(readers):
        space = graph.operators[reader].space
        operand = space.inputs[slot]
        if _is_gapless(operand):
            regions[place] = operand_region(operand, [(0, axis.size) for axis in space.axes[:-1]])
    shape = graph.value_by_name[name].spec.shape
    return bool(regions) and sum(cell_elements(cell) for cell in cells(regions)) == prod(shape)


def _is_gapless(operand: OperandMap) -> bool:
    """Return whether the parts of any split touch together what the whole touches."""
    return all(factor.axis is None or factor.stride <= factor.extent for dim in operand for factor in dim)
