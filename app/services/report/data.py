"""The report's data from the database: DuckDB queries over its views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.analytics.duck import as_text, connect
from app.analytics.names import graph_names, topology_names
from app.db.engine import Database

if TYPE_CHECKING:
    import duckdb

SEARCHES_SHOWN = 12
CURVE_POINTS = 400
PAIRS_SHOWN = 2000
COSTS_SHOWN = 20_000


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of rows: of a network, a topology or a search; None means all."""

    model: str | None = None
    topology: str | None = None
    search: int | None = None


@dataclass(frozen=True, slots=True)
class SearchCurve:
    """A search, and the best step time after so many proposals; `seconds` is its whole length, where it is stored.

    training: batch size, number format and optimizer as text, here and below.
    """

    id: int
    model: str
    topology: str
    training: str
    status: str
    proposals: int
    initial_s: float | None
    best_s: float | None
    seconds: float | None
    made: tuple[int, ...]
    best_so_far_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class MeasuredStrategy:
    """A strategy's predicted and measured step time."""

    model: str
    topology: str
    training: str
    strategy: str
    source: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True)
class CostPoint:
    """A measured operator cost."""

    target: str
    phase: str
    flops: int
    bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Operator costs of one device kind, in the environment that has most of them."""

    device_kind: str
    points: tuple[CostPoint, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The best strategies of one network, topology and training."""

    model: str
    topology: str
    training: str
    strategies: int
    best_predicted_s: float | None
    predicted_speedup: float | None
    best_measured_s: float | None
    measured_speedup: float | None


@dataclass(frozen=True, slots=True)
class ReportData:
    """All that the report shows of the database itself."""

    summaries: tuple[Summary, ...]
    curves: tuple[SearchCurve, ...]
    pairs: tuple[MeasuredStrategy, ...]
    costs: Costs | None


def read_report_data(database: Database, wanted: Filter) -> ReportData:
    """Read the report's data; connections of `database` must not be in use meanwhile.

    Raises:
        DatabaseError: DuckDB cannot read the database.
    """
    with connect(database) as connection:
        names = _ShownNames(
            graph_names(connection.execute("SELECT id, model FROM graphs").fetchall()),
            topology_names(
                connection.execute("SELECT id, topology, device_count FROM topologies").fetchall()
            ),
        )
        return ReportData(
            _summaries(connection, wanted, names),
            tuple(_curve(connection, row) for row in _searches(connection, wanted, names)),
            _pairs(connection, wanted, names),
            _costs(connection),
        )


@dataclass(frozen=True, slots=True)
class _ShownNames:
    """The names of graphs and topologies by their ids."""

    graphs: Mapping[int, str]
    topologies: Mapping[int, str]

    def of(self, graph: int, topology: int) -> tuple[str, str]:
        return self.graphs[graph], self.topologies[topology]


# The training of a step: batch size, precision, optimizer.
_TRAINING = (
    "coalesce(batch_size || ', ' || precision || ', ' || optimizer, "
    "error('table trainings, row ' || training_id || ' lacks what it must say'))"
)
_WANTED = (
    "($model::VARCHAR IS NULL OR model = $model) AND ($topology::VARCHAR IS NULL OR topology = $topology)"
)


def _names(wanted: Filter) -> dict[str, object]:
    return {"model": as_text(wanted.model), "topology": as_text(wanted.topology)}


def _summaries(
    connection: duckdb.DuckDBPyConnection, wanted: Filter, names: _ShownNames
) -> tuple[Summary, ...]:
    rows = connection.execute(
        f"SELECT model, graph_id, topology_id, {_TRAINING}, strategies, best_predicted_s, predicted_speedup, "
        f"best_measured_median_s, measured_speedup FROM best_per_model WHERE {_WANTED} ORDER BY ALL",
        _names(wanted),
    ).fetchall()
    return tuple(Summary(*names.of(graph, topology), *others) for _, graph, topology, *others in rows)


def _searches(
    connection: duckdb.DuckDBPyConnection, wanted: Filter, names: _ShownNames
) -> list[tuple[Any, ...]]:
    rows = connection.execute(
        f"SELECT id, graph_id, topology_id, {_TRAINING}, status, proposals, initial_time_s, best_time_s, "
        "date_diff('millisecond', started_at, finished_at) / 1000 FROM searches "
        f"WHERE {_WANTED} AND ($search::BIGINT IS NULL OR id = $search) "
        f"ORDER BY id DESC LIMIT {SEARCHES_SHOWN}",
        {**_names(wanted), "search": wanted.search},
    ).fetchall()
    return [(number, *names.of(graph, topology), *others) for number, graph, topology, *others in rows]


def _curve(connection: duckdb.DuckDBPyConnection, row: tuple[Any, ...]) -> SearchCurve:
    """Return a search with its curve, of at most CURVE_POINTS points however long its trace is."""
    points = connection.execute(
        "WITH own AS (SELECT step, simulated_ns, accepted FROM proposals WHERE search = $search), "
        f"width AS (SELECT greatest(1, (max(step) + {CURVE_POINTS}) // {CURVE_POINTS}) AS steps FROM own) "
        "SELECT count(*), min(simulated_ns) FILTER (accepted) FROM own, width "
        "GROUP BY step // steps ORDER BY step // steps",
        {"search": row[0]},
    ).fetchall()
    made: list[int] = [0]
    best: list[float | None] = [row[6]]  # its initial time
    for count, fastest_ns in points:
        made.append(made[-1] + count)
        candidates = [best[-1], None if fastest_ns is None else fastest_ns / 1e9]
        best.append(min((time_s for time_s in candidates if time_s is not None), default=None))
    return SearchCurve(*(*row, tuple(made), tuple(best)))


def _pairs(
    connection: duckdb.DuckDBPyConnection, wanted: Filter, names: _ShownNames
) -> tuple[MeasuredStrategy, ...]:
    rows = connection.execute(
        f"SELECT model, graph_id, topology_id, {_TRAINING}, strategy, source, predicted_s, measured_median_s "
        f"FROM predicted_vs_measured WHERE {_WANTED} AND predicted_s > 0 AND measured_median_s > 0 "
        f"ORDER BY ALL LIMIT {PAIRS_SHOWN}",
        _names(wanted),
    ).fetchall()
    return tuple(
        MeasuredStrategy(*names.of(graph, topology), *others) for _, graph, topology, *others in rows
    )


def _costs(connection: duckdb.DuckDBPyConnection) -> Costs | None:
    chosen = connection.execute(
        "SELECT device_kind, environment FROM op_costs WHERE failure IS NULL "
        "GROUP BY ALL ORDER BY count(*) DESC, device_kind, environment LIMIT 1"
    ).fetchone()
    if chosen is None:
        return None
    rows = connection.execute(
        "SELECT target, phase, flops, bytes, median_s FROM op_costs "
        "WHERE failure IS NULL AND device_kind = ? AND environment = ? AND median_s > 0 "
        f"ORDER BY target, phase, flops, bytes, median_s LIMIT {COSTS_SHOWN}",
        list(chosen),
    ).fetchall()
    return Costs(str(chosen[0]), tuple(CostPoint(*row) for row in rows))
