"""The moves of a joint search (`search.algorithms.rewritings`), as substitutions and the graphs that these make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graph.errors import StrategyError
from graph.operators import OperatorGraph
from graph.rules import whole_call
from graph.substitutions.rewriting import WITHOUT_COMPILER, matches, rewritten
from graph.substitutions.substitution import Substitution
from search.algorithms.moves import shares_for
from search.algorithms.rewritings import Rewriting, Rewritings
from search.problem import Problem

OfferedMoves = Sequence[tuple[Substitution, ...]]
"""The substitutions of each move."""


def moves_of(graph: OperatorGraph, rules: Sequence[str] = WITHOUT_COMPILER) -> OfferedMoves:
    """Return the moves of a search: each applies a rule at all of those of its matches whose calls are the same."""
    alike: dict[object, list[Substitution]] = {}
    for match in matches(graph, rules):
        calls = [whole_call(graph, graph.operator_by_name[name]).key for name in match.operators]
        alike.setdefault((match.rule, *calls), []).append(match)
    return [tuple(group) for group in alike.values()]


def substitutions_of(moves: OfferedMoves, rewriting: Rewriting) -> tuple[Substitution, ...]:
    """Return the substitutions of a rewriting's moves."""
    return tuple(substitution for move in rewriting for substitution in moves[move])


def rewriting_of(
    moves: OfferedMoves, substitutions: Sequence[Substitution]
) -> tuple[Rewriting, list[Substitution]]:
    """Return the rewriting whose moves make some substitutions, and the substitutions that are left over.

    Left over are those of which a move makes others, too, and those of no move.
    """
    wanted = set(substitutions)
    rewriting = tuple(number for number, move in enumerate(moves) if wanted.issuperset(move))
    return rewriting, sorted(wanted.difference(substitutions_of(moves, rewriting)))


def rewritings_of(
    imported: Problem,
    moves: OfferedMoves,
    prepare: Callable[[OperatorGraph], None] | None = None,
) -> Rewritings:
    """Return the rewritings of a problem's graph by some moves, with the problem's costs.

    Args:
        imported: the problem of the graph as imported.
        moves: as of `moves_of`.
        prepare: called with each graph before it is simulated.
    """

    def problem(rewriting: Rewriting) -> Problem | None:
        try:
            graph = rewritten(imported.graph, substitutions_of(moves, rewriting))
        except StrategyError:
            return None  # moves that exclude each other
        if prepare is not None:
            prepare(graph)
        return replace(imported, graph=graph, builder=None)

    return Rewritings(imported, len(moves), problem, shares_for(imported.device_count))
