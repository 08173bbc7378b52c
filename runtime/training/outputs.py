"""Results of a module beside its loss, whole on every rank, after a step."""

from __future__ import annotations

import torch

from graph.errors import RuntimeFailure
from graph.importing.outputs import Outputs
from runtime.execution.step import StepRunner
from runtime.training.batches import Batch
from runtime.training.sharded_batches import BatchShards


def kept_values(outputs: Outputs | None) -> frozenset[str]:
    """Return the values of the graph that must stay after a step."""
    sources = () if outputs is None else outputs.sources.values()
    return frozenset(name for name in sources if not name.startswith("input."))


def collect_outputs(
    outputs: Outputs | None, runner: StepRunner, shards: BatchShards | None, batch: Batch | None
) -> dict[str, torch.Tensor]:
    """Return the results by name, on the rank's device. All ranks must call it.

    Args:
        outputs: named by the user.
        runner: of the last step.
        shards: of that step, where batches are sharded.
        batch: of that step; None: there was none.

    Raises:
        RuntimeFailure: nothing was asked for, or there was no step.
    """
    if outputs is None:
        raise RuntimeFailure(
            'outputs: none are kept, must be named; pass outputs=("logits",) to parallelize, or other names'
        )
    if batch is None:
        raise RuntimeFailure("outputs: there are none yet, must be of a step; call step or backward before")
    kept = kept_values(outputs)
    values = {}
    for name in sorted(set(outputs.sources.values())):
        if name in kept:
            values[name] = runner.whole_value(name)
        elif shards is not None and name in batch.shard_dims:
            values[name] = shards.whole(name, batch.inputs[name])
        else:
            values[name] = batch.inputs[name]
    if not outputs.calls:
        return {name: values[outputs.sources[node]].to(runner.device) for name, node in outputs.nodes.items()}
    # As exported: tensors that the module makes from numbers are on the CPU.
    results = outputs.compute({name: tensor.detach().cpu() for name, tensor in values.items()})
    return {name: tensor.to(runner.device) for name, tensor in results.items()}
