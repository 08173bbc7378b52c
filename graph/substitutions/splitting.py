"""Rules that split: an operator becomes several, of which each can be split where the one could not.

Source: Megatron-LM (arXiv:1909.08053) section 3, Partial FC (arXiv:2010.05222): a softmax over classes that are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph.importing.building import DraftOperator, DraftValue, GraphBuilder
from graph.operators import Argument, Operator, OperatorGraph, Slot, TensorSpec, ValueKind
from graph.rules.likelihoods import SOFTMAX_NLL_SUMS
from graph.substitutions.rewriting_rule import RewritingRule


def _matches(graph: OperatorGraph) -> list[tuple[Operator, ...]]:
    """Return the cross entropies, each by itself, that are means of targets which are classes, without smoothing."""
    return [
        (operator,)
        for operator in graph.operators
        if operator.target == "soapstone.cross_entropy_sums"
        and operator.argument("label_smoothing") == 0.0
        and graph.value_by_name[operator.inputs[1]].spec.dtype == "int64"
    ]


def _split(
    builder: GraphBuilder, _graph: OperatorGraph, operators: Sequence[Operator]
) -> tuple[DraftOperator, DraftOperator]:
    (operator,) = operators
    logits, targets, *_ = operator.inputs
    shape = builder.spec(logits).shape
    sums = f"{operator.name}.exp_sums"
    spec = TensorSpec(builder.spec(targets).shape, "float64")
    builder.values[sums] = DraftValue(spec, ValueKind.OPERATOR, requires_gradient=False)
    arguments: dict[str, Argument] = {
        name: value for name, value in operator.arguments if name != "label_smoothing"
    }
    arguments |= {"classes": shape[0 if len(shape) == 1 else 1], "exp_sums": Slot(len(operator.inputs))}
    return (
        DraftOperator(sums, "soapstone.exp_sums", (("self", Slot(0)),), (logits,), (sums,)),
        DraftOperator(
            f"{operator.name}.nll_sums",
            SOFTMAX_NLL_SUMS,
            tuple(arguments.items()),
            (*operator.inputs, sums),
            operator.outputs,
        ),
    )


SPLITTING: Mapping[str, RewritingRule] = {
    "split-cross-entropy": RewritingRule(
        "a cross entropy of classes that is a mean of its targets, without label smoothing",
        ("cross_entropy(x, t)", "nll(x - log(sum(exp(x))), t)"),
        _matches,
        _split,
    ),
}
