"""A lower bound of a proposal's time: that of less than its strategy, of which most is known already.

What a proposal costs is mostly deriving what it changes: local calls and their costs, exchanges, holdings of weights.
Without the computing of its changed operators, and without what they make going anywhere, a strategy takes no longer:
the simulation is a longest path over an order that is the same, so it grows with every duration. Where that exceeds the
bound already, as it does for most proposals to a good strategy, the rest is never derived.

What else runs must be what runs in the proposal. That goes by which tasks have a backward (and so gradients, and
weights in buckets), which depends on what reads what they make. So changed operators are taken to have the backwards
that they have in every strategy; where that is not known, a proposal has no such bound.

The weights of changed operators are left out as well, where their gradients are summed over sets of devices that sum no
other gradient: elsewhere what fills a bucket would change, and with it when the sums of others begin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from graph.strategy import Configuration
from search.kernels.records import ACTIVE, PARTLY_ACTIVE, Array
from search.simulate.backward_reachability import operators_with_backward

if TYPE_CHECKING:
    from search.simulate.strategy_state import Layout, Undo

# Where it seldom decides, it is tried for one proposal of so many.
SELDOM, TRIED_EACH = 0.25, 16
# Weight of the latest proposal in the share that was decided.
NEWEST = 0.05


class OptimisticBound:
    """Puts less than a proposal's strategy into a layout, where that promises to decide."""

    def __init__(self, layout: Layout) -> None:
        graph = layout.builder.graph
        self._layout = layout
        is_surely_active = operators_with_backward(graph, surely=True)
        is_perhaps_active = operators_with_backward(graph, surely=False)
        # For each operator, whether it has a backward in every strategy; None where that goes by the strategy.
        self._is_active = [
            is_sure if is_sure == is_perhaps else None
            for is_sure, is_perhaps in zip(is_surely_active, is_perhaps_active, strict=True)
        ]
        # For each operator, those that make what gets a gradient from it.
        self._sources = [
            {
                graph.producer[name][0]
                for name, wanted in zip(operator.inputs, graph.gradient_inputs(operator), strict=True)
                if wanted and name in graph.producer
            }
            for operator in graph.operators
        ]
        # Of each weight, the operator that alone reads it, else the number of operators; and of each operator, whether
        # it reads weights that are read more than once.
        operators, weights = len(graph.operators), layout.builder.store.classes.statics[: len(graph.weights)]
        self._reader_W = np.full(len(weights), operators, np.int64)
        self._reads_others_O = np.zeros(operators, np.bool_)
        for number, weight in enumerate(weights):
            if len(weight.readers) == 1:
                self._reader_W[number] = weight.readers[0].operator
            else:
                self._reads_others_O[[port.operator for port in weight.readers]] = True
        # Of a change, the numbers of its operators' configurations; else -1.
        self._number_O = np.full(operators + 1, -1, np.int64)
        # Of each weight, where its fragment started when it was last counted, and whether its gradient was summed over
        # sets of so many devices (N of them); for each such number, how many weights that holds for.
        self._counted_at: Array = np.full(len(weights), -1, np.int64)
        self._is_summed_WN = np.zeros((len(weights), len(layout.builder.topology.devices) + 1), np.bool_)
        self._weights_N = np.zeros(self._is_summed_WN.shape[1], np.int64)
        self._generation = -1
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
            is_active = self._is_active[index]
            if is_active is None:
                return None
            codes[index] = ACTIVE if is_active else 0
            if is_active and configuration.degrees[-1] > 1:
                if self._are_replicated(self._sources[index], changed):
                    return None
                codes[index] = PARTLY_ACTIVE
        return self._layout.replace(changed, codes, self._apart(changed))

    def _apart(self, changed: Mapping[int, Configuration]) -> Collection[int]:
        """Return weights of changed operators whose gradients are summed over sets that are of no other weight.

        Sets of different sizes are different sets. Levels of sharing make tasks of their own: none is left out there.
        """
        layout = self._layout
        operators = np.fromiter(changed, np.int64, len(changed))
        if layout.is_shared or self._reads_others_O[operators].any():
            return ()
        self._number_O[operators] = layout.numbers_of(changed)
        numbers_W = self._number_O[self._reader_W]
        self._number_O[operators] = -1
        weights = np.flatnonzero(numbers_W >= 0)
        sizes = layout.builder.store.set_sizes(weights, numbers_W[weights])
        if not sizes.all():
            # Those whose sets are not known may be of any size.
            return ()
        self._count_sets()
        of_changed_N = self._is_summed_WN[weights].sum(axis=0)
        apart: list[int] = weights[self._weights_N[sizes] == of_changed_N[sizes]].tolist()
        return apart

    def _count_sets(self) -> None:
        """Count, for the current strategy, the weights whose gradients are summed over sets of so many devices."""
        layout = self._layout
        layout.refresh()
        store, static_at = layout.builder.store, layout.fragments.static_at[: len(self._counted_at)]
        if self._generation != store.generation:
            self._generation = store.generation
            self._counted_at[:] = -1
        for weight in np.flatnonzero(static_at != self._counted_at).tolist():
            is_summed_N = self._is_summed_WN[weight]
            self._weights_N -= is_summed_N
            is_summed_N[:] = False
            is_summed_N[store.set_sizes_at(int(static_at[weight]))] = True
            self._weights_N += is_summed_N
            self._counted_at[weight] = static_at[weight]

    def _are_replicated(self, operators: Iterable[int], changed: Mapping[int, Configuration]) -> bool:
        """Return whether any unchanged one has replicas: which of these have a backward then goes by their readers'."""
        configurations = self._layout.configurations
        return any(configurations[index].degrees[-1] > 1 and index not in changed for index in operators)

    def decided(self, *, exceeds: bool) -> None:
        """Note whether part of the latest proposal was enough to reject it."""
        self._share += NEWEST * (exceeds - self._share)
