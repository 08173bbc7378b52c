"""Who holds what, for arrays of devices, against `graph.weight_placement` device by device."""

from collections.abc import Callable

import numpy as np
import pytest

from graph.axes import operand_regions
from graph.intervals import IndexSet, Region, normalize, shape, volume
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from graph.weight_placement import WeightCell, cells, held_regions
from search.cost.cost_table import CostTable
from search.cost.link_costs import COLLECTIVE_KINDS, ROOTED, LinkCosts
from search.simulate.arrays import ResourceSetStore, static_values
from search.simulate.fragment_cache import UnitStore
from search.simulate.regions import Regions
from search.simulate.weight_placement import REGIONS, Holders
from search.space.baselines import data_parallel
from tests.search.builders import (
    SOME_MEASURED,
    MadeUpCosts,
    branches,
    cluster,
    devices,
    local_calls,
    random_anywhere,
    random_mesh,
    unrolled,
)


def random_set(rng: np.random.Generator) -> IndexSet:
    """Return up to three intervals of seven indexes; often one of few, so that some are equal."""
    starts = rng.integers(0, 6, int(rng.integers(1, 4)))
    return normalize([(int(start), int(start + rng.integers(1, 3))) for start in starts])


def shared(held: dict[int, Region]) -> list[WeightCell]:
    return [cell for cell in cells(held) if len(cell.devices) > 1] if held else []


@pytest.mark.parametrize("seed", range(40))
def test_holders_of_any_regions_are_those_that_are_found_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    regions = Regions()
    holders = Holders(regions)
    for _ in range(5):
        dims = int(rng.integers(0, 4))
        choices: list[Region] = [tuple(random_set(rng) for _ in range(dims)) for _ in range(3)]
        needed = [
            (int(device), choices[int(rng.integers(len(choices)))])
            for device in rng.integers(0, 8, int(rng.integers(0, 12)))
        ]
        codes = np.unique(
            np.array([device * REGIONS + regions.number(region) for device, region in needed], np.int64)
        )
        found, elements = holders.elements(holders.covered(codes))
        several = holders.shared_cells(holders.covered(codes))
        held = held_regions(needed)
        assert found.tolist() == sorted(held)
        assert elements.tolist() == [volume(held[device]) for device in sorted(held)]
        assert [(tuple(cell.devices.tolist()), cell.elements, cell.sizes()) for cell in several] == [
            (cell.devices, volume(cell.region), shape(cell.region)) for cell in shared(held)
        ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("draw", [random_anywhere, random_mesh])
@pytest.mark.parametrize("make", [branches, unrolled])
def test_holdings_of_a_strategy_are_those_that_are_found_one_by_one(
    make: Callable[[], OperatorGraph],
    draw: Callable[[OperatorGraph, int, np.random.Generator], Strategy],
    seed: int,
) -> None:
    graph, topology = make(), devices(7)
    store = UnitStore(graph, topology, CostTable(MadeUpCosts()), LinkCosts(), local_calls)
    rng = np.random.default_rng(seed)
    for strategy in [data_parallel(graph, 7), *(draw(graph, 7, rng) for _ in range(4))]:
        for value, of in zip(static_values(graph), store.classes.statics, strict=True):
            needed = []
            for index, slot in graph.readers[value.name]:
                space, split = graph.operators[index].space, strategy.configurations[index]
                read = operand_regions(space.axes, space.inputs[slot], split.degrees)
                needed += list(zip(split.devices, read, strict=True))
            held = held_regions(needed)
            read_by = [strategy.configurations[port.operator] for port in of.readers]
            assert store.holdings(of.readers, read_by, synchronized=True) == (
                [(device, volume(region)) for device, region in held.items()],
                [(cell.devices, volume(cell.region)) for cell in shared(held)],
            )


@pytest.mark.parametrize("links", [LinkCosts(), SOME_MEASURED])
def test_sets_that_are_met_together_are_held_and_priced_as_those_that_are_met_one_by_one(
    links: LinkCosts,
) -> None:
    topology, rng = cluster(), np.random.default_rng(3)
    together, apart = ResourceSetStore(topology, links), ResourceSetStore(topology, links)
    for _ in range(20):
        sets = []
        for _ in range(int(rng.integers(1, 6))):
            members = np.sort(rng.permutation(len(topology.devices))[: int(rng.integers(2, 4))])
            code = int(rng.integers(len(COLLECTIVE_KINDS)))
            root = int(members[0]) if COLLECTIVE_KINDS[code] in ROOTED else -1
            sets.append((code, root, members))
        numbers = together.numbers(sets)
        one_by_one = [
            apart.device_set(tuple(members.tolist()), COLLECTIVE_KINDS[code], None if root < 0 else root)
            for code, root, members in sets
        ]
        assert numbers == [one.number for one in one_by_one]
        for size in (0, 1, 1000, 10**9):
            durations = together.durations_ns(numbers, np.full(len(numbers), size))
            assert durations.tolist() == [one.price.duration_ns(size) for one in one_by_one]
    for mine, theirs in zip(together.arrays(), apart.arrays(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
