"""Names and kinds of axes, carried along the graph: they are labels for people and for data-parallel baselines only.

A rule sees one operator and calls dim 0 the sample. Here the batch is followed through the views that move it, and
pointwise operators and views take the names that the producer of their input gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graph.axes import Axis, AxisKind, Dim, IterationSpace, followed_axes
from graph.importing.building import DraftOperator, GraphBuilder
from graph.operators import ValueKind
from graph.rules.registry import rule_for

# The strides [inner, outer) of a dim that an axis covers.
_Extent = tuple[int, int]
_FREE = (AxisKind.SAMPLE, AxisKind.ATTRIBUTE)


class _Labels:
    """For every dim of every value: where the batch lies, and the name of each extent. `sizes` are of batches."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.sizes = {
            value.spec.shape[0]
            for value in builder.values.values()
            if value.kind is ValueKind.INPUT and value.spec.shape
        }
        self.batch: dict[tuple[str, int], _Extent] = {}
        self.names: dict[tuple[str, int], dict[_Extent, str]] = {}
        for name, value in builder.values.items():
            if value.kind is ValueKind.INPUT and value.spec.shape:
                self.batch[name, 0] = (1, value.spec.shape[0])


def labelled(builder: GraphBuilder, spaces: Sequence[IterationSpace]) -> list[IterationSpace]:
    """Return the spaces with axes named after their producers' and SAMPLE where the batch lies."""
    labels = _Labels(builder)
    result = []
    for operator, space in zip(builder.operators, spaces, strict=True):
        names = _inherited(operator, space, labels)
        if any(space.axes[axis].name != name for axis, name in names.items()):
            space = _with_names(space, names)
        space = _with_kinds(space, operator, labels)
        _record(operator, space, labels)
        _record_shuffled(builder, operator, labels)
        result.append(space)
    return result


def _extents(dim: Dim) -> Iterator[tuple[int | None, _Extent]]:
    """Yield axis and extent of every factor of a dim, innermost first."""
    stride = 1
    for factor in reversed(dim):
        yield factor.axis, (stride, stride * factor.size)
        stride *= factor.size


def _record(operator: DraftOperator, space: IterationSpace, labels: _Labels) -> None:
    for name, operand in zip(operator.outputs, space.outputs, strict=True):
        for dim, factors in enumerate(operand):
            batch: list[_Extent] = []
            for axis, extent in _extents(factors):
                if axis is None:
                    continue
                labels.names.setdefault((name, dim), {})[extent] = space.axes[axis].name
                if space.axes[axis].kind is AxisKind.SAMPLE:
                    batch.append(extent)
            if batch:
                labels.batch[name, dim] = (batch[0][0], batch[-1][1])


def _record_shuffled(builder: GraphBuilder, operator: DraftOperator, labels: _Labels) -> None:
    """Where samples are reordered (sorted by expert, say), they may then stand anywhere along the dim."""
    for slot, source, target in rule_for(operator.target).shuffled(builder.signature(operator)):
        if (operator.inputs[slot], source) in labels.batch:
            for name in operator.outputs:
                labels.batch[name, target] = (1, builder.spec(name).shape[target])


def _inherited(operator: DraftOperator, space: IterationSpace, labels: _Labels) -> dict[int, str]:
    """Return the producers' names of axes, of the first input that has one."""
    inherited: dict[int, str] = {}
    if not rule_for(operator.target).inherits_names:
        return inherited
    for name, operand in zip(operator.inputs, space.inputs, strict=True):
        for dim, factors in enumerate(operand):
            producer_names = labels.names.get((name, dim), {})
            for axis, extent in _extents(factors):
                if axis is not None and extent in producer_names:
                    inherited.setdefault(axis, producer_names[extent])
    return inherited


def _with_names(space: IterationSpace, names: dict[int, str]) -> IterationSpace:
    """Rename axes; where two would have one name, the later keeps its own, or gets a number."""
    taken: set[str] = set()
    axes: list[Axis] = []
    for index, axis in enumerate(space.axes):
        wanted = names.get(index, axis.name) if axis.kind in _FREE else axis.name
        name = _free(wanted if wanted not in taken else axis.name, taken)
        axes.append(replace(axis, name=name))
    return replace(space, axes=tuple(axes))


def _with_kinds(space: IterationSpace, operator: DraftOperator, labels: _Labels) -> IterationSpace:
    """Call SAMPLE the axes along which the batch lies, and no others."""
    samples: set[int] = set()
    for name, operand in zip(operator.inputs, space.inputs, strict=True):
        for dim, factors in enumerate(operand):
            low, high = labels.batch.get((name, dim), (0, 0))
            samples.update(
                axis
                for axis, (inner, outer) in _extents(factors)
                if axis is not None and low <= inner and outer <= high
            )
    if not samples:
        samples.update(_made_for_batch(space, labels))
    axes: list[Axis] = []
    names = {axis.name for axis in space.axes}
    for index, axis in enumerate(space.axes):
        name, kind = axis.name, axis.kind
        if kind in _FREE:
            kind = AxisKind.SAMPLE if index in samples else AxisKind.ATTRIBUTE
            called_sample = name.startswith("sample")
            if kind is AxisKind.ATTRIBUTE and called_sample:
                name = _free("attribute", names)
            elif kind is AxisKind.SAMPLE and not called_sample:
                name = _free("sample", names)
        axes.append(Axis(name, axis.size, kind))
    return replace(space, axes=tuple(axes)) if tuple(axes) != space.axes else space


def _made_for_batch(space: IterationSpace, labels: _Labels) -> set[int]:
    """Return the outermost axis of a first dim that is made here (a factory, an expansion) in a batch's size."""
    followed = {axis for operand in space.inputs for axis in followed_axes(operand)}
    first = [operand[0][0] for operand in space.outputs if operand and operand[0]]
    return {
        factor.axis
        for factor in first
        if factor.axis is not None and factor.axis not in followed and factor.size in labels.sizes
    }


def _free(name: str, taken: set[str]) -> str:
    unique, count = name, 2
    while unique in taken:
        unique, count = f"{name}{count}", count + 1
    taken.add(unique)
    return unique
