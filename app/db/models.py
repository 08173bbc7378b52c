"""The tables, as SQLAlchemy Core, with the same definition on SQLite and PostgreSQL.

Conventions: JSON is canonical text (`graph.canonical`), times are float seconds, sizes are bytes, moments are
UTC. A table named by content has a unique sha256 `digest`, so that writing the same thing twice is one row. A
change here needs a migration (`migrations/versions`); `python -m app.db.check` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeDecorator

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


def _id() -> sa.Column[Any]:
    return sa.Column("id", _Id, primary_key=True)


def _reference(name: str, target: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger, sa.ForeignKey(f"{target}.id"), nullable=nullable)


def _digest(name: str = "digest") -> sa.Column[Any]:
    return sa.Column(name, sa.String(64), nullable=False, unique=True)


def _required(name: str, type_: sa.types.TypeEngine[Any] | type[sa.types.TypeEngine[Any]]) -> sa.Column[Any]:
    return sa.Column(name, type_, nullable=False)


device_kinds = sa.Table(
    "device_kinds",
    metadata,
    _id(),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    _required("processor", sa.Text),
    _required("memory_bytes", sa.BigInteger),
    _required("description", sa.Text),
)

environments = sa.Table(
    "environments",
    metadata,
    _id(),
    _digest("fingerprint"),
    _required("facts", sa.Text),
    _required("created_at", UtcDateTime),
)

op_signatures = sa.Table(
    "op_signatures",
    metadata,
    _id(),
    _digest(),
    _required("target", sa.Text),
    _required("key", sa.Text),
    _required("flops", sa.BigInteger),
    _required("bytes", sa.BigInteger),
)

op_costs = sa.Table(
    "op_costs",
    metadata,
    _id(),
    _reference("signature_id", "op_signatures"),
    _reference("device_kind_id", "device_kinds"),
    _reference("environment_id", "environments"),
    _required("phase", sa.String(16)),
    sa.Column("minimum_s", sa.Double),
    sa.Column("p10_s", sa.Double),
    sa.Column("median_s", sa.Double),
    _required("sample_count", sa.Integer),
    _required("samples_s", sa.Text),
    sa.Column("peak_bytes", sa.BigInteger),
    sa.Column("failure", sa.Text),
    sa.Column("launch_s", sa.Double),
    sa.Column("clock_hz", sa.Double),
    sa.Column("throttle", sa.Text),
    _required("measured_at", UtcDateTime),
    sa.UniqueConstraint("signature_id", "device_kind_id", "environment_id", "phase", name="uq_op_costs_key"),
    sa.CheckConstraint("phase IN ('forward', 'backward', 'update')", name="phase"),
    sa.CheckConstraint(
        "(failure IS NULL AND minimum_s IS NOT NULL AND p10_s IS NOT NULL AND median_s IS NOT NULL)"
        " OR (failure IS NOT NULL AND minimum_s IS NULL AND p10_s IS NULL AND median_s IS NULL)",
        name="measured_or_failed",
    ),
    sa.Index(None, "device_kind_id", "environment_id"),
)

link_costs = sa.Table(
    "link_costs",
    metadata,
    _id(),
    _reference("device_kind_id", "device_kinds"),
    _reference("environment_id", "environments"),
    _required("pattern", sa.String(32)),
    _required("group_size", sa.Integer),
    _required("size_bytes", sa.BigInteger),
    _required("minimum_s", sa.Double),
    _required("median_s", sa.Double),
    _required("sample_count", sa.Integer),
    _required("samples_s", sa.Text),
    _required("measured_at", UtcDateTime),
    sa.UniqueConstraint(
        "device_kind_id", "environment_id", "pattern", "group_size", "size_bytes", name="uq_link_costs_key"
    ),
)

link_fits = sa.Table(
    "link_fits",
    metadata,
    _id(),
    _reference("device_kind_id", "device_kinds"),
    _reference("environment_id", "environments"),
    _required("pattern", sa.String(32)),
    _required("group_size", sa.Integer),
    sa.Column("latency_s", sa.Double),
    sa.Column("bandwidth_bytes_per_s", sa.Double),
    sa.Column("contention_factor", sa.Double),
    sa.Column("residual", sa.Double),
    _required("measured_at", UtcDateTime),
    sa.UniqueConstraint("device_kind_id", "environment_id", "pattern", "group_size", name="uq_link_fits_key"),
)

graphs = sa.Table(
    "graphs",
    metadata,
    _id(),
    _digest(),
    sa.Column("name", sa.Text, nullable=False, index=True),
    _required("model", sa.Text),
    _required("operator_count", sa.Integer),
    _required("parameter_count", sa.BigInteger),
    _required("flops", sa.BigInteger),
    _required("document", sa.Text),
)

topologies = sa.Table(
    "topologies",
    metadata,
    _id(),
    _digest(),
    sa.Column("name", sa.Text, nullable=False, index=True),
    _required("device_count", sa.Integer),
    _required("document", sa.Text),
)

trainings = sa.Table(
    "trainings",
    metadata,
    _id(),
    _digest(),
    _required("batch_size", sa.Integer),
    _required("document", sa.Text),
)

strategies = sa.Table(
    "strategies",
    metadata,
    _id(),
    _digest(),
    _reference("graph_id", "graphs"),
    _required("device_count", sa.Integer),
    _required("document", sa.Text),
    _required("source", sa.String(32)),
    _required("created_at", UtcDateTime),
    sa.Index(None, "graph_id"),
)

searches = sa.Table(
    "searches",
    metadata,
    _id(),
    _reference("graph_id", "graphs"),
    _reference("topology_id", "topologies"),
    _reference("training_id", "trainings"),
    _required("algorithm", sa.String(32)),
    _required("seed", sa.BigInteger),
    _required("options", sa.Text),
    _required("status", sa.String(16)),
    _required("proposals", sa.BigInteger),
    _required("accepted", sa.BigInteger),
    sa.Column("initial_time_s", sa.Double),
    sa.Column("best_time_s", sa.Double),
    _reference("best_strategy_id", "strategies", nullable=True),
    sa.Column("trace_path", sa.Text),
    _required("started_at", UtcDateTime),
    sa.Column("finished_at", UtcDateTime),
    sa.Column("owner", sa.Text),
    sa.Column("alive_at", UtcDateTime),
    sa.Column("lower_bound_s", sa.Double),
    sa.CheckConstraint("status IN ('running', 'finished', 'interrupted', 'failed')", name="status"),
    sa.Index(None, "graph_id", "topology_id"),
)

simulations = sa.Table(
    "simulations",
    metadata,
    _id(),
    _reference("strategy_id", "strategies"),
    _reference("topology_id", "topologies"),
    _reference("training_id", "trainings"),
    _reference("search_id", "searches", nullable=True),
    _required("task_order", sa.String(16)),
    _required("cost_digest", sa.String(64)),
    _required("step_time_s", sa.Double),
    _required("measured_share", sa.Double),
    _required("estimated_share", sa.Double),
    _required("datasheet_share", sa.Double),
    _required("compute_s", sa.Double),
    _required("communication_bytes", sa.BigInteger),
    _required("peak_bytes", sa.Text),
    _required("feasible", sa.Boolean),
    _required("created_at", UtcDateTime),
    sa.UniqueConstraint(
        "strategy_id", "topology_id", "training_id", "task_order", "cost_digest", name="uq_simulations_key"
    ),
    sa.CheckConstraint(
        "task_order IN ('program', 'fifo', 'priority', 'priority-tic', 'priority-tac')", name="task_order"
    ),
    sa.Index(None, "search_id"),
)

executions = sa.Table(
    "executions",
    metadata,
    _id(),
    _reference("strategy_id", "strategies"),
    _reference("topology_id", "topologies"),
    _reference("training_id", "trainings"),
    _reference("environment_id", "environments"),
    _required("iterations", sa.Integer),
    _required("status", sa.String(16)),
    _required("step_times_s", sa.Text),
    sa.Column("minimum_s", sa.Double),
    sa.Column("median_s", sa.Double),
    sa.Column("mean_s", sa.Double),
    sa.Column("throughput_samples_per_s", sa.Double),
    sa.Column("failure", sa.Text),
    sa.Column("largest_deviation", sa.Double),
    _required("created_at", UtcDateTime),
    sa.Column("finished_at", UtcDateTime),
    sa.Column("owner", sa.Text),
    sa.Column("alive_at", UtcDateTime),
    sa.Column("peak_bytes", sa.Text),
    sa.Column("process_bytes", sa.Text),
    sa.Column("lost_s", sa.Text),
    sa.Column("undisturbed_s", sa.Double),
    sa.CheckConstraint("status IN ('running', 'finished', 'interrupted', 'failed')", name="status"),
    sa.Index(None, "strategy_id", "topology_id", "training_id"),
)

traces = sa.Table(
    "traces",
    metadata,
    _id(),
    _reference("search_id", "searches"),
    _required("kind", sa.String(16)),
    sa.Column("path", sa.Text, nullable=False, unique=True),
    _required("rows", sa.BigInteger),
    _required("created_at", UtcDateTime),
    sa.CheckConstraint("kind IN ('proposals', 'configurations', 'starts')", name="kind"),
    sa.Index(None, "search_id"),
)
