"""The batches of a training loop: checked against the example, and the same on every rank.

The first batch is compared whole. After that each rank adds a fingerprint of its batch to the sum of the loss, which
is made anyway, so that all ranks notice a different batch in the same step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graph.errors import RuntimeFailure, UsageError
from graph.operators import OperatorGraph
from runtime.execution.fingerprints import fingerprint, fingerprints
from runtime.ranks.ranks import gather_everywhere

# The mark of a batch that does not fit; fingerprints are not negative. Lower numbers are marks of other sizes.
UNFIT = -1.0

# Arguments of `Trainer.backward` itself, which a module can therefore not have as keywords.
RESERVED = frozenset({"scale", "scaler"})

# Each rank is given the same whole batch, or samples of its own, as a DistributedSampler deals them out.
WHOLE = "whole"
SHARDED = "sharded"


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of a rank for a step: tensors by the graph's names, the scale of the loss; or why it is refused.

    shard_dims: for each input of which the rank was given its own shard, the dim along which it is one.
    shapes: of the whole inputs, in a smaller batch than the example's. Such a batch fits if all ranks have one of these
        shapes; `problem` is the error if not.
    """

    inputs: dict[str, torch.Tensor]
    shard_dims: dict[str, int]
    scale: float
    problem: RuntimeFailure | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def replicated(self) -> dict[str, torch.Tensor]:
        """The inputs that must be the same on all ranks."""
        return {name: tensor for name, tensor in self.inputs.items() if name not in self.shard_dims}

    def mark(self, device: torch.device) -> torch.Tensor:
        """Return the number by which ranks notice that their batches differ."""
        if self.shapes:
            return torch.tensor(UNFIT - 1 - zlib.crc32(repr(self.shapes).encode()), dtype=torch.float64)
        if self.problem is not None:
            return torch.tensor(UNFIT)
        return self.fingerprint(device)

    def fingerprint(self, device: torch.device) -> torch.Tensor:
        """Return the fingerprint of the tensors and the scale that must be the same on all ranks."""
        tensors = self.replicated
        if self.scale != 1.0:
            tensors["scale"] = torch.tensor(self.scale, dtype=torch.float64)
        return fingerprint(tensors, device)


def refused(problem: RuntimeFailure) -> Batch:
    """Return the batch of a rank that refuses its inputs."""
    return Batch({}, {}, 1.0, problem)


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


def require_kind(batches: str) -> None:
    """Refuse an unknown kind of batches.

    Raises:
        UsageError: it is unknown.
    """
    if batches not in (WHOLE, SHARDED):
        raise UsageError(f'batches: is {batches!r}, must be "{WHOLE}" or "{SHARDED}"; choose one of them')


class ExampleInputs:
    """The example's structure, shapes and numbers, against which each batch is checked."""

    def __init__(
        self, graph: OperatorGraph, example: tuple[tuple[Any, ...], dict[str, Any]], shards: int = 1
    ) -> None:
        """Note the example, and of how many ranks' shards in their order a batch is made."""
        self._specs = {name: graph.value_by_name[name].spec for name in graph.inputs}
        self._shards = shards
        leaves, self._structure = pytree.tree_flatten(example)
        self._fixed = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._devices = [leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any], scale: float) -> Batch:
        """Return a batch.

        Raises:
            RuntimeFailure: it differs from the example in structure, shape, dtype or a number.
        """
        tensors = self._tensors(args, kwargs)
        shard_dims: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        parts: set[Fraction] = set()
        problem = None
        for name, spec in self._specs.items():
            sizes, wanted = tuple(tensors[name].shape), spec.shape
            dim, size = self._batch_dim(sizes, wanted)
            if sizes != wanted:
                if dim >= 0 and self._shards > 1:
                    shard_dims[name] = dim
                shapes[name] = (*wanted[:dim], size, *wanted[dim + 1 :]) if dim >= 0 else ()
                parts.add(Fraction(size, wanted[dim]) if dim >= 0 else Fraction(0))
            if problem is None and sizes != wanted and (dim < 0 or size < wanted[dim]):
                part = f" or a 1/{self._shards} of it along one dim," if self._shards > 1 else ""
                problem = RuntimeFailure(
                    f"inputs: {name} has shape {sizes}, must have {wanted}{part} as in the example; drop a batch that "
                    "is not full (drop_last=True), or pad it"
                )
            if tensors[name].dtype is not getattr(torch, spec.dtype):
                raise RuntimeFailure(
                    f"inputs: {name} has dtype {tensors[name].dtype}, must have torch.{spec.dtype} as in the "
                    "example; convert it"
                )
        if self._shards > 1 and not shapes:
            raise RuntimeFailure(
                f'inputs: all have the whole example\'s shapes, with batches="{SHARDED}" some must be a '
                f'1/{self._shards} of it; use a DistributedSampler, or pass batches="{WHOLE}"'
            )
        if problem is None:
            return Batch(tensors, shard_dims, scale)
        # All inputs with samples must have as many fewer.
        if len(parts) > 1 or Fraction(0) in parts:
            raise problem
        return Batch(tensors, shard_dims, scale, problem, shapes)

    def example(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return zeros in the example's structure and on its devices, of other shapes where these are given."""
        tensors = (
            torch.zeros(shapes.get(name, spec.shape), dtype=getattr(torch, spec.dtype), device=device)
            for (name, spec), device in zip(self._specs.items(), self._devices, strict=True)
        )
        leaves = [next(tensors) if fixed is None else fixed for fixed in self._fixed]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs

    def zeros(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return zeros of the example's shapes."""
        return {
            name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for name, spec in self._specs.items()
        }

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch by the graph's names.

        Raises:
            RuntimeFailure: the batch differs from the example in structure, or in a number.
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
        return tensors

    def _batch_dim(self, sizes: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, int]:
        """Return the one dim along which a rank's tensor has not the example's size, and the whole batch's size of it.

        The dim is -1 where there is no such dim, or the batch is larger than the example.
        """
        if len(sizes) != len(whole):
            return -1, 0
        differing = [dim for dim, (size, all_) in enumerate(zip(sizes, whole, strict=True)) if size != all_]
        if len(differing) != 1:
            return -1, 0
        dim = differing[0]
        size = sizes[dim] * self._shards
        return (dim, size) if 0 < size <= whole[dim] else (-1, 0)


def _short(item: object) -> str:
    text = f"a tensor of shape {tuple(item.shape)}" if isinstance(item, torch.Tensor) else repr(item)
    return text if len(text) <= 80 else text[:77] + "..."


def require_same(batch: Batch) -> None:
    """Check that every rank was given the same batch, and that on none there is a problem. All ranks must call it.

    A smaller batch than the example's is none, if all ranks have it.

    Raises:
        RuntimeFailure: the same on all ranks.
    """
    own = None if batch.problem is None else str(batch.problem)
    reports = gather_everywhere(
        (own, batch.shapes, batch.scale, batch.shard_dims, fingerprints(batch.replicated))
    )
    first_shapes, first_scale, first_dims, first = reports[0][1:]
    if not first_shapes or any(shapes != first_shapes for _, shapes, *_ in reports):
        # A rank whose batch is refused in any case says more than one whose batch is merely smaller.
        for rank, (reason, *_) in sorted(
            enumerate(reports), key=lambda fingerprints_of_rank: bool(fingerprints_of_rank[1][1])
        ):
            if reason is not None:
                alike = all(other == reason for other, *_ in reports)
                raise RuntimeFailure(reason if alike else f"rank {rank}: {reason}")
    for rank, (_, _, scale, shard_dims, fingerprints_of_rank) in enumerate(reports):
        if scale != first_scale:
            raise RuntimeFailure(
                f"scale: of rank {rank} is {scale:g}, must be that of rank 0, {first_scale:g}; pass the same everywhere"
            )
        for name in sorted({*shard_dims, *first_dims}):
            if shard_dims.get(name) != first_dims.get(name):
                raise RuntimeFailure(
                    f"inputs: {name} of rank {rank} is another shard than that of rank 0, must be split along the same "
                    "dim, or whole, on every rank; give all ranks' samplers the same number of samples"
                )
        for name, value in fingerprints_of_rank.items():
            if value != first[name]:
                advice = (
                    "must be the same, as it is no shard; pass this rank's part of it, or the same on every rank"
                    if first_dims
                    else "must be the same whole batch on every rank; seed the data loader alike everywhere and use no "
                    f'distributed sampler, or pass batches="{SHARDED}"'
                )
                raise RuntimeFailure(f"inputs: {name} of rank {rank} differs from that of rank 0, {advice}")
