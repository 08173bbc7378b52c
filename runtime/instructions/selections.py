"""Parts of dense tensors, prepared once so that a training step does no region arithmetic.

A region with one interval a dim is a chain of `narrow`s, so reading it copies nothing. A dim with several intervals
(heads inside a fused QKV) is read by `index_select`, whose indexes are made once.
"""

from __future__ import annotations

import torch

from graph.intervals import Region, full_region, relative_region, shape


class Selection:
    """A region of a dense tensor that holds a larger one: read it, write it, or add to it."""

    __slots__ = ("_mesh", "indexed", "narrowed", "shape", "whole")

    def __init__(self, region: Region, within: Region, device: torch.device) -> None:
        """Prepare `region` of a tensor that holds `within`, of which it must be a part."""
        outer = shape(within)
        self.shape = shape(region)
        self.narrowed: list[tuple[int, int, int]] = []
        self.indexed: list[tuple[int, torch.Tensor]] = []
        for dim, (indexes, size) in enumerate(zip(relative_region(region, within), outer, strict=True)):
            if len(indexes) > 1:
                parts = [torch.arange(start, stop) for start, stop in indexes]
                self.indexed.append((dim, torch.cat(parts).to(device)))
            elif not indexes:
                self.narrowed.append((dim, 0, 0))
            elif indexes[0] != (0, size):
                start, stop = indexes[0]
                self.narrowed.append((dim, start, stop - start))
        self.whole = not self.narrowed and not self.indexed
        self._mesh = self._open_mesh(device) if len(self.indexed) > 1 else ()

    def _open_mesh(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Index tensors for all dims, each shaped to broadcast along its own: several indexed dims at once."""
        chosen = dict(self.indexed)
        mesh = []
        for dim, size in enumerate(self.shape):
            indexes = chosen.get(dim, torch.arange(size, device=device))
            mesh.append(indexes.reshape([-1 if other == dim else 1 for other in range(len(self.shape))]))
        return tuple(mesh)

    @property
    def is_view(self) -> bool:
        """True where `take` returns a view."""
        return not self.indexed

    def _narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        for dim, start, length in self.narrowed:
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the region of `tensor`; a view where that is possible."""
        tensor = self._narrow(tensor)
        for dim, indexes in self.indexed:
            tensor = tensor.index_select(dim, indexes)
        return tensor

    def put(self, tensor: torch.Tensor, part: torch.Tensor) -> None:
        """Write `part` into the region of `tensor`."""
        target = self._narrow(tensor)
        if not self.indexed:
            target.copy_(part)
        elif len(self.indexed) == 1:
            dim, indexes = self.indexed[0]
            target.index_copy_(dim, indexes, part)
        else:
            target.index_put_(self._mesh, part)

    def add(self, tensor: torch.Tensor, part: torch.Tensor) -> None:
        """Add `part` to the region of `tensor`."""
        target = self._narrow(tensor)
        if not self.indexed:
            target.add_(part)
        elif len(self.indexed) == 1:
            dim, indexes = self.indexed[0]
            target.index_add_(dim, indexes, part)
        else:
            target.index_put_(self._mesh, part, accumulate=True)


def selection_of(region: Region, sizes: tuple[int, ...], device: torch.device) -> Selection:
    """Return the selection of `region` from a whole tensor of shape `sizes`."""
    return Selection(region, full_region(sizes), device)
