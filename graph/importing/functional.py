"""From an exported program to a functional one: no operator writes into a tensor, none is a name for several others.

`ExportedProgram.run_decompositions` does it for every program by tracing it twice more, which takes longer than the
export. Programs of common operators are rewritten here node by node, to what it returns: the same calls, names, order,
but for calls that only assert.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from graph.aliasing import may_alias

_ATEN = torch.ops.aten

# Operators that stay as they are, whatever their arguments: they write into nothing, and each is called for itself.
_KEPT = frozenset(
    {
        _ATEN.abs.default,
        _ATEN.adaptive_avg_pool2d.default,
        _ATEN.add.Tensor,
        _ATEN.addmm.default,
        _ATEN.alias.default,
        _ATEN.arange.default,
        _ATEN.arange.start_step,
        _ATEN.avg_pool2d.default,
        _ATEN.binary_cross_entropy_with_logits.default,
        _ATEN.bmm.default,
        _ATEN.broadcast_tensors.default,
        _ATEN.cat.default,
        _ATEN.clone.default,
        _ATEN.conv1d.default,
        _ATEN.conv2d.default,
        _ATEN.conv_transpose2d.input,
        _ATEN.cos.default,
        _ATEN.cross_entropy_loss.default,
        _ATEN.detach.default,
        _ATEN.div.Tensor,
        _ATEN.embedding.default,
        _ATEN.exp.default,
        _ATEN.expand.default,
        _ATEN.full.default,
        _ATEN.ge.Scalar,
        _ATEN.gelu.default,
        _ATEN.gru.input,
        _ATEN.gt.Scalar,
        _ATEN.hardsigmoid.default,
        _ATEN.hardswish.default,
        _ATEN.hardtanh.default,
        _ATEN.index.Tensor,
        _ATEN.index_select.default,
        _ATEN.layer_norm.default,
        _ATEN.le.Tensor,
        _ATEN.leaky_relu.default,
        _ATEN.linear.default,
        _ATEN.log.default,
        _ATEN.log_softmax.int,
        _ATEN.lstm.input,
        _ATEN.lstm_cell.default,
        _ATEN.masked_fill.Scalar,
        _ATEN.matmul.default,
        _ATEN.max_pool2d.default,
        _ATEN.maximum.default,
        _ATEN.mean.default,
        _ATEN.mean.dim,
        _ATEN.mse_loss.default,
        _ATEN.mul.Tensor,
        _ATEN.neg.default,
        _ATEN.new_zeros.default,
        _ATEN.nll_loss_nd.default,
        _ATEN.ones.default,
        _ATEN.ones_like.default,
        _ATEN.pad.default,
        _ATEN.permute.default,
        _ATEN.pow.Tensor_Scalar,
        _ATEN.rand.default,
        _ATEN.relu.default,
        _ATEN.rnn_tanh.input,
        _ATEN.rsqrt.default,
        _ATEN.scaled_dot_product_attention.default,
        _ATEN.select.int,
        _ATEN.sigmoid.default,
        _ATEN.silu.default,
        _ATEN.sin.default,
        _ATEN.slice.Tensor,
        _ATEN.softmax.int,
        _ATEN.softplus.default,
        _ATEN.split.Tensor,
        _ATEN.sqrt.default,
        _ATEN.square.default,
        _ATEN.squeeze.dim,
        _ATEN.stack.default,
        _ATEN.sub.Tensor,
        _ATEN.sum.default,
        _ATEN.sum.dim_IntList,
        _ATEN.t.default,
        _ATEN.tanh.default,
        _ATEN.transpose.int,
        _ATEN.triu.default,
        _ATEN.unbind.int,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
        _ATEN.where.self,
        _ATEN.zeros.default,
    }
)
# Operators that write their result over their first argument, and those that return it.
_IN_PLACE: dict[Any, Any] = {
    _ATEN.add_.Tensor: _ATEN.add.Tensor,
    _ATEN.hardswish_.default: _ATEN.hardswish.default,
    _ATEN.hardtanh_.default: _ATEN.hardtanh.default,
    _ATEN.leaky_relu_.default: _ATEN.leaky_relu.default,
    _ATEN.mul_.Tensor: _ATEN.mul.Tensor,
    _ATEN.relu_.default: _ATEN.relu.default,
    _ATEN.silu_.default: _ATEN.silu.default,
}
# Calls that are left out: what they hold of their argument held when the program was exported.
_UNUSED = frozenset({_ATEN._assert_tensor_metadata.default})
_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT)
_STATISTICS = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class FunctionalProgram:
    """A functional program: its graph, what its inputs and outputs are, and the constants among its inputs by name."""

    graph: fx.Graph
    graph_signature: ExportGraphSignature
    constants: Mapping[str, Any]


def functional_program(program: ExportedProgram) -> FunctionalProgram:
    """Return the functional program of one that `torch.export.export` returned for a module in training mode."""
    # Several names of one buffer: torch knows which of them is updated.
    state = [spec.target for spec in program.graph_signature.input_specs if spec.kind is InputKind.BUFFER]
    own = {id(program.state_dict[name]) for name in state if name in program.state_dict}
    if len(own) == sum(name in program.state_dict for name in state):
        try:
            return _Rewriting(program).rewritten()
        except _Unknown:
            pass
    traced = program.run_decompositions({})
    return FunctionalProgram(traced.graph, traced.graph_signature, traced.constants)


class _Unknown(Exception):
    """A program has something that is not rewritten here."""


class _Rewriting:
    """One program that is rewritten into `graph`; `nodes` has for each of its nodes the new one."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node | list[fx.Node]] = {}
        self.updates: dict[str, fx.Node] = {}
        self.parts_of_program = {
            name: part
            for name, part in program.graph_module.named_children()
            if isinstance(part, fx.GraphModule)
        }
        self.kinds = {
            spec.arg.name: spec.kind
            for spec in program.graph_signature.input_specs
            if isinstance(spec.arg, TensorArgument)
        }

    def rewritten(self) -> FunctionalProgram:
        """Return the functional program.

        Raises:
            _Unknown: it has something that is not rewritten here.
        """
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                if self.kinds.get(node.name) not in _INPUTS:
                    raise _Unknown
                self.nodes[node] = self.graph.node_copy(node)
            elif node.op == "output":
                results = self._outputs(node)
            else:
                self._call(node)
        # Draws that nobody uses, too.
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
        signature = ExportGraphSignature(list(self.program.graph_signature.input_specs), results)
        return FunctionalProgram(self.graph, signature, self.program.constants)

    def _call(self, node: fx.Node) -> None:
        if node.target in _UNUSED or (node.op == "get_attr" and node.target in self.parts_of_program):
            return
        if node.op != "call_function" or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
            raise _Unknown
        _rewriter(node)(self, node)

    def call_part(self, old: fx.Node, name: str, arguments: Sequence[Any]) -> None:
        """Add the calls of a part of the program in place of the call of that part."""
        given = iter(arguments)
        for node in self.parts_of_program[name].graph.nodes:
            if node.op == "placeholder":
                self.nodes[node] = self.plain(next(given))
            elif node.op == "output":
                self.nodes[old] = list(self.plain(node.args[0]))
            else:
                self._call(node)

    def _outputs(self, node: fx.Node) -> list[OutputSpec]:
        """Return new values of buffers, in the buffers' order, and then the results of the module."""
        results: list[tuple[OutputKind, fx.Node, str | None]] = [
            (OutputKind.BUFFER_MUTATION, self.updates[spec.arg.name], spec.target)
            for spec in self.program.graph_signature.input_specs
            if isinstance(spec.arg, TensorArgument) and spec.arg.name in self.updates
        ]
        for spec, result in zip(
            self.program.graph_signature.output_specs, self.plain(node.args[0]), strict=True
        ):
            if spec.kind is not OutputKind.USER_OUTPUT or not isinstance(result, fx.Node):
                raise _Unknown
            if result.op == "placeholder":
                raise _Unknown  # an input for a name of which there is a call in a trace
            results.append((spec.kind, result, spec.target))
        self.graph.output(tuple(result for _, result, _ in results))
        return [OutputSpec(kind, TensorArgument(result.name), target) for kind, result, target in results]

    def plain(self, value: Any) -> Any:
        """Return an argument of the old graph with the new graph's nodes."""
        return fx.node.map_arg(value, self.new)

    def new(self, node: fx.Node) -> fx.Node:
        """Return the new node of an old one.

        Raises:
            _Unknown: it has several results.
        """
        new = self.nodes[node]
        if isinstance(new, list):
            raise _Unknown
        return new

    def call(self, old: fx.Node, target: Any, arguments: tuple[Any, ...], result: Any) -> fx.Node:
        """Add a call in place of an old one, whose arguments are nodes of the old graph; `result`: stand-ins."""
        return self._added(old, target, self.plain(arguments), {}, target.overloadpacket.__name__, result)

    def keep(self, old: fx.Node) -> None:
        """Add a call as it is."""
        target: Any = old.target
        result = old.meta["val"]
        arguments, keywords = self.plain(old.args), self.plain(old.kwargs)
        new = self._added(old, target, arguments, keywords, target.overloadpacket.__name__, result)
        self.nodes[old] = self.parts(old, new, result) if isinstance(result, (tuple, list)) else new

    def parts(self, old: fx.Node, call: fx.Node, results: Any) -> list[fx.Node]:
        """Add a getitem node for each result of a call; unused nodes are eliminated at the end, as in a trace."""
        return [
            self._added(old, python_operator.getitem, (call, position), {}, "getitem", result)
            for position, result in enumerate(results)
        ]

    def _added(
        self, old: fx.Node, target: Any, arguments: Any, keywords: Any, name: str, result: Any
    ) -> fx.Node:
        new = self.graph.create_node("call_function", target, arguments, keywords, name)
        new.meta = {**old.meta, "val": result}
        return new

    def replace(self, given: fx.Node, new: fx.Node) -> None:
        """Let `new` stand wherever `given` stood for an old node."""
        for old, nodes in self.nodes.items():
            if isinstance(nodes, list):
                nodes[:] = [new if node is given else node for node in nodes]
            elif nodes is given:
                self.nodes[old] = new

    def is_buffer(self, node: object) -> bool:
        """Return whether a node is a buffer of the program: within a part of it inputs may have the same names."""
        return (
            isinstance(node, fx.Node)
            and node.graph is self.program.graph
            and self.kinds.get(node.name) is InputKind.BUFFER
        )

    def is_only_name(self, node: fx.Node) -> bool:
        """Return whether no other node of the new graph is a name for the memory of `node`'s result."""
        call = node.args[0] if node.target is python_operator.getitem else node
        assert isinstance(call, fx.Node)
        return call.op == "call_function" and not any(
            may_alias(str(maker.target)) for maker in (call, *node.users)
        )

    def is_own_buffer(self, node: object) -> bool:
        """Return whether a node is a buffer that one call of the program takes, and no other."""
        return isinstance(node, fx.Node) and self.is_buffer(node) and len(node.users) == 1


def _rewriter(node: fx.Node) -> Callable[[_Rewriting, fx.Node], None]:
    if node.target in _KEPT:
        return _Rewriting.keep
    rewriter = _REWRITERS.get(node.target)
    if rewriter is None:
        raise _Unknown
    return rewriter


def _getitem(rewriting: _Rewriting, node: fx.Node) -> None:
    """Map a getitem to the node of that result of its call."""
    call, position = node.args
    assert isinstance(call, fx.Node)
    assert isinstance(position, int)
    results = rewriting.nodes[call]
    if not isinstance(results, list):
        raise _Unknown
    rewriting.nodes[node] = results[position]


def _same(rewriting: _Rewriting, node: fx.Node) -> None:
    """Map a call that returns its argument to the node of that argument."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rewriting.nodes[node] = rewriting.nodes[source]


def _detach_in_place(rewriting: _Rewriting, node: fx.Node) -> None:
    """Map a constant that is detached in place to its copy, which has no gradient anyway."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.target is not _ATEN.lift_fresh_copy.default:
        raise _Unknown
    _same(rewriting, node)


def _copy(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite a call as a copy of its first argument."""
    rewriting.nodes[node] = rewriting.call(node, _ATEN.clone.default, node.args[:1], node.meta["val"])


def _convert(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite a conversion as a copy, or as its tensor where that is so already."""
    source, result = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    given = source.meta["val"]
    is_plain = len(node.args) <= 3 and not {"copy", "memory_format"} & node.kwargs.keys()
    if is_plain and (given.dtype, given.device, given.layout) == (result.dtype, result.device, result.layout):
        _same(rewriting, node)
    elif node.target is _ATEN.to.dtype and len(node.args) == 2 and not node.kwargs:
        copied = rewriting.call(node, _ATEN._to_copy.default, (source,), result)
        copied.kwargs = {"dtype": result.dtype}
        rewriting.nodes[node] = copied
    else:
        raise _Unknown


def _contiguous(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite a contiguous tensor as a copy, or as itself where it is so already."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if len(node.args) != 1 or node.kwargs:
        raise _Unknown
    if source.meta["val"].is_contiguous():
        _same(rewriting, node)
    else:
        rewriting.nodes[node] = _contiguous_copy(rewriting, node, source)


def _contiguous_copy(rewriting: _Rewriting, node: fx.Node, source: fx.Node) -> fx.Node:
    copied = rewriting.call(node, _ATEN.clone.default, (source,), source.meta["val"].contiguous())
    copied.kwargs = {"memory_format": torch.contiguous_format}
    return copied


def _in_place(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite an in-place operator as the one that returns its result, and let all later calls read that result."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is _ATEN.add_.Tensor and rewriting.is_buffer(source):
        _count(rewriting, node)
        return
    written = rewriting.nodes[source]
    if not isinstance(written, fx.Node) or not rewriting.is_only_name(written):
        raise _Unknown
    names = (node, *(old for old, new in rewriting.nodes.items() if new is written))
    if any(may_alias(str(reader.target)) for name in names for reader in name.users):
        raise _Unknown  # a trace makes such a view twice
    others = [item.meta["val"] for item in node.args[1:] if isinstance(item, fx.Node)]
    if any(other.dtype != source.meta["val"].dtype for other in others):
        raise _Unknown  # the result is converted
    result = rewriting.call(node, _IN_PLACE[node.target], node.args, node.meta["val"])
    result.kwargs = rewriting.plain(node.kwargs)
    rewriting.replace(written, result)
    rewriting.nodes[node] = result


def _part(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite the call of a part of the program, whatever is said of gradients in it, as that part's calls."""
    _, part, *arguments = node.args
    assert isinstance(part, fx.Node)
    rewriting.call_part(node, str(part.target), arguments)


def _dropout(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite a dropout as the operator that returns its mask as well."""
    if len(node.args) != 3 or node.args[2] is not True:
        raise _Unknown
    if not node.args[1]:
        _copy(rewriting, node)
        return
    result = node.meta["val"]
    results = (result, result.new_empty(result.shape, dtype=torch.bool))
    new = rewriting.call(node, _ATEN.native_dropout.default, node.args, results)
    rewriting.nodes[node] = rewriting.parts(node, new, results)[0]


def _reshape(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite a reshape or flatten as a view of its tensor, or of a copy where the strides allow no view."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    given, result = source.meta["val"], node.meta["val"]
    size = list(result.shape)
    if node.target is _ATEN.flatten.using_ints and list(given.shape) == size:
        _same(rewriting, node)
    elif given.is_contiguous():
        asked = size if node.target is _ATEN.flatten.using_ints else node.args[1]
        rewriting.nodes[node] = rewriting.call(node, _ATEN.view.default, (source, asked), result)
    elif _has_view(given, size):
        rewriting.nodes[node] = rewriting.call(node, _ATEN.view.default, (source, size), result)
    else:
        copied = _contiguous_copy(rewriting, node, source)
        new = rewriting.call(node, _ATEN._unsafe_view.default, (source, size), result)
        new.replace_input_with(rewriting.new(source), copied)
        rewriting.nodes[node] = new


def _has_view(tensor: torch.Tensor, size: list[int]) -> bool:
    try:
        torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(size)
    except (RuntimeError, ValueError):  # the latter within a fake mode
        return False
    return True


def _batch_norm(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite a batch norm as the operator that returns its new running statistics."""
    if len(node.args) != 9 or node.args[5] is not True or not node.meta["val"].numel():
        raise _Unknown
    running = node.args[3:5]
    if not all(map(rewriting.is_own_buffer, running)):
        raise _Unknown
    results = tuple(item.meta["val"] for item in (node, *running, *running) if isinstance(item, fx.Node))
    if any(statistics.dtype not in _STATISTICS for statistics in results[1:]):
        raise _Unknown  # made in float32, and converted
    new = rewriting.call(node, _ATEN._native_batch_norm_legit_functional.default, node.args[:8], results)
    parts = rewriting.parts(node, new, results)
    rewriting.nodes[node] = parts[0]
    for buffer, value in zip(running, parts[3:], strict=True):
        assert isinstance(buffer, fx.Node)
        rewriting.updates[buffer.name] = value


def _count(rewriting: _Rewriting, node: fx.Node) -> None:
    """Rewrite the in-place addition of a number to a buffer as a sum that updates the buffer."""
    buffer = node.args[0]
    if node.users or node.kwargs or not rewriting.is_own_buffer(buffer) or isinstance(node.args[1], fx.Node):
        raise _Unknown
    assert isinstance(buffer, fx.Node)
    rewriting.updates[buffer.name] = rewriting.call(node, _ATEN.add.Tensor, node.args, buffer.meta["val"])


_REWRITERS: dict[Any, Callable[[_Rewriting, fx.Node], None]] = {
    python_operator.getitem: _getitem,
    **dict.fromkeys(_IN_PLACE, _in_place),
    _ATEN.batch_norm.default: _batch_norm,
    _ATEN.contiguous.default: _contiguous,
    _ATEN.detach_.default: _detach_in_place,
    _ATEN.dropout.default: _dropout,
    _ATEN.flatten.using_ints: _reshape,
    _ATEN.lift_fresh_copy.default: _copy,
    _ATEN.reshape.default: _reshape,
    _ATEN.to.device: _convert,
    _ATEN.to.dtype: _convert,
    _ATEN.to.dtype_layout: _convert,
    torch.ops.higher_order.wrap_with_set_grad_enabled: _part,
}
