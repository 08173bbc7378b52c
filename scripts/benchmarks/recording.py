"""The cost of recording every proposal of a search: the same search with and without its trace, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from scripts.benchmarks.result import MeasuredValue, measurement

if TYPE_CHECKING:
    from app.db.store import Store
    from app.services.models.models import ImportedModel
    from app.services.trace.recorder import TraceRecorder
    from search.algorithms.chain import SearchOptions
    from search.algorithms.proposal_log import Observer

OVERHEAD_PERCENT = 5.0
CHAINS = 4
CALIBRATING = 400


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one search; of its processor time that in calls of the trace, and that of all other threads."""

    wall_s: float
    processor_s: float
    others_s: float
    calls_s: float = 0.0


class Watched:
    """An observer that adds up the processor time of another one's calls in this thread."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        call = getattr(self._observer, name)

        def watched(*arguments: Any) -> None:
            began = time.thread_time()
            call(*arguments)
            self.seconds += time.thread_time() - began

        return watched


def overheads(
    store: Store,
    begin: Callable[[], int],
    model: ImportedModel,
    devices: int,
    searches: Mapping[float, int],
) -> list[MeasuredValue]:
    """Search with and without a trace, in turns, which comes first alternating; compare pair by pair.

    Args:
        store: where the traces go.
        begin: stores a search that begins; returns its id.
        model: the network.
        devices: of the topology p100-cluster.
        searches: about how many seconds a search is to take, and how many pairs to make of it.
    """
    from app.services.predict.predict import find_target, prepare
    from app.services.progress import Progress
    from graph.training import Training
    from search.algorithms import mcmc
    from search.problem import Problem

    target = find_target(store, "p100-cluster", Progress(), devices=devices)
    with prepare(store, model, target, Training(model.batch_size), "estimate", Progress()) as setting:

        def search(options: SearchOptions, observer: Observer | None = None) -> None:
            mcmc.search(
                Problem(model.graph, setting.topology, setting.table, setting.training, target.link_costs),
                options,
                observer=observer,
            )

        calibrating = SearchOptions(proposals=CALIBRATING, chains=CHAINS)
        search(calibrating)  # compiles, and meets every call for the first time
        calibrated = _plain(calibrating, search)
        rows: list[MeasuredValue] = []
        for seconds, pairs in searches.items():
            proposals = max(CHAINS, round(CALIBRATING * seconds / calibrated.processor_s))
            options = replace(calibrating, proposals=proposals)
            plain, recorded = [], []
            for number in range(pairs):
                for traced in (False, True) if number % 2 == 0 else (True, False):
                    if traced:
                        recorded.append(_recorded(store, begin(), model, devices, options, search))
                    else:
                        plain.append(_plain(options, search))
            rows += _compared(proposals, plain, recorded)
    return rows


def _plain(options: Any, search: Callable[..., None]) -> Spent:
    wall, processor, thread = time.perf_counter(), time.process_time(), time.thread_time()
    search(options)
    return _spent(wall, processor, thread, 0.0)


def _spent(wall: float, processor: float, thread: float, calls_s: float) -> Spent:
    own_s = time.thread_time() - thread
    processor_s = time.process_time() - processor
    return Spent(time.perf_counter() - wall, processor_s, processor_s - own_s, calls_s)


def _recorded(
    store: Store,
    search_id: int,
    model: ImportedModel,
    devices: int,
    options: Any,
    search: Callable[..., None],
) -> Spent:
    """Search as `app search` does, from the opening of the trace until all of it is written."""
    wall, processor, thread = time.perf_counter(), time.process_time(), time.thread_time()
    with trace_recorder(store, search_id, model, devices) as recorder:
        watched = Watched(recorder)
        opened = time.thread_time() - thread
        search(options, cast("Observer", watched))
        closing = time.thread_time()
    return _spent(wall, processor, thread, opened + watched.seconds + time.thread_time() - closing)


@contextmanager
def trace_recorder(
    store: Store, search_id: int, model: ImportedModel, devices: int
) -> Iterator[TraceRecorder]:
    """Yield the observer that records a search; all of its trace is written at the end."""
    from app.db.trace import ProposalTrace
    from app.services.progress import Progress
    from app.services.trace.recorder import TraceRecorder, groups_text
    from search.space.groups import find_groups

    groups = find_groups(model.graph)
    with ProposalTrace(store, search_id, groups_text(groups)) as trace:
        yield TraceRecorder(trace, groups, devices, Progress(), model.graph.name)


def _compared(proposals: int, plain: list[Spent], recorded: list[Spent]) -> list[MeasuredValue]:
    seconds = statistics.median(spent.wall_s for spent in plain)
    search = f"a search of {proposals} proposals in {seconds:.1f} s"
    rows = []
    for what, name in (("processor time", "processor_s"), ("wall time", "wall_s")):
        ratios = [
            getattr(with_trace, name) / getattr(without, name)
            for without, with_trace in zip(plain, recorded, strict=True)
        ]
        percent = (statistics.median(ratios) - 1) * 100
        rows.append(
            measurement(f"{search}: more {what} with its trace", percent, "%", at_most=OVERHEAD_PERCENT)
        )
    idle_s = statistics.median(spent.others_s for spent in plain)
    shares = []
    for spent in recorded:
        recording_s = spent.calls_s + spent.others_s - idle_s
        shares.append(recording_s / (spent.processor_s - recording_s))
    what = f"{search}: processor time of the trace's calls and thread"
    rows.append(measurement(what, statistics.median(shares) * 100, "%", at_most=OVERHEAD_PERCENT))
    return rows
