"""Resource sets that tasks hold: devices and routes, and sets of devices as they are met."""

from __future__ import annotations

import numpy as np

from graph.topology import load_topology
from search.cost.link_costs import LinkCosts
from search.simulate.arrays import PricedResourceSet, ResourceSetStore


def test_devices_hold_themselves_and_routes_their_links() -> None:
    topology = load_topology("p100-cluster", 3)
    count = len(topology.devices)
    resource_sets = ResourceSetStore(topology, LinkCosts()).arrays()

    def held(number: int) -> tuple[list[int], list[int]]:
        resources = resource_sets.resource[
            resource_sets.resource_ptr[number] : resource_sets.resource_ptr[number + 1]
        ]
        ends = resource_sets.end[resource_sets.end_ptr[number] : resource_sets.end_ptr[number + 1]]
        return resources.tolist(), ends.tolist()

    assert [held(device) for device in range(count)] == [([device], []) for device in range(count)]
    for source in range(count):
        for destination in range(count):
            links = [count + link for link in topology.route(source, destination)]
            assert held(count * (1 + source) + destination) == (links, [source, destination])
    assert len(resource_sets.resource_ptr) == count * (count + 1) + 1


def test_an_emptied_store_is_a_new_one_and_leaves_the_old() -> None:
    topology = load_topology("p100-cluster", 2)
    old = ResourceSetStore(topology, LinkCosts())
    first, second = old.device_set((0, 1, 2)), old.device_set((0, 5))
    emptied, new = old.emptied(), ResourceSetStore(topology, LinkCosts())
    for store in (emptied, new):
        assert store.device_set((0, 5)) == PricedResourceSet(first.number, second.price)
    for one, other in zip(emptied.arrays(), new.arrays(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (old.device_set((0, 1, 2)), old.device_set((0, 5))) == (first, second)
