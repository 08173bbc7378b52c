"""Calls that torch.export leaves as one, taken apart into operators that split.

Bags of embeddings, means of likelihoods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graph.errors import ImportFailure
from graph.importing.building import Ref
from graph.importing.lowering import Arguments, Lowered, Lowerer, Lowering, mean_of_targets, plain, reshaped
from graph.importing.specs import spec_of
from graph.rules.common import positive
from graph.rules.reductions import MEAN

_MODES = ("sum", "mean", "max")


def _nll_loss(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    if arguments["reduction"] != MEAN:
        return plain(lowering, name, node, arguments)
    given = {key: value for key, value in arguments.items() if key != "reduction"}
    logits = arguments["self"].meta["val"].shape
    given["classes"] = logits[0 if len(logits) == 1 else 1]
    return mean_of_targets(lowering, name, "soapstone.nll_sums", given, lowering.spec(node))


def _instance_norm(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Keep the operator; refuse running statistics that a step would have to update, which export forgets."""
    if arguments["running_mean"] is not None and arguments["use_input_stats"]:
        raise ImportFailure(
            f"model {lowering.builder.model}: {name} updates running statistics, which torch.export does not show; "
            "must not; set track_running_stats=False"
        )
    return plain(lowering, name, node, arguments)


def _bag_length(indices: torch.Tensor, offsets: fx.Node) -> int | None:
    """Return the length of all bags where offsets are a range made by the forward; None where they are data."""
    if str(offsets.target) not in ("aten.arange.start_step", "aten.arange.default", "aten.arange.start"):
        return None
    given = [value for value in offsets.args if isinstance(value, int)]
    start, end, step = (0, given[0], 1) if len(given) == 1 else (*given, 1)[:3]
    fits = start == 0 and step > 0 and end == indices.numel() and end % step == 0
    return step if fits else None


def _embedding_bag(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Write bags, of which the sums alone are used, as operators of ours; those of one length split furthest."""
    if {user.args[1] for user in node.users} != {0}:
        return plain(lowering, name, node, arguments)
    builder = lowering.builder
    spec = spec_of(node.meta["val"][0], builder.model, name)
    rows = arguments["weight"].meta["val"].shape[0]
    padding = arguments.get("padding_idx")
    shares = arguments["per_sample_weights"]
    given: dict[str, Any] = {
        "weight": arguments["weight"],
        "indices": arguments["indices"],
        "per_sample_weights": shares,
        "mode": _MODES[arguments["mode"]],
        "padding_idx": -1 if padding is None else positive(padding, rows),
    }
    length = _bag_length(arguments["indices"].meta["val"], arguments["offsets"])
    if length is None or arguments["scale_grad_by_freq"] or arguments["include_last_offset"]:
        ragged = {
            **given,
            "offsets": arguments["offsets"],
            "scale_grad_by_freq": arguments["scale_grad_by_freq"],
            "include_last_offset": arguments["include_last_offset"],
        }
        return *lowering.add(name, "soapstone.ragged_embedding_bag", ragged, [spec]), None, None, None

    def bags(part: str, source: fx.Node) -> Ref:
        return Ref(reshaped(lowering, f"{name}.{part}", lowering.value(source), (spec.shape[0], length)))

    given |= {
        "weight": Ref(lowering.value(arguments["weight"])),
        "indices": bags("bags", arguments["indices"]),
        "per_sample_weights": None if shares is None else bags("shares", shares),
        "vocabulary": rows,
        "bag": length,
    }
    return *builder.add(name, "soapstone.embedding_bag", given, [spec]), None, None, None


# By the operator's name, without its library.
UNROLLERS: dict[str, Lowerer] = {
    **dict.fromkeys(("nll_loss_nd.default", "nll_loss.default", "nll_loss2d.default"), _nll_loss),
    "instance_norm.default": _instance_norm,
    **dict.fromkeys(("embedding_bag.padding_idx", "embedding_bag.default"), _embedding_bag),
}
