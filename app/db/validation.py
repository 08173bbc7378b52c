"""Rows as they must be: the values that each record's fields may have, and documents that are what their digests name.

A database has been on a disk, and others may have written to it. SQLite keeps any value in any column, and neither it
nor PostgreSQL knows of JSON here. So every row is looked at where it becomes a record (`app.db.sql`); nothing behind
that asks again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import datetime
from functools import cache
from math import inf, isfinite
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import sqlalchemy as sa

from app.db import models, records
from graph.canonical import canonical_json, digest

Row = Mapping[str, Any]
ReadField = Callable[[Any], Any]

EXCERPTS: dict[type, sa.Table] = {records.OpCostMedian: models.op_costs}
"""The table of whose rows a record holds some columns."""

# A predicted step that does not fit into memory takes for ever; no other number of a row is infinite.
_MAY_BE_INFINITE = frozenset({"initial_time_s", "best_time_s", "step_time_s"})
# Of an operator cost: another row, which is read with it or by itself.
_COST_KEY = "cost_key"
_LONGEST_SHOWN = 40


class Fault(Exception):
    """A row that is not as it was written: the column, and the reason."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(f"column {column}: {reason}")
        self.column = column
        self.reason = reason


class _Malformed(Exception):
    """A description of a value that its column cannot hold."""


def values_of(kind: type, row: Row) -> dict[str, Any]:
    """Return the fields of a record from a row that has its columns by name; JSON becomes mappings and tuples.

    Raises:
        Fault: a value is not of its column's type, or a document is not the one that its digest names.
    """
    values: dict[str, Any] = {}
    for name, read in _readers(kind):
        if name not in row and name == _COST_KEY:
            continue
        if name in _MAY_BE_INFINITE and row[name] == inf:
            values[name] = inf
            continue
        try:
            values[name] = read(row[name])
        except _Malformed as error:
            raise Fault(name, str(error)) from None
    content = _CONTENTS.get(kind)
    if content is not None:
        content(row, values)
    return values


@cache
def _readers(kind: type) -> tuple[tuple[str, ReadField], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, _reader(hints[field.name])) for field in fields(kind))


def _reader(hint: Any) -> ReadField:
    """Return the function that reads a value of a field's type."""
    if isinstance(hint, UnionType):
        (inner,) = (_reader(argument) for argument in get_args(hint) if argument is not NoneType)
        return lambda value: None if value is None else inner(value)
    origin = get_origin(hint)
    if origin is Literal:
        choices = frozenset(get_args(hint))
        return lambda value: _must(value, isinstance(value, str) and value in choices, "is not known")
    if origin is tuple:
        return lambda value: _numbers(value, get_args(hint)[0])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping
    return _PLAIN.get(hint, lambda value: _must(value, isinstance(value, hint), f"is no {hint.__name__}"))


_PLAIN: dict[type, ReadField] = {
    int: lambda value: _must(value, type(value) is int, "is no whole number"),
    float: lambda value: _must(value, _is_real(value), "is no number"),
    str: lambda value: _must(value, isinstance(value, str), "is no text"),
    bool: lambda value: _must(value, isinstance(value, bool), "is neither true nor false"),
    datetime: lambda value: _must(value, isinstance(value, datetime), "is no moment"),
}


def _must(value: Any, holds: bool, otherwise: str) -> Any:  # noqa: FBT001 - a condition
    if not holds:
        raise _Malformed(f"{_shown(value)} {otherwise}")
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "NULL"
    text = repr(value[:_LONGEST_SHOWN] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _LONGEST_SHOWN + 3 else f"{text[:_LONGEST_SHOWN]}..."


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (TypeError, ValueError, RecursionError):
        raise _Malformed(f"{_shown(text)} is no JSON") from None


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)  # JSON has none such, and no document of ours
    return number


def _mapping(text: Any) -> dict[str, Any]:
    document = _parsed(text)
    _must(text, isinstance(document, dict), "is no JSON object")
    return dict(document)


def _numbers(text: Any, kind: type) -> tuple[Any, ...]:
    document = _parsed(text)
    fits = (lambda value: type(value) is int) if kind is int else _is_real
    _must(text, isinstance(document, list) and all(map(fits, document)), "is no JSON list of numbers")
    return tuple(document)


# ---- documents and their digests


def _check_hash(row: Row, column: str, text: str | None = None) -> None:
    """Check a document whose digest is that of its text."""
    hashed = hashlib.sha256((row[column] if text is None else text).encode(errors="replace")).hexdigest()
    if hashed != row["digest"]:
        raise Fault(column, f"has the digest {hashed[:12]}, column digest says {row['digest'][:12]}")


def _check_topology(row: Row, _values: Row) -> None:
    # The digest is of all but the name, which is the last member but one.
    named = f'"name":{canonical_json(row["name"])},'
    before, there, after = row["document"].rpartition(f'{named}"routes":')
    if not there:
        raise Fault("document", "is not that of a topology of this name")
    _check_hash(row, "document", text=f'{before}"routes":{after}')


def _check_environment(row: Row, values: Row) -> None:
    fingerprint = digest(values["facts"])
    if fingerprint != row["fingerprint"]:
        raise Fault(
            "facts", f"has the digest {fingerprint[:12]}, column fingerprint says {row['fingerprint'][:12]}"
        )


def _check_cost(row: Row, _values: Row) -> None:
    times = [row[name] is None for name in ("minimum_s", "p10_s", "median_s")]
    if times != [row["failure"] is not None] * 3:
        raise Fault("failure", "does not agree with the times: there must be the one or the others")


def _check_strategy(row: Row, _values: Row) -> None:
    """Check that a document has the form of a strategy; its digest needs the graph (`app.services.stored`)."""
    try:
        document = _mapping(row["document"])
    except _Malformed as error:
        raise Fault("document", str(error)) from None
    operators, shared = document.get("operators"), document.get("sharding", {})
    if not isinstance(operators, dict) or not all(map(_is_configuration, operators.values())):
        raise Fault("document", "has no configuration for each operator")
    if not isinstance(shared, dict) or not isinstance(document.get("recomputation", []), list):
        raise Fault("document", "does not say how weights are shared, or what is made again")


def _is_configuration(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("degrees", {}), dict):
        return False
    devices, degrees = entry.get("devices"), entry.get("degrees", {})
    return isinstance(devices, list) and all(type(number) is int for number in (*devices, *degrees.values()))


_CONTENTS: dict[type, Callable[[Row, Row], None]] = {
    records.OpCostRecord: _check_cost,
    records.EnvironmentRecord: _check_environment,
    records.CostKeyRecord: lambda row, _values: _check_hash(row, "key"),
    records.GraphRecord: lambda row, _values: _check_hash(row, "document"),
    records.TrainingRecord: lambda row, _values: _check_hash(row, "document"),
    records.TopologyRecord: _check_topology,
    records.StrategyRecord: _check_strategy,
}
