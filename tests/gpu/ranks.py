"""Ranks on virtual GPUs, each a process, for tests of what they do together."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from profiler.pinning import begin_child
from profiler.processes import starting_processes

LIMIT_S = 240.0

# What a rank does: its number, how many there are, and the path of a file through which they meet.
Body = Callable[[int, int, str], Any]


class RankError(Exception):
    """What a rank raised, as text."""


def run_ranks(body: Body, count: int = 2) -> list[Any]:
    """Let `count` processes execute `body`; return what each returned, by rank.

    Raises:
        RankError: one of them raised it; the text names the error.
    """
    with tempfile.TemporaryDirectory() as folder, starting_processes() as context:
        pipes = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=_rank, args=(body, far, rank, count, str(Path(folder) / "meeting")))
            for rank, (_, far) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        try:
            answers = [near.recv() if near.poll(LIMIT_S) else (None, "no answer") for near, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    failures = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
    if failures:
        raise RankError("\n".join(failures))
    return [result for result, _ in answers]


def _rank(body: Body, answer: Connection, rank: int, count: int, meeting: str) -> None:
    begin_child()
    try:
        answer.send((body(rank, count, meeting), None))
    except BaseException:
        answer.send((None, traceback.format_exc()))
