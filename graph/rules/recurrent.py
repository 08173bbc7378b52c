"""Recurrent cells and layers.

A cell's split of the hidden units needs the whole previous state, but makes its own units only. A layer is one operator
for all its time steps: only its samples split.
"""

from __future__ import annotations

from collections.abc import Mapping

from graph.axes import AxisKind, Dim, IterationSpace, OperandMap, whole
from graph.calls import LocalCall
from graph.rules.base import Signature, TaskPart
from graph.rules.common import (
    BaseRule,
    SpaceBuilder,
    local_call,
    slot_of,
    whole_axis,
    whole_operand,
    whole_space,
)


class RecurrentCellRule(BaseRule):
    """aten.lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell with `gates` blocks of weights.

    Axes: sample, hidden (a parameter). Weights are [gates x hidden, features]. The LSTM's cell state follows hidden.
    """

    # The forward's operations once for the data and once for the weight gradient.
    backward_forwards = 2.0

    def __init__(self, gates: int) -> None:
        self.gates = gates
        # A part of a GRU's hidden units is told which they are.
        self.by_size = gates != 3

    def space(self, signature: Signature) -> IterationSpace:
        """Return the axes; a state without batch dim runs whole."""
        features, state = signature.inputs[0].shape, signature.inputs[1].shape
        if len(features) != 2:
            return whole_space(signature)
        builder = SpaceBuilder()
        sample = builder.add("sample", state[0], AxisKind.SAMPLE)
        hidden = builder.add("hidden", state[1], AxisKind.PARAMETER)
        block: Dim = (*whole(self.gates), *hidden) if self.gates > 1 else hidden
        output = (sample, hidden)
        inputs: list[OperandMap] = [(sample, whole(features[1])), (sample, whole(state[1]))]
        if self.gates == 4:
            inputs.append(output)
        inputs += [(block, whole(features[1])), (block, whole(state[1]))]
        inputs += [(block,)] * (len(signature.inputs) - len(inputs))
        return builder.space(inputs, [output] * len(signature.outputs))

    def localize(self, signature: Signature, part: TaskPart, gradients: tuple[bool, ...]) -> LocalCall:
        """Return the plain cell, or the custom one where torch's refuses a part of the hidden units."""
        split = any(
            axis.kind is AxisKind.PARAMETER and not whole_axis(part, index)
            for index, axis in enumerate(part.space.axes)
        )
        if not split:
            return local_call(signature, part, gradients)
        name = signature.target.removeprefix("aten.").split(".")[0]
        bindings = (("hidden", part.outputs[0][1]),) if self.gates == 3 else ()
        return local_call(signature, part, gradients, target=f"soapstone.{name}", bindings=bindings)

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each sample and weight, and about ten a unit."""
        samples = call.inputs[0].shape[0] if len(call.inputs[0].shape) == 2 else 1
        slots = [slot for name in ("w_ih", "w_hh") if (slot := slot_of(call, name)) is not None]
        weights = sum(call.inputs[slot].elements for slot in slots)
        return 2.0 * samples * weights + 10.0 * call.outputs[0].elements


class RecurrentLayerRule(BaseRule):
    """aten.lstm.input, gru.input, rnn_tanh.input, rnn_relu.input: (input, initial states, weights) -> output, states.

    Axes: sample; time and hidden units are whole, since every step needs the whole state of the one before. The
    importer writes stacked layers one by one.
    """

    backward_forwards = 2.0

    def space(self, signature: Signature) -> IterationSpace:
        """Return the sample axis; a sequence without batch dim runs whole."""
        shape = signature.inputs[0].shape
        if len(shape) != 3:
            return whole_space(signature)
        batch = 0 if signature.argument("batch_first") else 1
        builder = SpaceBuilder()
        sample = builder.add("sample", shape[batch], AxisKind.SAMPLE)

        def along(sizes: tuple[int, ...], dim: int) -> OperandMap:
            return tuple(sample if d == dim else whole(size) for d, size in enumerate(sizes))

        states = len(signature.outputs) - 1
        inputs = [along(shape, batch)]
        inputs += [along(spec.shape, 1) for spec in signature.inputs[1 : 1 + states]]
        inputs += [whole_operand(spec) for spec in signature.inputs[1 + states :]]
        outputs = [along(signature.outputs[0].shape, batch)]
        outputs += [along(spec.shape, 1) for spec in signature.outputs[1:]]
        return builder.space(inputs, outputs)

    def flops(self, call: LocalCall) -> float:
        """Return two operations for each sample, time step and element of a weight matrix."""
        steps = call.inputs[0].elements // max(call.inputs[0].shape[-1], 1)
        matrices = sum(spec.elements for spec in call.inputs[len(call.outputs) :] if len(spec.shape) == 2)
        return 2.0 * steps * matrices + 10.0 * call.outputs[0].elements


RULES: Mapping[str, BaseRule] = {
    **dict.fromkeys(
        ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"),
        RecurrentLayerRule(),
    ),
    **dict.fromkeys(("aten.lstm_cell.default", "soapstone.lstm_cell"), RecurrentCellRule(4)),
    **dict.fromkeys(("aten.gru_cell.default", "soapstone.gru_cell"), RecurrentCellRule(3)),
    **dict.fromkeys(
        (
            "aten.rnn_tanh_cell.default",
            "soapstone.rnn_tanh_cell",
            "aten.rnn_relu_cell.default",
            "soapstone.rnn_relu_cell",
        ),
        RecurrentCellRule(1),
    ),
}
