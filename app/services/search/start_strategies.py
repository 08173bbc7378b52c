"""What earlier searches found, as starts of a new one.

For the same network, topology and training: the fastest stored strategies. Where there are none: the fastest one
for the nearest batch size or topology, made to fit (`search.space.strategy_transfer`). What was used is kept with the
search, by digest, so that it can be repeated whatever is found later.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any

from app.db.records import TASK_ORDERS, RankedStrategy, SearchedSetting, StrategyRecord, TaskOrder
from app.db.store import Store
from app.services.predict.predict import Setting
from app.services.stored import strategy_of
from graph.errors import StrategyError
from graph.strategy import Strategy
from search.space.strategy_transfer import adapt

MOST = 2
"""Each known strategy is one more chain."""

_FOUND = ("search", "import", "megatron", "operator-placement", "stanza", "mesh", "zero", "fsdp")
"""Sources of strategies; the others are what a search starts from anyway."""
_BASELINES = 3


@dataclass(frozen=True, slots=True)
class KnownStart:
    """A stored strategy, named by its digest, as it is used: made to fit where it was found for something else."""

    digest: str
    strategy: Strategy
    found_for: str

    def to_json(self) -> dict[str, Any]:
        """Return what is kept with the search, and shown."""
        return {"digest": self.digest, "used": self.strategy.digest, "found_for": self.found_for}


def known_starts(store: Store, setting: Setting, order: TaskOrder) -> list[KnownStart]:
    """Return the best strategies known for a setting; of the nearest setting, where there are none."""
    ranked = store.best_strategies(
        setting.graph_id,
        setting.topology_id,
        setting.training_id,
        task_order=order,
        limit=MOST + _BASELINES,
    )
    found = [one for one in ranked if one.strategy.source in _FOUND][:MOST]
    if found:
        return [start_of(setting, one.strategy) for one in found]
    for other in _by_distance(store.searched_settings(setting.model.graph.name), setting):
        for one in _best_of(store, other):
            try:
                return [start_of(setting, one.strategy, other)]
            except StrategyError:
                continue  # of a network of the same name, but of other operators
    return []


def start_of(
    setting: Setting, record: StrategyRecord, found_for: SearchedSetting | None = None
) -> KnownStart:
    """Return a stored strategy as a start, made to fit if it must be.

    Raises:
        StrategyError: it is for another network.
    """
    graph, count = setting.model.graph, len(setting.topology.devices)
    document = json.loads(record.document)
    same = f"batch size {setting.training.batch_size} on {count} devices"
    if record.graph_id == setting.graph_id and record.device_count == count:
        strategy = strategy_of(record, graph, count)
    else:
        strategy = adapt(document, record.device_count, graph, count)
        same = f"graph {document['graph'][:12]} on {record.device_count} devices"
    if found_for is not None:
        same = (
            f"batch size {found_for.batch_size} on {found_for.device_count} devices of {found_for.topology}"
        )
    return KnownStart(record.digest, strategy, same)


def given_starts(store: Store, setting: Setting, references: Sequence[str]) -> list[KnownStart]:
    """Return the strategies that were named, by id or digest.

    Raises:
        UsageError: there is no such strategy.
        StrategyError: one is for another network.
    """
    return [start_of(setting, store.strategy(reference)) for reference in references]


def _best_of(store: Store, other: SearchedSetting) -> list[RankedStrategy]:
    found = []
    for order in TASK_ORDERS:
        ranked = store.best_strategies(other.graph_id, other.topology_id, other.training_id, task_order=order)
        found += [one for one in ranked if one.strategy.source in _FOUND]
    return found[:1]


def _by_distance(others: Sequence[SearchedSetting], setting: Setting) -> list[SearchedSetting]:
    """Return settings, the nearest first: by how often batch size and devices double or halve, then by names."""
    count, batch_size = len(setting.topology.devices), setting.training.batch_size

    def distance(other: SearchedSetting) -> tuple[float, bool, bool, str, str, str]:
        doublings = abs(log2(other.device_count / count)) + abs(log2(other.batch_size / batch_size))
        return (
            doublings,
            other.topology != setting.topology.name,
            other.training_id != setting.training_id,
            # Digests, so that the order does not depend on who stored what first.
            other.graph_digest,
            other.topology_digest,
            other.training_digest,
        )

    return sorted(others, key=distance)
