"""Calls that draw random numbers, written as draws of ours and arithmetic on them, so that every split draws the same.

All distributions come from three of `soapstone.random` (uniform, normal, exponential) and from its integers.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graph.importing.building import Ref
from graph.importing.lowering import Arguments, Lowered, Lowerer, Lowering, converted, detached
from graph.operators import Argument, TensorSpec


def _drawn(lowering: Lowering, name: str, distribution: str, spec: TensorSpec) -> str:
    given: dict[str, Argument] = {"distribution": distribution, "size": spec.shape, "dtype": spec.dtype}
    return lowering.one(name, "soapstone.random", given, spec)


def _with(
    lowering: Lowering, name: str, target: str, source: str, other: Argument, spec: TensorSpec | None = None
) -> str:
    """Return the result of a pointwise operator on `source` and a number or a value."""
    given: dict[str, Argument] = {"self": Ref(source), "other": other}
    if target.startswith(("aten.add.", "aten.sub.")):
        given["alpha"] = 1
    return lowering.one(name, target, given, spec or lowering.builder.spec(source))


def _scaled(lowering: Lowering, name: str, draw: str, factor: Any, offset: Any) -> str:
    """Return draw * factor + offset, each a number or a node."""
    value = draw
    for operation, other, neutral in (("mul", factor, 1), ("add", offset, 0)):
        if isinstance(other, fx.Node):
            # torch gives a parameter of a distribution a gradient of zero, and `rsample` does not come here.
            operand = Ref(detached(lowering, f"{name}.{operation}.detached", lowering.value(other)))
            value = _with(lowering, f"{name}.{operation}", f"aten.{operation}.Tensor", value, operand)
        elif other != neutral:
            value = _with(lowering, f"{name}.{operation}", f"aten.{operation}.Tensor", value, other)
    return value


def _normal(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    draw = _drawn(lowering, f"{name}.draw", "normal", lowering.spec(node))
    return _scaled(lowering, name, draw, arguments.get("std", 1), arguments.get("mean", 0))


def _uniform(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    low = arguments.get("from", 0)
    draw = _drawn(lowering, f"{name}.draw", "uniform", lowering.spec(node))
    return _scaled(lowering, name, draw, arguments.get("to", 1) - low, low)


def _exponential(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    draw = _drawn(lowering, f"{name}.draw", "exponential", lowering.spec(node))
    return _scaled(lowering, name, draw, 1 / arguments["lambd"], 0)


def _bernoulli(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Compare a uniform number with the probability; in a format of 16 bits too few of them are below it."""
    spec, probability = lowering.spec(node), arguments.get("p", arguments["self"])
    kind = "float64" if spec.dtype == "float64" else "float32"
    draw = _drawn(lowering, f"{name}.draw", "uniform", TensorSpec(spec.shape, kind))
    overload, other = "Scalar", probability
    if isinstance(probability, fx.Node):
        overload, other = "Tensor", Ref(lowering.value(probability))
    hit = _with(lowering, f"{name}.hit", f"aten.lt.{overload}", draw, other, TensorSpec(spec.shape, "bool"))
    return converted(lowering, name, hit, spec.dtype)


def _integers(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    spec, low = lowering.spec(node), arguments.get("low", 0)
    draw = _drawn(lowering, f"{name}.draw", "integers", TensorSpec(spec.shape, "int64"))
    value = _with(lowering, f"{name}.below", "aten.remainder.Scalar", draw, arguments["high"] - low)
    value = _scaled(lowering, f"{name}.moved", value, 1, low)
    return converted(lowering, name, value, spec.dtype)


def _permutation(lowering: Lowering, name: str, node: fx.Node, _arguments: Arguments) -> Lowered:
    """Sort random keys, and keep the places."""
    spec = lowering.spec(node)
    keys = TensorSpec(spec.shape, "int64")
    draw = _drawn(lowering, f"{name}.draw", "integers", keys)
    given: dict[str, Argument] = {"self": Ref(draw), "stable": True, "dim": 0, "descending": False}
    indices = lowering.builder.add(f"{name}.sort", "aten.sort.stable", given, [keys, keys])[1]
    return converted(lowering, name, indices, spec.dtype)


def _leaky(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Draw the slope of each negative element (randomized leaky ReLU)."""
    spec, source = lowering.spec(node), lowering.value(arguments["self"])
    low, high = float(arguments["lower"]), float(arguments["upper"])
    if arguments["training"]:
        draw = _drawn(lowering, f"{name}.draw", "uniform", spec)
        slope: Argument = Ref(_scaled(lowering, f"{name}.slope", draw, high - low, low))
    else:
        slope = (low + high) / 2
    negative = _with(lowering, f"{name}.negative", "aten.mul.Tensor", source, slope)
    positive = _with(lowering, f"{name}.sign", "aten.gt.Scalar", source, 0, TensorSpec(spec.shape, "bool"))
    given = {"condition": Ref(positive), "self": Ref(source), "other": Ref(negative)}
    return lowering.one(name, "aten.where.self", given, spec)


_NORMAL_OVERLOADS = ("float_float", "Tensor_float", "float_Tensor", "Tensor_Tensor")

# By the operator's name, without its library.
DRAWERS: dict[str, Lowerer] = {
    **dict.fromkeys(("rand.default", "rand_like.default", "uniform.default"), _uniform),
    **dict.fromkeys(("randn.default", "randn_like.default", "normal_functional.default"), _normal),
    **dict.fromkeys((f"normal.{kinds}" for kinds in _NORMAL_OVERLOADS), _normal),
    "exponential.default": _exponential,
    **dict.fromkeys(("bernoulli.default", "bernoulli.p", "bernoulli.Tensor"), _bernoulli),
    **dict.fromkeys(("randint.default", "randint.low", "randint_like.default"), _integers),
    "randint_like.low_dtype": _integers,
    "randperm.default": _permutation,
    "rrelu.default": _leaky,
}
