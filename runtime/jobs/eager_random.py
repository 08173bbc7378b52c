"""The graph's random numbers, for the random operators of the module itself.

Both are in the order of the forward. What torch draws in one call the graph may draw in several: the dropout between
layers of a recurrent module, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graph.operators import Operator, OperatorGraph
from graph.rules import DRAWING, whole_call
from profiler.operators import ExecutionContext, compile_call
from profiler.operators.counter_rng import keep_mask, whole_region

# Of aten.bernoulli_.
_DEFAULT_PROBABILITY = 0.5
_ROUNDING = 1e-9


class GraphRandomNumbers:
    """The graph's random numbers for the random operators of one forward, in their order.

    A random operator without a counterpart in the graph, since the loss does not depend on its result or the import has
    lost it, draws from torch's generator. A draw that begins at the same state of that generator as an earlier one
    repeats it (activation checkpointing), and gets the same numbers.
    """

    def __init__(self, graph: OperatorGraph, context: ExecutionContext) -> None:
        self._graph = graph
        self._context = context
        # In the order of the module, which substitutions may change. Dropout of everything is a product with zeros in
        # torch.
        self._waiting = [
            operator
            for operator in sorted(graph.operators, key=lambda operator: graph.draw_numbers[operator.name])
            if operator.target in DRAWING and _dropped(operator) != 1.0
        ]
        self._earlier: dict[bytes, list[Operator]] = {}

    def draw(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of a random operator: the next numbers of the graph, if they fit."""
        state = self._state()
        result = function(*args, **kwargs)  # advances torch's generator as without the graph's numbers
        values = result[0] if isinstance(result, (tuple, list)) else result
        shape = tuple(values.shape)
        arguments = dict(zip(_names(function), args, strict=False)) | kwargs
        name = function.overloadpacket.__name__.removesuffix("_like").rstrip("_")
        if name == "native_dropout":
            operators = self._next(state, shape, arguments["p"])
            if not operators:
                return result
            mask = self._numbers(operators, shape)
            return args[0] * mask / (1 - arguments["p"]), mask
        if name == "bernoulli":
            # Probabilities of each element are `p`, or the values themselves.
            ones = arguments.get("p", _DEFAULT_PROBABILITY if function._overloadname == "float" else args[0])
            operators = self._next(state, shape, 1 - ones if isinstance(ones, float) else None)
            if operators:
                numbers = self._numbers(operators, shape)
                values.copy_(numbers if numbers.dtype == torch.bool else numbers < ones)
            return result
        if name == "rrelu_with_noise" and arguments["training"]:
            operators = self._next(state, shape, None)
            if operators:
                low, noise = arguments["lower"], arguments["noise"]
                slopes = _scaled(self._numbers(operators, shape), arguments["upper"] - low, low)
                # The backward reads them there.
                noise.copy_(torch.where(args[0] > 0, 1.0, slopes))
                values.copy_(args[0] * noise)
            return result
        if name in _CONVERSIONS:
            operators = self._next(state, shape, None)
            if operators:
                values.copy_(_CONVERSIONS[name](self._numbers(operators, shape), arguments))
        return result

    def _state(self) -> bytes:
        if self._context.device.type == "cuda":
            return torch.cuda.get_rng_state(self._context.device).numpy().tobytes()
        return torch.get_rng_state().numpy().tobytes()

    def _next(self, state: bytes, shape: tuple[int, ...], dropped: float | None) -> list[Operator]:
        """Return the operators of the graph with the numbers of this draw; none where the graph has no counterpart."""
        if state not in self._earlier:
            count = self._fitting(shape, dropped)
            self._earlier[state] = self._waiting[:count]
            del self._waiting[:count]
        return self._earlier[state]

    def _fitting(self, shape: tuple[int, ...], dropped: float | None) -> int:
        """Return how many of the next operators of the graph together draw a tensor of `shape`."""
        steps = shape[0] if shape else 0
        for count, own in ((1, shape), (1, (*shape[1::-1], *shape[2:])), (steps, shape[1:])):
            following = self._waiting[:count]
            if len(following) == count > 0 and all(
                self._shape(operator) == own and _same_draw(_dropped(operator), dropped)
                for operator in following
            ):
                return count
        return 0

    def _shape(self, operator: Operator) -> tuple[int, ...]:
        """Return the shape of an operator's draw: attention drops some of its scores."""
        if operator.target != "soapstone.attention":
            return self._graph.output_specs(operator)[0].shape
        query, key = (self._graph.value_by_name[name].spec.shape for name in operator.inputs[:2])
        return (*query[:-1], key[-2])

    def _numbers(self, operators: Sequence[Operator], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the joint draw of operators: a mask of kept elements, or numbers."""
        pieces = [self._drawn(operator) for operator in operators]
        whole = pieces[0] if len(pieces) == 1 else torch.stack(pieces)
        return whole if tuple(whole.shape) == shape else whole.transpose(0, 1)

    def _drawn(self, operator: Operator) -> torch.Tensor:
        dropped = _dropped(operator)
        if dropped is None:
            return compile_call(whole_call(self._graph, operator))((), self._context)[0]
        region, shape = whole_region(self._shape(operator))
        key = (self._context.seed, self._context.step, self._graph.draw_numbers[operator.name])
        return keep_mask(region, shape, dropped, key, self._context.device)


def _names(function: Any) -> list[str]:
    return [argument.name for argument in function._schema.arguments]


def _dropped(operator: Operator) -> float | None:
    """Return the probability with which an operator drops; None: it draws numbers."""
    arguments = dict(operator.arguments)
    probability = arguments.get("p", arguments.get("dropout_p"))
    return float(probability) if isinstance(probability, (int, float)) else None


def _same_draw(own: float | None, dropped: float | None) -> bool:
    """Return whether an operator of the graph draws like torch's; uniform numbers become ones and zeros as well."""
    return own is None or (dropped is not None and abs(own - dropped) < _ROUNDING)


def _scaled(numbers: torch.Tensor, factor: Any, offset: Any) -> torch.Tensor:
    result: torch.Tensor = numbers * factor + offset
    return result


# Conversions of the graph's numbers to the distribution of an operator.
_CONVERSIONS: dict[str, Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]] = {
    "rand": lambda numbers, _given: numbers,
    "randn": lambda numbers, _given: numbers,
    "uniform": lambda numbers, given: _scaled(
        numbers, given.get("to", 1) - given.get("from", 0), given.get("from", 0)
    ),
    "normal": lambda numbers, given: _scaled(numbers, given.get("std", 1), given.get("mean", 0)),
    "exponential": lambda numbers, given: numbers / given.get("lambd", 1),
    "randint": lambda numbers, given: numbers % (given["high"] - given.get("low", 0)) + given.get("low", 0),
    "randperm": lambda numbers, _given: numbers.argsort(stable=True),
}
