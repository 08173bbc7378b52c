"""A command on all hosts of a testbed, started by a torchrun on each, as it would be on machines of their own."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from graph.errors import RuntimeFailure, UsageError
from graph.texts import describe_exit
from scripts.testbeds.hosts import EmulatedHosts, state_file
from scripts.testbeds.network import INTERFACE, NAMESPACES, address, end_processes, ending_with_parent

MASTER_PORT = 29500
POLL_S = 0.1
# After the first failure the other hosts end by themselves, and say why; after a signal they end too.
FAILURE_GRACE_S, SIGNAL_GRACE_S = 8.0, 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLONE_NEWNET = 0x40000000  # linux/sched.h


class Interrupted(BaseException):
    """A signal came: no error that anything on the way may take for its own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """The exit code of a command that the signal ended."""
        return 128 + self.number


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Interrupted` where SIGINT, SIGTERM or SIGHUP comes."""

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(hosts: EmulatedHosts, command: Sequence[str], folder: Path) -> int:
    """Run a command on every host, a process a device, and return the exit code of the first that failed, else 0.

    Host 0 prints as ever; what the others print goes to standard error, with the host's number before each line. No
    process is left on a host, however this ends.

    Raises:
        UsageError: the command is not there, or the hosts run another one.
        Interrupted: a signal came.
    """
    environment = _environment()
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        raise UsageError(f"testbed run: {command[0]!a} is not on PATH, must be; name another command")
    launcher = str(Path(sys.executable).parent / "torchrun")
    with _occupied(hosts):
        # Of a run that was killed.
        end_processes(hosts.namespaces)
        agents: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        try:
            for host in range(hosts.count):
                torchrun = [launcher, *_torchrun_options(hosts, host), "--no-python", program, *command[1:]]
                agents.append(_start(hosts, host, torchrun, environment, folder))
                if host:
                    readers.append(_prefixing(agents[-1].stdout, f"host {host}: "))
            return _first_failure(agents)
        except Interrupted as interruption:
            _end(agents, interruption.number)
            raise
        finally:
            end_processes(hosts.namespaces)
            for reader in readers:
                reader.join()
            for agent in agents:
                agent.wait()


@contextmanager
def _occupied(hosts: EmulatedHosts) -> Iterator[None]:
    """Hold the hosts for this run alone; the system gives them back where it is killed.

    Raises:
        UsageError: another run has them, or they are gone.
    """
    try:
        file = state_file(hosts.name).open("rb")
    except FileNotFoundError:
        raise UsageError(
            f"testbed {hosts.name}: is not up, must be; scripts/testbed up --hosts 2 --bandwidth 1gbit"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"testbed {hosts.name}: runs another command, must be free; wait for it, or make one of another --name"
            ) from None
        yield


def _environment() -> dict[str, str]:
    """Return the environment of all hosts: the commands of this Python first, one thread a process, no GPU."""
    folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Else torch warns at every connection that an address has no name.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # A GPU would be that of all hosts.
        "CUDA_VISIBLE_DEVICES": "",
    }


def _torchrun_options(hosts: EmulatedHosts, host: int) -> list[str]:
    return [
        f"--nnodes={hosts.count}",
        f"--nproc-per-node={hosts.devices}",
        f"--node-rank={host}",
        f"--master-addr={address(0)}",
        f"--master-port={MASTER_PORT}",
    ]


def _start(
    hosts: EmulatedHosts, host: int, command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.Popen[str]:
    """Start a command on a host, on the host's cores; a terminal's Ctrl-C passes it by.

    Raises:
        RuntimeFailure: the host is gone.
    """
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if host == 0 else subprocess.PIPE,
            stderr=None if host == 0 else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_placed(NAMESPACES / hosts.namespaces[host], hosts.cores[host]),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeFailure(
            f"testbed {hosts.name}: host {host} cannot be entered ({error}), must be there; make it again: "
            "scripts/testbed down, then up"
        ) from None


def _placed(namespace: Path, cores: Sequence[int]) -> Callable[[], None]:
    """Return what a new process does first: enter its host, and end when this process does, even by SIGKILL.

    Not by `ip netns exec`, which mounts a /sys without limits of memory; costs are kept by these.
    """
    library, begin = ctypes.CDLL(None, use_errno=True), ending_with_parent()

    def enter() -> None:
        os.sched_setaffinity(0, cores)
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        if library.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        begin()

    return enter


def _prefixing(output: IO[str] | None, prefix: str) -> threading.Thread:
    """Copy lines to standard error, in a thread, until they end."""

    def copy() -> None:
        for line in output or ():
            sys.stderr.write(prefix + line.rstrip("\n") + "\n")
            sys.stderr.flush()

    thread = threading.Thread(target=copy, name=prefix, daemon=True)
    thread.start()
    return thread


def _first_failure(agents: Sequence[subprocess.Popen[str]]) -> int:
    """Wait for all hosts, after a failure only for a while; return the exit code of the first failure, else 0."""
    failed: int | None = None
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [agent.poll() for agent in agents]
        if failed is None:
            failed = next((host for host, code in enumerate(codes) if code), None)
            if failed is not None:
                deadline = time.monotonic() + FAILURE_GRACE_S
        if None not in codes:
            break
        time.sleep(POLL_S)
    if failed is None:
        return 0
    code = agents[failed].returncode
    print(f"testbed: host {failed} {describe_exit(code)}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _end(agents: Sequence[subprocess.Popen[str]], number: int) -> None:
    """Pass a signal on, and wait a while; a second one ends the wait."""
    for agent in agents:
        with suppress(ProcessLookupError):
            agent.send_signal(number)
    deadline = time.monotonic() + SIGNAL_GRACE_S
    for agent in agents:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, deadline - time.monotonic()))
