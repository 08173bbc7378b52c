"""How good predictions are: errors, Kendall's tau and what choosing by prediction costs, one DuckDB query.

The noise of a measured time is what repeating the measurement moves it by: half the interquartile range of the steps of
its newest run, or half the range of the medians of its finished runs, if that is more. Two strategies differ by more
than the noise where the intervals measured +- noise do not touch; tau counts such pairs alone, since the order of the
others is not known: (pairs in the predicted order - pairs in the opposite one) / all of them.

Source: M. G. Kendall, "A New Measure of Rank Correlation", Biometrika 30 (1938).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Predictions for one network: a graph on a topology under a training; over strategies that were run.

    Errors are |predicted - measured median| / measured median, `bias` is the mean with its sign; `noise` is relative to
    the measured time, its median over the strategies. `kendall_tau` is None without a pair that differs by more
    than the noise. `loss_of_choice` is how much longer the strategy of the lowest prediction takes than the fastest.
    """

    model: str
    topology: str
    topology_id: int
    graph_id: int
    batch_size: int
    precision: str
    optimizer: str
    batch_norm: str
    micro_batches: int | None
    strategies: int
    mean_error: float
    median_error: float
    p95_error: float
    worst_error: float
    bias: float
    noise: float
    pairs: int
    agreeing_pairs: int
    opposite_pairs: int
    kendall_tau: float | None
    loss_of_choice: float


def accuracy_query(pairs: str) -> str:
    """Return the query over a relation with the columns of the view predicted_vs_measured: a row a network."""
    return f"""
WITH both_known AS (
    SELECT * FROM {pairs}
    JOIN (SELECT id AS strategy_id, micro_batches FROM strategies) USING (strategy_id)
    WHERE predicted_s IS NOT NULL AND measured_median_s IS NOT NULL
),
errors AS (
    SELECT model, topology, batch_size, precision, optimizer, batch_norm, graph_id, topology_id, training_id,
           max(micro_batches) AS micro_batches, count(*) AS strategies,
           avg(abs(relative_error)) AS mean_error, median(abs(relative_error)) AS median_error,
           quantile_cont(abs(relative_error), 0.95) AS p95_error, max(abs(relative_error)) AS worst_error,
           avg(relative_error) AS bias, median(measured_noise_s / measured_median_s) AS noise,
           arg_min(measured_median_s, (predicted_s, strategy_id)) / min(measured_median_s) - 1 AS loss_of_choice
    FROM both_known
    GROUP BY model, topology, batch_size, precision, optimizer, batch_norm, graph_id, topology_id, training_id
),
ordered AS (
    SELECT one.graph_id, one.topology_id, one.training_id,
           sign(one.predicted_s - other.predicted_s) * sign(one.measured_median_s - other.measured_median_s) AS agrees
    FROM both_known AS one
    JOIN both_known AS other USING (graph_id, topology_id, training_id)
    WHERE one.strategy_id < other.strategy_id
      AND abs(one.measured_median_s - other.measured_median_s) > one.measured_noise_s + other.measured_noise_s
),
counted AS (
    SELECT graph_id, topology_id, training_id, count(*) AS pairs, count(*) FILTER (agrees > 0) AS agreeing_pairs,
           count(*) FILTER (agrees < 0) AS opposite_pairs
    FROM ordered
    GROUP BY graph_id, topology_id, training_id
)
SELECT model, topology, batch_size, precision, optimizer, batch_norm, micro_batches, strategies, mean_error,
       median_error, p95_error, worst_error, bias, noise, coalesce(pairs, 0) AS pairs,
       coalesce(agreeing_pairs, 0) AS agreeing_pairs,
       coalesce(opposite_pairs, 0) AS opposite_pairs,
       (agreeing_pairs - opposite_pairs)::DOUBLE / pairs AS kendall_tau, loss_of_choice,
       graph_id, topology_id, training_id
FROM errors LEFT JOIN counted USING (graph_id, topology_id, training_id)
"""
