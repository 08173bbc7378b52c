"""Predicted against measured times: DuckDB queries over the views."""

from __future__ import annotations

from dataclasses import dataclass, fields

from app.analytics.accuracy import Accuracy, accuracy_query
from app.analytics.duck import as_text, connect
from app.db.engine import Database
from app.db.records import is_restless
from graph.errors import UsageError


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One strategy on one topology under one training; None where there is no prediction or no finished run.

    `relative_error` is (predicted - measured median) / measured median; `relative_error_to_minimum` the same
    for the fastest step, `relative_error_undisturbed` for `measured_undisturbed_s`, the step without what other
    processes took of the cores (None where that was not counted), and `relative_error_at_usual_speed` for the mean step
    without that at the speed that costs are given at, where the cores had `measured_speed`. `measured_noise_s` is what
    repeating moves the median by (`app.analytics.accuracy`).
    Efficiencies and potentials are TicTac's E and S, those recorded the medians of the steps of a run with `--profile`.
    Speed-ups are over data parallelism on the same graph, topology and training. The shares say what part of the
    predicted time rests on measured costs, estimates and data sheets. `schedule`: None of a step in one batch.
    """

    model: str
    topology: str
    topology_devices: int
    topology_id: int
    graph_id: int
    batch_size: int
    precision: str
    optimizer: str
    batch_norm: str
    strategy: str
    source: str
    device_count: int
    predicted_s: float | None
    measured_median_s: float | None
    measured_minimum_s: float | None
    measured_noise_s: float | None
    predicted_throughput_samples_per_s: float | None
    measured_throughput_samples_per_s: float | None
    relative_error: float | None
    relative_error_to_minimum: float | None
    measured_undisturbed_s: float | None
    relative_error_undisturbed: float | None
    measured_speed: float | None
    measured_at_usual_speed_s: float | None
    relative_error_at_usual_speed: float | None
    predicted_scheduling_efficiency: float | None
    recorded_scheduling_efficiency: float | None
    predicted_speedup_potential: float | None
    recorded_speedup_potential: float | None
    predicted_speedup: float | None
    measured_speedup: float | None
    measured_share: float | None
    estimated_share: float | None
    datasheet_share: float | None
    feasible: bool | None
    executions: int
    micro_batches: int | None
    schedule: str | None

    @property
    def is_restless(self) -> bool:
        """True where other processes took so much of the cores, or their speed moved so, that the step says little."""
        return is_restless(self.measured_median_s, self.measured_undisturbed_s, self.measured_speed)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Strategies, and the accuracy of predictions network by network."""

    rows: tuple[ComparisonRow, ...]
    accuracy: tuple[Accuracy, ...]


_NAMES = [field.name for field in fields(ComparisonRow)]
_ACCURACY_NAMES = [field.name for field in fields(Accuracy)]

# A search is about its best strategy, what else was simulated in it, and the baselines that it is to beat.
_CHOSEN = """
SELECT *
FROM predicted_vs_measured AS pair
WHERE ($model::VARCHAR IS NULL OR model = $model)
  AND ($topology::VARCHAR IS NULL OR topology = $topology)
  AND ($search::BIGINT IS NULL OR EXISTS (
      FROM searches AS search
      WHERE search.id = $search
        AND search.graph_id = pair.graph_id
        AND search.topology_id = pair.topology_id
        AND search.training_id = pair.training_id
        AND (
            search.best_strategy_id = pair.strategy_id
            OR pair.source IN ('data-parallel', 'single-device', 'expert')
            OR pair.strategy_id IN (SELECT strategy_id FROM simulations WHERE search_id = $search)
        )
  ))
"""
_ROWS = f"""
SELECT {", ".join(_NAMES)}
FROM ({_CHOSEN})
LEFT JOIN (SELECT id AS strategy_id, micro_batches, schedule FROM strategies) USING (strategy_id)
JOIN (SELECT id AS topology_id, device_count AS topology_devices FROM topologies) USING (topology_id)
ORDER BY model, topology, topology_devices, topology_id, batch_size, precision, optimizer, batch_norm,
         training_id, graph_id, measured_median_s NULLS LAST, predicted_s NULLS LAST, strategy
"""
_ACCURACY = f"""
WITH chosen AS MATERIALIZED ({_CHOSEN})
SELECT {", ".join(_ACCURACY_NAMES)}
FROM ({accuracy_query("chosen")})
JOIN (SELECT id AS topology_id, device_count AS topology_devices FROM topologies) USING (topology_id)
ORDER BY model, topology, topology_devices, topology_id, batch_size, precision, optimizer, batch_norm,
         training_id, graph_id
"""


def compare(
    database: Database, model: str | None = None, topology: str | None = None, search: int | None = None
) -> Comparison:
    """Return predicted and measured step times of all strategies, or of one model, topology name or search.

    Rows come by model, topology and training, the fastest measured first, then the fastest predicted.

    Raises:
        UsageError: there is no such search.
        DatabaseError: DuckDB cannot read the database.
    """
    with connect(database) as connection:
        if search is not None:
            count = connection.execute("SELECT count(*) FROM searches WHERE id = ?", [search]).fetchone()
            if count == (0,):
                raise UsageError(
                    f"search {search}: is not in database {database.name}, must be; list them by: "
                    'app query "FROM searches"'
                )
        parameters = {"model": as_text(model), "topology": as_text(topology), "search": search}
        rows = connection.execute(_ROWS, parameters).fetchall()
        accuracy = connection.execute(_ACCURACY, parameters).fetchall()
    return Comparison(tuple(ComparisonRow(*row) for row in rows), tuple(Accuracy(*row) for row in accuracy))
