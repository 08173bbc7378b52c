"""Processes that stay alive and run many jobs one after another: for repeated runs and for tests."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from graph.errors import RuntimeFailure
from graph.texts import describe_exit
from profiler.pinning import begin_child, usable_cores
from profiler.processes import starting_processes
from runtime.jobs.job import Job, JobResult
from runtime.launch.processes import (
    PEER_GRACE_S,
    error_line,
    join_group,
    leave_group,
    occupy,
)

START_LIMIT_S = 120.0


class LocalPool:
    """Persistent CPU processes of this machine, joined by gloo. A context manager.

    A process that dies, raises or is silent for too long breaks the pool: all its processes end.
    """

    def __init__(self, processes: int, *, timeout_s: float = 300.0) -> None:
        """Start `processes` processes, pinned to the usable cores in turn.

        Raises:
            RuntimeFailure: they cannot be started.
        """
        self.size = processes
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="soapstone-pool-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._broken = False
        cores = usable_cores()
        store = str(Path(self._folder.name) / "store")
        with starting_processes() as context:
            for rank in range(processes):
                near, far = context.Pipe()
                arguments = (far, store, rank, processes, cores[rank % len(cores)], timeout_s)
                process = context.Process(target=_serve, args=arguments, name=f"rank-{rank}", daemon=True)
                process.start()
                far.close()
                self._connections.append(near)
                self._processes.append(process)
        self._answers(range(processes), START_LIMIT_S)

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The processes' numbers, by rank."""
        return tuple(process.pid for process in self._processes)

    def run(self, job: Job) -> JobResult:
        """Execute a job on the first ranks and return its result.

        Raises:
            RuntimeFailure: a rank failed; one line with the rank and the reason. The pool is broken then.
        """
        if self._broken:
            raise RuntimeFailure(
                "pool: one of its processes failed before, must be a working one; start another"
            )
        size = job.strategy.device_count
        if size > self.size:
            raise RuntimeFailure(
                f"pool: has {self.size} processes, must have {size}, one for each device of the strategy; start more"
            )
        portable = job.without_caches()
        for rank in range(self.size):
            # Where a process has ended, that is reported below.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._connections[rank].send(portable)
        result: JobResult = self._answers(range(self.size), self._timeout_s)[0]
        return result

    def _answers(self, ranks: Sequence[int], limit_s: float) -> list[Any]:
        """Return one answer of each rank; break the pool with the first cause of a failure."""
        deadline = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        lost: str | None = None
        while len(answers) < len(ranks):
            waiting = [rank for rank in ranks if rank not in answers]
            sources: dict[Any, int] = {self._connections[rank]: rank for rank in waiting}
            sources.update({self._processes[rank].sentinel: rank for rank in waiting})
            ready = wait(list(sources), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, waiting))
                self._fail(
                    lost
                    or f"rank {silent}: did not answer in {limit_s:g} s, must finish; see what it waits for"
                )
            for source in ready:
                rank = sources[source]
                kind, answer = self._receive(rank)
                if kind == "done":
                    answers[rank] = answer
                elif kind == "lost":
                    # A lost peer is a symptom. Wait a little for the rank that caused it.
                    lost = lost or answer
                    answers[rank] = None
                    deadline = min(deadline, time.monotonic() + PEER_GRACE_S)
                else:
                    self._fail(f"rank {rank}: {answer}")
        if lost is not None:
            self._fail(lost)
        return [answers[rank] for rank in ranks]

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            if self._connections[rank].poll():
                kind, answer = self._connections[rank].recv()
                return kind, answer
        except (EOFError, ConnectionResetError):
            pass
        process = self._processes[rank]
        process.join(PEER_GRACE_S)
        return "dead", f"its process {describe_exit(process.exitcode or 0)}, must run to the end"

    def _fail(self, message: str) -> None:
        self._broken = True
        self.close()
        raise RuntimeFailure(message)

    def close(self) -> None:
        """End all processes."""
        for connection in self._connections:
            connection.close()
        limit = 0.0 if self._broken else 10.0
        for process in self._processes:
            process.join(limit)
            if process.is_alive():
                process.kill()
                process.join()
        self._broken = True
        self._folder.cleanup()


def _serve(connection: Connection, store: str, rank: int, size: int, core: int, timeout_s: float) -> None:
    """What each process of a pool does: join the others, then run jobs until the pool is closed."""
    begin_child()
    device = occupy(core, "cpu")
    import torch.distributed as dist

    join_group("cpu", timeout_s, store=dist.FileStore(store, size), rank=rank, size=size)  # type: ignore[attr-defined]
    connection.send(("done", None))
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionResetError):
            break
        except Exception as error:  # a job that cannot be read here: the pool's owner must hear why
            connection.send(("failed", error_line(f"{type(error).__name__}: {error}", rank)))
            continue
        # Held nowhere: what a job brings back, a network's weights perhaps, would take memory beside the next one's.
        connection.send(_executed(job, device, timeout_s, rank))
    leave_group()


def _executed(job: Job, device: str, timeout_s: float, rank: int) -> tuple[str, Any]:
    """Run a job; return how it ended, and its result or why it has none."""
    from runtime.communication import PeerFailure
    from runtime.jobs.job import run_job

    try:
        return "done", run_job(job, device, timeout_s)
    except PeerFailure as error:
        return "lost", str(error)
    except Exception as error:  # whatever it is, the pool's owner must hear of it
        return "failed", error_line(f"{type(error).__name__}: {error}", rank)
