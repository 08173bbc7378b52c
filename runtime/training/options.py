"""The options of a user's training, and the import of the module under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graph.importing.outputs import Outputs
    from graph.operators import OperatorGraph


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of `runtime.parallelize`, as it describes them; `node_of`: for each rank, the number of its host."""

    batch_norm: str
    batches: str
    outputs: tuple[str, ...]
    seed: int
    device: torch.device
    timeout_s: float
    node_of: tuple[int, ...]


def imported(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch_norm: str, outputs: Sequence[str]
) -> tuple[OperatorGraph, Outputs | None]:
    """Return the module's graph, and how the outputs follow from it; the module's training flags are put back.

    Raises:
        ImportFailure: the module cannot be exported, or has no such outputs.
    """
    from graph.importer import import_module, import_with_outputs

    flags = [(part, part.training) for part in module.modules()]
    name = type(module).__name__
    try:
        if outputs:
            return import_with_outputs(module, args, kwargs, outputs, name=name, batch_norm=batch_norm)
        return import_module(module, args, kwargs, name=name, batch_norm=batch_norm), None
    finally:
        for part, flag in flags:
            part.training = flag
