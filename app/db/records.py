"""The rows of the database as frozen dataclasses: what `Store` takes and returns.

Conventions: times are float seconds, sizes are bytes, moments are timezone-aware UTC. `id` is 0 in a record
that was not read from the database; every `put_...` method of the store returns the id of the row. Texts
named `document` and `key` are canonical JSON (`graph.canonical`) and are stored unchanged; mappings are
stored as canonical JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, get_args

from graph.calls import CostPhase
from graph.canonical import digest

SearchStatus = Literal["running", "finished", "interrupted", "failed"]
ExecutionStatus = Literal["running", "finished", "interrupted", "failed"]
TaskOrder = Literal["program", "fifo", "priority", "priority-tic", "priority-tac"]
"""Order of tasks on a resource in a simulation: the runtime's own, by ready time (FlexFlow, Algorithm 1), or
communications by priority of a policy, see `search.simulate.priorities`."""
TASK_ORDERS: tuple[TaskOrder, ...] = get_args(TaskOrder)

StrategySource = Literal[
    "data-parallel",
    "single-device",
    "expert",
    "megatron",
    "operator-placement",
    "stanza",
    "hugectr",
    "insightface",
    "zero",
    "fsdp",
    "mesh",
    "search",
    "import",
]
TraceKind = Literal["proposals", "configurations", "starts"]

DEEPEST_COPY = 8
"""A configuration that was copied from a copy ... of so many is written as a list of devices into the trace, so that
what a code means is found in a few steps."""


def utc_now() -> datetime:
    """Return the present moment, in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class DeviceKindRecord:
    """A kind of device that costs are measured on; `name` is its identity."""

    name: str
    processor: str
    memory_bytes: int
    description: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0


@dataclass(frozen=True, slots=True)
class EnvironmentRecord:
    """Hardware and software that a measurement depends on; no host name, so that like machines share costs.

    `facts`: processor model, core count, driver, CUDA, PyTorch, Python and operating system versions,
    threads, clock limits; values are JSON scalars, lists or mappings.
    """

    facts: Mapping[str, Any]
    created_at: datetime = field(default_factory=utc_now)
    id: int = 0

    @property
    def fingerprint(self) -> str:
        """The sha256 of the facts' canonical JSON: the environment's identity."""
        return digest(dict(self.facts))


@dataclass(frozen=True, slots=True)
class CostKeyRecord:
    """The cost key of a local call that is measured: operator type, every attribute, shapes and dtypes.

    `flops` and `bytes` are those of one forward execution.
    """

    digest: str
    target: str
    key: str
    flops: int
    bytes: int
    id: int = 0


@dataclass(frozen=True, slots=True)
class OpCostRecord:
    """The measured cost of one phase of one cost key, or the reason why it could not be measured.

    Either `failure` is None and the three times are numbers, or `failure` says why and they are None.
    `launch_s`: what the host takes to issue the call, where the device computes apart from it. `clock_hz`: the median
    clock of the device while it was measured. `throttle`: what slowed its clock meanwhile, "" for nothing. Each is None
    where nothing tells. `reference_s`: what the reference kernel took of late (`profiler.reference`); `speed`: that of
    the first cost of the device kind and environment over it, so that `speed * median_s` is what the call takes at one
    speed for all. Both are None where the kernel was not measured.
    """

    cost_key: CostKeyRecord
    phase: CostPhase
    minimum_s: float | None
    p10_s: float | None
    median_s: float | None
    samples_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    failure: str | None = None
    measured_at: datetime = field(default_factory=utc_now)
    launch_s: float | None = None
    clock_hz: float | None = None
    throttle: str | None = None
    reference_s: float | None = None
    speed: float | None = None
    device_kind_id: int = 0
    environment_id: int = 0
    id: int = 0

    @property
    def sample_count(self) -> int:
        """Number of raw samples."""
        return len(self.samples_s)


@dataclass(frozen=True, slots=True)
class LinkCostRecord:
    """The measured time of one communication pattern between processes on devices of one kind, at one size.

    `pattern` is a name such as "p2p" or "all_reduce"; `group_size` counts the processes that take part.
    """

    pattern: str
    group_size: int
    size_bytes: int
    minimum_s: float
    median_s: float
    samples_s: tuple[float, ...] = ()
    measured_at: datetime = field(default_factory=utc_now)
    device_kind_id: int = 0
    environment_id: int = 0
    id: int = 0

    @property
    def sample_count(self) -> int:
        """Number of raw samples."""
        return len(self.samples_s)


@dataclass(frozen=True, slots=True)
class LinkFitRecord:
    """The line that was fitted to the link costs of one pattern and group size.

    Time of a message = `latency_s` + bytes / `bandwidth_bytes_per_s`. `contention_factor` is how many
    seconds of computing one second of communication beside it costs (0: none), as in `graph.topology`. `residual` is
    the mean absolute relative error of the line over the sizes that it was fitted to. A value that was not determined
    is None.
    """

    pattern: str
    group_size: int
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    contention_factor: float | None = None
    measured_at: datetime = field(default_factory=utc_now)
    residual: float | None = None
    device_kind_id: int = 0
    environment_id: int = 0
    id: int = 0


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """An operator graph; `model` is what it was imported from: model name, preset, batch size, overrides."""

    digest: str
    name: str
    model: Mapping[str, Any]
    operator_count: int
    parameter_count: int
    flops: int
    document: str
    id: int = 0


@dataclass(frozen=True, slots=True)
class TopologyRecord:
    """A device topology."""

    digest: str
    name: str
    device_count: int
    document: str
    id: int = 0


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """A training description; `batch_size` turns its step times into samples per second."""

    digest: str
    batch_size: int
    document: str
    id: int = 0


@dataclass(frozen=True, slots=True)
class StrategyRecord:
    """A strategy for one graph; the same strategy found twice is one row and keeps its first `source`."""

    digest: str
    graph_id: int
    device_count: int
    document: str
    source: StrategySource
    created_at: datetime = field(default_factory=utc_now)
    id: int = 0


@dataclass(frozen=True, slots=True)
class SearchRecord:
    """A search. A new one needs the fields without a default; `Store.finish_search` fills in the rest.

    `trace_path` is the folder of its proposals' chunks, relative to the database's trace folder. `owner` is the
    process that runs it (`app.db.owners`), and `alive_at` when that last said that it lives.
    """

    graph_id: int
    topology_id: int
    training_id: int
    algorithm: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    status: SearchStatus = "running"
    proposals: int = 0
    accepted: int = 0
    initial_time_s: float | None = None
    best_time_s: float | None = None
    best_strategy_id: int | None = None
    trace_path: str | None = None
    started_at: datetime = field(default_factory=utc_now)
    finished_at: datetime | None = None
    owner: str | None = field(default=None, compare=False)
    alive_at: datetime | None = field(default=None, compare=False)
    lower_bound_s: float | None = None
    id: int = 0


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """How far a search came, for `Store.record_traces` and `Store.finish_search`."""

    proposals: int
    accepted: int
    initial_time_s: float | None
    best_time_s: float | None
    best_strategy_id: int | None = None
    lower_bound_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulationRecord:
    """The predicted step of one strategy under one set of costs, named by `cost_digest`.

    The three shares say what part of the predicted time rests on measured costs, on estimates and on data
    sheets; they add up to 1. `compute_s` is summed over the devices. `peak_bytes` has one entry a device.
    `feasible` is False when a device's memory does not hold the strategy. `scheduling_efficiency` and
    `speedup_potential` are TicTac's E and S (`search.simulate.scheduling`).
    """

    strategy_id: int
    topology_id: int
    training_id: int
    task_order: TaskOrder
    cost_digest: str
    step_time_s: float
    measured_share: float
    estimated_share: float
    datasheet_share: float
    compute_s: float
    communication_bytes: int
    peak_bytes: tuple[int, ...]
    feasible: bool = True
    search_id: int | None = None
    scheduling_efficiency: float | None = None
    speedup_potential: float | None = None
    created_at: datetime = field(default_factory=utc_now)
    id: int = 0


class RunSpeed(NamedTuple):
    """How fast the cores were during a run, as `ExecutionRecord` has it."""

    speed: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class ExecutionRecord:
    """A real run of a strategy. `Store.start_execution` needs the fields without a default.

    `largest_deviation` is the largest difference found by verification against one device; None if it was not
    asked for. `peak_bytes` and `process_bytes`, one entry a device: what a step's tensors take at most, and what the
    process that ran the device has held at most; None where it was not measured. `lost_s`, one entry a step: the most
    seconds that other processes took from one of its ranks; `undisturbed_s`: what a step would have taken without; None
    where the system does not count them. `speed`: that of the cores between the steps, as in `OpCostRecord`, and
    `slowdown`: how many times as long the predicted step takes at that speed, so that a step divided by it is what it
    takes at the speed that costs are given at; None where that is not known. `owner` and `alive_at` as in
    `SearchRecord`.
    """

    strategy_id: int
    topology_id: int
    training_id: int
    environment_id: int
    iterations: int
    status: ExecutionStatus = "running"
    step_times_s: tuple[float, ...] = ()
    minimum_s: float | None = None
    median_s: float | None = None
    mean_s: float | None = None
    throughput_samples_per_s: float | None = None
    failure: str | None = None
    largest_deviation: float | None = None
    peak_bytes: tuple[int, ...] | None = None
    process_bytes: tuple[int, ...] | None = None
    lost_s: tuple[float, ...] | None = None
    undisturbed_s: float | None = None
    speed: float | None = None
    slowdown: float | None = None
    created_at: datetime = field(default_factory=utc_now)
    finished_at: datetime | None = None
    owner: str | None = field(default=None, compare=False)
    alive_at: datetime | None = field(default=None, compare=False)
    id: int = 0


RESTLESS = 0.1


def is_restless(median_s: float | None, undisturbed_s: float | None, speed: float | None = None) -> bool:
    """Return whether a measured step says little: other processes took more than a tenth, or the cores' speed moved.

    speed: as in `ExecutionRecord`.
    """
    if speed is not None and abs(speed - 1) > RESTLESS:
        return True
    if median_s is None or undisturbed_s is None:
        return False
    return median_s - undisturbed_s > RESTLESS * median_s


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """A Parquet chunk of a search's trace; `path` is relative to the database's trace folder."""

    search_id: int
    kind: TraceKind
    path: str
    rows: int
    created_at: datetime = field(default_factory=utc_now)
    id: int = 0


@dataclass(frozen=True, slots=True)
class RankedStrategy:
    """A strategy with its newest simulation."""

    strategy: StrategyRecord
    simulation: SimulationRecord


@dataclass(frozen=True, slots=True)
class SearchedSetting:
    """A graph, topology and training for which a strategy is known, and what tells how near it is to others."""

    graph_id: int
    topology_id: int
    training_id: int
    graph_digest: str
    topology_digest: str
    training_digest: str
    topology: str
    device_count: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class OpCostMedian:
    """The median of an operator cost's samples, None where the measurement failed; `digest` names its cost key.

    At usual speed (`OpCostRecord.speed`). launch_s: as of `OpCostRecord`.
    """

    id: int
    digest: str
    phase: CostPhase
    median_s: float | None
    launch_s: float | None


@dataclass(frozen=True, slots=True)
class CostSummary:
    """The operator costs and link fits of one device kind in one environment: how many there are, and how old."""

    device_kind: DeviceKindRecord
    environment: EnvironmentRecord
    measured: int
    failed: int
    oldest: datetime
    newest: datetime
    link_fits: int = 0
