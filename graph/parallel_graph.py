"""The parallel computation graph of a strategy: Unity's view of it, and the way back.

Each operator has a degree for each of its axes and a machine view. Its output is a parallel tensor: an axis that
follows a dim splits it, other axes make copies (replica axes) or partial sums. What an operator reads is one, too: axes
that do not split it read copies. Between the two stands a chain of parallelization operators, the shortest there is:
Reduce and Combine on the devices of the first parts that they gather, Partition and Replicate on those of the first
parts that come of them. A chain without operators may still move parts to other devices. Copies that a chain does not
read are discarded, for which there is no operator. Weights, buffers and inputs
are whole before their chains, of which nothing is sent: a step has them in place where they are read. In the backward
each operator has its dual, so that the Replicate of a weight is the sum of its gradients.

Constant slices that an operator reads of a dim are cut by the operator itself. The renewal of buffers is left out.

What has no parallelization operator is refused, in one line: uneven parts, devices that are no machine view, halos,
weights in shares (ZeRO, FSDP), recomputation, compiled stretches, chosen all-reduces.

Source: Unity (OSDI 2022), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import gcd, prod
from typing import Any, NamedTuple

from graph.axes import AxisKind, Degrees, DimFactor, OperandMap, part_of
from graph.errors import StrategyError
from graph.intervals import full
from graph.operators import Operator, OperatorGraph
from graph.parallel_tensor import (
    Factors,
    MachineView,
    ParallelDim,
    ParallelKind,
    ParallelOperator,
    ParallelTensor,
    PlacedTensor,
    common_sizes,
    machine_view,
    refined,
    simplified,
)
from graph.schedule import ONE_BATCH, MicroBatches
from graph.strategy import Configuration, Sharding, Strategy
from graph.synchronization import BY_DEFAULT
from graph.texts import shown


@dataclass(frozen=True, slots=True)
class ParallelChain:
    """The parallelization operators between a value as it is made and one that reads it, each with its result."""

    value: str
    source: PlacedTensor
    operators: tuple[ParallelOperator, ...]
    results: tuple[PlacedTensor, ...]
    target: PlacedTensor

    @property
    def text(self) -> str:
        """The operators in their order."""
        return ", ".join(operator.text for operator in self.operators)

    @property
    def moves(self) -> bool:
        """Whether parts go to other devices, though there is no operator."""
        if self.operators:
            return False
        made, read = (placed.holders for placed in (self.source, self.target))
        return not all(ours <= theirs for ours, theirs in zip(read, made, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Return the chain as a JSON document."""
        return {
            "value": self.value,
            "source": _placed_to_json(self.source),
            "operators": [
                {"operator": operator.text, **_placed_to_json(result)}
                for operator, result in zip(self.operators, self.results, strict=True)
            ],
            "target": _placed_to_json(self.target),
        }


@dataclass(frozen=True, slots=True)
class PlacedOperator:
    """An operator with a degree for each axis, its machine view, the chains of its inputs, and its outputs."""

    name: str
    degrees: Degrees
    view: MachineView
    inputs: tuple[ParallelChain, ...]
    outputs: tuple[ParallelTensor, ...]


@dataclass(frozen=True, slots=True)
class ParallelGraph:
    """A parallel computation graph, bound to its operator graph by its digest. `loss`: the chain behind the loss."""

    graph_digest: str
    operators: tuple[PlacedOperator, ...]
    loss: ParallelChain
    micro_batches: MicroBatches = ONE_BATCH

    @property
    def chains(self) -> Iterator[ParallelChain]:
        """All chains, in the order of their readers."""
        for operator in self.operators:
            yield from operator.inputs
        yield self.loss

    @property
    def parallel_operators(self) -> int:
        """The number of parallelization operators."""
        return sum(len(chain.operators) for chain in self.chains)

    def to_json(self, graph: OperatorGraph) -> dict[str, Any]:
        """Return the graph as a JSON document; degrees of one are left out."""
        return {
            "graph": self.graph_digest,
            "operators": [
                {
                    "name": placed.name,
                    "degrees": named_degrees(operator, placed.degrees),
                    "view": {
                        "start": placed.view.start,
                        "strides": dict(
                            zip(named_degrees(operator, placed.degrees), placed.view.strides, strict=True)
                        ),
                    },
                    "inputs": [chain.to_json() for chain in placed.inputs],
                    "outputs": [tensor.text for tensor in placed.outputs],
                }
                for operator, placed in zip(graph.operators, self.operators, strict=True)
            ],
            "loss": self.loss.to_json(),
        }


def _placed_to_json(placed: PlacedTensor) -> dict[str, Any]:
    view = placed.view
    return {
        "tensor": placed.tensor.text,
        "view": {"start": view.start, "extents": list(view.extents), "strides": list(view.strides)},
    }


def named_degrees(operator: Operator, degrees: Degrees) -> dict[str, int]:
    """Return the degrees of an operator by axis, those of one left out."""
    axes = operator.space.axes
    return {axis.name: degree for axis, degree in zip(axes, degrees, strict=True) if degree > 1}


def parallel_graph(graph: OperatorGraph, strategy: Strategy) -> ParallelGraph:
    """Return the parallel computation graph of a strategy.

    Raises:
        StrategyError: it has none; the message names the operator or the weight, and why.
    """
    _check_configurations_are_all(graph, strategy)
    batched = _batched_inputs(graph) if strategy.micro_batches.count > 1 else frozenset()
    made: dict[str, PlacedTensor] = {}
    operators = []
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        degrees = configuration.degrees
        split = OperatorSplit(operator, degrees, _view(operator, configuration))
        chains = tuple(
            _input_chain(
                graph, split, slot, made.get(value), strategy.micro_batches.count if value in batched else 1
            )
            for slot, value in enumerate(operator.inputs)
        )
        outputs = [split.output(position) for position in range(len(operator.outputs))]
        made.update(zip(operator.outputs, outputs, strict=True))
        tensors = tuple(placed.tensor for placed in outputs)
        operators.append(PlacedOperator(operator.name, degrees, split.view, chains, tensors))
    loss = _loss_chain(graph.loss, made[graph.loss], strategy.micro_batches.count)
    return ParallelGraph(graph.digest, tuple(operators), loss, strategy.micro_batches)


def strategy_of(parallel: ParallelGraph, graph: OperatorGraph) -> Strategy:
    """Return the strategy whose parallel computation graph it is.

    Raises:
        StrategyError: it is of another graph, or chains and tensors do not follow from degrees and machine views.
    """
    configurations = tuple(
        Configuration(operator.degrees, operator.view.devices) for operator in parallel.operators
    )
    strategy = Strategy(parallel.graph_digest, configurations, micro_batches=parallel.micro_batches)
    strategy.validate(graph, strategy.device_count)
    derived = parallel_graph(graph, strategy)
    if derived != parallel:
        name = next(
            (
                own.name
                for own, other in zip(parallel.operators, derived.operators, strict=True)
                if own != other
            ),
            "of the loss",
        )
        raise StrategyError(
            f"operator {name}: its inputs or outputs in the parallel computation graph are others than its degrees and "
            "machine view make, must be these; derive them from the strategy"
        )
    return strategy


def _check_configurations_are_all(graph: OperatorGraph, strategy: Strategy) -> None:
    """Check that a strategy says nothing that no operator of a parallel computation graph stands for."""
    for number, weight in enumerate(graph.weights):
        level = strategy.sharding_of(number)
        if level is not Sharding.NONE:
            raise StrategyError(
                f"weight {weight.name}: its holders share its {level} (ZeRO), must each keep all of it in a parallel "
                "computation graph; choose a strategy that shares no weights"
            )
    for ranges, what, other in (
        (strategy.recomputation, "made again in the backward", "kept"),
        (strategy.compiled, "compiled with others", "executed alone"),
    ):
        if ranges:
            raise StrategyError(
                f"operator {graph.operators[ranges[0].first].name}: is {what}, must be {other} in a parallel "
                "computation graph; choose a strategy without"
            )
    if strategy.collective_algorithms or strategy.synchronization != BY_DEFAULT:
        raise StrategyError(
            "strategy: chooses how gradients are summed, must leave that open in a parallel computation graph, which "
            "has Replicate and Reduce alone; choose a strategy without"
        )


def _batched_inputs(graph: OperatorGraph) -> frozenset[str]:
    """Return the inputs of which each micro-batch has its own samples: some reader follows them by samples.

    In micro-batches of one sample, no reader does: a dim of one is no axis. Each has all inputs of its own then.
    """
    followed = frozenset(
        name
        for name in graph.inputs
        for index, slot in graph.consumers[name]
        for dim in graph.operators[index].space.inputs[slot]
        for factor in dim
        if factor.axis is not None and graph.operators[index].space.axes[factor.axis].kind is AxisKind.SAMPLE
    )
    return followed or frozenset(graph.inputs)


def _view(operator: Operator, configuration: Configuration) -> MachineView:
    for axis, degree in zip(operator.space.axes, configuration.degrees, strict=True):
        if axis.kind is not AxisKind.REPLICA and axis.size % degree:
            raise StrategyError(
                f"operator {operator.name}: degree of axis {axis.name} is {degree}, must divide its size {axis.size} "
                "in a parallel computation graph; choose a degree that does"
            )
    view = machine_view(configuration.degrees, configuration.devices)
    if view is None:
        devices = shown(" ".join(map(str, configuration.devices)))
        raise StrategyError(
            f"operator {operator.name}: its devices {devices} are no machine view, must be different ones, each start "
            "+ sum of index x stride, in a parallel computation graph; place its tasks so"
        )
    return view


class Digit(NamedTuple):
    """A degree of a machine view, and the distance of devices along it."""

    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class OperatorSplit:
    """The parallel tensors that an operator reads and makes under its degrees and machine view."""

    operator: Operator
    degrees: Degrees
    view: MachineView
    _digits: dict[int, Digit] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        split = [axis for axis, degree in enumerate(self.degrees) if degree > 1]
        digits = map(Digit, self.view.extents, self.view.strides)
        object.__setattr__(self, "_digits", dict(zip(split, digits, strict=True)))

    def input(self, slot: int) -> PlacedTensor:
        """Return the parallel tensor that the operator reads; axes that do not split it read copies.

        Raises:
            StrategyError: the parts that its tasks read are none of a Partition.
        """
        dims, split = self._dims(self.operator.space.inputs[slot], self.operator.inputs[slot], "reads")
        return self._placed(dims, split, [axis for axis in self._digits if axis not in split], [])

    def output(self, position: int) -> PlacedTensor:
        """Return the parallel tensor that the operator makes; axes that it lacks make copies or partial sums.

        Raises:
            StrategyError: the parts that its tasks make are none of a Partition.
        """
        dims, split = self._dims(
            self.operator.space.outputs[position], self.operator.outputs[position], "makes"
        )
        others = [axis for axis in self._digits if axis not in split]
        replicas = [axis for axis in others if self.operator.space.axes[axis].kind is AxisKind.REPLICA]
        return self._placed(dims, split, replicas, [axis for axis in others if axis not in replicas])

    def _placed(
        self, dims: tuple[Factors, ...], split: list[int], copies: list[int], sums: list[int]
    ) -> PlacedTensor:
        digits = [self._digits[axis] for axis in (*split, *copies, *sums)]
        view = MachineView(
            self.view.start, tuple(digit.extent for digit in digits), tuple(digit.stride for digit in digits)
        )
        degrees = (prod(self._digits[axis].extent for axis in axes) for axes in (copies, sums))
        return PlacedTensor(ParallelTensor(dims, *degrees), view)

    def _dims(self, operand: OperandMap, value: str, verb: str) -> tuple[tuple[Factors, ...], list[int]]:
        """Return the split of each dim of an operand, and the axes that split one, in the order of dims."""
        split: list[int] = []
        dims = []
        for dim in operand:
            factors = []
            for factor in dim:
                axis = factor.axis
                if axis not in self._digits or (verb == "reads" and self._takes_all(factor)):
                    factors.append(ParallelDim(factor.size))
                    continue
                if axis in split or not self._is_partition(factor):
                    raise StrategyError(
                        f"operator {self.operator.name}: its parts along axis "
                        f"{self.operator.space.axes[axis].name} of {value}, which it {verb}, overlap or differ, must "
                        "be equal and disjoint as those of a Partition; split other axes"
                    )
                split.append(axis)
                factors.append(ParallelDim(factor.size, self.degrees[axis]))
            dims.append(tuple(factors))
        return tuple(dims), split

    def _takes_all(self, factor: DimFactor) -> bool:
        """Return whether every part of the factor's axis touches all of it."""
        return all(touched == full(factor.size) for touched in self._touched(factor))

    def _is_partition(self, factor: DimFactor) -> bool:
        """Return whether the parts of the factor's axis are equal ones of it."""
        touched = self._touched(factor)
        size, rest = divmod(factor.size, len(touched))
        return not rest and all(
            part == ((index * size, (index + 1) * size),) for index, part in enumerate(touched)
        )

    def _touched(self, factor: DimFactor) -> list[Any]:
        assert factor.axis is not None
        axis, degree = self.operator.space.axes[factor.axis], self.degrees[factor.axis]
        return [factor.touched(part_of(axis, degree, index)) for index in range(degree)]


def _input_chain(
    graph: OperatorGraph, split: OperatorSplit, slot: int, made: PlacedTensor | None, count: int
) -> ParallelChain:
    """Return the chain of an operator's input, of which its producer has `made` a tensor, in `count` micro-batches."""
    value, target = split.operator.inputs[slot], split.input(slot)
    if made is None:
        whole = ParallelTensor(tuple((ParallelDim(size),) for size in graph.value_by_name[value].spec.shape))
        source = PlacedTensor(whole, MachineView(target.view.start))
    else:
        source = made
    chain = derived_chain(value, source, target)
    if count == 1:
        return chain
    pipeline = ParallelOperator(ParallelKind.PIPELINE, count)
    return ParallelChain(value, source, (pipeline, *chain.operators), (source, *chain.results), target)


def derived_chain(value: str, source: PlacedTensor, target: PlacedTensor) -> ParallelChain:
    """Return the canonical chain from one parallel tensor to another, whose sums are one."""
    read = replace(source.tensor, copies=gcd(source.tensor.copies, target.tensor.copies))
    pairs = list(zip(source.tensor.dims, target.tensor.dims, strict=True))
    common = [common_sizes(*pair) for pair in pairs]
    # Where the splits of a dim have no factors in common it is gathered as the one and split as the other.
    ends = [
        [
            sizes or tuple(factor.size for factor in pair[end])
            for sizes, pair in zip(common, pairs, strict=True)
        ]
        for end in (0, 1)
    ]
    operators = simplified(
        [
            ParallelOperator(ParallelKind.REDUCE, source.tensor.sums),
            *_on_dims(ParallelKind.COMBINE, source.tensor, ends[0]),
            *_on_dims(ParallelKind.PARTITION, target.tensor, ends[1]),
            ParallelOperator(ParallelKind.REPLICATE, target.tensor.copies // read.copies),
        ]
    )
    results: list[PlacedTensor] = []
    tensor = read
    for operator in operators[:-1]:
        tensor = operator.apply(tensor)
        gathers = operator.kind in (ParallelKind.REDUCE, ParallelKind.COMBINE)
        placed, sizes = (source, ends[0]) if gathers else (target, ends[1])
        results.append(PlacedTensor(tensor, placed.first_devices(tensor, sizes)))
    return ParallelChain(value, source, operators, (*results, target) if operators else (), target)


def _on_dims(
    kind: ParallelKind, tensor: ParallelTensor, sizes: list[tuple[int, ...]]
) -> Iterator[ParallelOperator]:
    """Return the operators that gather or make all parts of a tensor's dims."""
    for dim, own in enumerate(sizes):
        for place, factor in enumerate(refined(tensor.dims[dim], own) or ()):
            if factor.degree > 1:
                yield ParallelOperator(kind, factor.degree, dim, place, own)


def _loss_chain(value: str, source: PlacedTensor, count: int) -> ParallelChain:
    """Return the chain behind the loss: its partial sums are added, and those of micro-batches."""
    operators, results = [], []
    if source.tensor.sums > 1:
        reduce = ParallelOperator(ParallelKind.REDUCE, source.tensor.sums)
        tensor = reduce.apply(source.tensor)
        operators.append(reduce)
        results.append(PlacedTensor(tensor, source.first_devices(tensor, [])))
    if count > 1:
        operators.append(ParallelOperator(ParallelKind.BATCH, count))
        results.append(results[-1] if results else source)
    return ParallelChain(value, source, tuple(operators), tuple(results), results[-1] if results else source)
