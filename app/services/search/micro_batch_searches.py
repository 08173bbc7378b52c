"""Searches for one network with 1, 2, 4, ... micro-batches, of which the fastest strategy counts.

The graph is another for each number of micro-batches, so that each search is one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from app.services.models.models import ImportedModel, ModelRequest, batch_size_of, in_micro_batches
from app.services.progress import Progress
from app.services.search import micro_batches
from app.services.search.report import RelatedSearches, SearchReport
from app.services.search.request import SearchRequest, algorithm_names, search_options
from app.services.search.search import run_search
from graph.errors import ImportFailure, StrategyError, UsageError
from graph.texts import counted
from search.algorithms.registry import UNITY

MOST_TRIED = 32
"""Micro-batches, at most."""


class MicroBatchSearches(RelatedSearches[int]):
    """The reports of the searches, by numbers of micro-batches, ascending."""

    def rows(self) -> list[dict[str, Any]]:
        """Return for each number of micro-batches the search, and its best strategy as predicted."""
        return [
            {
                "count": count,
                "schedule": report.micro_batches.get("schedule"),
                "stages": report.micro_batches.get("stages"),
                "predicted_step_time_s": report.best.step_time_s,
                "predicted_throughput_samples_per_s": report.best.throughput,
                "peak_memory_bytes": max(report.best.peak_memory_bytes),
                "feasible": report.best.feasible,
                "search": report.search_id,
                "digest": report.best.digest,
            }
            for count, report in self.reports
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all rows and the report of the best search as a JSON document."""
        return {"micro_batches": self.rows(), "best": self.best.to_json()}


def run_searches(
    request: SearchRequest,
    algorithm: str | None,
    database: str | None,
    progress: Progress,
    imported: Callable[[], ImportedModel] | None = None,
) -> MicroBatchSearches:
    """Search with each number of micro-batches that divides the batch, a power of two up to `MOST_TRIED`.

    A number of which no strategy fits, or of which the network cannot be imported, is passed by with a warning. Ctrl-C
    ends all with the searches so far.

    Args:
        request: the search, of one batch; its `algorithm` counts for nothing.
        algorithm: of searches that it can; None: the usual one.
        database: as for `run_search`.
        progress: as for `run_search`.
        imported: returns the model of one batch.

    Raises:
        SoapstoneError: as `run_search`; an option that does not go with micro-batches, before the first search.
        KeyboardInterrupt: it was interrupted before the first search began.
    """
    if algorithm == UNITY:
        raise UsageError(
            f"--algorithm {UNITY}: chooses substitutions for a step in one batch, must be without --micro-batches; "
            "leave one of the two out"
        )
    requests = [_request(request, algorithm, count) for count in _counts(request.model)]
    for each in requests:
        search_options(each)
        micro_batches.check_options(each, algorithm_names(each))
    reports: list[tuple[int, SearchReport]] = []
    failure: StrategyError | ImportFailure | None = None
    for each in requests:
        count = each.model.micro_batches
        try:
            report = run_search(each, database, progress, imported if count == 1 else None)
        except (StrategyError, ImportFailure) as error:
            progress.warn(f"{counted(count, 'micro-batch', 'micro-batches')}: {error}")
            failure = failure or error
            continue
        except KeyboardInterrupt:
            if not reports:
                raise
            return MicroBatchSearches(tuple(reports), ended=True)
        reports.append((count, report))
        if report.interrupted or report.unconfirmed:
            break
    if not reports and failure is not None:
        raise failure
    return MicroBatchSearches(tuple(reports))


def _counts(model: ModelRequest) -> list[int]:
    size = batch_size_of(model)
    powers = [1]
    while 2 * powers[-1] <= min(MOST_TRIED, size):
        powers.append(2 * powers[-1])
    return [count for count in powers if size % count == 0]


def _request(request: SearchRequest, algorithm: str | None, count: int) -> SearchRequest:
    """Return the request of one number of micro-batches: the algorithm that is asked for, where it can, else the usual.

    All options but the algorithm, the schedule and when gradients are summed are those of all searches, and are refused
    for all.
    """
    usual = "mcmc" if count == 1 else micro_batches.DEFAULT_ALGORITHM
    asked = usual if algorithm is None else algorithm
    can = micro_batches.INTERLEAVED if request.schedule == "interleaved" else micro_batches.ALGORITHMS
    if count > 1 and not can.issuperset(name.strip() for name in asked.split(",")):
        asked = usual
    return replace(
        request,
        model=in_micro_batches(request.model, count),
        schedule=None if count == 1 else request.schedule,
        gradients=None if count == 1 else request.gradients,
        algorithm=asked,
    )
