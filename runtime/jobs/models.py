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


def tensors_of(graph: OperatorGraph, built: Built) -> InitialTensors:
    """Return the parameters, buffers and inputs of `graph` out of the module that it was imported from.

    Raises:
        RuntimeFailure: the module lacks one of them, or its shape differs.
    """
    from runtime.execution.executor import InitialTensors

    module, args, kwargs = built
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return InitialTensors(
        parameters=_matching(graph, ValueKind.WEIGHT, parameters),
        # A frozen parameter is a buffer of the graph.
        buffers=_matching(graph, ValueKind.BUFFER, {**parameters, **buffers}),
        inputs=_matching(graph, ValueKind.INPUT, input_tensors(args, kwargs)),
    )


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
