"""Attribution of a step's prediction error: operator by operator, and by kind.

The time of every device is split, in both timelines, into what it did: tasks of operators, the update, waits for what
comes from other devices, and, measured alone, copies and the runtime's own work. The parts of a device add up to the
step, so their means over the devices do, and the differences of all rows add up to the error of the step.

What is measured is the mean of the recorded steps. A transfer shows where somebody waits for it: one that is hidden
behind computation costs nothing in either timeline. How much of what could be hidden is hidden, scheduling efficiency
says beside it (`app.services.timeline.recorded_scheduling`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from app.services.timeline.recorded_scheduling import RecordedScheduling, recorded_scheduling, scheduling_json
from app.services.timeline.timeline import END_OF_STEP, StepTimeline, simulated_timeline, wait, with_waits

if TYPE_CHECKING:
    from app.services.timeline.store import Recording
    from search.simulate.scheduling import Scheduling
    from search.simulate.simulator import Simulation


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of a step that go to one thing: means over the devices."""

    kind: str
    subject: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """Measured seconds minus predicted seconds."""
        return self.measured_s - self.predicted_s

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON document."""
        return {**asdict(self), "difference_s": self.difference_s}


@dataclass(frozen=True, slots=True)
class Attribution:
    """A step's error and its parts, the largest difference first; its scheduling, predicted and recorded.

    recorded: None where the run did not record its communications. stored_s: the newest stored prediction of the step,
    which costs of then may have made another; None where there is none.
    """

    execution_id: int
    recorded_steps: int
    predicted_s: float
    measured_s: float
    rows: tuple[Difference, ...]
    predicted: Scheduling
    recorded: RecordedScheduling | None
    stored_s: float | None = None

    @property
    def by_kind(self) -> tuple[Difference, ...]:
        """The sums of each kind, the largest difference first."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for row in self.rows:
            sums[row.kind][0] += row.predicted_s
            sums[row.kind][1] += row.measured_s
        return _sorted(Difference(kind, "all", *both) for kind, both in sums.items())

    def to_json(self) -> dict[str, Any]:
        """Return the attribution as a JSON document."""
        return {
            "execution": self.execution_id,
            "recorded_steps": self.recorded_steps,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "stored_prediction_s": self.stored_s,
            **scheduling_json(self.predicted, self.recorded),
            "kinds": [row.to_json() for row in self.by_kind],
            "rows": [row.to_json() for row in self.rows],
        }


def attribute(simulation: Simulation, recording: Recording, stored_s: float | None = None) -> Attribution:
    """Return the attribution of the error of a simulated step, against recorded steps of the same strategy."""
    predicted = with_waits(simulation, simulated_timeline(simulation))
    steps = [_filled(step, len(predicted.devices)) for step in recording.steps]
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for key, time_ns in _times(predicted):
        sums[key][0] += time_ns / len(predicted.devices) / 1e9
    for step in steps:
        for key, time_ns in _times(step):
            sums[key][1] += time_ns / len(step.devices) / len(steps) / 1e9
    return Attribution(
        execution_id=recording.execution_id,
        recorded_steps=len(steps),
        predicted_s=simulation.step_time_s,
        measured_s=sum(step.step_ns for step in steps) / len(steps) / 1e9,
        rows=_sorted(Difference(*key, *both) for key, both in sums.items()),
        predicted=simulation.scheduling,
        recorded=recorded_scheduling(recording, simulation.tasks.topology),
        stored_s=stored_s,
    )


def _filled(step: StepTimeline, count: int) -> StepTimeline:
    """Return a recorded step of `count` devices, each of which waits for the end of the step once it is ready."""
    devices = []
    for slices in (*step.devices, *((),) * (count - len(step.devices))):
        ready_ns = slices[-1].end_ns if slices else 0
        rest = (wait(END_OF_STEP, ready_ns, step.step_ns),) if ready_ns < step.step_ns else ()
        devices.append((*slices, *rest))
    return StepTimeline(step.step_ns, tuple(devices))


def _times(timeline: StepTimeline) -> Iterable[tuple[tuple[str, str], int]]:
    for slices in timeline.devices:
        for span in slices:
            yield (span.kind, span.subject), span.duration_ns


def _sorted(rows: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_s), row.kind, row.subject)))
