"""Import a module as an operator graph, through torch.export.

An import needs no memory for weights: build module and inputs under `torch.device("meta")`; they are exported as
tensors without data on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind

from graph.axes import operand_regions
from graph.errors import ImportFailure, NeedsDataError
from graph.importing import locations
from graph.importing.building import DraftOperator, GraphBuilder, Ref
from graph.importing.drawing import DRAWERS
from graph.importing.exporting import export, qualified_name
from graph.importing.finishing import finished
from graph.importing.functional import FunctionalProgram
from graph.importing.lowering import Lowered, Lowering
from graph.importing.outputs import Outputs, find_outputs
from graph.importing.recurrent import RECURRENT
from graph.importing.rewriting import REWRITERS
from graph.importing.specs import spec_of
from graph.importing.unrolling import UNROLLERS
from graph.intervals import full_region
from graph.operators import OperatorGraph, ValueKind
from graph.rules.registry import rule_for

BATCH_NORM_MODES = ("synchronized", "local")
# Larger tensors that a forward makes from numbers must be buffers, so that the graph stays small.
LARGEST_CONSTANT = 65536


def import_module(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str,
    batch_norm: str = "synchronized",
) -> OperatorGraph:
    """Return the operator graph of one training step's forward.

    Inputs are the tensors of `args`, then of `kwargs`, flattened in order: "input.0", "input.1", ... Frozen
    parameters are buffers that nothing updates. Weights and buffers that the loss does not depend on are left out.

    Args:
        module: returns a scalar loss, or an object whose `.loss` is one, a dict with one under "loss", or a tuple that
            begins with one. A module in evaluation mode is put into
            training mode.
        args: example inputs, which fix all sizes; real or meta.
        kwargs: further example inputs.
        name: of the graph, for messages.
        batch_norm: "synchronized" (statistics of the whole batch) or "local" (of each part).

    Raises:
        ImportFailure: the module cannot be exported, returns no scalar loss, or has sizes that depend on data.
    """
    graph, _, _ = _imported(module, args, kwargs or {}, name, batch_norm)
    return graph


def import_with_outputs(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[str],
    *,
    name: str,
    batch_norm: str = "synchronized",
) -> tuple[OperatorGraph, Outputs]:
    """Return the graph of `import_module`, and how other results of the module follow from its values.

    Args:
        module: as for `import_module`.
        args: likewise.
        kwargs: likewise.
        outputs: names in the module's result, as `named_tensors` gives them; one stands for all whose names it begins.
        name: as for `import_module`.
        batch_norm: likewise.

    Raises:
        ImportFailure: as by `import_module`; or a result is not there, or follows from what the graph has not.
    """
    graph, program, environment = _imported(module, args, kwargs, name, batch_norm)
    return graph, find_outputs(graph, program, environment, module, (args, kwargs), outputs)


def import_with_nodes(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    name: str,
    batch_norm: str = "synchronized",
) -> tuple[OperatorGraph, dict[str, tuple[str, ...]]]:
    """Return the graph of `import_module`, and its values by the calls of the functional program, in their order.

    Args:
        module: as for `import_module`.
        args: likewise.
        kwargs: likewise.
        name: likewise.
        batch_norm: likewise.

    Raises:
        ImportFailure: as by `import_module`.
    """
    graph, program, environment = _imported(module, args, kwargs, name, batch_norm)
    values: dict[str, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            lowered = environment.get(node, "")
            values[node.name] = tuple(filter(None, (lowered,) if isinstance(lowered, str) else lowered))
    return graph, values


def _imported(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, batch_norm: str
) -> tuple[OperatorGraph, FunctionalProgram, Mapping[fx.Node, Lowered]]:
    """Return the graph, the functional program, and for each node of the program its value in the graph."""
    if batch_norm not in BATCH_NORM_MODES:
        raise ImportFailure(
            f"model {name}: batch norm mode {batch_norm} is unknown, must be one of {', '.join(BATCH_NORM_MODES)}"
        )
    program = export(module, args, kwargs, name)
    builder = GraphBuilder(name)
    lowering = Lowering(builder, batch_norm, {**REWRITERS, **UNROLLERS, **RECURRENT, **DRAWERS})
    inputs, aliases = _place_values(program, module, lowering)
    for node in program.graph.nodes:
        if node.op == "call_function":
            _lower(lowering, node)
        elif node.op == "get_attr":
            raise ImportFailure(
                f"model {name}: {node.name} is a nested graph, must be none; avoid control flow that depends on data"
            )
    loss, updates = _results(program, lowering)
    updates = _copied(builder, updates)
    _remove_dead(builder, loss, updates)
    _require_own_memory(builder, module, {buffer for buffer, _ in updates})
    _stop_gradients(builder, loss)
    if not builder.values[loss].requires_gradient:
        raise ImportFailure(
            f"model {name}: the loss depends on no trainable weight, must depend on one; check requires_grad"
        )
    graph = finished(
        builder, inputs=inputs, loss=loss, updates=updates, aliases=aliases, batch_norm=batch_norm
    )
    return graph, program, lowering.environment


def _lower(lowering: Lowering, node: fx.Node) -> None:
    try:
        lowering.lower(node)
    except ImportFailure as error:
        location = locations.of_node(node)
        if not location:
            raise
        raise type(error)(f"{error} (at {location})") from None


def _place_values(
    program: FunctionalProgram, module: nn.Module, lowering: Lowering
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Add inputs, weights, buffers and constants; return the inputs' names and (alias, name) of tied tensors."""
    builder = lowering.builder
    first, aliases = _canonical_names(module)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")}
    inputs: list[str] = []
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        tensor = node.meta.get("val")
        spec = specs[node.name]
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(tensor, torch.Tensor):
                inputs.append(f"input.{len(inputs)}")
                builder.add_value(inputs[-1], spec_of(tensor, builder.model, node.name), ValueKind.INPUT)
                lowering.environment[node] = inputs[-1]
            continue
        if spec.kind is InputKind.CONSTANT_TENSOR:
            lowering.environment[node] = _constant(program, lowering, node, str(spec.target))
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            raise ImportFailure(
                f"model {builder.model}: input {node.name} is a {spec.kind.name.lower()}, must be a tensor; "
                "pass tensors and numbers alone"
            )
        target = first.get(qualified_name(str(spec.target)), qualified_name(str(spec.target)))
        if target not in builder.values:
            trainable = spec.kind is InputKind.PARAMETER and module.get_parameter(target).requires_grad
            builder.add_value(
                target,
                spec_of(tensor, builder.model, target),
                ValueKind.WEIGHT if trainable else ValueKind.BUFFER,
                trainable=trainable,
            )
        lowering.environment[node] = target
    return tuple(inputs), aliases


def _canonical_names(module: nn.Module) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    """Return the first name of every parameter and buffer by any of its names, and (alias, first name) pairs."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    aliases = []
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names[name] = first.setdefault(id(tensor), name)
        if names[name] != name:
            aliases.append((name, names[name]))
    return names, tuple(aliases)


def _require_own_memory(builder: GraphBuilder, module: nn.Module, renewed: set[str]) -> None:
    """Refuse tensors that share memory without being the same tensor, where a step changes one: here each has its own.

    Raises:
        ImportFailure: there are two.
    """
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    taken: dict[int, list[tuple[int, int, str]]] = {}
    for name, value in builder.values.items():
        tensor = tensors.get(name)
        if tensor is None or value.kind not in (ValueKind.WEIGHT, ValueKind.BUFFER) or not tensor.numel():
            continue
        first = int(tensor.storage_offset())
        last = first + sum(
            (int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        of_storage = taken.setdefault(tensor.untyped_storage()._cdata, [])
        for other_first, other_last, other in of_storage:
            changes = any(
                changed in renewed or builder.values[changed].kind is ValueKind.WEIGHT
                for changed in (name, other)
            )
            if changes and first <= other_last and other_first <= last:
                raise ImportFailure(
                    f"model {builder.model}: {name} and {other} are two tensors in the same memory, of which a step "
                    "changes one, must be one tensor or have memory of their own; assign the same one, or clone it"
                )
        of_storage.append((first, last, name))


def _constant(program: FunctionalProgram, lowering: Lowering, node: fx.Node, target: str) -> str:
    """Add a small tensor that the forward makes from numbers, as an operator that holds these."""
    tensor = program.constants[target]
    model = lowering.builder.model
    no_values = not isinstance(tensor, torch.Tensor) or (tensor.numel() > 0 and _has_no_data(tensor))
    if no_values or tensor.numel() > LARGEST_CONSTANT:
        raise (NeedsDataError if no_values else ImportFailure)(
            f"model {model}: constant {qualified_name(target)} has no values here or too many, must have at most "
            f"{LARGEST_CONSTANT}; register it as a buffer"
        )
    spec = spec_of(tensor, model, target)
    data = tuple(tensor.detach().reshape(-1).tolist()) if tensor.numel() else ()
    arguments = {"data": data, "size": spec.shape, "dtype": spec.dtype}
    return lowering.builder.add(node.name, "soapstone.constant", arguments, [spec])[0]


def _has_no_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _results(program: FunctionalProgram, lowering: Lowering) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the loss and, for each updated buffer, the value that replaces it."""
    nodes = {node.name: node for node in program.graph.nodes}
    loss = ""
    updates = []
    for spec in program.graph_signature.output_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind is OutputKind.BUFFER_MUTATION:
            value = lowering.value(node)
            buffer = qualified_name(str(spec.target))
            if value != buffer:
                updates.append((buffer, value))
        elif spec.kind is OutputKind.PARAMETER_MUTATION:
            name = qualified_name(str(spec.target))
            raise ImportFailure(
                f"model {lowering.builder.model}: its forward writes into parameter {name} (max_norm does, too), "
                "must leave parameters to the optimizer; make it a buffer, or write after the step"
            )
        elif spec.kind is OutputKind.USER_OUTPUT:
            loss = lowering.value(node)
    if lowering.builder.values[loss].kind is not ValueKind.OPERATOR:
        raise ImportFailure(
            f"model {lowering.builder.model}: the loss is {loss} itself, must be computed from the inputs"
        )
    return loss, tuple(updates)


def _copied(builder: GraphBuilder, updates: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the updates, through a copy into the buffer where no operator reads it whole or makes its new value.

    Devices hold of a buffer what their operators read, so that the copy, which the module makes too, is where all of
    it is kept.
    """
    renewed = {buffer for buffer, _ in updates}
    whole = {
        name
        for operator in builder.operators
        if not renewed.isdisjoint(operator.inputs)
        for name in _read_whole(builder, operator)
    }
    result = []
    for buffer, value in updates:
        if buffer not in whole or builder.values[value].kind is not ValueKind.OPERATOR:
            arguments = {"self": Ref(buffer), "src": Ref(value), "non_blocking": False}
            value = builder.add(f"{buffer}.renewed", "aten.copy.default", arguments, [builder.spec(buffer)])[
                0
            ]
        result.append((buffer, value))
    return tuple(result)


def _read_whole(builder: GraphBuilder, operator: DraftOperator) -> list[str]:
    """Return the inputs of which an operator reads every element: a slice does not."""
    space = rule_for(operator.target).space(builder.signature(operator))
    degrees = (1,) * len(space.axes)
    return [
        name
        for name, operand in zip(operator.inputs, space.inputs, strict=True)
        if operand_regions(space.axes, operand, degrees)[0] == full_region(builder.spec(name).shape)
    ]


def _ancestors(builder: GraphBuilder, values: Sequence[str]) -> set[str]:
    """Return the names of the values that `values` are computed from, and their own."""
    needed = set(values)
    for operator in reversed(builder.operators):
        if not needed.isdisjoint(operator.outputs):
            needed.update(operator.inputs)
    return needed


def _remove_dead(builder: GraphBuilder, loss: str, updates: Sequence[tuple[str, str]]) -> None:
    """Drop operators, weights and buffers on which neither the loss nor a buffer's update depends."""
    needed = _ancestors(builder, [loss, *(value for _, value in updates)])
    builder.operators = [
        operator for operator in builder.operators if not needed.isdisjoint(operator.outputs)
    ]
    kept = {name for operator in builder.operators for name in (*operator.inputs, *operator.outputs)}
    kept.update(buffer for buffer, _ in updates)
    builder.values = {
        name: value for name, value in builder.values.items() if name in kept or value.kind is ValueKind.INPUT
    }


def _stop_gradients(builder: GraphBuilder, loss: str) -> None:
    """Clear the flag of values from which no gradient of the loss can come."""
    needed = {loss}
    for operator in reversed(builder.operators):
        if any(name in needed and builder.values[name].requires_gradient for name in operator.outputs):
            needed.update(operator.inputs)
    for name, value in builder.values.items():
        if name not in needed:
            value.requires_gradient = False
