"""Copies of this process that share work with it, request by request.

Each keeps what it has made between requests, as this process does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Generic, Self, TypeVar

from graph.errors import RuntimeFailure, UsageError
from search.parallel.fork import ForkedProcess, WorkFailure, can_fork, fork

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class Copies(Generic[Request, Answer]):
    """Processes that answer requests, each for its share of the work, this one among them; they end with the context.

    Args:
        answer: makes that of a share, by its number, the number of shares and the request.
        count: of shares; one, where this system forks no process.
    """

    def __init__(self, answer: Callable[[int, int, Request], Answer], count: int) -> None:
        self._wanted = count if can_fork() else 1
        self._answer = answer
        self._processes: list[ForkedProcess] = []

    def __enter__(self) -> Self:
        """Start the copies, or as many as the operating system starts."""
        try:
            for share in range(1, self._wanted):
                self._processes.append(fork(partial(self._serve, share)))
        except UsageError:
            pass  # those that there are do all of the work
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End the copies."""
        self.close()

    def close(self) -> None:
        """End the copies."""
        for process in self._processes:
            process.kill()
        while self._processes:
            self._processes.pop().end()

    def ask(self, request: Request) -> list[Answer]:
        """Return the answer of each share. Nothing more may be asked where it raised.

        Raises:
            RuntimeFailure: a copy was ended from outside.
            Exception: what `answer` raised, here or there.
        """
        shares = 1 + len(self._processes)
        for process in self._processes:
            with suppress(OSError):  # told below, where nothing can be received either
                process.connection.send((shares, request))
        answers = [self._answer(0, shares, request)]
        for process in self._processes:
            try:
                answer = process.connection.recv()
            except (EOFError, ConnectionError):
                raise self._lost(process) from None
            if isinstance(answer, WorkFailure):
                raise answer.error from RuntimeError(answer.traceback)
            answers.append(answer)
        return answers

    def _lost(self, process: ForkedProcess) -> RuntimeFailure:
        self._processes.remove(process)
        process.connection.close()
        process.kill()  # it closed its pipe: it ends
        return RuntimeFailure(
            f"search: worker process {process.number} {process.wait()}, must work until the end; free memory, or "
            "choose --workers 1"
        )

    def _serve(self, share: int, connection: Connection) -> None:
        while True:
            shares, request = connection.recv()
            connection.send(self._answer(share, shares, request))
