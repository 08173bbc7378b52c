"""The algorithms of a strategy's all-reduces (`graph.collective_algorithms`), for its run and for who looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graph.collective_algorithms import BY_LIBRARY, Choices

if TYPE_CHECKING:
    from graph.operators import OperatorGraph
    from graph.plan import Plan
    from graph.strategy import Strategy
    from graph.topology import Topology
    from search.cost.link_costs import LinkCosts


@dataclass(frozen=True, slots=True)
class ShownAllReduce:
    """The algorithm of all-reduces over some devices of `from_bytes` and more, up to the next entry's."""

    devices: tuple[int, ...]
    from_bytes: int
    algorithm: str


def all_reduce_choices(
    graph: OperatorGraph, strategy: Strategy, topology: Topology, links: LinkCosts
) -> dict[tuple[int, ...], Choices]:
    """Return, by devices, the algorithms of a strategy's all-reduces; without those that are the library's alone."""
    from graph.plan import build_plan
    from search.cost.collective_cost import Prices

    plan = build_plan(graph, strategy, [device.node for device in topology.devices])
    prices = Prices(topology, links.choosing(strategy))
    choices = {devices: prices.choices(devices) for devices in _all_reduce_groups(plan)}
    return {devices: chosen for devices, chosen in choices.items() if chosen != ((0, BY_LIBRARY),)}


def _all_reduce_groups(plan: Plan) -> list[tuple[int, ...]]:
    from graph.collectives import CollectiveKind
    from graph.strategy import Sharding

    groups = [bucket.devices for bucket in plan.buckets if bucket.sharding is Sharding.NONE]
    groups += [
        collective.devices
        for of_value in (*plan.collectives.values(), *plan.buffer_collectives.values())
        for collective in of_value
        if collective.kind is CollectiveKind.ALL_REDUCE
    ]
    return sorted(set(groups))


def shown_all_reduces(choices: Mapping[tuple[int, ...], Choices]) -> tuple[ShownAllReduce, ...]:
    """Return the entries of `all_reduce_choices` one by one."""
    return tuple(
        ShownAllReduce(devices, first, algorithm.text)
        for devices, of_group in choices.items()
        for first, algorithm in of_group
    )
