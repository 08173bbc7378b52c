"""The modules of a network that single operators of its graph are, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from graph.operators import Operator, OperatorGraph, Slot

if TYPE_CHECKING:
    from torch import nn

# Operators that are the whole forward of a module, and the argument that is its input.
MODULES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "aten.linear.default": (("Linear",), "input"),
    "aten.embedding.default": (("Embedding",), "indices"),
    "aten.layer_norm.default": (("LayerNorm",), "input"),
    "aten.rms_norm.default": (("RMSNorm",), "input"),
    "aten.group_norm.default": (("GroupNorm",), "input"),
    "aten.conv1d.default": (("Conv1d",), "input"),
    "aten.conv2d.default": (("Conv2d",), "input"),
    "aten.conv3d.default": (("Conv3d",), "input"),
}


class Modules:
    """The modules that a graph's operators are, and their parameters' names."""

    def __init__(self, graph: OperatorGraph, module: nn.Module) -> None:
        self.module = module
        self._graph = graph
        self._first: dict[int, str] = {}
        tied = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first = self._first.setdefault(id(parameter), name)
            if first != name:
                tied.append((name, first))
        self.tied = tuple(tied)
        self.owners = {
            index: self._owners(operator)
            for index, operator in enumerate(graph.operators)
            if operator.target in MODULES
        }

    def _owners(self, operator: Operator) -> tuple[str, ...]:
        """Return the paths of the modules whose forward an operator may be: their class and parameters fit."""
        kinds, _ = MODULES[operator.target]
        wanted = {
            name: operator.inputs[value.index]
            for name, value in operator.arguments
            if name in ("weight", "bias") and isinstance(value, Slot)
        }
        paths = []
        for path, module in self.module.named_modules():
            own = {
                name: self._first[id(parameter)] for name, parameter in module.named_parameters(recurse=False)
            }
            if own and own == wanted and any(base.__name__ in kinds for base in type(module).__mro__):
                paths.append(path)
        return tuple(paths)

    def first_name(self, parameter: nn.Parameter) -> str:
        """Return the name under which the graph knows a parameter."""
        return self._first[id(parameter)]

    def kind(self, path: str) -> str:
        """Return the name of PyTorch's class of a module that `_owners` found."""
        kinds = {kind for names, _ in MODULES.values() for kind in names}
        return next(
            base.__name__ for base in type(self.module.get_submodule(path)).__mro__ if base.__name__ in kinds
        )

    def blocks(self) -> tuple[str, ...]:
        """Return the layers of the module that fully_shard may gather one by one: items of its lists of modules.

        An item that is itself a container without a forward stands for its own items. A layer is left to the module
        itself where one of its weights is used outside of it.
        """
        from torch import nn

        lists = [
            path
            for path, container in self.module.named_modules()
            if path and isinstance(container, nn.ModuleList | nn.Sequential)
        ]
        outermost = [path for path in lists if not any(path.startswith(f"{outer}.") for outer in lists)]
        return tuple(layer for path in outermost for layer in self._layers(path))

    def _layers(self, path: str) -> Iterator[str]:
        """Yield the layers of a list of modules, of those in it that only hold modules their layers."""
        from torch import nn

        for name, layer in self.module.get_submodule(path).named_children():
            if isinstance(layer, nn.ModuleList | nn.ModuleDict):
                yield from self._layers(f"{path}.{name}")
            elif any(True for _ in layer.parameters()) and self._stands_alone(f"{path}.{name}"):
                yield f"{path}.{name}"

    def _stands_alone(self, path: str) -> bool:
        inside = {
            self._first[id(parameter)] for _, parameter in self.module.get_submodule(path).named_parameters()
        }
        if any(
            (name in inside or first in inside)
            and not (name.startswith(f"{path}.") and first.startswith(f"{path}."))
            for name, first in self.tied
        ):
            return False
        for index, operator in enumerate(self._graph.operators):
            if inside.isdisjoint(operator.inputs):
                continue
            owners = self.owners.get(index, ())
            if not owners or not all(f"{owner}.".startswith(f"{path}.") for owner in owners):
                return False
        return True
