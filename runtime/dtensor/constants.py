"""Checks that a module computes a part of the samples as part of the whole, as data parallel ranks need it.

An exported graph has sizes and constants of its whole batch (positions, masks, a factor that is one over the batch). On
a rank they are made anew, for fewer samples. So the module is imported once more with one rank's part, and both graphs
must have the same operators and factors, and constants of which the part's own are every rank's part of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graph.operators import Operator, OperatorGraph
from graph.rules import DRAWING
from runtime.dtensor.mesh import Inexpressible

if TYPE_CHECKING:
    import torch
    from torch import nn


def constant_values(graph: OperatorGraph) -> frozenset[str]:
    """Return the constants: values that depend on no input, weight, buffer or random number."""
    names: set[str] = set()
    for operator in graph.operators:
        if names.issuperset(operator.inputs) and operator.target not in DRAWING:
            names.update(operator.outputs)
    return frozenset(names)


def check_part(
    graph: OperatorGraph,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_dims: Sequence[tuple[int, int]],
    degree: int,
) -> None:
    """Refuse a module that computes something else on one of `degree` parts of its samples.

    Args:
        graph: imported from `module` with `args` and `kwargs`.
        batch_dims: of the tensors among the inputs, those that are split: (position, dim).

    Raises:
        Inexpressible: an operator, a factor or a constant differs.
    """
    from torch.utils import _pytree as pytree

    from graph.importer import import_module

    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    positions = [index for index, leaf in enumerate(leaves) if _is_tensor(leaf)]
    for position, dim in batch_dims:
        leaves[positions[position]] = leaves[positions[position]].chunk(degree, dim)[0]
    part_args, part_kwargs = pytree.tree_unflatten(leaves, structure)
    part = import_module(module, part_args, part_kwargs, name=graph.name, batch_norm=graph.batch_norm)
    _check_operators(graph, part)
    _check_constants(graph, part, degree)


def _is_tensor(leaf: object) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor)


def _check_operators(graph: OperatorGraph, part: OperatorGraph) -> None:
    if [operator.target for operator in graph.operators] != [operator.target for operator in part.operators]:
        raise Inexpressible("the module has other operators for another batch size")
    for whole, own in zip(graph.operators, part.operators, strict=True):
        if _factors(whole) != _factors(own):
            raise Inexpressible(f"operator {whole.name} has a factor that depends on the batch size")


def _factors(operator: Operator) -> list[tuple[str, float]]:
    return [(name, value) for name, value in operator.arguments if isinstance(value, float)]


def _check_constants(graph: OperatorGraph, part: OperatorGraph, degree: int) -> None:
    whole, own = _evaluated(graph), _evaluated(part)
    for operator, counterpart in zip(graph.operators, part.operators, strict=True):
        if set(operator.outputs) <= whole.keys():
            continue
        for name, own_name in zip(operator.inputs, counterpart.inputs, strict=True):
            if name in whole and not _is_part(whole[name], own[own_name], degree):
                raise Inexpressible(
                    f"operator {operator.name} reads {name}, which depends on the place of a sample in its batch"
                )


def _is_part(whole: torch.Tensor, own: torch.Tensor, degree: int) -> bool:
    """Return whether `own` is `whole`, or each of its `degree` parts along one dim."""
    import torch

    differing = [dim for dim, (a, b) in enumerate(zip(whole.shape, own.shape, strict=True)) if a != b]
    parts = whole.chunk(degree, differing[0]) if len(differing) == 1 else (whole,)
    return all(torch.equal(part, own) for part in parts)


def _evaluated(graph: OperatorGraph) -> dict[str, torch.Tensor]:
    """Return the constants of a graph, computed on this machine's CPU."""
    import torch

    from profiler.operators import ExecutionContext
    from runtime.jobs.verify import execute

    context = ExecutionContext(seed=0, step=0, device=torch.device("cpu"))
    constants = constant_values(graph)
    values: dict[str, torch.Tensor] = {}
    for operator in graph.operators:
        if constants.issuperset(operator.outputs):
            degrees = (1,) * len(operator.space.axes)
            results = execute(graph, operator, degrees, [values[name] for name in operator.inputs], context)
            values.update(zip(operator.outputs, results, strict=True))
    return values
