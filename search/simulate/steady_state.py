"""The task graph of a step that leaves a part of its work to the next one's forward (`graph.synchronization`).

A step alone does not show what that brings: the next forward begins while communication is still under way. So the
window is rotated: from where the backward begins, at which all communication of the step before is done, since the
loss has waited for all weights, to where the next backward begins. In program order, of p3:

    backward and exchanges of gradients; each slice where the plan starts it (`Plan.starts`)
    forward of the operators that only renew buffers, and renewals
    forward of the next step; before the first operator that reads some weights, on each device their update, which
        waits for the slices of the buckets that these weights are in

Where their update is shared, the sum of a slice (push) is a reduce-scatter, and where the plan says there are also the
updates of slices, each with the gather of the slice (pull), and behind it sums that go after it. The first operator
that reads the weights waits for these pulls.

The order of the slices is found by a first simulation: computations in program order; a link takes, of the
communications that are ready, that for which a computation waits first. All devices then keep to that order. In it a
pull is ready when its slice is summed and its devices have come to a place among the computations that is left no
sooner than that; which one, another such simulation says.

Of tic and tac, where updates are shared:

    backward, exchanges and sums of gradients, what renews buffers, updates, as in a step alone
    gathers of the first updated weights (`Plan.first_gathers`)
    forward of the next step; before the first operator that reads some weights, the wait for their gathers, each with
        the start of the one that follows it (`Plan.gather_after`)

The order of the gathers is that of TIC or TAC over what follows the updates, where gathers wait for nothing, as the
parameter transfers in TicTac's setting. Computations are in program order there, and each waits for those before it on
its device.

Sources: P3 (SysML 2019), sections 3 and 4: slices, and priority by the position of the layer in the forward. TicTac
(SysML 2019): TIC and TAC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graph.plan import Plan
from graph.pulls import Pull
from graph.schedule import Phase
from graph.strategy import Sharding, Strategy
from graph.synchronization import Policy
from search.simulate.rotated_window import RotatedWindow
from search.simulate.slices_window import SlicesWindow
from search.simulate.task_graph import COMPUTE_KINDS, IntArray, TaskGraph, TaskGraphBuilder, TaskKind

if TYPE_CHECKING:
    from search.kernels.records import Timeline

_COMPUTE = [int(kind) for kind in COMPUTE_KINDS]


def in_steady_state(tasks: TaskGraph, strategy: Strategy, builder: TaskGraphBuilder) -> TaskGraph:
    """Return the task graph that predicts a strategy's step, from that of one step: the window, where work is left.

    Raises:
        UsageError: policy tac is for fewer tasks.
    """
    policy = strategy.synchronization.policy
    if policy is Policy.FIFO:
        return tasks
    plan = builder.plan(strategy)
    if policy is Policy.P3:
        return SlicesWindow(tasks, _in_static_order(tasks, plan, builder), builder).rotated()
    if not plan.gathers_late:
        return tasks
    number_T = _numbers_of_gathers(_GathersWindow(tasks, plan).rotated(), policy)
    ordered = replace(plan, gather_order=tuple(sorted(plan.gather_order, key=number_T.__getitem__)))
    return _GathersWindow(tasks, ordered).rotated()


def slice_order(tasks: TaskGraph) -> tuple[int, ...]:
    """Return, for each sum of gradients in the order in which they start, its bucket."""
    return tuple(tasks.subject_T[tasks.kind_T == TaskKind.SYNCHRONIZE].tolist())


def gather_order(tasks: TaskGraph) -> tuple[int, ...]:
    """Return, for each gather of updated weights in the order in which they start, its bucket."""
    return tuple(tasks.subject_T[tasks.kind_T == TaskKind.UPDATE_GATHER].tolist())


def pulls(tasks: TaskGraph) -> tuple[Pull, ...]:
    """Return the pulls of slices whose update is shared, in the order in which they start."""
    order = set(tasks.graph.order.of_loss)
    found: list[Pull] = []
    sums = completed = 0
    # Those behind the last computation so far, of which the next one decides where they stand.
    waiting: list[tuple[int, int]] = []
    for kind, subject in zip(tasks.kind_T.tolist(), tasks.subject_T.tolist(), strict=True):
        if kind == TaskKind.SYNCHRONIZE:
            sums += 1
        elif kind == TaskKind.UPDATE_GATHER:
            waiting.append((subject, sums))
        elif kind in (TaskKind.FORWARD, TaskKind.BACKWARD):
            is_next = kind == TaskKind.FORWARD and subject in order
            phase, operator = (Phase.FORWARD, subject) if is_next else (Phase.BACKWARD, completed)
            found += [Pull(bucket, phase, operator, before) for bucket, before in waiting]
            waiting.clear()
            completed = subject if kind == TaskKind.BACKWARD else completed
    return tuple(found)


def _in_static_order(tasks: TaskGraph, plan: Plan, builder: TaskGraphBuilder) -> Plan:
    """Return the plan with sums and pulls in the order in which they start by priority, as soon as they are ready.

    A pull may start at the first place at which its slice has been summed, so that no device waits for the sum. When
    that is, a simulation says in which pulls are ready with the sums.
    """
    bounds = plan.pull_bounds
    shared = {pull.bucket for pull in plan.pulls}
    places = {
        (bucket, part): bounds.soonest[bucket]
        for bucket in sorted(shared)
        for part in range(plan.slice_counts[bucket])
    }
    if places:
        places = _reached_places(SlicesWindow(tasks, plan, builder, places), plan)
    window = SlicesWindow(tasks, plan, builder, places).rotated()
    start_ns_T = _by_priority(window).start_ns
    both = np.flatnonzero(np.isin(window.kind_T, (TaskKind.SYNCHRONIZE, TaskKind.UPDATE_GATHER)))
    by_start = both[np.argsort(start_ns_T[both], kind="stable")]
    is_pull = (window.kind_T[by_start] == TaskKind.UPDATE_GATHER).tolist()
    slices = list(zip(window.subject_T[by_start].tolist(), window.part_T[by_start].tolist(), strict=True))
    sums = [bucket for (bucket, _), pulled in zip(slices, is_pull, strict=True) if not pulled]
    pulls: list[Pull] = []
    left, latest = len(sums), len(plan.starts)
    # In reverse: what stands behind a pull is needed in time, too.
    for (bucket, part), pulled in zip(reversed(slices), reversed(is_pull), strict=True):
        latest = min(latest, bounds.latest[bucket])
        if pulled:
            pulls.append(Pull(bucket, *plan.stands_at(min(places[bucket, part], latest)), left))
        else:
            left -= 1
    return replace(plan, slice_order=tuple(sums), pulls=tuple(reversed(pulls)))


def _reached_places(window: SlicesWindow, plan: Plan) -> dict[tuple[int, int], int]:
    """Return, for each slice that is pulled, the first place that no device has left before it is summed."""
    tasks = window.rotated()
    timeline = _by_priority(tasks)
    places = _Places(tasks, timeline, window.boundaries, plan)
    sums = np.flatnonzero(tasks.kind_T == TaskKind.SYNCHRONIZE)
    summed = zip(
        tasks.subject_T[sums].tolist(),
        tasks.part_T[sums].tolist(),
        timeline.end_ns[sums].tolist(),
        strict=True,
    )
    return {
        (bucket, part): places.left_after(bucket, end_ns)
        for bucket, part, end_ns in summed
        if plan.buckets[bucket].sharding is not Sharding.NONE
    }


class _Places:
    """When devices go on from the places of a window at which pulls may start.

    P places (`graph.pulls`), D devices; the boundary of a place is how many tasks stand before it.
    """

    def __init__(self, tasks: TaskGraph, timeline: Timeline, boundaries: Sequence[int], plan: Plan) -> None:
        self._plan = plan
        self._start_ns_T = timeline.start_ns
        self._boundary_P = np.array(boundaries, np.int64)
        computations = np.flatnonzero(np.isin(tasks.kind_T, _COMPUTE))
        devices_of = tasks.resource_set_T[computations]
        by_device = computations[np.argsort(devices_of, kind="stable")]
        ends_D = np.cumsum(np.bincount(devices_of, minlength=len(tasks.topology.devices)))
        # In program order, in which they run.
        self._computations_D = np.split(by_device, ends_D[:-1])
        self._left_ns: dict[tuple[int, ...], IntArray] = {}

    def left_after(self, bucket: int, ready_ns: int) -> int:
        """Return the first place that no device of a bucket has left before a time, within the bucket's bounds."""
        bounds = self._plan.pull_bounds
        place = int(np.searchsorted(self._left_ns_P(self._plan.buckets[bucket].devices), ready_ns))
        return min(max(place, bounds.soonest[bucket]), bounds.latest[bucket])

    def _left_ns_P(self, devices: tuple[int, ...]) -> IntArray:  # noqa: N802 - the shape suffix
        """Return, for each place, when the first of some devices goes on from it."""
        if devices not in self._left_ns:
            left_ns_P = np.full(len(self._boundary_P), np.iinfo(np.int64).max)
            for device in devices:
                own = self._computations_D[device]
                start_ns = np.append(self._start_ns_T[own], np.iinfo(np.int64).max)
                left_ns_P = np.minimum(left_ns_P, start_ns[np.searchsorted(own, self._boundary_P)])
            self._left_ns[devices] = left_ns_P
        return self._left_ns[devices]


def _by_priority(tasks: TaskGraph) -> Timeline:
    """Return the timeline in which a link takes first the communication that a computation waits for first."""
    from search.kernels.priority_order import run_priority_order
    from search.kernels.records import Timeline

    count = tasks.task_count
    timeline = Timeline(*(np.zeros(count, np.int64) for _ in range(3)))
    run_priority_order(
        count, tasks.flat, tasks.resource_sets, tasks.contention_ppm_D, tasks.resource_count, timeline,
        _first_waiting(tasks), np.iinfo(np.int64).max,
    )  # fmt: skip
    return timeline


def _first_waiting(tasks: TaskGraph) -> IntArray:
    """Return, for each communication, the first computation that waits for it, directly or through others."""
    count = tasks.task_count
    first_T = [count] * count
    is_compute_T = np.isin(tasks.kind_T, _COMPUTE)
    computes, preds = is_compute_T.tolist(), tasks.pred_E.tolist()
    bounds = tasks.pred_ptr_T1.tolist()
    for task in range(count - 1, -1, -1):
        number = task if computes[task] else first_T[task]
        for pred in preds[bounds[task] : bounds[task + 1]]:
            if number < first_T[pred]:
                first_T[pred] = number
    return np.where(is_compute_T, 0, np.array(first_T, np.int64))


def _numbers_of_gathers(window: TaskGraph, policy: Policy) -> dict[int, int]:
    """Return, for each bucket, the number of its gather by TIC or TAC.

    In a window in which gathers go in the order of their first reads: each is awaited by its own reader alone.
    """
    from search.simulate.priorities import tac_of, tic_of

    gathers = np.flatnonzero(window.kind_T == TaskKind.UPDATE_GATHER)
    first, count = int(gathers[0]), window.task_count - int(gathers[0])
    # What stands before the first gather is done, and gathers wait for nothing.
    waiting_E = np.repeat(np.arange(window.task_count), np.diff(window.pred_ptr_T1))
    kept_E = (waiting_E >= first) & (window.pred_E >= first) & ~np.isin(waiting_E, gathers)
    counts = np.bincount(waiting_E[kept_E] - first, minlength=count)
    forward = window.flat._replace(
        pred_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pred=window.pred_E[kept_E] - first,
        resource_set=window.resource_set_T[first:],
        run_ns=window.run_ns_T[first:],
    )
    number_of = {Policy.TIC: tic_of, Policy.TAC: tac_of}[policy]
    number_T = number_of(forward, count, len(window.topology.devices))
    return dict(zip(window.subject_T[gathers].tolist(), number_T[gathers - first].tolist(), strict=True))


class _GathersWindow(RotatedWindow):
    """Of tic and tac: gathers of updated weights, which the forward waits for and starts, two under way."""

    def rotated(self) -> TaskGraph:
        """Return the window."""
        for task in range(self.begin, self.updated):
            self._move(task)
        for number in self.plan.first_gathers:
            self._gather(number)
        self._forward()
        return self._graph()

    def _gather(self, number: int) -> None:
        """Add a gather, which starts when all of its devices have come to this place in the order."""
        task = self.gathers[number]
        self.number_T[task] = self._add(self.step[task], self._here(number))

    def _before(self, operator: int) -> None:
        """Wait for the gathers that an operator is the first to need, and start those that follow them."""
        for number in self.plan.gathers_awaited.get(operator, ()):
            for device in self.plan.buckets[number].devices:
                self.awaited_D[device].append(self.number_T[self.gathers[number]])
            following = self.plan.gather_after(number)
            if following is not None:
                self._gather(following)
