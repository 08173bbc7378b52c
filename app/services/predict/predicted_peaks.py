"""The peak memory of a strategy's devices, from walks over their programs (`runtime.observe.memory_trace`).

Devices that do the same share a walk. Where devices differ so much, or the network is so large, that walking them would
take long, there is none, and what counts is the sum that the search itself keeps
(`search.simulate.simulator.Simulation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from graph.errors import RuntimeFailure
from graph.intervals import Region, shape, volume
from graph.strategy import Sharding
from search.parallel.gc_pause import rare_collection

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.plan import Plan
    from graph.strategy import Strategy
    from graph.topology import Topology
    from graph.training import Training
    from runtime.observe.memory_trace import PredictedPeak

MOST_OPERATORS = 3000
"""Operators to walk for one strategy, over all devices that differ; one takes 2 to 10 milliseconds."""
MOST_PLACED = 250_000
"""Operators times devices up to which it is found out which devices do the same; a plan of so many takes 5 s."""
NEXT_TO_NOTHING = 0.002
"""The part of what a device makes, holds and sends by which devices that share a walk may differ."""


@rare_collection()
def predicted_peaks(
    graph: OperatorGraph,
    strategy: Strategy,
    topology: Topology,
    training: Training,
    *,
    most_operators: int = MOST_OPERATORS,
) -> tuple[PredictedPeak, ...] | None:
    """Return the memory that a step takes on each device; None where a walk would take too long.

    Stretches that a strategy compiles count as their operators do.
    """
    from graph.plan import build_plan
    from runtime.observe.memory_trace import UNUSED, trace_memory

    placed = len(graph.operators) * len(topology.devices)
    if len(graph.operators) > most_operators or placed > MOST_PLACED:
        return None
    apart = replace(strategy, compiled=())
    plan = build_plan(graph, apart, [device.node for device in topology.devices])
    keys = [
        (topology.kind_of(device.index).processor, share)
        for device, share in zip(topology.devices, shares(plan, len(topology.devices)), strict=True)
    ]
    first = {key: device for device, key in reversed(list(enumerate(keys)))}
    if len(first) * len(graph.operators) > most_operators:
        return None
    try:
        peak_of = {
            key: trace_memory(plan, training, device, key[0]) if key[1] else UNUSED
            for key, device in first.items()
        }
    except RuntimeFailure:
        return None
    return tuple(peak_of[key] for key in keys)


def shares(plan: Plan, count: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each of `count` devices, its part of a plan; devices with equal parts take equal memory."""
    entries: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    # Few are distinct: numbers of them take a tenth of the memory.
    numbers: dict[object, int] = {}
    for device, size_bytes, entry in _entries(plan):
        entries[device].append((size_bytes, numbers.setdefault(entry, len(numbers))))
    return tuple(_weighty(of_device) for of_device in entries)


def _weighty(entries: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the entries but for the smallest, which together are next to nothing: a scalar of the loss, say."""
    sizes = sorted(size for size, _ in entries)
    nothing = sum(sizes) * NEXT_TO_NOTHING
    least = next((size for size, below in zip(sizes, accumulate(sizes), strict=True) if below > nothing), 0)
    return tuple(entry for size, entry in entries if size >= least)


def _entries(plan: Plan) -> Iterator[tuple[int, int, object]]:
    """Yield devices, bytes that they make, hold or send, and a key of each such tensor."""
    from graph.rules import local_calls

    for index, (operator, configuration) in enumerate(
        zip(plan.graph.operators, plan.strategy.configurations, strict=True)
    ):
        calls = local_calls(plan.graph, operator, configuration.degrees)
        # Equal calls are one object, as a rule; calls with equal inputs and outputs have one number.
        numbers: dict[object, int] = {}
        of_call = {
            id(call): (
                sum(spec.size_bytes for spec in call.outputs),
                numbers.setdefault((call.inputs, call.outputs), len(numbers)),
            )
            for call in {id(call): call for call in calls}.values()
        }
        for device, call, active in zip(configuration.devices, calls, plan.active[index], strict=True):
            made, number = of_call[id(call)]
            yield device, made, (index, number, active)
    sizes = {value.name: value.spec.item_bytes for value in plan.graph.values}
    for name, held in plan.held.items():
        for device, region in held.items():
            yield device, volume(region) * sizes[name], (name, _form(region))
        if plan.sharding.get(name, Sharding.NONE) is not Sharding.NONE:
            for device, region in plan.updated(name):
                yield device, volume(region) * sizes[name], (name, "updated", _form(region))
    for number, bucket in enumerate(plan.buckets):
        for device in bucket.devices:
            yield device, bucket.size_bytes, number
    for exchanges in (plan.exchanges, plan.buffer_exchanges):
        for value, assemblies in exchanges.items():
            item_bytes = sizes[value]
            for assembly in assemblies:
                pieces = [
                    (_form(piece.region), piece.source_device == assembly.device) for piece in assembly.pieces
                ]
                read = volume(assembly.region) * item_bytes
                yield assembly.device, read, (value, _form(assembly.region), assembly.direct, tuple(pieces))
                for piece in assembly.remote_pieces:
                    sent = volume(piece.region) * item_bytes
                    yield piece.source_device, sent, (value, _form(piece.region))
    # Regions that collectives bring are among the assemblies; a collective changes when they arrive, not their sizes.


def _form(region: Region) -> Sequence[object]:
    """Return the sizes of a region, and the number of intervals of each dim: regions with several are copied."""
    return shape(region), tuple(len(indexes) for indexes in region)
