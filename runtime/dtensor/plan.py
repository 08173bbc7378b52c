"""A strategy in PyTorch's own words: a style for each module along "tensor", fully_shard along "data"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graph.operators import Operator, OperatorGraph, Slot
from graph.rules import DRAWING
from graph.strategy import Strategy
from runtime.dtensor.constants import check_part
from runtime.dtensor.mesh import PARTIAL, Inexpressible, MeshLayout, inexpressible, mesh_layouts
from runtime.dtensor.modules import Modules
from runtime.dtensor.samples import MEANS_OVER_TARGETS, DataDim, LossShare, data_dim
from runtime.dtensor.styles import Style, TensorDim

if TYPE_CHECKING:
    from torch import nn

ATTENTIONS = frozenset({"soapstone.attention", "aten.scaled_dot_product_attention.default"})


@dataclass(frozen=True)
class ParallelPlan:
    """All that a generated file says.

    mesh: (name, size) of its dims, outermost first; names are "data" and "tensor".
    styles: by module, in the module's order; "" is the module itself.
    vocabularies: embeddings that a style splits by their vocabulary.
    tied: (second name, first name) of parameters that are one.
    blocks: modules that are gathered on their own by fully_shard, before the module itself.
    data: what a data dim needs to know, None without one.
    attends: there is scaled dot-product attention.
    draws: dropout or the forward itself draws random numbers, other ones on every rank.
    notes: what a reader must know.
    """

    mesh: tuple[tuple[str, int], ...]
    styles: tuple[tuple[str, Style], ...] = ()
    vocabularies: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    blocks: tuple[str, ...] = ()
    data: DataDim | None = None
    attends: bool = False
    draws: bool = False
    notes: tuple[str, ...] = ()


def make_plan(
    graph: OperatorGraph,
    strategy: Strategy,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> ParallelPlan:
    """Return the plan of a validated strategy.

    Args:
        graph: imported from `module`.
        strategy: of the graph.
        module, args, kwargs: may be on the meta device; they are looked at alone.

    Raises:
        StrategyError: no mesh expresses it; one line with the reason.
    """
    refusals = []
    for layout in mesh_layouts(graph, strategy):
        if isinstance(layout, Inexpressible):
            refusals.append(layout)
            continue
        try:
            return _plan_on(graph, layout, Modules(graph, module), args, kwargs)
        except Inexpressible as reason:
            reason.progress += len(graph.operators)
            refusals.append(reason)
    if not refusals:
        raise inexpressible(strategy, "it runs on one device")
    raise inexpressible(
        strategy, str(max(refusals, key=lambda inexpressible_reason: inexpressible_reason.progress))
    )


def _plan_on(
    graph: OperatorGraph, layout: MeshLayout, modules: Modules, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ParallelPlan:
    names: list[str] = []
    data: DataDim | None = None
    reasons = []
    for dim in range(len(layout.sizes)):
        try:
            candidate = data_dim(graph, layout, dim)
            check_part(graph, modules.module, args, kwargs, candidate.batch_dims, layout.sizes[dim])
            data = candidate
            names.append("data")
        except Inexpressible as reason:
            reasons.append(str(reason))
            names.append("tensor")
    if len(set(names)) < len(names):
        detail = "; ".join(f"dim {dim}: {reason}" for dim, reason in enumerate(reasons))
        raise Inexpressible(f"both dims of a mesh split more than samples: {detail}" if reasons else
                            "both dims of a mesh are data parallel")  # fmt: skip
    styles: tuple[tuple[str, Style], ...] = ()
    vocabularies: tuple[str, ...] = ()
    notes = []
    if "tensor" in names:
        tensor_dim = TensorDim(graph, layout, names.index("tensor"), modules)
        styles = tensor_dim.styles(args, kwargs)
        vocabularies = tensor_dim.split_by_vocabulary(styles)
        notes.extend(_loss_notes(graph, layout, names.index("tensor")))
    if data is not None:
        notes.extend(_share_notes(data.share))
    return ParallelPlan(
        mesh=tuple(zip(names, layout.sizes, strict=True)),
        styles=styles,
        vocabularies=vocabularies,
        tied=modules.tied,
        blocks=modules.blocks() if data is not None else (),
        data=data,
        attends=any(operator.target in ATTENTIONS for operator in graph.operators),
        draws=any(draws(operator) for operator in graph.operators),
        notes=tuple(notes),
    )


def draws(operator: Operator) -> bool:
    """Return whether an operator draws random numbers."""
    if operator.target in ATTENTIONS:
        return bool(operator.argument("dropout_p"))
    return operator.target in DRAWING


def _share_notes(share: LossShare) -> list[str]:
    if share.exact:
        return []
    return [
        "The loss is a mean over targets that are not ignored, which cannot be counted outside of the module: results "
        "equal the plain module's where every data rank ignores as many."
    ]


def _loss_notes(graph: OperatorGraph, layout: MeshLayout, dim: int) -> list[str]:
    """Return the notes on a cross entropy that is split along a tensor dim.

    Raises:
        Inexpressible: its parts' means cannot be averaged.
    """
    for index, operator in enumerate(graph.operators):
        if operator.target in MEANS_OVER_TARGETS and layout.outputs[index][0][dim] == PARTIAL:
            if isinstance(operator.argument("weight"), Slot):
                raise Inexpressible(f"operator {operator.name} is a mean that weighs samples by their class")
            return [
                "DTensor averages the means of the parts of a sharded cross entropy: the loss equals the plain "
                "module's where every part ignores as many targets; gradients do so always."
            ]
    return []
