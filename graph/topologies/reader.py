"""Read a topology from YAML.

A file has the keys kinds, nodes and, for more than one node, network; the packaged files are examples.

    kinds:
      P100: {processor: cuda, peak_flops: {float32: 10.6 TFLOP/s}, memory: 16 GiB,
             memory_bandwidth: 732 GB/s, launch_latency: 5 us, contention: 0.0}
    nodes:                          # or a list of such groups, where nodes differ
      count: 4
      devices: {P100: 4}            # or a list of kinds, one per device
      interconnect: {type: nvlink, bandwidth: 20 GB/s, latency: 5 us}
    network: {nics: 1, bandwidth: 100 Gb/s, latency: 2 us}

Interconnects: `nvlink` (a bandwidth per NVLink and direction; all to all, or `connections: [[0, 1, 2], ...]`
with two devices and the number of NVLinks between them), `switch` (bandwidth per device and direction) and
`pcie` (`switches`: the devices below each; `sockets`: the switches below each; `duplex`: full or half; `qpi`:
bandwidth and latency). Latency is that of one link for nvlink, pcie and qpi, and of the whole way for switch
and network. A flow between nodes holds the source's NIC outwards and the destination's NIC inwards; the devices
of a node take its NICs in turn.
Quantities are numbers in base units (bytes, seconds, FLOP/s) or text with a unit. B is a byte, b a bit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

import yaml

from graph.errors import TopologyError
from graph.texts import meant, shown, unreadable
from graph.topologies.interconnect import (
    Capacity,
    Interconnect,
    PcieTree,
    all_pairs,
    crossbar,
    nvlink_mesh,
    pcie_tree,
)
from graph.topology import PRECISIONS, PROCESSORS, Device, DeviceKind, Link, Pair, Topology

SIZE_UNITS = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
}
RATE_UNITS = {
    **{f"{unit}/s": factor for unit, factor in SIZE_UNITS.items()},
    **{
        f"{prefix}b/s": factor / 8
        for prefix, factor in {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    },
}
# Routes are kept for every pair: 4,096 devices have 17 million.
MOST_DEVICES = 4096
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
FLOPS_UNITS = {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
QUANTITY = re.compile(r"\s*([-+0-9.eE]+)\s*([A-Za-z/]*)\s*")


def packaged_names() -> tuple[str, ...]:
    """Return the names of the packaged topologies, in alphabetical order."""
    files = resources.files("graph.topologies").iterdir()
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in files if entry.name.endswith(".yaml")))


def read_topology(name_or_path: str | Path, nodes: int | None = None) -> Topology:
    """Return a packaged topology by its name, or the one in a YAML file.

    Raises:
        TopologyError: see `graph.topology.load_topology`.
    """
    text = str(name_or_path)
    if text in packaged_names():
        content = resources.files("graph.topologies").joinpath(f"{text}.yaml").read_text(encoding="utf-8")
        return parse_topology(content, text, f"{text}.yaml", nodes)
    path = Path(name_or_path)
    # A name may be longer than paths can be: there is no such file then.
    if not os.path.isfile(path):
        problem = "is no regular file" if os.path.exists(path) else "is neither a file nor packaged"
        raise TopologyError(
            f"topology {shown(text, 400)}: {problem}, must be a YAML file, local, or {', '.join(packaged_names())}; "
            f"{meant(text, packaged_names())}"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TopologyError(
            f"{path}: cannot be read ({unreadable(error)}), must be a topology in YAML; check the path"
        ) from error
    return parse_topology(content, path.stem, str(path), nodes)


# A command reads a topology where it checks its options, and where it needs it.
@lru_cache(maxsize=2)
def parse_topology(text: str, name: str, where: str, nodes: int | None = None) -> Topology:
    """Return the topology that the YAML `text` describes; `where` names the file in errors.

    Raises:
        TopologyError: the text is malformed; the message is one line and names the file and the key.
    """
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader: it makes plain data only
    # Text like a date may have a thirteenth month.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise TopologyError(f"{where}: is not YAML ({unreadable(error)}); correct it") from error
    root = _Entry(where, "", content)
    root.check_keys(("kinds", "nodes"), ("name", "network"))
    kinds, contention = _read_kinds(root.child("kinds"))
    groups = _read_groups(root.child("nodes"), kinds, nodes)
    title = root.child("name").text() if "name" in content else name
    if nodes is not None:
        title = f"{title}-x{nodes}"
    total = sum(count for count, _, _ in groups)
    device_count = sum(count * len(devices) for count, devices, _ in groups)
    if device_count > MOST_DEVICES:
        root.fail(
            "nodes", f"have {device_count} devices in all, must be at most {MOST_DEVICES}; ask for fewer"
        )
    network = root.child("network") if "network" in content else None
    if total > 1 and network is None:
        root.fail("network", f"is missing, {total} nodes need it; add nics, bandwidth and latency")
    try:
        return _Builder(title, kinds, contention).build(groups, _read_network(network))
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error; the first would silently be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        """Return the mapping of a node; equal keys are an error."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key} is there twice", node.start_mark
                )
        return super().construct_mapping(node, deep=deep)

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        """Return a whole number that can be shown: Python shows none of thousands of digits."""
        try:
            number: int = self.construct_yaml_int(node)
            str(number)
        except ValueError:
            raise yaml.constructor.ConstructorError(
                None, None, "a number has too many digits, or none", node.start_mark
            ) from None
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


class _Entry:
    """A value of the file together with its place, so that every error can name both."""

    def __init__(self, where: str, key: str, value: Any) -> None:
        self.where, self.key, self.value = where, key, value

    def fail(self, key: str, problem: str) -> NoReturn:
        path = ".".join(part for part in (self.key, key) if part) or "the file"
        raise TopologyError(f"{self.where}: {path}: {problem}")

    def child(self, key: str) -> _Entry:
        return _Entry(self.where, f"{self.key}.{key}" if self.key else key, self.value[key])

    def mapping(self) -> dict[str, Any]:
        if not isinstance(self.value, dict) or not self.value:
            self.fail(
                "", f"is {_describe(self.value)}, must be a map of keys to values; see app topology list"
            )
        for key in self.value:
            if not isinstance(key, str):
                self.fail("", f"has the key {key!r}, keys must be text; put it in quotes")
        return self.value

    def check_keys(self, required: Sequence[str], optional: Sequence[str] = ()) -> None:
        content = self.mapping()
        for key in content:
            if key not in (*required, *optional):
                self.fail(key, f"is unknown, keys here are {', '.join((*required, *optional))}")
        for key in required:
            if key not in content:
                self.fail(key, "is missing; add it")

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.fail("", f"is {_describe(self.value)}, must be text")
        return self.value

    def one_of(self, choices: Sequence[str]) -> str:
        if self.value not in choices:
            self.fail("", f"is {_describe(self.value)}, must be one of {', '.join(choices)}")
        return str(self.value)

    def integer(self, minimum: int) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < minimum:
            self.fail("", f"is {_describe(self.value)}, must be a whole number >= {minimum}")
        return self.value

    def quantity(self, units: Mapping[str, float]) -> float:
        """Return the value in base units."""
        match = QUANTITY.fullmatch(str(self.value))
        if isinstance(self.value, bool) or match is None or match[2] not in ("", *units):
            self._refuse_quantity(units)
        try:
            value = float(match[1]) * units.get(match[2], 1.0)
        except ValueError:
            self._refuse_quantity(units)
        if not isfinite(value):
            self._refuse_quantity(units)
        return value

    def _refuse_quantity(self, units: Mapping[str, float]) -> NoReturn:
        form = (
            f"a number, with a unit out of {', '.join(units)} or none" if units else "a number without a unit"
        )
        self.fail("", f"is {_describe(self.value)}, must be {form}")

    def items(self) -> list[_Entry]:
        if not isinstance(self.value, list) or not self.value:
            self.fail("", f"is {_describe(self.value)}, must be a list")
        return [_Entry(self.where, f"{self.key}[{index}]", item) for index, item in enumerate(self.value)]

    def integers(self, minimum: int = 0) -> tuple[int, ...]:
        return tuple(item.integer(minimum) for item in self.items())


def _describe(value: Any) -> str:
    text = " ".join(repr(value).split())
    return "empty" if value is None else text if len(text) <= 60 else f"{text[:57]}..."


def _read_kinds(entry: _Entry) -> tuple[tuple[DeviceKind, ...], tuple[tuple[str, float], ...]]:
    kinds, contention = [], []
    for name in entry.mapping():
        fields = entry.child(name)
        required = ("processor", "peak_flops", "memory", "memory_bandwidth", "launch_latency")
        fields.check_keys(required, ("contention",))
        peaks = fields.child("peak_flops")
        peaks.check_keys((), PRECISIONS)
        processor = fields.child("processor").one_of(PROCESSORS)
        try:
            kind = DeviceKind(
                name=name,
                processor="cpu" if processor == "cpu" else "cuda",
                peak_flops=tuple((key, peaks.child(key).quantity(FLOPS_UNITS)) for key in peaks.mapping()),
                memory_bytes=round(fields.child("memory").quantity(SIZE_UNITS)),
                memory_bandwidth_bytes_per_s=fields.child("memory_bandwidth").quantity(RATE_UNITS),
                launch_latency_s=fields.child("launch_latency").quantity(TIME_UNITS),
            )
        except TopologyError as error:
            if str(error).startswith(entry.where):
                raise
            raise TopologyError(f"{entry.where}: {fields.key}: {error}") from error
        kinds.append(kind)
        if "contention" in fields.value:
            contention.append((name, fields.child("contention").quantity({})))
    return tuple(kinds), tuple(contention)


_Group = tuple[int, tuple[str, ...], Interconnect]


def _read_groups(entry: _Entry, kinds: Sequence[DeviceKind], nodes: int | None) -> list[_Group]:
    """Return (node count, kinds of the node's devices, interconnect) of every group of equal nodes."""
    entries = entry.items() if isinstance(entry.value, list) else [entry]
    if nodes is not None and len(entries) > 1:
        entry.fail("", f"has {len(entries)} groups, a node count can be given only for one; edit the file")
    groups = []
    for group in entries:
        group.check_keys(("count", "devices"), ("interconnect",))
        count = group.child("count").integer(1)
        if nodes is not None:
            if nodes < 1:
                raise TopologyError(f"{entry.where}: nodes is given as {nodes}, must be >= 1")
            count = nodes
        devices = _read_devices(group.child("devices"), [kind.name for kind in kinds])
        if "interconnect" in group.value:
            interconnect = _read_interconnect(group.child("interconnect"), len(devices))
        elif len(devices) == 1:
            interconnect = Interconnect((), {})
        else:
            group.fail("interconnect", f"is missing, {len(devices)} devices need it; add it")
        groups.append((count, devices, interconnect))
    return groups


def _read_devices(entry: _Entry, kind_names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(entry.value, list):
        return tuple(item.one_of(kind_names) for item in entry.items())
    names: list[str] = []
    for name in entry.mapping():
        if name not in kind_names:
            entry.fail(name, f"is no kind of this file, those are {', '.join(kind_names)}")
        count = entry.child(name).integer(1)
        if count > MOST_DEVICES:
            entry.fail(name, f"is {count}, must be at most {MOST_DEVICES}")
        names.extend([name] * count)
    return tuple(names)


def _read_capacity(entry: _Entry) -> Capacity:
    bandwidth = entry.child("bandwidth").quantity(RATE_UNITS)
    latency = entry.child("latency").quantity(TIME_UNITS)
    if bandwidth <= 0:
        entry.fail("bandwidth", f"is {bandwidth:g} B/s, must be > 0")
    if latency < 0:
        entry.fail("latency", f"is {latency:g} s, must be >= 0")
    return Capacity(bandwidth, latency)


def _read_interconnect(entry: _Entry, device_count: int) -> Interconnect:
    readers: dict[str, Callable[[_Entry, int], Interconnect]] = {
        "nvlink": _read_nvlink,
        "switch": _read_switch,
        "pcie": _read_pcie,
    }
    if "type" not in entry.mapping():
        entry.fail("type", f"is missing, must be one of {', '.join(readers)}; add it")
    return readers[entry.child("type").one_of(tuple(readers))](entry, device_count)


def _read_nvlink(entry: _Entry, device_count: int) -> Interconnect:
    entry.check_keys(("type", "bandwidth", "latency"), ("connections",))
    connections = {pair: 1 for pair in all_pairs(device_count) if pair[0] < pair[1]}
    if "connections" in entry.value:
        connections = {}
        for item in entry.child("connections").items():
            numbers = item.integers()
            if (
                len(numbers) != 3
                or numbers[0] == numbers[1]
                or max(numbers[:2]) >= device_count
                or numbers[2] < 1
            ):
                item.fail(
                    "",
                    f"is {list(numbers)}, must be two of the {device_count} devices and a number of NVLinks",
                )
            pair = (min(numbers[:2]), max(numbers[:2]))
            if pair in connections:
                item.fail("", f"names the pair {list(pair)} again; give its NVLinks once")
            connections[pair] = numbers[2]
    mesh = nvlink_mesh(device_count, connections, _read_capacity(entry))
    if not isinstance(mesh, Interconnect):
        entry.fail("connections", f"leave devices {mesh[0]} and {mesh[1]} without a route; join them")
    return mesh


def _read_switch(entry: _Entry, device_count: int) -> Interconnect:
    entry.check_keys(("type", "bandwidth", "latency"))
    return crossbar(device_count, _read_capacity(entry))


def _read_pcie(entry: _Entry, device_count: int) -> Interconnect:
    entry.check_keys(("type", "bandwidth", "latency"), ("switches", "sockets", "qpi", "duplex"))
    switches = _read_partition(entry, "switches", device_count)
    sockets = _read_partition(entry, "sockets", len(switches))
    qpi = None
    if "qpi" in entry.value:
        entry.child("qpi").check_keys(("bandwidth", "latency"))
        qpi = _read_capacity(entry.child("qpi"))
    elif len(sockets) > 1:
        entry.fail("qpi", f"is missing, {len(sockets)} sockets need it; add its bandwidth and latency")
    duplex = entry.child("duplex").one_of(("full", "half")) if "duplex" in entry.value else "full"
    tree = PcieTree(switches, sockets, _read_capacity(entry), qpi, half_duplex=duplex == "half")
    return pcie_tree(device_count, tree)


def _read_partition(entry: _Entry, key: str, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups at `key`, which must hold each of 0 .. count - 1 once; one group if it is absent."""
    if key not in entry.value:
        return (tuple(range(count)),)
    groups = tuple(item.integers() for item in entry.child(key).items())
    if sorted(member for group in groups for member in group) != list(range(count)):
        entry.fail(key, f"is {[list(group) for group in groups]}, must hold each of 0 to {count - 1} once")
    return groups


def _read_network(entry: _Entry | None) -> tuple[int, Capacity] | None:
    """Return the number of NICs of a node, and the capacity of each."""
    if entry is None:
        return None
    entry.check_keys(("bandwidth", "latency"), ("nics",))
    nics = entry.child("nics").integer(1) if "nics" in entry.value else 1
    return nics, _read_capacity(entry)


class _Builder:
    """Builds a topology node by node: devices, their links, then NICs and routes between nodes."""

    def __init__(
        self, name: str, kinds: tuple[DeviceKind, ...], contention: tuple[tuple[str, float], ...]
    ) -> None:
        self.name, self.kinds, self.contention = name, kinds, contention
        self.devices: list[Device] = []
        self.links: list[Link] = []
        self.routes: dict[Pair, tuple[int, ...]] = {}

    def build(self, groups: Sequence[_Group], network: tuple[int, Capacity] | None) -> Topology:
        node = 0
        for count, kind_names, interconnect in groups:
            for _ in range(count):
                self._add_node(node, kind_names, interconnect)
                node += 1
        if node > 1 and network is not None:
            self._join_nodes(node, *network)
        return Topology(
            name=self.name,
            kinds=self.kinds,
            devices=tuple(self.devices),
            links=tuple(self.links),
            routes=dict(sorted(self.routes.items())),
            contention=self.contention,
        )

    def _add_node(self, node: int, kind_names: Sequence[str], interconnect: Interconnect) -> None:
        first_device, first_link = len(self.devices), len(self.links)
        for local_index, kind_name in enumerate(kind_names):
            self.devices.append(Device(len(self.devices), kind_name, node, local_index))
        self.links.extend(replace(link, name=f"node{node}/{link.name}") for link in interconnect.links)
        for (source, destination), route in interconnect.routes.items():
            pair = (first_device + source, first_device + destination)
            self.routes[pair] = tuple(first_link + index for index in route)

    def _join_nodes(self, node_count: int, nics: int, capacity: Capacity) -> None:
        """Give every NIC a link out and a link in, each with half of the latency between two NICs."""
        first = len(self.links)
        for node in range(node_count):
            for nic in range(nics):
                for direction in ("out", "in"):
                    name = f"node{node}/nic{nic}/{direction}"
                    self.links.append(
                        Link(name, "nic", capacity.bandwidth_bytes_per_s, capacity.latency_s / 2)
                    )

        nic_of = [first + 2 * (device.node * nics + device.local_index % nics) for device in self.devices]
        # Pairs that leave by one NIC and arrive by another share a route.
        between = {(out, into): (out, into + 1) for out in set(nic_of) for into in set(nic_of)}
        for source in self.devices:
            out = nic_of[source.index]
            for destination in self.devices:
                if source.node != destination.node:
                    self.routes[source.index, destination.index] = between[out, nic_of[destination.index]]
