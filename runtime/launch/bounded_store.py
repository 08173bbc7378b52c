"""A store whose calls end where its host has gone: torch's own wait for an answer without limit."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")

# Interval between looks at what became of the store's host, while a call lasts.
LOOK_S = 0.2
# A store that is there answers within milliseconds; on a machine that is overloaded it may take longer.
PATIENCE_S = 5.0


class BoundedStore:
    """The calls of a store, made one after the other by a thread of its own, which may be left behind.

    Every call raises a RuntimeError where the store's connection is broken, as the store's own do, and where it has
    taken longer than `PATIENCE_S` and nobody is there to answer.
    """

    def __init__(self, store: Store, nobody_answers: Callable[[], bool]) -> None:
        """Use `store` here alone: `nobody_answers` tells whether its host may be gone."""
        self._store = store
        self._nobody_answers = nobody_answers
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._since: float | None = None
        threading.Thread(target=self._make_calls, name="store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return self._call(lambda: self._store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of the keys are there."""
        return self._call(lambda: self._store.check(list(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value where the present one is the expected one; return the value after that."""
        return self._call(lambda: self._store.compare_set(key, expected, desired))

    def close(self) -> None:
        """Let the thread end; no call may follow."""
        self._calls.put(None)

    def _call(self, operation: Callable[[], Result]) -> Result:
        future: Future[Result] = Future()
        self._calls.put((future, operation))
        while not wait([future], LOOK_S).done:
            # Counted from the beginning of the call that is under way, which may be an earlier one.
            since = self._since
            if since is not None and time.monotonic() - since > PATIENCE_S and self._nobody_answers():
                raise RuntimeError("the store does not answer")
        return future.result()

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            future, operation = call
            self._since = time.monotonic()
            try:
                future.set_result(operation())
            except Exception as error:
                future.set_exception(error)
            self._since = None
