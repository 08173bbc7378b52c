"""The synchronization of a found strategy's weights (`graph.synchronization`): the one asked for, or the fastest."""

from __future__ import annotations

from dataclasses import replace

from app.db.store import Store
from app.services.predict.predict import Setting, synchronized
from app.services.progress import Progress
from app.services.search.predictions import SearchPredictions
from app.services.search.report import SearchReport
from app.services.search.run_algorithms import SearchPlan
from app.services.stored import strategy_of
from graph.strategy import Sharding, Strategy
from graph.synchronization import (
    BUCKET_BYTES,
    BY_DEFAULT,
    SLICE_BYTES,
    Policy,
    Synchronization,
    p3,
    read_synchronization,
    synchronization_to_json,
)

AUTO = "auto"
# Buckets and slices of which `auto` predicts the step: from a quarter of the usual size to many times it.
BUCKETS = tuple(BUCKET_BYTES * 4**power // 16 for power in range(4))
SLICES = tuple(SLICE_BYTES * 4**power // 4 for power in range(5))
# Of slices that are shared `auto` leaves out sizes with more updates in a step: 1.8 million take 26 s to predict.
MOST_UPDATES = 250_000


def checked_policy(text: str) -> str:
    """Return a policy that a user names, `auto` among them.

    Raises:
        UsageError: it is none.
    """
    if text != AUTO:
        read_synchronization(text, "--policy")
    return text


def with_policy(
    store: Store, setting: Setting, plan: SearchPlan, report: SearchReport, policy: str, progress: Progress
) -> SearchReport:
    """Return the report with the best strategy's weights synchronized by a policy: `auto` takes the fastest predicted.

    Of `auto` the fastest baseline may become the best strategy, where it is faster so. p3 passes by strategies whose
    weights are kept in shares, and of `auto` tic those that share no update.
    """
    predictions = SearchPredictions(store, setting, plan)
    graph, count = setting.model.graph, len(setting.topology.devices)
    found = [report.best] if policy != AUTO else [report.best, report.best_baseline]
    best = report.best
    chosen = BY_DEFAULT
    with progress.stage("simulating policies of synchronization"):
        for prediction in found:
            strategy = strategy_of(store.strategy(prediction.digest), graph, count)
            for synchronization in candidates(policy, frozenset(strategy.sharding)):
                if policy == AUTO and _updates(setting, strategy, synchronization) > MOST_UPDATES:
                    continue
                changed = synchronized(strategy, synchronization, progress)
                if policy != AUTO and changed == strategy:
                    return report
                predicted = predictions.predict(changed)
                if policy != AUTO or predicted.rank < best.rank:
                    best, chosen = predicted, changed.synchronization
    if best is report.best:
        return report
    return replace(
        report,
        predictions=(replace(best, name="found"), *report.predictions[1:]),
        searched_s=report.best.step_time_s if report.searched_s is None else report.searched_s,
        synchronization=synchronization_to_json(chosen),
    )


def _updates(setting: Setting, strategy: Strategy, synchronization: Synchronization) -> int:
    """Return about how many updates of shared slices a step's prediction has: one a slice and device."""
    if synchronization.policy is not Policy.P3 or Sharding.OPTIMIZER not in strategy.sharding:
        return 0
    size_bytes = sum(weight.spec.size_bytes for weight in setting.model.graph.weights)
    return size_bytes // synchronization.size_bytes * len(setting.topology.devices)


def candidates(policy: str, levels: frozenset[Sharding]) -> list[Synchronization]:
    """Return the policies to predict where a user names `policy`, of a strategy that shares weights at these levels."""
    slices = [] if Sharding.PARAMETERS in levels else [*map(p3, SLICES)]
    if policy != AUTO:
        named = read_synchronization(policy, "--policy")
        return [named] if slices or named.policy is not Policy.P3 else []
    # TAC's order is TIC's where computations are in program order, and takes longer to find.
    late = [Synchronization(Policy.TIC, size) for size in BUCKETS] if Sharding.OPTIMIZER in levels else []
    return [*(Synchronization(Policy.FIFO, size) for size in BUCKETS), *late, *slices]
