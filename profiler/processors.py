"""The processor of this machine: name, instruction sets, frequency, caches, memory.

Read from the operating system. Only values that stay the same from one start to the next are used, since
they name a device kind and an environment.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

CPU_INFORMATION = Path("/proc/cpuinfo")
SYSTEM_CORE = Path("/sys/devices/system/cpu/cpu0")
# Of processors with performance and efficiency cores, the kernel lists the cores of each sort here.
HYBRID_CORES = {"P-core": Path("/sys/devices/cpu_core/cpus"), "E-core": Path("/sys/devices/cpu_atom/cpus")}
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """A CPU, as one of its cores sees it.

    `frequency_hz` is the core's highest configured or nominal one, or None where unknown. `sort` is "P-core" or
    "E-core" where there are both, else "core".
    """

    name: str
    cores: int
    flags: frozenset[str]
    frequency_hz: float | None
    cache_bytes: int
    memory_bytes: int
    sort: str = "core"


@lru_cache(maxsize=4096)
def processor_facts(core: int | None = None) -> ProcessorFacts:
    """Return the facts of this machine's processor as a core sees them; of the first core where None."""
    fields = core_fields(CPU_INFORMATION, core)
    return ProcessorFacts(
        name=processor_name(fields),
        cores=os.cpu_count() or 1,
        flags=frozenset((fields.get("flags") or fields.get("Features") or "").split()),
        frequency_hz=frequency_hz(fields, SYSTEM_CORE.with_name(f"cpu{core or 0}")),
        cache_bytes=_cache_bytes(),
        memory_bytes=memory_bytes(),
        sort=core_sort(core),
    )


def core_sort(core: int | None, listed: Mapping[str, Path] = HYBRID_CORES) -> str:
    """Return the sort of a core, where the processor has several sorts, else "core"."""
    for sort, path in listed.items():
        if core in _cores(_read(path)):
            return sort
    return "core"


def _cores(text: str) -> set[int]:
    """Return the cores that a list of the kernel's names, such as "0-7,16"."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            cores.update(range(int(first), int(last or first) + 1))
    return cores


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
        output = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        if output:
            return output
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


def core_fields(path: Path, core: int | None = None) -> dict[str, str]:
    """Return the fields of a core in a file such as /proc/cpuinfo; of the first core where None, or not listed."""
    blocks = _blocks(path)
    return dict(next((block for block in blocks if block.get("processor") == str(core)), blocks[0]))


@lru_cache(maxsize=16)
def _blocks(path: Path) -> list[dict[str, str]]:
    blocks = []
    for text in _read(path).split("\n\n"):
        pairs = [line.partition(":") for line in text.splitlines() if line.strip()]
        blocks.append({key.strip(): value.strip() for key, _, value in pairs})
    return blocks


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def _cache_bytes() -> int:
    """Return the size of the largest cache that a core can fill; 32 MiB where unknown."""
    sizes = [_size(_read(entry)) for entry in sorted((SYSTEM_CORE / "cache").glob("index*/size"))]
    return max(sizes, default=0) or 32 * 2**20


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]] if match else 0


@lru_cache(maxsize=1)
def memory_bytes() -> int:
    """Return the machine's memory, or the limit of the container, whichever is less."""
    import psutil

    limits = [int(text) for text in map(_read, MEMORY_LIMITS) if text.isdigit()]
    return min([int(psutil.virtual_memory().total), *limits])
