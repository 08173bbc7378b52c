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
from graph.schedule import MicroBatches, Schedule
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
"""Operators to walk for one strategy, over all devices that differ and all micro-batches; one takes 2 to 10 ms."""
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

    Stretches that a strategy compiles count as their operators do. Of many micro-batches a few are walked
    (`_fewer_micro_batches`).
    """
    from graph.plan import build_plan

    if len(graph.operators) > most_operators or len(graph.operators) * len(topology.devices) > MOST_PLACED:
        return None
    apart = replace(strategy, compiled=())
    plan = build_plan(graph, apart, [device.node for device in topology.devices])
    few = _fewer_micro_batches(plan)
    if few is None:
        return _walked(plan, topology, training, most_operators)
    schedule, count = strategy.micro_batches.schedule, strategy.micro_batches.count
    before, after = (
        _walked(
            replace(plan, strategy=replace(apart, micro_batches=MicroBatches(number, schedule))),
            topology,
            training,
            most_operators // 2,
        )
        for number in few
    )
    if before is None or after is None:
        return None
    rounds = (count - few[1]) // (few[1] - few[0])
    return tuple(_extended(was, now, rounds) for was, now in zip(before, after, strict=True))


def _fewer_micro_batches(plan: Plan) -> tuple[int, int] | None:
    """Return two numbers of micro-batches, fewer together than a plan's, by which its peaks differ as any two do.

    In all schedules but gpipe, once as many micro-batches are under way as ever are, each further round of them does
    what the round before did: only its inputs are there beside. In gpipe each is under way to the end, so that the peak
    may move from the update to the backward: all are walked. None where that is to be done.
    """
    schedule, count = plan.strategy.micro_batches.schedule, plan.strategy.micro_batches.count
    if count == 1 or schedule is Schedule.GPIPE:
        return None
    groups = 1 + max(stage.group for stage in plan.stages)
    few = (3 * groups, 4 * groups) if schedule is Schedule.INTERLEAVED else (groups + 1, groups + 2)
    return few if sum(few) < count else None


def _extended(before: PredictedPeak, after: PredictedPeak, rounds: int) -> PredictedPeak:
    """Return the peak after more rounds, each of which adds as many bytes to it as the last one."""
    from runtime.observe.memory_trace import PredictedPeak

    was = dict(before.parts)
    return PredictedPeak(
        after.peak_bytes + rounds * (after.peak_bytes - before.peak_bytes),
        tuple((part, size + rounds * (size - was[part])) for part, size in after.parts),
    )


def _walked(
    plan: Plan, topology: Topology, training: Training, most_operators: int
) -> tuple[PredictedPeak, ...] | None:
    """Return the peaks of walks with all micro-batches of a plan; None where they would take too long."""
    from runtime.observe.memory_trace import UNUSED, trace_memory

    keys = [
        (topology.kind_of(device.index).processor, share)
        for device, share in zip(topology.devices, shares(plan, len(topology.devices)), strict=True)
    ]
    first = {key: device for device, key in reversed(list(enumerate(keys)))}
    # A device goes through the operators of its own stages, for each micro-batch.
    groups = 1 + max(stage.group for stage in plan.stages)
    count = plan.strategy.micro_batches.count
    times = 1 if count == 1 else count / groups
    if len(first) * len(plan.graph.operators) * times > most_operators:
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
