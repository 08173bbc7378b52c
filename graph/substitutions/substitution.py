"""A substitution: a rule, applied to operators of a graph. A strategy's graph is one that some were applied to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph.errors import StrategyError
from graph.texts import shown


@dataclass(frozen=True, slots=True, order=True)
class Substitution:
    """The rule of that name (`graph.substitutions.rewriting.RULES`), applied to operators of the imported graph."""

    rule: str
    operators: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return {"rule": name, "operators": [names]}."""
        return {"rule": self.rule, "operators": list(self.operators)}

    @property
    def text(self) -> str:
        """The substitution in words."""
        return f"{self.rule} {', '.join(self.operators)}"


def substitutions_to_json(substitutions: Sequence[Substitution]) -> list[dict[str, Any]]:
    """Return substitutions as a JSON document."""
    return [substitution.to_json() for substitution in substitutions]


def substitutions_from_json(document: object) -> tuple[Substitution, ...]:
    """Return the substitutions of a document that `substitutions_to_json` (or a person) wrote.

    Raises:
        StrategyError: it is malformed. Whether the rules are there and fit is for `rewriting.rewritten` to say.
    """
    if not isinstance(document, list):
        raise StrategyError(
            f"substitutions: is {shown(document)}, must be a list of rules and the operators that each is applied to; "
            "correct the strategy"
        )
    return tuple(_substitution(entry) for entry in document)


def _substitution(entry: object) -> Substitution:
    rule = entry.get("rule") if isinstance(entry, Mapping) else None
    operators = entry.get("operators") if isinstance(entry, Mapping) else None
    if (
        not isinstance(entry, Mapping)
        or set(entry) != {"rule", "operators"}
        or not isinstance(rule, str)
        or not isinstance(operators, list)
        or not all(isinstance(name, str) for name in operators)
    ):
        raise StrategyError(
            f"substitutions: has an entry {shown(entry)}, must have the name of a rule and a list of operators; "
            "correct the strategy"
        )
    return Substitution(rule, tuple(operators))
