"""The tables, as SQLAlchemy Core, with the same definition on SQLite and PostgreSQL: each has the fields of its record.

Conventions: JSON is canonical text (`graph.canonical`), times are float seconds, sizes are bytes, moments are
UTC. A table named by content has a unique sha256 `digest`, so that writing the same thing twice is one row. A
change here needs a migration (`migrations/versions`); `python -m app.db.check` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

from app.db import records

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class UtcDateTime(TypeDecorator[datetime]):
    """A moment: timezone-aware in Python, plain UTC in the database (SQLite has no time zones)."""

    impl = sa.DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: sa.Dialect) -> datetime | None:
        """Convert an aware moment to UTC without a zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"moment {value!r} has no time zone, must be aware; use records.utc_now()")
        return value.astimezone(UTC).replace(tzinfo=None)

    def result_processor(self, dialect: sa.Dialect, coltype: Any) -> Callable[[Any], Any] | None:
        """Return the conversion of stored moments; other values stay, and `app.db.validation` names their row."""
        convert = super().result_processor(dialect, coltype)

        def converted(value: Any) -> Any:
            try:
                return value if convert is None else convert(value)
            except (TypeError, ValueError, AttributeError):
                return value

        return converted

    def process_result_value(self, value: datetime | None, _dialect: sa.Dialect) -> datetime | None:
        """Return the stored moment as aware UTC."""
        return None if value is None else value.replace(tzinfo=UTC)


# SQLite numbers rows by itself only in a column declared exactly INTEGER.
_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# The types of columns by those of fields; mappings and tuples are canonical JSON.
_TYPES: dict[Any, sa.types.TypeEngine[Any]] = {
    int: sa.BigInteger(),
    float: sa.Double(),
    bool: sa.Boolean(),
    str: sa.Text(),
    datetime: UtcDateTime(),
    Mapping: sa.Text(),
    tuple: sa.Text(),
    Literal: sa.String(16),
}
# Columns of another type than their fields': whole numbers that stay small, and short texts.
_SMALL = {"batch_size", "device_count", "group_size", "iterations", "operator_count", "sample_count"}
_LENGTHS = {"digest": 64, "fingerprint": 64, "cost_digest": 64, "algorithm": 32, "pattern": 32, "source": 32}
# The table that a column refers to.
_REFERENCES = {
    "best_strategy_id": "strategies",
    "device_kind_id": "device_kinds",
    "environment_id": "environments",
    "graph_id": "graphs",
    "search_id": "searches",
    "signature_id": "op_signatures",
    "strategy_id": "strategies",
    "topology_id": "topologies",
    "training_id": "trainings",
}
# Columns that hold one of the names of their field's type: a check constraint lists these.
_LISTED = {"phase", "status", "task_order", "kind"}

TABLES: dict[type, sa.Table] = {}
"""The table of whose rows a record holds every column."""


def _column(name: str, hint: Any, **options: Any) -> sa.Column[Any]:
    """Return the column of a record's field; `hint` is the field's type."""
    arguments = [argument for argument in get_args(hint) if argument is not NoneType]
    nullable = isinstance(hint, UnionType)
    plain = arguments[0] if nullable else hint
    type_ = _TYPES[get_origin(plain) or plain]
    if name in _SMALL:
        type_ = sa.Integer()
    elif name in _LENGTHS:
        type_ = sa.String(_LENGTHS[name])
    reference = [sa.ForeignKey(f"{_REFERENCES[name]}.id")] if name in _REFERENCES else []
    return sa.Column(name, type_, *reference, nullable=nullable, **options)


def _table(
    record: type,
    name: str,
    *constraints: sa.schema.SchemaItem,
    unique: str = "",
    index: str = "",
    more: Mapping[str, type] = MappingProxyType({}),
) -> sa.Table:
    """Return the table of a record: a column for each field, one of which may be unique or indexed, and `more`."""
    hints = get_type_hints(record)
    # The cost key of a cost is a row of its own.
    names = [field.name for field in fields(record) if field.name not in ("id", "cost_key")]
    columns = {name: hints[name] for name in names} | dict(more)
    checks = [
        sa.CheckConstraint(f"{column} IN ({', '.join(map(repr, get_args(hint)))})", name=column)
        for column, hint in columns.items()
        if column in _LISTED
    ]
    TABLES[record] = sa.Table(
        name,
        metadata,
        sa.Column("id", _Id, primary_key=True),
        *(
            _column(column, hint, unique=column == unique or None, index=column == index or None)
            for column, hint in columns.items()
        ),
        *checks,
        *constraints,
    )
    return TABLES[record]


device_kinds = _table(records.DeviceKindRecord, "device_kinds", unique="name")
environments = _table(
    records.EnvironmentRecord, "environments", unique="fingerprint", more={"fingerprint": str}
)
op_signatures = _table(records.CostKeyRecord, "op_signatures", unique="digest")
op_costs = _table(
    records.OpCostRecord,
    "op_costs",
    sa.UniqueConstraint("signature_id", "device_kind_id", "environment_id", "phase", name="uq_op_costs_key"),
    sa.CheckConstraint(
        "(failure IS NULL AND minimum_s IS NOT NULL AND p10_s IS NOT NULL AND median_s IS NOT NULL)"
        " OR (failure IS NOT NULL AND minimum_s IS NULL AND p10_s IS NULL AND median_s IS NULL)",
        name="measured_or_failed",
    ),
    sa.Index(None, "device_kind_id", "environment_id"),
    more={"signature_id": int, "sample_count": int},
)
link_costs = _table(
    records.LinkCostRecord,
    "link_costs",
    sa.UniqueConstraint(
        "device_kind_id", "environment_id", "pattern", "group_size", "size_bytes", name="uq_link_costs_key"
    ),
    more={"sample_count": int},
)
link_fits = _table(
    records.LinkFitRecord,
    "link_fits",
    sa.UniqueConstraint("device_kind_id", "environment_id", "pattern", "group_size", name="uq_link_fits_key"),
)
graphs = _table(records.GraphRecord, "graphs", unique="digest", index="name")
topologies = _table(records.TopologyRecord, "topologies", unique="digest", index="name")
trainings = _table(records.TrainingRecord, "trainings", unique="digest")
strategies = _table(records.StrategyRecord, "strategies", unique="digest", index="graph_id")
searches = _table(records.SearchRecord, "searches", sa.Index(None, "graph_id", "topology_id"))
simulations = _table(
    records.SimulationRecord,
    "simulations",
    sa.UniqueConstraint(
        "strategy_id", "topology_id", "training_id", "task_order", "cost_digest", name="uq_simulations_key"
    ),
    index="search_id",
)
executions = _table(
    records.ExecutionRecord, "executions", sa.Index(None, "strategy_id", "topology_id", "training_id")
)
traces = _table(records.TraceRecord, "traces", unique="path", index="search_id")
