"""Collectives give what their pieces give, executed on small integer tensors; known patterns are recognized."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pytest

from graph.axes import REPLICA_AXIS, Axis, AxisKind, DimFactor, IterationSpace, along, operand_regions, whole
from graph.collectives import (
    BACKWARD,
    FEWEST_DEVICES,
    SUMMING,
    Collective,
    CollectiveKind,
    assembly_on,
    by_source,
    received,
    recognize,
    sent,
)
from graph.exchange import Assembly, Consumer, exchange
from graph.intervals import Region, relative_region, shape, volume
from graph.strategy import Configuration
from tests.reference.taskgraph import moved

ROWS, COLUMNS = 12, 8
SEEDS = range(600)
Chunks = dict[int, list[np.ndarray]]


def producer() -> IterationSpace:
    """A (12, 8) value of a matrix product: rows, columns, and partial sums over an inner axis."""
    axes = (
        Axis("sample", ROWS, AxisKind.SAMPLE),
        Axis("out", COLUMNS, AxisKind.PARAMETER),
        Axis("in", 16, AxisKind.REDUCTION),
        REPLICA_AXIS,
    )
    return IterationSpace(axes, (), ((along(0, ROWS), along(1, COLUMNS)),))


def reader(*, rows: str = "own", columns: str = "own") -> IterationSpace:
    """A reader of its own rows and columns, of windows over rows, or of all of either."""
    axes = (
        Axis("sample", ROWS, AxisKind.SAMPLE),
        Axis("out", COLUMNS, AxisKind.PARAMETER),
        REPLICA_AXIS,
    )
    row_maps = {
        "own": along(0, ROWS),
        "window": (DimFactor(ROWS, 0, start=-1, extent=3),),
        "all": whole(ROWS),
    }
    column_maps = {"own": along(1, COLUMNS), "all": whole(COLUMNS)}
    return IterationSpace(axes, ((row_maps[rows], column_maps[columns]),), ())


def random_configuration(
    rng: np.random.Generator, axes: Sequence[Axis], device_count: int, devices: Sequence[int]
) -> Configuration:
    """Mostly a split over all devices in an order that operators share, so that collectives come about."""
    degrees = [1] * len(axes)
    if rng.random() < 0.6:
        axis = int(rng.integers(len(axes)))
        degrees[axis] = min(axes[axis].size, device_count)
    else:
        for _ in range(int(rng.integers(0, 4))):
            axis = int(rng.integers(len(axes)))
            room = device_count // int(np.prod(degrees))
            degrees[axis] *= int(rng.choice([1, 2, 3, 4, room]))
            degrees[axis] = max(1, min(degrees[axis], axes[axis].size, 16))
    count = int(np.prod(degrees))
    if rng.random() < 0.1:
        return Configuration(tuple(degrees), tuple(int(d) for d in rng.integers(0, device_count, count)))
    start = int(rng.integers(device_count)) if rng.random() < 0.1 else 0
    return Configuration(
        tuple(degrees), tuple(devices[(start + task) % device_count] for task in range(count))
    )


@dataclass(frozen=True)
class Case:
    """An exchange, and the region of each task of the producer."""

    made: Configuration
    assemblies: tuple[Assembly, ...]
    regions: tuple[Region, ...]

    def holding(self, rng: np.random.Generator) -> list[np.ndarray]:
        """An integer tensor for every task of the producer."""
        return [rng.integers(-50, 50, shape(region)) for region in self.regions]


def case(
    made: Configuration, readings: Sequence[tuple[IterationSpace, Configuration]], nodes: int = 1
) -> Case:
    made_by = producer()
    devices = 1 + max([*made.devices, *(d for _, c in readings for d in c.devices)])
    node_of = [device * nodes // devices for device in range(devices)]
    read_by = [Consumer(1 + index, 0, space, c) for index, (space, c) in enumerate(readings)]
    regions = operand_regions(made_by.axes, made_by.outputs[0], made.degrees)
    return Case(made, exchange(made_by, 0, made, read_by, node_of), regions)


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    device_count = int(rng.choice([3, 4, 6, 8, 16]))
    order = [int(device) for device in rng.permutation(device_count)]
    made = random_configuration(rng, producer().axes, device_count, order)
    readings = []
    for _ in range(int(rng.choice([1, 1, 2]))):
        space = reader(
            rows=str(rng.choice(["own", "own", "window", "all"])), columns=str(rng.choice(["own", "all"]))
        )
        readings.append((space, random_configuration(rng, space.axes, device_count, order)))
    return case(made, readings, nodes=int(rng.integers(1, 3)))


def part(tensor: np.ndarray, region: Region, within: Region) -> np.ndarray:
    """The elements of `region` in a tensor that holds `within`."""
    if not region:
        return tensor
    places = [
        [index for start, stop in indexes for index in range(start, stop)]
        for indexes in relative_region(region, within)
    ]
    return tensor[np.ix_(*places)]


def add(tensor: np.ndarray, region: Region, within: Region, more: np.ndarray) -> None:
    """Add `more` to the elements of `region` in a tensor that holds `within`."""
    places = [
        [index for start, stop in indexes for index in range(start, stop)]
        for indexes in relative_region(region, within)
    ]
    tensor[np.ix_(*places)] += more


def from_pieces(made: Case, assembly: Assembly, holding: Sequence[np.ndarray]) -> np.ndarray:
    """What an assembly is: its pieces, one after the other, added up."""
    result = np.zeros(shape(assembly.region), np.int64)
    for piece in assembly.pieces:
        mine = part(holding[piece.source_task], piece.region, made.regions[piece.source_task])
        add(result, piece.region, assembly.region, mine)
    return result


def execute(kind: CollectiveKind, given: Chunks, devices: Sequence[int], root: int | None) -> Chunks:
    """What each collective does by its definition: from what each device gives, what each one gets."""
    match kind:
        case CollectiveKind.ALL_REDUCE:
            total = reduce(np.add, (given[device][0] for device in devices))
            return {device: [total] for device in devices}
        case CollectiveKind.ALL_GATHER:
            return {device: [given[other][0] for other in devices] for device in devices}
        case CollectiveKind.REDUCE_SCATTER:
            return {
                device: [reduce(np.add, (given[other][place] for other in devices))]
                for place, device in enumerate(devices)
            }
        case CollectiveKind.ALL_TO_ALL:
            return {
                device: [given[other][place] for other in devices] for place, device in enumerate(devices)
            }
        case CollectiveKind.BROADCAST:
            assert root is not None
            return {device: [given[root][0]] for device in devices}
        case CollectiveKind.REDUCE:
            assert root is not None
            total = reduce(np.add, (given[device][0] for device in devices if given[device]))
            return {device: [total] if device == root else [] for device in devices}


def check_even(kind: CollectiveKind, given: Chunks) -> None:
    """Chunks of an all-gather or a reduce-scatter are of one size: communication libraries ask for that."""
    if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        assert len({chunk.size for chunks in given.values() for chunk in chunks}) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_collective_gives_what_its_pieces_give(seed: int) -> None:
    made = random_case(seed)
    holding = made.holding(np.random.default_rng(seed))
    served: list[int] = []
    for collective in recognize(made.assemblies, summable=seed % 5 > 0):
        assert len(collective.devices) >= FEWEST_DEVICES
        assert list(collective.devices) == sorted(set(collective.devices))
        given = {
            device: [
                part(holding[piece.source_task], piece.region, made.regions[piece.source_task])
                for piece in sent(collective, made.assemblies, device)
            ]
            for device in collective.devices
        }
        check_even(collective.kind, given)
        got = execute(collective.kind, given, collective.devices, collective.root)
        for number in collective.assemblies:
            assembly = made.assemblies[number]
            regions = received(collective, made.assemblies, assembly.device)
            result = np.zeros(shape(assembly.region), np.int64)
            for region, chunk in zip(regions, got[assembly.device], strict=True):
                add(result, region, assembly.region, chunk)
            np.testing.assert_array_equal(result, from_pieces(made, assembly, holding))
        served.extend(collective.assemblies)
    assert len(set(served)) == len(served)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_gradient_goes_back_by_the_backward_of_its_collective(seed: int) -> None:
    """What a task's output gets is the sum, over the pieces cut from it, of their assemblies' gradients."""
    made = random_case(seed)
    rng = np.random.default_rng(seed)
    for collective in recognize(made.assemblies, summable=True):
        members = [made.assemblies[number] for number in collective.assemblies]
        gradients = {member.device: rng.integers(-50, 50, shape(member.region)) for member in members}
        expected = [np.zeros(shape(region), np.int64) for region in made.regions]
        for member in members:
            for piece in member.pieces:
                mine = part(gradients[member.device], piece.region, member.region)
                add(expected[piece.source_task], piece.region, made.regions[piece.source_task], mine)
        given: Chunks = {device: [] for device in collective.devices}
        for member in members:
            given[member.device] = [
                part(gradients[member.device], region, member.region)
                for region in received(collective, made.assemblies, member.device)
            ]
        back = BACKWARD[collective.kind]
        check_even(back, given)
        got = execute(back, given, collective.devices, collective.root)
        found = [np.zeros(shape(region), np.int64) for region in made.regions]
        for device in collective.devices:
            pieces = sent(collective, made.assemblies, device)
            for piece, chunk in zip(pieces, got[device], strict=len(pieces) > 0):
                add(found[piece.source_task], piece.region, made.regions[piece.source_task], chunk)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_random_cases_hold_every_kind() -> None:
    kinds = Counter(
        collective.kind
        for seed in SEEDS
        for collective in recognize(random_case(seed).assemblies, summable=seed % 5 > 0)
    )
    assert all(kinds[kind] >= 5 for kind in CollectiveKind), kinds


def split(
    devices: int, *, rows: int = 1, columns: int = 1, inner: int = 1, replicas: int = 1
) -> Configuration:
    return Configuration((rows, columns, inner, replicas), tuple(range(devices)))


def read(devices: Sequence[int], *, rows: int = 1, columns: int = 1, replicas: int = 1) -> Configuration:
    return Configuration((rows, columns, replicas), tuple(devices))


EVERYTHING = reader(rows="all", columns="all")
PATTERNS: dict[str, tuple[Callable[[], Case], list[CollectiveKind]]] = {
    "partial sums, read whole by all": (
        lambda: case(split(4, inner=4), [(EVERYTHING, read(range(4), rows=4))]),
        [CollectiveKind.ALL_REDUCE],
    ),
    "partial sums, read by rows": (
        lambda: case(split(4, inner=4), [(reader(), read(range(4), rows=4))]),
        [CollectiveKind.REDUCE_SCATTER],
    ),
    "partial sums, read by rows of unequal number": (
        lambda: case(split(5, inner=5), [(reader(), read(range(5), rows=5))]),
        [CollectiveKind.ALL_TO_ALL],
    ),
    "partial sums, read by replicas of rows": (
        lambda: case(split(4, inner=4), [(reader(), read(range(4), rows=2, replicas=2))]),
        [CollectiveKind.ALL_TO_ALL],
    ),
    "rows, read whole by all": (
        lambda: case(split(4, rows=4), [(EVERYTHING, read(range(4), columns=4))]),
        [CollectiveKind.ALL_GATHER],
    ),
    "rows of unequal number, read whole by all": (
        lambda: case(split(5, rows=5), [(EVERYTHING, read(range(5), columns=5))]),
        [CollectiveKind.ALL_TO_ALL],
    ),
    "rows, read by columns": (
        lambda: case(split(4, rows=4), [(reader(), read(range(4), columns=4))]),
        [CollectiveKind.ALL_TO_ALL],
    ),
    "one device's, read by three others": (
        lambda: case(split(1), [(EVERYTHING, read((1, 2, 3), rows=3))]),
        [CollectiveKind.BROADCAST],
    ),
    "partial sums, read by one": (
        lambda: case(split(3, inner=3), [(EVERYTHING, read((1,)))]),
        [CollectiveKind.REDUCE],
    ),
    "partial sums, read by one that has none": (
        lambda: case(split(3, inner=3), [(EVERYTHING, read((3,)))]),
        [CollectiveKind.REDUCE],
    ),
    "partial sums in the rows of a mesh": (
        lambda: case(split(6, rows=2, inner=3), [(reader(columns="all"), read(range(6), rows=2, columns=3))]),
        [CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_REDUCE],
    ),
    "replicas in two nodes, each read in its own": (
        lambda: case(
            Configuration((1, 1, 1, 2), (0, 4)),
            [(EVERYTHING, read((1, 2, 3, 5, 6, 7), rows=6))],
            nodes=2,
        ),
        [CollectiveKind.BROADCAST, CollectiveKind.BROADCAST],
    ),
    "read again by one device alone": (
        lambda: case(split(4, inner=4), [(EVERYTHING, read(range(4), rows=4)), (EVERYTHING, read((0,)))]),
        [CollectiveKind.ALL_REDUCE],
    ),
    "two devices": (lambda: case(split(2, inner=2), [(EVERYTHING, read(range(2), rows=2))]), []),
    "halos": (lambda: case(split(4, rows=4), [(reader(rows="window"), read(range(4), rows=4))]), []),
    "rows, read by one": (lambda: case(split(4, rows=4), [(EVERYTHING, read((0,)))]), []),
    "two regions on a device": (
        lambda: case(split(3, inner=3), [(reader(), read((0, 1, 2, 0, 1, 2), rows=6))]),
        [],
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_known_patterns(name: str) -> None:
    make, kinds = PATTERNS[name]
    assert [found.kind for found in recognize(make().assemblies, summable=True)] == kinds


def test_sums_that_no_library_adds_up_are_only_moved() -> None:
    made = case(split(4, inner=4), [(EVERYTHING, read(range(4), rows=4))])
    assert [found.kind for found in recognize(made.assemblies, summable=False)] == [CollectiveKind.ALL_GATHER]
    alone = case(split(4, inner=4), [(EVERYTHING, read((0,)))])
    assert recognize(alone.assemblies, summable=False) == ()


def test_what_crosses_devices_is_what_pieces_say() -> None:
    """All-to-all: the bytes of the remote pieces; all-gather: all chunks; others: the region."""
    whole = ROWS * COLUMNS
    expected = {
        "rows, read by columns": (whole * 3 // 4, whole // 4),
        "rows, read whole by all": (whole, whole),
        "partial sums, read by rows": (whole, whole),
        "partial sums, read whole by all": (whole, whole),
        "one device's, read by three others": (whole, whole),
    }
    for name, (crossing, largest) in expected.items():
        made = PATTERNS[name][0]()
        (found,) = recognize(made.assemblies, summable=True)
        amount = moved(found, made.assemblies)
        assert (amount.whole, amount.largest) == (crossing, largest), name


def test_only_summing_collectives_give_one_region() -> None:
    for make, _ in PATTERNS.values():
        made = make()
        for found in recognize(made.assemblies, summable=True):
            for device in found.devices:
                check_received(found, made, device)


def check_received(found: Collective, made: Case, device: int) -> None:
    mine = assembly_on(found, made.assemblies, device)
    regions = received(found, made.assemblies, device)
    if mine is None:
        assert regions == ()
    elif found.kind in SUMMING:
        assert regions == (mine.region,)
    else:
        assert [volume(region) for region in regions] == [volume(p.region) for p in by_source(mine)]
