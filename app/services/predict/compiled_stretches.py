"""Costs of the stretches that a strategy compiles (`graph.stretches`), in its simulation and in its choice.

A stretch is one call on each device, measured and kept as any other. In the simulation its time takes the place of the
sum of its operators' times, of which each keeps its share: nothing happens between them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graph.calls import LocalCall
from graph.errors import UsageError
from graph.operator_ranges import OperatorRange, OperatorRanges
from graph.strategy import Strategy
from search.cost.cost_table import ORIGIN_CODE, CallCost, CostTable, Origin

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.plan import Plan
    from graph.topology import Topology
    from search.simulate.task_graph import TaskGraph


@dataclass(frozen=True, slots=True)
class DeviceStretch:
    """A stretch on one device: its call, and the calls of its operators there, each with its operator."""

    stretch: OperatorRange
    device: int
    kind_name: str
    call: LocalCall
    parts: tuple[tuple[int, LocalCall], ...]


def has_compiler() -> bool:
    """Return whether torch.compile finds a C++ compiler, which it needs whatever the device."""
    named = os.environ.get("CXX")
    return any(shutil.which(name) for name in ([named] if named else ["g++", "clang++", "c++"]))


def check_compiler(what: str = "--compile") -> None:
    """Check that torch.compile finds a compiler, for whatever needs it: an option or a strategy.

    Raises:
        UsageError: there is none.
    """
    if not has_compiler():
        raise UsageError(
            f"{what}: {os.environ.get('CXX') or 'g++ or clang++'} is not there, must be for torch.compile; install a "
            "C++ compiler or name it in CXX"
        )


def with_all_stretches(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Strategy:
    """Return the strategy with all its stretches compiled."""
    from graph.stretches import stretches

    return replace(strategy, compiled=stretches(_plan(graph, strategy, topology)))


def compiled_stretches(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> list[DeviceStretch]:
    """Return the stretches that a strategy compiles, on every device that has a part of them.

    Raises:
        StrategyError: the strategy compiles operators that communicate in between.
    """
    if not strategy.compiled:
        return []
    from graph.stretches import check_compiled

    plan = _plan(graph, strategy, topology)
    check_compiled(plan)
    return _on_devices(plan, topology, strategy.compiled)


def _on_devices(plan: Plan, topology: Topology, ranges: OperatorRanges) -> list[DeviceStretch]:
    from runtime.lowering.compiled_stretches import stretch_calls
    from runtime.lowering.tensor_slots import TensorSlots

    return [
        DeviceStretch(stretch, device.index, device.kind_name, replace(of.call, bindings=()), of.parts)
        for device in topology.devices
        for stretch, of in stretch_calls(plan, TensorSlots(plan, device.index), ranges).items()
    ]


def faster_stretches(
    graph: OperatorGraph, strategy: Strategy, topology: Topology, table: CostTable
) -> OperatorRanges:
    """Return the stretches of a strategy that take less time compiled, on the device that takes longest.

    Costs are those of `table`, which measures missing ones where its source does; one that is not measured counts as
    slower.
    """
    from graph.stretches import stretches

    longest: dict[OperatorRange, list[int]] = {}
    plan = _plan(graph, strategy, topology)
    everything = _on_devices(plan, topology, stretches(plan))
    _resolve(everything, table)
    for of in everything:
        (compiled,) = table.costs([of.call], of.kind_name)
        apart_ns = sum(cost.forward_ns + back_ns for cost, back_ns in _parts(graph, of, table))
        compiled_ns = compiled.forward_ns + compiled.backward_ns if _is_measured(compiled) else apart_ns
        times = longest.setdefault(of.stretch, [0, 0])
        times[:] = max(times[0], compiled_ns), max(times[1], apart_ns)
    return tuple(stretch for stretch, (compiled_ns, apart_ns) in longest.items() if compiled_ns < apart_ns)


def with_compiled_costs(tasks: TaskGraph, stretches: Sequence[DeviceStretch], table: CostTable) -> TaskGraph:
    """Return the task graph of a strategy with the times of the stretches that it compiles, as far as measured."""
    if not stretches:
        return tasks
    import numpy as np

    from search.simulate.task_graph import TaskKind

    _resolve(stretches, table)
    run_ns_T, origin_T, launch_ns_T = (
        tasks.run_ns_T.copy(),
        tasks.origin_T.copy(),
        tasks.launch_ns_T.copy(),
    )
    device_T = np.where(tasks.resource_set_T < len(tasks.topology.devices), tasks.resource_set_T, -1)
    for of in stretches:
        (compiled,) = table.costs([of.call], of.kind_name)
        if not _is_measured(compiled):
            continue
        operators = [index for index, _ in of.parts]
        for kind, whole_ns, launch_ns in (
            (TaskKind.FORWARD, compiled.forward_ns, compiled.forward_launch_ns),
            (TaskKind.BACKWARD, compiled.backward_ns, compiled.backward_launch_ns),
        ):
            own = np.flatnonzero(
                (tasks.kind_T == kind) & (device_T == of.device) & np.isin(tasks.subject_T, operators)
            )
            if not len(own):
                continue
            # Shares of the time as the parts have it, whole nanoseconds that add up.
            ends = np.cumsum(run_ns_T[own])
            scaled = np.rint(ends * (whole_ns / max(int(ends[-1]), 1))).astype(np.int64)
            scaled[-1] = whole_ns
            run_ns_T[own] = np.diff(scaled, prepend=0)
            origin_T[own] = ORIGIN_CODE[Origin.MEASURED]
            # The host issues them as one.
            launch_ns_T[own] = 0
            launch_ns_T[own[0]] = launch_ns
    return replace(tasks, run_ns_T=run_ns_T, origin_T=origin_T, launch_ns_T=launch_ns_T)


def _plan(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Plan:
    from graph.plan import build_plan

    return build_plan(graph, strategy, [device.node for device in topology.devices])


def _resolve(stretches: Sequence[DeviceStretch], table: CostTable) -> None:
    """Resolve the costs of all stretches at once, so that missing ones are measured together."""
    calls: dict[str, list[LocalCall]] = {}
    for of in stretches:
        calls.setdefault(of.kind_name, []).append(of.call)
    for kind_name, of_kind in calls.items():
        table.costs(of_kind, kind_name)


def _is_measured(cost: CallCost) -> bool:
    return cost.origin == ORIGIN_CODE[Origin.MEASURED]


def _parts(graph: OperatorGraph, of: DeviceStretch, table: CostTable) -> list[tuple[CallCost, int]]:
    """Return the cost of each call of a stretch, and its backward with the sums of gradients that follow it."""
    costs = table.costs([call for _, call in of.parts], of.kind_name)
    return [
        (cost, table.backward_ns(cost, call, graph.summed_slots[index], of.kind_name))
        for cost, (index, call) in zip(costs, of.parts, strict=True)
    ]
