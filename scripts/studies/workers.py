"""Cells in parallel: worker processes that search one cell after the other, and end well when interrupted.

A worker is in a process group of its own, so that ctrl-C reaches it once, from here: its search is then stored as
interrupted, and the cell begins again the next time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from scripts.studies.cells import StudyCell

# How a cell ended.
DONE, INTERRUPTED, FAILED = "done", "interrupted", "failed"
# Seconds that an interrupted worker has to store what it found.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ending:
    """A cell that ended; `text` says why it failed."""

    cell: StudyCell
    how: str
    text: str
    seconds: float


@dataclass
class _SearchWorker:
    process: BaseProcess
    connection: Connection
    cell: StudyCell | None = None
    began: float = 0.0

    def give(self, cell: StudyCell) -> None:
        self.cell, self.began = cell, time.monotonic()
        self.connection.send(cell)


def search_all(
    cells: Sequence[StudyCell],
    folder: Path,
    database: str,
    *,
    workers: int,
    stop_after_s: float | None = None,
) -> Iterator[Ending]:
    """Search cells in worker processes; yield each as it ends. No cell begins after `stop_after_s` seconds.

    An interrupt stops the workers in order, and is raised then.
    """
    began = time.monotonic()
    waiting = list(reversed(cells))
    pool: list[_SearchWorker] = []

    def next_cell() -> StudyCell | None:
        late = stop_after_s is not None and time.monotonic() - began >= stop_after_s
        return None if late or not waiting else waiting.pop()

    try:
        for _ in range(min(workers, len(cells))):
            pool.append(_start(folder, database))
        for worker in pool:
            if (cell := next_cell()) is not None:
                worker.give(cell)
        while any(worker.cell is not None for worker in pool):
            ready = wait([worker.connection for worker in pool if worker.cell is not None])
            for worker in [other for other in pool if other.connection in ready]:
                ending = _ending(worker)
                if ending.how == FAILED and not worker.process.is_alive():
                    pool.remove(worker)
                    pool.append(worker := _start(folder, database))
                worker.cell = None
                if (cell := next_cell()) is not None:
                    worker.give(cell)
                yield ending
    finally:
        _stop(pool)


def _start(folder: Path, database: str) -> _SearchWorker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, folder, database))
    # A worker that an interrupt finds before it is in a group of its own would print a traceback.
    with _ignoring_interrupts():
        process.start()
    there.close()
    return _SearchWorker(process, here)


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ending(worker: _SearchWorker) -> Ending:
    cell = worker.cell
    if cell is None:
        raise RuntimeError("scripts/study: a worker without a cell ended")
    try:
        how, text = worker.connection.recv()
    except EOFError:
        worker.process.join()
        how, text = FAILED, f"its process ended with code {worker.process.exitcode}"
    return Ending(cell, how, text, time.monotonic() - worker.began)


def _stop(pool: Sequence[_SearchWorker]) -> None:
    """Let workers end: those that wait by themselves, those that search by an interrupt."""
    for worker in pool:
        if worker.cell is not None and worker.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGINT)
        worker.connection.close()
    deadline = time.monotonic() + PATIENCE_S
    for worker in pool:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()


def _work(connection: Connection, folder: Path, database: str) -> None:
    """Search the cells that come, until no more do."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        while True:
            cell = connection.recv()
            connection.send(_searched(cell, folder, database))
    connection.close()
    sys.stderr.flush()


def _searched(cell: StudyCell, folder: Path, database: str) -> tuple[str, str]:
    import traceback

    from app.services.progress import Silent
    from graph.errors import SoapstoneError
    from scripts.studies.results import Folder
    from scripts.studies.running import run_cell

    try:
        document = run_cell(cell, database, Silent())
        if document is None:
            return INTERRUPTED, ""
        Folder(folder).write(cell, document)
    except SoapstoneError as error:
        return FAILED, str(error)
    except Exception as error:
        # One cell's defect must not lose the others; it is told, and the study ends with code 1.
        traceback.print_exc()
        return FAILED, f"{type(error).__name__}: {error}"
    return DONE, ""
