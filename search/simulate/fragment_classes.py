"""Classes of a graph's fragments: what an operator, a value or a static tensor has in common with equal ones.

Equal layers, and equal steps of an unrolled network, are of one class: under equal configurations they share fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph.collectives import SUMMABLE
from graph.operators import OperatorGraph
from graph.rules import cost_class
from search.kernels.fragment_table import FragmentSubjects
from search.simulate.arrays import csr, operator_values, static_values
from search.simulate.regions import Regions
from search.simulate.saved_tensors import kept_outputs


@dataclass(frozen=True, slots=True)
class Port:
    """An operand of an operator: the operator, its class, and the operand map's number."""

    operator: int
    kind: int
    number: int


@dataclass(frozen=True, slots=True)
class ValueClass:
    """What the fragment of a value depends on beside configurations."""

    number: int
    producer: Port
    readers: tuple[Port, ...]
    item_bytes: int
    summable: bool


@dataclass(frozen=True, slots=True)
class StaticClass:
    """What the fragment of a weight, buffer or input depends on beside configurations."""

    number: int
    readers: tuple[Port, ...]
    item_bytes: int
    synchronized: bool


@dataclass(frozen=True, slots=True)
class FragmentClasses:
    """The classes of operators, values (renewed buffers last) and static tensors; equal numbers, equal fragments."""

    operators: list[int]
    values: list[ValueClass]
    statics: list[StaticClass]

    @classmethod
    def of(cls, graph: OperatorGraph, regions: Regions) -> FragmentClasses:
        """Return the classes of a graph, whose operands are numbered among regions' ports."""
        numbers: dict[object, int] = {}

        def number(key: object) -> int:
            return numbers.setdefault(key, len(numbers))

        operators = [
            number(
                (
                    cost_class(graph, operator),
                    graph.gradient_inputs(operator),
                    graph.has_backward(operator),
                    graph.summed_slots[index],
                    kept,
                )
            )
            for index, (operator, kept) in enumerate(zip(graph.operators, kept_outputs(graph), strict=True))
        ]

        def port(index: int, axes_map: int, *, is_input: bool) -> Port:
            space = graph.operators[index].space
            operand = space.inputs[axes_map] if is_input else space.outputs[axes_map]
            return Port(index, operators[index], regions.port(space.axes, operand))

        def readers(name: str) -> tuple[Port, ...]:
            return tuple(port(index, slot, is_input=True) for index, slot in graph.readers[name])

        values = []
        pairs = [(value.name, value.name) for value in operator_values(graph)] + list(graph.buffer_updates)
        for read_name, made_name in pairs:
            index, output = graph.producer[made_name]
            producer, reading = port(index, output, is_input=False), readers(read_name)
            spec = graph.value_by_name[made_name].spec
            summable = spec.dtype in SUMMABLE
            key = ("value", producer.number, tuple(p.number for p in reading), spec.item_bytes, summable)
            values.append(ValueClass(number(key), producer, reading, spec.item_bytes, summable))
        statics = []
        for static_index, value in enumerate(static_values(graph)):
            reading = readers(value.name)
            weight = static_index < len(graph.weights)
            static_key = ("static", tuple(p.number for p in reading), value.spec.item_bytes, weight)
            statics.append(StaticClass(number(static_key), reading, value.spec.item_bytes, weight))
        return cls(operators, values, statics)

    def subjects(self) -> FragmentSubjects:
        """Return what there are fragments of, as the kernels take it."""
        ports: list[Sequence[int]] = [[index] for index in range(len(self.operators))]
        ports += [
            [value.producer.operator, *(port.operator for port in value.readers)] for value in self.values
        ]
        ports += [[port.operator for port in static.readers] for static in self.statics]
        touched: list[list[int]] = [[] for _ in self.operators]
        for subject, operators in enumerate(ports):
            for index in dict.fromkeys(operators):
                touched[index].append(subject)
        classes = [
            *self.operators,
            *(value.number for value in self.values),
            *(static.number for static in self.statics),
        ]
        values_at = len(self.operators)
        return FragmentSubjects(
            np.array(classes, np.int64), *csr(ports), *csr(touched), values_at, values_at + len(self.values)
        )
