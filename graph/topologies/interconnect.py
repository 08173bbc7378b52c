"""Links and routes inside one node: NVLink meshes, switches and PCIe trees.

Devices are counted within the node here; the reader adds them up over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from graph.topology import Link, Pair


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The links of one node, and for every ordered pair of its devices the links of its route, in order."""

    links: tuple[Link, ...]
    routes: Mapping[Pair, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bandwidth and latency of one link."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class PcieTree:
    """Which devices hang below which PCIe switch, and which switches below which CPU socket."""

    switches: tuple[tuple[int, ...], ...]
    sockets: tuple[tuple[int, ...], ...]
    link: Capacity
    qpi: Capacity | None
    half_duplex: bool


def all_pairs(device_count: int) -> list[Pair]:
    """Return every ordered pair of distinct devices, in order."""
    return [(i, j) for i in range(device_count) for j in range(device_count) if i != j]


def nvlink_mesh(device_count: int, connections: Mapping[Pair, int], nvlink: Capacity) -> Interconnect | Pair:
    """Return a mesh in which `connections[i, j]` NVLinks of capacity `nvlink` join the unordered pair (i, j).

    A pair that is not joined is routed over the fewest other devices; among those routes over the widest,
    then over the devices of the lowest index. Where there is no route, the first such pair is returned.
    """
    width = {}
    for (i, j), count in connections.items():
        width[i, j] = width[j, i] = count
    ordered = sorted(width)
    links = tuple(
        Link(f"nvlink/{i}->{j}", "nvlink", nvlink.bandwidth_bytes_per_s * width[i, j], nvlink.latency_s)
        for i, j in ordered
    )
    index_of = {pair: index for index, pair in enumerate(ordered)}
    routes = {}
    for source, destination in all_pairs(device_count):
        path = _shortest_path(source, destination, width)
        if path is None:
            return source, destination
        routes[source, destination] = tuple(index_of[hop] for hop in pairwise(path))
    return Interconnect(links, routes)


def _shortest_path(source: int, destination: int, width: Mapping[Pair, int]) -> tuple[int, ...] | None:
    """Return the devices of the best path: fewest hops, then largest smallest width, then lowest indexes."""
    neighbours: dict[int, list[int]] = {}
    for i, j in sorted(width):
        neighbours.setdefault(i, []).append(j)
    frontier: dict[int, tuple[int, tuple[int, ...]]] = {source: (0, (source,))}
    reached = {source}
    while frontier and destination not in frontier:
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for device, (negative_width, path) in frontier.items():
            for neighbour in neighbours.get(device, []):
                if neighbour in reached:
                    continue
                hop = -width[device, neighbour]
                # Negative widths, so that the smallest tuple is the widest path and ties go to low indexes.
                candidate = (hop if negative_width == 0 else max(negative_width, hop), (*path, neighbour))
                following[neighbour] = min(candidate, following.get(neighbour, candidate))
        reached.update(following)
        frontier = following
    return frontier[destination][1] if destination in frontier else None


def crossbar(device_count: int, port: Capacity) -> Interconnect:
    """Return a non-blocking NVLink switch: one link up and one down for every device.

    `port.latency_s` is that of the whole way, so each of its two links carries half.
    """
    links = []
    for device in range(device_count):
        for direction in ("up", "down"):
            links.append(
                Link(
                    f"nvswitch/{device}/{direction}", "nvlink", port.bandwidth_bytes_per_s, port.latency_s / 2
                )
            )
    return Interconnect(tuple(links), {(i, j): (2 * i, 2 * j + 1) for i, j in all_pairs(device_count)})


def pcie_tree(device_count: int, tree: PcieTree) -> Interconnect:
    """Return a PCIe tree: device, switch, socket, QPI, socket, switch, device, as far up as a pair needs.

    With `half_duplex` both directions of a PCIe connection share one link.
    """
    links: list[Link] = []

    def connect(name: str) -> tuple[int, int]:
        """Add the connection `name`; return its link upwards and its link downwards."""
        directions = ("both",) if tree.half_duplex else ("up", "down")
        for direction in directions:
            links.append(
                Link(f"pcie/{name}/{direction}", "pcie", tree.link.bandwidth_bytes_per_s, tree.link.latency_s)
            )
        return len(links) - len(directions), len(links) - 1

    device_links = [connect(f"device{device}") for device in range(device_count)]
    switch_links = [connect(f"switch{switch}") for switch in range(len(tree.switches))]
    switch_of = _position_of(tree.switches)
    socket_of = _position_of(tree.sockets)
    qpi_of: dict[Pair, int] = {}
    if tree.qpi is not None:
        for pair in all_pairs(len(tree.sockets)):
            qpi_of[pair] = len(links)
            links.append(
                Link(f"qpi/{pair[0]}->{pair[1]}", "qpi", tree.qpi.bandwidth_bytes_per_s, tree.qpi.latency_s)
            )
    routes = {}
    for source, destination in all_pairs(device_count):
        climb, descent = [device_links[source][0]], [device_links[destination][1]]
        from_switch, to_switch = switch_of[source], switch_of[destination]
        if from_switch != to_switch:
            climb.append(switch_links[from_switch][0])
            descent.insert(0, switch_links[to_switch][1])
            sockets = socket_of[from_switch], socket_of[to_switch]
            if sockets[0] != sockets[1]:
                climb.append(qpi_of[sockets])
        routes[source, destination] = (*climb, *descent)
    return Interconnect(tuple(links), routes)


def _position_of(groups: Sequence[Sequence[int]]) -> dict[int, int]:
    return {member: position for position, group in enumerate(groups) for member in group}
