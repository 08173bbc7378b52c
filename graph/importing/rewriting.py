"""Calls that become several operators which have rules: what would run whole as one then splits as its parts do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from graph.importing.building import Ref
from graph.importing.lowering import (
    Arguments,
    Lowered,
    Lowerer,
    Lowering,
    converted,
    expanded,
    plain,
    reshaped,
)
from graph.importing.specs import spec_of
from graph.operators import Argument, TensorSpec
from graph.rules.common import positive


def _joined(lowering: Lowering, name: str, dim: int, pieces: Sequence[str], spec: TensorSpec) -> str:
    """Join values along a dim."""
    if len(pieces) == 1:
        return pieces[0]
    given = {"tensors": tuple(Ref(piece) for piece in pieces), "dim": dim}
    return lowering.one(name, "aten.cat.default", given, spec)


def _cut(lowering: Lowering, name: str, source: str, dim: int, start: int, end: int) -> str:
    """Return the slice [start, end) of a dim; `source` itself where it is the whole."""
    spec = lowering.builder.spec(source)
    if (start, end) == (0, spec.shape[dim]):
        return source
    shape = (*spec.shape[:dim], end - start, *spec.shape[dim + 1 :])
    given = {"self": Ref(source), "dim": dim, "start": start, "end": end, "step": 1}
    return lowering.one(name, "aten.slice.Tensor", given, TensorSpec(shape, spec.dtype))


def _replaced(lowering: Lowering, name: str, source: str, piece: str, dim: int, start: int, end: int) -> str:
    """Replace the slice [start, end) of a dim: a slice before, the piece, a slice behind."""
    spec = lowering.builder.spec(source)
    pieces = [piece]
    if start > 0:
        pieces.insert(0, _cut(lowering, f"{name}.before", source, dim, 0, start))
    if end < spec.shape[dim]:
        pieces.append(_cut(lowering, f"{name}.behind", source, dim, end, spec.shape[dim]))
    return _joined(lowering, name, dim, pieces, spec)


def _slice_scatter(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    source, piece = lowering.value(arguments["self"]), lowering.value(arguments["src"])
    shape = lowering.builder.spec(source).shape
    dim = positive(arguments["dim"], len(shape))
    start, end, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(shape[dim])
    if step != 1 or end <= start or lowering.builder.spec(piece).dtype != lowering.builder.spec(source).dtype:
        return plain(lowering, name, node, arguments)
    return _replaced(lowering, name, source, piece, dim, start, end)


def _select_scatter(lowering: Lowering, name: str, _node: fx.Node, arguments: Arguments) -> Lowered:
    source, piece = lowering.value(arguments["self"]), lowering.value(arguments["src"])
    shape = lowering.builder.spec(source).shape
    dim = positive(arguments["dim"], len(shape))
    index = positive(arguments["index"], shape[dim])
    raised = reshaped(lowering, f"{name}.piece", piece, (*shape[:dim], 1, *shape[dim + 1 :]))
    return _replaced(lowering, name, source, raised, dim, index, index + 1)


def _diff(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Subtract neighbours; of truth values, compare them."""
    ends = [lowering.value(arguments[key]) for key in ("prepend", "append") if arguments[key] is not None]
    if arguments["n"] != 1:
        return plain(lowering, name, node, arguments)
    builder = lowering.builder
    pieces = [lowering.value(arguments["self"])]
    if ends:
        before = arguments["prepend"] is not None
        pieces = [ends[0], *pieces, *ends[1:]] if before else [*pieces, *ends]
    spec = builder.spec(pieces[0])
    dim = positive(arguments["dim"], len(spec.shape))
    size = sum(builder.spec(piece).shape[dim] for piece in pieces)
    full = TensorSpec((*spec.shape[:dim], size, *spec.shape[dim + 1 :]), spec.dtype)
    source = _joined(lowering, f"{name}.joined", dim, pieces, full)
    later = _cut(lowering, f"{name}.later", source, dim, 1, size)
    earlier = _cut(lowering, f"{name}.earlier", source, dim, 0, size - 1)
    given: dict[str, Argument] = {"self": Ref(later), "other": Ref(earlier)}
    if spec.dtype == "bool":
        return lowering.one(name, "aten.ne.Tensor", given, lowering.spec(node))
    return lowering.one(name, "aten.sub.Tensor", {**given, "alpha": 1}, lowering.spec(node))


def _sort(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Sort stably: equal keys then stand in the same order on every device."""
    specs = [spec_of(result, lowering.builder.model, name) for result in node.meta["val"]]
    given = {
        "self": arguments["self"],
        "stable": True,
        "dim": arguments["dim"],
        "descending": arguments["descending"],
    }
    return lowering.add(name, "aten.sort.stable", given, specs)


def _argsort(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Sort, and keep the places."""
    spec, source = lowering.spec(node), lowering.value(arguments["self"])
    values = TensorSpec(spec.shape, lowering.builder.spec(source).dtype)
    given: dict[str, Argument] = {"self": Ref(source), "stable": True}
    given |= {"dim": arguments["dim"], "descending": arguments["descending"]}
    return lowering.builder.add(name, "aten.sort.stable", given, [values, spec])[1]


def _one_hot(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Compare every index with every class."""
    spec, builder = lowering.spec(node), lowering.builder
    source, classes = lowering.value(arguments["self"]), spec.shape[-1]
    kind = builder.spec(source).dtype
    raised = reshaped(lowering, f"{name}.column", source, (*spec.shape[:-1], 1))
    given: dict[str, Argument] = {"start": 0, "end": classes, "step": 1, "dtype": kind}
    row = lowering.one(f"{name}.classes", "aten.arange.start_step", given, TensorSpec((classes,), kind))
    equal = TensorSpec(spec.shape, "bool")
    given = {"self": Ref(raised), "other": Ref(row)}
    hit = lowering.one(f"{name}.equal", "aten.eq.Tensor", given, equal)
    return converted(lowering, name, hit, spec.dtype)


def _repeat_interleave(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Repeat every element in place: a dim of one behind it, expanded, and joined to it."""
    spec, builder = lowering.spec(node), lowering.builder
    source = lowering.value(arguments["self"])
    given, repeats = builder.spec(source), arguments["repeats"]
    shape = given.shape if arguments["dim"] is not None else (given.elements,)
    dim = positive(arguments["dim"] or 0, len(shape))
    lifted = TensorSpec((*shape[: dim + 1], 1, *shape[dim + 1 :]), spec.dtype)
    raised = lowering.one(
        f"{name}.raised", "aten.view.default", {"self": Ref(source), "size": lifted.shape}, lifted
    )
    wide = TensorSpec((*shape[: dim + 1], repeats, *shape[dim + 1 :]), spec.dtype)
    repeated = expanded(lowering, f"{name}.repeated", raised, wide)
    return reshaped(lowering, name, repeated, spec.shape)


def _grouped_product(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Give torch's grouped product and its stand-in of Hugging Face's one name."""
    values = list(arguments.values())
    ranks = [len(value.meta["val"].shape) if isinstance(value, fx.Node) else 0 for value in values[:3]]
    if ranks != [2, 3, 1] or any(value is not None for value in values[3:]):
        return plain(lowering, name, node, arguments)
    given = dict(zip(("self", "mat2", "offs"), values, strict=False))
    return lowering.one(name, "soapstone.grouped_mm", given, lowering.spec(node))


def _inner_product(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Give the product of two vectors one name: no value here is complex."""
    given = {"self": arguments["self"], "tensor": arguments["other"]}
    return lowering.one(name, "aten.dot.default", given, lowering.spec(node))


def _embedding(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Look rows up with a dense gradient: a sparse one holds the same numbers, and parts add up dense ones."""
    return plain(lowering, name, node, {**arguments, "sparse": False})


# By the operator's name, without the library where that is ATen.
REWRITERS: dict[str, Lowerer] = {
    "embedding.default": _embedding,
    "slice_scatter.default": _slice_scatter,
    "select_scatter.default": _select_scatter,
    "diff.default": _diff,
    **dict.fromkeys(("sort.default", "sort.stable"), _sort),
    **dict.fromkeys(("argsort.default", "argsort.stable"), _argsort),
    "one_hot.default": _one_hot,
    "vdot.default": _inner_product,
    "repeat_interleave.self_int": _repeat_interleave,
    **dict.fromkeys(("_grouped_mm.default", "transformers.grouped_mm_fallback.default"), _grouped_product),
}
