"""The watch over other hosts: a host that goes away is noticed within seconds.

Such a host says nothing any more, and whoever waits for its messages would wait for as long as ranks wait for each
other. So every rank has a connection with rank 0 over which nothing is sent but the keepalive probes of both kernels.
A kernel answers them for a process that computes, hangs or is stopped as well; a host that is gone, or whose network
is, does not. A connection that is closed belonged to a process that ended, which others notice without this watch.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, cast

from graph.errors import RuntimeFailure

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# A host that has not answered for so long is taken for gone. Only kernels take part, so that load does not matter.
SILENCE_S = 10
FIRST_PROBE_S, PROBE_INTERVAL_S = 2, 1
# By these names a socket's options differ between systems; one that is missing leaves the system's own.
_KEEPALIVE = {
    "TCP_KEEPIDLE": FIRST_PROBE_S,
    "TCP_KEEPINTVL": PROBE_INTERVAL_S,
    "TCP_KEEPCNT": (SILENCE_S - FIRST_PROBE_S) // PROBE_INTERVAL_S,
    # Of a connection whose greeting was not acknowledged, in milliseconds.
    "TCP_USER_TIMEOUT": SILENCE_S * 1000,
}
_KEY = "watch"
_TOKEN_LETTERS, _RANK_DIGITS = 32, 8

# Gets the rank whose host does not answer, and the reason in words; from the thread of the watch, once.
ReportSilence = Callable[[int, str], None]


class HostWatch:
    """The connections of one rank: of rank 0 with all others, of each other one with rank 0."""

    def __init__(self, report: ReportSilence) -> None:
        """Use `watch_hosts`."""
        self.leader_ended = False
        self._report = report
        self._token = ""
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def listen(self, connections: int) -> tuple[int, str]:
        """Let others connect from now on; return the port, and the token that they must send."""
        self._token = secrets.token_hex(_TOKEN_LETTERS // 2)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=connections, dualstack_ipv6=dual)
        listener.settimeout(0)
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._thread.start()
        port: int = listener.getsockname()[1]
        return port, self._token

    def connect(self, rank: int, address: str, port: int, token: str) -> None:
        """Connect this rank with rank 0, which listens there.

        Raises:
            OSError: it does not answer.
        """
        connection = socket.create_connection((address, port), timeout=SILENCE_S)
        connection.sendall(f"{token}{rank:0{_RANK_DIGITS}}".encode())
        self._selector.register(connection, selectors.EVENT_READ, self._reading(connection, 0))
        self._thread.start()

    def stop(self) -> None:
        """Report nothing from now on; the connections stay, since the other ranks still look at them."""
        self._over.set()

    def close(self) -> None:
        """Report nothing from now on, and close all connections."""
        self.stop()
        self._waker.close()
        if self._thread.is_alive():
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._drop(cast(socket.socket, key.fileobj))
        self._selector.close()

    # ---- the thread

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                key.data()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # whoever knocked has gone already
            connection, _ = listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, self._reading(connection, None))

    def _reading(self, connection: socket.socket, rank: int | None) -> Callable[[], None]:
        """Prepare a connection with `rank`, or with one that has not said who it is; return what reads from it."""
        connection.settimeout(0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # A connection that has failed does not know them any more.
        names = [end()[0].removeprefix("::ffff:") for end in (connection.getpeername, connection.getsockname)]
        return partial(self._read, connection, rank, *names)

    def _read(self, connection: socket.socket, rank: int | None, other: str, own: str) -> None:
        try:
            received = connection.recv(_TOKEN_LETTERS + _RANK_DIGITS)
        except ConnectionResetError:
            received = b""
        except OSError as error:
            self._drop(connection)
            if rank is not None and not self._over.is_set():
                self._report(rank, _reason(other, own, error))
            return
        if received and rank is None and (rank := self._greeted(received)) is not None:
            reading = partial(self._read, connection, rank, other, own)
            self._selector.modify(connection, selectors.EVENT_READ, reading)
        else:
            self.leader_ended = self.leader_ended or rank == 0
            self._drop(connection)

    def _greeted(self, greeting: bytes) -> int | None:
        """Return the rank that a greeting names; None where it is that of a stranger."""
        token, number = greeting[:_TOKEN_LETTERS], greeting[_TOKEN_LETTERS:]
        return int(number) if token == self._token.encode() and number.isdigit() else None

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def watch_hosts(
    store: Store, rank: int, size: int, timeout_s: float, master: tuple[str, int], report: ReportSilence
) -> HostWatch:
    """Begin the watch of this rank and return it; all ranks must call it.

    Args:
        store: which all ranks share; here they learn where rank 0 listens.
        timeout_s: how long the others wait for rank 0.
        master: address and port of the store.
        report: see `ReportSilence`; it may keep the thread that calls it.

    Raises:
        RuntimeFailure: rank 0 cannot be reached.
        RuntimeError: it is not there in time.
    """
    watch = HostWatch(report)
    if rank == 0:
        port, token = watch.listen(size)
        store.set(_KEY, json.dumps([_address_towards(*master), port, token]))
        return watch
    store.wait([_KEY], timedelta(seconds=timeout_s))
    address, port, token = json.loads(store.get(_KEY))
    address = address or master[0]
    try:
        watch.connect(rank, address, port, token)
    except OSError as error:
        watch.close()
        raise RuntimeFailure(
            f"rank {rank}: cannot connect to rank 0 at {address}:{port} ({error}), must; let the hosts connect to each "
            "other on all ports"
        ) from None
    return watch


def _address_towards(address: str, port: int) -> str:
    """Return this host's own address in the network of another one; "" where that is this host's, by any name."""
    with socket.create_connection((address, port), timeout=SILENCE_S) as connection:
        own: str = connection.getsockname()[0]
        same = own == connection.getpeername()[0] or ipaddress.ip_address(own.partition("%")[0]).is_loopback
    return "" if same else own


def _reason(other: str, own: str, error: OSError) -> str:
    symptom = (error.strerror or str(error)).lower()
    return (
        f"its host {other} has not answered {own} for {SILENCE_S} s ({symptom}), must answer; see whether both are up "
        "and connected, and start again"
    )
