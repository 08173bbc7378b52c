"""What the processor of this machine is: name, instruction sets, frequency, caches, memory.

Read from what the operating system tells. Only values that stay the same from one start to the next are used, since
they name a device kind and an environment.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CPU_INFORMATION = Path("/proc/cpuinfo")
SYSTEM_CORE = Path("/sys/devices/system/cpu/cpu0")
MEMORY_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """A CPU. `frequency_hz` is the highest configured or the nominal one, or None where nobody tells."""

    name: str
    cores: int
    flags: frozenset[str]
    frequency_hz: float | None
    cache_bytes: int
    memory_bytes: int


@lru_cache(maxsize=1)
def processor_facts() -> ProcessorFacts:
    """Return the facts of this machine's processor."""
    fields = _first_block(CPU_INFORMATION)
    return ProcessorFacts(
        name=processor_name(fields),
        cores=os.cpu_count() or 1,
        flags=frozenset((fields.get("flags") or fields.get("Features") or "").split()),
        frequency_hz=frequency_hz(fields),
        cache_bytes=_cache_bytes(),
        memory_bytes=_memory_bytes(),
    )


def processor_name(fields: dict[str, str]) -> str:
    """Return a name that tells this processor model from others, from the fields of /proc/cpuinfo.

    Virtual machines shorten names to "AMD EPYC", which stands for five generations; family and model are added there.
    Arm processors have no name at all, only numbers.
    """
    name = " ".join(fields.get("model name", "").split())
    if not name and "CPU part" in fields:
        return f"{platform.machine()} {fields.get('CPU implementer', '')} {fields['CPU part']}"
    if not name:
        return _name_without_cpuinfo()
    if not re.search(r"\d", name) and "cpu family" in fields:
        name = f"{name} family {fields['cpu family']} model {fields.get('model', '0')}"
    return name


def _name_without_cpuinfo() -> str:
    if platform.system() == "Darwin":
        told = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        if told:
            return told
    return platform.processor() or platform.machine() or "processor"


def frequency_hz(fields: dict[str, str], system_core: Path = SYSTEM_CORE) -> float | None:
    """Return the configured maximum, else the nominal frequency (half the BogoMIPS of an x86 processor).

    The present frequency ("cpu MHz") changes from second to second and so is of no use. Rounded to 50 MHz, since the
    kernel calibrates BogoMIPS at each start.
    """
    configured = _read(system_core / "cpufreq" / "cpuinfo_max_freq")
    if configured.isdigit():
        return _rounded(int(configured) * 1e3)
    if "bogomips" in fields and platform.machine() in ("x86_64", "AMD64", "i686"):
        return _rounded(float(fields["bogomips"]) / 2 * 1e6)
    return None


def _rounded(frequency: float) -> float:
    return round(frequency / 50e6) * 50e6


def _first_block(path: Path) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cache_bytes() -> int:
    """Return the size of the largest cache that a core can fill; 32 MiB where nobody tells."""
    sizes = [_size(_read(entry)) for entry in sorted((SYSTEM_CORE / "cache").glob("index*/size"))]
    return max(sizes, default=0) or 32 * 2**20


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]] if match else 0


def _memory_bytes() -> int:
    """Return the machine's memory, or what a container is limited to, whichever is less."""
    import psutil

    limits = [int(text) for text in map(_read, MEMORY_LIMITS) if text.isdigit()]
    return min([int(psutil.virtual_memory().total), *limits])
