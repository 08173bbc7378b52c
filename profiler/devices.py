"""The devices of this machine, their kinds, and their selection by index.

A CPU device is one core, to which its process is pinned. A CUDA device is one GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from graph.errors import UsageError
from graph.texts import ranges
from graph.topology import DeviceKind, Processor
from profiler.kinds import cpu_kind, cuda_kind
from profiler.pinning import can_pin, keep_freed_memory, limit_threads, pin_to_core, usable_cores
from profiler.processors import processor_facts

PROCESSOR_NAMES = {"cpu": "CPU devices (cores)", "cuda": "GPUs"}
# Far beyond any machine: a mistyped "0-70000000" is refused before a list of it is made.
LARGEST_INDEX = 65535


@dataclass(frozen=True, slots=True)
class PhysicalDevice:
    """A device of this machine. `index` counts within its processor type; `core`: to which a CPU device is pinned.

    `tf32`: whether its process multiplies float32 tensors in TF32 (a GPU).
    """

    processor: Processor
    index: int
    kind: DeviceKind
    core: int | None = None
    tf32: bool = False

    @property
    def torch_name(self) -> str:
        """The device as torch names it: "cpu" or "cuda:3"."""
        return "cpu" if self.processor == "cpu" else f"cuda:{self.index}"

    @property
    def label(self) -> str:
        """The device as messages name it: "cpu:0" or "cuda:3"."""
        return f"{self.processor}:{self.index}"

    def occupy(self) -> None:
        """Make this process compute on this device: pin it to the core on one thread, or make the GPU current."""
        pin_to_core(self.core)
        limit_threads()
        if self.processor == "cpu":
            keep_freed_memory()
        else:
            import torch

            from profiler.operators.dtypes import multiply_in_tf32

            torch.cuda.set_device(self.index)
            multiply_in_tf32(allowed=self.tf32)


def gpu_uuid(index: int) -> str:
    """Return the UUID of a GPU, or of a MIG slice, that CUDA counts as `index`, without its prefix.

    CUDA_VISIBLE_DEVICES may have renumbered it.
    """
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def parse_device_list(text: str, option: str = "--gpus") -> tuple[int, ...]:
    """Return the indexes that `text` such as "0-7,9" names, in the order given.

    Raises:
        UsageError: the text is no such list, a range runs backwards, or an index is named twice.
    """
    indexes: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", item, flags=re.ASCII)
        if not match:
            raise UsageError(
                f"{option} {text}: '{item.strip()}' is no device, must be indexes and ranges; write for example 0-3,6"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{option} {text}: range {first}-{last} runs backwards; write {last}-{first}")
        if last > LARGEST_INDEX:
            raise UsageError(f"{option} {text}: index {last} is too large, must be at most {LARGEST_INDEX}")
        indexes.extend(range(first, last + 1))
    repeated = [index for index, count in Counter(indexes).items() if count > 1]
    if repeated:
        raise UsageError(
            f"{option} {text}: device {repeated[0]} is named twice, must be named once; remove one"
        )
    return tuple(indexes)


def format_device_list(indexes: Sequence[int]) -> str:
    """Return the text that `parse_device_list` reads as `indexes`, with ranges where they run on."""
    return ",".join(ranges(indexes))


@lru_cache(maxsize=2)
def available_devices(processor: Processor) -> tuple[PhysicalDevice, ...]:
    """Return the devices of this machine, by index: one per core that this process may use, or one per GPU."""
    if processor == "cpu":
        cores = usable_cores()
        # The first core of a name stands for all: some processors let single cores run a little faster.
        kinds: dict[str, DeviceKind] = {}
        core_kinds = [cpu_kind(processor_facts(core)) for core in cores]
        return tuple(
            PhysicalDevice("cpu", index, kinds.setdefault(kind.name, kind), core)
            for index, (kind, core) in enumerate(zip(core_kinds, cores, strict=True))
        )
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(
        PhysicalDevice("cuda", index, cuda_kind(index)) for index in range(torch.cuda.device_count())
    )


def select_devices(
    processor: Processor, indexes: Sequence[int], option: str = "--gpus"
) -> tuple[PhysicalDevice, ...]:
    """Return the devices at `indexes`, in that order.

    Raises:
        UsageError: one of them is not present; the message lists the present ones.
    """
    present = available_devices(processor)
    if not indexes or min(indexes) < 0 or max(indexes) >= len(present):
        raise UsageError(
            f"{option} {format_device_list(indexes)}: this machine has {_describe(processor, present)}, "
            f"must name {PROCESSOR_NAMES[processor]} that are present; {_advice(processor, present)}"
        )
    return tuple(present[index] for index in indexes)


def _describe(processor: Processor, present: Sequence[PhysicalDevice]) -> str:
    if not present:
        return f"0 {PROCESSOR_NAMES[processor]}"
    kinds = ", ".join(
        f"{count} x {name}" for name, count in Counter(device.kind.name for device in present).items()
    )
    return f"{len(present)} {PROCESSOR_NAMES[processor]} ({kinds})"


def _advice(processor: Processor, present: Sequence[PhysicalDevice]) -> str:
    some = f"use {format_device_list([device.index for device in present])}" if present else ""
    if processor == "cpu":
        return some
    cores = f"use --device cpu, this machine has {len(usable_cores())} {PROCESSOR_NAMES['cpu']}"
    return f"{some} or {cores}" if some else cores


def cpu_devices(count: int) -> tuple[PhysicalDevice, ...]:
    """Return `count` CPU devices; where there are fewer cores they share them in turn (see `device_warnings`).

    Raises:
        UsageError: `count` is below 1.
    """
    if count < 1:
        raise UsageError(f"CPU devices: {count} asked for, must be at least 1")
    present = available_devices("cpu")
    return tuple(replace(present[index % len(present)], index=index) for index in range(count))


def device_warnings(devices: Sequence[PhysicalDevice]) -> tuple[str, ...]:
    """Return warnings about conditions that make measurements on `devices` less exact, one line each."""
    cores = [device.core for device in devices if device.processor == "cpu"]
    warnings = []
    if cores and not can_pin():
        warnings.append(
            "CPU devices: this operating system cannot pin a process to a core, so times vary more; "
            "use Linux for exact ones"
        )
    if len(set(cores)) < len(cores):
        warnings.append(
            f"CPU devices: {len(cores)} share {len(set(cores))} core(s), so they take turns, which predictions "
            "do not know, and times vary more; use at most one device a core"
        )
    return tuple(warnings)
