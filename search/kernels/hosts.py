"""Hosts: each issues its device's tasks, and the communications that the device takes part in, in program order."""

from __future__ import annotations

import numpy as np

from search.kernels.cache import entry, inner, inner_with_arrays
from search.kernels.records import Array, Machine, ResourceSets, Tasks


@inner_with_arrays
def issued(task_count: int, tasks: Tasks, sets: ResourceSets, device_count: int) -> Array:
    """Return when hosts have issued each task at the earliest, in ns: for a communication the last of its hosts."""
    issued_ns_T = np.zeros(task_count, np.int64)
    if not tasks.launch_ns[:task_count].any():
        return issued_ns_T
    host_ns_D = np.zeros(device_count, np.int64)
    for task in range(task_count):
        resource_set, launch_ns, latest_ns = tasks.resource_set[task], tasks.launch_ns[task], 0
        if resource_set < device_count:
            host_ns_D[resource_set] += launch_ns
            latest_ns = host_ns_D[resource_set]
        else:
            for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
                host_ns_D[sets.end[index]] += launch_ns
                latest_ns = max(latest_ns, host_ns_D[sets.end[index]])
        issued_ns_T[task] = latest_ns
    return issued_ns_T


@entry
def issued_tasks(tasks: Tasks, sets: ResourceSets, device_count: int) -> Array:
    """Return when hosts have issued each of all tasks at the earliest, in ns."""
    return issued(len(tasks.launch_ns), tasks, sets, device_count)


@inner
def issue(sets: ResourceSets, machine: Machine, resource_set: int) -> int:
    """Let the hosts of a communication issue it; return when all of them have, 0 where hosts take no time."""
    if not machine.has_hosts:
        return 0
    latest_ns = 0
    for index in range(sets.end_ptr[resource_set], sets.end_ptr[resource_set + 1]):
        device = sets.end[index]
        machine.host_ns_D[device] += sets.issue_ns[resource_set]
        latest_ns = max(latest_ns, machine.host_ns_D[device])
    return int(latest_ns)
