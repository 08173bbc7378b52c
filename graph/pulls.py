"""Pulls: the gathers of slices whose update is shared, of the policy p3, in one order with the sums of gradients.

A pull starts once its own slice has been summed and updated; sums of slices that go behind it start right after it. It
stands at one of the places of a step and the next one's forward, which are numbered: first where each bucket of
gradients is full, in the order of the buckets, then before each operator of the forward.

Source: P3, priority-based parameter propagation (SysML 2019): push, update, pull of a slice, by priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graph.buckets import Bucket
from graph.schedule import Phase
from graph.strategy import Sharding


@dataclass(frozen=True, slots=True)
class Pull:
    """The gather of an updated slice of a bucket: after an operator's backward, or before its next forward.

    sums: how many of the order of the sums start before it.
    """

    bucket: int
    phase: Phase
    operator: int
    sums: int


@dataclass(frozen=True, slots=True)
class SliceStart:
    """The start of a slice's sum, or of its pull."""

    bucket: int
    part: int
    is_pull: bool


@dataclass(frozen=True, slots=True)
class Bounds:
    """For each bucket, the first and the last place of its pulls; and the buckets whose update is shared."""

    soonest: tuple[int, ...]
    latest: tuple[int, ...]
    shared: tuple[int, ...]


def bounds_of_pulls(
    buckets: Sequence[Bucket], last_reads: Mapping[str, int], late: Collection[str], first_read: Sequence[int]
) -> Bounds:
    """Return where pulls may be: once no backward reads a bucket's weights, and before the next forward that does.

    Args:
        buckets: in the order in which they are full.
        last_reads: for each weight, the operator whose backward is the last to read it.
        late: weights that are read after all backwards.
        first_read: for each bucket, the place in the forward of the first operator that reads any of its weights.
    """
    count, soonest = len(buckets), []
    for number, bucket in enumerate(buckets):
        names = {entry.weight for entry in bucket.entries}
        last = min(last_reads[name] for name in names)
        behind = (place for place in range(number, count) if buckets[place].after <= last)
        soonest.append(next(behind, count) if names.isdisjoint(late) else count)
    return Bounds(
        tuple(soonest),
        tuple(count + place for place in first_read),
        tuple(number for number, bucket in enumerate(buckets) if bucket.sharding is Sharding.OPTIMIZER),
    )


def slice_starts(
    slice_order: Sequence[int], pulls: Sequence[Pull], places: Sequence[int], count: int
) -> list[list[SliceStart]]:
    """Return, for each of `count` places, the sums and pulls that start there.

    Args:
        slice_order: for each sum, in the order in which they start, its bucket. It starts as soon as all buckets that
            it or a sum before it is of are full.
        pulls: in the order in which they start.
        places: of the pulls.
        count: of all places.
    """
    result: list[list[SliceStart]] = [[] for _ in range(count)]
    summed: Counter[int] = Counter()
    pulled: Counter[int] = Counter()
    latest = begun = 0
    for pull, place in [*zip(pulls, places, strict=True), (None, 0)]:
        end = len(slice_order) if pull is None else pull.sums
        for bucket in slice_order[begun:end]:
            latest = max(latest, bucket)
            result[latest].append(SliceStart(bucket, summed[bucket], is_pull=False))
            summed[bucket] += 1
        if pull is not None:
            latest = max(latest, place)
            result[latest].append(SliceStart(pull.bucket, pulled[pull.bucket], is_pull=True))
            pulled[pull.bucket] += 1
        begun = end
    return result


def check_pulls(
    pulls: Sequence[Pull], slice_order: Sequence[int], starts: Sequence[Sequence[SliceStart]], bounds: Bounds
) -> None:
    """Check pulls, and the sums and pulls that start at each place (`slice_starts`).

    Raises:
        ValueError: they are of other slices, one comes before its sum or too soon, or something after the operator that
            needs it.
    """
    counts = Counter(slice_order)
    wanted = {bucket: counts[bucket] for bucket in bounds.shared}
    if Counter(pull.bucket for pull in pulls) != wanted:
        raise ValueError(
            f"pulls: are of {len(pulls)} slices, must be of {sum(wanted.values())}, {wanted} by bucket"
        )
    if any(one.sums > other.sums for one, other in pairwise(pulls)):
        raise ValueError(
            "pulls: one has fewer sums before it than the one ahead of it, must be in their order"
        )
    summed: set[tuple[int, int]] = set()
    for place, of_place in enumerate(starts):
        for start in of_place:
            if place > bounds.latest[start.bucket]:
                raise ValueError(f"pulls: {start} comes after its reader, must come before it")
            if not start.is_pull:
                summed.add((start.bucket, start.part))
            elif (start.bucket, start.part) not in summed:
                raise ValueError(f"pulls: {start} comes before the sum of its slice, must come after it")
            elif place < bounds.soonest[start.bucket]:
                raise ValueError(f"pulls: {start} comes before the weight is read last, must come after it")
