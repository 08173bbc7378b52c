"""The environment of a measurement: hardware, drivers, software."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from graph.canonical import digest
from graph.topology import Processor
from profiler.pinning import can_keep_memory
from profiler.process_groups import NCCL_VARIABLES
from profiler.processors import processor_facts

THREADS_A_DEVICE = 1
DRIVER_QUERY_LIMIT_S = 20.0
DRIVER_FACTS = ("name", "driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
MODES = ("ecc.mode.current", "mig.mode.current")


@dataclass(frozen=True)
class Environment:
    """Facts, as JSON values, under which costs were measured. It names no host, so that like machines share costs."""

    facts: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON of the facts: the environment's identity."""
        return digest(dict(self.facts))


@lru_cache(maxsize=4)
def environment(processor: Processor, *, tf32: bool = False) -> Environment:
    """Return the environment of this machine's CPU or CUDA devices; of GPUs, as their processes multiply float32."""
    import torch

    facts = processor_facts()
    described: dict[str, Any] = {
        "device_type": processor,
        "processor": facts.name,
        "cores": facts.cores,
        "processor_frequency_hz": facts.frequency_hz,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        # In GiB: the kernel's own share, and so the last digits, change from one start to the next.
        "memory_gib": round(facts.memory_bytes / 2**30),
        "operating_system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads_a_device": THREADS_A_DEVICE,
    }
    if processor == "cpu":
        described["freed_memory"] = "kept" if can_keep_memory() else "as the system likes"
    if processor == "cuda":
        described |= _cuda_facts() | {"matmul_tf32": tf32, "cudnn_tf32": tf32}
    return Environment(described)


def _cuda_facts() -> dict[str, Any]:
    import torch

    available = torch.cuda.is_available()
    version = torch.backends.cudnn.version() if available else None
    return {
        "cuda": torch.version.cuda,
        "cudnn": version,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if available and has_nccl() else None,
        "nccl_variables": _nccl_variables(),
        "driver": _driver_facts(),
    }


def has_nccl() -> bool:
    """Return whether this torch communicates over NCCL."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_nccl_available()


def _nccl_variables() -> dict[str, str]:
    """Return the NCCL variables that the user sets, without those of Soapstone itself and those of the log."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") and name not in NCCL_VARIABLES and not name.startswith("NCCL_DEBUG")
    }


def _driver_facts() -> list[dict[str, str]]:
    """Return, per distinct GPU model, driver version, configured limits of clocks and power, ECC and MIG.

    Source: nvidia-smi's query interface; where it is missing the driver stays unknown and the list empty. A driver that
    knows of no MIG is asked for the rest.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    for names in ((*DRIVER_FACTS, *MODES), DRIVER_FACTS):
        if rows := _driver_query(command, names):
            return rows
    return []


def _driver_query(command: str, names: Sequence[str]) -> list[dict[str, str]]:
    try:
        output = subprocess.run(
            [command, f"--query-gpu={','.join(names)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=DRIVER_QUERY_LIMIT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = sorted(
        {tuple(part.strip() for part in line.split(",")) for line in output.splitlines() if line.strip()}
    )
    return [dict(zip(names, row, strict=False)) for row in rows]
