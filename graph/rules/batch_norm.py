"""Batch normalization in training, taken apart so that its statistics can span devices.

Synchronized: soapstone.moments -> soapstone.batch_norm_apply and soapstone.running_statistics.
Local: soapstone.batch_norm normalizes each part by its own statistics, as DistributedDataParallel does.
In evaluation mode: soapstone.fixed_moments of the running statistics -> soapstone.batch_norm_apply.
Moments are float64 [2, C]: the sum and the sum of squares over all elements of a channel; parts of them add up.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, Dim, IterationSpace, whole
from graph.rules.base import Signature
from graph.rules.common import BaseRule, SpaceBuilder, dim_name


def _image(builder: SpaceBuilder, shape: tuple[int, ...], kind: AxisKind) -> tuple[Dim, ...]:
    """Add the axes of an activation [N, C, ...]; the channel axis is of `kind`."""
    kinds = [AxisKind.SAMPLE, kind, *([AxisKind.ATTRIBUTE] * (len(shape) - 2))]
    names = ["sample", "channel", *(dim_name(len(shape), dim) for dim in range(2, len(shape)))]
    if len(shape) == 3:
        names[2] = "length"
    return tuple(builder.add(name, size, kind) for name, size, kind in zip(names, shape, kinds, strict=True))


class MomentsRule(BaseRule):
    """soapstone.moments(input [N, C, ...]) -> [2, C]."""

    flops_per_input = 3.0
    backward_flops_per_input = 2.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an input dim; all but the channels are summed."""
        builder = SpaceBuilder()
        dims = _image(builder, signature.inputs[0].shape, AxisKind.ATTRIBUTE)
        return builder.space([dims], [(whole(2), dims[1])])


class FixedMomentsRule(BaseRule):
    """soapstone.fixed_moments(mean [C], variance [C]) -> [2, C]: of one element, for statistics that stay."""

    def space(self, signature: Signature) -> IterationSpace:
        """Return the channel axis."""
        builder = SpaceBuilder()
        channel = builder.add("channel", signature.inputs[0].shape[0], AxisKind.PARAMETER)
        return builder.space([(channel,), (channel,)], [(whole(2), channel)])


class BatchNormApplyRule(BaseRule):
    """soapstone.batch_norm_apply(input [N, C, ...], moments [2, C], weight [C], bias [C]; count, eps)."""

    flops_per_input = 2.0
    backward_flops_per_input = 5.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an input dim; statistics and weights follow the channels."""
        builder = SpaceBuilder()
        dims = _image(builder, signature.inputs[0].shape, AxisKind.PARAMETER)
        channel = dims[1]
        vectors = [(channel,)] * (len(signature.inputs) - 2)
        return builder.space([dims, (whole(2), channel), *vectors], [dims])


class BatchNormLocalRule(BaseRule):
    """soapstone.batch_norm(input [N, C, ...], weight [C], bias [C]; eps) -> (output, moments [2, C])."""

    flops_per_input = 5.0
    backward_flops_per_input = 7.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return one axis an input dim. A split of anything but channels changes the statistics, by definition."""
        builder = SpaceBuilder()
        dims = _image(builder, signature.inputs[0].shape, AxisKind.PARAMETER)
        vectors = [(dims[1],)] * (len(signature.inputs) - 1)
        return builder.space([dims, *vectors], [dims, (whole(2), dims[1])])


class RunningStatisticsRule(BaseRule):
    """soapstone.running_statistics(moments [2, C], mean [C], variance [C]; momentum, count) -> new mean, variance."""

    def space(self, signature: Signature) -> IterationSpace:
        """Return the channel axis."""
        builder = SpaceBuilder()
        channel = builder.add("channel", signature.inputs[1].shape[0], AxisKind.PARAMETER)
        vector = (channel,)
        return builder.space([(whole(2), channel), vector, vector], [vector, vector])


STATISTICS = frozenset({"soapstone.moments", "soapstone.batch_norm"})
"""The operators that compute statistics of a batch."""

RULES: Mapping[str, BaseRule] = {
    "soapstone.moments": MomentsRule(),
    "soapstone.fixed_moments": FixedMomentsRule(),
    "soapstone.batch_norm_apply": BatchNormApplyRule(),
    "soapstone.batch_norm": BatchNormLocalRule(),
    "soapstone.running_statistics": RunningStatisticsRule(),
}
