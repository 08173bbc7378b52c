"""The report of a run: predicted beside measured times and memory, and how its step was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from app.db.records import RunSpeed, is_restless
from app.services.predict.all_reduces import ShownAllReduce
from app.services.timeline.recorded_scheduling import RecordedScheduling, scheduling_json

if TYPE_CHECKING:
    from runtime.jobs.job import JobResult
    from runtime.jobs.verify import Deviation
    from search.simulate.scheduling import Scheduling


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device: the predicted and the measured peak of a step, and the peak of its process.

    See `docs/memory.md` for what is counted.
    """

    predicted: int
    measured: int
    process: int

    @property
    def relative_error(self) -> float:
        """(predicted - measured) / measured; 0 where nothing was there."""
        return (self.predicted - self.measured) / self.measured if self.measured else 0.0


@dataclass(frozen=True, slots=True)
class RunReport:
    """A finished run, with its `result` as the ranks gave it. `deviations`: the worst first; None if not asked for.

    `failure` says in one line why the run is not verified, where it was asked for and is not. `memory` is by device;
    empty where it was not measured. `memory_account`: what its prediction is, "walk" or "sum" (`docs/memory.md`).
    `recomputed`, `compiled`: the first and the last operator of each group that was made again in the backward, and of
    each stretch that was compiled. `all_reduces`: those that were not the library's alone. `synchronization`: in which
    pieces and in which order gradients were summed, where not as by default. `scheduling`: as predicted;
    `recorded_scheduling`: of the recorded steps, where there are any. `micro_batches`: of `micro_batch_report`.
    """

    execution_id: int
    strategy_id: int
    strategy_digest: str
    model: str
    devices: int
    batch_size: int
    result: JobResult
    throughput: float
    predicted_s: float
    scheduling: Scheduling
    deviations: tuple[Deviation, ...] | None
    failure: str | None
    memory: tuple[DeviceMemory, ...]
    memory_account: str
    recomputed: tuple[tuple[str, str], ...] = ()
    compiled: tuple[tuple[str, str], ...] = ()
    all_reduces: tuple[ShownAllReduce, ...] = ()
    synchronization: Mapping[str, Any] = field(default_factory=dict)
    recorded_scheduling: RecordedScheduling | None = None
    micro_batches: Mapping[str, Any] = field(default_factory=dict)
    speed: RunSpeed | None = None

    @property
    def relative_error(self) -> float:
        """(predicted - measured median) / measured median."""
        return (self.predicted_s - self.result.median_s) / self.result.median_s

    @property
    def is_restless(self) -> bool:
        """True where other processes took so much of the cores, or their speed moved so, that the step says little."""
        speed = None if self.speed is None else self.speed.speed
        return is_restless(self.result.median_s, self.result.undisturbed_s, speed)

    @property
    def at_usual_speed_s(self) -> float | None:
        """The mean step without what others took, at the speed that costs are given at; None: not known.

        The mean, as the speed is that of the whole run.
        """
        if self.speed is None:
            return None
        lost_s = self.result.most_lost_s
        return (fmean(self.result.step_times_s) - (fmean(lost_s) if lost_s else 0.0)) / self.speed.slowdown

    @property
    def relative_error_at_usual_speed(self) -> float | None:
        """(predicted - that step) / that step; None: not known."""
        step_s = self.at_usual_speed_s
        return None if not step_s else (self.predicted_s - step_s) / step_s

    @property
    def fullest(self) -> int | None:
        """The device whose step took most memory, None where that was not measured."""
        return max(range(len(self.memory)), key=lambda device: self.memory[device].measured, default=None)

    @property
    def verified(self) -> bool:
        """True where the run was verified, and every deviation is within its allowed one."""
        return self.deviations is not None and self.failure is None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "execution": self.execution_id,
            "strategy": self.strategy_id,
            "digest": self.strategy_digest,
            "model": self.model,
            "devices": self.devices,
            "batch_size": self.batch_size,
            "step_times_s": list(self.result.step_times_s),
            "minimum_s": self.result.minimum_s,
            "median_s": self.result.median_s,
            "throughput_samples_per_s": self.throughput,
            "predicted_step_time_s": self.predicted_s,
            "relative_error": self.relative_error,
            "undisturbed_s": self.result.undisturbed_s,
            "speed": None if self.speed is None else self.speed.speed,
            "slowdown": None if self.speed is None else self.speed.slowdown,
            "at_usual_speed_s": self.at_usual_speed_s,
            "relative_error_at_usual_speed": self.relative_error_at_usual_speed,
            **scheduling_json(self.scheduling, self.recorded_scheduling),
            "losses": [self.result.losses[0], self.result.losses[-1]],
            "recomputed": [list(pair) for pair in self.recomputed],
            "compiled": [list(pair) for pair in self.compiled],
            "all_reduces": [asdict(entry) for entry in self.all_reduces],
            "synchronization": dict(self.synchronization),
            "micro_batches": dict(self.micro_batches),
            "memory_account": self.memory_account,
            "memory": [
                {
                    "device": device,
                    "predicted_peak_bytes": memory.predicted,
                    "measured_peak_bytes": memory.measured,
                    "relative_error": memory.relative_error,
                    "process_bytes": memory.process,
                }
                for device, memory in enumerate(self.memory)
            ],
            "deviations": None
            if self.deviations is None
            else [
                {
                    "what": d.what,
                    "name": d.name,
                    "absolute": d.largest,
                    "relative": d.relative,
                    "allowed": d.allowed,
                    "ok": d.ok,
                }
                for d in self.deviations
            ],
            "verified": None if self.deviations is None else self.verified,
            "failure": self.failure,
        }
