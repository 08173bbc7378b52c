"""The styles of torch.distributed.tensor.parallel that express one dim of a mesh, module by module.

Along such a dim everything is a DTensor, also between modules: a reshape by heads or a mean then means what it means in
the plain module. Styles say where layouts change: at the borders of modules that hold weights. What a function between
two modules reads must therefore be what it is made as.

Source: PyTorch's torch.distributed.tensor.parallel; Megatron-LM (arXiv:1909.08053) for columns and rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph.operators import FLOATING, Operator, OperatorGraph, ValueKind
from runtime.dtensor.mesh import (
    PARTIAL,
    REPLICATE,
    Inexpressible,
    MeshLayout,
    Placement,
    PlacementKind,
    shard,
)
from runtime.dtensor.modules import MODULES, Modules

# The modules that SequenceParallel is meant for.
NORMALIZATIONS = frozenset({"LayerNorm", "RMSNorm"})

# A placement, one for each positional input (None: no tensor), or one for each keyword.
Layouts = Placement | tuple[Placement | None, ...] | Mapping[str, Placement] | int | bool


@dataclass(frozen=True, slots=True)
class Style:
    """A class of torch.distributed.tensor.parallel, and its keyword arguments."""

    name: str
    arguments: tuple[tuple[str, Layouts], ...]


@dataclass(frozen=True, slots=True)
class _ModuleCall:
    """How a module is called: its input as it arrives and as it is read, its output as made and as handed on."""

    arrives: Placement
    reads: Placement
    makes: Placement
    gives: Placement
    input_rank: int
    output_rank: int


class TensorDim:
    """The styles of all modules along one dim of the mesh."""

    def __init__(self, graph: OperatorGraph, layout: MeshLayout, dim: int, modules: Modules) -> None:
        self._graph = graph
        self._layout = layout
        self._dim = dim
        self._modules = modules
        self._given: dict[str, Placement] = {}

    def styles(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, Style], ...]:
        """Return the style of every module that needs one.

        Raises:
            Inexpressible: no styles express the layout.
        """
        calls: dict[str, _ModuleCall] = {}
        for name in self._graph.inputs:
            self._given[name] = self._input_placement(name)
        for index, operator in enumerate(self._graph.operators):
            if index in self._layout.everywhere:
                self._given.update(dict.fromkeys(operator.outputs, REPLICATE))
            elif self._modules.owners.get(index):
                call = self._call(index, operator)
                for path in self._modules.owners[index]:
                    if calls.setdefault(path, call) != call:
                        raise Inexpressible(f"module {path} is called with different layouts")
            else:
                self._check_function(index, operator)
                made = self._layout.outputs[index]
                self._given.update(
                    (name, placements[self._dim])
                    for name, placements in zip(operator.outputs, made, strict=True)
                )
        root = self._root(args, kwargs)
        styles = [] if root is None else [("", root)]
        for path, _ in self._modules.module.named_modules():
            if path in calls:
                style = self._style(path, calls[path])
                if style is not None:
                    styles.append((path, style))
        return tuple(styles)

    def split_by_vocabulary(self, styles: tuple[tuple[str, Style], ...]) -> tuple[str, ...]:
        """Return the modules among `styles` that are embeddings split by their vocabulary."""
        return tuple(
            path
            for path, style in styles
            if style.name == "RowwiseParallel" and self._modules.kind(path) == "Embedding"
        )

    def _readings(self, value: str) -> list[tuple[int, Placement]]:
        """Return (operator, placement) of all readers of a value, but the operators computed everywhere."""
        return [
            (index, self._layout.inputs[index][slot][self._dim])
            for index, slot in self._graph.consumers[value]
            if index not in self._layout.everywhere
        ]

    def _input_placement(self, name: str) -> Placement:
        """Return how an input is placed: as all read it, else whole, for modules to split."""
        wanted = {placement for _, placement in self._readings(name)}
        return wanted.pop() if len(wanted) == 1 else REPLICATE

    def _call(self, index: int, operator: Operator) -> _ModuleCall:
        argument = operator.argument(MODULES[operator.target][1])
        value = operator.inputs[argument.index]
        arrives = self._arriving(value)
        makes = self._layout.outputs[index][0][self._dim]
        gives = self._handed_on(operator.outputs[0], makes)
        self._given[operator.outputs[0]] = gives
        specs = self._graph.value_by_name
        return _ModuleCall(
            arrives,
            self._layout.inputs[index][argument.index][self._dim],
            makes,
            gives,
            len(specs[value].spec.shape),
            len(specs[operator.outputs[0]].spec.shape),
        )

    def _handed_on(self, value: str, made: Placement) -> Placement:
        """Return the layout of a module's output for its readers: that of functions, if there are any."""
        readings = self._readings(value)
        functions = {placement for index, placement in readings if not self._modules.owners.get(index)}
        if len(functions) > 1:
            raise Inexpressible(
                f"{value} is read as {' and as '.join(sorted(map(str, functions)))} by functions"
            )
        if functions:
            return functions.pop()
        if made == PARTIAL:
            wanted = {placement for _, placement in readings}
            return wanted.pop() if len(wanted) == 1 else REPLICATE
        return made

    def _arriving(self, name: str) -> Placement:
        """Return the layout in which a value arrives; a parameter that no module's style splits is whole."""
        if name in self._given:
            return self._given[name]
        read_by_module = any(self._modules.owners.get(index) for index, _ in self._graph.consumers[name])
        return self._layout.held[name][self._dim] if read_by_module else REPLICATE

    def _check_function(self, index: int, operator: Operator) -> None:
        """Refuse a function between modules that reads its inputs in other layouts than they have."""
        pairs = [
            (name, self._arriving(name), placements[self._dim], operand)
            for name, placements, operand in zip(
                operator.inputs, self._layout.inputs[index], operator.space.inputs, strict=True
            )
        ]
        splits = any(arrives == reads and reads.kind is PlacementKind.SHARD for _, arrives, reads, _ in pairs)
        for name, _, reads, _ in pairs:
            kind = self._graph.value_by_name[name].kind
            if kind in (ValueKind.WEIGHT, ValueKind.BUFFER) and reads != REPLICATE and not splits:
                raise Inexpressible(
                    f"operator {operator.name} splits {kind} {name} outside of a Linear or Embedding module"
                )
        for name, arrives, reads, operand in pairs:
            if arrives == reads or (arrives == PARTIAL and reads == REPLICATE):
                continue
            # DTensor gathers a dim that no part of an operator can be computed without (the classes of a loss).
            if (
                arrives.kind is PlacementKind.SHARD
                and reads == REPLICATE
                and (all(factor.axis is None for factor in operand[arrives.dim]))
            ):
                continue
            # DTensor takes the part of a whole operand that goes with a split one.
            if arrives == REPLICATE and splits:
                continue
            raise Inexpressible(
                f"operator {operator.name} reads {name} as {reads}, which arrives as {arrives}, and no module with "
                "weights stands between them"
            )

    def _root(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Style | None:
        """Return the style of the module itself, None for none: its inputs, whole on every rank, are placed as read.

        Indices and targets that are read whole stay plain tensors: DTensor has no rule for an assignment to a slice,
        as sequence-to-sequence models shift their targets by.
        """
        import torch
        from torch.utils import _pytree as pytree

        position = 0
        placed: list[Placement | None] = []
        for item in (*args, *kwargs.values()):
            leaves = [leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, torch.Tensor)]
            if leaves and not isinstance(item, torch.Tensor):
                raise Inexpressible("the module takes tensors inside of other arguments")
            placed.append(self._input_layout(self._graph.inputs[position]) if leaves else None)
            position += len(leaves)
        positional = tuple(placed[: len(args)])
        named = {
            name: placement
            for name, placement in zip(kwargs, placed[len(args) :], strict=True)
            if placement is not None
        }
        arguments: list[tuple[str, Layouts]] = []
        if any(positional):
            arguments = [
                (
                    "input_layouts",
                    tuple(
                        None if placement_of_input is None else REPLICATE for placement_of_input in positional
                    ),
                ),
                ("desired_input_layouts", positional),
            ]
        if named:
            arguments += [
                ("input_kwarg_layouts", dict.fromkeys(named, REPLICATE)),
                ("desired_input_kwarg_layouts", named),
            ]
        return Style("PrepareModuleInput", tuple(arguments)) if arguments else None

    def _input_layout(self, name: str) -> Placement | None:
        """Return the placement of an input by the module's style; None: it stays a plain tensor."""
        whole_integers = self._graph.value_by_name[name].spec.dtype not in FLOATING
        return None if whole_integers and self._given[name] == REPLICATE else self._given[name]

    def _style(self, path: str, call: _ModuleCall) -> Style | None:
        kind = self._modules.kind(path)
        weight = self._weight_placement(path)
        if weight != REPLICATE:
            columns = shard(0 if kind == "Linear" else 1)
            if kind not in ("Linear", "Embedding"):
                raise Inexpressible(
                    f"module {path} is a {kind} with a split weight, must be a Linear or Embedding"
                )
            name = "ColwiseParallel" if weight == columns else "RowwiseParallel"
            return Style(
                name,
                (
                    ("input_layouts", _from_the_end(call.arrives, call.input_rank)),
                    ("output_layouts", _from_the_end(call.gives, call.output_rank)),
                    ("use_local_output", False),
                ),
            )
        moves_in, moves_out = call.arrives != call.reads, call.makes != call.gives
        sequence = call.reads.kind is PlacementKind.SHARD and call.reads == call.makes == call.gives
        if kind in NORMALIZATIONS and sequence and call.reads.dim > 0:
            return Style("SequenceParallel", (("sequence_dim", call.reads.dim), ("use_local_output", False)))
        inward = (("input_layouts", (call.arrives,)), ("desired_input_layouts", (call.reads,)))
        outward = (("output_layouts", (call.makes,)), ("desired_output_layouts", (call.gives,)))
        local_output = ("use_local_output", False)
        if moves_in and moves_out:
            return Style("PrepareModuleInputOutput", (*inward, *outward, local_output))
        if moves_in:
            return Style("PrepareModuleInput", inward)
        return Style("PrepareModuleOutput", (*outward, local_output)) if moves_out else None

    def _weight_placement(self, path: str) -> Placement:
        """Return how a module's `weight` lies; a bias goes with it, as the rules of both operators have it."""
        weight = self._modules.module.get_submodule(path).get_parameter("weight")
        return self._layout.held[self._modules.first_name(weight)][self._dim]


def _from_the_end(placement: Placement, rank: int) -> Placement:
    """Return a shard of the last dim as PyTorch's styles call it: Shard(-1)."""
    return shard(-1) if placement == shard(rank - 1) else placement
