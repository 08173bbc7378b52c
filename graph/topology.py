"""Device topology: devices of given kinds, the links between them, and the route of every pair.

A link is a resource with a capacity in one direction. A full-duplex connection is therefore two links; a
shared half-duplex bus is one link that routes of both directions hold. A transfer holds all links of its
route.

Source: FlexFlow (arXiv:1807.05358), whose device topology labels edges with bandwidth and latency; links that
several routes share and contention per device kind are ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from graph.errors import TopologyError

Processor = Literal["cpu", "cuda"]
LinkKind = Literal["nvlink", "pcie", "qpi", "nic", "memory"]
PROCESSORS: tuple[str, ...] = get_args(Processor)
LINK_KINDS: tuple[str, ...] = get_args(LinkKind)
PRECISIONS = ("float32", "tf32", "bfloat16", "float16")
FORMAT_VERSION = 1

Pair = tuple[int, int]


# Limits of a simulation, which counts in whole bytes and parts per million, in words of 64 bits.
LARGEST_MEMORY_BYTES = 1 << 60
LARGEST_CONTENTION = 1e6


def _require_at_most(where: str, quantity: str, value: float, most: float, unit: str) -> None:
    if value > most:
        raise TopologyError(f"{where}: {quantity} is {value:g} {unit}, must be at most {most:g}; correct it")


def _require_positive(where: str, quantity: str, value: float, unit: str) -> None:
    if not (isfinite(value) and value > 0):
        raise TopologyError(f"{where}: {quantity} is {value:g} {unit}, must be > 0; correct it")


def _require_not_negative(where: str, quantity: str, value: float, unit: str) -> None:
    if not (isfinite(value) and value >= 0):
        raise TopologyError(f"{where}: {quantity} is {value:g} {unit}, must be >= 0; correct it")


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A model of processor, with its data-sheet values.

    `peak_flops` holds (precision, floating-point operations per second) for the precisions that it has.
    """

    name: str
    processor: Processor
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_latency_s: float

    def __post_init__(self) -> None:
        where = f"device kind {self.name}"
        if self.processor not in PROCESSORS:
            raise TopologyError(
                f"{where}: processor is {self.processor}, must be one of {', '.join(PROCESSORS)}"
            )
        if not self.peak_flops:
            raise TopologyError(
                f"{where}: peak_flops is empty, must name at least one of {', '.join(PRECISIONS)}"
            )
        for precision, flops_per_s in self.peak_flops:
            if precision not in PRECISIONS:
                raise TopologyError(
                    f"{where}: peak_flops names {precision}, must be one of {', '.join(PRECISIONS)}"
                )
            _require_positive(where, f"peak_flops of {precision}", flops_per_s, "FLOP/s")
        _require_positive(where, "memory", self.memory_bytes, "B")
        _require_at_most(where, "memory", self.memory_bytes, LARGEST_MEMORY_BYTES, "B")
        _require_positive(where, "memory bandwidth", self.memory_bandwidth_bytes_per_s, "B/s")
        _require_not_negative(where, "launch latency", self.launch_latency_s, "s")

    def peak_flops_per_s(self, precision: str) -> float:
        """Return the peak rate of `precision`, in floating-point operations per second.

        Raises:
            TopologyError: the kind has no such precision.
        """
        peaks = dict(self.peak_flops)
        if precision not in peaks:
            raise TopologyError(
                f"device kind {self.name}: no peak for precision {precision}, it has {', '.join(peaks)}"
            )
        return peaks[precision]

    def multiplying_in(self, precision: str) -> DeviceKind:
        """Return the kind as it computes in a precision: with tf32, float32 tensors take the peak of tf32."""
        peaks = dict(self.peak_flops)
        if precision != "tf32" or "tf32" not in peaks:
            return self
        return replace(self, peak_flops=tuple({**peaks, "float32": peaks["tf32"]}.items()))


@dataclass(frozen=True, slots=True)
class Device:
    """One device: its place in the topology, its kind, its node, and its place in the node."""

    index: int
    kind_name: str
    node: int
    local_index: int


@dataclass(frozen=True, slots=True)
class Link:
    """A resource that transfers hold one after the other: one direction of a connection, or a shared bus."""

    name: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        where = f"link {self.name}"
        if self.kind not in LINK_KINDS:
            raise TopologyError(f"{where}: kind is {self.kind}, must be one of {', '.join(LINK_KINDS)}")
        _require_positive(where, "bandwidth", self.bandwidth_bytes_per_s, "B/s")
        _require_not_negative(where, "latency", self.latency_s, "s")


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices, links, and for every ordered pair of devices the links that a transfer holds, in order.

    `contention` holds (kind name, factor): the extra seconds that a computation on that kind takes per second
    of a transfer that it overlaps and that ends at the device; 0 where a kind is not named.
    """

    name: str
    kinds: tuple[DeviceKind, ...]
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    routes: Mapping[Pair, tuple[int, ...]]
    contention: tuple[tuple[str, float], ...] = field(default=())

    def __post_init__(self) -> None:
        self._validate_devices()
        self._validate_routes()

    def _validate_devices(self) -> None:
        where = f"topology {self.name}"
        names = [kind.name for kind in self.kinds]
        if len(set(names)) != len(names):
            raise TopologyError(f"{where}: kinds are {', '.join(names)}, must differ; rename one")
        if not self.devices:
            raise TopologyError(f"{where}: has no device, must have at least one")
        for position, device in enumerate(self.devices):
            if device.index != position:
                raise TopologyError(
                    f"{where}: device at place {position} has index {device.index}, must be its place"
                )
            if device.kind_name not in names:
                raise TopologyError(
                    f"{where}: device {position} is of kind {device.kind_name}, known are {', '.join(names)}"
                )
        for kind_name, factor in self.contention:
            if kind_name not in names:
                raise TopologyError(
                    f"{where}: contention names {kind_name}, must be one of {', '.join(names)}"
                )
            _require_not_negative(where, f"contention of {kind_name}", factor, "s/s")
            _require_at_most(where, f"contention of {kind_name}", factor, LARGEST_CONTENTION, "s/s")

    def _validate_routes(self) -> None:
        where = f"topology {self.name}"
        count = len(self.devices)
        for source, destination in self.routes:
            if not (0 <= source < count and 0 <= destination < count) or source == destination:
                raise TopologyError(
                    f"{where}: route {source}->{destination} does not join two of {count} devices; remove it"
                )
        # Of a thousand devices there are a million routes, and far fewer that differ.
        wrong = {route for route in set(self.routes.values()) if not self._is_route(route)}
        for (source, destination), route in self.routes.items() if wrong else ():
            if route in wrong:
                raise TopologyError(
                    f"{where}: route {source}->{destination} is {list(route)}, must be distinct links "
                    f"out of {len(self.links)}"
                )
        if len(self.routes) != count * (count - 1):
            missing = next(
                (source, destination)
                for source in range(count)
                for destination in range(count)
                if source != destination and (source, destination) not in self.routes
            )
            raise TopologyError(
                f"{where}: no route {missing[0]}->{missing[1]}, every pair of devices must have one"
            )

    def _is_route(self, route: tuple[int, ...]) -> bool:
        return bool(
            route and len(set(route)) == len(route) and min(route) >= 0 and max(route) < len(self.links)
        )

    def __hash__(self) -> int:
        return hash((self.name, self.kinds, self.devices, self.links))

    @property
    def digest(self) -> str:
        """The sha256 of the canonical JSON, without the name: equal machines have equal digests."""
        return hashlib.sha256(self._text(named=False).encode()).hexdigest()

    @property
    def node_count(self) -> int:
        """The number of nodes that hold a device."""
        return len({device.node for device in self.devices})

    def device(self, index: int) -> Device:
        """Return the device at `index`.

        Raises:
            TopologyError: there is no such device.
        """
        if not 0 <= index < len(self.devices):
            raise TopologyError(
                f"topology {self.name}: no device {index}, it has devices 0 to {len(self.devices) - 1}"
            )
        return self.devices[index]

    def kind(self, name: str) -> DeviceKind:
        """Return the device kind called `name`.

        Raises:
            TopologyError: there is no such kind.
        """
        for kind in self.kinds:
            if kind.name == name:
                return kind
        names = ", ".join(kind.name for kind in self.kinds)
        raise TopologyError(f"topology {self.name}: no device kind {name}, it has {names}")

    @property
    def acts(self) -> bool:
        """Whether stages of schedule actors find their own order: a GPU's host does not know what has arrived."""
        return all(kind.processor == "cpu" for kind in self.kinds)

    def kind_of(self, device: int) -> DeviceKind:
        """Return the kind of the device at index `device`."""
        return self.kind(self.device(device).kind_name)

    def contention_of(self, kind_name: str) -> float:
        """Return the extra compute seconds per second of overlapped communication on `kind_name`."""
        return dict(self.contention).get(kind_name, 0.0)

    def route(self, source: int, destination: int) -> tuple[int, ...]:
        """Return the indexes of the links from `source` to `destination`, in order; none within one device.

        Raises:
            TopologyError: one of the devices does not exist.
        """
        self.device(source)
        self.device(destination)
        return () if source == destination else self.routes[source, destination]

    def transfer_time_s(self, source: int, destination: int, size_bytes: int) -> float:
        """Return the seconds that `size_bytes` take on an idle route: latencies + bytes / slowest bandwidth.

        Source: FlexFlow (arXiv:1807.05358), assumption A2, plus a latency term.

        Raises:
            TopologyError: one of the devices does not exist, or the size is negative.
        """
        if size_bytes < 0:
            raise TopologyError(f"transfer {source}->{destination}: size is {size_bytes} B, must be >= 0")
        links = [self.links[index] for index in self.route(source, destination)]
        if not links:
            return 0.0
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        return sum(link.latency_s for link in links) + size_bytes / slowest

    def subset(self, count: int) -> Topology:
        """Return the topology of the first `count` devices, with the links that their routes use.

        Raises:
            TopologyError: there are fewer devices, or `count` is below 1.
        """
        if not 1 <= count <= len(self.devices):
            raise TopologyError(
                f"topology {self.name}: {count} devices asked for, must be between 1 and {len(self.devices)}"
            )
        if count == len(self.devices):
            return self
        routes = {pair: route for pair, route in self.routes.items() if max(pair) < count}
        used = sorted({index for route in routes.values() for index in route})
        renumbered = {old: new for new, old in enumerate(used)}
        devices = self.devices[:count]
        kind_names = {device.kind_name for device in devices}
        return replace(
            self,
            name=f"{self.name}[:{count}]",
            kinds=tuple(kind for kind in self.kinds if kind.name in kind_names),
            devices=devices,
            links=tuple(self.links[index] for index in used),
            routes={pair: tuple(renumbered[index] for index in route) for pair, route in routes.items()},
            contention=tuple(entry for entry in self.contention if entry[0] in kind_names),
        )

    def _text(self, *, named: bool) -> str:
        """Return canonical JSON, with the name or without."""
        content = {
            "format": FORMAT_VERSION,
            "kinds": [asdict(kind) for kind in self.kinds],
            "devices": [asdict(device) for device in self.devices],
            "links": [asdict(link) for link in self.links],
            "contention": sorted(self.contention),
            **({"name": self.name} if named else {}),
        }
        members = {key: _canonical(value) for key, value in content.items()}
        members["routes"] = self._routes_text()
        return "{" + ",".join(f'"{key}":{members[key]}' for key in sorted(members)) + "}"

    def _routes_text(self) -> str:
        """Return the canonical JSON of all routes: lists of source, destination and links, in order."""
        links = {route: ",".join(map(str, route)) for route in set(self.routes.values())}
        routes = sorted(self.routes.items())
        return "[" + ",".join([f"[{pair[0]},{pair[1]},{links[route]}]" for pair, route in routes]) + "]"

    def to_json(self) -> str:
        """Return canonical JSON: sorted keys, no spaces; a route is [source, destination, links...]."""
        return self._text(named=True)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Return the topology that `to_json` wrote.

        Raises:
            TopologyError: the text is not such JSON, or what it holds is not a valid topology.
        """
        try:
            content = json.loads(text)
            if content["format"] != FORMAT_VERSION:
                raise TopologyError(
                    f"topology JSON: format is {content['format']}, must be {FORMAT_VERSION}; export it again"
                )
            return cls(
                name=content["name"],
                kinds=tuple(
                    DeviceKind(
                        **{
                            **kind,
                            "peak_flops": tuple((name, float(peak)) for name, peak in kind["peak_flops"]),
                        }
                    )
                    for kind in content["kinds"]
                ),
                devices=tuple(Device(**device) for device in content["devices"]),
                links=tuple(Link(**link) for link in content["links"]),
                routes={
                    (source, destination): tuple(route) for source, destination, *route in content["routes"]
                },
                contention=tuple((name, float(factor)) for name, factor in content["contention"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TopologyError(
                f"topology JSON: malformed ({type(error).__name__}: {error}); export it again"
            ) from error


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def local_topology(
    device_count: int,
    kind: DeviceKind | Sequence[DeviceKind],
    bandwidth_bytes_per_s: float,
    latency_s: float,
    contention: float = 0.0,
    *,
    link_kind: LinkKind = "memory",
    measured: Mapping[Pair, tuple[float, float]] | None = None,
    ports: bool = True,
) -> Topology:
    """Return one node of `device_count` devices with a link of its own for every ordered pair, and ports of GPUs.

    `kind` is that of all devices, or of each. `measured` gives (bandwidth in bytes per second, latency in seconds) for
    pairs that differ from the rest. `ports`: messages out of one GPU, and those into one, go one after the other.

    Raises:
        TopologyError: there is no device, kinds are not as many as devices, or a measured value is out of range.
    """
    kinds = [kind] * device_count if isinstance(kind, DeviceKind) else list(kind)
    if len(kinds) != device_count:
        raise TopologyError(
            f"topology local: {len(kinds)} kinds are given for {device_count} devices, must be one for each"
        )
    named = {kind.name: kind for kind in kinds}
    pairs = [(i, j) for i in range(device_count) for j in range(device_count) if i != j]
    links = []
    for source, destination in pairs:
        bandwidth, latency = (measured or {}).get((source, destination), (bandwidth_bytes_per_s, latency_s))
        links.append(Link(f"{link_kind}/{source}->{destination}", link_kind, bandwidth, latency))
    routes: dict[Pair, tuple[int, ...]] = {pair: (index,) for index, pair in enumerate(pairs)}
    if ports:
        links, routes = with_ports(links, routes, [device_kind.processor for device_kind in kinds])
    return Topology(
        name="local",
        kinds=tuple(named.values()),
        devices=tuple(Device(index, device_kind.name, 0, index) for index, device_kind in enumerate(kinds)),
        links=tuple(links),
        routes=routes,
        contention=tuple((kind_name, contention) for kind_name in named) if contention else (),
    )


def with_ports(
    links: Sequence[Link], routes: Mapping[Pair, tuple[int, ...]], processors: Sequence[Processor]
) -> tuple[list[Link], dict[Pair, tuple[int, ...]]]:
    """Return links and routes with a port out of each GPU and one into it, as fast as the fastest route over it.

    Routes between devices that are not both GPUs stay as they are. A port adds no latency: a route's price is the same.
    """
    extended, with_their_ports = list(links), dict(routes)
    port_of: dict[tuple[int, str], int] = {}
    gpu_pairs = [pair for pair in routes if all(processors[device] == "cuda" for device in pair)]
    for end, direction in ((0, "out"), (1, "in")):
        for device in sorted({pair[end] for pair in gpu_pairs}):
            fastest = max(
                (
                    min((links[link] for link in routes[pair]), key=lambda link: link.bandwidth_bytes_per_s)
                    for pair in gpu_pairs
                    if pair[end] == device
                ),
                key=lambda link: link.bandwidth_bytes_per_s,
            )
            port_of[device, direction] = len(extended)
            extended.append(
                Link(f"port/{device}/{direction}", fastest.kind, fastest.bandwidth_bytes_per_s, 0.0)
            )
    for source, destination in gpu_pairs:
        with_their_ports[source, destination] = (
            port_of[source, "out"],
            *routes[source, destination],
            port_of[destination, "in"],
        )
    return extended, with_their_ports


def packaged_topologies() -> tuple[str, ...]:
    """Return the names of the topologies that come with Soapstone, in alphabetical order."""
    from graph.topologies.reader import packaged_names  # keeps PyYAML out of imports that read no file

    return packaged_names()


def load_topology(name_or_path: str | Path, nodes: int | None = None) -> Topology:
    """Return a packaged topology by its name, or the one in a YAML file; `nodes` overrides its node count.

    Raises:
        TopologyError: no such name or file, or its content is malformed; the message names file and key.
    """
    from graph.topologies.reader import read_topology  # keeps PyYAML out of imports that read no file

    return read_topology(name_or_path, nodes)
