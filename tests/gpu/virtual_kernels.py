"""Operators on tensors of virtual GPUs: each computes at once, on the CPU, and issues a kernel of the time it takes.

What a GPU refuses is refused: tensors of several devices in one operator, and operands that its kernels do not take
(`tests.gpu.preconditions`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.kernels import CUDA_ONLY
from tests.gpu.native_functions import has_cuda_kernel
from tests.gpu.preconditions import check_preconditions
from tests.gpu.virtual_device import gpu_of, is_pinned, virtual

# Their results are the host's.
_READ_BY_HOST = frozenset(
    {
        *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"),
        *("unique_consecutive", "_unique2", "unique_dim", "bincount", "repeat_interleave"),
    }
)
# They run no kernel.
_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh"})


# They make tensors of given sizes.
_MADE = frozenset({"zeros", "ones", "full", "rand", "randn"})
# Their indexes may be on the host.
_ANY_INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class Kernels(TorchDispatchMode):
    """Executes operators on the CPU, and issues a kernel for each on the GPU of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.rpartition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {gpu_of(tensor) for tensor in tensors if tensor.dim() or gpu_of(tensor) is not None}
        target, indexes = kwargs.get("device"), places - {None}
        if places:
            virtual.last = next(iter(indexes), None)
        if target is not None and target.type == "cpu" and torch._C._current_graph_task_id() != -1:
            # Made by a formula of autograd's, in C++, which takes the tensors' device from themselves.
            index = virtual.last
        elif target is not None:
            kwargs["device"] = torch.device("cpu") if target.type == "cuda" else target
            index = virtual._index(target) if target.type == "cuda" else None
        else:
            index = next(iter(indexes), None)
        if name in ("copy_", "_to_copy", "_foreach_copy_"):
            index = self._copy(
                name, tensors, index, non_blocking=bool(kwargs.get("non_blocking", args[2:3] == (True,)))
            )
        elif len(places) > 1 and indexes and name not in _ANY_INDEXES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {sorted(map(str, places))} in {name}"
            )
        if indexes:
            _check_has_kernel(func)
            check_preconditions(name, func, args, kwargs)
        elements = _made_elements(name, args, kwargs) + sum(tensor.numel() for tensor in tensors)
        if index is not None and elements > virtual.speeds.most_computed:
            result = _without_computing(func, args, kwargs)
        else:
            result = CUDA_ONLY.get(name, func)(*args, **kwargs)
        if index is None:
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            virtual.keep(tensor, index)
        if not (func.is_view or name in _NO_KERNEL or func.namespace in ("c10d", "prim")):
            seconds = virtual.speeds.names.get(name)
            if seconds is None:
                seconds = virtual.speeds.kernel_s
                if virtual.speeds.missed_bytes_per_s:
                    missed = virtual.missed_bytes(index, tensors, made)
                    seconds += missed / virtual.speeds.missed_bytes_per_s
                if virtual.speeds.memory_bytes_per_s:
                    moved = sum(tensor.nbytes for tensor in (*tensors, *made))
                    seconds += moved / virtual.speeds.memory_bytes_per_s
            virtual.launch(index, name, seconds)
        if name in _READ_BY_HOST or (name in _ANY_INDEXES and _has_mask(args[1:2])):
            virtual.wait_for_host(index, name)
        return result

    def _copy(
        self, name: str, tensors: list[torch.Tensor], target: int | None, *, non_blocking: bool
    ) -> int | None:
        """Return on which GPU a copy's result is; the host waits for a copy from its own memory that is not pinned."""
        if name == "_to_copy":
            source = gpu_of(tensors[0])
            made = target
        else:
            made, source = gpu_of(tensors[0]), gpu_of(tensors[-1])
        pinned = is_pinned(tensors[-1]) and tensors[-1].is_contiguous()
        if source != made and not (non_blocking and (source is not None or pinned)):
            virtual.wait_for_host(
                made if made is not None else source or 0, f"{name} between host and device"
            )
        return made


def _check_has_kernel(func: Any) -> None:
    """Raise torch's error where an operator has no kernel for CUDA."""
    schema = func._schema
    name = ".".join(filter(None, (schema.name.partition("::")[2], schema.overload_name)))
    if func.namespace == "aten" and not has_cuda_kernel(name):
        raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the 'CUDA' backend")


def _made_elements(name: str, args: Any, kwargs: Any) -> int:
    """Return how many numbers an operator without operands makes, where they are no indexes."""
    dtype = kwargs.get("dtype")
    return math.prod(args[0]) if name in _MADE and (dtype is None or dtype.is_floating_point) else 0


def _has_mask(indexes: Any) -> bool:
    """Return whether positions are those where a mask is true, so that the host must count them."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool for leaf in tree_leaves(indexes))


def _without_computing(func: Any, args: Any, kwargs: Any) -> Any:
    """Return tensors such as an operator makes, with any numbers."""
    if func.is_view:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        return kwargs.get("out", args[0]) if func._schema.returns else None

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)

    kwargs = {
        **tree_map(described, kwargs),
        **({"device": torch.device("meta")} if "device" in kwargs else {}),
    }
    try:
        return tree_map(made, func(*tree_map(described, args), **kwargs))
    except NotImplementedError:
        return func(*args, **kwargs)
