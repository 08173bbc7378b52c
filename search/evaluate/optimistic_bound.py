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

from collections import Counter
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
        # For each operator, the weights that it reads itself.
        self._weights_read: list[list[int]] = [[] for _ in graph.operators]
        for weight_index, weight in enumerate(graph.weights):
            for index in dict.fromkeys(index for index, _ in graph.readers[weight.name]):
                self._weights_read[index].append(weight_index)
        # The fragments of weights when it was last counted how many weights sum over sets of so many devices.
        self._counted_at: Array = np.full(layout.builder.store.wiring.weight_count, -1, np.int64)
        self._generation = -1
        self._sets: Counter[int] = Counter()
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
        if layout.is_shared:
            return ()
        store = layout.builder.store
        sizes = {}
        numbers = layout.numbers_of(changed)
        for (index, configuration), number in zip(changed.items(), numbers, strict=True):
            for weight_index in self._weights_read[index]:
                size = store.set_size(weight_index, configuration, number)
                if size is None:
                    # Those whose sets are not known may be of any size.
                    return ()
                sizes[weight_index] = size
        self._count_sets()
        of_changed: dict[int, int] = {}
        for at in layout.fragments.static_at[list(sizes)].tolist():
            for size in store.set_sizes(at):
                of_changed[size] = of_changed.get(size, 0) + 1
        return [
            weight_index
            for weight_index, size in sizes.items()
            if self._sets[size] == of_changed.get(size, 0)
        ]

    def _count_sets(self) -> None:
        """Count, for the current strategy, the weights whose gradients are summed over sets of so many devices."""
        self._layout.refresh()
        store, static_at = (
            self._layout.builder.store,
            self._layout.fragments.static_at[: len(self._counted_at)],
        )
        if self._generation != store.generation:
            self._generation = store.generation
            self._counted_at[:] = -1
            self._sets.clear()
        for static_index in np.flatnonzero(static_at != self._counted_at).tolist():
            if self._counted_at[static_index] >= 0:
                self._sets.subtract(store.set_sizes(int(self._counted_at[static_index])))
            self._sets.update(store.set_sizes(int(static_at[static_index])))
            self._counted_at[static_index] = static_at[static_index]

    def _are_replicated(self, operators: Iterable[int], changed: Mapping[int, Configuration]) -> bool:
        """Return whether any unchanged one has replicas: which of these have a backward then goes by their readers'."""
        configurations = self._layout.configurations
        return any(configurations[index].degrees[-1] > 1 and index not in changed for index in operators)

    def decided(self, *, exceeds: bool) -> None:
        """Note whether part of the latest proposal was enough to reject it."""
        self._share += NEWEST * (exceeds - self._share)
