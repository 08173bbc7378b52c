"""The specs of tensors of torch's."""

from __future__ import annotations

import torch

from graph.errors import ImportFailure
from graph.operators import ITEM_BYTES, TensorSpec


def spec_of(tensor: object, model: str, where: str) -> TensorSpec:
    """Return the spec of a (fake) tensor.

    Raises:
        ImportFailure: it is no tensor but a number read out of one, its sizes depend on data, or its dtype is not
            supported.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ImportFailure(
            f"model {model}: {where} is a number that depends on data, must be a tensor; avoid item() in its forward"
        )
    if tensor.layout is not torch.strided:
        raise ImportFailure(
            f"model {model}: {where} is sparse, must be dense; pass it by to_dense(), or its indices and values"
        )
    shape = []
    for size in tensor.shape:
        if not isinstance(size, int):
            raise ImportFailure(
                f"model {model}: {where} has a size that depends on data, must be constant; "
                "avoid masks and nonzero in its forward"
            )
        shape.append(int(size))
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ImportFailure(
            f"model {model}: {where} has dtype {dtype}, must be one of {', '.join(ITEM_BYTES)}; convert it"
        )
    return TensorSpec(tuple(shape), dtype)
