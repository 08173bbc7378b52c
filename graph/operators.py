"""The operator graph G: operators, and the tensors between them.

Source: FlexFlow (arXiv:1807.05358) section 3: nodes are operators, edges are tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

from graph.aliasing import may_alias
from graph.axes import IterationSpace
from graph.canonical import digest
from graph.errors import GraphError
from graph.substitutions.substitution import Substitution

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
FLOATING = frozenset({"float64", "float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype ("float32", as torch prints it without its prefix) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.elements * self.item_bytes

    def to_json(self) -> list[Any]:
        """Return [dtype, [sizes]]."""
        return [self.dtype, list(self.shape)]


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands, inside an operator's arguments, for its `index`-th tensor input."""

    index: int


# None, bool, int, float, str, Slot, or a tuple of arguments.
Argument = Any


def argument_to_json(argument: Argument) -> Any:
    """Return an argument as JSON: a slot is {"slot": k}, an infinite float {"float": "inf"}."""
    if isinstance(argument, Slot):
        return {"slot": argument.index}
    if isinstance(argument, tuple):
        return [argument_to_json(item) for item in argument]
    if isinstance(argument, float) and not (float("-inf") < argument < float("inf")):
        return {"float": str(argument)}
    return argument


def argument_from_json(document: Any) -> Argument:
    """Return the argument that `argument_to_json` wrote."""
    if isinstance(document, dict):
        return Slot(int(document["slot"])) if "slot" in document else float(document["float"])
    if isinstance(document, list):
        return tuple(argument_from_json(item) for item in document)
    return document


class ValueKind(StrEnum):
    """Where a value comes from."""

    OPERATOR = "operator"
    INPUT = "input"
    WEIGHT = "weight"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph. Inputs, weights and buffers are in place at step start; `name` of a weight or
    buffer is its first state-dict name, of an input its position ("input.0"), else the operator's name."""

    name: str
    spec: TensorSpec
    kind: ValueKind
    requires_gradient: bool


@dataclass(frozen=True, slots=True)
class Operator:
    """One node. `target` is an ATen overload ("aten.conv2d.default") or an operator of ours ("soapstone.moments").

    `arguments` are complete (defaults from the schema), by schema name, and hold `Slot`s for tensors; `inputs`
    are the names of the values in slot order. `space` is the iteration space that its rule gave it, refined.
    """

    name: str
    target: str
    arguments: tuple[tuple[str, Argument], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    space: IterationSpace
    splittable: bool = True

    def argument(self, name: str) -> Argument:
        """Return the argument called `name`; raises KeyError where the schema has none."""
        return dict(self.arguments)[name]


@dataclass(frozen=True, slots=True)
class ExecutionOrder:
    """The order in which every device executes operators: first those of the loss, then those for buffers alone.

    Statistics of a whole batch, which only renew buffers, would otherwise make every device wait at every layer.
    """

    of_loss: tuple[int, ...]
    of_buffers: tuple[int, ...]


@dataclass(frozen=True)
class OperatorGraph:
    """Operators in topological order, the values between them, and the scalar loss.

    `buffer_updates` maps a buffer's name to the value that replaces it after the step.
    `unsplit` names operators that have no rule and run whole, and views whose sizes do not factor, each with why.
    `substitutions` were applied to the graph that was imported, in this order (`graph.substitutions`), whose operators
    made the values `made_as_imported`; without substitutions it is empty.
    """

    name: str
    operators: tuple[Operator, ...]
    values: tuple[Value, ...]
    inputs: tuple[str, ...]
    loss: str
    buffer_updates: tuple[tuple[str, str], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    unsplit: tuple[tuple[str, str], ...] = ()
    batch_norm: str = "synchronized"
    substitutions: tuple[Substitution, ...] = ()
    made_as_imported: tuple[str, ...] = ()
    _cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def value_by_name(self) -> dict[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def operator_by_name(self) -> dict[str, Operator]:
        """Operators by name."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def index_by_name(self) -> dict[str, int]:
        """Positions of operators in topological order, by name."""
        return {operator.name: index for index, operator in enumerate(self.operators)}

    @cached_property
    def draw_numbers(self) -> dict[str, int]:
        """For each operator, the number by which it draws random numbers: the place of its first output among all.

        Among those of the graph as imported, so that an operator that stays draws the same after substitutions.
        """
        made = [value.name for value in self.values if value.kind is ValueKind.OPERATOR]
        places = {name: place for place, name in enumerate(dict.fromkeys((*self.made_as_imported, *made)))}
        return {operator.name: places[operator.outputs[0]] for operator in self.operators}

    @cached_property
    def producer(self) -> dict[str, tuple[int, int]]:
        """For each value that an operator makes: (operator index, output position)."""
        return {
            value: (index, position)
            for index, operator in enumerate(self.operators)
            for position, value in enumerate(operator.outputs)
        }

    @cached_property
    def consumers(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """For each value: the (operator index, input slot) pairs that read it, in topological order."""
        readers: dict[str, list[tuple[int, int]]] = {value.name: [] for value in self.values}
        for index, operator in enumerate(self.operators):
            for slot, value in enumerate(operator.inputs):
                readers[value].append((index, slot))
        return {name: tuple(pairs) for name, pairs in readers.items()}

    @cached_property
    def order(self) -> ExecutionOrder:
        """The order of execution; each of its two parts is topological."""
        values = {self.loss}
        needed = set()
        for index in range(len(self.operators) - 1, -1, -1):
            if not values.isdisjoint(self.operators[index].outputs):
                needed.add(index)
                values.update(self.operators[index].inputs)
        everything = range(len(self.operators))
        return ExecutionOrder(
            tuple(index for index in everything if index in needed),
            tuple(index for index in everything if index not in needed),
        )

    @cached_property
    def readers(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """As `consumers`, in the order of execution."""
        late = frozenset(self.order.of_buffers)
        return {
            name: tuple(sorted(pairs, key=lambda pair: pair[0] in late))
            for name, pairs in self.consumers.items()
        }

    @cached_property
    def summed_slots(self) -> tuple[tuple[int, ...], ...]:
        """For each operator: the input slots whose gradient is added to that of a later reader.

        Backwards go in the opposite order of forwards, so the last reader of a tensor gives its first gradient.
        """
        slots: list[list[int]] = [[] for _ in self.operators]
        for giving in self.gradient_readers.values():
            for index, slot in giving[:-1]:
                slots[index].append(slot)
        return tuple(tuple(sorted(of)) for of in slots)

    @cached_property
    def gradient_readers(self) -> dict[str, list[tuple[int, int]]]:
        """For each tensor with a gradient: its readers that have a backward, as (operator, input slot), in order."""
        return {
            name: [pair for pair in pairs if self.has_backward(self.operators[pair[0]])]
            for name, pairs in self.readers.items()
            if self.value_by_name[name].requires_gradient
        }

    @cached_property
    def rereads_weights(self) -> tuple[bool, ...]:
        """For each operator: whether the reader of weights before or after it reads the same weights.

        As the steps of a recurrent layer do: what the one has read is still in the caches for the other, as far as it
        fits.
        """
        weights = {weight.name for weight in self.weights}
        read = [frozenset(weights.intersection(operator.inputs)) for operator in self.operators]
        reading = [index for index in (*self.order.of_loss, *self.order.of_buffers) if read[index]]
        again = [False] * len(self.operators)
        for index, following in pairwise(reading):
            if read[index] == read[following]:
                again[index] = again[following] = True
        return tuple(again)

    @cached_property
    def weights(self) -> tuple[Value, ...]:
        """The trainable parameters, in graph order."""
        return tuple(value for value in self.values if value.kind is ValueKind.WEIGHT)

    @cached_property
    def weights_behind(self) -> dict[str, frozenset[str]]:
        """For each value, the weights whose memory it may share: a weight itself, and views of views of weights."""
        result = {value.name: frozenset[str]() for value in self.values}
        result.update({weight.name: frozenset({weight.name}) for weight in self.weights})
        for operator in self.operators:
            if may_alias(operator.target):
                behind = frozenset[str]().union(*(result[name] for name in operator.inputs))
                result.update(dict.fromkeys(operator.outputs, behind))
        return result

    @cached_property
    def weights_read(self) -> tuple[tuple[str, ...], ...]:
        """For each operator: the weights whose memory it may read, directly or through views, by name."""
        return tuple(
            tuple(sorted(frozenset[str]().union(*(self.weights_behind[name] for name in operator.inputs))))
            for operator in self.operators
        )

    @cached_property
    def weight_readers(self) -> dict[str, tuple[int, ...]]:
        """For each weight: the operators that may read its memory, directly or through views, ascending."""
        readers: dict[str, list[int]] = {weight.name: [] for weight in self.weights}
        for index, names in enumerate(self.weights_read):
            for name in names:
                readers[name].append(index)
        return {name: tuple(indexes) for name, indexes in readers.items()}

    @cached_property
    def weight_dtype(self) -> str:
        """The dtype of all weights; float32 where there are none.

        Raises:
            GraphError: they are of several, which no update is priced for.
        """
        dtypes = sorted({value.spec.dtype for value in self.weights})
        if len(dtypes) > 1:
            raise GraphError(
                f"graph {self.name}: its weights are {' and '.join(dtypes)}, must be of one dtype; convert the module "
                "(--precision bfloat16 or float16 does, or .float() in its factory)"
            )
        return dtypes[0] if dtypes else "float32"

    @cached_property
    def digest(self) -> str:
        """Digest of everything that a strategy depends on: operators, arguments, shapes, axes, wiring."""
        return digest(self.to_json())

    def input_specs(self, operator: Operator) -> tuple[TensorSpec, ...]:
        """Specs of an operator's tensor inputs, in slot order."""
        return tuple(self.value_by_name[name].spec for name in operator.inputs)

    def output_specs(self, operator: Operator) -> tuple[TensorSpec, ...]:
        """Specs of an operator's outputs."""
        return tuple(self.value_by_name[name].spec for name in operator.outputs)

    def gradient_inputs(self, operator: Operator) -> tuple[bool, ...]:
        """For each input slot: whether a gradient flows back through it."""
        return tuple(self.value_by_name[name].requires_gradient for name in operator.inputs)

    def has_backward(self, operator: Operator) -> bool:
        """True where some output needs a gradient, so that the operator has backward tasks."""
        return any(self.value_by_name[name].requires_gradient for name in operator.outputs)

    def to_json(self) -> dict[str, Any]:
        """Return the graph as a JSON document, without its name."""
        return {
            "operators": [
                {
                    "name": operator.name,
                    "target": operator.target,
                    "arguments": [[name, argument_to_json(value)] for name, value in operator.arguments],
                    "inputs": list(operator.inputs),
                    "outputs": list(operator.outputs),
                    "axes": [[axis.name, axis.size, axis.kind.value] for axis in operator.space.axes],
                }
                for operator in self.operators
            ],
            "values": [
                [value.name, value.spec.to_json(), value.kind.value, value.requires_gradient]
                for value in self.values
            ],
            "inputs": list(self.inputs),
            "loss": self.loss,
            "buffer_updates": [list(pair) for pair in self.buffer_updates],
            "batch_norm": self.batch_norm,
        }

    def validate(self) -> None:
        """Check the wiring: topological order, known values, a scalar loss.

        Raises:
            GraphError: naming the operator or value at fault.
        """
        made = {value.name for value in self.values if value.kind is not ValueKind.OPERATOR}
        for operator in self.operators:
            for name in operator.inputs:
                if name not in made:
                    raise GraphError(
                        f"operator {operator.name}: input {name} is not made before it, must come from an earlier "
                        "operator or be an input; check the import"
                    )
            made.update(operator.outputs)
        loss = self.value_by_name.get(self.loss)
        if loss is None or loss.spec.shape != ():
            raise GraphError(
                f"graph {self.name}: loss {self.loss} is not a scalar, must be one; return a mean or a sum"
            )

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)
