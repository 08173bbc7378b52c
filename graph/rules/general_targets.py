"""Operators by one of the general rules: pointwise, along dims, made from nothing, whole."""

from __future__ import annotations

from collections.abc import Mapping

from graph.rules.common import BaseRule
from graph.rules.generic import (
    DimwiseRule,
    FactoryRule,
    PointwiseRule,
    SampleRule,
    WholeRule,
    dims_argument,
    dims_from,
    last_dims,
)
from graph.rules.pointwise_targets import COSTLY, POINTWISE


class CostlyPointwiseRule(PointwiseRule):
    """A pointwise operator that takes several operations an element."""

    def __init__(self, flops_per_output: float) -> None:
        self.flops_per_output = flops_per_output


_POINTWISE = PointwiseRule()


def _pointwise(target: str) -> BaseRule:
    name = target.split(".")[1]
    return CostlyPointwiseRule(COSTLY[name]) if name in COSTLY else _POINTWISE


def _aten(*targets: str, rule: BaseRule) -> dict[str, BaseRule]:
    return {f"aten.{target}": rule for target in targets}


RULES: Mapping[str, BaseRule] = {
    **{target: _pointwise(target) for target in sorted(POINTWISE)},
    **_aten("full.default", "zeros.default", "ones.default", rule=FactoryRule()),
    **dict.fromkeys(("soapstone.ratio", "soapstone.constant"), WholeRule()),
    **_aten(
        "softmax.int",
        "_softmax.default",
        "log_softmax.int",
        "_log_softmax.default",
        rule=DimwiseRule(dims_argument(), flops_per_input=10.0),
    ),
    **_aten("cumsum.default", "cumprod.default", "topk.default", rule=DimwiseRule(dims_argument())),
    **_aten("flip.default", "roll.default", rule=DimwiseRule(dims_argument("dims"), flops_per_input=0.0)),
    **_aten("tril.default", "triu.default", rule=DimwiseRule(last_dims(2))),
    **_aten(
        "amax.default",
        "amin.default",
        "logsumexp.default",
        "argmax.default",
        "argmin.default",
        "max.dim",
        "min.dim",
        "prod.dim_int",
        "linalg_vector_norm.default",
        rule=DimwiseRule(dims_argument(), reduces=True),
    ),
    **_aten(
        "var.correction",
        "var.dim",
        "std.correction",
        "std.dim",
        rule=DimwiseRule(dims_argument(), reduces=True, flops_per_input=4.0),
    ),
    **_aten(
        *(
            f"upsample_{mode}.vec"
            for mode in (
                "nearest1d",
                "nearest2d",
                "nearest3d",
                "linear1d",
                "bilinear2d",
                "bicubic2d",
                "trilinear3d",
            )
        ),
        rule=DimwiseRule(dims_from(2), flops_per_input=4.0),
    ),
    **_aten(
        *(f"adaptive_max_pool{spatial}d.default" for spatial in (1, 2, 3)), rule=DimwiseRule(dims_from(2))
    ),
    **_aten("pixel_shuffle.default", "pixel_unshuffle.default", rule=SampleRule()),
}
