"""The recomputation of a strategy: its operators, the time that it adds, and the memory that it saves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graph.errors import UsageError
from graph.strategy import Strategy

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from search.simulate.simulator import Simulation

CHOICES = ("all", "none")


@dataclass(frozen=True, slots=True)
class RecomputationReport:
    """Groups of operators that are recomputed, by the names of the first and the last operator of each.

    operators: how many have a backward, and so are made again, in all groups; of `all_operators`.
    added_s: seconds that the step takes longer than with all activations kept, as simulated.
    saved_bytes: by how much the fullest device needs less then, by the simulator's sum (`docs/memory.md`).
    """

    groups: tuple[tuple[str, str], ...]
    operators: int
    all_operators: int
    added_s: float
    saved_bytes: int


def recomputation_report(
    graph: OperatorGraph, strategy: Strategy, made_again: Simulation, kept: Simulation
) -> RecomputationReport:
    """Return the recomputation of a strategy.

    Args:
        graph: its graph.
        strategy: the strategy.
        made_again: its simulation, with the simulator's own sum of memory.
        kept: that of the same strategy with all activations kept.
    """
    names = [operator.name for operator in graph.operators]
    return RecomputationReport(
        tuple((names[group.first], names[group.last]) for group in strategy.recomputation),
        sum(
            graph.has_backward(operator)
            for group in strategy.recomputation
            for operator in graph.operators[group.first : group.last + 1]
        ),
        len(names),
        made_again.step_time_s - kept.step_time_s,
        max(kept.peak_memory_bytes) - max(made_again.peak_memory_bytes),
    )


def check_choice(choice: str | None) -> None:
    """Refuse unknown values of `--recompute` of `app run`.

    Raises:
        UsageError: it is neither of the choices.
    """
    if choice is not None and choice not in CHOICES:
        raise UsageError(f"--recompute: is {choice}, must be {' or '.join(CHOICES)}; choose one")


def with_choice(graph: OperatorGraph, strategy: Strategy, choice: str | None) -> Strategy:
    """Return a strategy with all activations recomputed, in memory-saving groups; with none; or as it is."""
    from search.algorithms.activation_checkpointing import everything

    if choice is None:
        return strategy
    return replace(strategy, recomputation=everything(graph) if choice == "all" else ())
