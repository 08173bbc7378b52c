"""The device mesh and the DTensor placements that express a strategy, or why there are none.

On a mesh, device (i, j) is number i * columns + j, every operator has one task on every device, and along one dim of
the mesh a tensor is sharded evenly on one dim, replicated, or a partial sum. Of all strategies few are so.

Source: GSPMD (arXiv:2105.04663) and OneFlow's SBP (arXiv:2110.15032): one placement a mesh dim, in PyTorch's words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from graph.axes import AxisKind, OperandMap, coordinates, operand_regions
from graph.errors import StrategyError
from graph.intervals import IndexSet, Region, full_region
from graph.operators import Operator, OperatorGraph, ValueKind
from graph.rules.batch_norm import STATISTICS
from graph.strategy import Configuration, Strategy

# Their statistics are of all samples, or of each part by definition; no plan of PyTorch's gives either.
# So few elements that computing them everywhere costs less than a message.
FEW = 16


class PlacementKind(StrEnum):
    """PyTorch's three placements."""

    SHARD = "Shard"
    REPLICATE = "Replicate"
    PARTIAL = "Partial"


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies along one dim of a mesh; `dim` is the tensor's, of a shard only."""

    kind: PlacementKind
    dim: int = 0

    def __str__(self) -> str:
        return f"{self.kind}({self.dim if self.kind is PlacementKind.SHARD else ''})"


REPLICATE = Placement(PlacementKind.REPLICATE)
PARTIAL = Placement(PlacementKind.PARTIAL)


def shard(dim: int) -> Placement:
    """Return the placement that splits a dim."""
    return Placement(PlacementKind.SHARD, dim)


# One placement for each dim of the mesh.
Placements = tuple[Placement, ...]


class Inexpressible(Exception):
    """Why a mesh does not express a strategy; `progress` counts the operators that it does express."""

    def __init__(self, reason: str, progress: int = 0) -> None:
        super().__init__(reason)
        self.progress = progress


@dataclass(frozen=True)
class MeshLayout:
    """A strategy on a mesh.

    sizes: of the mesh, outermost first; device order is row-major.
    inputs, outputs: for each operator, for each of its inputs and outputs, the placements that its tasks read or make.
    everywhere: operators that the strategy computes on few devices, which every device of the mesh computes instead:
        a division of the loss by its count, or what depends on neither inputs nor weights.
    held: the placements of every weight and buffer that is read.
    """

    sizes: tuple[int, ...]
    inputs: tuple[tuple[Placements, ...], ...]
    outputs: tuple[tuple[Placements, ...], ...]
    everywhere: frozenset[int]
    held: dict[str, Placements]


def inexpressible(strategy: Strategy, reason: str) -> StrategyError:
    """Return the error that says, in one line, why a strategy has no DTensor plan."""
    return StrategyError(
        f"strategy {strategy.digest[:12]}: has no DTensor plan ({reason}), must be one that a mesh expresses; "
        "export it with --format json"
    )


def meshes(devices: int) -> Iterator[tuple[int, ...]]:
    """Yield the meshes of one and two dims, the simplest first; a single device is none."""
    if devices > 1:
        yield (devices,)
    for rows in range(2, devices // 2 + 1):
        if devices % rows == 0:
            yield rows, devices // rows


def mesh_layouts(graph: OperatorGraph, strategy: Strategy) -> Iterator[MeshLayout | Inexpressible]:
    """Yield, for each mesh of the strategy's devices, its layout or why there is none."""
    for sizes in meshes(strategy.device_count):
        try:
            yield layout_on(graph, strategy, sizes)
        except Inexpressible as reason:
            yield reason


def layout_on(graph: OperatorGraph, strategy: Strategy, sizes: tuple[int, ...]) -> MeshLayout:
    """Return the layout of a validated strategy on a mesh of `sizes`.

    Raises:
        Inexpressible: the mesh does not express it.
    """
    replicated = (REPLICATE,) * len(sizes)
    everywhere = _everywhere(graph, strategy, prod(sizes))
    inputs, outputs = [], []
    held: dict[str, Placements] = {}
    for index, (operator, configuration) in enumerate(
        zip(graph.operators, strategy.configurations, strict=True)
    ):
        if index in everywhere:
            inputs.append((replicated,) * len(operator.inputs))
            outputs.append((replicated,) * len(operator.outputs))
            continue
        try:
            read, made = _operator_placements(graph, operator, configuration, sizes)
            for name, placements in zip(operator.inputs, read, strict=True):
                if graph.value_by_name[name].kind not in (ValueKind.WEIGHT, ValueKind.BUFFER):
                    continue
                if held.setdefault(name, placements) != placements:
                    raise Inexpressible(
                        f"{graph.value_by_name[name].kind} {name} is read as {_text(held[name])} and, by operator "
                        f"{operator.name}, as {_text(placements)}"
                    )
        except Inexpressible as reason:
            reason.progress = index
            raise
        inputs.append(read)
        outputs.append(made)
    return MeshLayout(sizes, tuple(inputs), tuple(outputs), everywhere, held)


def _text(placements: Placements) -> str:
    return " x ".join(map(str, placements))


def _everywhere(graph: OperatorGraph, strategy: Strategy, devices: int) -> frozenset[int]:
    """Return the operators with fewer tasks than devices that cost nothing to compute on all of them."""
    moving = {value.name for value in graph.values if value.kind in (ValueKind.INPUT, ValueKind.WEIGHT)}
    operators = set()
    for index, (operator, configuration) in enumerate(
        zip(graph.operators, strategy.configurations, strict=True)
    ):
        depends = not moving.isdisjoint(operator.inputs)
        specs = (*graph.input_specs(operator), *graph.output_specs(operator))
        small = all(spec.elements <= FEW for spec in specs)
        whole = all(
            degree == 1 or axis.kind is AxisKind.REPLICA
            for axis, degree in zip(operator.space.axes, configuration.degrees, strict=True)
        )
        if depends:
            moving.update(operator.outputs)
        if whole and len(configuration.devices) < devices and (small or not depends):
            operators.add(index)
    return frozenset(operators)


def _operator_placements(
    graph: OperatorGraph, operator: Operator, configuration: Configuration, sizes: tuple[int, ...]
) -> tuple[tuple[Placements, ...], tuple[Placements, ...]]:
    """Return the placements of an operator's inputs and outputs."""
    axes = _axes_along(operator, configuration, sizes)
    if operator.target in STATISTICS and any(
        operator.space.axes[axis].kind is not AxisKind.REPLICA for axis in axes
    ):
        raise Inexpressible(
            f"operator {operator.name} is a batch normalization in parts, whose statistics PyTorch's plans do not join"
        )
    regions_of = _Regions(operator, configuration)
    read = tuple(
        regions_of.placements(operand, spec.shape, name, axes, sizes, made=False)
        for operand, spec, name in zip(
            operator.space.inputs, graph.input_specs(operator), operator.inputs, strict=True
        )
    )
    made = tuple(
        regions_of.placements(operand, spec.shape, name, axes, sizes, made=True)
        for operand, spec, name in zip(
            operator.space.outputs, graph.output_specs(operator), operator.outputs, strict=True
        )
    )
    return read, made


def _axes_along(operator: Operator, configuration: Configuration, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for each dim of the mesh, the axis that it splits (the replica axis where it splits none).

    Raises:
        Inexpressible: not one task on each device, or another order of devices.
    """
    devices = prod(sizes)
    where = f"operator {operator.name}"
    if sorted(configuration.devices) != list(range(devices)):
        used = len(set(configuration.devices))
        if used < devices:
            raise Inexpressible(f"{where} uses {used} of {devices} devices")
        raise Inexpressible(f"{where} has {len(configuration.devices)} tasks on {devices} devices")
    # Which of several replicas a device computes makes no difference.
    points = [point[:-1] for point in coordinates(configuration.degrees)]
    point_of = dict(zip(configuration.devices, points, strict=True))
    replica = len(operator.space.axes) - 1
    split = [axis.name for axis, degree in zip(operator.space.axes, configuration.degrees, strict=True)
             if degree > 1]  # fmt: skip
    refusal = Inexpressible(
        f"{where} splits {' and '.join(split)} in another device order than a mesh of {' x '.join(map(str, sizes))}"
    )
    axes = []
    for dim in range(len(sizes)):
        neighbour = point_of[prod(sizes[dim + 1 :])]
        moved = [axis for axis, position in enumerate(neighbour) if position]
        if len(moved) > 1:
            raise refusal
        axes.append(moved[0] if moved else replica)
    for device, position in enumerate(coordinates(sizes)):
        expected = [0] * (replica + 1)
        for dim, axis in enumerate(axes):
            expected[axis] = expected[axis] * sizes[dim] + position[dim]
        if tuple(expected[:-1]) != point_of[device]:
            raise refusal
    return tuple(axes)


class _Regions:
    """The regions of one operator's operands on every device."""

    def __init__(self, operator: Operator, configuration: Configuration) -> None:
        self._operator = operator
        self._configuration = configuration

    def placements(
        self,
        operand: OperandMap,
        shape: tuple[int, ...],
        name: str,
        axes: Sequence[int],
        sizes: tuple[int, ...],
        *,
        made: bool,
    ) -> Placements:
        """Return the placements of an operand called `name`, checked region by region.

        Raises:
            Inexpressible: its shards are uneven, overlap, or follow an inner factor of a dim.
        """
        space = self._operator.space
        where = f"operator {self._operator.name}"
        placements = []
        for axis in axes:
            dims = [d for d, dim in enumerate(operand) if any(factor.axis == axis for factor in dim)]
            if len(dims) > 1:
                raise Inexpressible(f"{where} splits {space.axes[axis].name} along two dims of {name}")
            if dims:
                placements.append(shard(dims[0]))
            else:
                summed = made and space.axes[axis].kind is not AxisKind.REPLICA
                placements.append(PARTIAL if summed else REPLICATE)
        for dim, size in enumerate(shape):
            degree = prod(
                parts for parts, placement in zip(sizes, placements, strict=True) if placement == shard(dim)
            )
            if size % degree:
                raise Inexpressible(
                    f"{where} splits dim {dim} of {name}, {size} elements, unevenly in {degree} parts"
                )
        regions = operand_regions(space.axes, operand, self._configuration.degrees)
        region_of = dict(zip(self._configuration.devices, regions, strict=True))
        for device, position in enumerate(coordinates(sizes)):
            held = shard_region(shape, placements, sizes, position)
            for dim, (mine, theirs) in enumerate(zip(region_of[device], held, strict=True)):
                # Of a dim that no device splits, a slice reads the same part everywhere.
                if shard(dim) in placements and mine != theirs:
                    if all(factor.is_identity for factor in operand[dim] if factor.axis in axes):
                        raise Inexpressible(f"{where} splits an inner factor of dim {dim} of {name}")
                    raise Inexpressible(
                        f"{where} splits dim {dim} of {name} in parts that overlap or leave gaps"
                    )
        return tuple(placements)


def shard_region(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], position: Sequence[int]
) -> Region:
    """Return the region of an evenly sharded tensor on the device at `position` of a mesh."""
    result: list[IndexSet] = list(full_region(shape))
    for placement, parts, index in zip(placements, sizes, position, strict=True):
        if placement.kind is PlacementKind.SHARD and result[placement.dim]:
            ((low, high),) = result[placement.dim]
            length = (high - low) // parts
            result[placement.dim] = ((low + index * length, low + (index + 1) * length),)
    return tuple(result)
