"""An operator graph as one JSON document that holds all of it: it can be read back without an import.

`OperatorGraph.to_json` holds what a strategy depends on; this document also holds how operands follow the axes, what
could not be split and why, and the names of tied weights. Operators of equal iteration spaces share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph.axes import Axis, AxisKind, DimFactor, IterationSpace, OperandMap
from graph.operators import (
    Operator,
    OperatorGraph,
    TensorSpec,
    Value,
    ValueKind,
    argument_from_json,
    argument_to_json,
)
from graph.substitutions.substitution import substitutions_from_json, substitutions_to_json


def graph_to_document(graph: OperatorGraph) -> dict[str, Any]:
    """Return the graph, its digest included, as a JSON document."""
    spaces: dict[IterationSpace, int] = {}
    operators = [
        [
            operator.name,
            operator.target,
            [[name, argument_to_json(value)] for name, value in operator.arguments],
            list(operator.inputs),
            list(operator.outputs),
            spaces.setdefault(operator.space, len(spaces)),
            operator.splittable,
        ]
        for operator in graph.operators
    ]
    return {
        "digest": graph.digest,
        "name": graph.name,
        "spaces": [_space_to_json(space) for space in spaces],
        "operators": operators,
        "values": [
            [value.name, value.spec.to_json(), value.kind.value, value.requires_gradient]
            for value in graph.values
        ],
        "inputs": list(graph.inputs),
        "loss": graph.loss,
        "buffer_updates": [list(pair) for pair in graph.buffer_updates],
        "aliases": [list(pair) for pair in graph.aliases],
        "unsplit": [list(pair) for pair in graph.unsplit],
        "batch_norm": graph.batch_norm,
        "substitutions": substitutions_to_json(graph.substitutions),
        "made_as_imported": list(graph.made_as_imported),
    }


def graph_from_document(document: dict[str, Any]) -> OperatorGraph:
    """Return the graph that `graph_to_document` wrote.

    Raises:
        ValueError: the graph has another digest than the document names. A document that is no such one at all raises
            what reading it runs into: KeyError, IndexError, TypeError, AttributeError or ValueError.
        GraphError: its wiring is wrong.
    """
    spaces = [_space_from_json(space) for space in document["spaces"]]
    graph = OperatorGraph(
        name=document["name"],
        operators=tuple(
            Operator(
                name,
                target,
                tuple((key, argument_from_json(value)) for key, value in arguments),
                tuple(inputs),
                tuple(outputs),
                spaces[space],
                splittable,
            )
            for name, target, arguments, inputs, outputs, space, splittable in document["operators"]
        ),
        values=tuple(
            Value(name, TensorSpec(tuple(shape), dtype), ValueKind(kind), requires_gradient)
            for name, (dtype, shape), kind, requires_gradient in document["values"]
        ),
        inputs=tuple(document["inputs"]),
        loss=document["loss"],
        buffer_updates=_pairs(document["buffer_updates"]),
        aliases=_pairs(document["aliases"]),
        unsplit=_pairs(document["unsplit"]),
        batch_norm=document["batch_norm"],
        substitutions=substitutions_from_json(document["substitutions"]),
        made_as_imported=tuple(document["made_as_imported"]),
    )
    graph.validate()
    if graph.digest != document["digest"]:
        raise ValueError(f"graph {graph.name}: digest is {graph.digest}, must be {document['digest']}")
    return graph


def _pairs(document: Sequence[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, second in document)


def _space_to_json(space: IterationSpace) -> list[Any]:
    return [
        [[axis.name, axis.size, axis.kind.value] for axis in space.axes],
        [_operand_to_json(operand) for operand in space.inputs],
        [_operand_to_json(operand) for operand in space.outputs],
    ]


def _space_from_json(document: Sequence[Any]) -> IterationSpace:
    axes, inputs, outputs = document
    return IterationSpace(
        tuple(Axis(name, size, AxisKind(kind)) for name, size, kind in axes),
        tuple(_operand_from_json(operand) for operand in inputs),
        tuple(_operand_from_json(operand) for operand in outputs),
    )


def _operand_to_json(operand: OperandMap) -> list[Any]:
    return [
        [[factor.size, factor.axis, factor.start, factor.stride, factor.extent] for factor in factors]
        for factors in operand
    ]


def _operand_from_json(document: Sequence[Any]) -> OperandMap:
    return tuple(
        tuple(DimFactor(size, axis, start, stride, extent) for size, axis, start, stride, extent in factors)
        for factors in document
    )
