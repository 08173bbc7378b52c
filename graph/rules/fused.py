"""Operators that are executed as one compiled call, as one operator: the substitutions of `graph.substitutions.fusing`.

The arguments hold the whole calls of its parts, as those of a compiled call do (`graph.compiled_calls`), and each of
its local calls is the compiled call of its parts' local calls. So it is measured, keyed and executed as a stretch is.
Weights that parts read are inputs: what a step trains, updates and saves is the module's own.

Source: TASO (SOSP 2019) section 2, Unity (OSDI 2022) section 3: fusion of operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from graph import intervals
from graph.axes import Axis, AxisKind, Dim, IterationSpace, OperandMap, along, partial_axes, whole
from graph.calls import LocalCall
from graph.compiled_calls import PartCall, compiled_call, parts_in
from graph.intervals import IndexSet, Region
from graph.operators import FLOATING, TensorSpec
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, SpaceBuilder, is_whole
from graph.rules.registry import rule_for

FUSED = "soapstone.fused"


@dataclass(frozen=True, slots=True)
class Fusion:
    """How parts split together.

    parts: whole calls, in order. spaces: of each part, by its own rule. specs: of all tensors, numbered as in a
    compiled call. results: the tensors that leave. axes: the common ones, without replicas. dims: for each tensor, for
    each of its dims, the axis that it is; None: it stays whole.
    """

    parts: tuple[PartCall, ...]
    spaces: tuple[IterationSpace, ...]
    specs: tuple[TensorSpec, ...]
    results: tuple[int, ...]
    axes: tuple[Axis, ...]
    dims: tuple[tuple[int | None, ...], ...]

    @property
    def inputs(self) -> int:
        """The number of tensors that come from outside."""
        return len(self.specs) - sum(len(part.call.outputs) for part in self.parts)


def fusion_of(signature: Signature) -> Fusion:
    """Return how the parts of a fused operator split together."""
    return _fusion(signature)


@lru_cache(maxsize=1024)
def _fusion(signature: Signature) -> Fusion:
    parts = parts_in(signature.arguments)
    return fusion(parts, signature.inputs, signature.argument("results"))


def fusion(parts: Sequence[PartCall], inputs: Sequence[TensorSpec], results: Sequence[int]) -> Fusion:
    """Return how parts split together: an axis of one is an axis of all that read or make the same dim.

    A dim that one part cannot split is whole in all, and so is one that windows slide over, one that is a product of
    axes, one over which a part makes partial sums, and one that some result lacks.
    """
    specs = (*inputs, *(spec for part in parts for spec in part.call.outputs))
    classes = _Classes()
    spaces = []
    made = len(inputs)
    for number, part in enumerate(parts):
        call = part.call
        space = rule_for(call.target).space(_signature(call))
        spaces.append(space)
        own = range(made, made + len(call.outputs))
        made += len(call.outputs)
        for tensor, operand in zip((*part.sources, *own), (*space.inputs, *space.outputs), strict=True):
            classes.follow(number, space, tensor, operand)
        for output in range(len(space.outputs)):
            for axis in partial_axes(space, output):
                classes.keep_whole(("axis", number, axis))
    return _numbered(classes, tuple(parts), tuple(spaces), specs, tuple(results))


# A dim of a tensor: ("dim", tensor, position); an axis of a part: ("axis", part, position).
_ValueDim = tuple[str, int, int]


class _Classes:
    """Dims of tensors and axes of parts that are the same, and which of them stay whole."""

    def __init__(self) -> None:
        self._parent: dict[_ValueDim, _ValueDim] = {}
        self._whole: set[_ValueDim] = set()

    def root(self, node: _ValueDim) -> _ValueDim:
        """Return the node that stands for the class of one."""
        parent = self._parent.setdefault(node, node)
        if parent != node:
            parent = self._parent[node] = self.root(parent)
        return parent

    def keep_whole(self, node: _ValueDim) -> None:
        """Have the class of a node stay whole."""
        self._whole.add(node)
        self.root(node)

    def follow(self, part: int, space: IterationSpace, tensor: int, operand: OperandMap) -> None:
        """Take in how a tensor's dims follow the axes of a part that reads or makes it."""
        for position, dim in enumerate(operand):
            node = ("dim", tensor, position)
            factor = dim[0]
            if len(dim) == 1 and factor.axis is not None and factor.is_identity:
                if factor.size == space.axes[factor.axis].size:
                    self._parent[self.root(node)] = self.root(("axis", part, factor.axis))
                    continue
            elif len(dim) == 1 and factor.axis is None and factor.size <= 1:
                continue
            self.keep_whole(node)
            for each in dim:
                if each.axis is not None:
                    self.keep_whole(("axis", part, each.axis))

    def split(self, results: Sequence[int]) -> dict[_ValueDim, list[_ValueDim]]:
        """Return the members of each class that can be split, by its root: every result has exactly one such dim."""
        members: dict[_ValueDim, list[_ValueDim]] = {}
        for node in self._parent:
            members.setdefault(self.root(node), []).append(node)
        stay = {self.root(node) for node in self._whole}
        return {
            root: nodes
            for root, nodes in members.items()
            if root not in stay
            and len({node[:2] for node in nodes}) == len(nodes)
            and {tensor for kind, tensor, _ in nodes if kind == "dim"}.issuperset(results)
        }


def _numbered(
    classes: _Classes,
    parts: tuple[PartCall, ...],
    spaces: tuple[IterationSpace, ...],
    specs: tuple[TensorSpec, ...],
    results: tuple[int, ...],
) -> Fusion:
    """Return the fusion with the common axes in the order of the first result's dims."""
    split = classes.split(results)
    builder = SpaceBuilder()
    axis_of: dict[_ValueDim, int] = {}
    for position, size in enumerate(specs[results[0]].shape):
        root = classes.root(("dim", results[0], position))
        if root not in split or size <= 1:
            continue
        merged = [spaces[part].axes[axis] for kind, part, axis in split[root] if kind == "axis"]
        label = next((axis for axis in merged if axis.kind is AxisKind.PARAMETER), merged[0])
        axis_of[root] = len(builder.axes)
        builder.add(label.name, size, label.kind)
    dims = tuple(
        tuple(axis_of.get(classes.root(("dim", tensor, position))) for position in range(len(spec.shape)))
        for tensor, spec in enumerate(specs)
    )
    return Fusion(parts, spaces, specs, results, tuple(builder.axes), dims)


def _signature(call: LocalCall) -> Signature:
    return Signature(call.target, call.arguments, call.inputs, call.outputs)


class FusedRule(BaseRule):
    """soapstone.fused(parts, results) of any inputs; an output is a part's that others read."""

    by_size = True
    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes that all parts have in common."""
        fused = fusion_of(signature)
        builder = SpaceBuilder()
        builder.axes = list(fused.axes)

        def operand(tensor: int) -> OperandMap:
            return tuple(
                _dim(axis, size)
                for axis, size in zip(fused.dims[tensor], fused.specs[tensor].shape, strict=True)
            )

        return builder.space(
            [operand(tensor) for tensor in range(fused.inputs)], [operand(tensor) for tensor in fused.results]
        )

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the compiled call of the parts' local calls."""
        fused = fusion_of(signature)
        indexes = dict(_indexes_of_axes(fused, part))
        regions = [
            tuple(
                intervals.full(size) if axis is None else indexes[axis]
                for axis, size in zip(dims, spec.shape, strict=True)
            )
            for dims, spec in zip(fused.dims, fused.specs, strict=True)
        ]
        # Of each tensor, whether a gradient flows back to it.
        carries = list(gradients)
        calls = []
        for whole_part, space in zip(fused.parts, fused.spaces, strict=True):
            outputs = whole_part.call.outputs
            floating = [
                spec.dtype in FLOATING and position not in whole_part.constants
                for position, spec in enumerate(outputs)
            ]
            flags = tuple(any(floating) and carries[source] for source in whole_part.sources)
            of_task = _task_part(
                space,
                [regions[source] for source in whole_part.sources],
                regions[len(carries) : len(carries) + len(outputs)],
            )
            calls.append(
                PartCall(
                    _local_part(whole_part.call, of_task, flags), whole_part.sources, whole_part.constants
                )
            )
            carries += [any(flags) and one for one in floating]
        return compiled_call(part.input_specs(signature), calls, fused.results)


def _dim(axis: int | None, size: int) -> Dim:
    return whole(size) if axis is None else along(axis, size)


def _indexes_of_axes(fused: Fusion, part: TaskPart) -> Iterator[tuple[int, IndexSet]]:
    """Yield the indexes of each common axis that a task iterates over: all results have them."""
    for axis, indexes in zip(fused.dims[fused.results[0]], part.outputs[0], strict=True):
        if axis is not None:
            yield axis, indexes


def _task_part(space: IterationSpace, inputs: Sequence[Region], outputs: Sequence[Region]) -> TaskPart:
    # Rules ask for points of axes that partial sums or windows follow, which are whole.
    points = tuple((0, 1) if axis.kind is AxisKind.REPLICA else (0, axis.size) for axis in space.axes)
    return TaskPart(space, points, tuple(inputs), tuple(outputs))


def _local_part(call: LocalCall, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
    signature = _signature(call)
    if call.target.startswith("aten.") and is_whole(signature, part):
        return LocalCall(call.target, call.arguments, call.inputs, call.outputs, gradients)
    return rule_for(call.target).localize(signature, part, gradients)


RULES: Mapping[str, BaseRule] = {FUSED: FusedRule()}
