"""Linear layers or convolutions that share their input, executed as one with their weights joined by output channel.

The substitution is `graph.substitutions.rewriting`'s. Each part keeps its own weight and bias as an input, so that
what a step trains, updates and saves is the module's own.

Source: TASO (SOSP 2019) section 2, Unity (OSDI 2022) section 3: merging of operators with a common input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graph.axes import AxisKind, Dim, IterationSpace, OperandMap, whole
from graph.calls import LocalCall
from graph.operators import Argument, Slot, TensorSpec
from graph.rules.base import Signature, TaskPart
from graph.rules.common import BaseRule, slots_in
from graph.rules.convolution import ConvolutionRule
from graph.rules.products import LinearRule

MERGED: Mapping[str, str] = {
    "aten.linear.default": "soapstone.merged_linear",
    "aten.conv1d.default": "soapstone.merged_conv1d",
    "aten.conv2d.default": "soapstone.merged_conv2d",
    "aten.conv3d.default": "soapstone.merged_conv3d",
}
"""The merged operator of operators of a type."""


class MergedRule(BaseRule):
    """soapstone.merged_*(input, weights [n], biases [n or 0], ...) with n outputs, one a weight.

    Axes are those of one operator. Its channel axis is common to all parts where they have equally many channels:
    part k of it is part k of each. Else channels are whole.
    """

    by_size = True

    def __init__(self, base: BaseRule, target: str) -> None:
        self.base = base
        self.target = target

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes of the first part, without those of channels where parts differ in them."""
        singles = [self._single(signature, index) for index in range(len(signature.outputs))]
        space = self.base.space(singles[0])
        biased = len(singles[0].inputs) > 2
        if len({single.inputs[1] for single in singles}) == 1:
            own = [operand for operand in space.inputs[1:] for _ in singles]
            return IterationSpace(space.axes, (space.inputs[0], *own), space.outputs * len(singles))
        kept = [index for index, axis in enumerate(space.axes) if axis.kind is not AxisKind.PARAMETER]
        numbers = {axis: number for number, axis in enumerate(kept)}
        spaces = [self.base.space(single) for single in singles]
        return IterationSpace(
            tuple(space.axes[index] for index in kept),
            (
                _renumbered(space.inputs[0], singles[0].inputs[0], numbers),
                *[
                    _renumbered(of.inputs[slot], single.inputs[slot], numbers)
                    for slot in range(1, 2 + biased)
                    for of, single in zip(spaces, singles, strict=True)
                ],
            ),
            tuple(
                _renumbered(of.outputs[0], single.outputs[0], numbers)
                for of, single in zip(spaces, singles, strict=True)
            ),
        )

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the merged call with the arguments that the first part's own local call has."""
        single = self._single(signature, 0)
        slots = _slots(signature, 0)
        first = self.base.localize(
            single,
            replace(part, inputs=tuple(part.inputs[slot] for slot in slots), outputs=part.outputs[:1]),
            tuple(gradients[slot] for slot in slots),
        )
        local = dict(first.arguments)
        biases = () if local.get("bias") is None else dict(signature.arguments)["biases"]
        arguments = tuple(
            (name, biases if name == "biases" else local.get(name, value))
            for name, value in signature.arguments
        )
        used = {slot for _, value in arguments for slot in slots_in(value)}
        return LocalCall(
            target=signature.target,
            arguments=arguments,
            inputs=part.input_specs(signature),
            outputs=part.output_specs(signature),
            gradients=tuple(flag and slot in used for slot, flag in enumerate(gradients)),
        )

    def flops(self, call: LocalCall) -> float:
        """Return the operations of all parts."""
        return sum(self.base.flops(self._single_call(call, index)) for index in range(len(call.outputs)))

    def backward_flops(self, call: LocalCall) -> float:
        """Return the operations of the backwards of all parts."""
        return sum(
            self.base.backward_flops(self._single_call(call, index)) for index in range(len(call.outputs))
        )

    def _single(self, signature: Signature, index: int) -> Signature:
        """Return one of the operators that were merged."""
        slots = _slots(signature, index)
        return Signature(
            self.target,
            _single_arguments(signature.arguments, biased=len(slots) > 2),
            tuple(signature.inputs[slot] for slot in slots),
            (signature.outputs[index],),
        )

    def _single_call(self, call: LocalCall, index: int) -> LocalCall:
        slots = _slots(call, index)
        return LocalCall(
            self.target,
            _single_arguments(call.arguments, biased=len(slots) > 2),
            tuple(call.inputs[slot] for slot in slots),
            (call.outputs[index],),
            tuple(call.gradients[slot] for slot in slots),
        )


def _slots(call: Signature | LocalCall, index: int) -> list[int]:
    """Return the slots of input, weight and, where there is one, bias of one part."""
    arguments = dict(call.arguments)
    biases = slots_in(arguments["biases"])
    return [*slots_in(arguments["input"]), slots_in(arguments["weights"])[index], *biases[index : index + 1]]


def _single_arguments(
    arguments: Sequence[tuple[str, Argument]], *, biased: bool
) -> tuple[tuple[str, Argument], ...]:
    own = {
        "input": ("input", Slot(0)),
        "weights": ("weight", Slot(1)),
        "biases": ("bias", Slot(2) if biased else None),
    }
    return tuple(own.get(name, (name, value)) for name, value in arguments)


def _renumbered(operand: OperandMap, spec: TensorSpec, numbers: Mapping[int, int]) -> OperandMap:
    """Return an operand map for other numbers of axes; a dim of an axis that is gone is whole."""

    def renumbered(dim: Dim, size: int) -> Dim:
        if any(factor.axis is not None and factor.axis not in numbers for factor in dim):
            return whole(size)
        return tuple(
            factor if factor.axis is None else replace(factor, axis=numbers[factor.axis]) for factor in dim
        )

    return tuple(renumbered(dim, size) for dim, size in zip(operand, spec.shape, strict=True))


RULES: Mapping[str, BaseRule] = {
    merged: MergedRule(
        LinearRule() if target == "aten.linear.default" else ConvolutionRule(int(target[len("aten.conv")])),
        target,
    )
    for target, merged in MERGED.items()
}
