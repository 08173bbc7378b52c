"""`app trace`: the timeline of a strategy's step, simulated and, if a run recorded it, measured, in one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.db.store import Store
from app.services.files import checked_target, replacing
from app.services.progress import Progress
from app.services.timeline.attribution import Attribution, attribute
from app.services.timeline.chrome import chrome_trace, write_trace
from app.services.timeline.simulated_step import SimulatedStep, step_of_execution, step_of_strategy
from app.services.timeline.store import Recording, find_recording, read_recording
from app.services.timeline.timeline import StepTimeline, simulated_timeline, with_waits
from graph.errors import UsageError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """The options of `app trace`: an execution, or a strategy (its id or digest) on a topology of some name."""

    execution: int | None
    strategy: str | None
    topology: str | None
    output: Path


@dataclass(frozen=True, slots=True)
class TraceReport:
    """A written trace. `attribution` is there where the step was measured too."""

    file: Path
    step: SimulatedStep
    execution_id: int | None
    events: int
    attribution: Attribution | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "file": str(self.file),
            "model": self.step.graph.name,
            "strategy": self.step.record.digest,
            "topology": self.step.topology.name,
            "devices": len(self.step.topology.devices),
            "execution": self.execution_id,
            "events": self.events,
            "simulated_step_time_s": self.step.simulation.step_time_s,
            "stored_prediction_s": self.step.stored_s,
            "scheduling_efficiency": self.step.simulation.efficiency,
            "speedup_potential": self.step.simulation.speedup_potential,
            "attribution": None if self.attribution is None else self.attribution.to_json(),
        }


def trace(request: TraceRequest, database: str | None, progress: Progress) -> TraceReport:
    """Simulate a stored strategy again and write its timeline, beside that of its newest profiled run.

    Raises:
        UsageError: nothing such is stored, or the file cannot be written.
        DatabaseError: there is no database, or no such execution.
    """
    if request.execution is None and request.strategy is None:
        raise UsageError(
            "app trace: needs --execution or --strategy, must have one of them; see app trace --help"
        )
    if request.execution is not None and (request.strategy, request.topology) != (None, None):
        raise UsageError(
            "--execution: is one run, must stand without --strategy and --topology; leave them out"
        )
    with Store.open(database, to_read=True) as store:
        target = checked_target(request.output, store.database, "--output")
        step, recording = _find(store, request, progress)
    attribution = None if recording is None else attribute(step.simulation, recording, step.stored_s)
    document = chrome_trace(timelines_of(step, recording), _facts(step, recording))
    with replacing(target, "--output") as temporary:
        write_trace(document, temporary)
    return TraceReport(
        file=request.output,
        step=step,
        execution_id=None if recording is None else recording.execution_id,
        events=sum(event["ph"] == "X" for event in document["traceEvents"]),
        attribution=attribution,
    )


def attribution_of(execution_id: int, database: str | None, progress: Progress) -> Attribution:
    """Return the attribution of a profiled run's prediction error.

    Raises:
        DatabaseError: there is no database, or no such execution.
        UsageError: it was not profiled.
    """
    with Store.open(database, to_read=True) as store:
        execution = store.execution(execution_id)
        recording = read_recording(store, execution)
        step = step_of_execution(store, execution, progress)
        return attribute(step.simulation, recording, step.stored_s)


def _find(store: Store, request: TraceRequest, progress: Progress) -> tuple[SimulatedStep, Recording | None]:
    if request.execution is not None:
        execution = store.execution(request.execution)
        recording = read_recording(store, execution)
        return step_of_execution(store, execution, progress), recording
    step = step_of_strategy(store, str(request.strategy), request.topology, progress)
    return step, find_recording(store, step.record.id, step.topology_id, step.training_id)


def _facts(step: SimulatedStep, recording: Recording | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": step.graph.name,
        "strategy": step.record.digest,
        "topology": step.topology.name,
        "batch size": step.training.batch_size,
        "simulated step (ms)": step.simulation.step_time_s * 1e3,
    }
    if recording is not None:
        facts["execution"] = recording.execution_id
        facts["measured step (ms)"] = recording.typical.step_ns / 1e6
    return facts


def timelines_of(step: SimulatedStep, recording: Recording | None) -> dict[str, StepTimeline]:
    """Return the timelines of a simulated step by name: simulated, and measured where there is a recording."""
    timelines = {"simulated": with_waits(step.simulation, simulated_timeline(step.simulation))}
    if recording is not None:
        timelines["measured"] = recording.typical
    return timelines
