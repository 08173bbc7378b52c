"""Collects values and operators while a graph is lowered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graph.operators import FLOATING, Argument, Slot, TensorSpec, ValueKind
from graph.rules.base import Signature
from graph.rules.registry import is_known, rule_for

# Operators whose outputs carry no gradient, and outputs by position that carry none.
NOT_DIFFERENTIABLE = frozenset(
    {"aten.detach.default", "aten.histc.default", "soapstone.running_statistics", "soapstone.exp_sums"}
)
NOT_DIFFERENTIABLE_OUTPUTS = {"soapstone.batch_norm": frozenset({1})}


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a value while arguments are being made; becomes a Slot."""

    name: str


@dataclass(slots=True)
class DraftValue:
    """A value under construction."""

    spec: TensorSpec
    kind: ValueKind
    requires_gradient: bool


@dataclass(slots=True)
class DraftOperator:
    """An operator without its space."""

    name: str
    target: str
    arguments: tuple[tuple[str, Argument], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(slots=True)
class GraphBuilder:
    """Values by name, operators in order, and why some run unsplit."""

    model: str
    values: dict[str, DraftValue] = field(default_factory=dict)
    operators: list[DraftOperator] = field(default_factory=list)

    def unique(self, name: str) -> str:
        """Return a name that no value has yet."""
        while name in self.values or f"{name}.0" in self.values:
            name += "_"
        return name

    def add_value(self, name: str, spec: TensorSpec, kind: ValueKind, *, trainable: bool = False) -> str:
        """Add an input, weight or buffer."""
        self.values[name] = DraftValue(spec, kind, trainable)
        return name

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a value."""
        return self.values[name].spec

    def add(
        self, name: str, target: str, arguments: Mapping[str, Argument], outputs: Sequence[TensorSpec]
    ) -> tuple[str, ...]:
        """Add an operator whose arguments hold `Ref`s; return the names of its outputs."""
        name = self.unique(name)
        inputs: list[str] = []

        def slotted(value: Argument) -> Argument:
            if isinstance(value, Ref):
                inputs.append(value.name)
                return Slot(len(inputs) - 1)
            if isinstance(value, (tuple, list)):
                return tuple(slotted(item) for item in value)
            return value

        resolved = tuple((key, slotted(value)) for key, value in arguments.items())
        names = (
            (name,) if len(outputs) == 1 else tuple(f"{name}.{position}" for position in range(len(outputs)))
        )
        needs = target not in NOT_DIFFERENTIABLE and any(self.values[i].requires_gradient for i in inputs)
        for position, (output, spec) in enumerate(zip(names, outputs, strict=True)):
            carries = position not in NOT_DIFFERENTIABLE_OUTPUTS.get(target, ())
            self.values[output] = DraftValue(
                spec, ValueKind.OPERATOR, needs and carries and spec.dtype in FLOATING
            )
        self.operators.append(DraftOperator(name, target, resolved, tuple(inputs), names))
        return names

    def signature(self, operator: DraftOperator) -> Signature:
        """Return the operator's signature, from which a rule makes its space."""
        return Signature(
            operator.target,
            operator.arguments,
            tuple(self.values[name].spec for name in operator.inputs),
            tuple(self.values[name].spec for name in operator.outputs),
        )

    def unsplit_reason(self, operator: DraftOperator) -> str | None:
        """Return why an operator cannot be split as it might be expected to be."""
        return rule_for(operator.target).unsplit_reason(self.signature(operator))

    def splittable(self, operator: DraftOperator) -> bool:
        """True where the operator's type has a rule."""
        return is_known(operator.target)
