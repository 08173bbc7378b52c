"""The task graph of a step of which the sums of gradients last into the next one (policy p3, `graph.synchronization`).

A step alone does not show what p3 brings: the next forward begins while sums are still under way. So the window is
rotated: from where the backward begins, at which all sums of the step before are done, since the loss has waited for
all weights, to where the next backward begins. In program order:

    backward and exchanges of gradients; each slice where the plan starts it (`Plan.sums_after`)
    forward of the operators that only renew buffers, and renewals
    forward of the next step; before the first operator that reads some weights, on each device their update, which
        waits for the slices of the buckets that these weights are in

The order of the slices is found by a first simulation: computations in program order; a link takes, of the
communications that are ready, that for which a computation waits first. All devices then keep to that order.

Source: P3 (SysML 2019), sections 3 and 4: slices, and priority by the position of the layer in the forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from graph.intervals import volume
from graph.plan import Plan, build_plan
from graph.strategy import Strategy
from graph.synchronization import Policy, slice_bounds
from search.simulate.task_graph import COMPUTE_KINDS, IntArray, TaskGraph, TaskGraphBuilder, TaskKind

_OF_BACKWARD = (
    TaskKind.RECOMPUTE,
    TaskKind.BACKWARD,
    TaskKind.GRADIENT_TRANSFER,
    TaskKind.GRADIENT_COLLECTIVE,
    TaskKind.SYNCHRONIZE,
)
_RENEWALS = (TaskKind.BUFFER_TRANSFER, TaskKind.BUFFER_COLLECTIVE)


def in_steady_state(tasks: TaskGraph, strategy: Strategy, builder: TaskGraphBuilder) -> TaskGraph:
    """Return the task graph that predicts a strategy's step, from that of one step: of p3 the window, else itself."""
    if strategy.synchronization.policy is not Policy.P3:
        return tasks
    plan = build_plan(tasks.graph, strategy, [device.node for device in tasks.topology.devices])
    as_ready = _Window(tasks, plan, builder).rotated()
    start_ns_T = _starts_by_priority(as_ready)
    slices = np.flatnonzero(as_ready.kind_T == TaskKind.SYNCHRONIZE)
    order = slices[np.argsort(start_ns_T[slices], kind="stable")]
    ordered = replace(plan, slice_order=tuple(as_ready.subject_T[order].tolist()))
    return _Window(tasks, ordered, builder).rotated()


def slice_order(tasks: TaskGraph) -> tuple[int, ...]:
    """Return, for each sum of gradients in the order in which they start, its bucket."""
    return tuple(tasks.subject_T[tasks.kind_T == TaskKind.SYNCHRONIZE].tolist())


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
    first_T = np.full(count, count, np.int64)
    compute_T = np.isin(tasks.kind_T, [int(kind) for kind in COMPUTE_KINDS])
    for task in range(count - 1, -1, -1):
        number = task if compute_T[task] else first_T[task]
        preds = tasks.pred_E[tasks.pred_ptr_T1[task] : tasks.pred_ptr_T1[task + 1]]
        first_T[preds] = np.minimum(first_T[preds], number)
    return np.where(compute_T, 0, first_T)


@dataclass(slots=True)
class _Tasks:
    """The columns of the tasks of a window that are made so far, and the tasks that each waits for."""

    columns: list[tuple[int, int, int, int, int, int, int, int]] = field(default_factory=list)
    preds: list[list[int]] = field(default_factory=list)


class _Window:
    """The rotated window of one plan, made of the task graph of a step with the same buckets."""

    def __init__(self, tasks: TaskGraph, plan: Plan, builder: TaskGraphBuilder) -> None:
        self.tasks = tasks
        self.plan = plan
        self.builder = builder
        kinds = tasks.kind_T
        of_backward = np.flatnonzero(np.isin(kinds, [int(kind) for kind in _OF_BACKWARD]))
        updates = np.flatnonzero(kinds == TaskKind.UPDATE)
        self.end = int(updates[0]) if len(updates) else tasks.task_count
        self.begin = int(of_backward[0]) if len(of_backward) else self.end
        self.made = _Tasks()
        # The number in the window of each task of the step.
        self.number_T = np.full(tasks.task_count, -1, np.int64)
        self.slices: list[list[int]] = [[] for _ in plan.buckets]
        devices = len(tasks.topology.devices)
        self.latest_D = [-1] * devices
        self.renewals: list[list[int]] = [[] for _ in range(devices)]
        self.host_ns_D = [0] * devices
        self.launch_ns_T = self._launches()
        # The sum of each bucket in the step; and for each weight, the buckets that its cells are in.
        self.sums = np.flatnonzero(kinds == TaskKind.SYNCHRONIZE).tolist()
        self.buckets_of: dict[str, set[int]] = {}
        for number, bucket in enumerate(plan.buckets):
            for entry in bucket.entries:
                self.buckets_of.setdefault(entry.weight, set()).add(number)

    def _launches(self) -> IntArray:
        """Return how long the host of each task's device takes to issue it."""
        launch_ns_T = np.zeros(self.tasks.task_count, np.int64)
        launched = self.tasks.launched_ns_T
        for device in range(len(self.latest_D)):
            own = np.flatnonzero((self.tasks.resource_set_T == device) & (launched > 0))
            launch_ns_T[own] = np.diff(launched[own], prepend=0)
        return launch_ns_T

    def rotated(self) -> TaskGraph:
        """Return the window."""
        for task in range(self.begin, self.end):
            if self.tasks.kind_T[task] == TaskKind.SYNCHRONIZE:
                self._start_slices(task)
            else:
                self._move(task)
        operator = -1
        for task in range(self.begin):
            if self.tasks.kind_T[task] == TaskKind.FORWARD and self.tasks.subject_T[task] != operator:
                operator = int(self.tasks.subject_T[task])
                self._update(self.plan.updated_before.get(operator, ()))
            self._move(task)
        return self._graph()

    def _move(self, task: int) -> None:
        tasks = self.tasks
        preds = self.number_T[tasks.pred_E[tasks.pred_ptr_T1[task] : tasks.pred_ptr_T1[task + 1]]]
        # What the step before has done is there.
        waits = preds[preds >= 0].tolist()
        self.number_T[task] = self._add(
            (
                int(tasks.kind_T[task]),
                int(tasks.run_ns_T[task]),
                int(tasks.resource_set_T[task]),
                int(tasks.origin_T[task]),
                int(tasks.subject_T[task]),
                int(tasks.part_T[task]),
                int(tasks.size_bytes_T[task]),
            ),
            waits,
            int(self.launch_ns_T[task]),
        )
        if tasks.kind_T[task] in _RENEWALS:
            for device in tasks.ends(task):
                self.renewals[device].append(int(self.number_T[task]))

    def _add(
        self, column: tuple[int, int, int, int, int, int, int], waits: list[int], launch_ns: int = 0
    ) -> int:
        """Add a task; a computation waits for the one before it on its device, as where one host issues them."""
        number, device = len(self.made.columns), column[2]
        launched_ns = 0
        if device < len(self.latest_D):
            if self.latest_D[device] >= 0:
                waits = [*waits, self.latest_D[device]]
            self.latest_D[device] = number
            self.host_ns_D[device] += launch_ns
            launched_ns = self.host_ns_D[device] if launch_ns else 0
            if column[0] == TaskKind.FORWARD and self.renewals[device]:
                waits = [*waits, *self.renewals[device]]
                self.renewals[device] = []
        self.made.columns.append((*column, launched_ns))
        self.made.preds.append(waits)
        return number

    def _start_slices(self, task: int) -> None:
        """Add the sums that start once the bucket of a sum of the step is full."""
        tasks = self.tasks
        for bucket, part in self.plan.sums_after[int(tasks.subject_T[task])]:
            whole = self.sums[bucket]
            resource_set, size_bytes = int(tasks.resource_set_T[whole]), int(tasks.size_bytes_T[whole])
            first, last = slice_bounds(size_bytes, self.plan.slice_counts[bucket])[part]
            preds = tasks.pred_E[tasks.pred_ptr_T1[whole] : tasks.pred_ptr_T1[whole + 1]]
            added = self._add(
                (
                    int(TaskKind.SYNCHRONIZE),
                    self._sum_ns(resource_set, last - first),
                    resource_set,
                    int(tasks.origin_T[whole]),
                    bucket,
                    part,
                    last - first,
                ),
                self.number_T[preds].tolist(),
            )
            self.slices[bucket].append(added)

    def _sum_ns(self, resource_set: int, size_bytes: int) -> int:
        from search.kernels.collective_formulas import collectives_ns

        run_ns = np.empty(1, np.int64)
        collectives_ns(
            self.tasks.resource_sets, np.array([resource_set]), np.array([size_bytes], np.int64), run_ns
        )
        return int(run_ns[0])

    def _update(self, weights: tuple[str, ...]) -> None:
        """Add the updates of some weights, one a device that holds any of them."""
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

    def _graph(self) -> TaskGraph:
        columns = np.array(self.made.columns, np.int64).reshape(-1, 8).T.copy()
        counts = [len(preds) for preds in self.made.preds]
        return replace(
            self.tasks,
            kind_T=columns[0],
            run_ns_T=columns[1],
            resource_set_T=columns[2],
            origin_T=columns[3],
            subject_T=columns[4],
            part_T=columns[5],
            size_bytes_T=columns[6],
            launched_ns_T=columns[7],
            pred_ptr_T1=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            pred_E=np.array([pred for preds in self.made.preds for pred in preds], np.int64),
        )
