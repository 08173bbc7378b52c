"""The micro-batches of a strategy as reports have them: their number and samples, the schedule and its stages."""

from __future__ import annotations

from typing import Any

from graph.operators import OperatorGraph
from graph.schedule import micro_batches_to_json, stages_of
from graph.strategy import Strategy


def micro_batch_report(graph: OperatorGraph, strategy: Strategy, samples: int | None) -> dict[str, Any]:
    """Return number, schedule, stages and samples of a strategy's micro-batches; empty where it has only one.

    samples: of one micro-batch; None: unknown.
    """
    document = micro_batches_to_json(strategy.micro_batches)
    if not document:
        return {}
    stages = stages_of(graph, strategy.configurations, strategy.micro_batches.schedule)
    return {**document, "stages": len(stages), "samples": samples}
