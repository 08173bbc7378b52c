"""Scheduling efficiency and speed-up potential of recorded steps, by the formula of simulated ones.

Operations of a recorded step are

- whatever a device does but wait: its computations, copies and the runtime's own work. They hold the device;
- messages and collectives, each once, from when the last of its ranks had it started, since to wait for the slowest is
  not its work, to when it was done on all. They hold the links that a simulation has them hold. Where several are under
  way on one link, it takes a moment for that which ends first: the others waited for it, or shared the link.

A simulation knows no time in which nothing runs; of a recorded step it counts as an operation of its own, so that no
step takes longer than all operations one after the other. Clocks of ranks begin behind a barrier, and may differ by
what one rank leaves it later than another.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graph.collectives import CollectiveKind
from graph.topology import Topology
from runtime.observe.spans import MESSAGE, TimedCommunication
from search.simulate.scheduling import Scheduling

if TYPE_CHECKING:
    from app.services.timeline.store import Recording
    from app.services.timeline.timeline import StepTimeline


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a recorded step: the resources that it holds, devices and after them links, and its time."""

    resources: tuple[int, ...]
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RecordedScheduling:
    """Medians over recorded steps."""

    efficiency: float
    speedup_potential: float


def recorded_scheduling(recording: Recording, topology: Topology) -> RecordedScheduling | None:
    """Return the medians over the recorded steps of a run; None where its communications were not recorded."""
    steps = step_schedulings(recording.steps, topology)
    if not steps:
        return None
    return RecordedScheduling(
        statistics.median(step.efficiency for step in steps),
        statistics.median(step.speedup_potential for step in steps),
    )


def scheduling_json(predicted: Scheduling, recorded: RecordedScheduling | None) -> dict[str, float | None]:
    """Return efficiency and potential of a step for a JSON document, predicted and recorded (None: not recorded)."""
    return {
        "scheduling_efficiency": predicted.efficiency,
        "speedup_potential": predicted.speedup_potential,
        "recorded_scheduling_efficiency": None if recorded is None else recorded.efficiency,
        "recorded_speedup_potential": None if recorded is None else recorded.speedup_potential,
    }


def step_schedulings(steps: Iterable[StepTimeline], topology: Topology) -> list[Scheduling]:
    """Return makespan and bounds of each recorded step; of none where communications were not recorded."""
    links = HeldLinks(topology)
    return [
        _step_scheduling(step, step.communications, links)
        for step in steps
        if step.communications is not None
    ]


def _step_scheduling(
    step: StepTimeline, communications: Sequence[Sequence[TimedCommunication]], links: HeldLinks
) -> Scheduling:
    computing = [
        Operation((device,), span.start_ns, span.end_ns)
        for device, slices in enumerate(step.devices)
        for span in slices
        if span.kind != "wait"
    ]
    communicating = [Operation(links.of(item), item.start_ns, item.end_ns) for item in _once(communications)]
    return scheduling([*computing, *communicating], step.step_ns)


def scheduling(operations: Iterable[Operation], makespan_ns: int) -> Scheduling:
    """Return the bounds of operations; none takes a moment of a resource that one which ends before it takes."""
    held: dict[int, list[Operation]] = defaultdict(list)
    busy_ns: dict[int, int] = defaultdict(int)
    total_ns = 0
    for operation in sorted(operations, key=lambda operation: (operation.end_ns, operation.start_ns)):
        own_ns = _own_ns(operation, [held[resource] for resource in operation.resources])
        total_ns += own_ns
        for resource in operation.resources:
            busy_ns[resource] += own_ns
            held[resource].append(operation)
    return Scheduling(makespan_ns, max(busy_ns.values(), default=0), max(total_ns, makespan_ns))


def _own_ns(operation: Operation, held: Sequence[Sequence[Operation]]) -> int:
    """Return the time of an operation in which no earlier-ended operation was under way on the resources it holds."""
    earlier = []
    for operations in held:
        for other in reversed(operations):
            if other.end_ns <= operation.start_ns:
                break
            earlier.append((other.start_ns, other.end_ns))
    own_ns, now = 0, operation.start_ns
    for start_ns, end_ns in sorted(earlier):
        own_ns += max(0, start_ns - now)
        now = max(now, end_ns)
    return own_ns + max(0, operation.end_ns - now)


def _once(by_rank: Sequence[Sequence[TimedCommunication]]) -> list[TimedCommunication]:
    """Return each communication once, from its start on the last of its ranks to its end on the last.

    The n-th of some ranks is the n-th on each of them: all start theirs in one order.
    """
    seen: dict[tuple[Any, ...], list[TimedCommunication]] = defaultdict(list)
    for of_rank in by_rank:
        counts: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        for item in of_rank:
            among = (item.operation, item.ranks)
            seen[*among, counts[among]].append(item)
            counts[among] += 1
    return [
        TimedCommunication(
            items[0].operation,
            items[0].ranks,
            items[0].subject,
            max(item.start_ns for item in items),
            max(item.end_ns for item in items),
        )
        for items in seen.values()
    ]


class HeldLinks:
    """The links that communications hold on a topology, as resources: numbered after the devices."""

    def __init__(self, topology: Topology) -> None:
        from search.cost.collective_cost import Prices
        from search.cost.link_costs import LinkCosts

        self._topology = topology
        self._prices = Prices(topology, LinkCosts())
        self._held: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}

    def of(self, item: TimedCommunication) -> tuple[int, ...]:
        """Return the links of a message's route, or the links that a simulated collective of the kind holds."""
        key = (item.operation, item.ranks)
        if key not in self._held:
            first = len(self._topology.devices)
            self._held[key] = tuple(first + link for link in self._links(*key))
        return self._held[key]

    def _links(self, operation: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if operation == MESSAGE:
            return self._topology.route(*ranks)
        # Whichever member is the root, the links are the same.
        return self._prices.of(ranks, CollectiveKind(operation), root=ranks[0]).links
