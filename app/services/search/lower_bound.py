"""The lower bound of a search's step times: proved in a process of its own, where the search has several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from app.db.store import Store
from app.services.predict.predict import Setting, without_measuring
from app.services.predict.problem import problem_of
from app.services.progress import Progress
from graph.errors import UsageError
from search.algorithms.algorithm import AlgorithmResult
from search.bounds.lower_bound import Bound, lower_bound
from search.parallel.fork import ForkedProcess, fork
from search.problem import Problem


class LowerBoundTask:
    """The proof of a step time that no strategy of a search's space is below; unmeasured costs are estimated for it."""

    def __init__(self, store: Store, setting: Setting) -> None:
        self._store, self._setting = store, setting
        self._process: ForkedProcess | None = None
        self._shared = False

    def begin(self, *, shared: bool) -> None:
        """Begin in a process of its own. Not where the search measures: those costs are to count here too."""
        if not self._setting.table.copies():
            return
        problem = problem_of(self._setting, without_measuring(self._store, self._setting))
        if problem.costs.copies():
            with suppress(UsageError):  # no process can be had: later, then
                self._process = fork(partial(_serve, problem, shared=shared))
                self._shared = shared

    def close(self) -> None:
        """End the process, if there still is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def bound(
        self,
        results: Sequence[AlgorithmResult],
        progress: Progress,
        *,
        shared: bool,
        recomputed: bool = False,
    ) -> Bound:
        """Return the highest bound: this one, or one that an algorithm proved over the whole space.

        Args:
            found: the results of the algorithms.
            progress: shows the stage.
            shared: whether strategies with sharding are in the space.
            recomputed: whether strategies with recomputation are, which may fit where others do not.
        """
        with progress.stage("bounding the step time from below"):
            best = self._received() if shared == self._shared else None
            if best is None:
                costs = without_measuring(self._store, self._setting)
                best = lower_bound(problem_of(self._setting, costs), shared=shared)
        for result in results if not shared and not recomputed else ():
            if result.bound_s is not None and result.bound_s > best.seconds:
                best = Bound(
                    round(result.bound_s * 1e9), f"{result.algorithm} over the whole space", whole=True
                )
        return best

    def _received(self) -> Bound | None:
        """Return the process's bound; None where there is no process, or somebody ended it."""
        if self._process is None:
            return None
        with suppress(EOFError, OSError):
            bound = self._process.connection.recv()
            return bound if isinstance(bound, Bound) else None
        return None


def _serve(problem: Problem, connection: Connection, *, shared: bool) -> None:
    connection.send(lower_bound(problem, shared=shared))
