"""The cost of strategies, one proposal after the other: each simulated in full, or derived by what it changes.

Both give the same for every proposal, to the nanosecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from graph.schedule import ONE_BATCH
from graph.strategy import Configuration
from search.orders import Order
from search.outcome import NEVER_NS, Outcome

if TYPE_CHECKING:
    from search.simulate.strategy_state import Layout, Undo


class Evaluation(Protocol):
    """The cost of a strategy and of its proposals; every proposal is committed or rolled back before the next."""

    @property
    def configurations(self) -> list[Configuration]:
        """The configurations of the current strategy, or of the proposal in between."""
        ...

    def current(self) -> Outcome:
        """Return the cost of the current strategy."""
        ...

    def propose(self, changed: Mapping[int, Configuration], bound_ns: int) -> Outcome | None:
        """Change some operators; return the cost of that, or None where the makespan exceeds the bound."""
        ...

    def commit(self) -> None:
        """Keep the proposal: the strategy is that from now on."""
        ...

    def roll_back(self) -> None:
        """Take the proposal back."""
        ...


def evaluation(layout: Layout, order: Order) -> Evaluation:
    """Return the fastest evaluation of a layout's strategy in an order.

    Only program order, which the runtime executes, is worth one of its own, where a step goes through its batch at
    once.
    """
    from search.evaluate.incremental import IncrementalEvaluation

    if order == "program" and layout.micro_batches == ONE_BATCH:
        return IncrementalEvaluation(layout)
    return FullEvaluation(layout, order, stops=True)


def outcome(layout: Layout, order: Order, limit: Outcome | None = None) -> Outcome:
    """Simulate a layout in full; one that cannot be below a limit only as far as shows it.

    Then the result has its exact excess, and the time that a step takes at least; it is not below the limit either.
    """
    of_one = layout.micro_batch()
    if limit is not None:
        least = Outcome(layout.excess_bytes, of_one.busiest_ns())
        if least >= limit:
            return least
    step_time_ns, _ = layout.run(order, of_one=of_one)
    return Outcome(layout.excess_bytes, step_time_ns)


class FullEvaluation:
    """Every strategy simulated from its task graph; `stops`: but in program order, only as far as the bound lets it."""

    def __init__(self, layout: Layout, order: Order, *, stops: bool = False) -> None:
        self.layout = layout
        self.order = order
        self.stops = stops
        self._undo: Undo | None = None

    @property
    def configurations(self) -> list[Configuration]:
        """The configurations of the layout."""
        return self.layout.configurations

    def current(self) -> Outcome:
        """Return the cost of the layout's strategy."""
        return outcome(self.layout, self.order)

    def propose(self, changed: Mapping[int, Configuration], bound_ns: int) -> Outcome | None:
        """Change some operators; return the cost of that, or None where the makespan exceeds the bound."""
        self._undo = self.layout.change(changed)
        step_time_ns, _ = self.layout.run(self.order, bound_ns if self.stops else NEVER_NS)
        if not 0 <= step_time_ns <= bound_ns:
            return None
        return Outcome(self.layout.excess_bytes, step_time_ns)

    def commit(self) -> None:
        """Keep the proposal: it is in the layout already."""

    def roll_back(self) -> None:
        """Take the proposal back."""
        if self._undo is not None:
            self.layout.undo(self._undo)
