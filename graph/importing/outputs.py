"""Results of a module beside its loss: logits, metrics, whatever its dict, tuple or object holds.

The graph has what the loss depends on, and stays as it is: strategies name it. A result is a value of it, or is
computed from whole values and inputs by the same ATen operators that the module calls. For that the module is exported
once more, with these results; its operators on which the loss depends are, in their order, those of the first export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind

from graph.errors import ImportFailure
from graph.importing.exporting import export, qualified_name
from graph.importing.functional import FunctionalProgram
from graph.importing.lowering import Lowered
from graph.operators import OperatorGraph, ValueKind


@dataclass(frozen=True)
class Outputs:
    """Results of a module, with the values, constants and calls that they are computed from.

    nodes: by name of the result.
    sources: for each node that is there already, the name of a value or an input of the graph.
    constants: the tensors that other nodes stand for.
    calls: to be executed, in order.
    """

    nodes: Mapping[str, fx.Node]
    sources: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, torch.Tensor]
    calls: tuple[fx.Node, ...]

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the results by name, from the whole tensors of all `sources`, on the CPU."""
        results: dict[fx.Node, Any] = dict(self.constants)
        results.update({node: tensors[name] for node, name in self.sources.items()})
        with torch.no_grad():
            for node in self.calls:
                args = fx.node.map_arg(node.args, results.__getitem__)
                kwargs = fx.node.map_arg(node.kwargs, results.__getitem__)
                assert callable(node.target)
                results[node] = node.target(*args, **kwargs)
        return {name: results[node] for name, node in self.nodes.items()}


def named_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a module's result holds by dotted names: keys, fields, and places in tuples."""
    return dict(_named(result, ()))


def _named(item: Any, path: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        yield ".".join(path), item
        return
    parts: Mapping[Any, Any] = {}
    if isinstance(item, Mapping):
        parts = item
    elif hasattr(item, "_fields"):
        parts = dict(zip(item._fields, item, strict=True))
    elif isinstance(item, (tuple, list)):
        parts = dict(enumerate(item))
    elif is_dataclass(item):
        parts = {field.name: getattr(item, field.name) for field in fields(item)}
    elif not path:
        parts = vars(item) if hasattr(item, "__dict__") else {}
    for key, part in parts.items():
        yield from _named(part, (*path, str(key)))


def find_outputs(
    graph: OperatorGraph,
    program: FunctionalProgram,
    environment: Mapping[fx.Node, Lowered],
    module: nn.Module,
    example: tuple[Sequence[Any], Mapping[str, Any]],
    outputs: Sequence[str],
) -> Outputs:
    """Return how results of a module follow from its graph's values.

    Args:
        graph: the module's.
        program: from which it was made.
        environment: for each node of the program, the value that it stands for.
        module: the module.
        example: its inputs.
        outputs: the names of the results.

    Raises:
        ImportFailure: a result is not there, or follows from what the graph has not.
    """
    names: list[str] = []

    def keep(result: Any) -> list[torch.Tensor]:
        tensors = named_tensors(result)
        wanted = {
            asked: [name for name in tensors if name == asked or name.startswith(f"{asked}.")]
            for asked in outputs
        }
        for asked, matching in wanted.items():
            if not matching:
                raise ImportFailure(
                    f"model {graph.name}: its result has no tensor {asked}, must be one of "
                    f"{', '.join(name or 'the loss itself' for name in tensors)}; ask for one of them"
                )
        names[:] = dict.fromkeys(name for matching in wanted.values() for name in matching)
        return [tensors[name] for name in names]

    again = export(module, *example, graph.name, keep)
    # Within the exported program there are no other user outputs than the loss, which is first, and these.
    nodes_by_name = {node.name: node for node in again.graph.nodes}
    results = [
        nodes_by_name[spec.arg.name]
        for spec in again.graph_signature.output_specs
        if spec.kind is OutputKind.USER_OUTPUT and hasattr(spec.arg, "name")
    ]
    search = _Search(graph, _counterparts(graph, program, again), environment, again)
    nodes = dict(zip(names, results[1:], strict=True))
    for name, node in nodes.items():
        search.find(node, name)
    calls = tuple(node for node in again.graph.nodes if node in search.calls)
    return Outputs(nodes, search.sources, search.constants, calls)


def _counterparts(
    graph: OperatorGraph, program: FunctionalProgram, again: FunctionalProgram
) -> dict[fx.Node, fx.Node]:
    """Return, for each call of the second program on which the loss depends, the same call of the first.

    Raises:
        ImportFailure: the two are not the same.
    """
    first, second = _needed(program), _needed(again)
    if [node.target for node in first] != [node.target for node in second]:
        raise ImportFailure(
            f"model {graph.name}: computes its loss otherwise where other results are asked for, must compute "
            "it alike; ask for none, and compute them in the script"
        )
    return dict(zip(second, first, strict=True))


def _needed(program: FunctionalProgram) -> list[fx.Node]:
    """Return the calls on which the loss and new values of buffers depend, in order."""
    signature = program.graph_signature.output_specs
    loss = next(index for index, spec in enumerate(signature) if spec.kind is OutputKind.USER_OUTPUT)
    wanted = {
        getattr(spec.arg, "name", "")
        for index, spec in enumerate(signature)
        if index == loss or spec.kind is OutputKind.BUFFER_MUTATION
    }
    needed: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.name in wanted or node in needed:
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [node for node in program.graph.nodes if node in needed and node.op == "call_function"]


class _Search:
    """The origins of results: values and inputs of the graph (`sources`), constants, and the calls between them."""

    def __init__(
        self,
        graph: OperatorGraph,
        counterparts: Mapping[fx.Node, fx.Node],
        environment: Mapping[fx.Node, Lowered],
        program: FunctionalProgram,
    ) -> None:
        self.sources: dict[fx.Node, str] = {}
        self.constants: dict[fx.Node, torch.Tensor] = {}
        self.calls: set[fx.Node] = set()
        self._graph = graph
        self._counterparts = counterparts
        self._environment = environment
        self._program = program
        self._specs = {
            spec.arg.name: spec for spec in program.graph_signature.input_specs if hasattr(spec.arg, "name")
        }
        tensors = [
            node
            for node in program.graph.nodes
            if node.op == "placeholder"
            and self._specs[node.name].kind is InputKind.USER_INPUT
            and isinstance(node.meta.get("val"), torch.Tensor)
        ]
        self._inputs = {node: f"input.{number}" for number, node in enumerate(tensors)}

    def find(self, result: fx.Node, name: str) -> None:
        """Add the sources, constants and calls that a result is computed from.

        Raises:
            ImportFailure: it is a weight, a random number, or follows from one that the loss does not depend on.
        """
        pending = [result]
        while pending:
            node = pending.pop()
            if node in self.sources or node in self.constants or node in self.calls:
                continue
            value = self._value(node)
            if value is not None:
                self.sources[node] = value
            elif node.op == "placeholder":
                self.constants[node] = self._constant(node, name)
            else:
                self._require_repeatable(node, name)
                self.calls.add(node)
                pending.extend(node.all_input_nodes)

    def _value(self, node: fx.Node) -> str | None:
        """Return the value or input of the graph that a node stands for, if it does."""
        if node in self._inputs:
            return self._inputs[node]
        value_name = self._environment.get(self._counterparts.get(node, node))
        value = self._graph.value_by_name.get(value_name) if isinstance(value_name, str) else None
        if value is None or value.kind is not ValueKind.OPERATOR:
            return None
        same = value.spec.shape == tuple(node.meta["val"].shape)
        return value.name if same and getattr(torch, value.spec.dtype) is node.meta["val"].dtype else None

    def _constant(self, node: fx.Node, name: str) -> torch.Tensor:
        spec = self._specs[node.name]
        if spec.kind is InputKind.CONSTANT_TENSOR:
            tensor = self._program.constants[str(spec.target)]
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta:
                return tensor
        raise ImportFailure(
            f"model {self._graph.name}: its result {name} follows from {qualified_name(str(spec.target))} in a way "
            "that the loss does not, must follow from values that the loss depends on; compute it from these, or from "
            "state_dict(), in the script"
        )

    def _require_repeatable(self, node: fx.Node, name: str) -> None:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise ImportFailure(
                f"model {self._graph.name}: its result {name} follows from random numbers ({node.target}) on which the "
                "loss does not depend, must follow from what it depends on; draw them in the script"
            )
