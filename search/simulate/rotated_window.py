"""The rotated window: backward of a step and forward of the next, made of a step (`search.simulate.steady_state`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from graph.plan import Plan
from search.simulate.task_graph import TaskGraph, TaskKind

_OF_BACKWARD = (
    TaskKind.RECOMPUTE,
    TaskKind.BACKWARD,
    TaskKind.GRADIENT_TRANSFER,
    TaskKind.GRADIENT_COLLECTIVE,
    TaskKind.SYNCHRONIZE,
)
_RENEWALS = (TaskKind.BUFFER_TRANSFER, TaskKind.BUFFER_COLLECTIVE)

# Kind, duration, resource set, origin, subject, part, bytes and launch of a task, as in `TaskGraph`.
Column = tuple[int, int, int, int, int, int, int, int]


@dataclass(slots=True)
class _Tasks:
    """The columns of the tasks of a window that are made so far, and the tasks that each waits for."""

    columns: list[Column] = field(default_factory=list)
    preds: list[list[int]] = field(default_factory=list)


class RotatedWindow(ABC):
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
                tasks.subject_T.tolist(), tasks.part_T.tolist(), tasks.size_bytes_T.tolist(),
                tasks.launch_ns_T.tolist(), strict=True,
            )
        )  # fmt: skip
        self.bounds, self.preds = tasks.pred_ptr_T1.tolist(), tasks.pred_E.tolist()
        devices = len(tasks.topology.devices)
        self.latest_D = [-1] * devices
        # What the next forward on each device waits for beside what its task in the step does.
        self.awaited_D: list[list[int]] = [[] for _ in range(devices)]
        gathers = np.flatnonzero(kinds == TaskKind.UPDATE_GATHER)
        # By shared bucket, its gather in the step.
        self.gathers = dict(zip(tasks.subject_T[gathers].tolist(), gathers.tolist(), strict=True))

    def _here(self, bucket: int) -> list[int]:
        """Return the last task on each of a bucket's devices, and the tasks that its next forward waits for."""
        waits: list[int] = []
        for device in self.plan.buckets[bucket].devices:
            waits += [*self.awaited_D[device], self.latest_D[device]]
        return [wait for wait in waits if wait >= 0]

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
        number = self._add(self.step[task], self._waits(task))
        self.number_T[task] = number
        if self.step[task][0] in _RENEWALS:
            for device in self.tasks.ends(task):
                self.awaited_D[device].append(number)

    def _add(self, column: Column, waits: list[int]) -> int:
        """Add a task; a computation waits for the one before it on its device, as where one host issues them."""
        number, device = len(self.made.columns), column[2]
        if device < len(self.latest_D):
            if self.latest_D[device] >= 0:
                waits = [*waits, self.latest_D[device]]
            self.latest_D[device] = number
            if column[0] == TaskKind.FORWARD and self.awaited_D[device]:
                waits = [*waits, *self.awaited_D[device]]
                self.awaited_D[device] = []
        self.made.columns.append(column)
        self.made.preds.append(waits)
        return number

    def _graph(self) -> TaskGraph:
        columns = np.array(self.made.columns, np.int64).reshape(-1, 8).T.copy()
        return replace(
            self.tasks,
            kind_T=columns[0],
            run_ns_T=columns[1],
            resource_set_T=columns[2],
            origin_T=columns[3],
            subject_T=columns[4],
            part_T=columns[5],
            size_bytes_T=columns[6],
            launch_ns_T=columns[7],
            pred_ptr_T1=np.cumsum([0, *map(len, self.made.preds)]).astype(np.int64),
            pred_E=np.array(list(chain.from_iterable(self.made.preds)), np.int64),
        )
