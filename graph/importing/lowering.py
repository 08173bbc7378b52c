"""From an exported ATen graph to our operators: one name for each meaning, so that few rules and few keys suffice."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from graph.errors import ImportFailure
from graph.importing.building import GraphBuilder, Ref
from graph.importing.specs import spec_of
from graph.operators import FLOATING, Argument, TensorSpec
from graph.rules.common import positive
from graph.rules.reductions import MEAN

# What a node stands for: a value, or several, of which None are not available.
Lowered = str | tuple[str | None, ...]
Arguments = dict[str, Any]
Lowerer = Callable[["Lowering", str, fx.Node, Arguments], Lowered]

_SPELLINGS = (
    ("_native_batch_norm_legit_functional", "batch_norm"),
    ("_native_batch_norm_legit_no_training", "batch_norm"),
    ("_native_batch_norm_legit", "batch_norm"),
    ("native_dropout", "dropout"),
)

# They say where and how memory lies, which a plan decides anew.
DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})


class Lowering:
    """Lowers the calls of one graph in order; `rewriters` are further lowerers, by name."""

    def __init__(
        self, builder: GraphBuilder, batch_norm: str, rewriters: Mapping[str, Lowerer] = MappingProxyType({})
    ) -> None:
        self.builder = builder
        self.batch_norm = batch_norm
        self.rewriters = rewriters
        self.environment: dict[fx.Node, Lowered] = {}

    def lower(self, node: fx.Node) -> None:
        """Lower one call."""
        if node.target is python_operator.getitem:
            source, position = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(position, int)
            lowered = self.environment.get(source)
            if isinstance(lowered, tuple) and lowered[position] is not None:
                self.environment[node] = lowered[position] or ""
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise ImportFailure(
                f"model {self.builder.model}: {node.name} is a {type(node.target).__name__}, must be an ATen operator; "
                "avoid control flow that depends on data"
            )
        if not node.users:
            return  # checks and the like; nothing here has side effects
        arguments = complete_arguments(node)
        name = node.name
        for aten_name, short_name in _SPELLINGS:
            name = name.replace(aten_name, short_name)
        target = str(node.target).removeprefix("aten.")
        lowerer = LOWERERS.get(target) or self.rewriters.get(target, plain)
        self.environment[node] = lowerer(self, name, node, arguments)

    def value(self, node: Any) -> str:
        """Return the value that a node stands for.

        Raises:
            ImportFailure: it is an output that the lowered operator does not have.
        """
        value = self.environment.get(node)
        if not isinstance(value, str):
            raise ImportFailure(
                f"model {self.builder.model}: {node} is used, but a part of the graph cannot make it; "
                "use the operator's first output alone"
            )
        return value

    def argument(self, value: Any, where: str) -> Argument:
        """Return an argument with `Ref`s for nodes."""

        def resolve(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return Ref(self.value(item))
            if isinstance(item, (tuple, list)):
                return tuple(resolve(part) for part in item)
            return item

        return plain_argument(resolve(value), self.builder.model, where)

    def add(
        self, name: str, target: str, arguments: Arguments, outputs: Sequence[TensorSpec]
    ) -> tuple[str, ...]:
        """Add an operator from arguments that still hold nodes."""
        resolved = {key: self.argument(value, name) for key, value in arguments.items()}
        return self.builder.add(name, target, resolved, outputs)

    def one(self, name: str, target: str, arguments: Arguments, output: TensorSpec) -> str:
        """Add an operator with one output."""
        return self.add(name, target, arguments, [output])[0]

    def spec(self, node: fx.Node) -> TensorSpec:
        """Return the spec of a node's only result."""
        return spec_of(node.meta["val"], self.builder.model, node.name)


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


def plain(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Keep an operator as it is."""
    assert isinstance(node.target, torch._ops.OpOverload)
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    if draws and all(arguments.get(probability, 1) for probability in ("dropout_p", "dropout")):
        raise ImportFailure(
            f"model {lowering.builder.model}: {name} ({node.target}) draws random numbers that parts cannot repeat, "
            "must be uniform, normal, exponential, bernoulli or integer; draw them outside and pass them as an input"
        )
    result = node.meta["val"]
    many = isinstance(result, (tuple, list))
    specs = [spec_of(tensor, lowering.builder.model, name) for tensor in (result if many else [result])]
    if arguments.get("dtype", "") is None and not node.all_input_nodes:
        # A factory's default would be the process's, not the graph's.
        arguments = {**arguments, "dtype": specs[0].dtype}
    names = lowering.add(name, str(node.target), arguments, specs)
    return names if many else names[0]


def _alias(lowering: Lowering, _name: str, _node: fx.Node, arguments: Arguments) -> Lowered:
    return lowering.value(next(iter(arguments.values())))


def _reshape(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    return reshaped(lowering, name, lowering.value(next(iter(arguments.values()))), lowering.spec(node).shape)


def reshaped(lowering: Lowering, name: str, source: str, shape: tuple[int, ...]) -> str:
    """Return `source` in another shape; itself where it has that shape."""
    spec = TensorSpec(shape, lowering.builder.spec(source).dtype)
    if lowering.builder.spec(source) == spec:
        return source
    return lowering.one(name, "aten.view.default", {"self": Ref(source), "size": shape}, spec)


def _permute(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    source = lowering.value(arguments["self"])
    rank = len(lowering.builder.spec(source).shape)
    order = list(range(rank))
    if "dims" in arguments:
        order = [positive(dim, rank) for dim in arguments["dims"]]
    elif rank >= 2:
        first = positive(arguments.get("dim0", 0), rank)
        second = positive(arguments.get("dim1", 1), rank)
        order[first], order[second] = order[second], order[first]
    if order == list(range(rank)):
        return source
    return lowering.one(
        name, "aten.permute.default", {"self": Ref(source), "dims": tuple(order)}, lowering.spec(node)
    )


def _convert(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    return converted(lowering, name, lowering.value(arguments["self"]), lowering.spec(node).dtype)


def converted(lowering: Lowering, name: str, source: str, dtype: str) -> str:
    """Return `source` in another dtype; itself where it has that dtype."""
    spec = TensorSpec(lowering.builder.spec(source).shape, dtype)
    if lowering.builder.spec(source) == spec:
        return source
    return lowering.one(name, "aten._to_copy.default", {"self": Ref(source), "dtype": dtype}, spec)


def _detach(lowering: Lowering, name: str, _node: fx.Node, arguments: Arguments) -> Lowered:
    return detached(lowering, name, lowering.value(arguments["self"]))


def detached(lowering: Lowering, name: str, source: str) -> str:
    """Return `source` without a gradient; itself where it has none."""
    if not lowering.builder.values[source].requires_gradient:
        return source
    return lowering.one(name, "aten.detach.default", {"self": Ref(source)}, lowering.builder.spec(source))


def _expand(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    return expanded(lowering, name, lowering.value(arguments["self"]), lowering.spec(node))


def expanded(lowering: Lowering, name: str, source: str, spec: TensorSpec) -> str:
    """Return `source` expanded to a spec's shape; itself where it has that shape."""
    if lowering.builder.spec(source).shape == spec.shape:
        return source
    arguments = {"self": Ref(source), "size": spec.shape, "implicit": False}
    return lowering.one(name, "aten.expand.default", arguments, spec)


def _broadcast(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    return tuple(
        expanded(lowering, f"{name}.{position}", lowering.value(source), spec_of(result, name, name))
        for position, (source, result) in enumerate(zip(arguments["tensors"], node.meta["val"], strict=True))
    )


def _slice(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    source = lowering.value(arguments["self"])
    if lowering.builder.spec(source).shape == lowering.spec(node).shape:
        return source
    return lowering.one(name, "aten.slice.Tensor", arguments, lowering.spec(node))


def _cat(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    # An empty vector may be joined to anything; it is a leftover that adds nothing.
    tensors = [tensor for tensor in arguments["tensors"] if tuple(tensor.meta["val"].shape) != (0,)]
    if len(tensors) == 1:
        return lowering.value(tensors[0])
    return lowering.one(name, "aten.cat.default", {**arguments, "tensors": tensors}, lowering.spec(node))


def _split(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    specs = [spec_of(result, lowering.builder.model, name) for result in node.meta["val"]]
    source = lowering.value(arguments["self"])
    if len(specs) == 1:
        return (source,)
    dim = positive(arguments["dim"], len(specs[0].shape))
    sizes = tuple(spec.shape[dim] for spec in specs)
    resolved = {"self": Ref(source), "split_sizes": sizes, "dim": dim}
    return lowering.builder.add(name, "aten.split_with_sizes.default", resolved, specs)


def _dropout(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    several = isinstance(node.meta["val"], (tuple, list))
    source = lowering.value(arguments["input"])
    result = source
    if arguments["train"] is not False and arguments["p"] > 0:
        given = {"self": Ref(source), "p": float(arguments["p"])}
        result = lowering.one(name, "soapstone.dropout", given, lowering.builder.spec(source))
    return (result, None) if several else result


def _attention(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    if not arguments["dropout_p"]:
        return plain(lowering, name, node, arguments)
    return lowering.one(name, "soapstone.attention", {**arguments, "start": 0}, lowering.spec(node))


def _factory(fill: int | None) -> Lowerer:
    def lower(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
        spec = lowering.spec(node)
        value = arguments["fill_value"] if fill is None else fill
        if fill is not None and spec.dtype in FLOATING:
            value = float(fill)
        given: Arguments = {"size": spec.shape, "fill_value": value, "dtype": spec.dtype}
        return lowering.one(name, "aten.full.default", given, spec)

    return lower


def _arange(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    spec = lowering.spec(node)
    given: Arguments = {
        "start": arguments.get("start", 0),
        "end": arguments["end"],
        "step": arguments.get("step", 1),
        "dtype": spec.dtype,
    }
    return lowering.one(name, "aten.arange.start_step", given, spec)


def _copy(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    spec = lowering.spec(node)
    source = converted(lowering, f"{name}.to", lowering.value(arguments["src"]), spec.dtype)
    return expanded(lowering, name, source, spec)


def _cross_entropy(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    if arguments["reduction"] != MEAN:
        return plain(lowering, name, node, arguments)
    given = {key: value for key, value in arguments.items() if key != "reduction"}
    return mean_of_targets(lowering, name, "soapstone.cross_entropy_sums", given, lowering.spec(node))


def mean_of_targets(lowering: Lowering, name: str, target: str, given: Arguments, spec: TensorSpec) -> str:
    """Divide a sum of losses by a sum of weights, both by `target`, so that both may be sums of parts."""
    kind = "float64" if spec.dtype == "float64" else "float32"
    sums = lowering.one(f"{name}.sums", target, given, TensorSpec((2,), kind))
    return lowering.one(f"{name}.ratio", "soapstone.ratio", {"self": Ref(sums), "dtype": spec.dtype}, spec)


def _batch_norm(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    if not arguments.get("training", True):
        return plain(lowering, name, node, arguments)
    builder = lowering.builder
    given = {key: lowering.argument(value, name) for key, value in arguments.items()}
    source = given["input"]
    spec = builder.spec(source.name)
    count = spec.elements // max(spec.shape[1], 1)
    statistics = TensorSpec((2, spec.shape[1]), "float64")
    if lowering.batch_norm == "local":
        settings = {key: given[key] for key in ("input", "weight", "bias", "eps")}
        output, moments = builder.add(name, "soapstone.batch_norm", settings, [spec, statistics])
    else:
        moments = lowering.one(f"{name}.moments", "soapstone.moments", {"input": source}, statistics)
        output = _normalized(lowering, name, given, moments, count)
    if "running_mean" not in given or given["running_mean"] is None:
        return output, None, None
    running = builder.add(
        f"{name}.statistics",
        "soapstone.running_statistics",
        {
            "moments": Ref(moments),
            "mean": given["running_mean"],
            "variance": given["running_var"],
            "momentum": given["momentum"],
            "count": count,
        },
        [builder.spec(given["running_mean"].name), builder.spec(given["running_var"].name)],
    )
    return output, None, None, *running


def _fixed_batch_norm(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Normalize by running statistics, which stay: a batch norm in evaluation mode inside a training step."""
    spec = spec_of(node.meta["val"][0], lowering.builder.model, name)
    moments = lowering.one(
        f"{name}.moments",
        "soapstone.fixed_moments",
        {"mean": arguments["running_mean"], "variance": arguments["running_var"]},
        TensorSpec((2, spec.shape[1]), "float64"),
    )
    return _normalized(lowering, name, arguments, moments, 1), None, None


def _normalized(lowering: Lowering, name: str, given: Arguments, moments: str, count: int) -> str:
    """Normalize an activation by moments of `count` elements a channel."""
    settings = {
        "input": given["input"],
        "moments": Ref(moments),
        "weight": given["weight"],
        "bias": given["bias"],
        "count": count,
        "eps": given["eps"],
    }
    source = lowering.argument(given["input"], name)
    return lowering.one(name, "soapstone.batch_norm_apply", settings, lowering.builder.spec(source.name))


def _scalar_tensor(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    return _factory(None)(lowering, name, node, {"fill_value": arguments["s"]})


LOWERERS: dict[str, Lowerer] = {
    **dict.fromkeys(
        ("clone.default", "contiguous.default", "alias.default", "lift_fresh_copy.default"), _alias
    ),
    **dict.fromkeys(("lift_fresh.default", "positive.default"), _alias),
    **dict.fromkeys(("view.default", "_unsafe_view.default", "reshape.default", "view_as.default"), _reshape),
    **dict.fromkeys(("flatten.using_ints", "unflatten.int", "unsqueeze.default", "ravel.default"), _reshape),
    **dict.fromkeys(("squeeze.default", "squeeze.dim", "squeeze.dims"), _reshape),
    **dict.fromkeys(("permute.default", "transpose.int", "t.default"), _permute),
    **dict.fromkeys(("_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "to.other"), _convert),
    "type_as.default": _convert,
    "detach.default": _detach,
    "expand.default": _expand,
    "expand_as.default": _expand,
    "broadcast_to.default": _expand,
    "broadcast_tensors.default": _broadcast,
    "slice.Tensor": _slice,
    "cat.default": _cat,
    **dict.fromkeys(("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default"), _split),
    **dict.fromkeys(("native_dropout.default", "dropout.default"), _dropout),
    "scaled_dot_product_attention.default": _attention,
    **dict.fromkeys(("zeros.default", "new_zeros.default", "zeros_like.default"), _factory(0)),
    **dict.fromkeys(("empty.memory_format", "new_empty.default", "empty_like.default"), _factory(0)),
    **dict.fromkeys(("ones.default", "new_ones.default", "ones_like.default"), _factory(1)),
    **dict.fromkeys(("full.default", "new_full.default", "full_like.default"), _factory(None)),
    **dict.fromkeys(("arange.default", "arange.start", "arange.start_step"), _arange),
    "scalar_tensor.default": _scalar_tensor,
    "copy.default": _copy,
    "cross_entropy_loss.default": _cross_entropy,
    "_native_batch_norm_legit_functional.default": _batch_norm,
    "_native_batch_norm_legit.no_stats": _batch_norm,
    "_native_batch_norm_legit_no_training.default": _fixed_batch_norm,
}
