"""A strategy's stages as names of the calls that torch.export makes: where each stage begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph.errors import StrategyError
from graph.importer import import_with_nodes
from graph.importing.exporting import loss_of, without_data
from graph.operators import Operator, OperatorGraph, Slot
from graph.rules import DRAWING
from graph.schedule import Schedule, Stage, stages_of
from graph.strategy import Strategy
from runtime.dtensor.mesh import Inexpressible
from runtime.dtensor.plan import ATTENTIONS, draws
from runtime.dtensor.samples import MEANS_OVER_TARGETS, is_mean
from runtime.jobs.models import Built, input_tensors, split_batch
from runtime.lowering.loss_count import counted_loss
from runtime.pipelining.stages import SCHEDULES, trace

BATCH_STATISTICS = frozenset({"soapstone.moments", "aten._native_batch_norm_legit_functional.default"})
KEPT_DRAWS = ATTENTIONS | {"soapstone.dropout"}
"""Operators that draw, and which a stage leaves out where its module is in evaluation mode."""


@dataclass(frozen=True)
class StagePlan:
    """All that a generated file says of a pipeline.

    ranks: of the pipeline; stages are on them in turn.
    firsts: the call that each stage begins with.
    dims: (position, dim) along which each tensor among the inputs is cut.
    moved: calls that the strategy has in two stages and the file in the later one.
    counted: the call of a loss that is a mean over targets that are not ignored; None where each micro-batch weighs
        alike.
    batch_statistics: a micro-batch is normalized by its own statistics.
    mean: the loss is a mean over all samples, so that it is that of the whole batch at once.
    draws: there is dropout.
    """

    ranks: int
    schedule: Schedule
    micro_batches: int
    firsts: tuple[str, ...]
    dims: tuple[tuple[int, int], ...]
    moved: tuple[str, ...] = ()
    counted: str | None = None
    batch_statistics: bool = False
    mean: bool = True
    draws: bool = False


def make_stage_plan(
    graph: OperatorGraph,
    strategy: Strategy,
    built: Built,
) -> StagePlan:
    """Return the stages of a validated strategy.

    Args:
        graph: imported from `module`, of one micro-batch.
        strategy: of the graph.
        built: the module and the inputs of a whole batch; they may be on the meta device and are looked at alone.

    Raises:
        RuntimeFailure: the inputs are not those of so many micro-batches.
        StrategyError: torch.distributed.pipelining does not express the strategy; one line with the reason.
    """
    if strategy.micro_batches.count == 1:
        raise StrategyError(
            f"strategy {strategy.digest[:12]}: goes through the batch at once, must go through it in micro-batches to "
            "be a pipeline; export it with --format dtensor or json"
        )
    try:
        stages = _checked_stages(graph, strategy)
        module, args, kwargs = split_batch(graph, built, strategy.micro_batches.count)[0]
        dims = _dims(built, args, kwargs)
        again, values = import_with_nodes(module, args, kwargs, name=graph.name, batch_norm=graph.batch_norm)
        if again.digest != graph.digest:
            raise Inexpressible("torch.export makes another graph each time, must make the same")
        with without_data(module, args, kwargs) as given:
            program = trace(module, loss_of, *given)
        names = [node.name for node in program.graph.nodes if node.op == "call_function"]
        if names != list(values):
            raise Inexpressible(
                "torch.export makes other calls of the module by itself, must make those of the graph"
            )
        firsts, moved = _first_calls(graph, values, stages)
        counted = _counted_call(graph, values)
    except Inexpressible as reason:
        raise StrategyError(
            f"strategy {strategy.digest[:12]}: is no pipeline of torch.distributed.pipelining: {reason}; export it "
            "with --format json, or another one"
        ) from None
    return StagePlan(
        ranks=1 + max(stage.group for stage in stages),
        schedule=strategy.micro_batches.schedule,
        micro_batches=strategy.micro_batches.count,
        firsts=firsts,
        moved=moved,
        dims=dims,
        counted=counted,
        batch_statistics=any(operator.target in BATCH_STATISTICS for operator in graph.operators),
        mean=counted is not None or _loss_is_mean(graph),
        draws=any(draws(operator) for operator in graph.operators),
    )


def _dims(built: Built, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the dim along which each input is cut into micro-batches, by position.

    Raises:
        Inexpressible: one goes to all of them.
    """
    whole, part = input_tensors(built[1], built[2]), input_tensors(tuple(args), kwargs)
    dims = []
    for position, (tensor, cut) in enumerate(zip(whole.values(), part.values(), strict=True)):
        differing = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != cut.shape[dim]]
        if not differing:
            raise Inexpressible(f"input.{position} goes to all micro-batches, must be cut into them")
        dims.append((position, differing[0]))
    return tuple(dims)


def _checked_stages(graph: OperatorGraph, strategy: Strategy) -> tuple[Stage, ...]:
    micro_batches = strategy.micro_batches
    if micro_batches.schedule.value not in SCHEDULES:
        raise Inexpressible(
            f"its schedule is {micro_batches.schedule.value}, must be one of {', '.join(SCHEDULES)}"
        )
    if strategy.sharding:
        raise Inexpressible("it shares weights, must share none")
    if strategy.recomputation:
        raise Inexpressible("it makes activations again, must keep all")
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        if len(configuration.devices) > 1:
            raise Inexpressible(
                f"operator {operator.name} has {len(configuration.devices)} tasks, must have one, as each stage is on "
                "one device"
            )
        if operator.target in DRAWING and operator.target not in KEPT_DRAWS:
            raise Inexpressible(f"operator {operator.name} draws random numbers, must be dropout or none")
    stages = stages_of(graph, strategy.configurations, micro_batches.schedule)
    if len(stages) == 1:
        raise Inexpressible("it has one stage, must have several")
    for stage in stages:
        if len(stage.devices) > 1:
            raise Inexpressible(f"stage {stage.group} is on {len(stage.devices)} devices, must be on one")
    if micro_batches.schedule is Schedule.ONE_F_ONE_B and micro_batches.count < len(stages):
        raise Inexpressible(
            f"it has {micro_batches.count} micro-batches, must have as many as its {len(stages)} stages under 1f1b"
        )
    return stages


def _first_calls(
    graph: OperatorGraph, values: Mapping[str, Sequence[str]], stages: Sequence[Stage]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the call that each stage begins with, and those of them that a stage before has operators of.

    A file cannot cut a call: one that makes operators of two stages is all in the later one.

    Raises:
        Inexpressible: nothing is left of a stage.
    """
    firsts: list[str] = []
    moved = []
    for stage in stages:
        call, start = _call_at(graph, values, stage.first)
        if call in firsts:
            raise Inexpressible(
                f"stage {len(firsts) - 1} has operators of call {call} of torch.export alone, which the next stage "
                "has too, must have calls of its own"
            )
        firsts.append(call)
        if start < stage.first:
            moved.append(call)
    return tuple(firsts), tuple(moved)


def _call_at(graph: OperatorGraph, values: Mapping[str, Sequence[str]], operator: int) -> tuple[str, int]:
    """Return the call that makes an operator, and the first operator that it makes.

    Raises:
        Inexpressible: no call makes it or one behind it.
    """
    end = 0
    for call, made in values.items():
        indexes = [graph.producer[value][0] for value in made if value in graph.producer]
        last = max([end, *(index + 1 for index in indexes)])
        if last > operator:
            return call, end
        end = last
    raise Inexpressible("its last stage has no call of torch.export, must have one")


def _counted_call(graph: OperatorGraph, values: Mapping[str, Sequence[str]]) -> str | None:
    """Return the call whose targets, but for ignored ones, the loss is a mean over; None where it is another loss.

    Raises:
        Inexpressible: the mean weighs targets by their class.
    """
    index = counted_loss(graph)
    if index is None:
        return None
    sums = graph.operators[graph.producer[graph.operators[index].inputs[0]][0]]
    if isinstance(sums.argument("weight"), Slot):
        raise Inexpressible(
            f"operator {sums.name} is a mean that weighs targets by their class, must weigh them alike"
        )
    return next(call for call, made in values.items() if graph.loss in made)


def _loss_is_mean(graph: OperatorGraph) -> bool:
    producer: Operator = graph.operators[graph.producer[graph.loss][0]]
    if producer.target == "soapstone.ratio":
        producer = graph.operators[graph.producer[producer.inputs[0]][0]]
        return producer.target not in MEANS_OVER_TARGETS
    try:
        return is_mean(producer)
    except Inexpressible:
        return False
