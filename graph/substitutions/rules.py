"""Rules: graphs of equal values, of one or two outputs, as `scripts/rules` found, proved and wrote them.

A rule holds in both directions; to apply it from one side, all variables of the other must be on that side. `add` and
`multiply` match their operands in either order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from graph.substitutions.terms import Term, parse
from graph.substitutions.types import TensorType, parse_type

PATH = Path(__file__).with_name("rules.json")


@dataclass(frozen=True, slots=True)
class Rule:
    """Two graphs of equal outputs, the types of their variables, and the properties that the proof used."""

    name: str
    source: tuple[Term, ...]
    target: tuple[Term, ...]
    types: Mapping[str, TensorType]
    conditions: tuple[str, ...]
    properties: tuple[str, ...]


@cache
def load_rules() -> tuple[Rule, ...]:
    """Return all rules of the file that `scripts/rules` wrote, in its order."""
    return tuple(map(_rule, _entries()))


@cache
def offered_rules() -> tuple[tuple[Rule, str], ...]:
    """Return the rules that networks are offered, each with a direction: "forwards" or "backwards"."""
    return tuple((_rule(entry), direction) for entry in _entries() for direction in entry.get("offered", ()))


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))["rules"]
    return entries


def _rule(entry: Mapping[str, Any]) -> Rule:
    return Rule(
        entry["name"],
        tuple(map(parse, entry["source"])),
        tuple(map(parse, entry["target"])),
        {name: parse_type(text) for name, text in entry["variables"].items()},
        tuple(entry["conditions"]),
        tuple(entry["properties"]),
    )
