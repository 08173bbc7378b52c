"""Tensors without data on the CPU in place of those on meta, so that a forward runs as it does in training.

On meta the tensors that a forward makes itself (a mask, zeros) would lie on the CPU, and meet those on meta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map


@contextmanager
def without_data(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Put stand-ins for all parameters and buffers on meta into `module`, and yield those of its inputs.

    The module has its own tensors again afterwards. Where nothing is on meta, nothing changes.
    """
    given = (tuple(args), dict(kwargs))
    slots: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (tensors, name, tensor)
        for part in module.modules()
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]
    if not slots and not _any_meta(given):
        yield given
        return
    made: dict[int, torch.Tensor] = {}  # a tied tensor has one stand-in

    def stand_in(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or not item.is_meta:
            return item
        if id(item) not in made:
            made[id(item)] = _on_cpu(item)
        return made[id(item)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            for tensors, name, tensor in slots:
                tensors[name] = stand_in(tensor)
            yield tree_map(stand_in, given)
        finally:
            for tensors, name, tensor in slots:
                tensors[name] = tensor


def _any_meta(given: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(given)
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor on the CPU; within a fake mode it takes no memory."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, requires_grad=tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)
