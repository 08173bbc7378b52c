"""The hosts of a testbed: their names, cores and rate, and the file that describes them while they are up."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from graph.errors import RuntimeFailure, UsageError

# Gone after a restart of the machine, as network namespaces are.
STATE = Path("/run/soapstone-testbed")
NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
MOST_HOSTS = 64
MOST_DEVICES = 64
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
SLOWEST_BITS_PER_S, FASTEST_BITS_PER_S = 10**6, 10**11


@dataclass(frozen=True, slots=True)
class EmulatedHosts:
    """Hosts of one machine, in network namespaces; `cores` are those of each, and `devices` the ranks of each."""

    name: str
    devices: int
    bits_per_s: int
    cores: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.cores)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The network namespace of each host."""
        return tuple(f"{self.name}-{host}" for host in range(self.count))

    def __str__(self) -> str:
        plural = "" if self.devices == 1 else "s"
        return (
            f"{self.count} hosts of {self.devices} device{plural} each at {self.bits_per_s / 1e6:g} Mbit/s, on cores "
            + "; ".join(",".join(map(str, cores)) for cores in self.cores)
        )


def checked_name(name: str) -> str:
    """Return the name of a testbed.

    Raises:
        UsageError: it cannot be that of a network namespace.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name: is {name!a}, must be at most 31 lowercase letters, digits and hyphens, a letter first; choose "
            "another"
        )
    return name


def bits_per_s(text: str) -> int:
    """Return the rate that "1gbit", "200mbit" or "1500kbit" names, in bits per second.

    Raises:
        UsageError: it is no rate, or out of range.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(kbit|mbit|gbit)", text.lower(), re.ASCII)
    rate = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if not SLOWEST_BITS_PER_S <= rate <= FASTEST_BITS_PER_S:
        raise UsageError(
            f"--bandwidth: is {text!a}, must be 1mbit to 100gbit, as in 200mbit or 1gbit; write it like that"
        )
    return rate


def divided_cores(cores: Sequence[int], hosts: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores of each host, side by side and as many for each; hosts share cores where there are too few."""
    each = len(cores) // hosts
    if each == 0:
        return tuple((cores[host % len(cores)],) for host in range(hosts))
    return tuple(tuple(cores[host * each : (host + 1) * each]) for host in range(hosts))


def state_file(name: str) -> Path:
    """Return the path of the file that describes a testbed; it is there from the end of `up` to `down`."""
    return STATE / f"{name}.json"


def write_state(hosts: EmulatedHosts) -> None:
    """Describe a testbed that is complete."""
    STATE.mkdir(mode=0o755, exist_ok=True)
    new = state_file(hosts.name).with_suffix(".new")
    new.write_text(json.dumps(asdict(hosts)))
    new.rename(state_file(hosts.name))


def read_state(name: str) -> EmulatedHosts | None:
    """Return the testbed of that name, None where none is complete.

    Raises:
        RuntimeFailure: its file is damaged.
    """
    try:
        fields = json.loads(state_file(name).read_bytes())
        fields["cores"] = tuple(tuple(cores) for cores in fields["cores"])
        return EmulatedHosts(**fields)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise RuntimeFailure(
            f"{state_file(name)}: is damaged ({type(error).__name__}), must be as it was written; remove the testbed: "
            "scripts/testbed down"
        ) from None
