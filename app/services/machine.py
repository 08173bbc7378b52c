"""This machine's devices as rows of the database, and its measured links as the topology `local`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from app.db.records import DeviceKindRecord, EnvironmentRecord, LinkCostRecord, LinkFitRecord
from app.db.store import Store
from app.services.progress import Progress
from graph.errors import UsageError
from graph.topology import DeviceKind, Topology, local_topology

if TYPE_CHECKING:
    from profiler.devices import PhysicalDevice
    from profiler.links import LinkMeasurement, LinkProbe

Processor = Literal["cpu", "cuda"]
CONTENTION = "contention"
LARGE_ALL_REDUCE = "large all_reduce"
EXCHANGE = "exchange"
# Each device is a process; beyond this, they would do nothing but take turns, and memory would run out.
DEVICES_PER_CORE = 8


@dataclass(frozen=True)
class Machine:
    """Devices of one kind on this machine, and the rows of their kind and environment."""

    devices: tuple[PhysicalDevice, ...]
    kind: DeviceKind
    kind_id: int
    environment_id: int

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.devices)


def default_processor() -> Processor:
    """Return "cuda" where this machine has GPUs, else "cpu"."""
    from profiler.devices import available_devices

    return "cuda" if available_devices("cuda") else "cpu"


def local_devices(processor: Processor, count: int | None) -> tuple[PhysicalDevice, ...]:
    """Return the first `count` devices of this machine; all of them where None.

    CPU devices may share cores where there are too few: a machine with one core works.

    Raises:
        UsageError: fewer GPUs are present, or far fewer cores.
    """
    from profiler.devices import available_devices, cpu_devices, select_devices

    if count is not None and count < 1:
        raise UsageError(f"--devices: is {count}, must be at least 1; ask for one or more")
    if processor == "cpu":
        cores = len(available_devices("cpu"))
        if count is not None and count > cores * DEVICES_PER_CORE:
            raise UsageError(
                f"--devices: is {count}, must be at most {cores * DEVICES_PER_CORE} on the {cores} cores of this "
                "machine; ask for fewer"
            )
        return available_devices("cpu") if count is None else cpu_devices(count)
    devices = available_devices("cuda")
    if not devices:
        raise UsageError("--device cuda: this machine has 0 GPUs, must have one; use --device cpu")
    return devices if count is None else select_devices("cuda", tuple(range(count)), "--devices")


def describe(store: Store, devices: tuple[PhysicalDevice, ...]) -> Machine:
    """Store the devices' kind and this environment, and return them with their ids.

    Raises:
        UsageError: the devices are of several kinds.
    """
    from profiler.environment import environment

    kinds = sorted({device.kind.name for device in devices})
    if len(kinds) != 1:
        raise UsageError(
            f"devices: are of kinds {', '.join(kinds)}, must be of one kind; choose fewer with --gpus"
        )
    kind = devices[0].kind
    return Machine(
        devices=devices,
        kind=kind,
        kind_id=put_kind(store, kind),
        environment_id=store.put_environment(
            EnvironmentRecord(facts=environment(devices[0].processor).facts)
        ),
    )


def put_kind(store: Store, kind: DeviceKind) -> int:
    """Store a device kind with its data sheet; return its id."""
    return store.put_device_kind(
        DeviceKindRecord(
            kind.name,
            kind.processor,
            kind.memory_bytes,
            {**asdict(kind), "peak_flops": dict(kind.peak_flops)},
        )
    )


@dataclass(frozen=True, slots=True)
class LocalLinks:
    """Fitted communication between this machine's devices.

    `latency_s` is that of an exchange inside a training step (`exchange_overhead`), not of a bare message. All-reduce
    takes `all_reduce_latency_s` + bytes / `all_reduce_bytes_per_s` over the whole group of `count` devices, or where
    that is more, what the line (seconds, bytes per second) of `large_all_reduce` says.
    """

    count: int
    latency_s: float
    bytes_per_s: float
    all_reduce_latency_s: float
    all_reduce_bytes_per_s: float
    contention: float
    large_all_reduce: tuple[float, float] | None = None


def stored_links(store: Store, machine: Machine) -> LocalLinks | None:
    """Return what an earlier probe of as many devices measured in this environment, or None."""
    return fitted_links(store, machine.kind_id, machine.environment_id, machine.count)


def fitted_links(store: Store, kind_id: int, environment_id: int, count: int) -> LocalLinks | None:
    """Return what a probe of `count` devices of a kind measured in an environment, or None."""
    fits = {
        fit.pattern: fit
        for fit in store.link_fits(kind_id, environment_id)
        if fit.group_size == count or (fit.pattern == "p2p" and fit.group_size == 2)
    }
    point, reduction, contention = fits.get("p2p"), fits.get("all_reduce"), fits.get(CONTENTION)
    exchange, large = fits.get(EXCHANGE), fits.get(LARGE_ALL_REDUCE)
    if (
        point is None
        or exchange is None
        or exchange.latency_s is None
        or reduction is None
        or contention is None
        or point.latency_s is None
        or point.bandwidth_bytes_per_s is None
        or reduction.latency_s is None
        or reduction.bandwidth_bytes_per_s is None
        or contention.contention_factor is None
    ):
        return None
    return LocalLinks(
        count=count,
        latency_s=point.latency_s + exchange.latency_s,
        bytes_per_s=point.bandwidth_bytes_per_s,
        all_reduce_latency_s=reduction.latency_s,
        all_reduce_bytes_per_s=reduction.bandwidth_bytes_per_s,
        contention=contention.contention_factor,
        large_all_reduce=(
            (large.latency_s, large.bandwidth_bytes_per_s)
            if large is not None and large.latency_s is not None and large.bandwidth_bytes_per_s is not None
            else None
        ),
    )


def probe(store: Store, machine: Machine) -> LocalLinks:
    """Measure the links between the machine's devices, store raw samples and fits, and return the fits."""
    from app.services.exchange_overhead import overhead_jobs
    from profiler.links import LinkOptions, probe_links

    options = LinkOptions()
    result = probe_links(machine.devices, options, overhead_jobs(options.limit_s))
    store.put_link_costs(machine.kind_id, machine.environment_id, _link_costs(result))
    store.put_link_fits(machine.kind_id, machine.environment_id, _link_fits(result, machine.count))
    links = stored_links(store, machine)
    if links is None:
        raise UsageError(
            "links: the probe measured no all-reduce over the whole group, must; give two devices or more"
        )
    return links


def _link_costs(result: LinkProbe) -> list[LinkCostRecord]:
    return [
        LinkCostRecord(
            pattern=link.pattern,
            group_size=link.group_size,
            size_bytes=sample.size_bytes,
            minimum_s=sample.minimum_s,
            median_s=sample.median_s,
            samples_s=sample.samples_s,
        )
        for link in _widest(result)
        for sample in link.samples
    ]


def _link_fits(result: LinkProbe, count: int) -> list[LinkFitRecord]:
    fits = [
        LinkFitRecord(link.pattern, link.group_size, link.latency_s, link.bandwidth_bytes_per_s)
        for link in _widest(result)
    ]
    fits += [
        LinkFitRecord(
            LARGE_ALL_REDUCE, link.group_size, link.large.latency_s, link.large.bandwidth_bytes_per_s
        )
        for link in _widest(result)
        if link.pattern == "all_reduce" and link.large is not None
    ]
    return [
        *fits,
        LinkFitRecord(CONTENTION, count, contention_factor=result.contention),
        LinkFitRecord(EXCHANGE, count, latency_s=result.overhead_s),
    ]


def _widest(result: LinkProbe) -> list[LinkMeasurement]:
    """The measurements to store: one for each pattern and group size."""
    return list({(link.pattern, link.group_size): link for link in result.links}.values())


def local_links(
    store: Store, machine: Machine, progress: Progress, *, again: bool = False
) -> LocalLinks | None:
    """Return the machine's links from the database, measuring them where nobody has; None for a single device."""
    if machine.count < 2:
        return None
    links = None if again else stored_links(store, machine)
    if links is None:
        progress.begin(f"measuring links between {machine.count} {machine.kind.processor} devices", None)
        try:
            links = probe(store, machine)
        finally:
            progress.end()
    return links


def topology_of(machine: Machine, links: LocalLinks | None) -> Topology:
    """Return the topology `local` of this machine's devices."""
    if links is None:
        return local_topology(machine.count, machine.kind, bandwidth_bytes_per_s=1.0, latency_s=0.0)
    return local_topology(
        machine.count,
        machine.kind,
        links.bytes_per_s,
        links.latency_s,
        links.contention,
        link_kind="memory" if machine.kind.processor == "cpu" else "nvlink",
    )
