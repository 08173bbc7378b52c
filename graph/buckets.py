"""Buckets and gathers: which gradients of weights are summed together, which weights kept in shares gathered together.

The plan (`graph.plan`) says when.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from graph.intervals import Region, volume
from graph.operators import OperatorGraph
from graph.recomputation import needed_at
from graph.strategy import Sharding, Strategy
from graph.weight_placement import WeightCell, cells, gathered_elements


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A cell of one weight inside a bucket."""

    weight: str
    cell: WeightCell


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of cells with the same holders, summed over them after backward of `after`.

    By one all-reduce; where the holders share the cells, by one reduce-scatter of as many equal slices, of
    `size_bytes` together.
    """

    devices: tuple[int, ...]
    entries: tuple[BucketEntry, ...]
    size_bytes: int
    after: int
    sharding: Sharding = Sharding.NONE


@dataclass(frozen=True, slots=True)
class Gather:
    """Cells of weights that are kept in shares, gathered by their holders before an operator needs them."""

    devices: tuple[int, ...]
    entries: tuple[BucketEntry, ...]
    size_bytes: int


Gathers = dict[int, tuple[Gather, ...]]


def gradient_buckets(
    graph: OperatorGraph,
    strategy: Strategy,
    held: dict[str, dict[int, Region]],
    active: tuple[tuple[bool, ...], ...],
    bucket_bytes: int,
    ends: Collection[int] = (),
) -> tuple[Bucket, ...]:
    """Return the gradient buckets, one series a set of holders and kind of sharing, as gradients become complete.

    A bucket's synchronization starts after the operator whose backward fills it: this is its overlap with the backward.
    Of buckets that are not full it starts at the end of the backward, or after the next of the operators `ends`.
    """
    complete: dict[int, list[tuple[str, Sharding]]] = {}
    for number, weight in enumerate(graph.weights):
        users = [index for index, _ in graph.consumers[weight.name] if any(active[index])]
        if users:
            complete.setdefault(min(users), []).append((weight.name, strategy.sharding_of(number)))
    buckets: list[Bucket] = []
    filling: dict[tuple[tuple[int, ...], Sharding], tuple[list[BucketEntry], int]] = {}
    for index in range(len(graph.operators) - 1, -1, -1):
        for name, level in complete.get(index, ()):
            item_bytes = graph.value_by_name[name].spec.item_bytes
            for cell in cells(held[name]):
                if len(cell.devices) < 2:
                    continue
                entries, size = filling.get((cell.devices, level), ([], 0))
                entries.append(BucketEntry(name, cell))
                size += _sent_elements(cell, level) * item_bytes
                if size >= bucket_bytes:
                    buckets.append(Bucket(cell.devices, tuple(entries), size, index, level))
                    filling.pop((cell.devices, level), None)
                else:
                    filling[cell.devices, level] = (entries, size)
        if index in ends or index == 0:
            buckets.extend(
                Bucket(devices, tuple(entries), size, index, level)
                for (devices, level), (entries, size) in filling.items()
            )
            filling.clear()
    return tuple(buckets)


def _sent_elements(cell: WeightCell, level: Sharding) -> int:
    return volume(cell.region) if level is Sharding.NONE else gathered_elements(cell)


def weight_gathers(
    graph: OperatorGraph,
    strategy: Strategy,
    held: dict[str, dict[int, Region]],
    active: tuple[tuple[bool, ...], ...],
    least_bytes: int,
    firsts: Sequence[int] = (),
) -> tuple[Gathers, Gathers]:
    """Return the gathers before operators' forward and backward: one gather a set of holders.

    firsts: the first operators of stages, ascending, each of which gathers for itself.
    """
    forward: dict[int, list[str]] = {}
    backward: dict[int, list[str]] = {}
    for number, weight in enumerate(graph.weights):
        readers = graph.weight_readers[weight.name]
        if strategy.sharding_of(number) is not Sharding.PARAMETERS or not readers:
            continue
        if all(len(cell.devices) == 1 for cell in cells(held[weight.name])):
            continue
        forward.setdefault(min(readers), []).append(weight.name)
        reached = [index for index in readers if any(active[index])]
        if reached:
            backward.setdefault(needed_at(strategy.recomputation, max(reached)), []).append(weight.name)
    return (
        _merged_gathers(
            graph, held, {index: forward[index] for index in sorted(forward)}, least_bytes, firsts
        ),
        _merged_gathers(
            graph,
            held,
            {index: backward[index] for index in sorted(backward, reverse=True)},
            least_bytes,
            firsts,
        ),
    )


def last_backward_reads(
    graph: OperatorGraph, strategy: Strategy, active: tuple[tuple[bool, ...], ...]
) -> dict[str, int]:
    """Return, for each weight that a backward reads, the operator whose backward is the last to do so.

    Of a read that is detached no gradient comes, but the backward of its reader needs the weight as it was; so does an
    operator that is made again.
    """
    groups = strategy.recomputation
    reads = {
        name: [index for index in readers if any(active[index]) or needed_at(groups, index) != index]
        for name, readers in graph.weight_readers.items()
    }
    return {name: min(indexes) for name, indexes in reads.items() if indexes}


def _merged_gathers(
    graph: OperatorGraph,
    held: dict[str, dict[int, Region]],
    weights: Mapping[int, Sequence[str]],
    least_bytes: int,
    firsts: Sequence[int],
) -> Gathers:
    """Gather the weights of successive operators together, before the first, in gathers of at least `least_bytes`.

    Smaller gathers would cost latency, and where each begins a segment of the backward, what crosses its end is kept.
    """
    gathers: Gathers = {}
    together: list[str] = []
    first = -1
    for index, names in weights.items():
        if together and bisect_right(firsts, index) != bisect_right(firsts, first):
            together = []
        first = index if not together else first
        together += names
        gathers[first] = _gathers_of(graph, held, together)
        if sum(gather.size_bytes for gather in gathers[first]) >= least_bytes:
            together = []
    return gathers


def _gathers_of(
    graph: OperatorGraph, held: dict[str, dict[int, Region]], weights: Sequence[str]
) -> tuple[Gather, ...]:
    entries: dict[tuple[int, ...], list[BucketEntry]] = {}
    for name in weights:
        for cell in cells(held[name]):
            if len(cell.devices) > 1:
                entries.setdefault(cell.devices, []).append(BucketEntry(name, cell))
    return tuple(
        Gather(
            devices,
            tuple(of_devices),
            sum(
                gathered_elements(entry.cell) * graph.value_by_name[entry.weight].spec.item_bytes
                for entry in of_devices
            ),
        )
        for devices, of_devices in entries.items()
    )


def gathers_begun(gathers: Gathers, index: int, firsts: Sequence[int] = ()) -> list[tuple[int, Gather]]:
    """Return the gathers that begin before an operator's forward (or backward), with the operator that needs each.

    They are those of the next operator that needs some; before the first, its own as well: of a stage, where there are
    several. `firsts`: as of `weight_gathers`.
    """
    if index not in gathers:
        return []
    stage = bisect_right(firsts, index)
    operators = [operator for operator in gathers if bisect_right(firsts, operator) == stage]
    position = operators.index(index)
    return [
        (other, gather)
        for other in operators[(0 if position == 0 else position + 1) : position + 2]
        for gather in gathers[other]
    ]
