"""The routes of a topology as flat arrays, listed once for all that need them: of 1,024 devices there are a million.

Letters of shapes: P ordered pairs of devices (source * devices + destination), a device with itself among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from graph.topology import Topology

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable:
    """All routes; nobody writes to the arrays.

    pointers_P1, link: the links of each pair's route, in order; none within one device.
    latency_s_P: seconds of all links of a route together.
    bandwidth_P: bytes per second of a route's slowest link; infinite within one device.
    """

    pointers_P1: Array
    link: Array
    latency_s_P: Array
    bandwidth_P: Array


# One topology is asked for again and again, by all that simulate on it.
@lru_cache(maxsize=2)
def route_table(topology: Topology) -> RouteTable:
    """Return the routes of a topology."""
    devices, pairs = len(topology.devices), len(topology.routes)
    # Many pairs share a route: all of two nodes, say.
    numbers: dict[tuple[int, ...], int] = {(): 0}
    pair_P = np.fromiter((source * devices + to for source, to in topology.routes), np.int64, pairs)
    number = np.fromiter(
        (numbers.setdefault(route, len(numbers)) for route in topology.routes.values()), np.int64, pairs
    )
    number_P = np.zeros(devices * devices, np.int64)
    number_P[pair_P] = number
    links = topology.links
    # Added up link by link, as `Topology.transfer_time_s` does: not even the last bit differs.
    latency_s = np.array([sum(links[link].latency_s for link in route) for route in numbers], np.float64)
    bandwidth = np.array(
        [min((links[link].bandwidth_bytes_per_s for link in route), default=np.inf) for route in numbers],
        np.float64,
    )
    length = np.array([len(route) for route in numbers], np.int64)
    first = np.cumsum(length) - length
    of_all = np.array([link for route in numbers for link in route], np.int64)
    pointers = np.zeros(devices * devices + 1, np.int64)
    np.cumsum(length[number_P], out=pointers[1:])
    # Where each link stands in `of_all`: its route's first there, and its place in the route.
    shift_P = first[number_P] - pointers[:-1]
    at = np.arange(pointers[-1]) + np.repeat(shift_P, length[number_P])
    return RouteTable(pointers, of_all[at], latency_s[number_P], bandwidth[number_P])
