"""Rank 0 as the leader of the ranks that torchrun started, on one host or several; a failure of one ends all of them.

Besides the process group, which is for tensors, the ranks share the launcher's store. There the first rank that fails
writes its reason, so that rank 0 can print and store it, and all others end at once. A rank's work runs in a thread of
its own, so that neither a signal nor another rank's failure has to wait for a message that never arrives. A host that
goes away takes its store and its messages with it: `runtime.launch.host_watch` notices, and each rank ends by itself.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from graph.errors import RankFailure, RuntimeFailure
from profiler.process_groups import communicate_from
from runtime.communication import PeerFailure, is_of_messages, lost_peer
from runtime.launch.bounded_store import BoundedStore
from runtime.launch.host_watch import HostWatch, watch_hosts
from runtime.launch.processes import PEER_GRACE_S, error_line, join_group, leave_group
from runtime.observe.measured_peak import begin_profiling
from runtime.ranks.ranks import from_rank_0, rank_variable
from runtime.ranks.watchdog import under_watchdog

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")

# Interval between checks for a failure of another rank.
POLL_S = 0.2
# A signal may be torchrun's, which ends all ranks where one has failed: the time for that one to report its reason.
SIGNAL_GRACE_S = 2.0
# Rank 0 prepares for as long as it takes; the others wait for it.
LONGEST_PREPARATION_S = 30 * 24 * 3600.0
# Where a host is gone, the time for the main thread to see it while it checks its work, to see it after an interrupt,
# and then to store and print the reason.
SEEING_S, INTERRUPT_S, ENDING_S = 1.0, 5.0, 15.0
FAILED, LOST, ENDED, DONE, GONE = "failed", "lost", "ended", "done", "gone"


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a rank that ended: of a failure or a host that is gone the reason, of a lost peer the symptom."""

    rank: int
    kind: str
    text: str
    code: int


class LaunchedRanks:
    """All ranks of this run, as one of them sees them."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: str,
        timeout_s: float,
        master: tuple[str, int] | None = None,
    ) -> None:
        """Use `LaunchedRanks.join`; `master` is where the store is, of ranks on several hosts."""
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._gone: Report | None = None
        self._seen = threading.Event()
        self._joined = False
        self._hosts: HostWatch | None = None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"soapstone/{attempt}"
        clone: Callable[[], Store] = store.clone  # type: ignore[attr-defined]
        # A connection of its own: other clones may block for long.
        self._board = BoundedStore(PrefixStore(f"{prefix}/board", clone()), self._nobody_answers)
        self._orders = PrefixStore(f"{prefix}/orders", clone())
        self._given = 0
        self._reported = False
        self._silent: str | None = None
        self._device = device
        if master is not None:
            hosts = PrefixStore(f"{prefix}/hosts", clone())
            self._hosts = watch_hosts(hosts, rank, size, timeout_s, master, self._end_without)
        join_group(device, timeout_s, store=PrefixStore(f"{prefix}/group", store), rank=rank, size=size)
        self._joined = True

    @classmethod
    def join(cls, device: str, timeout_s: float) -> LaunchedRanks:
        """Rendezvous with the other ranks as torchrun's environment variables describe, with this rank's device.

        Raises:
            RuntimeFailure: they are not there in time.
        """
        from torch.distributed.rendezvous import rendezvous

        try:
            store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
            alone = rank_variable("LOCAL_WORLD_SIZE", 1) >= size
            master = None if alone else (os.environ["MASTER_ADDR"], rank_variable("MASTER_PORT", 0))
            return cls(store, rank, size, device, timeout_s, master)
        except (RuntimeError, ValueError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeFailure(
                f"rank {rank_variable('RANK', 0)}: cannot meet the others ({reason}), must; start all "
                f"{rank_variable('WORLD_SIZE', 1)} processes with torchrun"
            ) from error

    @property
    def leads(self) -> bool:
        """True on rank 0, which alone decides, prints and stores."""
        return self.rank == 0

    def leave(self) -> None:
        """Leave the process group; all ranks call it at the end of a run that did not fail."""
        self._post(DONE, "")
        if self._hosts is not None:
            self._hosts.close()
        self._board.close()
        leave_group()

    # ---- orders

    def give(self, order: object) -> None:
        """Give all other ranks an order; rank 0 alone. They must be waiting, or come to wait, in `take`."""
        self._orders.set(str(self._given), "given")
        self._given += 1
        from_rank_0(order)

    def dismiss(self, order: object) -> None:
        """Give all other ranks their last order; rank 0 alone. It needs their hosts no more."""
        self.give(order)
        if self._hosts is not None:
            self._hosts.stop()

    def take(self) -> Any:
        """Wait for the next order of rank 0, however long it prepares; return it."""
        try:
            self._orders.wait([str(self._given)], timedelta(seconds=LONGEST_PREPARATION_S))
        except RuntimeError as error:
            raise PeerFailure(
                f"rank {self.rank}: lost contact with rank 0, it must lead; see its own message"
            ) from error
        self._given += 1
        return from_rank_0(None)

    # ---- work

    def execute(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which runs in another thread while this one checks it and the other ranks.

        Raises:
            RankFailure: this rank or another one failed; the message names the rank and the reason.
            KeyboardInterrupt, SystemExit: a signal came; `cause_of_signal` returns a rank's failure that caused it.
        """
        if self._device == "cpu":  # GPUs' peaks are their allocator's
            begin_profiling()
        outcome: dict[str, Any] = {}

        def run() -> None:
            try:
                communicate_from(self._device)
                with under_watchdog(self._timeout_s, self._note_silence):
                    outcome["result"] = work()
            except BaseException as error:  # whatever it is, the main thread must hear of it
                outcome["error"] = error

        thread = threading.Thread(target=run, name="work", daemon=True)
        thread.start()
        while True:
            thread.join(POLL_S)
            if not thread.is_alive():
                break
            if self._gone is not None:
                raise self._failure(self._gone)
            if self._silent is not None:
                self._fail(self._silent)
            report = self._first()
            if report is not None:
                raise self._failure(report)
        if "error" in outcome:
            self._explain(outcome["error"])
        result: Result = outcome["result"]
        return result

    def cause_of_signal(self) -> RankFailure | None:
        """Return the failure of a rank because of which torchrun sent the signal, else None.

        Wherever the signal interrupted this rank, `execute` included, its caller asks here before it prints or stores
        anything.
        """
        # torchrun sends several; the first one is being handled, after which this process ends.
        _ignore_signals()
        self._seen.set()
        if self._gone is None:
            self._post(ENDED, "interrupted")
        report = self._cause(SIGNAL_GRACE_S)
        return None if report is None else self._failure(report)

    def refuse(self, error: BaseException, code: int) -> None:
        """Let the others end too, silently, since rank 0 refuses to go on."""
        self._seen.set()
        self._post(FAILED, str(error), code)

    def _note_silence(self, reason: str) -> None:
        self._silent = reason

    def _fail(self, reason: str, code: int = 1) -> None:
        """End because of this rank's own failure."""
        self._post(FAILED, reason, code)
        # Another one may have been first.
        report = self._first() or Report(self.rank, FAILED, reason, code)
        raise self._failure(report)

    def _explain(self, error: BaseException) -> None:
        """End with the cause of an error of this rank's work."""
        if isinstance(error, RuntimeError) and is_of_messages(error):
            # Of a probe, which does not name peers.
            error = lost_peer(self.rank, error)
        if not isinstance(error, PeerFailure):
            self._fail(error_line(f"{type(error).__name__}: {error}", self.rank))
        self._post(LOST, str(error))
        report = self._cause(PEER_GRACE_S)
        if report is not None:
            raise self._failure(report) from error
        _ignore_signals()
        raise RankFailure(str(error)) from error

    def _failure(self, report: Report) -> RankFailure:
        """Return the end of this rank because of a report; no signal of torchrun's, which follow, may interrupt it."""
        _ignore_signals()
        self._seen.set()
        if report is self._gone and self.leads:
            self._post(FAILED, report.text)
        return RankFailure(
            _words(report), report.code, said_here=report is self._gone and self._speaks_for_host
        )

    # ---- a host that is gone

    @property
    def _speaks_for_host(self) -> bool:
        """True on the rank that says what rank 0 cannot be told, or say, since its host is out of reach."""
        return self.leads or rank_variable("LOCAL_RANK", 0) == 0

    def _nobody_answers(self) -> bool:
        return self._gone is not None or (self._hosts is not None and self._hosts.leader_ended)

    def _end_without(self, rank: int, reason: str) -> NoReturn:
        """End this process in every case, since the host of `rank` is gone; the watch's thread stays here."""
        self._gone = Report(rank, GONE, reason, 1)
        if self._joined and (self._seen.wait(SEEING_S) or (_interrupt() and self._seen.wait(INTERRUPT_S))):
            time.sleep(ENDING_S)
        # The main thread is in a call that does not return, that of another host's database perhaps.
        if self._speaks_for_host:
            # Not through Python's buffer: the main thread may be within it.
            os.write(2, f"error: {_words(self._gone)}\n".encode())
        os._exit(1)

    # ---- the board

    def _post(self, kind: str, text: str, code: int = 1) -> None:
        """Write this rank's report to the store, once."""
        if self._reported:
            return
        self._reported = True
        message = json.dumps({"kind": kind, "text": text, "code": code})
        try:
            self._board.set(str(self.rank), message)
            if kind == FAILED:
                # The first one stays: others fail because of it.
                self._board.compare_set("first", "", json.dumps([self.rank, message]))
        except RuntimeError:
            # The store's own host is gone, and with it every reader of this.
            return

    def _first(self) -> Report | None:
        """Return the first failure that any rank reported."""
        if self._gone is not None:
            return self._gone
        try:
            if not self._board.check(["first"]):
                return None
            rank, message = json.loads(self._board.get("first"))
        except RuntimeError:
            return self._gone or Report(0, FAILED, "its store is gone, must be there; see its own message", 1)
        return _report(rank, message)

    def _reports(self) -> dict[int, Report]:
        reports = {}
        for rank in range(self.size):
            if self._board.check([str(rank)]):
                reports[rank] = _report(rank, self._board.get(str(rank)).decode())
        return reports

    def _cause(self, within_s: float) -> Report | None:
        """Wait a little for the report of the rank that failed first; a rank without a report has been killed."""
        deadline = time.monotonic() + within_s
        reports: dict[int, Report] = {}
        while time.monotonic() < deadline:
            first = self._first()
            if first is not None:
                return first
            try:
                reports = self._reports()
            except RuntimeError:
                return self._gone
            if len(reports) == self.size:
                break
            time.sleep(POLL_S)
        if self._gone is not None:
            return self._gone
        silent = [rank for rank in range(self.size) if rank not in reports]
        if not silent:
            return None
        # Where the machine is slow, a rank that lives may be silent too.
        others = "".join(f", or that of rank {rank}," for rank in silent[1:])
        return Report(
            silent[0],
            FAILED,
            f"its process{others} ended without a word, must run to the end (perhaps killed, stopped or out of memory)",
            1,
        )


def _report(rank: int, message: str) -> Report:
    fields = json.loads(message)
    return Report(rank, fields["kind"], fields["text"], fields["code"])


def _words(report: Report) -> str:
    if report.code == 2:
        # A refusal of rank 0 is about the command, not about a rank.
        return report.text
    reach = " in reach" if report.kind == GONE else ""
    return f"rank {report.rank}: {report.text}; all processes{reach} were ended"


def _interrupt() -> bool:
    """Interrupt the main thread where it may be outside of `execute`; return whether it can be.

    By Ctrl-C's signal first: a user's factory may be called just then, whose SystemExit is taken for its own.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(signal.getsignal(number)):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            return True
    return False


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
