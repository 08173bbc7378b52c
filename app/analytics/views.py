"""The views of the analysis, in DuckDB's SQL, over the attached database `store`."""

from __future__ import annotations

from app.analytics.accuracy import accuracy_query
from app.analytics.decoding import PROPOSAL_DEVICES
from app.db.recordings import DIGITS
from app.db.records import TraceKind

TRACE_VIEWS: dict[str, TraceKind] = {
    "proposals": "proposals",
    "proposal_configurations": "configurations",
    "proposal_starts": "starts",
}
"""The kind of chunk that each view of the traces reads."""

_OP_COSTS = """
SELECT kind.name AS device_kind, environment.fingerprint AS environment, signature.target, cost.phase,
       cost.minimum_s, cost.p10_s, cost.median_s, cost.sample_count, cost.samples_s, cost.peak_bytes,
       cost.failure, cost.launch_s, cost.clock_hz, cost.throttle, cost.reference_s, cost.speed, cost.measured_at,
       signature.flops, signature.bytes, signature.key, signature.digest AS signature
FROM store.op_costs AS cost
JOIN store.op_signatures AS signature ON signature.id = cost.signature_id
JOIN store.device_kinds AS kind ON kind.id = cost.device_kind_id
JOIN store.environments AS environment ON environment.id = cost.environment_id
"""

_LINK_COSTS = """
SELECT kind.name AS device_kind, environment.fingerprint AS environment, cost.pattern, cost.group_size,
       cost.size_bytes, cost.minimum_s, cost.median_s, cost.sample_count, cost.samples_s, cost.measured_at,
       fit.latency_s, fit.bandwidth_bytes_per_s, fit.contention_factor, fit.residual
FROM store.link_costs AS cost
JOIN store.device_kinds AS kind ON kind.id = cost.device_kind_id
JOIN store.environments AS environment ON environment.id = cost.environment_id
LEFT JOIN store.link_fits AS fit
    ON fit.device_kind_id = cost.device_kind_id AND fit.environment_id = cost.environment_id
    AND fit.pattern = cost.pattern AND fit.group_size = cost.group_size
"""

_GRAPHS = """
SELECT graph.id, graph.name AS model, graph.digest, graph.operator_count, graph.parameter_count, graph.flops,
       graph.model AS import_options
FROM store.graphs AS graph
"""

# The position is what `proposals.operator` means.
_OPERATORS = """
WITH parts AS (
    SELECT graph.id AS graph_id, graph.name AS model,
           unnest(json_extract(graph.document, '$.operators[*]')) AS part,
           generate_subscripts(json_extract(graph.document, '$.operators[*]'), 1) - 1 AS position
    FROM store.graphs AS graph
)
SELECT graph_id, model, position, part->>'$.name' AS operator, part->>'$.target' AS target,
       list_transform(json_extract(part, '$.axes[*]'), lambda axis: axis->>'$[0]') AS axes
FROM parts
"""

_TOPOLOGIES = """
SELECT topology.id, topology.name AS topology, topology.digest, topology.device_count, topology.document
FROM store.topologies AS topology
"""

# What is said of a training wherever one is.
_OF_TRAINING = """training.batch_size, json_extract_string(training.document, '$.precision') AS precision,
       json_extract_string(training.document, '$.optimizer') AS optimizer,
       json_extract_string(training.document, '$.batch_norm') AS batch_norm"""

_TRAININGS = f"""
SELECT training.id, training.digest, {_OF_TRAINING}, training.document
FROM store.trainings AS training
"""

_DEVICE_KINDS = """
SELECT kind.id, kind.name AS device_kind, kind.processor, kind.memory_bytes, kind.description
FROM store.device_kinds AS kind
"""

_ENVIRONMENTS = """
SELECT environment.id, environment.fingerprint AS environment,
       json_extract_string(environment.facts, '$.torch') AS torch, environment.facts, environment.created_at
FROM store.environments AS environment
"""

_SEARCHES = f"""
SELECT search.id, graph.name AS model, topology.name AS topology, {_OF_TRAINING},
       search.algorithm, search.seed, search.options, search.status, search.proposals, search.accepted,
       search.initial_time_s, search.best_time_s, search.initial_time_s / search.best_time_s AS gain,
       search.lower_bound_s,
       search.best_time_s / search.lower_bound_s - 1 AS gap, best.digest AS best_strategy,
       search.started_at, search.finished_at, search.graph_id, search.topology_id, search.training_id,
       search.best_strategy_id
FROM store.searches AS search
JOIN store.graphs AS graph ON graph.id = search.graph_id
JOIN store.topologies AS topology ON topology.id = search.topology_id
JOIN store.trainings AS training ON training.id = search.training_id
LEFT JOIN store.strategies AS best ON best.id = search.best_strategy_id
"""

# A document that is damaged has no micro-batches to show.
_STRATEGIES = """
SELECT strategy.id, strategy.digest, graph.name AS model, strategy.source, strategy.device_count,
       CASE WHEN json_valid(strategy.document)
            THEN coalesce(TRY_CAST(json_extract_string(strategy.document, '$.micro_batches.count') AS INTEGER), 1)
       END AS micro_batches,
       CASE WHEN json_valid(strategy.document)
            THEN json_extract_string(strategy.document, '$.micro_batches.schedule')
       END AS schedule,
       strategy.created_at, strategy.document, strategy.graph_id
FROM store.strategies AS strategy
JOIN store.graphs AS graph ON graph.id = strategy.graph_id
"""

# What simulations and executions share: the names behind their numbers.
_RUN_NAMES = f"""graph.name AS model, strategy.digest AS strategy, strategy.source, topology.name AS topology,
       {_OF_TRAINING}"""
_RUN_JOINS = """
JOIN store.strategies AS strategy ON strategy.id = run.strategy_id
JOIN store.graphs AS graph ON graph.id = strategy.graph_id
JOIN store.topologies AS topology ON topology.id = run.topology_id
JOIN store.trainings AS training ON training.id = run.training_id
"""

_SIMULATIONS = f"""
SELECT run.id, {_RUN_NAMES}, run.task_order, run.step_time_s,
       training.batch_size / run.step_time_s AS throughput_samples_per_s, run.measured_share,
       run.estimated_share, run.datasheet_share, run.compute_s, run.communication_bytes, run.peak_bytes,
       run.feasible::BOOLEAN AS feasible, run.scheduling_efficiency, run.speedup_potential, run.cost_digest,
       run.created_at, run.strategy_id, run.topology_id, run.training_id, run.search_id
FROM store.simulations AS run {_RUN_JOINS}
"""

_EXECUTIONS = f"""
SELECT run.id, {_RUN_NAMES}, run.status, run.iterations, run.minimum_s, run.median_s, run.mean_s,
       run.throughput_samples_per_s, run.step_times_s, run.failure, run.largest_deviation,
       run.peak_bytes, run.process_bytes, run.lost_s, run.undisturbed_s,
       run.speed, run.slowdown,
       environment.fingerprint AS environment, run.created_at, run.finished_at, run.strategy_id,
       run.topology_id, run.training_id
FROM store.executions AS run {_RUN_JOINS}
JOIN store.environments AS environment ON environment.id = run.environment_id
"""

# Of each file's list of steps (`app.db.recordings`), whose name says which execution it is of.
_RECORDED_STEPS = f"""
WITH parts AS (
    SELECT name, unnest(json_extract(scheduling, '$[*]')) AS part,
           generate_subscripts(json_extract(scheduling, '$[*]'), 1) - 1 AS step
    FROM recordings
    WHERE json_valid(scheduling)
)
SELECT run.id AS execution, {_RUN_NAMES}, parts.step,
       TRY_CAST(part->>'$.step_s' AS DOUBLE) AS step_s, TRY_CAST(part->>'$.busiest_s' AS DOUBLE) AS busiest_s,
       TRY_CAST(part->>'$.total_s' AS DOUBLE) AS total_s,
       TRY_CAST(part->>'$.scheduling_efficiency' AS DOUBLE) AS scheduling_efficiency,
       TRY_CAST(part->>'$.speedup_potential' AS DOUBLE) AS speedup_potential, run.strategy_id, run.topology_id,
       run.training_id
FROM store.executions AS run {_RUN_JOINS}
JOIN parts ON parts.name = printf('execution-%06d-%s.parquet', run.id, strategy.digest[:{DIGITS}])
"""

_TRACES = """
SELECT trace.search_id AS search, trace.kind, trace.path, trace.rows, trace.created_at,
       trace.path IN (SELECT path FROM present_chunks) AS present
FROM store.traces AS trace
"""

# One row a strategy, topology and training: the newest prediction (in program order, the runtime's, where
# there is one) beside the newest finished run. Errors are of the prediction, relative to what was measured.
# Speed-ups are over data parallelism on the same graph, topology and training.
_PREDICTED_VS_MEASURED = f"""
WITH predicted AS (
    SELECT *
    FROM store.simulations
    QUALIFY row_number() OVER (
        PARTITION BY strategy_id, topology_id, training_id
        ORDER BY task_order = 'program' DESC, created_at DESC, id DESC
    ) = 1
),
measured AS (
    SELECT id, strategy_id, topology_id, training_id, median_s, minimum_s, undisturbed_s, speed,
           (mean_s - coalesce(list_aggregate(lost_s::DOUBLE[], 'avg'), 0)) / coalesce(slowdown, 1 / speed)
               AS at_usual_speed_s,
           count(*) OVER alike AS executions,
           greatest(
               list_aggregate(step_times_s::DOUBLE[], 'quantile_cont', 0.75)
               - list_aggregate(step_times_s::DOUBLE[], 'quantile_cont', 0.25),
               max(median_s) OVER alike - min(median_s) OVER alike
           ) / 2 AS noise_s
    FROM store.executions
    WHERE status = 'finished'
    WINDOW alike AS (PARTITION BY strategy_id, topology_id, training_id)
    QUALIFY row_number() OVER (
        PARTITION BY strategy_id, topology_id, training_id ORDER BY created_at DESC, id DESC
    ) = 1
),
recorded AS (
    SELECT execution AS id, median(scheduling_efficiency) AS efficiency, median(speedup_potential) AS potential
    FROM recorded_steps
    GROUP BY execution
),
run AS (
    SELECT strategy_id, topology_id, training_id, predicted.step_time_s AS predicted_s,
           measured.median_s AS measured_median_s, measured.minimum_s AS measured_minimum_s,
           measured.noise_s AS measured_noise_s, measured.undisturbed_s AS measured_undisturbed_s,
           measured.speed AS measured_speed,
           measured.at_usual_speed_s AS measured_at_usual_speed_s,
           predicted.scheduling_efficiency AS predicted_scheduling_efficiency,
           recorded.efficiency AS recorded_scheduling_efficiency,
           predicted.speedup_potential AS predicted_speedup_potential,
           recorded.potential AS recorded_speedup_potential,
           coalesce(measured.executions, 0) AS executions, predicted.feasible::BOOLEAN AS feasible,
           predicted.task_order, predicted.measured_share, predicted.estimated_share, predicted.datasheet_share
    FROM predicted
    FULL JOIN measured USING (strategy_id, topology_id, training_id)
    LEFT JOIN recorded ON recorded.id = measured.id
)
SELECT {_RUN_NAMES}, run.predicted_s, run.measured_median_s, run.measured_minimum_s,
       training.batch_size / run.predicted_s AS predicted_throughput_samples_per_s,
       training.batch_size / run.measured_median_s AS measured_throughput_samples_per_s,
       (run.predicted_s - run.measured_median_s) / run.measured_median_s AS relative_error,
       (run.predicted_s - run.measured_minimum_s) / run.measured_minimum_s AS relative_error_to_minimum,
       run.measured_undisturbed_s,
       (run.predicted_s - run.measured_undisturbed_s) / run.measured_undisturbed_s AS relative_error_undisturbed,
       run.measured_speed, run.measured_at_usual_speed_s,
       (run.predicted_s - run.measured_at_usual_speed_s) / run.measured_at_usual_speed_s
           AS relative_error_at_usual_speed,
       run.predicted_scheduling_efficiency, run.recorded_scheduling_efficiency,
       run.predicted_speedup_potential, run.recorded_speedup_potential,
       max(CASE WHEN strategy.source = 'data-parallel' THEN run.predicted_s END) OVER alike
           / run.predicted_s AS predicted_speedup,
       max(CASE WHEN strategy.source = 'data-parallel' THEN run.measured_median_s END) OVER alike
           / run.measured_median_s AS measured_speedup,
       run.measured_share, run.estimated_share, run.datasheet_share, run.feasible, run.task_order,
       run.executions, run.measured_noise_s, strategy.device_count, strategy.graph_id, run.strategy_id,
       run.topology_id, run.training_id
FROM run {_RUN_JOINS}
WINDOW alike AS (PARTITION BY strategy.graph_id, run.topology_id, run.training_id)
"""

# One row a graph, topology and training: the fastest strategy by prediction, and the one by measurement.
_BEST_PER_MODEL = """
SELECT model, topology, batch_size, precision, optimizer, batch_norm, max(micro_batches) AS micro_batches,
       arg_min(strategy, predicted_s) FILTER (feasible) AS best_predicted_strategy,
       min(predicted_s) FILTER (feasible) AS best_predicted_s,
       max(predicted_speedup) FILTER (feasible) AS predicted_speedup,
       arg_min(strategy, measured_median_s) AS best_measured_strategy,
       min(measured_median_s) AS best_measured_median_s,
       max(measured_speedup) AS measured_speedup,
       count(*) AS strategies, graph_id, topology_id, training_id
FROM predicted_vs_measured
JOIN (SELECT id AS strategy_id, micro_batches FROM strategies) USING (strategy_id)
GROUP BY model, topology, batch_size, precision, optimizer, batch_norm, graph_id, topology_id, training_id
"""

VIEWS = {
    "device_kinds": _DEVICE_KINDS,
    "environments": _ENVIRONMENTS,
    "op_costs": _OP_COSTS,
    "link_costs": _LINK_COSTS,
    "graphs": _GRAPHS,
    "operators": _OPERATORS,
    "topologies": _TOPOLOGIES,
    "trainings": _TRAININGS,
    "searches": _SEARCHES,
    "strategies": _STRATEGIES,
    "simulations": _SIMULATIONS,
    "executions": _EXECUTIONS,
    "recorded_steps": _RECORDED_STEPS,
    "traces": _TRACES,
    "proposal_devices": PROPOSAL_DEVICES,
    "predicted_vs_measured": _PREDICTED_VS_MEASURED,
    "prediction_accuracy": accuracy_query("predicted_vs_measured"),
    "best_per_model": _BEST_PER_MODEL,
}
"""The views by name, in an order in which each may use those before it."""
