"""Device kinds of this machine, and their data sheets."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Any

from graph.topology import DeviceKind
from profiler.processors import ProcessorFacts, processor_facts

MIB = 2**20

# A CUDA device without a data sheet here: lanes of float32 a multiprocessor (the most that any NVIDIA generation
# to date has), its frequency and its memory bandwidth where the driver does not report them. All are assumptions.
LANES_A_MULTIPROCESSOR = 128
ASSUMED_CLOCK_HZ = 1.4e9
ASSUMED_BANDWIDTH_BYTES_PER_S = 500e9
ASSUMED_LAUNCH_LATENCY_S = 5e-6
# Dense operations of matrix units a clock and multiprocessor, on numbers of 16 bits, by compute capability: published
# peak rates of V100, T4, A100, A10, L4, H100 and B200 by multiprocessors and boost clock. An unknown capability has
# that of the one before it.
HALF_FLOPS_A_CLOCK = {
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 1024,
}
# bfloat16 and TF32, the latter at half the rate, came with it.
AMPERE = (8, 0)
# Of each GPU's memory so much is no tensor's: CUDA's context, workspaces of its libraries, NCCL's buffers, the
# temporaries of dropout. An assumption; a probe of the links says where a card takes more (`LinkProbe.besides_bytes`).
RESERVED_BYTES = 3 * 2**29


@lru_cache(maxsize=1)
def _datasheets() -> dict[str, Any]:
    import yaml

    text = resources.files("profiler").joinpath("datasheets.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def _kind_from_entry(entry: dict[str, Any], memory_bytes: int | None = None) -> DeviceKind:
    return DeviceKind(
        name=entry["name"],
        processor="cuda",
        peak_flops=tuple((precision, float(peak)) for precision, peak in entry["peak_flops"].items()),
        memory_bytes=int(entry["memory_bytes"]) if memory_bytes is None else memory_bytes,
        memory_bandwidth_bytes_per_s=float(entry["memory_bandwidth_bytes_per_s"]),
        launch_latency_s=float(entry["launch_latency_s"]),
    )


def datasheet_kinds() -> tuple[DeviceKind, ...]:
    """Return the CUDA device kinds whose data sheets are known."""
    return tuple(_kind_from_entry(entry) for entry in _datasheets()["cuda"])


def cpu_kind(facts: ProcessorFacts | None = None) -> DeviceKind:
    """Return the kind of a CPU device: one core of the processor, with its share of the machine's memory.

    Peak float32: lanes x multiply-add units x 2 x frequency. Memory is rounded down to MiB. Cores of a processor that
    has several sorts of them are of different kinds.
    """
    processor = processor_facts() if facts is None else facts
    sheet = _datasheets()["cpu"]
    vector = next(
        (entry for entry in sheet["instruction_sets"] if entry["flag"] in processor.flags), sheet["otherwise"]
    )
    frequency = processor.frequency_hz or float(sheet["frequency_hz"])
    share = float(sheet["efficiency_core_share"]) if processor.sort == "E-core" else 1.0
    return DeviceKind(
        name=f"{processor.name} (1 {processor.sort})",
        processor="cpu",
        peak_flops=(("float32", share * vector["lanes"] * vector["units"] * 2 * frequency),),
        memory_bytes=processor.memory_bytes // processor.cores // MIB * MIB,
        memory_bandwidth_bytes_per_s=float(sheet["memory_bandwidth_bytes_per_s"]),
        launch_latency_s=float(sheet["launch_latency_s"]),
    )


def cuda_kind_of(reported_name: str, memory_bytes: int, properties: Any = None) -> DeviceKind:
    """Return the kind of a CUDA device from the driver's report.

    A known name gets its data sheet. An unknown one keeps the driver's name and gets figures from its multiprocessors,
    clocks and compute capability, as far as `properties` has them. Memory is what is reported, less `RESERVED_BYTES`.
    """
    memory_bytes = max(memory_bytes - RESERVED_BYTES, memory_bytes // 2)
    for entry in _datasheets()["cuda"]:
        if any(re.fullmatch(pattern, reported_name) for pattern in entry["torch_names"]):
            return _kind_from_entry(entry, memory_bytes)
    processors = int(getattr(properties, "multi_processor_count", 1))
    clock = float(getattr(properties, "clock_rate", 0)) * 1e3 or ASSUMED_CLOCK_HZ
    # Two transfers a clock; the width is in bits, the clock in kHz.
    bandwidth = (
        2e3
        * float(getattr(properties, "memory_clock_rate", 0))
        * float(getattr(properties, "memory_bus_width", 0))
        / 8
    )
    return DeviceKind(
        name=reported_name,
        processor="cuda",
        peak_flops=_assumed_peaks(processors, clock, properties),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth or ASSUMED_BANDWIDTH_BYTES_PER_S,
        launch_latency_s=ASSUMED_LAUNCH_LATENCY_S,
    )


def _assumed_peaks(processors: int, clock_hz: float, properties: Any) -> tuple[tuple[str, float], ...]:
    capability = (int(getattr(properties, "major", 0)), int(getattr(properties, "minor", 0)))
    peaks = [("float32", processors * LANES_A_MULTIPROCESSOR * 2 * clock_hz)]
    generation = max((version for version in HALF_FLOPS_A_CLOCK if version <= capability), default=None)
    if generation is not None:
        half = processors * HALF_FLOPS_A_CLOCK[generation] * clock_hz
        peaks += [("tf32", half / 2), ("bfloat16", half)] if capability >= AMPERE else []
        peaks.append(("float16", half))
    return tuple(peaks)


def cuda_kind(index: int) -> DeviceKind:
    """Return the kind of the CUDA device at `index`; torch raises where there is none."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return cuda_kind_of(properties.name, int(properties.total_memory), properties)
