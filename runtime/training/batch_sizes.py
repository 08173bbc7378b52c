"""Batches of another size than the example's: the strategy on the graph of that size, over the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from graph.errors import ImportFailure, RuntimeFailure, StrategyError
from graph.importing.outputs import Outputs
from graph.operators import Operator, OperatorGraph
from graph.plan import Plan, build_plan
from graph.strategy import Configuration, Strategy
from runtime.communication import World
from runtime.execution.step import StepRunner
from runtime.ranks.ranks import everywhere, prepare_groups
from runtime.training.batches import Batch, ExampleInputs
from runtime.training.options import TrainingOptions, imported
from runtime.training.outputs import kept_values
from runtime.training.sharded_batches import BatchShards


@dataclass(slots=True)
class SizedRunner:
    """The plan and runner for batches of one size; `shards`: of sharded batches, known from the first one."""

    plan: Plan
    runner: StepRunner
    outputs: Outputs | None
    shards: BatchShards | None = None


class SizedRunners:
    """The runners for batches of other sizes than the example's, each made with the first batch of its size."""

    def __init__(
        self,
        module: nn.Module,
        example: SizedRunner,
        inputs: ExampleInputs,
        world: World,
        options: TrainingOptions,
    ) -> None:
        """Start from the runner for batches of the example's size."""
        self._module = module
        self._example = example
        self._inputs = inputs
        self._world = world
        self._options = options
        self._by_shapes: dict[tuple[tuple[str, tuple[int, ...]], ...], SizedRunner] = {}

    def of(self, batch: Batch) -> SizedRunner:
        """Return the runner for batches of this one's shapes. All ranks must call it, with the same shapes.

        Raises:
            RuntimeFailure: the strategy does not fit them.
        """
        key = tuple(sorted(batch.shapes.items()))
        if key not in self._by_shapes:
            made = everywhere(lambda: self._made(batch))
            prepare_groups(made.plan, self._world.size, self._options.timeout_s)
            self._by_shapes[key] = made
        return self._by_shapes[key]

    def _made(self, batch: Batch) -> SizedRunner:
        options = self._options
        plan, outputs = self._planned(batch.shapes)
        runner = StepRunner(
            plan,
            self._world,
            seed=options.seed,
            device=options.device,
            kept=kept_values(outputs),
            weights_of=self._example.runner,
        )
        runner.take_buffers(self._example.runner)
        dims = batch.shard_dims
        return SizedRunner(
            plan, runner, outputs, BatchShards(plan, self._world, dims, options.device) if dims else None
        )

    def _planned(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Plan, Outputs | None]:
        own, options = self._example.plan, self._options
        name, sizes = next(iter(shapes.items()))
        try:
            args, kwargs = self._inputs.example(shapes)
            graph, outputs = imported(self._module, args, kwargs, options.batch_norm, options.outputs)
            strategy = resized(own.strategy, own.graph, graph)
            strategy.validate(graph, self._world.size)
            plan = build_plan(graph, strategy, options.node_of, every_element=True)
            if plan.held != own.held:
                raise StrategyError("strategy: other devices would hold the weights, must be the same")
        except (ImportFailure, StrategyError) as error:
            wanted = own.graph.value_by_name[name].spec.shape
            raise RuntimeFailure(
                f"inputs: {name} has shape {sizes}, for which the strategy does not fit, must have {wanted} as in the "
                f"example; drop a batch that is not full (drop_last=True), or pad it ({error})"
            ) from None
        return plan, outputs


def resized(strategy: Strategy, graph: OperatorGraph, other: OperatorGraph) -> Strategy:
    """Return a strategy of one graph as one of the same module's graph for inputs of another size.

    Raises:
        StrategyError: the module has other operators at that size, or an axis that is split has one point there.
    """
    names, others = ([operator.name for operator in sized_graph.operators] for sized_graph in (graph, other))
    if names != others:
        raise StrategyError(
            f"module: has {len(others)} operators at this size, must have the same {len(names)}"
        )
    configurations = tuple(
        _resized(configuration, operator, at_size)
        for configuration, operator, at_size in zip(
            strategy.configurations, graph.operators, other.operators, strict=True
        )
    )
    return replace(strategy, graph_digest=other.digest, configurations=configurations)


def _resized(configuration: Configuration, operator: Operator, other: Operator) -> Configuration:
    """Return a configuration for the axes of the operator at another size: axes of one point are left out there."""
    degrees = {
        (axis.name, axis.kind): degree
        for axis, degree in zip(operator.space.axes, configuration.degrees, strict=True)
    }
    axes = [(axis.name, axis.kind) for axis in other.space.axes]
    for (name, kind), degree in degrees.items():
        if degree > 1 and (name, kind) not in axes:
            raise StrategyError(
                f"operator {operator.name}: splits axis {name} into {degree} parts of one point"
            )
    if operator.target != other.target or [axis for axis in degrees if axis in axes] != [
        axis for axis in axes if axis in degrees
    ]:
        raise StrategyError(f"operator {operator.name}: is another one at this size, must be the same")
    return Configuration(tuple(degrees.get(axis, 1) for axis in axes), configuration.devices)
