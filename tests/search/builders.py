"""Small operator graphs with hand-written iteration spaces, made-up costs, and random strategies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from graph.axes import (
    REPLICA_AXIS,
    Axis,
    AxisKind,
    Degrees,
    DimFactor,
    IterationSpace,
    OperandMap,
    along,
    operand_regions,
    whole,
)
from graph.calls import LocalCall
from graph.collectives import CollectiveKind
from graph.intervals import shape
from graph.operators import ITEM_BYTES, Operator, OperatorGraph, Slot, TensorSpec, Value, ValueKind
from graph.strategy import Configuration, Strategy
from graph.topology import DeviceKind, Topology, load_topology, local_topology
from search.cost.cost_table import OperatorCost, Origin, UpdateCost
from search.cost.link_costs import Curve, LinkCosts
from search.simulate.simulator import simulate_tasks
from search.simulate.task_graph import TaskGraph

SAMPLE, ATTRIBUTE, PARAMETER, REDUCTION = (
    AxisKind.SAMPLE,
    AxisKind.ATTRIBUTE,
    AxisKind.PARAMETER,
    AxisKind.REDUCTION,
)


def all_reduces(lines: Mapping[int, tuple[float, float]], transfers: Origin = Origin.DATASHEET) -> LinkCosts:
    """Return what is known where all-reduces of some group sizes were measured, each a line."""
    by_size = {(CollectiveKind.ALL_REDUCE, size): Curve.line(*line) for size, line in lines.items()}
    return LinkCosts(by_size, transfers=transfers)


# Some kinds of collectives over two and three devices were measured, and some messages; others follow from formulas.
SOME_MEASURED = LinkCosts(
    {
        (CollectiveKind.ALL_REDUCE, 2): Curve.line(1e-5, 2e-9),
        (CollectiveKind.ALL_REDUCE, 3): Curve.through({100: 2e-5, 10_000: 5e-5, 50_000: 2e-4}),
        (CollectiveKind.ALL_GATHER, 3): Curve.line(3e-5, 1e-9),
        (CollectiveKind.BROADCAST, 3): Curve.through({1: 1e-5, 20_000: 1.1e-4, 90_000: 6e-4}),
    },
    {(CollectiveKind.ALL_REDUCE, (0, 1)): Curve.line(3e-5, 1e-9)},
    messages={(0, 1): Curve.through({64: 1e-5, 2_000: 2e-5, 30_000: 2e-4}), (1, 0): Curve.line(2e-5, 1e-9)},
)
# Of GPUs, whose hosts take time to issue a message or collective.
ISSUED = replace(SOME_MEASURED, issue_s=7e-6)


@dataclass
class GraphBuilder:
    """Adds operators one after the other; `finish` makes the graph."""

    operators: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    buffer_updates: list[tuple[str, str]] = field(default_factory=list)

    def value(self, name: str, sizes: Sequence[int], kind: ValueKind, dtype: str = "float32") -> str:
        gradient = kind is ValueKind.WEIGHT
        self.values.append(Value(name, TensorSpec(tuple(sizes), dtype), kind, gradient))
        if kind is ValueKind.INPUT:
            self.inputs.append(name)
        return name

    def spec(self, name: str) -> TensorSpec:
        return next(value.spec for value in self.values if value.name == name)

    def operator(
        self,
        name: str,
        target: str,
        inputs: Sequence[str],
        outputs: Sequence[tuple[str, Sequence[int]]],
        axes: Sequence[Axis],
        input_maps: Sequence[OperandMap],
        output_maps: Sequence[OperandMap],
        *,
        differentiable: bool = True,
    ) -> None:
        known = {value.name: value for value in self.values}
        gradient = differentiable and any(known[value].requires_gradient for value in inputs)
        space = IterationSpace((*axes, REPLICA_AXIS), tuple(input_maps), tuple(output_maps))
        arguments = tuple((f"argument{slot}", Slot(slot)) for slot in range(len(inputs)))
        self.operators.append(
            Operator(name, target, arguments, tuple(inputs), tuple(value for value, _ in outputs), space)
        )
        for value, sizes in outputs:
            self.values.append(
                Value(value, TensorSpec(tuple(sizes), "float32"), ValueKind.OPERATOR, gradient)
            )

    def linear(self, name: str, source: str, features: int, weight: str | None = None) -> str:
        samples, inner = self.spec(source).shape
        if weight is None:
            weight = self.value(f"{name}.weight", (features, inner), ValueKind.WEIGHT)
        axes = (
            Axis("sample", samples, SAMPLE),
            Axis("out", features, PARAMETER),
            Axis("in", inner, REDUCTION),
        )
        self.operator(
            name,
            "aten.linear.default",
            (source, weight),
            [(name, (samples, features))],
            axes,
            [(along(0, samples), along(2, inner)), (along(1, features), along(2, inner))],
            [(along(0, samples), along(1, features))],
        )
        return name

    def pointwise(self, name: str, *sources: str) -> str:
        sizes = self.spec(sources[0]).shape
        kinds = (SAMPLE, *([ATTRIBUTE] * (len(sizes) - 1)))
        axes = [
            Axis(f"d{dim}", size, kind) for dim, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
        ]
        operand = tuple(along(dim, size) for dim, size in enumerate(sizes))
        self.operator(
            name,
            "aten.add.Tensor" if len(sources) > 1 else "aten.relu.default",
            sources,
            [(name, sizes)],
            axes,
            [operand] * len(sources),
            [operand],
        )
        return name

    def window(self, name: str, source: str) -> str:
        """A pooling of kernel 3, stride 1, padding 1 along the second dim."""
        samples, length = self.spec(source).shape
        axes = (Axis("sample", samples, SAMPLE), Axis("length", length, ATTRIBUTE))
        touched = (DimFactor(length, 1, start=-1, stride=1, extent=3),)
        self.operator(
            name,
            "aten.avg_pool1d.default",
            (source,),
            [(name, (samples, length))],
            axes,
            [(along(0, samples), touched)],
            [(along(0, samples), along(1, length))],
        )
        return name

    def joined(self, name: str, *sources: str) -> str:
        """Sources put together along their second dim: of some of them a task may need nothing."""
        samples = self.spec(sources[0]).shape[0]
        sizes = [self.spec(source).shape[1] for source in sources]
        axes = (Axis("sample", samples, SAMPLE), Axis("channel", sum(sizes), ATTRIBUTE))
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        self.operator(
            name,
            "aten.cat.default",
            sources,
            [(name, (samples, sum(sizes)))],
            axes,
            [
                (along(0, samples), (DimFactor(size, 1, -start),))
                for size, start in zip(sizes, starts, strict=True)
            ],
            [(along(0, samples), along(1, sum(sizes)))],
        )
        return name

    def normalization(self, name: str, source: str) -> str:
        """Moments (partial sums over samples), a buffer renewed from them, and their application."""
        samples, features = self.spec(source).shape
        axes = (Axis("sample", samples, SAMPLE), Axis("channel", features, PARAMETER))
        both, channel = (along(0, samples), along(1, features)), (along(1, features),)
        moments = [(f"{name}.sum", (features,)), (f"{name}.squares", (features,))]
        self.operator(
            f"{name}.moments", "soapstone.moments", (source,), moments, axes, [both], [channel, channel]
        )
        weight = self.value(f"{name}.weight", (features,), ValueKind.WEIGHT)
        buffer = self.value(f"{name}.running", (features,), ValueKind.BUFFER)
        alone = (Axis("channel", features, PARAMETER),)
        line = (along(0, features),)
        renewed = f"{name}.renewed"
        self.operator(
            f"{name}.statistics",
            "soapstone.running_statistics",
            (f"{name}.sum", f"{name}.squares", buffer),
            [(renewed, (features,))],
            alone,
            [line, line, line],
            [line],
            differentiable=False,
        )
        self.buffer_updates.append((buffer, renewed))
        self.operator(
            name,
            "soapstone.apply",
            (source, f"{name}.sum", f"{name}.squares", weight),
            [(name, (samples, features))],
            axes,
            [both, channel, channel, channel],
            [both],
        )
        return name

    def heads(self, name: str, source: str, groups: int) -> str:
        """A view whose second dim is a product of a fixed factor, groups, and the rest; then their middle."""
        samples, features = self.spec(source).shape
        inner = features // groups // 2
        axes = (
            Axis("sample", samples, SAMPLE),
            Axis("group", groups, PARAMETER),
            Axis("inner", inner, ATTRIBUTE),
        )
        fused = (DimFactor(2, None, 1, 1, 1), DimFactor(groups, 1), DimFactor(inner, 2))
        self.operator(
            name,
            "aten.slice.Tensor",
            (source,),
            [(name, (samples, groups * inner))],
            axes,
            [(along(0, samples), fused)],
            [(along(0, samples), (DimFactor(groups, 1), DimFactor(inner, 2)))],
        )
        return name

    def view(self, name: str, source: str) -> str:
        """The same memory, transposed."""
        rows, columns = self.spec(source).shape
        axes = (Axis("row", rows, PARAMETER), Axis("column", columns, ATTRIBUTE))
        self.operator(
            name,
            "aten.t.default",
            (source,),
            [(name, (columns, rows))],
            axes,
            [(along(0, rows), along(1, columns))],
            [(along(1, columns), along(0, rows))],
        )
        return name

    def loss(self, source: str) -> str:
        """Sum and count over samples (partial sums), and their quotient."""
        samples, features = self.spec(source).shape
        axes = (Axis("sample", samples, SAMPLE),)
        self.operator(
            "loss.sum",
            "aten.cross_entropy_loss.default",
            (source,),
            [("loss.sum", ()), ("loss.count", ())],
            axes,
            [(along(0, samples), whole(features))],
            [(), ()],
        )
        self.operator(
            "loss", "aten.div.Tensor", ("loss.sum", "loss.count"), [("loss", ())], (), [(), ()], [()]
        )
        return "loss"

    def finish(self, loss: str = "loss") -> OperatorGraph:
        graph = OperatorGraph(
            "test",
            tuple(self.operators),
            tuple(self.values),
            tuple(self.inputs),
            loss,
            buffer_updates=tuple(self.buffer_updates),
        )
        graph.validate()
        return graph


def two_layers(samples: int = 8, features: int = 16) -> OperatorGraph:
    """Two linear layers with a relu between them, and a loss."""
    builder = GraphBuilder()
    x = builder.value("input.0", (samples, features), ValueKind.INPUT)
    x = builder.pointwise("relu", builder.linear("first", x, features))
    builder.loss(builder.linear("second", x, features))
    return builder.finish()


def branches() -> OperatorGraph:
    """A residual branch, batch norms, a shared weight, a window, a fused product of factors, a buffer."""
    builder = GraphBuilder()
    x = builder.value("input.0", (6, 8), ValueKind.INPUT)
    first = builder.normalization("norm", builder.linear("first", x, 8))
    window = builder.window("window", builder.pointwise("relu", first))
    shared = builder.linear("shared", window, 8)
    again = builder.linear("again", shared, 8, weight="shared.weight")
    total = builder.pointwise("total", again, first)
    wide = builder.linear("wide", total, 24)
    builder.loss(builder.linear("last", builder.heads("heads", wide, 3), 5))
    return builder.finish()


def joined() -> OperatorGraph:
    """Two branches put side by side; a part of what follows may need one of them alone."""
    builder = GraphBuilder()
    source = builder.linear("first", builder.value("input.0", (6, 8), ValueKind.INPUT), 8)
    left, right = builder.linear("left", source, 4), builder.pointwise("right", source)
    both = builder.joined("both", left, right, source)
    builder.loss(builder.linear("last", builder.joined("again", both, left), 5))
    return builder.finish()


def viewed() -> OperatorGraph:
    """Weights that are read through views of views, long after these are made, and by themselves as well."""
    builder = GraphBuilder()
    x = builder.value("input.0", (6, 8), ValueKind.INPUT)
    weights = [builder.value(f"weight{number}", (8, 8), ValueKind.WEIGHT) for number in range(2)]
    seen = [builder.view(f"view{number}", weight) for number, weight in enumerate(weights)]
    again = builder.view("again", seen[0])
    x = builder.linear("first", x, 8, weight=weights[1])
    x = builder.pointwise("relu", builder.linear("second", x, 8, weight=seen[1]))
    x = builder.linear("third", builder.linear("own", x, 8), 8, weight=again)
    builder.loss(builder.linear("last", x, 8, weight=seen[0]))
    return builder.finish()


def unrolled(steps: int = 4) -> OperatorGraph:
    """A recurrent layer, unrolled: its two products of every step share their weights."""
    builder = GraphBuilder()
    state = builder.linear("first", builder.value("input.0", (6, 8), ValueKind.INPUT), 8)
    for step in range(steps):
        entered = builder.value(f"input.{step + 1}", (6, 8), ValueKind.INPUT)
        shared = (None, None) if step == 0 else ("in0.weight", "state0.weight")
        entered = builder.linear(f"in{step}", entered, 8, weight=shared[0])
        kept = builder.linear(f"state{step}", state, 8, weight=shared[1])
        state = builder.pointwise(f"sum{step}", entered, kept)
    builder.loss(builder.linear("last", state, 5))
    return builder.finish()


def local_calls(graph: OperatorGraph, operator: Operator, degrees: Degrees) -> tuple[LocalCall, ...]:
    """What rules do, for operators that have none: the same target and arguments on the regions' shapes."""

    def specs(
        operands: Sequence[OperandMap], whole_specs: Sequence[TensorSpec]
    ) -> list[tuple[TensorSpec, ...]]:
        regions = [operand_regions(operator.space.axes, operand, degrees) for operand in operands]
        return [
            tuple(
                TensorSpec(shape(region), spec.dtype) for region, spec in zip(task, whole_specs, strict=True)
            )
            for task in zip(*regions, strict=True)
        ] or [()] * int(np.prod(degrees))

    inputs = specs(operator.space.inputs, graph.input_specs(operator))
    outputs = specs(operator.space.outputs, graph.output_specs(operator))
    gradients = graph.gradient_inputs(operator)
    return tuple(
        LocalCall(operator.target, operator.arguments, mine, theirs, gradients)
        for mine, theirs in zip(inputs, outputs, strict=True)
    )


class MadeUpCosts:
    """Costs that grow with the elements read and written; the origin follows from the target."""

    def __init__(self, seconds_per_element: float = 1e-6, base_s: float = 1e-6) -> None:
        self.seconds_per_element = seconds_per_element
        self.base_s = base_s
        self.asked: list[tuple[str, str]] = []

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:
        self.asked += [(call.digest, kind_name) for call in calls]
        return [self._cost(call, kind_name) for call in calls]

    def _cost(self, call: LocalCall, kind_name: str) -> OperatorCost:
        elements = sum(spec.elements for spec in (*call.inputs, *call.outputs))
        if "linear" in call.target:
            elements = call.inputs[0].elements * call.inputs[1].shape[0]
        forward_s = self.base_s + elements * self.seconds_per_element * (1 + len(kind_name) % 3)
        origin = (Origin.MEASURED, Origin.ESTIMATED, Origin.DATASHEET)[len(call.target) % 3]
        return OperatorCost(forward_s, 2 * forward_s if call.has_backward else 0.0, origin)

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        return UpdateCost(1e-9 * len(optimizer + kind_name) * ITEM_BYTES[dtype] / 4, Origin.ESTIMATED)


class CoarseCosts(MadeUpCosts):
    """Whole microseconds, 0 to 2: much takes no time, and much ends at the same time."""

    def _cost(self, call: LocalCall, kind_name: str) -> OperatorCost:
        elements = sum(spec.elements for spec in (*call.inputs, *call.outputs))
        steps = (elements + len(kind_name)) % 3
        backward_s = (2 - steps) * 1e-6 if call.has_backward else 0.0
        return OperatorCost(steps * 1e-6, backward_s, Origin.MEASURED)


class LaunchedCosts(MadeUpCosts):
    """Costs of devices whose host takes longer to issue some calls than they take."""

    def _cost(self, call: LocalCall, kind_name: str) -> OperatorCost:
        cost = super()._cost(call, kind_name)
        launch_s = len(call.target) % 4 * 1e-5
        return replace(
            cost, forward_launch_s=launch_s, backward_launch_s=1.5 * launch_s if cost.backward_s else 0.0
        )

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        return super().update_cost(optimizer, dtype, kind_name)._replace(launch_s=len(optimizer) * 4e-6)


def device_kind(name: str = "made-up", memory_bytes: int = 1 << 40) -> DeviceKind:
    """A device kind of which only the memory matters here."""
    return DeviceKind(name, "cpu", (("float32", 1e12),), memory_bytes, 1e11, 0.0)


def devices(count: int, contention: float = 0.0, memory_bytes: int = 1 << 40) -> Topology:
    """One node of like devices."""
    return local_topology(count, device_kind(memory_bytes=memory_bytes), 2e8, 3e-6, contention)


def cluster() -> Topology:
    """Two nodes of four devices with shared links."""
    return load_topology("p100-cluster", nodes=2)


def random_anywhere(graph: OperatorGraph, device_count: int, rng: np.random.Generator) -> Strategy:
    """A legal strategy with no regard to groups or distinct devices: all that `Strategy.validate` accepts."""
    configurations = []
    for operator in graph.operators:
        degrees = [1] * len(operator.space.axes)
        for _ in range(int(rng.integers(0, 3))):
            axis = int(rng.integers(len(degrees)))
            size = min(operator.space.axes[axis].size, 4)
            degrees[axis] = int(rng.integers(1, size + 1))
        count = int(np.prod(degrees))
        chosen: Any = rng.integers(0, device_count, count) if rng.random() < 0.5 else None
        if chosen is None:
            chosen = [(int(rng.integers(device_count)) + task) % device_count for task in range(count)]
        configurations.append(Configuration(tuple(degrees), tuple(int(device) for device in chosen)))
    return Strategy(graph.digest, tuple(configurations))


def random_mesh(graph: OperatorGraph, device_count: int, rng: np.random.Generator) -> Strategy:
    """A legal strategy whose operators mostly split over all devices, in one order: full of collectives."""
    order = [int(device) for device in rng.permutation(device_count)]
    configurations = []
    for operator in graph.operators:
        axes = operator.space.axes
        degrees = [1] * len(axes)
        for _ in range(int(rng.integers(0, 3))):
            axis = int(rng.integers(len(axes)))
            room = device_count // int(np.prod(degrees))
            degrees[axis] = max(1, min(axes[axis].size, room, int(rng.choice([2, 3, room]))))
        start = int(rng.integers(device_count)) if rng.random() < 0.2 else 0
        devices = tuple(order[(start + task) % device_count] for task in range(int(np.prod(degrees))))
        configurations.append(Configuration(tuple(degrees), devices))
    return Strategy(graph.digest, tuple(configurations))


def statistics() -> OperatorGraph:
    """A buffer that the loss depends on and that other operators renew; a mean that all samples read."""
    builder = GraphBuilder()
    samples, features = 12, 8
    x = builder.linear("first", builder.value("input.0", (samples, features), ValueKind.INPUT), features)
    axes = (Axis("sample", samples, SAMPLE), Axis("channel", features, PARAMETER))
    both, channel = (along(0, samples), along(1, features)), (along(1, features),)
    offset = builder.value("offset", (features,), ValueKind.BUFFER)
    builder.operator("sum", "aten.sum.dim_IntList", (x,), [("sum", (features,))], axes, [both], [channel])
    line = (along(0, features),)
    builder.operator(
        "renewed",
        "aten.add.Tensor",
        ("sum", offset),
        [("renewed", (features,))],
        (Axis("channel", features, PARAMETER),),
        [line, line],
        [line],
        differentiable=False,
    )
    builder.buffer_updates.append((offset, "renewed"))
    builder.operator(
        "shifted",
        "aten.add.Tensor",
        (x, "sum", offset),
        [("shifted", (samples, features))],
        axes,
        [both, channel, channel],
        [both],
    )
    builder.loss(builder.linear("last", "shifted", 5))
    return builder.finish()


def check_bounds(tasks: TaskGraph) -> None:
    """Check that a step takes no less and no more than its bounds say, in every order."""
    for order in ("program", "fifo", "priority"):
        simulation = simulate_tasks(tasks, order)
        least_ns, most_ns = simulation.bounds_ns
        assert least_ns <= simulation.step_time_ns <= most_ns, order
