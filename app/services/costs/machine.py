"""This machine's devices as rows of the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from app.db.records import DeviceKindRecord, EnvironmentRecord
from app.db.store import Store
from graph.errors import UsageError
from graph.topology import DeviceKind, Processor

if TYPE_CHECKING:
    from profiler.devices import PhysicalDevice

# Each device is a process; beyond this, they would do nothing but take turns, and memory would run out.
DEVICES_PER_CORE = 8


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one kind on this machine, and the ids of the rows of their kind and environment."""

    kind: DeviceKind
    devices: tuple[PhysicalDevice, ...]
    kind_id: int
    environment_id: int

    @property
    def name(self) -> str:
        """The devices in words: "8 x H100-SXM5-80GB"."""
        return f"{len(self.devices)} x {self.kind.name}"


@dataclass(frozen=True)
class LocalMachine:
    """Devices of this machine, of one kind or of several, and the rows of their kinds and environment.

    `links_kind_id` is the row under which links between them are kept: that of their kind, or of their mix, which is
    a kind of its own there ("4 x A + 8 x B", in order), since its links are those of neither.
    """

    devices: tuple[PhysicalDevice, ...]
    groups: tuple[DeviceGroup, ...]
    environment_id: int
    links_kind_id: int

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def processor(self) -> Processor:
        """The processor type of all its devices."""
        return self.devices[0].processor

    @property
    def name(self) -> str:
        """The devices in words."""
        return " + ".join(group.name for group in self.groups)

    def group(self, kind_name: str) -> DeviceGroup | None:
        """Return the devices of a kind, or None without such devices."""
        return next((group for group in self.groups if group.kind.name == kind_name), None)


def default_processor() -> Processor:
    """Return "cuda" where this machine has GPUs, else "cpu"."""
    from profiler.devices import available_devices

    return "cuda" if available_devices("cuda") else "cpu"


def local_devices(
    processor: Processor | None, count: int | None, gpus: str | None = None
) -> tuple[PhysicalDevice, ...]:
    """Return the devices of this machine that options choose.

    CPU devices may share cores where there are too few: a machine with one core works.

    Args:
        processor: of the devices; None: GPUs where there are some.
        count: so many of them, the first ones; None: all.
        gpus: the GPUs by their indexes, such as "0-7", in place of both.

    Raises:
        UsageError: fewer GPUs are present, or far fewer cores, or the options contradict each other.
    """
    from profiler.devices import available_devices, cpu_devices, parse_device_list, select_devices

    if gpus is not None:
        for option, given in (("--device cpu", processor == "cpu"), ("--devices", count is not None)):
            if given:
                raise UsageError(f"--gpus: was given with {option}, must stand alone; leave one of them out")
        return select_devices("cuda", parse_device_list(gpus))
    processor = processor or default_processor()
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


def describe(store: Store, devices: Sequence[PhysicalDevice]) -> LocalMachine:
    """Store the devices' kinds and this environment, and return them with their ids.

    Raises:
        UsageError: there is no device, or GPUs and CPU devices are mixed.
    """
    from profiler.environment import environment

    if len({device.processor for device in devices}) != 1:
        raise UsageError(
            f"devices: are [{', '.join(device.label for device in devices)}], must be at least one, and all GPUs or "
            "all CPU devices; choose others"
        )
    first = devices[0]
    environment_id = store.put_environment(
        EnvironmentRecord(facts=environment(first.processor, tf32=first.tf32).facts)
    )
    kinds = {device.kind.name: device.kind for device in devices}
    groups = tuple(
        DeviceGroup(
            kind,
            tuple(device for device in devices if device.kind.name == name),
            put_kind(store, kind),
            environment_id,
        )
        for name, kind in kinds.items()
    )
    return LocalMachine(tuple(devices), groups, environment_id, _links_kind(store, devices, groups))


def links_kind_name(kind_names: Sequence[str]) -> str:
    """Return the name under which links between devices of these kinds are kept: the kind's, or that of the mix."""
    if len(set(kind_names)) == 1:
        return kind_names[0]
    return " + ".join(f"{len(list(run))} x {name}" for name, run in groupby(kind_names))


def _links_kind(store: Store, devices: Sequence[PhysicalDevice], groups: Sequence[DeviceGroup]) -> int:
    if len(groups) == 1:
        return groups[0].kind_id
    return store.put_device_kind(
        DeviceKindRecord(
            name=links_kind_name([device.kind.name for device in devices]),
            processor=devices[0].processor,
            memory_bytes=sum(device.kind.memory_bytes for device in devices),
            description={"mix": [device.kind.name for device in devices]},
        )
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
