"""Arguments of an exported call, completed from the operator's schema."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graph.errors import ImportFailure
from graph.importing.building import Ref
from graph.operators import Argument

# They say where and how memory lies, which a plan decides anew.
DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})


def complete_arguments(node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by schema name, defaults filled in, still holding fx nodes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    result: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name in DROPPED:
            continue
        if position < len(node.args):
            result[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            result[argument.name] = node.kwargs[argument.name]
        else:
            result[argument.name] = argument.default_value if argument.has_default_value() else None
    return result


def plain_argument(value: Any, model: str, where: str) -> Argument:
    """Return an argument without torch objects: dtypes by name, lists as tuples; `Ref`s stay.

    Raises:
        ImportFailure: it is of a kind that a graph cannot hold.
    """
    if value is None or isinstance(value, (bool, int, float, str, Ref)):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list)):
        return tuple(plain_argument(item, model, where) for item in value)
    raise ImportFailure(
        f"model {model}: {where} has an argument of type {type(value).__name__}, must be numbers, text or tensors; "
        "make it constant"
    )
