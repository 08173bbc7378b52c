"""The micro-batches of a run: those asked for, or those of the strategy that is named, known before the import.

The graph is of one micro-batch (`graph.schedule`), so that their number decides what is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.db.store import Store
from app.services.models.micro_batches import model_for
from app.services.predict.named_strategies import follows_graph
from graph.errors import UsageError
from graph.schedule import Schedule, micro_batches_from_json, with_credits
from graph.strategy import Sharding, Strategy, read_document
from graph.synchronization import Policy, synchronization_from_json

if TYPE_CHECKING:
    from app.services.run.run import RunRequest


def with_micro_batches(request: RunRequest, database: str | None) -> RunRequest:
    """Return the request with the number of micro-batches that its strategy is for, where none is asked for.

    Raises:
        UsageError: the strategy is for another number, or one of the options does not go with micro-batches.
        StrategyError: the strategy's file cannot be read.
    """
    document = _document(request.strategy, database)
    model = model_for(request.model, document, asked=request.micro_batches, where=request.strategy)
    request = replace(request, model=model)
    if model.micro_batches != 1:
        _check(request, document)
        return request
    given = ",".join(map(str, request.credits))
    for option, value in (
        ("--schedule", request.schedule),
        ("--gradients", request.gradients),
        ("--credits", given or None),
    ):
        if value is not None:
            raise UsageError(
                f"{option}: is {value}, must be left out for a step in one batch; give --micro-batches"
            )
    return request


def divided(strategy: Strategy, request: RunRequest) -> Strategy:
    """Return a strategy with the micro-batches of a request, in its schedule, else in the strategy's own.

    Raises:
        UsageError: the strategy is for another number of them.
        StrategyError: credits are given for another schedule than actors.
    """
    count, own = request.model.micro_batches, strategy.micro_batches.count
    if own not in (1, count):
        raise UsageError(
            f"strategy {request.strategy}: has {own} micro-batches, must have {count} as the graph is of; import the "
            "model with as many"
        )
    strategy = strategy.in_micro_batches(count, request.schedule, request.gradients)
    if not request.credits:
        return strategy
    given = with_credits(strategy.micro_batches, list(request.credits), "--credits")
    return replace(strategy, micro_batches=given)


def _document(reference: str, database: str | None) -> Any:
    """Return the document of a strategy that is stored or in a file; an empty one of a baseline."""
    if follows_graph(reference):
        return {}
    if Path(reference).suffix == ".json" or os.path.isfile(reference):
        return read_document(Path(reference))
    with Store.open(database) as store:
        return json.loads(store.strategy(reference).document)


def _check(request: RunRequest, document: Mapping[str, Any]) -> None:
    """Refuse options and strategies that do not go with micro-batches, before anything is imported or measured."""
    count = request.model.micro_batches
    if request.compile_stretches or document.get("compiled"):
        name = "--compile" if request.compile_stretches else f"strategy {request.strategy}"
        raise UsageError(
            f"{name}: compiles operators, must not with {count} micro-batches; leave one of the two out"
        )
    synchronization = request.synchronization
    if synchronization is None:
        synchronization = synchronization_from_json(document.get("synchronization", {}))
    if synchronization.policy is not Policy.FIFO:
        raise UsageError(
            f"--policy: is {synchronization.policy}, must be fifo with {count} micro-batches; give --policy fifo"
        )
    levels = document.get("sharding", {})
    schedule = request.schedule or micro_batches_from_json(document.get("micro_batches", {})).schedule
    if schedule is Schedule.ZERO_BUBBLE and (
        request.strategy == "fsdp"
        or (isinstance(levels, Mapping) and Sharding.PARAMETERS.value in levels.values())
    ):
        raise UsageError(
            f"strategy {request.strategy}: keeps weights in shares, must keep them whole with schedule {schedule}, for "
            "the weight parts of backwards; choose another schedule, or zero, which shares their optimizer's state"
        )
