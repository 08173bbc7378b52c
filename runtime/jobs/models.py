"""The factory of a job's module, and the tensors of its graph that the module holds."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graph.errors import RuntimeFailure, UsageError
from graph.operators import OperatorGraph, ValueKind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from runtime.execution.executor import InitialTensors

Built = tuple["nn.Module", tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A factory, "package.module:function", and its keywords; every process builds the same module from it."""

    factory: str
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> Built:
        """Return (module, args, kwargs), initialized from `seed`, on the CPU.

        Raises:
            UsageError: there is no such factory.
        """
        module_name, _, function_name = self.factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(
                f"model {self.factory}: cannot be imported ({error}), must be package.module:function; check the name"
            ) from error
        with _seeded(seed):
            built: Built = factory(**self.keywords)
        return built


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every generator that a factory may draw from, so that all ranks build the same; restore them after."""
    import numpy as np
    import torch

    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def tensors_of(graph: OperatorGraph, built: Built, micro_batches: int = 1) -> InitialTensors:
    """Return the parameters, buffers and inputs of `graph` out of the module that it was imported from.

    micro_batches: of a step, for all of which the module's inputs are; the graph is of one.

    Raises:
        RuntimeFailure: the module lacks one of them, or its shape differs.
    """
    from runtime.execution.executor import InitialTensors

    module = built[0]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    first, *further = (
        _matching(graph, ValueKind.INPUT, input_tensors(args, kwargs))
        for _, args, kwargs in split_batch(graph, built, micro_batches)
    )
    return InitialTensors(
        parameters=_matching(graph, ValueKind.WEIGHT, parameters),
        # A frozen parameter is a buffer of the graph.
        buffers=_matching(graph, ValueKind.BUFFER, {**parameters, **buffers}),
        inputs=first,
        further_inputs=tuple(further),
    )


def split_batch(graph: OperatorGraph, built: Built, count: int) -> list[Built]:
    """Return a module with the inputs of each of `count` micro-batches, for one of which the graph is.

    An input is cut along the one dim that is `count` times the graph's; one of the graph's own shape goes to all.

    Raises:
        RuntimeFailure: an input has another shape.
    """
    import torch
    from torch.utils import _pytree as pytree

    module, args, kwargs = built
    if count == 1:
        return [built]
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    shapes = {value.name: value.spec.shape for value in graph.values if value.kind is ValueKind.INPUT}
    by_batch: list[list[Any]] = [[] for _ in range(count)]
    position = 0
    for leaf in leaves:
        parts: list[Any] = [leaf] * count
        if isinstance(leaf, torch.Tensor):
            name = f"input.{position}"
            position += 1
            parts = _parts_of(name, leaf, shapes.get(name), count)
        for of_batch, part in zip(by_batch, parts, strict=True):
            of_batch.append(part)
    return [(module, *pytree.tree_unflatten(of_batch, spec)) for of_batch in by_batch]


def _parts_of(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...] | None, count: int
) -> list[torch.Tensor]:
    whole = tuple(tensor.shape)
    if shape is None or whole == shape:
        return [tensor] * count
    dims = [dim for dim, (size, part) in enumerate(zip(whole, shape, strict=False)) if size != part]
    if len(whole) != len(shape) or len(dims) != 1 or whole[dims[0]] != count * shape[dims[0]]:
        raise RuntimeFailure(
            f"input {name}: has shape {whole} for {count} micro-batches of {shape}, must have {count} times as many "
            "samples and else the same; let the factory take batch_size"
        )
    return list(tensor.chunk(count, dims[0]))


def input_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among a module's arguments as the graph names them: by position, keywords last."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {f"input.{position}": tensor for position, tensor in enumerate(tensors)}


def _matching(
    graph: OperatorGraph, kind: ValueKind, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    result = {}
    for value in graph.values:
        if value.kind is not kind:
            continue
        tensor = tensors.get(value.name)
        actual = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
        if tensor is None or tuple(tensor.shape) != value.spec.shape:
            raise RuntimeFailure(
                f"{kind.value} {value.name}: the module has {actual}, must have shape {value.spec.shape}; "
                "build it with the sizes that the graph was imported with"
            )
        result[value.name] = tensor.detach()
    return result
