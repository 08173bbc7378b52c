"""What a training loop gives to a step: checked against the example, and the same on every rank.

The first batch is compared whole. After that each rank adds one number that stands for its batch to the sum of the
loss, which is made anyway, so that all ranks notice in the same step where one was given something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graph.errors import RuntimeFailure, UsageError
from graph.operators import OperatorGraph
from runtime.fingerprints import fingerprint, fingerprints
from runtime.ranks import gather_everywhere

# What a rank adds whose batch does not fit; fingerprints are not negative.
UNFIT = -1.0

# Arguments of `Trainer.backward` itself, which a module can therefore not have as keywords.
RESERVED = frozenset({"scale", "scaler"})


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank was given for a step: tensors by the graph's names, the scale of the loss; or why it refuses."""

    inputs: dict[str, torch.Tensor]
    scale: float
    problem: RuntimeFailure | None

    def mark(self, device: torch.device) -> torch.Tensor:
        """Return the number by which ranks notice that they were given different things."""
        if self.problem is not None:
            return torch.tensor(UNFIT)
        return fingerprint({**self.inputs, "scale": torch.tensor(self.scale, dtype=torch.float64)}, device)


def checked_scale(scale: float) -> float:
    """Return the scale of a loss.

    Raises:
        RuntimeFailure: it is no finite number.
    """
    try:
        number = float(scale)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RuntimeFailure(f"scale: is {_short(scale)}, must be a finite number; pass 1 / n for n batches")
    return number


def require_free(keywords: Iterable[str]) -> None:
    """Refuse keywords of a module that `Trainer.backward` takes for itself.

    Raises:
        UsageError: there is one.
    """
    taken = sorted(RESERVED.intersection(keywords))
    if taken:
        raise UsageError(
            f"inputs: {taken[0]} is a keyword of the module and an argument of backward, must be one of them; pass it "
            "to the module by position"
        )


class Inputs:
    """The example's structure, shapes and numbers, against which each batch is checked."""

    def __init__(self, graph: OperatorGraph, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._graph = graph
        leaves, self._structure = pytree.tree_flatten(example)
        self._fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch by the graph's names.

        Raises:
            RuntimeFailure: the batch differs from the example in structure, shape, dtype or a number.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if structure != self._structure:
            raise RuntimeFailure(
                f"inputs: are {len(args)} and keywords {sorted(kwargs)} of another structure than the example, must "
                "be nested as it; pass what the module was given in parallelize"
            )
        tensors: dict[str, torch.Tensor] = {}
        for position, (leaf, fixed) in enumerate(zip(leaves, self._fixed, strict=True)):
            if fixed is None and isinstance(leaf, torch.Tensor):
                tensors[f"input.{len(tensors)}"] = leaf
            elif isinstance(leaf, torch.Tensor) or leaf != fixed:
                raise RuntimeFailure(
                    f"inputs: argument {position} is {_short(leaf)}, must be {_short(fixed)} as in the example; "
                    "call parallelize again with the new value"
                )
        for name in self._graph.inputs:
            spec = self._graph.value_by_name[name].spec
            tensor = tensors[name]
            if tuple(tensor.shape) != spec.shape:
                raise RuntimeFailure(
                    f"inputs: {name} has shape {tuple(tensor.shape)}, must have {spec.shape} as in the example; drop a "
                    "batch that is not full (drop_last=True), or pad it"
                )
            if tensor.dtype is not getattr(torch, spec.dtype):
                raise RuntimeFailure(
                    f"inputs: {name} has dtype {tensor.dtype}, must have torch.{spec.dtype} as in the "
                    "example; convert it"
                )
        return tensors


def _short(item: object) -> str:
    text = f"a tensor of shape {tuple(item.shape)}" if isinstance(item, torch.Tensor) else repr(item)
    return text if len(text) <= 80 else text[:77] + "..."


def require_same(batch: Batch) -> None:
    """Check that every rank was given the same batch, and that on none there is a problem. All ranks must call it.

    Raises:
        RuntimeFailure: the same on all ranks.
    """
    own = None if batch.problem is None else str(batch.problem)
    told = gather_everywhere((own, batch.scale, fingerprints(batch.inputs)))
    for rank, (reason, _, _) in enumerate(told):
        if reason is not None:
            alike = all(other == reason for other, _, _ in told)
            raise RuntimeFailure(reason if alike else f"rank {rank}: {reason}")
    _, first_scale, first = told[0]
    for rank, (_, scale, of_rank) in enumerate(told):
        if scale != first_scale:
            raise RuntimeFailure(
                f"scale: of rank {rank} is {scale:g}, must be that of rank 0, {first_scale:g}; pass the same everywhere"
            )
        for name, value in of_rank.items():
            if value != first[name]:
                raise RuntimeFailure(
                    f"inputs: {name} of rank {rank} differs from that of rank 0, must be the same whole batch on "
                    "every rank; seed the data loader alike everywhere and use no distributed sampler"
                )
