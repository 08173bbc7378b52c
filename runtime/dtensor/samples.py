"""Whether a dim of a mesh is plain data parallelism, and how the parts' losses then add up to the whole batch's.

Along such a dim every rank computes its own samples with whole weights, and no tensor moves before the loss: what
fully_shard expects. Ranks then hold local tensors, and a module's mean is that of its own samples. A rank's share makes
it exact again: the sum over ranks of share x local mean is the mean over all, and so are the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph.operators import FLOATING, Operator, OperatorGraph, Slot, ValueKind
from graph.rules.reductions import MEAN, SUM
from runtime.dtensor.constants import constant_values
from runtime.dtensor.mesh import PARTIAL, REPLICATE, Inexpressible, MeshLayout, PlacementKind

# The sum of the parts' results is the result of the whole.
LINEAR = frozenset(
    {
        "soapstone.ratio",
        "aten.add.Tensor",
        "aten.sub.Tensor",
        "aten.neg.default",
        "aten.view.default",
        "aten._to_copy.default",
    }
)
SCALED = frozenset({"aten.mul.Tensor", "aten.div.Tensor"})
# Their result holds the same elements as their input.
SAME_ELEMENTS = frozenset({"aten.view.default", "aten.permute.default", "aten._to_copy.default"})
# A mean over targets: their losses' sum and count, which soapstone.ratio divides.
MEANS_OVER_TARGETS = frozenset({"soapstone.cross_entropy_sums", "soapstone.nll_sums"})


@dataclass(frozen=True, slots=True)
class LossShare:
    """How a rank's loss enters the loss of the whole batch.

    mean: the module's loss is a mean, so that a rank's share is that of its samples; else a sum, whose share is one.
    targets: position of the input whose elements are counted for the share, and the value that does not count; None
        where all samples count alike.
    exact: False where targets may be ignored, but cannot be counted from outside of the module.
    """

    mean: bool
    targets: tuple[int, int] | None = None
    exact: bool = True


@dataclass(frozen=True, slots=True)
class DataDim:
    """A dim of a mesh that is data parallel: the inputs that are split, by position, with their dim; and the share."""

    batch_dims: tuple[tuple[int, int], ...]
    share: LossShare


def data_dim(graph: OperatorGraph, layout: MeshLayout, dim: int) -> DataDim:
    """Return the split inputs and the loss share of data parallelism along a dim of the mesh.

    Raises:
        Inexpressible: the dim is something else.
    """
    for name, placements in layout.held.items():
        if placements[dim] != REPLICATE:
            raise Inexpressible(f"{graph.value_by_name[name].kind} {name} is split")
    # Every rank makes its own, of its samples (`runtime.dtensor.constants`).
    constants = constant_values(graph)
    batch_dims: dict[int, int] = {}
    input_placements: dict[str, object] = {}
    summed: set[str] = set()
    sums: list[int] = []
    for index, operator in enumerate(graph.operators):
        made = [placements[dim] for placements in layout.outputs[index]]
        for name, placements in zip(operator.inputs, layout.inputs[index], strict=True):
            arrives = placements[dim]
            if name in graph.producer:
                producer, output = graph.producer[name]
                arrives = layout.outputs[producer][output][dim]
            elif graph.value_by_name[name].kind is ValueKind.INPUT:
                arrives = input_placements.setdefault(name, arrives)  # type: ignore[assignment]
                if placements[dim].kind is PlacementKind.SHARD:
                    batch_dims[graph.inputs.index(name)] = placements[dim].dim
            summed_up = (arrives, placements[dim]) == (PARTIAL, REPLICATE)
            if arrives != placements[dim] and not summed_up and name not in constants:
                raise Inexpressible(
                    f"operator {operator.name} reads {name} as {placements[dim]}, not {arrives}"
                )
        if not summed.isdisjoint(operator.inputs):
            _check_linear(operator)
            summed.update(operator.outputs)
        elif PARTIAL in made:
            sums.append(index)
            summed.update(operator.outputs)
    if graph.loss not in summed:
        raise Inexpressible("the loss is not summed over parts of the batch")
    for buffer, value in graph.buffer_updates:
        if value in summed:
            raise Inexpressible(f"buffer {buffer} is computed from all samples")
    return DataDim(tuple(sorted(batch_dims.items())), _share(graph, sums, summed))


def _check_linear(operator: Operator) -> None:
    scaled = (
        operator.target in SCALED
        and len(operator.inputs) == 1
        and isinstance(operator.argument("self"), Slot)
    )
    if operator.target not in LINEAR and not scaled:
        raise Inexpressible(f"operator {operator.name} needs a sum over all samples")


def _share(graph: OperatorGraph, sums: Sequence[int], summed: set[str]) -> LossShare:
    means = {is_mean(graph.operators[index]) for index in sums}
    if len(means) != 1:
        raise Inexpressible("the loss joins sums and means over the samples")
    (mean,) = means
    if not mean:
        _check_plain_sum(graph, summed)
        return LossShare(mean=False)
    counted = [
        graph.operators[index]
        for index in sums
        if graph.operators[index].target in MEANS_OVER_TARGETS and not _has_probabilities(graph, index)
    ]
    for operator in counted:
        if isinstance(operator.argument("weight"), Slot):
            raise Inexpressible(f"operator {operator.name} is a mean that weighs samples by their class")
    if not counted:
        return LossShare(mean=True)
    position = _input_of_targets(graph, counted[0]) if len(sums) == 1 else None
    if position is None:
        return LossShare(mean=True, exact=False)
    return LossShare(mean=True, targets=(position, int(counted[0].argument("ignore_index"))))


def is_mean(operator: Operator) -> bool:
    """Return whether an operator that sums over samples is a mean; a sum is not.

    Raises:
        Inexpressible: it is neither.
    """
    name = operator.target.split(".")[1]
    if operator.target in MEANS_OVER_TARGETS or name == "mean":
        return True
    if name == "sum":
        return False
    reduction = dict(operator.arguments).get("reduction")
    if reduction in (MEAN, SUM):
        return bool(reduction == MEAN)
    raise Inexpressible(f"operator {operator.name} joins the samples of all parts")


def _check_plain_sum(graph: OperatorGraph, summed: set[str]) -> None:
    """Refuse scaling of a local sum, and terms beside it, which would count once a rank."""
    for operator in graph.operators:
        if summed.isdisjoint(operator.inputs):
            continue
        if operator.target in SCALED:
            raise Inexpressible(
                f"operator {operator.name} scales a sum over samples by a number that may be their count"
            )
        if not summed.issuperset(operator.inputs):
            raise Inexpressible(f"operator {operator.name} adds what is no sum over samples")


def _has_probabilities(graph: OperatorGraph, index: int) -> bool:
    """True for a mean over targets that are probabilities: all samples count."""
    operator = graph.operators[index]
    target = operator.argument("target")
    return isinstance(target, Slot) and (
        graph.value_by_name[operator.inputs[target.index]].spec.dtype in FLOATING
    )


def _input_of_targets(graph: OperatorGraph, operator: Operator) -> int | None:
    """Return the position of the input that an operator's targets are, seen differently; None for none."""
    name = operator.inputs[operator.argument("target").index]
    while name in graph.producer:
        producer = graph.operators[graph.producer[name][0]]
        if producer.target not in SAME_ELEMENTS:
            return None
        name = producer.inputs[0]
    return graph.inputs.index(name) if name in graph.inputs else None
