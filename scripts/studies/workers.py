"""Cells in parallel, in processes that search one cell after the other, and end well when interrupted.

A worker is in a process group of its own, so that ctrl-C reaches it once, from here: its search is then stored as
interrupted, and the cell begins again the next time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from scripts.fuzzing.running import end_with_parent
from scripts.studies.cells import StudyCell

# How a cell ended.
DONE, INTERRUPTED, FAILED, LEFT_OUT = "done", "interrupted", "failed", "left out"
# Seconds that an interrupted worker has to store what it found.
PATIENCE_S = 60.0
# Of a worker: no cell begins once this is set.
_stopped: Event


@dataclass(frozen=True, slots=True)
class Ending:
    """A cell that ended; `text` says why it failed."""

    cell: StudyCell
    how: str
    text: str = ""
    seconds: float = 0.0


def search_all(
    cells: Sequence[StudyCell],
    folder: Path,
    database: str,
    *,
    workers: int,
    stop_after_s: float | None = None,
) -> Iterator[Ending]:
    """Search cells in worker processes; yield each as it ends. No cell begins after `stop_after_s` seconds.

    An interrupt stops the workers in order, and is raised then. Where a process is ended by somebody else, so are all:
    the cells that it takes with it have failed.
    """
    context = multiprocessing.get_context("spawn")
    stopped = context.Event()
    executor = ProcessPoolExecutor(min(workers, len(cells)), context, _begin, (stopped,))
    until = None if stop_after_s is None else time.time() + stop_after_s
    try:
        # A worker that an interrupt finds before it is in a group of its own would print a traceback.
        with _ignoring_interrupts():
            futures = {executor.submit(_search, cell, folder, database, until): cell for cell in cells}
        for future in as_completed(futures):
            ending = _ending(future, futures[future])
            if ending.how != LEFT_OUT:
                yield ending
    finally:
        stopped.set()
        executor.shutdown(wait=False, cancel_futures=True)
        _end(multiprocessing.active_children())


def _ending(future: Future[Ending], cell: StudyCell) -> Ending:
    try:
        return future.result()
    except BrokenProcessPool as error:
        return Ending(cell, FAILED, str(error))


def _end(processes: Sequence[BaseProcess]) -> None:
    """Let workers end: those that wait by themselves, those that search by an interrupt."""
    for number in (process.pid for process in processes if process.pid is not None):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGINT)
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(stopped: Event) -> None:
    """Begin a worker; an interrupt concerns only its searches."""
    global _stopped
    _stopped = stopped
    os.setpgrp()
    end_with_parent()


def _search(cell: StudyCell, folder: Path, database: str, until: float | None) -> Ending:
    from app.services.progress import Progress
    from graph.errors import SoapstoneError
    from scripts.studies.results import Folder
    from scripts.studies.running import run_cell

    began = time.time()
    how, text = LEFT_OUT, ""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not _stopped.is_set() and (until is None or began < until):
            document = run_cell(cell, database, Progress())
            how = INTERRUPTED if document is None else DONE
            if document is not None:
                Folder(folder).write(cell, document)
    except KeyboardInterrupt:
        how = INTERRUPTED
    except SoapstoneError as error:
        how, text = FAILED, str(error)
    except Exception as error:
        # One cell's defect must not lose the others; it is told, and the study ends with code 1.
        traceback.print_exc()
        how, text = FAILED, f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return Ending(cell, how, text, time.time() - began)
