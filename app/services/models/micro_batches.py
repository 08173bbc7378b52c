"""The model of a strategy with micro-batches: its graph is of one of them, so that it is imported at their size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from app.services.models.models import ImportedModel, ModelRequest, in_micro_batches
from app.services.progress import Progress
from graph.errors import UsageError
from graph.loss_reduction import adds_up_samples
from graph.rules.batch_norm import STATISTICS
from graph.schedule import MicroBatches, check_micro_batches, micro_batches_from_json
from graph.substitutions.substitution import substitutions_from_json


def model_for(model: ModelRequest, document: object, *, asked: int | None, where: str) -> ModelRequest:
    """Return a model with the micro-batches that are asked for, else with those of a strategy's document.

    It has the substitutions of the document.

    Args:
        model: the model.
        document: the strategy's; of one without micro-batches, any number may be asked for.
        asked: the number; None: that of the document.
        where: the strategy in the words of an error.

    Raises:
        UsageError: both are given and differ, or the number does not divide the batch.
    """
    stored = micro_batches_of(document)
    if asked is not None and stored.count not in (1, asked):
        raise UsageError(
            f"--micro-batches: is {asked}, must be {stored.count} for strategy {where}, which is made for so many; "
            "leave it out"
        )
    if isinstance(document, Mapping):
        model = replace(model, substitutions=substitutions_from_json(document.get("substitutions", [])))
    return in_micro_batches(model, stored.count if asked is None else asked)


def micro_batches_of(document: object) -> MicroBatches:
    """Return the micro-batches of a strategy's document, of which nothing else is checked.

    Raises:
        StrategyError: they are malformed.
    """
    entry = document.get("micro_batches", {}) if isinstance(document, Mapping) else {}
    return micro_batches_from_json(entry)


def check_graph(model: ImportedModel, progress: Progress) -> None:
    """Check that a model's step can go through its micro-batches, whatever the strategy, before anything is measured.

    Says so where a network of them trains otherwise than one of the whole batch.

    Raises:
        StrategyError: a micro-batch needs what the one before it renews.
    """
    if model.request.micro_batches != 1:
        from search.space.baselines import single_device

        configurations = single_device(model.graph).configurations
        check_micro_batches(MicroBatches(model.request.micro_batches), model.graph, configurations)
        if any(operator.target in STATISTICS for operator in model.graph.operators):
            progress.warn(
                f"batch normalization of {model.graph.name} has the statistics of a micro-batch, "
                f"{model.micro_batch_size} samples, not those of the whole batch"
            )
        if adds_up_samples(model.graph):
            progress.warn(
                f"the loss of {model.graph.name} adds up samples, and a step's is the mean of its micro-batches': that "
                "of the whole batch only where the sum is divided by their number"
            )
