"""Predict the time of one training step.

Three orders. `program`: every resource serves its tasks in program order, the order in which the runtime issues them;
one pass, a longest path. `fifo`: tasks are served in order of (ready time, task), FlexFlow's Algorithm 1. `priority`:
computations as in `fifo`; a link takes, of the communications that are ready, the one with the smallest number (of
equals the first task), and lets it end. Numbers are those of `search.simulate.priorities`: of `layer`, with
`priority-tic` and `priority-tac` of TIC and TAC. A communication holds all its links at once: it starts when it is
the first at each of them and all are free, so a link may stand still, kept for one that waits for another. Time goes
from instant to instant. At each, what ends then ends, computations that are ready are served, and then communications
start, each link given once; where something takes no time, the instant is gone through again.

In all, a task starts when all that it waits for has ended and all that it holds is free. Communication slows the
compute of the devices where it ends: when a transfer or a collective of duration c starts, a device of contention
factor f owes f * c (rounded to whole nanoseconds, halves up; f is kept in parts per million), and twice that of a
collective in which every device sends and receives at once: all but broadcast and reduce. The next compute task that
the device serves takes longer by what is owed beyond the device's idle time just before it, and the debt is then nil.

Source: FlexFlow (arXiv:1807.05358), Algorithm 1; contention is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from graph.collectives import CollectiveKind
from graph.errors import UsageError
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from graph.topology import Topology
from graph.training import Training
from search.cost.calls_to_profile import LocalCalls
from search.cost.cost_table import ORIGINS, CostTable, Origin
from search.cost.link_costs import LinkCosts
from search.orders import Order
from search.simulate.scheduling import Scheduling
from search.simulate.steady_state import in_steady_state
from search.simulate.task_graph import COMPUTE_KINDS, TaskGraph, TaskGraphBuilder

# What peak memory rests on: the sum that the search keeps, or a walk through the devices' programs.
Account = Literal["sum", "walk"]
IntArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Simulation:
    """A simulated training step.

    start_ns, end_ns: of every task. cause: the task that each one had to wait for last, -1 where there is none: it
    waited for nothing, or for its hosts, which issue tasks in program order.

    Peak memory of a device, in bytes, is that at the end of the forward, when all that the backward needs is alive:
    weights (with gradient and optimizer state where they are trained; of what is shared its share), buffers and inputs
    that its tasks read; what its tasks keep for their backward (`search.simulate.saved_tensors`); and the assemblies
    that carry a gradient and are not just one local task's output. Of a group of operators that is made again in the
    backward it counts what enters and what others need; and, where that is more, what is there once some group is
    made again: what the group's backward needs instead of what lies behind the group. It is a sum, quick to bring up
    to date in the search's loop; what a program takes in truth, `app.services.predict.predicted_peaks` finds.

    Of a step in micro-batches it is the most over the order of the schedule: weights, buffers and the inputs of all
    micro-batches throughout, and what each stage on the device keeps of those micro-batches that it has been through
    forward and not yet backward. Gradients of weights are whole, since they add up before they are shared.
    """

    tasks: TaskGraph
    order: Order
    step_time_ns: int
    start_ns: IntArray
    end_ns: IntArray
    cause: IntArray
    account: Account = "sum"

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self.step_time_ns / 1e9

    @cached_property
    def busy_ns(self) -> IntArray:
        """How long each task runs, contention included."""
        return self.end_ns - self.start_ns

    @cached_property
    def _is_compute(self) -> IntArray:
        return np.isin(self.tasks.kind_T, [int(kind) for kind in COMPUTE_KINDS])

    @cached_property
    def compute_s(self) -> tuple[float, ...]:
        """Seconds that each device computes."""
        compute = self._is_compute
        total = np.bincount(
            self.tasks.resource_set_T[compute],
            self.busy_ns[compute],
            minlength=len(self.tasks.topology.devices),
        )
        return tuple(float(item) / 1e9 for item in total)

    @cached_property
    def launch_s(self) -> tuple[float, ...]:
        """Seconds in which the host of each device issues its tasks; a step takes no less."""
        tasks, devices = self.tasks, len(self.tasks.topology.devices)
        of_device = tasks.resource_set_T < devices
        launch_ns = np.bincount(
            tasks.resource_set_T[of_device], tasks.launch_ns_T[of_device], minlength=devices
        )
        for task in np.flatnonzero(~of_device & (tasks.launch_ns_T > 0)).tolist():
            launch_ns[list(tasks.ends(task))] += tasks.launch_ns_T[task]
        return tuple(float(item) / 1e9 for item in launch_ns)

    @cached_property
    def bounds_ns(self) -> tuple[int, int]:
        """The least and the most that the order can make of these tasks: all of the busiest resource, all there is.

        A host is busy to its last task, and where nothing runs something waits for its host.
        """
        resource_sets, resource_set_T = self.tasks.resource_sets, self.tasks.resource_set_T
        first, last = (
            resource_sets.resource_ptr[resource_set_T],
            resource_sets.resource_ptr[resource_set_T + 1],
        )
        counts = last - first
        places = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        busy_ns_R = np.zeros(self.tasks.resource_count, np.int64)
        np.add.at(busy_ns_R, resource_sets.resource[places], np.repeat(self.busy_ns, counts))
        launched_ns = int(self.tasks.launched_ns_T.max(initial=0))
        return max(int(busy_ns_R.max(initial=0)), launched_ns), int(self.busy_ns.sum()) + launched_ns

    @property
    def scheduling(self) -> Scheduling:
        """Makespan and bounds of the order, of which follow efficiency and potential."""
        return Scheduling(self.step_time_ns, *self.bounds_ns)

    @property
    def efficiency(self) -> float:
        """Scheduling efficiency E of TicTac, see `search.simulate.scheduling`."""
        return self.scheduling.efficiency

    @property
    def speedup_potential(self) -> float:
        """Speed-up potential S of TicTac, see `search.simulate.scheduling`."""
        return self.scheduling.speedup_potential

    @cached_property
    def bytes_moved(self) -> int:
        """Bytes that all devices together send: of all transfers, and of collectives (`sent_bytes`)."""
        collective = self.tasks.resource_sets.operation[self.tasks.resource_set_T] >= 0
        moved = int(self.tasks.size_bytes_T[~collective].sum())
        return moved + sum(self.sent_bytes(task) for task in np.flatnonzero(collective).tolist())

    def sent_bytes(self, task: int) -> int:
        """Return the bytes that all members of a collective together send.

        With p of them that is p - 1 bytes a byte, of an all-reduce twice that; of an all-to-all it is its size.
        """
        operation, hops = self.tasks.operation(task), len(self.tasks.ends(task)) - 1
        if operation is CollectiveKind.ALL_TO_ALL:
            hops = 1
        elif operation is CollectiveKind.ALL_REDUCE:
            hops *= 2
        return hops * int(self.tasks.size_bytes_T[task])

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The tasks, first to last, each waiting for the one before it, that end with the step."""
        if not len(self.end_ns):
            return ()
        task = int(np.argmax(self.end_ns))
        path = []
        while task >= 0:
            path.append(task)
            task = int(self.cause[task])
        return tuple(reversed(path))

    @cached_property
    def shares(self) -> dict[Origin, float]:
        """What share of all busy time, computation and communication, rests on which kind of cost."""
        total = np.bincount(self.tasks.origin_T, self.busy_ns, minlength=len(ORIGINS))
        whole = float(total.sum())
        return {
            origin: float(part) / whole if whole else 0.0 for origin, part in zip(ORIGINS, total, strict=True)
        }

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each device."""
        return tuple(self.tasks.peak_memory_D.tolist())

    def with_peaks(self, peak_bytes: Sequence[int]) -> Simulation:
        """Return the same simulation with peak memory that is better known, one entry a device."""
        peak_memory_D = np.array(peak_bytes, np.int64)
        return replace(self, tasks=replace(self.tasks, peak_memory_D=peak_memory_D), account="walk")

    def at_speed(self, speed: float) -> Simulation:
        """Return the simulation of the same tasks with computations `speed` times as fast, each in whole nanoseconds.

        Communication takes as long as before, also the computing time that contention takes for it; hosts issue tasks
        as before.
        """
        run_ns_T = self.tasks.run_ns_T.copy()
        run_ns_T[self._is_compute] = np.rint(run_ns_T[self._is_compute] / speed)
        return simulate_tasks(replace(self.tasks, run_ns_T=run_ns_T), self.order)

    @cached_property
    def fullness(self) -> float:
        """The largest part of its memory that a device needs."""
        topology = self.tasks.topology
        return max(
            needed / topology.kind_of(device).memory_bytes
            for device, needed in enumerate(self.peak_memory_bytes)
        )

    @cached_property
    def infeasible_devices(self) -> tuple[int, ...]:
        """Devices that have less memory than they need."""
        topology = self.tasks.topology
        return tuple(
            device
            for device, needed in enumerate(self.peak_memory_bytes)
            if needed > topology.kind_of(device).memory_bytes
        )

    @property
    def feasible(self) -> bool:
        """Whether every device's memory suffices."""
        return not self.infeasible_devices


def _check_numbers(priority_T: IntArray, count: int) -> None:
    if priority_T.shape != (count,) or priority_T.min(initial=0) < 0 or priority_T.max(initial=0) >= 2**31:
        raise UsageError(
            f"simulation: {priority_T.shape} numbers of communications, {priority_T.min(initial=0)} to "
            f"{priority_T.max(initial=0)}, must be one for each of {count} tasks, from 0 to {2**31 - 1}; number them so"
        )


def simulate_tasks(
    tasks: TaskGraph, order: Order = "program", *, priority_T: IntArray | None = None
) -> Simulation:
    """Simulate a task graph.

    priority_T: the number of each task, 0 or more and below 2^31, instead of those of the order's policy.

    Raises:
        UsageError: there are other numbers of them, or other numbers; the order `priority-tac` refuses the graph.
    """
    from search.kernels.fifo_order import run_fifo_order
    from search.kernels.priority_order import run_priority_order
    from search.kernels.program_order import run_program_order
    from search.kernels.records import Timeline
    from search.simulate.priorities import layer, tac, tic

    count = tasks.task_count
    timeline = Timeline(*(np.zeros(count, np.int64) for _ in range(3)))
    arguments = (
        count,
        tasks.flat,
        tasks.resource_sets,
        tasks.contention_ppm_D,
        tasks.resource_count,
        timeline,
    )
    if order == "program":
        makespan_ns = run_program_order(*arguments)
    elif order == "fifo":
        makespan_ns = run_fifo_order(*arguments, np.iinfo(np.int64).max)
    else:
        if priority_T is not None:
            _check_numbers(priority_T, count)
        else:
            priority_T = {"priority": layer, "priority-tic": tic, "priority-tac": tac}[order](tasks)
        makespan_ns = run_priority_order(*arguments, priority_T, np.iinfo(np.int64).max)
    return Simulation(tasks, order, int(makespan_ns), timeline.start_ns, timeline.end_ns, timeline.cause)


def simulate(
    graph: OperatorGraph,
    strategy: Strategy,
    topology: Topology,
    costs: CostTable,
    training: Training,
    *,
    links: LinkCosts | None = None,
    order: Order = "program",
    local_calls: LocalCalls | None = None,
) -> Simulation:
    """Simulate one training step of a strategy, of the policy p3 in the steady state.

    Raises:
        StrategyError: the strategy does not fit the graph or the topology.
        CostError: a local call has no cost.
    """
    strategy.validate(graph, len(topology.devices))
    builder = TaskGraphBuilder(graph, topology, costs, training, links=links, local_calls=local_calls)
    return simulate_tasks(in_steady_state(builder.build(strategy), strategy, builder), order)
