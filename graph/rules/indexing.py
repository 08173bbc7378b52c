"""Reading and writing at indexes that are data (index, index_put, index_add), and sorting, which makes indexes.

Dims that indexes run over stay whole, since nobody knows where an index points; the dims of the indexes themselves and
all other dims split. Where values are added up, parts of the indexes give partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graph import intervals
from graph.axes import AxisKind, Dim, IterationSpace, OperandMap, whole
from graph.calls import LocalCall
from graph.operators import Argument, Slot
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    activation_dims,
    broadcast_operand,
    local_call,
    owns_additions,
    positive,
    whole_space,
)
from graph.rules.generic import DimwiseRule, dims_argument

# Masks: how many elements they choose is data.
_MASKS = frozenset({"bool", "uint8"})


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Where index tensors stand: the dims that they run over, the shape they broadcast to, and its place.

    `before` and `after` are the dims of the indexed tensor that stand before and after the indexes' own dims in the
    result of aten.index. `slots` are the index tensors, in the order of `dims`.
    """

    dims: tuple[int, ...]
    slots: tuple[int, ...]
    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


def _indexed(signature: Signature) -> _Indexed | None:
    """Return the dims that an operator's `indices` index, with their shapes; None where an index is a mask."""
    indices = signature.argument("indices")
    indexed = {dim: index.index for dim, index in enumerate(indices) if isinstance(index, Slot)}
    dims = tuple(indexed)
    specs = [signature.inputs[slot] for slot in indexed.values()]
    if not dims or any(spec.dtype in _MASKS for spec in specs):
        return None
    rank = max(len(spec.shape) for spec in specs)
    padded = [(1,) * (rank - len(spec.shape)) + spec.shape for spec in specs]
    # A dim of one point broadcasts to any size, none included.
    shape = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))
    free = [dim for dim in range(len(signature.inputs[0].shape)) if dim not in indexed]
    # Indexes of adjacent dims stand where these did, others at the front.
    adjacent = dims[-1] - dims[0] + 1 == len(dims)
    before = tuple(dim for dim in free if adjacent and dim < dims[0])
    after = tuple(dim for dim in free if dim not in before)
    return _Indexed(dims, tuple(indexed.values()), shape, before, after)


def _bounds(call: LocalCall) -> dict[int, int]:
    """Return the size of each dim that indexes run over, by index slot."""
    shape = call.inputs[0].shape
    return {
        index.index: shape[dim]
        for dim, index in enumerate(call.argument("indices"))
        if isinstance(index, Slot)
    }


class IndexRule(BaseRule):
    """aten.index(self, indices): the dims looked up in are whole; the indexes' dims and all others split."""

    computes_nothing = True
    inherits_names = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an output dim."""
        indexed = _indexed(signature)
        if indexed is None:
            return whole_space(signature)
        shape, result = signature.inputs[0].shape, signature.outputs[0].shape
        builder = SpaceBuilder()
        dims = activation_dims(builder, result)
        first = len(indexed.before)
        own = dims[first : first + len(indexed.shape)]
        free = dict(
            zip((*indexed.before, *indexed.after), (*dims[:first], *dims[first + len(own) :]), strict=True)
        )
        inputs: list[OperandMap] = [tuple(free.get(dim, whole(size)) for dim, size in enumerate(shape))]
        inputs += [broadcast_operand(own, spec.shape, indexed.shape) for spec in signature.inputs[1:]]
        return builder.space(inputs, [tuple(dims)])

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name masks."""
        return "runs whole: it is indexed by a mask" if _indexed(signature) is None else None

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the size of each looked-up dim."""
        return _bounds(call)


def _added_once(
    signature: Signature,
    part: TaskPart,
    gradients: tuple[bool, ...],
    target: str,
    extra: tuple[tuple[str, Argument], ...] = (),
) -> LocalCall:
    """Return the call that adds `self`, or, where another part does that, `target`, which adds into zeros."""
    if owns_additions(part):
        return local_call(signature, part, gradients)
    size = ("size", intervals.shape(part.outputs[0]))
    return local_call(signature, part, gradients, target=target, replace={"self": None}, extra=(size, *extra))


class IndexPutRule(BaseRule):
    """aten.index_put(self, indices, values, accumulate): the dims written to by index are whole.

    All other dims split. Where values are accumulated, the indexes' dims split too, and give partial sums: the part
    that starts at 0 adds `self`, the others run as soapstone.index_put, into zeros.
    """

    adds_up = False

    computes_nothing = True

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a free dim of `self`, and of the indexes where they add up."""
        indexed = _indexed(signature)
        if indexed is None:
            return whole_space(signature)
        shape, values = signature.inputs[0].shape, signature.inputs[-1].shape
        builder = SpaceBuilder()
        free = {
            dim: builder.add_dim(len(shape), dim, shape[dim]) for dim in (*indexed.before, *indexed.after)
        }
        own: list[Dim] = [whole(size) for size in indexed.shape]
        if signature.argument("accumulate"):
            own = [builder.add("index", size, AxisKind.REDUCTION) for size in indexed.shape]
        target = tuple(free.get(dim, whole(size)) for dim, size in enumerate(shape))
        written = (*(free[dim] for dim in indexed.before), *own, *(free[dim] for dim in indexed.after))
        written_shape = (
            *(shape[dim] for dim in indexed.before),
            *indexed.shape,
            *(shape[dim] for dim in indexed.after),
        )
        inputs: list[OperandMap] = [target]
        inputs += [broadcast_operand(own, spec.shape, indexed.shape) for spec in signature.inputs[1:-1]]
        inputs.append(broadcast_operand(written, values, written_shape))
        return builder.space(inputs, [target])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, into zeros where another part adds `self`."""
        dtype = signature.outputs[0].dtype
        return _added_once(signature, part, gradients, "soapstone.index_put", (("dtype", dtype),))

    def unsplit_reason(self, signature: Signature) -> str | None:
        """Name masks."""
        return "runs whole: it is indexed by a mask" if _indexed(signature) is None else None

    def shuffled(self, signature: Signature) -> tuple[tuple[int, int, int], ...]:
        """Return the dim that one vector of indexes writes as a whole: an inverse permutation."""
        indexed = _indexed(signature)
        if indexed is None or len(indexed.dims) != 1 or len(indexed.shape) != 1:
            return ()
        dim = indexed.dims[0]
        return ((indexed.slots[0], 0, dim),) if indexed.shape[0] == signature.inputs[0].shape[dim] else ()

    def flops(self, call: LocalCall) -> float:
        """Return one addition a value where they are accumulated."""
        return float(call.inputs[-1].elements) if call.argument("accumulate") else 0.0

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the size of each dim written to by index."""
        return _bounds(call)


class SortRule(DimwiseRule):
    """aten.sort(self, stable, dim, descending): the sorted dim is whole, all others split."""

    def __init__(self) -> None:
        super().__init__(dims_argument(), flops_per_input=10.0)

    def shuffled(self, signature: Signature) -> tuple[tuple[int, int, int], ...]:
        """Return the sorted dim."""
        return tuple((0, dim, dim) for dim in self.dims_of(signature))


class IndexAddRule(BaseRule):
    """aten.index_add(self, dim, index, source, alpha): parts of the index give partial sums; `dim` is whole.

    The part that starts at 0 adds `self`; the others run as soapstone.index_add, into zeros.
    """

    adds_up = False

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis a dim other than `dim`, and the index."""
        shape = signature.inputs[0].shape
        dim = _add_dim(signature, len(shape))
        builder = SpaceBuilder()
        dims = activation_dims(builder, shape, frozenset({dim}))
        count = signature.inputs[1].shape
        index: Sequence[Dim] = [builder.add("index", size, AxisKind.REDUCTION) for size in count]
        source = (*dims[:dim], *index, *dims[dim + 1 :]) if signature.inputs[2].shape else ()
        return builder.space([tuple(dims), tuple(index), source], [tuple(dims)])

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the call, into zeros where another part adds `self`."""
        return _added_once(signature, part, gradients, "soapstone.index_add")

    def flops(self, call: LocalCall) -> float:
        """Return one addition an element of the source."""
        return float(call.inputs[2].elements)

    def index_bounds(self, call: LocalCall) -> dict[int, int]:
        """Return the size of the dim that is added to."""
        shape = call.outputs[0].shape
        return {1: shape[positive(call.argument("dim"), len(shape))]} if shape else {1: 1}


def _add_dim(signature: Signature, rank: int) -> int:
    return positive(signature.argument("dim"), max(rank, 1))


RULES: Mapping[str, BaseRule] = {
    "aten.index.Tensor": IndexRule(),
    **dict.fromkeys(("aten.index_put.default", "soapstone.index_put"), IndexPutRule()),
    **dict.fromkeys(("aten.index_add.default", "soapstone.index_add"), IndexAddRule()),
    "aten.sort.stable": SortRule(),
}
