"""The watch over other hosts, and store calls that end where the store's host has gone, over a real TCPStore."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graph.errors import RuntimeFailure
from runtime.launch.bounded_store import PATIENCE_S, BoundedStore
from runtime.launch.host_watch import SILENCE_S, HostWatch, watch_hosts

WAIT_S = 60.0
ROOT = Path(__file__).parents[2]
SERVER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
time.sleep(600)
"""
# Rank 1, whose connection is there once a line is printed.
PEER = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from runtime.launch.host_watch import watch_hosts
port = int(sys.argv[1])
store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
watch = watch_hosts(store, 1, 2, 60.0, ("127.0.0.1", port), lambda rank, reason: print(rank, reason))
print("connected", flush=True)
time.sleep(600)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a child process; return when all of its threads stand."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


@pytest.fixture
def store() -> TCPStore:
    """A store of this process."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=WAIT_S))


class Watches:
    """Watches over hosts at a store, and what they report."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store
        self.reports: list[tuple[int, str]] = []
        self.all: list[HostWatch] = []

    def begin(self, rank: int) -> HostWatch:
        """Begin that of a rank; rank 0 first."""
        master = ("127.0.0.1", self.store.port)
        watch = watch_hosts(self.store, rank, 2, WAIT_S, master, lambda *report: self.reports.append(report))
        self.all.append(watch)
        return watch


@pytest.fixture
def watches(store: TCPStore) -> Iterator[Watches]:
    """Watches that are closed in the end."""
    made = Watches(store)
    yield made
    for watch in made.all:
        watch.close()


@pytest.fixture
def started() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start a program of Python's and return it with its first line; all are killed in the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_the_end_of_rank_0_is_known_and_not_reported(watches: Watches) -> None:
    first, second = watches.begin(0), watches.begin(1)
    assert not second.leader_ended
    first.close()
    watches.all.remove(first)
    wait_for(lambda: second.leader_ended)
    assert watches.reports == []


def test_a_process_that_is_stopped_for_longer_than_the_silence_or_killed_is_not_reported(
    watches: Watches, started: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    watches.begin(0)
    process, line = started(PEER, str(watches.store.port))
    assert line == "connected"
    stop(process)
    time.sleep(SILENCE_S + 3.0)
    assert watches.reports == []
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(WAIT_S)
    time.sleep(1.0)
    assert watches.reports == []


def test_a_stranger_is_sent_away(watches: Watches) -> None:
    watches.begin(0)
    port = int(watches.store.get("watch").decode().split(",")[1])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
    # It still takes those that belong here.
    second = watches.begin(1)
    assert not second.leader_ended


def test_rank_0_out_of_reach_is_one_line(store: TCPStore) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        store.set("watch", f'["", {port}, "token"]')
        with pytest.raises(
            RuntimeFailure, match=rf"^rank 1: cannot connect to rank 0 at 127.0.0.1:{port} \(.*\n*$"
        ):
            watch_hosts(store, 1, 2, WAIT_S, ("127.0.0.1", store.port), lambda *_: None)


# ---- store calls


def test_a_bounded_store_answers_as_the_store_does(store: TCPStore) -> None:
    bounded = BoundedStore(store, lambda: False)
    assert not bounded.check(["key"])
    bounded.set("key", "value")
    assert (bounded.check(["key"]), bounded.get("key")) == (True, b"value")
    assert (bounded.compare_set("first", "", "a"), bounded.compare_set("first", "", "b")) == (b"a", b"a")
    # The store's own error, after its own time limit.
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"absent|[Tt]imeout"):
        bounded.get("absent")
    bounded.close()


def test_a_call_to_a_silent_store_ends_where_nobody_answers_and_waits_where_its_host_does(
    started: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    process, port = started(SERVER)
    store = TCPStore("127.0.0.1", int(port), is_master=False, timeout=timedelta(seconds=WAIT_S))
    nobody = threading.Event()
    bounded = BoundedStore(store, nobody.is_set)
    bounded.set("key", "value")
    stop(process)
    nobody.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^the store does not answer$"):
            bounded.get("key")
    nobody.clear()
    process.send_signal(signal.SIGCONT)
    assert bounded.get("key") == b"value"
    stop(process)
    timer = threading.Timer(PATIENCE_S + 2.0, process.send_signal, (signal.SIGCONT,))
    timer.start()
    assert bounded.get("key") == b"value"
    timer.join()
    bounded.close()
