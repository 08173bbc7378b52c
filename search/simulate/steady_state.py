"""The task graph of a step that leaves a part of its work to the next one's forward (`graph.synchronization`).

A step alone does not show what that brings: the next forward begins while communication is still under way. So the
window is rotated: from where the backward begins, at which all communication of the step before is done, since the
loss has waited for all weights, to where the next backward begins. In program order, of p3:

    backward and exchanges of gradients; each slice where the plan starts it (`Plan.sums_after`)
    forward of the operators that only renew buffers, and renewals
    forward of the next step; before the first operator that reads some weights, on each device their update, which
        waits for the slices of the buckets that these weights are in

The order of the slices is found by a first simulation: computations in program order; a link takes, of the
communications that are ready, that for which a computation waits first. All devices then keep to that order.

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

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from graph.collective_algorithms import Choices, algorithm_for
from graph.intervals import volume
from graph.plan import Plan
from graph.strategy import Strategy
from graph.synchronization import Policy, slice_bounds
from search.cost.cost_table import nanoseconds
from search.simulate.task_graph import COMPUTE_KINDS, IntArray, TaskGraph, TaskGraphBuilder, TaskKind

_OF_BACKWARD = (
    TaskKind.RECOMPUTE,
    TaskKind.BACKWARD,
    TaskKind.GRADIENT_TRANSFER,
    TaskKind.GRADIENT_COLLECTIVE,
    TaskKind.SYNCHRONIZE,
)
_RENEWALS = (TaskKind.BUFFER_TRANSFER, TaskKind.BUFFER_COLLECTIVE)
_COMPUTE = [int(kind) for kind in COMPUTE_KINDS]

# Kind, duration, resource set, origin, subject, part and bytes of a task, as in `TaskGraph`.
Column = tuple[int, int, int, int, int, int, int]


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
        as_ready = _SlicesWindow(tasks, plan, builder).rotated()
        start_ns_T = _starts_by_priority(as_ready)
        slices = np.flatnonzero(as_ready.kind_T == TaskKind.SYNCHRONIZE)
        by_start = slices[np.argsort(start_ns_T[slices], kind="stable")]
        ordered = replace(plan, slice_order=tuple(as_ready.subject_T[by_start].tolist()))
        return _SlicesWindow(tasks, ordered, builder).rotated()
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


def _starts_by_priority(tasks: TaskGraph) -> IntArray:
    """Return the start of each task where a link takes first the communication that a computation waits for first."""
    from search.kernels.priority_order import run_priority_order
    from search.kernels.records import Timeline

    count = tasks.task_count
    timeline = Timeline(*(np.zeros(count, np.int64) for _ in range(3)))
    run_priority_order(
        count, tasks.flat, tasks.resource_sets, tasks.contention_ppm_D, tasks.resource_count, timeline,
        _first_waiting(tasks), np.iinfo(np.int64).max,
    )  # fmt: skip
    return timeline.start_ns


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


@dataclass(slots=True)
class _Tasks:
    """The columns of the tasks of a window that are made so far, and the tasks that each waits for."""

    columns: list[Column] = field(default_factory=list)
    launched_ns: list[int] = field(default_factory=list)
    preds: list[list[int]] = field(default_factory=list)


class _Window(ABC):
    """A rotated window that is being made of the task graph of a step with the same buckets."""

    def __init__(self, tasks: TaskGraph, plan: Plan) -> None:
        self.tasks = tasks
        self.plan = plan
        kinds = tasks.kind_T
        of_backward = np.flatnonzero(np.isin(kinds, [int(kind) for kind in _OF_BACKWARD]))
        updates = np.flatnonzero(kinds == TaskKind.UPDATE)
        # Where updates begin and end, and the backward begins.
        self.updates = int(updates[0]) if len(updates) else tasks.task_count
        self.updated = int(updates[-1]) + 1 if len(updates) else tasks.task_count
        self.begin = int(of_backward[0]) if len(of_backward) else self.updates
        self.made = _Tasks()
        # The number in the window of each task of the step; before it is made, -1.
        self.number_T = [-1] * tasks.task_count
        self.step: list[Column] = list(
            zip(
                kinds.tolist(), tasks.run_ns_T.tolist(), tasks.resource_set_T.tolist(), tasks.origin_T.tolist(),
                tasks.subject_T.tolist(), tasks.part_T.tolist(), tasks.size_bytes_T.tolist(), strict=True,
            )
        )  # fmt: skip
        self.bounds, self.preds = tasks.pred_ptr_T1.tolist(), tasks.pred_E.tolist()
        devices = len(tasks.topology.devices)
        self.latest_D = [-1] * devices
        # What the next forward on each device waits for beside what its task in the step does.
        self.awaited_D: list[list[int]] = [[] for _ in range(devices)]
        self.host_ns_D = [0] * devices
        self.launch_ns_T = self._launches()

    def _launches(self) -> list[int]:
        """Return how long the host of each task's device takes to issue it."""
        launch_ns_T = np.zeros(self.tasks.task_count, np.int64)
        launched = self.tasks.launched_ns_T
        for device in range(len(self.latest_D)):
            own = np.flatnonzero((self.tasks.resource_set_T == device) & (launched > 0))
            launch_ns_T[own] = np.diff(launched[own], prepend=0)
        return launch_ns_T.tolist()

    def _forward(self) -> None:
        """Move the forward of the next step; before an operator's first task `_before` adds what stands there."""
        operator = -1
        for task in range(self.begin):
            kind, subject = self.step[task][0], self.step[task][4]
            if kind == TaskKind.FORWARD and subject != operator:
                operator = subject
                self._before(operator)
            self._move(task)

    @abstractmethod
    def _before(self, operator: int) -> None:
        """Add the tasks that stand before an operator's forward."""

    def _waits(self, task: int) -> list[int]:
        """Return what a task of the step waits for in the window; what the step before has done is there."""
        of_step = self.preds[self.bounds[task] : self.bounds[task + 1]]
        return [number for number in map(self.number_T.__getitem__, of_step) if number >= 0]

    def _move(self, task: int) -> None:
        number = self._add(self.step[task], self._waits(task), self.launch_ns_T[task])
        self.number_T[task] = number
        if self.step[task][0] in _RENEWALS:
            for device in self.tasks.ends(task):
                self.awaited_D[device].append(number)

    def _add(self, column: Column, waits: list[int], launch_ns: int = 0) -> int:
        """Add a task; a computation waits for the one before it on its device, as where one host issues them."""
        number, device = len(self.made.columns), column[2]
        launched_ns = 0
        if device < len(self.latest_D):
            if self.latest_D[device] >= 0:
                waits = [*waits, self.latest_D[device]]
            self.latest_D[device] = number
            self.host_ns_D[device] += launch_ns
            launched_ns = self.host_ns_D[device] if launch_ns else 0
            if column[0] == TaskKind.FORWARD and self.awaited_D[device]:
                waits = [*waits, *self.awaited_D[device]]
                self.awaited_D[device] = []
        self.made.columns.append(column)
        self.made.launched_ns.append(launched_ns)
        self.made.preds.append(waits)
        return number

    def _graph(self) -> TaskGraph:
        columns = np.array(self.made.columns, np.int64).reshape(-1, 7).T.copy()
        return replace(
            self.tasks,
            kind_T=columns[0],
            run_ns_T=columns[1],
            resource_set_T=columns[2],
            origin_T=columns[3],
            subject_T=columns[4],
            part_T=columns[5],
            size_bytes_T=columns[6],
            launched_ns_T=np.array(self.made.launched_ns, np.int64),
            pred_ptr_T1=np.cumsum([0, *map(len, self.made.preds)]).astype(np.int64),
            pred_E=np.array(list(chain.from_iterable(self.made.preds)), np.int64),
        )


class _SlicesWindow(_Window):
    """Of p3: slices of sums, and updates before the first operator that reads a weight."""

    def __init__(self, tasks: TaskGraph, plan: Plan, builder: TaskGraphBuilder) -> None:
        super().__init__(tasks, plan)
        self.builder = builder
        self.links = builder.links.choosing(plan.strategy)
        # By devices, the algorithms of their all-reduces.
        self.choices: dict[tuple[int, ...], Choices] = {}
        self.slices: list[list[int]] = [[] for _ in plan.buckets]
        # The sum of each bucket in the step; and for each weight, the buckets that its cells are in.
        self.sums = np.flatnonzero(tasks.kind_T == TaskKind.SYNCHRONIZE).tolist()
        self.buckets_of: dict[str, set[int]] = {}
        for number, bucket in enumerate(plan.buckets):
            for entry in bucket.entries:
                self.buckets_of.setdefault(entry.weight, set()).add(number)

    def rotated(self) -> TaskGraph:
        """Return the window."""
        for task in range(self.begin, self.updates):
            if self.step[task][0] == TaskKind.SYNCHRONIZE:
                self._start_slices(task)
            else:
                self._move(task)
        self._forward()
        return self._graph()

    def _start_slices(self, task: int) -> None:
        """Add the sums that start once the bucket of a sum of the step is full."""
        for bucket, part in self.plan.sums_after[self.step[task][4]]:
            whole = self.sums[bucket]
            kind, _, resource_set, origin, _, _, size_bytes = self.step[whole]
            first, last = slice_bounds(size_bytes, self.plan.slice_counts[bucket])[part]
            run_ns = self._sum_ns(whole, last - first)
            column = (kind, run_ns, resource_set, origin, bucket, part, last - first)
            self.slices[bucket].append(self._add(column, self._waits(whole)))

    def _sum_ns(self, task: int, size_bytes: int) -> int:
        """Return how long a slice of a sum takes: one of several behind each other, where that was measured.

        Then it takes no less than its share of the whole sum, which cutting makes no shorter.
        """
        from search.cost.collective_cost import Prices
        from search.kernels.collective_formulas import collectives_ns

        run_ns = np.empty(1, np.int64)
        resource_set = np.array([self.step[task][2]])
        collectives_ns(self.tasks.resource_sets, resource_set, np.array([size_bytes], np.int64), run_ns)
        members = self.tasks.ends(task)
        successive = self.links.successive.get(members)
        if successive is not None:
            if members not in self.choices:
                self.choices[members] = Prices(self.tasks.topology, self.links).choices(members)
            curve = successive.get(algorithm_for(self.choices[members], size_bytes))
            if curve is not None:
                share_s = self.step[task][1] / 1e9 * size_bytes / self.step[task][6]
                return min(int(run_ns[0]), nanoseconds(max(curve.seconds(size_bytes), share_s)))
        return int(run_ns[0])

    def _before(self, operator: int) -> None:
        """Add the updates of the weights that an operator is the first to read, one a device that holds any."""
        weights = self.plan.updated_before.get(operator, ())
        if not weights:
            return
        elements_D = np.zeros(len(self.latest_D), np.int64)
        for name in weights:
            for device, region in self.plan.held[name].items():
                elements_D[device] += volume(region)
        run_ns_D, origin_D = self.builder.updates(elements_D)
        waits_D: list[list[int]] = [[] for _ in self.latest_D]
        for bucket in sorted({bucket for name in weights for bucket in self.buckets_of.get(name, ())}):
            for device in self.plan.buckets[bucket].devices:
                waits_D[device] += self.slices[bucket]
        for device in np.flatnonzero(elements_D).tolist():
            column = (
                int(TaskKind.UPDATE), int(run_ns_D[device]), device, int(origin_D[device]), device, 0, 0
            )  # fmt: skip
            self._add(column, waits_D[device])


class _GathersWindow(_Window):
    """Of tic and tac: gathers of updated weights, which the forward waits for and starts, two under way."""

    def __init__(self, tasks: TaskGraph, plan: Plan) -> None:
        super().__init__(tasks, plan)
        gathers = np.flatnonzero(tasks.kind_T == TaskKind.UPDATE_GATHER)
        # By bucket, its gather in the step.
        self.gathers = dict(zip(tasks.subject_T[gathers].tolist(), gathers.tolist(), strict=True))

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
        waits: list[int] = []
        for device in self.plan.buckets[number].devices:
            waits += [*self.awaited_D[device], self.latest_D[device]]
        task = self.gathers[number]
        self.number_T[task] = self._add(self.step[task], [wait for wait in waits if wait >= 0])

    def _before(self, operator: int) -> None:
        """Wait for the gathers that an operator is the first to need, and start those that follow them."""
        for number in self.plan.gathers_awaited.get(operator, ()):
            for device in self.plan.buckets[number].devices:
                self.awaited_D[device].append(self.number_T[self.gathers[number]])
            following = self.plan.gather_after(number)
            if following is not None:
                self._gather(following)
