"""Recurrent modules, unrolled into cells: each step of each layer and direction is an operator that splits and moves.

Sequences of too many steps stay one operator a layer, whose samples alone split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from graph.errors import ImportFailure
from graph.importing.building import Ref
from graph.importing.lowering import Arguments, Lowered, Lowerer, Lowering
from graph.importing.specs import spec_of
from graph.operators import Argument, TensorSpec

# Cells that one call may become: more make a graph that a search goes through slowly.
MOST_CELLS = 1024
# Of each direction of a layer: weights of the input and of the state, and their biases.
_WEIGHTS, _BIASES = 2, 2


@dataclass(frozen=True, slots=True)
class _Stack:
    """One call: its layers, directions and arguments by value names."""

    lowering: Lowering
    name: str
    target: str
    batch_first: bool
    dropout: float
    layers: int
    directions: int
    weights: tuple[str, ...]
    states: tuple[str, ...]
    arguments: Arguments

    def add(
        self, name: str, target: str, arguments: dict[str, Argument], *specs: TensorSpec
    ) -> tuple[str, ...]:
        """Add an operator whose name begins with the call's."""
        return self.lowering.builder.add(f"{self.name}.{name}", target, arguments, specs)

    def spec(self, value: str) -> TensorSpec:
        """Return the spec of a value."""
        return self.lowering.builder.spec(value)

    def dropped(self, name: str, value: str) -> str:
        """Return a layer's input behind the dropout between layers."""
        if not self.dropout:
            return value
        given: dict[str, Argument] = {"self": Ref(value), "p": self.dropout}
        return self.add(f"{name}.dropout", "soapstone.dropout", given, self.spec(value))[0]

    def weights_of(self, row: int) -> tuple[str, ...]:
        """Return the weights of one direction of a layer, by row of the initial states."""
        count = len(self.weights) // (self.layers * self.directions)
        return self.weights[row * count : (row + 1) * count]


def _recurrent(lowering: Lowering, name: str, node: fx.Node, arguments: Arguments) -> Lowered:
    """Write a recurrent module as cells, or as one operator a layer where they would be too many."""
    states = arguments["hx"]
    stack = _Stack(
        lowering,
        name,
        str(node.target),
        bool(arguments["batch_first"]),
        float(arguments["dropout"]) if arguments["train"] else 0.0,
        arguments["num_layers"],
        2 if arguments["bidirectional"] else 1,
        tuple(lowering.value(weight) for weight in arguments["params"]),
        tuple(lowering.value(state) for state in (states if isinstance(states, (list, tuple)) else [states])),
        arguments,
    )
    source = lowering.value(arguments["input"])
    specs = [spec_of(result, lowering.builder.model, name) for result in node.meta["val"]]
    steps = stack.spec(source).shape[1 if stack.batch_first else 0]
    of_direction = len(stack.weights) // (stack.layers * stack.directions)
    # A projection of the state has a weight of its own, which cells do not have.
    has_cells = of_direction in (_WEIGHTS, _WEIGHTS + _BIASES)
    if has_cells and 0 < steps * stack.layers * stack.directions <= MOST_CELLS:
        return _unrolled(stack, source, specs)
    return _by_layer(stack, source, specs)


def _unrolled(stack: _Stack, source: str, specs: list[TensorSpec]) -> Lowered:
    time = 1 if stack.batch_first else 0
    shape, dtype = stack.spec(source).shape, stack.spec(source).dtype
    step = TensorSpec((*shape[:time], *shape[time + 1 :]), dtype)
    given: dict[str, Argument] = {"self": Ref(source), "dim": time}
    inputs = list(stack.add("steps", "aten.unbind.int", given, *[step] * shape[time]))
    begins = [_rows(stack, f"begin{position}", state) for position, state in enumerate(stack.states)]
    ends: list[list[str]] = [[] for _ in stack.states]
    for layer in range(stack.layers):
        if layer:
            inputs = [
                stack.dropped(f"layer{layer}.step{step_index}", value)
                for step_index, value in enumerate(inputs)
            ]
        made = []
        for direction in range(stack.directions):
            row = layer * stack.directions + direction
            outputs, last = _run(stack, row, inputs, [rows[row] for rows in begins])
            made.append(outputs)
            for end, state in zip(ends, last, strict=True):
                end.append(state)
        inputs = made[0] if len(made) == 1 else _joined(stack, layer, made)
    output = _stacked(stack, "output", inputs, time, specs[0])
    return output, *(
        _stacked(stack, f"end{position}", end, 0, spec)
        for position, (end, spec) in enumerate(zip(ends, specs[1:], strict=True))
    )


def _run(stack: _Stack, row: int, inputs: list[str], begin: list[str]) -> tuple[list[str], list[str]]:
    """Return the outputs of one direction of a layer in the order of time, and its last states."""
    cell = stack.target.replace(".input", "_cell.default")
    weights = [Ref(weight) for weight in stack.weights_of(row)]
    names = ("w_ih", "w_hh", "b_ih", "b_hh")
    given: dict[str, Argument] = dict(zip(names, [*weights, None, None], strict=False))
    backward = row % stack.directions == 1
    order = range(len(inputs))
    outputs, states = [""] * len(inputs), begin
    for step in reversed(order) if backward else order:
        hx: Any = tuple(map(Ref, states)) if len(states) > 1 else Ref(states[0])
        own = f"layer{row // stack.directions}{'.reverse' if backward else ''}.step{step}"
        states = list(
            stack.add(own, cell, {"input": Ref(inputs[step]), "hx": hx, **given}, *map(stack.spec, states))
        )
        outputs[step] = states[0]
    return outputs, states


def _rows(stack: _Stack, name: str, state: str) -> list[str]:
    """Return the initial state of each direction of each layer."""
    spec = stack.spec(state)
    row = TensorSpec(spec.shape[1:], spec.dtype)
    given: dict[str, Argument] = {"self": Ref(state), "dim": 0}
    return list(stack.add(name, "aten.unbind.int", given, *[row] * spec.shape[0]))


def _joined(stack: _Stack, layer: int, made: list[list[str]]) -> list[str]:
    """Return the outputs of both directions of a layer side by side."""
    joined: list[str] = []
    for step, pair in enumerate(zip(*made, strict=True)):
        spec = stack.spec(pair[0])
        both = TensorSpec((spec.shape[0], spec.shape[1] * len(pair)), spec.dtype)
        given: dict[str, Argument] = {"tensors": tuple(map(Ref, pair)), "dim": 1}
        joined += stack.add(f"layer{layer}.both{step}", "aten.cat.default", given, both)
    return joined


def _stacked(stack: _Stack, name: str, pieces: list[str], dim: int, spec: TensorSpec) -> str:
    given: dict[str, Argument] = {"tensors": tuple(map(Ref, pieces)), "dim": dim}
    return stack.add(name, "aten.stack.default", given, spec)[0]


def _by_layer(stack: _Stack, source: str, specs: list[TensorSpec]) -> Lowered:
    finals = []
    for layer in range(stack.layers):
        own = f"layer{layer}"
        if layer:
            source = stack.dropped(own, source)
        begin = [
            _layer_state(stack, f"{own}.state{index}", state, layer)
            for index, state in enumerate(stack.states)
        ]
        rows = range(layer * stack.directions, (layer + 1) * stack.directions)
        given = {
            **stack.arguments,
            "input": Ref(source),
            "hx": tuple(map(Ref, begin)) if len(begin) > 1 else Ref(begin[0]),
            "params": tuple(Ref(weight) for row in rows for weight in stack.weights_of(row)),
            "num_layers": 1,
            "dropout": 0.0,
        }
        source, *last = stack.add(own, stack.target, given, specs[0], *map(stack.spec, begin))
        finals.append(last)
    if stack.layers == 1:
        return source, *finals[0]
    ends: list[str] = []
    for position, spec in enumerate(specs[1:]):
        pieces = tuple(Ref(last[position]) for last in finals)
        ends += stack.add(f"end{position}", "aten.cat.default", {"tensors": pieces, "dim": 0}, spec)
    return source, *ends


def _layer_state(stack: _Stack, name: str, state: str, layer: int) -> str:
    """Return the initial state of one layer: its directions' slices."""
    if stack.layers == 1:
        return state
    spec = stack.spec(state)
    given: dict[str, Argument] = {
        "self": Ref(state),
        "dim": 0,
        "start": layer * stack.directions,
        "end": (layer + 1) * stack.directions,
        "step": 1,
    }
    made = TensorSpec((stack.directions, *spec.shape[1:]), spec.dtype)
    return stack.add(name, "aten.slice.Tensor", given, made)[0]


def _refused(lowering: Lowering, name: str, _node: fx.Node, _arguments: Arguments) -> Lowered:
    raise ImportFailure(
        f"model {lowering.builder.model}: {name} runs on a packed sequence, whose lengths depend on data, must run on "
        "a padded tensor; leave the padding out of the loss"
    )


# By the operator's name, without its library.
RECURRENT: dict[str, Lowerer] = {
    f"{kind}.{form}": lower
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for form, lower in (("input", _recurrent), ("data", _refused))
}
