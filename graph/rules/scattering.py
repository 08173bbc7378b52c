"""Reading and writing along one dim at positions that are data: gather, and the scatters.

Along the indexed dim a part owns an interval of places: it reads, or keeps, what falls into it. For gather that is a
reduction (each element is read by the one part that has it, the others give zeros), for the scatters it splits the
result. Sums over scattered elements split too, as partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph import intervals
from graph.axes import AxisKind, Dim, IterationSpace, whole
from graph.calls import LocalCall
from graph.operators import FLOATING, Argument
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    local_call,
    owns_additions,
    positive,
    slot_of,
    whole_space,
)


def _free_dims(builder: SpaceBuilder, sizes: tuple[int, ...], dim: int, same: list[bool]) -> list[Dim]:
    """Return one axis a dim other than `dim`, where all operands have the `same` size; else the dim stays whole."""
    rank = len(sizes)
    return [
        builder.add_dim(rank, d, size) if d != dim and same[d] else whole(size)
        for d, size in enumerate(sizes)
    ]


def _indexed_dim(signature: Signature | LocalCall, rank: int) -> int:
    return positive(signature.argument("dim"), rank)


class GatherRule(BaseRule):
    """aten.gather(self, dim, index): [..., K, ...] by index [..., J, ...].

    Axes: the dims of the index; place (K, a reduction): a part gives zeros for what it does not hold.
    """

    computes_nothing = True
    backward_flops_per_output = 1.0  # one addition
    rigid = frozenset({"place"})  # a part of it must be one interval

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes; a dim of which the index covers only a beginning stays whole."""
        shape, index = signature.inputs[0].shape, signature.inputs[1].shape
        if not shape or 0 in index or len(index) != len(shape):
            return whole_space(signature)
        dim = _indexed_dim(signature, len(shape))
        same = [mine == theirs for mine, theirs in zip(shape, index, strict=True)]
        builder = SpaceBuilder()
        dims = _free_dims(builder, index, dim, same)
        dims[dim] = builder.add_dim(len(index), dim, index[dim])
        indexed = whole(shape[dim])
        if signature.inputs[0].dtype in FLOATING:
            indexed = builder.add("place", shape[dim], AxisKind.REDUCTION)
        source = [dims[d] if same[d] else whole(size) for d, size in enumerate(shape)]
        source[dim] = indexed
        return builder.space([tuple(source), tuple(dims)], [tuple(dims)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, or soapstone.gather, which knows the place that its part starts at."""
        if owns_all_places(signature, part.inputs[0]):
            return local_call(signature, part, gradients)
        dim = _indexed_dim(signature, len(part.inputs[0]))
        start = part.inputs[0][dim][0][0]
        return local_call(
            signature,
            part,
            gradients,
            target="soapstone.gather",
            extra=(("places", signature.inputs[0].shape[dim]),),
            bindings=(("start", start),),
        )

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the number of places of the whole."""
        return {1: _places(call)} if call.inputs[0].shape else {1: 1}


def owns_all_places(signature: Signature, region: intervals.Region) -> bool:
    """True where a part holds the whole indexed dim of the first input (or result)."""
    if not region:
        return True
    dim = _indexed_dim(signature, len(region))
    return region[dim] == intervals.full(signature.inputs[0].shape[dim])


def _places(call: LocalCall) -> int:
    for name, value in call.arguments:
        if name == "places":
            places: int = value
            return places
    shape = call.inputs[0].shape
    return shape[_indexed_dim(call, len(shape))]


class ScatterRule(BaseRule):
    """aten.scatter, scatter_add, scatter_reduce: write elements of `src` at index [..., J, ...] into [..., K, ...].

    Axes: the dims other than `dim`; place (K): a part keeps what falls into it; of scatter_add also element (J, a
    reduction): the part that starts at 0 adds `self`, the others run into zeros.
    """

    adds_up = False

    rigid = frozenset({"place"})

    def __init__(self, *, adds: bool) -> None:
        self.adds = adds

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes; a dim of which the index covers only a beginning stays whole."""
        shape, index = signature.inputs[0].shape, signature.inputs[1].shape
        source = signature.inputs[2].shape if slot_of(signature, "src") is not None else index
        if not shape or 0 in index or len(index) != len(shape) or source != index:
            return whole_space(signature)
        dim = _indexed_dim(signature, len(shape))
        same = [mine == theirs for mine, theirs in zip(shape, index, strict=True)]
        builder = SpaceBuilder()
        dims = _free_dims(builder, shape, dim, same)
        dims[dim] = builder.add("place", shape[dim], AxisKind.SAMPLE if dim == 0 else AxisKind.ATTRIBUTE)
        scattered = [dims[d] if same[d] else whole(size) for d, size in enumerate(index)]
        scattered[dim] = whole(index[dim])
        if self.adds:
            scattered[dim] = builder.add("element", index[dim], AxisKind.REDUCTION)
        inputs = [tuple(dims), *([tuple(scattered)] * (len(signature.inputs) - 1))]
        return builder.space(inputs, [tuple(dims)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, or soapstone.scatter for an interval of the places, or into zeros."""
        adds_self = owns_additions(part)
        everywhere = owns_all_places(signature, part.outputs[0])
        if adds_self and everywhere:
            return local_call(signature, part, gradients)
        dim = _indexed_dim(signature, len(part.outputs[0]))
        whole_call = dict(signature.arguments)
        arguments: tuple[tuple[str, Argument], ...] = (
            ("self", whole_call["self"] if adds_self else None),
            ("dim", dim),
            ("index", whole_call["index"]),
            ("src", whole_call.get("src", whole_call.get("value"))),
            ("reduce", whole_call.get("reduce", "sum" if self.adds else None)),
            ("include_self", whole_call.get("include_self", True)),
            ("size", intervals.shape(part.outputs[0])),
            ("places", signature.inputs[0].shape[dim]),
        )
        custom = Signature("soapstone.scatter", arguments, signature.inputs, signature.outputs)
        return local_call(custom, part, gradients, bindings=(("start", part.outputs[0][dim][0][0]),))

    def flops(self, call: LocalCall) -> float:
        """Return one operation an element that is scattered."""
        return float(call.inputs[1].elements)

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the number of places of the whole."""
        return {1: _places(call)} if call.outputs[0].shape else {1: 1}


RULES: Mapping[str, BaseRule] = {
    **dict.fromkeys(("aten.gather.default", "soapstone.gather"), GatherRule()),
    **dict.fromkeys(
        ("aten.scatter.src", "aten.scatter.value", "aten.scatter_reduce.two"), ScatterRule(adds=False)
    ),
    **dict.fromkeys(("aten.scatter_add.default", "soapstone.scatter"), ScatterRule(adds=True)),
}
