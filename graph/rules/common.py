"""Parts that rules share: building spaces, following broadcasts, rewriting calls, default costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from graph import intervals
from graph.axes import (
    REPLICA_AXIS,
    Axis,
    AxisKind,
    Dim,
    IterationSpace,
    OperandMap,
    along,
    partial_axes,
    whole,
)
from graph.calls import LocalCall
from graph.operators import Argument, Slot, TensorSpec
from graph.rules.base import Signature, TaskPart

_NAMES_BY_RANK: Mapping[int, tuple[str, ...]] = {
    1: ("sample",),
    2: ("sample", "channel"),
    3: ("sample", "length", "channel"),
    4: ("sample", "channel", "height", "width"),
    5: ("sample", "channel", "depth", "height", "width"),
}


class SpaceBuilder:
    """Collects the axes of an operator; dims of one point get no axis, since they cannot be split."""

    def __init__(self) -> None:
        self.axes: list[Axis] = []

    def add(self, name: str, size: int, kind: AxisKind) -> Dim:
        """Add an axis of `size` points; return the dim that follows it."""
        if size <= 1:
            return whole(size)
        taken = {axis.name for axis in self.axes}
        unique, count = name, 2
        while unique in taken:
            unique, count = f"{name}{count}", count + 1
        self.axes.append(Axis(unique, size, kind))
        return along(len(self.axes) - 1, size)

    def add_dim(self, rank: int, dim: int, size: int) -> Dim:
        """Add the axis of a dim of an activation of `rank` dims, named as customary: dim 0 SAMPLE, else ATTRIBUTE."""
        return self.add(dim_name(rank, dim), size, AxisKind.SAMPLE if dim == 0 else AxisKind.ATTRIBUTE)

    def space(self, inputs: Sequence[OperandMap], outputs: Sequence[OperandMap]) -> IterationSpace:
        """Return the space; the replica axis is appended."""
        return IterationSpace((*self.axes, REPLICA_AXIS), tuple(inputs), tuple(outputs))


def joined(outer: Dim, inner: Dim) -> Dim:
    """Return the dim that is the product of two; factors of one point are left out."""
    return tuple(factor for factor in (*outer, *inner) if factor.size != 1) or whole(1)


def axis_of(dim: Dim) -> int | None:
    """Return the axis of a dim made by `SpaceBuilder.add`, None where it has none."""
    return dim[0].axis


def dim_name(rank: int, dim: int) -> str:
    """Return the customary name of a dim of an activation of `rank` dims."""
    names = _NAMES_BY_RANK.get(rank)
    if names is not None:
        return names[dim]
    return "sample" if dim == 0 else f"dim{dim}"


def activation_dims(
    builder: SpaceBuilder, shape: Sequence[int], fixed: frozenset[int] = frozenset()
) -> list[Dim]:
    """Return one axis a dim of an activation: dim 0 SAMPLE, the others ATTRIBUTE; `fixed` dims stay whole.

    Kinds and names are labels only. The importer corrects them where the batch has moved to another dim.
    """
    rank = len(shape)
    return [
        whole(size) if dim in fixed else builder.add_dim(rank, dim, size) for dim, size in enumerate(shape)
    ]


def broadcast_operand(dims: Sequence[Dim], shape: Sequence[int], result: Sequence[int]) -> OperandMap:
    """Return the map of an operand of `shape` that is broadcast to the `result` shape with these `dims`."""
    offset = len(result) - len(shape)
    return tuple(
        dims[offset + position] if size == result[offset + position] else whole(size)
        for position, size in enumerate(shape)
    )


def whole_operand(spec: TensorSpec) -> OperandMap:
    """Return an operand that every task needs whole."""
    return tuple(whole(size) for size in spec.shape)


def whole_space(signature: Signature) -> IterationSpace:
    """Return the space of an operator that runs whole, or replicated."""
    return IterationSpace(
        (REPLICA_AXIS,),
        tuple(whole_operand(spec) for spec in signature.inputs),
        tuple(whole_operand(spec) for spec in signature.outputs),
    )


def positive(dim: int, rank: int) -> int:
    """Return a dim counted from the front."""
    return dim + rank if dim < 0 else dim


def argument_or(signature: Signature | LocalCall, name: str, default: Argument) -> Argument:
    """Return an argument, or `default` where the schema has none of that name."""
    return dict(signature.arguments).get(name, default)


def slot_of(signature: Signature | LocalCall, name: str) -> int | None:
    """Return the input slot of a tensor argument; None where it is absent."""
    value = argument_or(signature, name, None)
    return value.index if isinstance(value, Slot) else None


def slots_in(argument: Argument) -> list[int]:
    """Return the input slots inside an argument, in order."""
    if isinstance(argument, Slot):
        return [argument.index]
    if isinstance(argument, tuple):
        return [slot for item in argument for slot in slots_in(item)]
    return []


def used_slots(arguments: Sequence[tuple[str, Argument]]) -> set[int]:
    """Return the inputs that a call with these arguments reads; the gradient of others is zero."""
    used: set[int] = set()
    for _, value in arguments:
        if type(value) is Slot:
            used.add(value.index)
        elif type(value) is tuple:
            used.update(slots_in(value))
    return used


def whole_axis(part: TaskPart, axis: int) -> bool:
    """True where a part covers all points of an axis."""
    return part.space.axes[axis].kind is AxisKind.REPLICA or part.points[axis] == (
        0,
        part.space.axes[axis].size,
    )


def sums_whole(part: TaskPart) -> bool:
    """Return whether the first output is complete, not a partial sum: all axes that it lacks are covered."""
    return all(whole_axis(part, axis) for axis in partial_axes(part.space, 0))


def owns_additions(part: TaskPart) -> bool:
    """Return whether a part is the one of each partial sum that adds terms due exactly once (a bias)."""
    return all(part.points[axis][0] == 0 for axis in partial_axes(part.space, 0))


def local_call(
    signature: Signature,
    part: TaskPart,
    gradients: Sequence[bool],
    *,
    target: str | None = None,
    replace: Mapping[str, Argument] | None = None,
    extra: Sequence[tuple[str, Argument]] = (),
    bindings: Sequence[tuple[str, Any]] = (),
) -> LocalCall:
    """Return a local call: the signature's arguments, some replaced, with the part's local shapes.

    An input whose slot no argument names any more is unused: its gradient is zero, and its flag is cleared.
    """
    replace = replace or {}
    arguments = (*[(name, replace.get(name, value)) for name, value in signature.arguments], *extra)
    used = used_slots(arguments)
    return LocalCall(
        target=target or signature.target,
        arguments=arguments,
        inputs=part.input_specs(signature),
        outputs=part.output_specs(signature),
        gradients=tuple([flag and slot in used for slot, flag in enumerate(gradients)]),
        bindings=tuple(bindings),
    )


def is_whole(signature: Signature, part: TaskPart) -> bool:
    """True where a part is the whole operator: every operand's region is full."""
    for regions, specs in ((part.outputs, signature.outputs), (part.inputs, signature.inputs)):
        for region, spec in zip(regions, specs, strict=True):
            for indexes, size in zip(region, spec.shape, strict=True):
                if indexes != intervals.full(size):
                    return False
    return True


class BaseRule(ABC):
    """The rule of one operator type, or of a family: how it is partitioned, and what a part costs.

    A rule says, for an operator's shapes and arguments, which axes it iterates over, how its operands' dims follow
    them, how to rewrite the call for one task's part, and how many flops and bytes a local call takes. Defaults:
    arguments unchanged, one operation an output element, no fixed index ranges.
    """

    @abstractmethod
    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes (REPLICA_AXIS last) and operand maps; only axes of size > 1 are worth listing."""

    # Axes that must not become products, since the local call needs one interval of them.
    rigid: frozenset[str] = frozenset()
    # True where values are copied or relabelled, nothing computed; and where not even copied.
    computes_nothing = False
    is_view = False
    # True where tasks of one call class (`graph.rules.call_classes`) are localized alike. A rule that has a
    # `localize` of its own says so itself.
    by_size = True
    # True where the tasks of any configuration do together at least what the whole does: see `graph.rules.least`. Not
    # where indexes decide what a task does.
    adds_up = True
    # True where axes are best called what the producer of the input calls them.
    inherits_names = False
    # Floating-point operations for each element of the first input, or of the first output, if they are proportional.
    flops_per_input: float | None = None
    flops_per_output: float | None = None
    # Likewise backward, where anything is differentiated; or so many times the forward's operations.
    backward_flops_per_input: float | None = None
    backward_flops_per_output: float | None = None
    backward_forwards: float | None = None
    # Else it has the forward's operations for each of these inputs that is differentiated.
    factors = slice(None)
    # The argument that is the shape of the first output, and so of the local one in a local call.
    sized: str | None = None

    def __init_subclass__(cls) -> None:
        """Clear `by_size` of a rule with a `localize` of its own, unless the rule sets it."""
        super().__init_subclass__()
        if "localize" in cls.__dict__:
            cls.by_size = cls.__dict__.get("by_size", False)

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the task's call; its inputs are dense tensors of `part.inputs`' shapes.

        `part.space` may be refined: use `part.inputs` and `part.outputs`, or factors of the maps, not fixed axes.
        """
        replace = {self.sized: intervals.shape(part.outputs[0])} if self.sized else {}
        return local_call(signature, part, gradients, replace=replace)

    def flops(self, call: LocalCall) -> float:
        """Return the operations by element that the rule names; else one an output element, or zero for copies."""
        if self.flops_per_input is not None:
            return self.flops_per_input * call.inputs[0].elements
        if self.flops_per_output is not None:
            return self.flops_per_output * call.outputs[0].elements
        return 0.0 if self.computes_nothing else float(sum(spec.elements for spec in call.outputs))

    def backward_flops(self, call: LocalCall) -> float:
        """Return the operations that the rule names; else the forward's for every differentiated input."""
        if not any(call.gradients):
            return 0.0
        if self.backward_flops_per_input is not None:
            return self.backward_flops_per_input * call.inputs[0].elements
        if self.backward_flops_per_output is not None:
            return self.backward_flops_per_output * call.outputs[0].elements
        if self.backward_forwards is not None:
            return self.backward_forwards * self.flops(call)
        return self.flops(call) * sum(call.gradients[self.factors])

    def bytes_moved(self, call: LocalCall) -> int:
        """Return the bytes of all inputs read and outputs written, zero for a view."""
        if self.is_view:
            return 0
        used = used_slots(call.arguments)
        return sum(spec.size_bytes for slot, spec in enumerate(call.inputs) if slot in used) + sum(
            spec.size_bytes for spec in call.outputs
        )

    def index_bounds(self, call: LocalCall) -> dict[int, int]:  # noqa: ARG002 - lookups use it
        """Return, for input slots that hold indexes, the bound below which they must stay."""
        return {}

    def shuffled(self, signature: Signature) -> tuple[tuple[int, int, int], ...]:  # noqa: ARG002 - sorting uses it
        """Return (input slot, its dim, dim of all outputs) triples: an output dim that is that input dim, reordered.

        No axis follows such a dim, but where the samples stood there, they still do.
        """
        return ()

    def unsplit_reason(self, signature: Signature) -> str | None:  # noqa: ARG002 - views use it
        """Return why some dims of the operator cannot be split although they are large; None where all can."""
        return None


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return prod(shape)
