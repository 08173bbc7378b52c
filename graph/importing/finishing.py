"""From a builder's operators to a graph: iteration spaces, refined over the whole graph, and why some stay whole."""

from __future__ import annotations

from graph.importing.building import GraphBuilder
from graph.importing.propagation import refined_spaces
from graph.operators import FLOATING, Operator, OperatorGraph, Value
from graph.substitutions.substitution import Substitution


def finished(
    builder: GraphBuilder,
    *,
    inputs: tuple[str, ...],
    loss: str,
    updates: tuple[tuple[str, str], ...],
    aliases: tuple[tuple[str, str], ...],
    batch_norm: str,
    substitutions: tuple[Substitution, ...] = (),
    made_as_imported: tuple[str, ...] = (),
) -> OperatorGraph:
    """Return the graph of a builder's operators, with the iteration space of each, which the whole graph refines.

    The other arguments are those of `OperatorGraph`; of `aliases`, those of values that there are.
    """
    spaces, conflicts = refined_spaces(builder)
    unsplit = []
    operators = []
    for draft, space in zip(builder.operators, spaces, strict=True):
        reason = builder.unsplit_reason(draft) or conflicts.get(draft.name)
        if reason is not None:
            unsplit.append((draft.name, reason))
        operators.append(
            Operator(
                draft.name,
                draft.target,
                draft.arguments,
                draft.inputs,
                draft.outputs,
                space,
                builder.splittable(draft),
            )
        )
    graph = OperatorGraph(
        name=builder.model,
        operators=tuple(operators),
        values=tuple(
            Value(name, value.spec, value.kind, value.requires_gradient and value.spec.dtype in FLOATING)
            for name, value in builder.values.items()
        ),
        inputs=inputs,
        loss=loss,
        buffer_updates=updates,
        aliases=tuple(pair for pair in aliases if pair[1] in builder.values),
        unsplit=tuple(unsplit),
        batch_norm=batch_norm,
        substitutions=substitutions,
        made_as_imported=made_as_imported,
    )
    graph.validate()
    return graph
