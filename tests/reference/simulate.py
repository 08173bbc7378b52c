"""Slow, obvious simulation of a task graph in the three orders, with the semantics of `search.simulate.simulator`."""

import heapq
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task: its duration, the tasks that it waits for, what it holds, and whom it slows.

    device: the device of a compute task, else None; then `ends` are the devices whose compute it slows, each as an end
        of `flows` messages at once.
    launch_ns: in which the host of its device, or of each of its ends, issues it; a host issues one task after the
        other, in the order of the list.
    """

    run_ns: int
    predecessors: tuple[int, ...]
    resources: tuple[int, ...]
    device: int | None
    ends: tuple[int, ...] = ()
    flows: int = 1
    launch_ns: int = 0


def launched(tasks: list[Task]) -> list[int]:
    """Return when each task is issued at the earliest."""
    of_hosts = [task.ends if task.device is None else (task.device,) for task in tasks]
    return [
        max(
            sum(
                other.launch_ns
                for other, hosts in zip(tasks[: index + 1], of_hosts, strict=False)
                if host in hosts
            )
            for host in of_hosts[index]
        )
        for index in range(len(tasks))
    ]


class Machine:
    """When each resource is free, and what each device owes."""

    def __init__(self, contention_ppm: list[int]) -> None:
        self.free_ns: dict[int, int] = {}
        self.owed_ns: dict[int, int] = {}
        self.contention_ppm = contention_ppm

    def serve(self, task: Task, ready_ns: int) -> tuple[int, int]:
        """Run a task; return its start and end."""
        start_ns = max([ready_ns, *(self.free_ns.get(resource, 0) for resource in task.resources)])
        run_ns = task.run_ns
        if task.device is not None:
            idle_ns = start_ns - self.free_ns.get(task.device, 0)
            run_ns += max(0, self.owed_ns.pop(task.device, 0) - idle_ns)
        for device in task.ends:
            # Halves up: the integer nearest to factor * duration.
            slowed_ns = (2 * self.contention_ppm[device] * task.flows * run_ns + 1_000_000) // 2_000_000
            self.owed_ns[device] = self.owed_ns.get(device, 0) + slowed_ns
        for resource in task.resources:
            self.free_ns[resource] = start_ns + run_ns
        return start_ns, start_ns + run_ns


def program_order(tasks: list[Task], contention_ppm: list[int]) -> list[tuple[int, int]]:
    """Return (start, end) of every task, each resource serving in the order of the list."""
    machine = Machine(contention_ppm)
    times: list[tuple[int, int]] = []
    for task, launched_ns in zip(tasks, launched(tasks), strict=True):
        ready_ns = max([launched_ns, *(times[predecessor][1] for predecessor in task.predecessors)])
        times.append(machine.serve(task, ready_ns))
    return times


def fifo_order(tasks: list[Task], contention_ppm: list[int]) -> list[tuple[int, int]]:
    """Return (start, end) of every task, served by (ready time, task): FlexFlow's Algorithm 1."""
    machine = Machine(contention_ppm)
    times: dict[int, tuple[int, int]] = {}
    launched_ns = launched(tasks)
    queue = [(launched_ns[index], index) for index, task in enumerate(tasks) if not task.predecessors]
    heapq.heapify(queue)
    while queue:
        ready_ns, index = heapq.heappop(queue)
        times[index] = machine.serve(tasks[index], ready_ns)
        for other, task in enumerate(tasks):
            if index in task.predecessors and all(p in times for p in task.predecessors):
                ready_ns = max([launched_ns[other], *(times[p][1] for p in task.predecessors)])
                heapq.heappush(queue, (ready_ns, other))
    return [times[index] for index in range(len(tasks))]


def priority_order(tasks: list[Task], contention_ppm: list[int], numbers: list[int]) -> list[tuple[int, int]]:
    """Return (start, end) of every task: computations as `fifo_order`, each link by (number, task).

    From instant to instant: computations that are ready are served, those ready first, first. Then communications
    that are ready are asked one by one, the smallest (number, task) first, whether all their links are free and none is
    wanted by one that was asked before.
    """
    machine = Machine(contention_ppm)
    times: dict[int, tuple[int, int]] = {}
    launched_ns = launched(tasks)
    ready_ns = {index: launched_ns[index] for index, task in enumerate(tasks) if not task.predecessors}

    def serve(index: int, from_ns: int) -> None:
        times[index] = machine.serve(tasks[index], from_ns)
        del ready_ns[index]
        for other, task in enumerate(tasks):
            if index in task.predecessors and all(p in times for p in task.predecessors):
                ready_ns[other] = max([launched_ns[other], *(times[p][1] for p in task.predecessors)])

    now_ns = 0
    while ready_ns:
        while computations := [
            (ns, index) for index, ns in ready_ns.items() if ns <= now_ns and tasks[index].device is not None
        ]:
            serve(min(computations)[1], min(computations)[0])
        wanted: set[int] = set()
        idle = True
        for _, index in sorted((numbers[index], index) for index, ns in ready_ns.items() if ns <= now_ns):
            links = set(tasks[index].resources)
            if not links & wanted and all(machine.free_ns.get(link, 0) <= now_ns for link in links):
                serve(index, now_ns)
                idle = False
            wanted |= links
        if idle and ready_ns:
            known = [*ready_ns.values(), *machine.free_ns.values()]
            now_ns = min(ns for ns in known if ns > now_ns)
    return [times[index] for index in range(len(tasks))]
