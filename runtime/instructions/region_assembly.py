"""How an assembly is put together from its pieces, and how its gradient comes apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graph.intervals import Region, shape, volume
from runtime.instructions.selections import Selection


class Recipe:
    """Builds a region out of pieces of it; pieces over the same region are partial sums and add up.

    Three ways, the cheapest that fits: one sum; a concatenation along one dim; writing part by part.
    """

    __slots__ = ("_groups", "_order", "_targets", "_tiling", "pieces", "shape")

    def __init__(self, region: Region, pieces: Sequence[Region], device: torch.device) -> None:
        """Prepare the assembly of `region` from `pieces`, in the plan's order."""
        self.shape = shape(region)
        self.pieces = tuple(Selection(piece, region, device) for piece in pieces)
        groups: dict[Region, list[int]] = {}
        for position, piece in enumerate(pieces):
            groups.setdefault(piece, []).append(position)
        self._groups = tuple(tuple(members) for members in groups.values())
        self._targets = tuple(self.pieces[members[0]] for members in self._groups)
        covered = sum(volume(piece) for piece in groups) == volume(region)
        self._tiling = self._tiled_dim() if covered else None
        self._order: tuple[int, ...] = ()
        if self._tiling is not None:
            dim = self._tiling
            starts = [_start(target, dim) for target in self._targets]
            self._order = tuple(sorted(range(len(starts)), key=starts.__getitem__))

    def _tiled_dim(self) -> int | None:
        """Return the one dim along which the groups are contiguous slices of the region, if there is one."""
        dims = {dim for target in self._targets for dim, _, _ in target.narrowed}
        if len(dims) != 1 or any(target.indexed for target in self._targets):
            return None
        return dims.pop()

    def build(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the region; it may be `pieces[0]` itself."""
        sums = [_total([pieces[position] for position in members]) for members in self._groups]
        if len(sums) == 1 and self._targets[0].whole:
            return sums[0]
        if self._tiling is not None:
            return torch.cat([sums[position] for position in self._order], self._tiling)
        result = pieces[0].new_zeros(self.shape)
        for target, part in zip(self._targets, sums, strict=True):
            target.put(result, part)
        return result


def _start(selection: Selection, dim: int) -> int:
    return next((start for narrowed, start, _ in selection.narrowed if narrowed == dim), 0)


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    result = parts[0] + parts[1]
    for part in parts[2:]:
        result.add_(part)
    return result


class _Assemble(torch.autograd.Function):
    """An assembly of local tensors as one differentiable step; its backward writes each gradient once."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, selections: Sequence[Selection], *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.recipe = recipe
        ctx.selections = selections
        ctx.shapes = [source.shape for source in sources]
        parts = [selection.take(source) for selection, source in zip(selections, sources, strict=True)]
        return recipe.build(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        results: list[torch.Tensor | None] = [None, None]
        for position, (selection, sizes) in enumerate(zip(ctx.selections, ctx.shapes, strict=True)):
            part = None
            if ctx.needs_input_grad[2 + position]:
                part = ctx.recipe.pieces[position].take(gradient)
                if not selection.whole:
                    padded = gradient.new_zeros(sizes)
                    selection.put(padded, part)
                    part = padded
            results.append(part)
        return tuple(results)


def assemble(
    recipe: Recipe, selections: Sequence[Selection], sources: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the assembly of parts of local tensors; differentiable with respect to them."""
    if len(sources) == 1 and recipe.pieces[0].whole:
        return selections[0].take(sources[0])
    result: torch.Tensor = _Assemble.apply(recipe, selections, *sources)  # type: ignore[no-untyped-call]
    return result
