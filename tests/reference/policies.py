"""Slow, obvious communication policies; the definitions are those of `search.simulate.priorities`."""

from math import inf

from search.simulate.task_graph import TaskGraph, TaskKind


def predecessors(tasks: TaskGraph, task: int) -> set[int]:
    """Return what a task waits for."""
    return set(tasks.pred_E[tasks.pred_ptr_T1[task] : tasks.pred_ptr_T1[task + 1]].tolist())


def is_communication(tasks: TaskGraph, task: int) -> bool:
    """Return whether a task holds links."""
    return int(tasks.resource_set_T[task]) >= len(tasks.topology.devices)


def layer(tasks: TaskGraph) -> list[int]:
    """Return of each communication the place of who waits for it first in a list of all work; 0 of computations."""
    order, graph = tasks.graph.order, tasks.graph
    work = [("forward", operator) for operator in order.of_loss]
    work += [("backward", operator) for operator in reversed(order.of_loss)]
    work += [("forward", operator) for operator in order.of_buffers]
    work += [("next", operator) for operator in (*order.of_loss, *order.of_buffers)]
    kinds = {TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.RECOMPUTE: "backward"}
    of_bucket: dict[int, int] = {}

    def unless_waited_for(task: int, kind: TaskKind, subject: int) -> int:
        if kind is TaskKind.SYNCHRONIZE:
            backwards = [p for p in predecessors(tasks, task) if tasks.kind_T[p] == TaskKind.BACKWARD]
            readers = [int(tasks.subject_T[p]) for p in backwards]
        elif kind is TaskKind.UPDATE_GATHER:
            return of_bucket[subject]
        elif kind in (TaskKind.BUFFER_TRANSFER, TaskKind.BUFFER_COLLECTIVE):
            values = len([value for value in graph.values if value.kind.name == "OPERATOR"])
            readers = [operator for operator, _ in graph.readers[graph.buffer_updates[subject - values][0]]]
        else:
            readers = []
        return min((work.index(("next", reader)) for reader in readers), default=len(work))

    numbers = [0] * tasks.task_count
    for task in range(tasks.task_count):
        if is_communication(tasks, task):
            kind, subject = TaskKind(int(tasks.kind_T[task])), int(tasks.subject_T[task])
            numbers[task] = unless_waited_for(task, kind, subject)
            if kind is TaskKind.SYNCHRONIZE:
                of_bucket[subject] = numbers[task]
    for task in range(tasks.task_count):
        kind = TaskKind(int(tasks.kind_T[task]))
        if kind in kinds:
            place = work.index((kinds[kind], int(tasks.subject_T[task])))
            for before in predecessors(tasks, task):
                if is_communication(tasks, before):
                    numbers[before] = min(numbers[before], place)
    return numbers


def waited_for(tasks: TaskGraph) -> dict[int, set[int]]:
    """Return of each computation all communications that it waits for."""
    before: list[set[int]] = []
    for task in range(tasks.task_count):
        before.append(set())
        for other in predecessors(tasks, task):
            before[task] |= before[other] | ({other} if is_communication(tasks, other) else set())
    return {task: found for task, found in enumerate(before) if not is_communication(tasks, task)}


def together(dep: dict[int, set[int]], left: set[int], time_ns: list[int]) -> dict[int, float]:
    """Return M+ of each communication that is left."""
    return {
        one: min(
            (
                sum(time_ns[other] for other in found & left)
                for found in dep.values()
                if one in found and len(found & left) > 1
            ),
            default=inf,
        )
        for one in left
    }


def alone(dep: dict[int, set[int]], left: set[int], time_ns: list[int]) -> dict[int, int]:
    """Return P of each communication that is left."""
    return {one: sum(time_ns[task] for task, found in dep.items() if found & left == {one}) for one in left}


def consumer(tasks: TaskGraph, one: int) -> int:
    """Return the first task that waits for a communication itself."""
    waiting = (task for task in range(tasks.task_count) if one in predecessors(tasks, task))
    return min(waiting, default=tasks.task_count)


def tic(tasks: TaskGraph) -> list[int]:
    """Return numbers by M+ where every communication takes 1, then by consumer; 0 of computations."""
    dep = waited_for(tasks)
    left = {task for task in range(tasks.task_count) if is_communication(tasks, task)}
    wanted = together(dep, left, [1] * tasks.task_count)
    keys = {one: (wanted[one], consumer(tasks, one)) for one in left}
    ranks = sorted(set(keys.values()))
    return [ranks.index(keys[task]) if task in left else 0 for task in range(tasks.task_count)]


def tac(tasks: TaskGraph) -> list[int]:
    """Return numbers by Johnson's rule, worked out anew for those that are left; 0 of computations."""
    dep, time_ns = waited_for(tasks), tasks.run_ns_T.tolist()
    left = {task for task in range(tasks.task_count) if is_communication(tasks, task)}
    numbers = [0] * tasks.task_count
    for number in range(len(left)):
        saved, wanted = alone(dep, left, time_ns), together(dep, left, time_ns)
        chosen = min(
            left,
            key=lambda one: (
                (0, time_ns[one]) if time_ns[one] <= saved[one] else (1, -saved[one]),
                wanted[one],
                consumer(tasks, one),
                time_ns[one],
                one,
            ),
        )
        numbers[chosen] = number
        left.remove(chosen)
    return numbers
