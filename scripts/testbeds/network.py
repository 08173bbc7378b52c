"""The network of a testbed, made and taken away with iproute2.

Each host is a network namespace with an interface, which a veth pair joins to a bridge in a namespace of its own. Both
ends of a pair send at the testbed's rate (tc-tbf), so each host has a full-duplex link to a switch. All addresses are
in these namespaces: nothing of the machine's own network changes, and from a host nothing but the others is reached.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from graph.errors import RuntimeFailure, UsageError
from scripts.testbeds.hosts import STATE, EmulatedHosts, state_file, write_state

# Where iproute2 keeps the names of network namespaces.
NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
# What TCP hands down at once, and tbf lets pass at once: little, as on a wire, and enough for timers to keep up.
PACKET_S, LEAST_PACKET_BYTES, LARGEST_PACKET_BYTES = 1e-4, 3000, 65000
BURST_S = 3e-4
# What may wait in a port of the switch; more is dropped, and TCP slows down.
QUEUE_S, LEAST_QUEUE_BYTES = 20e-3, 256 * 2**10
# Processes are asked to end, and after so long ended.
GRACE_S, KILL_S = 3.0, 10.0
POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def check_requirements() -> None:
    """Check that this machine lets network namespaces be made.

    Raises:
        UsageError: a program is missing, or the user is not root.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UsageError(f"testbed: {program} is not on PATH, must be; install iproute2 (Linux)")
    if os.geteuid() != 0:
        raise UsageError(
            f"testbed: the user has id {os.geteuid()}, must be root to make network namespaces; start it with sudo"
        )


def address(host: int) -> str:
    """Return the address of a host, within the testbed."""
    return f"10.77.0.{host + 1}"


def namespaces_of(name: str) -> tuple[str, ...]:
    """Return the network namespaces that a testbed of that name has, complete or not."""
    if not NAMESPACES.is_dir():
        return ()
    own = re.compile(re.escape(name) + r"-(switch|\d+)")
    return tuple(sorted(entry.name for entry in NAMESPACES.iterdir() if own.fullmatch(entry.name)))


def make(hosts: EmulatedHosts) -> None:
    """Make the hosts and join them.

    Raises:
        UsageError: a testbed of that name is there already.
        RuntimeFailure: the system refuses; what was made is taken away.
    """
    if namespaces_of(hosts.name):
        raise UsageError(
            f"testbed {hosts.name}: is up already, must be down; scripts/testbed down, or choose another --name"
        )
    switch = f"{hosts.name}-switch"
    # Of two that make it at once, one fails here and must leave the other's alone.
    _execute(f"ip netns add {switch}")
    try:
        _execute(f"ip -n {switch} link add bridge type bridge")
        _execute(f"ip -n {switch} link set bridge up")
        for host, namespace in enumerate(hosts.namespaces):
            _execute(f"ip netns add {namespace}")
            _join(host, namespace, switch, hosts.bits_per_s)
        write_state(hosts)
    except BaseException:
        remove(hosts.name)
        raise


def _join(host: int, namespace: str, switch: str, bits_per_s: int) -> None:
    """Give a host its interfaces, and one end of a veth pair to the switch."""
    port, packet = f"port{host}", packet_bytes(bits_per_s)
    _execute(f"ip link add {INTERFACE} netns {namespace} type veth peer name {port} netns {switch}")
    _execute(f"ip -n {switch} link set {port} master bridge")
    burst = burst_bytes(bits_per_s)
    queue = max(LEAST_QUEUE_BYTES, int(bits_per_s / 8 * QUEUE_S))
    for where, interface in ((namespace, INTERFACE), (switch, port)):
        # Without IPv6: nobody waits until an address of it may be used, or chooses it.
        _execute(f"ip -n {where} link set dev {interface} addrgenmode none")
        _execute(f"ip -n {where} link set dev {interface} gso_max_size {packet}")
        rate = f"rate {bits_per_s}bit burst {burst}b limit {queue}b"
        _execute(f"tc -n {where} qdisc add dev {interface} root tbf {rate}")
        _execute(f"ip -n {where} link set {interface} up")
    _execute(f"ip -n {namespace} address add {address(host)}/24 dev {INTERFACE}")
    _execute(f"ip -n {namespace} link set lo up")


def packet_bytes(bits_per_s: int) -> int:
    """Return the most that TCP hands down at once over a link of a rate."""
    return min(max(int(bits_per_s / 8 * PACKET_S), LEAST_PACKET_BYTES), LARGEST_PACKET_BYTES)


def burst_bytes(bits_per_s: int) -> int:
    """Return the most that passes at once over a link of a rate, after a pause."""
    return max(2 * packet_bytes(bits_per_s), int(bits_per_s / 8 * BURST_S))


def remove(name: str) -> bool:
    """Take a testbed away, its processes first; return whether there was anything of it.

    Raises:
        RuntimeFailure: a process does not end, or the system refuses.
    """
    present = namespaces_of(name)
    described = state_file(name).exists()
    state_file(name).unlink(missing_ok=True)
    end_processes(present)
    for namespace in present:
        _execute(f"ip netns delete {namespace}")
    with suppress(OSError):  # other testbeds are up
        STATE.rmdir()
    return described or bool(present)


def processes_in(namespaces: Sequence[str]) -> tuple[int, ...]:
    """Return the ids of the processes in network namespaces; of those that are gone there are none."""
    ids: list[int] = []
    for namespace in namespaces:
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        ids += map(int, listed.stdout.split())
    return tuple(ids)


def end_processes(namespaces: Sequence[str], grace_s: float = GRACE_S) -> None:
    """Ask all processes in network namespaces to end, then end them, until there are none.

    Raises:
        RuntimeFailure: some do not end.
    """
    began = time.monotonic()
    _send(signal.SIGTERM, processes_in(namespaces))
    while remaining := processes_in(namespaces):
        waited_s = time.monotonic() - began
        if waited_s > grace_s + KILL_S:
            raise RuntimeFailure(
                f"testbed: processes {', '.join(map(str, remaining))} do not end, must; look at them with ps"
            )
        if waited_s > grace_s:
            _send(signal.SIGKILL, remaining)
        time.sleep(POLL_S)


def _send(number: signal.Signals, ids: Sequence[int]) -> None:
    for process in ids:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def ending_with_parent() -> Callable[[], None]:
    """Return a function that a new process calls first, so that it ends when this process does, even by SIGKILL."""
    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def begin() -> None:
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)

    return begin


def _execute(command: str) -> None:
    """Run a command whose words have no spaces.

    Raises:
        RuntimeFailure: it failed.
    """
    done = subprocess.run(
        command.split(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        # An interrupt while it starts would leave it behind.
        preexec_fn=ending_with_parent(),
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise RuntimeFailure(
            f"testbed: {command} failed ({reason}), must not; is this a container that may not do that?"
        )
