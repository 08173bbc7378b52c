"""Stored strategies, topologies and trainings as objects; a row that does not hold what was written is damaged."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from app.db.failures import MALFORMED, as_written, damaged_row
from app.db.records import GraphRecord, StrategyRecord, TopologyRecord, TrainingRecord
from graph.collective_algorithms import algorithms_from_json
from graph.errors import StrategyError, TopologyError
from graph.operator_ranges import ranges_from_json
from graph.operators import OperatorGraph, ValueKind
from graph.schedule import micro_batches_from_json
from graph.strategy import Configuration, Sharding, Strategy, strategy_from_json
from graph.synchronization import synchronization_from_json
from graph.topology import Topology
from graph.training import Training, training_from_json


def strategy_of(record: StrategyRecord, graph: OperatorGraph, device_count: int | None = None) -> Strategy:
    """Return a stored strategy, on the devices that it was stored for or on others.

    Raises:
        StrategyError: it is for another graph, or needs more devices.
        DamagedDataError: its row is not as it was written.
    """
    document = json.loads(record.document)
    where = f"table strategies, row {record.id}, column document"
    if document.get("graph") != graph.digest:
        with suppress(StrategyError, *MALFORMED):
            named = strategy_from_json({**document, "graph": graph.digest}, graph, record.device_count)
            if named.digest == record.digest:
                raise damaged_row(where, "names another graph than its digest does")
        return strategy_from_json(document, graph, record.device_count)  # says so
    try:
        with as_written(where):
            strategy = strategy_from_json(document, graph, record.device_count)
    except StrategyError as error:
        raise damaged_row(where, str(error).partition(";")[0]) from None
    check_digest(record, strategy)
    if device_count is not None:
        strategy.validate(graph, device_count)
    return strategy


def check_digest(record: StrategyRecord, strategy: Strategy) -> None:
    """Check that a stored strategy has the digest of its row.

    Raises:
        DamagedDataError: it is another.
    """
    if strategy.digest != record.digest:
        raise damaged_row(
            f"table strategies, row {record.id}, column document",
            f"is strategy {strategy.digest[:12]}, column digest says {record.digest[:12]}",
        )


def topology_of(record: TopologyRecord) -> Topology:
    """Return a stored topology.

    Raises:
        DamagedDataError: its row is not as it was written.
    """
    try:
        return Topology.from_json(record.document)
    except TopologyError as error:
        where = f"table topologies, row {record.id}, column document"
        raise damaged_row(where, str(error).partition(";")[0]) from None


def training_of(record: TrainingRecord) -> Training:
    """Return a stored training.

    Raises:
        DamagedDataError: its row is not as it was written.
    """
    with as_written(f"table trainings, row {record.id}, column document"):
        return training_from_json(json.loads(record.document))


def strategy_in(graph: GraphRecord, described: dict[str, Any], record: StrategyRecord) -> Strategy:
    """Return a stored strategy by the operators and weights that its stored graph names; its model is not imported.

    described: the graph's document, which many strategies share.

    Raises:
        DamagedDataError: one of the two rows is not as it was written.
    """
    with as_written(f"table strategies, row {record.id}, column document"):
        document = json.loads(record.document)
        operators = described["operators"]
        names = [operator["name"] for operator in operators]
        if document["graph"] != graph.digest or set(document["operators"]) != set(names):
            raise ValueError(f"is for another graph than row {graph.id} of graphs")
        configurations = tuple(
            Configuration(
                tuple(entry.get("degrees", {}).get(axis[0], 1) for axis in operator["axes"]),
                tuple(entry["devices"]),
            )
            for operator in operators
            for entry in [document["operators"][operator["name"]]]
        )
        levels = document.get("sharding", {})
        weights = [name for name, _, kind, _ in described["values"] if kind == ValueKind.WEIGHT]
        sharding = tuple(Sharding(levels.get(name, Sharding.NONE)) for name in weights)
        operator_index = {name: index for index, name in enumerate(names)}
        recomputation, compiled = (
            ranges_from_json(document.get(key, []), operator_index, key)
            for key in ("recomputation", "compiled")
        )
        strategy = Strategy(
            graph.digest,
            configurations,
            sharding,
            recomputation,
            compiled,
            algorithms_from_json(document.get("collective_algorithms", [])),
            synchronization_from_json(document.get("synchronization", {})),
            micro_batches_from_json(document.get("micro_batches", {})),
        )
    check_digest(record, strategy)
    return strategy
