"""The views of the analysis, column by column, for `app query --views` and docs/database.md.

Units stand in the names: `_s` seconds, `_ns` nanoseconds, `_bytes` bytes. Moments are UTC.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ViewText:
    """The meaning of a view's row, and of each column in the view's order."""

    row: str
    columns: dict[str, str]


# Columns that mean the same wherever they are.
_KIND = {"device_kind": "name of the device kind"}
_ENVIRONMENT = {"environment": "fingerprint of hardware and software, see environments"}
_MODEL = {"model": "name of the network, with its preset where that is not the paper's"}
_TOPOLOGY = {"topology": "name of the topology"}
_TRAINING = {
    "batch_size": "samples a step, over all devices",
    "precision": "number format",
    "optimizer": "sgd, momentum or adam",
    "batch_norm": "synchronized (statistics of the whole batch) or local (of each part)",
}
_SETTING = {**_MODEL, **_TOPOLOGY, **_TRAINING}
_PARTS = {
    "micro_batches": "in how many parts a step goes through its batch; NULL: all strategies are damaged"
}
_SOURCE = {
    "source": "where it came from: a kind of baseline (data-parallel, megatron, ...), search or import"
}
_RUN = {**_MODEL, "strategy": "digest of the strategy", **_SOURCE, **_TOPOLOGY, **_TRAINING}
_GRAPH_ID = {"graph_id": "the graph, see graphs"}
_STRATEGY_ID = {"strategy_id": "the strategy, see strategies"}
_SETTING_IDS = {"topology_id": "the topology, see topologies", "training_id": "the training, see trainings"}
_SAMPLES = {"sample_count": "number of samples", "samples_s": "all raw samples, as a JSON list"}
_MEASURED_AT = {"measured_at": "when it was measured"}
_CREATED_AT = {"created_at": "when it was stored"}
_SHARES = {
    "measured_share": "part of the predicted busy time that rests on measured costs",
    "estimated_share": "part that rests on estimates fitted to measurements",
    "datasheet_share": "part that rests on data sheets alone",
}
_FEASIBLE = {"feasible": "whether every device's memory suffices"}
_ORDER = {
    "task_order": "order of tasks on a resource: program (the runtime's own), fifo, or communications by priority: "
    "priority (as P3), priority-tic or priority-tac"
}
_OPERATOR = {"operator": "position of the operator, see operators"}
_SEARCH = {"search": "the search, see searches"}

CATALOG: dict[str, ViewText] = {
    "device_kinds": ViewText(
        "one kind of device",
        {
            "id": "number of the row",
            **_KIND,
            "processor": "cpu or the GPU's name as the driver gives it",
            "memory_bytes": "memory of one device",
            "description": "what else is known of it, as JSON",
        },
    ),
    "environments": ViewText(
        "hardware and software that measurements were made with",
        {
            "id": "number of the row",
            "environment": "its fingerprint: sha256 of the facts",
            "torch": "PyTorch's version",
            "facts": "processor, cores, driver, versions, threads and clock limits, as JSON",
            **_CREATED_AT,
        },
    ),
    "op_costs": ViewText(
        "the measured cost of one phase of one local call on one kind of device in one environment",
        {
            **_KIND,
            **_ENVIRONMENT,
            "target": "type of the operator",
            "phase": "forward, backward or update",
            "minimum_s": "fastest sample",
            "p10_s": "10th percentile of the samples",
            "median_s": "median of the samples; times speed, where that is known, it is what predictions use",
            **_SAMPLES,
            "peak_bytes": "peak memory while it ran",
            "failure": "why it could not be measured; the times are then NULL",
            "launch_s": "what the host takes to issue the call, where the device computes apart from it",
            "clock_hz": "median clock of the device meanwhile, where the driver tells",
            "throttle": "what slowed the clock meanwhile, where the driver tells",
            "reference_s": "what the reference kernel took of late on the same core; NULL: not measured, on GPUs",
            "speed": "reference_s of the first cost of the device kind and environment, over this one's",
            **_MEASURED_AT,
            "flops": "operations of one forward",
            "bytes": "bytes that one forward reads and writes",
            "key": "the whole call: target, arguments, shapes, dtypes, as JSON",
            "signature": "digest of the key",
        },
    ),
    "link_costs": ViewText(
        "the measured time of one pattern of communication at one size",
        {
            **_KIND,
            **_ENVIRONMENT,
            "pattern": "p2p or a collective; with devices (all_reduce 4-7) where a size has several groups; contention",
            "group_size": "processes that take part",
            "size_bytes": "bytes of the message",
            "minimum_s": "fastest sample",
            "median_s": "median of the samples; what predictions use",
            **_SAMPLES,
            **_MEASURED_AT,
            "latency_s": "fitted to all sizes of the pattern: time = latency + bytes / bandwidth",
            "bandwidth_bytes_per_s": "fitted likewise",
            "contention_factor": "seconds of computing that one second of communication beside it costs",
            "residual": "mean absolute relative error of that line over the sizes",
        },
    ),
    "graphs": ViewText(
        "one operator graph: a network at one batch size and with one choice of sizes",
        {
            "id": "number of the row",
            **_MODEL,
            "digest": "digest of the graph",
            "operator_count": "number of operators",
            "parameter_count": "number of trained weights",
            "flops": "operations of one forward",
            "import_options": "what imports the network again, as JSON",
        },
    ),
    "operators": ViewText(
        "one operator of one graph",
        {
            **_GRAPH_ID,
            **_MODEL,
            "position": "its number, in topological order from 0; what proposals.operator means",
            "operator": "its name",
            "target": "its type",
            "axes": "names of the axes that it can be split along, replica last; the order of degrees",
        },
    ),
    "topologies": ViewText(
        "one device topology",
        {
            "id": "number of the row",
            **_TOPOLOGY,
            "digest": "digest of the topology",
            "device_count": "number of devices",
            "document": "kinds, devices, links and routes, as JSON",
        },
    ),
    "trainings": ViewText(
        "one description of a training step",
        {
            "id": "number of the row",
            "digest": "digest of the training",
            **_TRAINING,
            "document": "all of it, as JSON",
        },
    ),
    "searches": ViewText(
        "one search",
        {
            "id": "number of the row; what proposals.search means",
            **_SETTING,
            "algorithm": "names of its algorithms, joined by commas; see docs/algorithms.md",
            "seed": "seed of its random numbers",
            "options": "its options, as JSON",
            "status": "running, finished, interrupted or failed",
            "proposals": "proposals made",
            "accepted": "proposals accepted",
            "initial_time_s": "simulated step time at the start of the first chain",
            "best_time_s": "simulated step time of the best strategy",
            "gain": "initial_time_s / best_time_s",
            "lower_bound_s": "a step time that no strategy of the search's space is below",
            "gap": "best_time_s / lower_bound_s - 1: how far the best strategy is from the best possible at most",
            "best_strategy": "digest of the best strategy",
            "started_at": "when it began",
            "finished_at": "when it ended; NULL while it runs, or if it was killed",
            **_GRAPH_ID,
            **_SETTING_IDS,
            "best_strategy_id": _STRATEGY_ID["strategy_id"],
        },
    ),
    "strategies": ViewText(
        "one strategy for one graph",
        {
            "id": "number of the row; app strategy and app run take it",
            "digest": "digest of the strategy",
            **_MODEL,
            **_SOURCE,
            "device_count": "devices that it was made for",
            "micro_batches": "in how many parts a step goes through its batch; graph_id is the graph of one",
            "schedule": "gpipe, 1f1b, interleaved, zero-bubble or actors (docs/pipelines.md); NULL if in one batch",
            **_CREATED_AT,
            "document": "degrees and devices of every operator, as JSON",
            **_GRAPH_ID,
        },
    ),
    "simulations": ViewText(
        "the predicted step of one strategy on one topology, under one training and one set of costs",
        {
            "id": "number of the row",
            **_RUN,
            **_ORDER,
            "step_time_s": "predicted time of one step",
            "throughput_samples_per_s": "batch_size / step_time_s",
            **_SHARES,
            "compute_s": "computation, summed over the devices",
            "communication_bytes": "bytes moved in one step",
            "peak_bytes": "predicted peak memory of each device, as a JSON list",
            **_FEASIBLE,
            "scheduling_efficiency": "TicTac's E: the share of what a good order can save that is saved; NULL: unknown",
            "speedup_potential": "TicTac's S: what running side by side saves at most, over the least; NULL: unknown",
            "cost_digest": "digest of the costs that the prediction rests on",
            **_CREATED_AT,
            **_STRATEGY_ID,
            **_SETTING_IDS,
            "search_id": "the search that stored it, see searches; NULL if none did",
        },
    ),
    "executions": ViewText(
        "one real run of a strategy",
        {
            "id": "number of the row",
            **_RUN,
            "status": "running, finished, interrupted or failed",
            "iterations": "steps that were timed",
            "minimum_s": "fastest step",
            "median_s": "median step",
            "mean_s": "mean step",
            "throughput_samples_per_s": "batch_size / median_s",
            "step_times_s": "all steps, as a JSON list",
            "failure": "why it failed",
            "largest_deviation": "largest relative difference to one device; NULL if it was not verified",
            "peak_bytes": "what the tensors of a step take on each device at most, as a JSON list; NULL: not measured",
            "process_bytes": "what each device's process has held at most, as a JSON list; NULL: not measured",
            "lost_s": "the most seconds that other processes took from a rank, of each step, as a JSON list",
            "undisturbed_s": "the step without what other processes took of the cores; NULL: not counted",
            "speed": "speed of the cores, where 1 is the one that costs are given at; NULL: not known",
            "slowdown": "how many times as long the predicted step takes at that speed; NULL: not known",
            **_ENVIRONMENT,
            "created_at": "when it began",
            "finished_at": "when it ended",
            **_STRATEGY_ID,
            **_SETTING_IDS,
        },
    ),
    "recorded_steps": ViewText(
        "one recorded step of a run (app run --profile), with TicTac's measures of its schedule",
        {
            "execution": "the run, see executions",
            **_RUN,
            "step": "number of the recorded step",
            "step_s": "how long it took; recording makes it longer than others",
            "busiest_s": "the time of all operations of its busiest device or link",
            "total_s": "the time of all operations, and that in which nothing ran",
            "scheduling_efficiency": "(total_s - step_s) / (total_s - busiest_s), and 1 where these are equal",
            "speedup_potential": "(total_s - busiest_s) / busiest_s",
            **_STRATEGY_ID,
            **_SETTING_IDS,
        },
    ),
    "traces": ViewText(
        "one Parquet file of a search's proposals",
        {
            **_SEARCH,
            "kind": "proposals, configurations or starts",
            "path": "the file, relative to the database's folder",
            "rows": "rows in it",
            "created_at": "when it was registered",
            "present": "whether the file is there; proposals are of those that are",
        },
    ),
    "proposals": ViewText(
        "one proposal of a search: other configurations of one or more operators, and of those that follow them",
        {
            **_SEARCH,
            "chain": "number of the chain",
            "step": "number of the proposal in its chain",
            **_OPERATOR,
            "configuration": "code of what was proposed, see proposal_devices",
            "simulated_ns": "simulated step time; NULL where the simulation was cut",
            "bound_ns": "bound at which it was cut, because that sufficed to reject; NULL beside NULL: out of memory",
            "accepted": "whether the chain went there",
            "other_operators": "positions of further operators that it changes; NULL: none, or an older search",
            "other_configurations": "codes of what was proposed for these, in the same order",
        },
    ),
    "proposal_devices": ViewText(
        "the configuration that a code means in one search",
        {
            **_SEARCH,
            "configuration": "the code",
            "degrees": "a degree for each axis of the operator, see operators.axes",
            "devices": "the device of each task, in the order of the parts, those along the last axis side by side",
        },
    ),
    "proposal_configurations": ViewText(
        "how the trace keeps a configuration: degrees, and what the devices of the tasks were drawn or copied from",
        {
            **_SEARCH,
            "configuration": "the code",
            "family": "strided, permuted, copied or listed: which of the columns below say it",
            "device_count": "devices that the family counts on",
            "degrees": "a degree for each axis of the operator, see operators.axes",
            "start": "strided: the first device",
            "stride": "strided: from one device to the next",
            "seed": "permuted: seed of the permutation",
            "base": "copied: code of the configuration that it was copied from",
            "axes": "copied: along which axes of that",
            "devices": "listed: the device of each task",
        },
    ),
    "proposal_starts": ViewText(
        "the configuration of one operator at the start of one chain; operators that follow another are left out",
        {
            **_SEARCH,
            "chain": "number of the chain",
            "start": "what the chain started from: data-parallel, expert, ...",
            **_OPERATOR,
            "configuration": "its code, see proposal_devices",
        },
    ),
    "predicted_vs_measured": ViewText(
        "one strategy on one topology under one training: its newest prediction beside its newest finished run",
        {
            **_RUN,
            "predicted_s": "predicted time of one step (in program order, where there is one)",
            "measured_median_s": "median step of the newest finished run",
            "measured_minimum_s": "its fastest step",
            "predicted_throughput_samples_per_s": "batch_size / predicted_s",
            "measured_throughput_samples_per_s": "batch_size / measured_median_s",
            "relative_error": "(predicted_s - measured_median_s) / measured_median_s",
            "relative_error_to_minimum": "the same for the fastest step",
            "measured_undisturbed_s": "its step without what other processes took of the cores; NULL: not counted",
            "relative_error_undisturbed": "the same for that",
            "measured_speed": "speed of the cores, where 1 is the one that costs are given at; NULL: not known",
            "measured_at_usual_speed_s": "its mean step without what others took, at the speed that costs are given at",
            "relative_error_at_usual_speed": "the same for that",
            "predicted_scheduling_efficiency": "TicTac's E of the prediction; NULL: not stored",
            "recorded_scheduling_efficiency": "median E of the run's recorded steps; NULL: none",
            "predicted_speedup_potential": "TicTac's S of the prediction; NULL: not stored",
            "recorded_speedup_potential": "median S of the run's recorded steps; NULL: none",
            "predicted_speedup": "over data parallelism on the same graph, topology and training",
            "measured_speedup": "likewise, as measured",
            **_SHARES,
            **_FEASIBLE,
            **_ORDER,
            "executions": "finished runs",
            "measured_noise_s": "by how much repeating moves measured_median_s: half the interquartile range of the "
            "steps, or half the range of the medians of all finished runs, if that is more",
            "device_count": "devices that the strategy was made for",
            **_GRAPH_ID,
            **_STRATEGY_ID,
            **_SETTING_IDS,
        },
    ),
    "prediction_accuracy": ViewText(
        "how good predictions are for one graph on one topology under one training, over strategies that were run",
        {
            **_SETTING,
            **_PARTS,
            "strategies": "strategies with a prediction and a finished run",
            "mean_error": "mean of |predicted - measured median| / measured median",
            "median_error": "median of the same",
            "p95_error": "95th percentile of the same",
            "worst_error": "largest of the same",
            "bias": "mean error with its sign; below 0: predictions are too short",
            "noise": "median of measured_noise_s / measured_median_s, see predicted_vs_measured",
            "pairs": "pairs of strategies whose measured times differ by more than their noise",
            "agreeing_pairs": "those that predictions order as measured",
            "opposite_pairs": "those that predictions order the other way",
            "kendall_tau": "(agreeing_pairs - opposite_pairs) / pairs; NULL without a pair",
            "loss_of_choice": "how much longer the strategy of the lowest prediction takes than the fastest one",
            **_GRAPH_ID,
            **_SETTING_IDS,
        },
    ),
    "best_per_model": ViewText(
        "one graph on one topology under one training: the best that is known",
        {
            **_SETTING,
            **_PARTS,
            "best_predicted_strategy": "digest of the feasible strategy of the lowest prediction",
            "best_predicted_s": "its predicted step",
            "predicted_speedup": "the largest predicted speed-up over data parallelism in as many micro-batches",
            "best_measured_strategy": "digest of the strategy of the fastest median step",
            "best_measured_median_s": "its median step",
            "measured_speedup": "the largest measured speed-up over data parallelism in as many micro-batches",
            "strategies": "strategies that were simulated or run",
            **_GRAPH_ID,
            **_SETTING_IDS,
        },
    ),
}
"""The views by name, in the order in which they are listed."""
