"""Timelines: the slices of each device and link, simulated or measured, under the same names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runtime.observe.spans import WEIGHT_GRADIENTS, WEIGHTS, TimedCommunication

if TYPE_CHECKING:
    from search.simulate.simulator import Simulation

END_OF_STEP = "the end of the step"
HOST = "the host"


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval of a device's or link's time, and the operator, value or bucket that it is spent on.

    kind: forward, backward, recompute, update, wait, transfer, collective, or what else the runtime spends time on.
    subject: the operator, value or bucket that it is about. `name`: for people, the same in both timelines.
    start_ns, end_ns: from the start of the step.
    """

    kind: str
    subject: str
    name: str
    start_ns: int
    end_ns: int
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def duration_ns(self) -> int:
        """The length of the slice in nanoseconds."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """One training step. Slices of a device, or of a link, are in order and do not overlap.

    communications: of a recorded step, messages and collectives as each device saw them; None where none were recorded.
    """

    step_ns: int
    devices: tuple[tuple[Slice, ...], ...]
    links: Mapping[str, tuple[Slice, ...]] = field(default_factory=dict)
    communications: tuple[tuple[TimedCommunication, ...], ...] | None = None


def simulated_timeline(simulation: Simulation) -> StepTimeline:
    """Return a simulation as a timeline, with devices' and links' slices; the critical path is marked."""
    from search.cost.cost_table import ORIGINS

    tasks = simulation.tasks
    names, resources = tasks.names(), tasks.resource_names()
    critical, subjects = set(simulation.critical_path), Subjects(simulation)
    slices_of: dict[int, list[Slice]] = defaultdict(list)
    for task in range(tasks.task_count):
        kind, subject = subjects.kind_and_subject(task)
        details: dict[str, object] = {
            "cost": ORIGINS[int(tasks.origin_T[task])].value,
            "critical path": task in critical,
        }
        if tasks.micro_batch_T is not None and tasks.micro_batch_T[task] >= 0:
            details["micro-batch"] = int(tasks.micro_batch_T[task])
        if tasks.size_bytes_T[task]:
            details["bytes"] = int(tasks.size_bytes_T[task])
        span = Slice(
            kind,
            subject,
            names[task],
            int(simulation.start_ns[task]),
            int(simulation.end_ns[task]),
            details,
        )
        for resource in tasks.resources(task):
            slices_of[resource].append(span)
    ordered = [_in_order(slices_of[resource]) for resource in range(tasks.resource_count)]
    count = len(tasks.topology.devices)
    return StepTimeline(
        simulation.step_time_ns,
        tuple(ordered[:count]),
        dict(zip(resources[count:], ordered[count:], strict=True)),
    )


def with_waits(simulation: Simulation, timeline: StepTimeline) -> StepTimeline:
    """Return a simulated timeline whose devices' gaps are slices too: waits for the tasks that ended them.

    The slices of a device then fill the whole step, as those of a measured one do.
    """
    tasks, subjects = simulation.tasks, Subjects(simulation)
    waited_for: dict[tuple[int, int], str] = {}
    for task in range(tasks.task_count):
        resources = tasks.resources(task)
        if len(resources) == 1 and resources[0] < len(timeline.devices):
            cause = int(simulation.cause[task])
            subject = subjects.kind_and_subject(cause)[1] if cause >= 0 else HOST
            waited_for.setdefault((resources[0], int(simulation.start_ns[task])), subject)
    devices = []
    for device, slices in enumerate(timeline.devices):
        filled: list[Slice] = []
        now = 0
        for span in slices:
            if span.start_ns > now:
                filled.append(wait(waited_for[device, span.start_ns], now, span.start_ns))
            filled.append(span)
            now = span.end_ns
        if now < timeline.step_ns:
            filled.append(wait(END_OF_STEP, now, timeline.step_ns))
        devices.append(tuple(filled))
    return StepTimeline(timeline.step_ns, tuple(devices), timeline.links)


def wait(subject: str, start_ns: int, end_ns: int) -> Slice:
    """Return a slice in which a device waited for something."""
    return Slice("wait", subject, f"wait for {subject}", start_ns, end_ns)


def _in_order(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    return tuple(sorted(slices, key=lambda span: (span.start_ns, span.end_ns)))


class Subjects:
    """The operators, values and buckets that the tasks of a simulation are about."""

    def __init__(self, simulation: Simulation) -> None:
        from search.simulate.arrays import operator_values

        self._tasks = tasks = simulation.tasks
        self._operators = [operator.name for operator in tasks.graph.operators]
        self._values = [value.name for value in operator_values(tasks.graph)]
        self._values += [buffer for buffer, _ in tasks.graph.buffer_updates]

    def kind_and_subject(self, task: int) -> tuple[str, str]:
        """Return the kind and the subject of a task's slice."""
        from search.simulate.task_graph import TaskKind

        kind = TaskKind(int(self._tasks.kind_T[task]))
        number = int(self._tasks.subject_T[task])
        match kind:
            case TaskKind.WEIGHT:
                # As recorded: autograd tells no part of a backward from the other.
                return "backward", self._operators[number]
            case TaskKind.FORWARD | TaskKind.BACKWARD | TaskKind.RECOMPUTE:
                return kind.name.lower(), self._operators[number]
            case TaskKind.UPDATE:
                return "update", WEIGHTS
            case TaskKind.SYNCHRONIZE:
                return "collective", WEIGHT_GRADIENTS
            case TaskKind.FORWARD_GATHER | TaskKind.BACKWARD_GATHER | TaskKind.UPDATE_GATHER:
                return "collective", WEIGHTS
            case TaskKind.TRANSFER | TaskKind.COLLECTIVE:
                prefix = ""
            case TaskKind.GRADIENT_TRANSFER | TaskKind.GRADIENT_COLLECTIVE:
                prefix = "gradient of "
            case _:
                prefix = "new "
        return "collective" if kind.name.endswith("COLLECTIVE") else "transfer", prefix + self._values[number]
