"""Strategies that earlier searches found, as starts of a new one.

For the same network, topology and training: the fastest stored strategies. Where there are none: the fastest one for
the nearest batch size or topology, transferred (`search.space.strategy_transfer`). A search keeps its starts' digests,
so that it can be repeated whatever is found later.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from app.db.records import TASK_ORDERS, SearchedSetting, StrategyRecord, TaskOrder
from app.db.references import required
from app.db.store import Store
from app.services.predict.predict import Setting
from app.services.stored import strategy_of
from graph.errors import StrategyError, UsageError
from graph.strategy import Strategy, with_whole_weights
from graph.synchronization import BY_DEFAULT
from graph.texts import counted
from search.space.strategy_transfer import adapt

MOST = 2
"""Known strategies to start from; each is one more chain."""

_FOUND = (
    "search", "import", "megatron", "operator-placement", "stanza", "hugectr", "insightface", "mesh", "zero", "fsdp",
)  # fmt: skip
"""Sources of strategies; the others are what a search starts from anyway."""
_BASELINES = 3


@dataclass(frozen=True, slots=True)
class StartStrategy:
    """A stored strategy, named by its digest, as it is used: transferred where it was found for another setting."""

    digest: str
    strategy: Strategy
    found_for: str

    def to_json(self) -> dict[str, Any]:
        """Return the start as a JSON document, as it is kept with the search."""
        return {"digest": self.digest, "used": self.strategy.digest, "found_for": self.found_for}


def known_starts(store: Store, setting: Setting, order: TaskOrder) -> list[StartStrategy]:
    """Return the best strategies stored for a setting; of the nearest setting, where there are none."""
    ranked = store.best_strategies(
        setting.graph_id,
        setting.topology_id,
        setting.training_id,
        task_order=order,
        limit=2 * MOST + _BASELINES,
    )
    # One strategy may be stored twice: as it is, and with stretches of it compiled.
    starts: dict[Strategy, StartStrategy] = {}
    for stored in ranked:
        if stored.strategy.source in _FOUND and len(starts) < MOST:
            with suppress(StrategyError):  # of stages that the schedule asked for cannot have
                start = start_of(setting, stored.strategy)
                starts.setdefault(start.strategy, start)
    if starts:
        return list(starts.values())
    for other in _by_distance(store.searched_settings(setting.model.graph.name), setting):
        nearest = _best_of(store, other)
        if nearest is not None:
            with suppress(StrategyError):  # of a network of the same name, but of other operators
                return [start_of(setting, nearest, other)]
    return []


def start_of(
    setting: Setting, record: StrategyRecord, found_for: SearchedSetting | None = None
) -> StartStrategy:
    """Return a stored strategy as a start, transferred if it is for another setting.

    Nothing of it is compiled, its all-reduces are the cheapest, and gradients are summed as by default; its
    micro-batches are those of the setting's model.

    Raises:
        StrategyError: it is for another network, or cannot have the micro-batches.
    """
    graph, count = setting.model.graph, len(setting.topology.devices)
    document = json.loads(record.document)
    origin = f"batch size {setting.training.batch_size} on {counted(count, 'device')}"
    if record.graph_id == setting.graph_id and record.device_count == count:
        strategy = replace(
            strategy_of(record, graph, count),
            compiled=(),
            collective_algorithms=(),
            synchronization=BY_DEFAULT,
        )
    else:
        strategy = adapt(document, record.device_count, graph, count)
        origin = f"graph {document['graph'][:12]} on {counted(record.device_count, 'device')}"
    divided = with_whole_weights(graph, setting.in_micro_batches(strategy))
    if divided is not strategy:
        divided.validate(graph, count)
    if found_for is not None:
        origin = (
            f"batch size {found_for.batch_size} on {counted(found_for.device_count, 'device')} of "
            f"{found_for.topology}"
        )
    return StartStrategy(record.digest, divided, origin)


def given_starts(store: Store, setting: Setting, references: Sequence[str]) -> list[StartStrategy]:
    """Return the strategies of these ids or digests, which --start gives.

    Raises:
        UsageError: there is no such strategy, or one is for another network or cannot have the micro-batches.
    """
    starts = []
    for reference in references:
        record = store.strategy(reference)
        try:
            starts.append(start_of(setting, record))
        except StrategyError as error:
            raise misfit(store, setting.model.graph.name, reference, record, error) from None
    return starts


def misfit(
    store: Store, name: str, reference: str, record: StrategyRecord, error: StrategyError
) -> UsageError:
    """Return the error of a strategy that --start names and that does not fit the network of that name."""
    reason = str(error).partition(";")[0].removeprefix("strategy: ")
    origin = required(store.graph(record.graph_id), "graphs", record.graph_id).name
    return UsageError(
        f"--start {reference}: is a strategy of {origin}, must fit this {name} ({reason}); name one of {name}, "
        "see app strategy list, or leave it out"
    )


def _best_of(store: Store, other: SearchedSetting) -> StrategyRecord | None:
    for order in TASK_ORDERS:
        ranked = store.best_strategies(other.graph_id, other.topology_id, other.training_id, task_order=order)
        for stored in ranked:
            if stored.strategy.source in _FOUND:
                return stored.strategy
    return None


def _by_distance(others: Sequence[SearchedSetting], setting: Setting) -> list[SearchedSetting]:
    """Return settings, the nearest first: by how often batch size and devices double or halve, then by names."""
    count, batch_size = len(setting.topology.devices), setting.training.batch_size

    def distance(other: SearchedSetting) -> tuple[float, bool, bool, str, str, str]:
        doublings = abs(log2(other.device_count / count)) + abs(log2(other.batch_size / batch_size))
        return (
            doublings,
            other.topology != setting.topology.name,
            other.training_id != setting.training_id,
            # Digests, so that the order does not depend on the order of storing.
            other.graph_digest,
            other.topology_digest,
            other.training_digest,
        )

    return sorted(others, key=distance)
