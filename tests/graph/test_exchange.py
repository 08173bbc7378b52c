"""Exchanges, holdings and plans against element-by-element brute force."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from graph.axes import (
    REPLICA_AXIS,
    Axis,
    AxisKind,
    DimFactor,
    IterationSpace,
    along,
    operand_regions,
    tasks,
    whole,
)
from graph.exchange import Consumer, exchange
from graph.intervals import Region, intersect, normalize, positions, volume
from graph.plan import build_plan, value_exchange
from graph.strategy import Configuration
from graph.weight_placement import cells, held_regions
from search.space.baselines import random_strategy
from tests.search.builders import branches, unrolled

SEEDS = range(40)


def elements(region: Region) -> set[tuple[int, ...]]:
    """All index tuples of a region, one by one."""
    return set(product(*([i for start, stop in indexes for i in range(start, stop)] for indexes in region)))


def random_set(rng: np.random.Generator, size: int) -> tuple[tuple[int, int], ...]:
    return normalize([(int(i), int(i) + 1) for i in np.flatnonzero(rng.random(size) < 0.5)])


@pytest.mark.parametrize("seed", SEEDS)
def test_index_set_operations_equal_set_operations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    left, right = random_set(rng, 17), random_set(rng, 17)
    plain_left = {i for a, b in left for i in range(a, b)}
    plain_right = {i for a, b in right for i in range(a, b)}
    assert {i for a, b in intersect(left, right) for i in range(a, b)} == plain_left & plain_right
    inside = intersect(left, right)
    local = [k for k, index in enumerate(sorted(plain_left)) if index in plain_right]
    assert [k for a, b in positions(inside, left) for k in range(a, b)] == local


def linear_space(rng: np.random.Generator) -> IterationSpace:
    """A producer of a (12, 10) value: rows, (2 x 5) columns, and a contraction axis."""
    axes = (
        Axis("sample", 12, AxisKind.SAMPLE),
        Axis("channel.0", 2, AxisKind.PARAMETER),
        Axis("channel.1", 5, AxisKind.PARAMETER),
        Axis("in", 6, AxisKind.REDUCTION),
        REPLICA_AXIS,
    )
    return IterationSpace(axes, (), ((along(0, 12), (DimFactor(2, 1), DimFactor(5, 2))),))


def reader_space(rng: np.random.Generator) -> IterationSpace:
    """A reader with a window over the rows (halo) and (5 x 2) columns, which do not line up with (2 x 5)."""
    axes = (
        Axis("height", 12, AxisKind.ATTRIBUTE),
        Axis("left", 5, AxisKind.PARAMETER),
        Axis("right", 2, AxisKind.PARAMETER),
        REPLICA_AXIS,
    )
    rows = (DimFactor(12, 0, start=-1, stride=1, extent=3),) if rng.random() < 0.5 else whole(12)
    return IterationSpace(axes, ((rows, (DimFactor(5, 1), DimFactor(2, 2))),), ())


def random_configuration(rng: np.random.Generator, space: IterationSpace, device_count: int) -> Configuration:
    degrees = tuple(int(rng.integers(1, min(axis.size, 3) + 1)) for axis in space.axes)
    return Configuration(degrees, tuple(int(d) for d in rng.integers(0, device_count, tasks(degrees))))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_needed_element_comes_once_from_each_partial_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    producer, reader = linear_space(rng), reader_space(rng)
    made, read = random_configuration(rng, producer, 4), random_configuration(rng, reader, 4)
    node_of = [0, 0, 1, 1]
    result = exchange(producer, 0, made, [Consumer(1, 0, reader, read)], node_of)

    needed = operand_regions(reader.axes, reader.inputs[0], read.degrees)
    seen = {(r.task, r.slot) for assembly in result for r in assembly.readers}
    assert seen == {(task, 0) for task in range(tasks(read.degrees))}
    partial_parts = made.degrees[3]
    source = operand_regions(producer.axes, producer.outputs[0], made.degrees)
    for assembly in result:
        for one in assembly.readers:
            assert needed[one.task] == assembly.region
            assert read.devices[one.task] == assembly.device
        counts = Counter(e for piece in assembly.pieces for e in elements(piece.region))
        assert counts == Counter(dict.fromkeys(elements(assembly.region), partial_parts))
        for piece in assembly.pieces:
            assert elements(piece.region) <= elements(source[piece.source_task])
            assert made.devices[piece.source_task] == piece.source_device


@pytest.mark.parametrize("seed", SEEDS)
def test_a_local_replica_is_read_before_one_in_the_node_before_any_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    producer, reader = linear_space(rng), reader_space(rng)
    made = Configuration((1, 1, 1, 1, 3), tuple(int(d) for d in rng.integers(0, 6, 3)))
    read = random_configuration(rng, reader, 6)
    node_of = [0, 0, 1, 1, 2, 2]
    for assembly in exchange(producer, 0, made, [Consumer(1, 0, reader, read)], node_of):
        (piece,) = assembly.pieces
        if assembly.device in made.devices:
            assert piece.source_device == assembly.device
        elif any(node_of[d] == node_of[assembly.device] for d in made.devices):
            assert node_of[piece.source_device] == node_of[assembly.device]
        else:
            assert piece.source_task == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_cells_are_disjoint_cover_what_is_held_and_name_exactly_the_holders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    needed: list[tuple[int, Region]] = []
    for _ in range(int(rng.integers(1, 7))):
        region: Region = (random_set(rng, 7) or ((0, 1),), random_set(rng, 5) or ((2, 3),))
        needed.append((int(rng.integers(0, 4)), region))
    held = held_regions(needed)
    for device, region in needed:
        assert elements(region) <= elements(held[device])
    holders: dict[tuple[int, ...], set[int]] = {}
    for device, region in held.items():
        for element in elements(region):
            holders.setdefault(element, set()).add(device)
    found: dict[tuple[int, ...], set[int]] = {}
    total = 0
    for cell in cells(held):
        total += volume(cell.region)
        for element in elements(cell.region):
            found[element] = set(cell.devices)
    assert total == len(found)
    assert found == holders


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_has_the_exchanges_that_each_value_has_by_itself(seed: int) -> None:
    nodes, rng = [0, 0, 0, 1, 1, 1], np.random.default_rng(seed)
    for graph in (branches(), unrolled()):
        strategy = random_strategy(graph, len(nodes), rng)
        found = build_plan(graph, strategy, nodes).exchanges
        assert found == {name: value_exchange(graph, strategy, name, nodes) for name in graph.producer}
