"""The lower bound of a search: proved beside it, in a process of its own, where the search has more than one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection

from app.db.store import Store
from app.services.predict.predict import Setting, without_measuring
from app.services.progress import Progress
from app.services.search.run_algorithms import problem_of
from graph.errors import UsageError
from search.algorithms.registry import AlgorithmResult
from search.bounds.lower_bound import Bound, lower_bound
from search.parallel.fork import ForkedProcess, fork
from search.problem import Problem


class Bounding:
    """Gives a time that no strategy of a search's space is below.

    Costs that nobody has measured are estimated for it.
    """

    def __init__(self, store: Store, setting: Setting) -> None:
        self._store, self._setting = store, setting
        self._process: ForkedProcess | None = None
        self._shared = False

    def begin(self, *, shared: bool) -> None:
        """Begin in a process of its own. Not where the search measures: what it finds out is to count here too."""
        if not self._setting.table.copies():
            return
        problem = problem_of(self._setting, without_measuring(self._store, self._setting))
        if problem.costs.copies():
            with suppress(UsageError):  # no process can be had: later, then
                self._process = fork(partial(_serve, problem, shared=shared))
                self._shared = shared

    def end(self) -> None:
        """End the process, if there is one still."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def bound(
        self, found: Sequence[AlgorithmResult], progress: Progress, *, shared: bool, recomputed: bool = False
    ) -> Bound:
        """Return what an algorithm proved, else the lower bound.

        Args:
            found: what the algorithms found.
            progress: hears of it.
            shared: whether strategies whose weights are shared are in the space.
            recomputed: whether those that make activations again are, which may fit where others do not.
        """
        progress.begin("bounding the step time from below", None)
        try:
            best = self._heard() if shared == self._shared else None
            if best is None:
                costs = without_measuring(self._store, self._setting)
                best = lower_bound(problem_of(self._setting, costs), shared=shared)
        finally:
            progress.end()
        for one in found:
            if one.bound_s is not None and one.bound_s > best.seconds and not shared and not recomputed:
                best = Bound(round(one.bound_s * 1e9), f"{one.algorithm} over the whole space", whole=True)
        return best

    def _heard(self) -> Bound | None:
        """Return what the process beside found; None where there is none, or somebody ended it."""
        if self._process is None:
            return None
        with suppress(EOFError, OSError):
            said = self._process.connection.recv()
            return said if isinstance(said, Bound) else None
        return None


@contextmanager
def bounding(store: Store, setting: Setting) -> Iterator[Bounding]:
    """Give the bound of a search; a process beside it ends with the context."""
    one = Bounding(store, setting)
    try:
        yield one
    finally:
        one.end()


def _serve(problem: Problem, connection: Connection, *, shared: bool) -> None:
    connection.send(lower_bound(problem, shared=shared))
