"""Verification: the graph on one device, and the deviations of an execution from it and of it from the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, isnan, sqrt
from typing import TYPE_CHECKING

from graph.axes import Degrees
from graph.intervals import full_region
from graph.operators import Operator, OperatorGraph
from graph.rules import local_calls, parts
from graph.strategy import Strategy

if TYPE_CHECKING:
    import torch

    from profiler.operators import ExecutionContext
    from runtime.execution.executor import InitialTensors

# Largest allowed deviation of results in float64, relative to a gradient's largest element: sums in another order,
# amplified through a hundred layers.
ALLOWED = 1e-6
# The same for the loss of a float32 run itself, which is in the run's own precision.
ALLOWED_OF_RUN = 1e-3
# Of other precisions, results may be so many times as far from those in float64 as the graph's on one device in that
# precision, or as what one rounding (`ROUNDING`, relative) does: how far that is depends on the network. Over random
# strategies of the zoo's small networks they were at most 8.5 times as far (a maximum that rounding moves to another
# window), and mostly 1 to 3 times.
ALLOWED_TIMES = 25.0
ROUNDING = {"tf32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
RUN_LOSS = "the run's own, in its precision"
# Names comparisons of the graph with the user's module itself.
EAGER = "eager"
EAGER_SECOND = "eager, the second time"
# A gradient that is zero but for rounding (a bias before a normalization) is compared on this share of the largest.
NOISE_FLOOR = 1e-3
# Batch normalization with the statistics of each part, as DistributedDataParallel does it.
OWN_STATISTICS = frozenset({"soapstone.batch_norm"})


@dataclass(frozen=True, slots=True)
class Reference:
    """Loss, gradient of every weight, and new value of every updated buffer, from one device."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The deviation of one tensor from the reference.

    what: "loss", "gradient", "weight" (after one update) or "buffer" (likewise), of the strategy from the graph on one
    device; "eager gradient" or "eager buffer" (and the loss named "eager"), of the graph from the module itself in
    eager PyTorch. name: of its parameter or buffer.
    largest: largest absolute difference. relative: that, relative to the reference's largest element (or a small
    share of the largest gradient's, where that is more). allowed: what `relative` must not exceed.
    """

    what: str
    name: str
    largest: float
    relative: float
    allowed: float

    @property
    def from_eager(self) -> bool:
        """True where the graph is compared with the user's module, not the strategy with the graph."""
        return self.what.startswith(EAGER) or self.name in (EAGER, EAGER_SECOND)

    @property
    def ok(self) -> bool:
        """True where the deviation is allowed; never for a value that is not a number."""
        return self.relative <= self.allowed


@dataclass(frozen=True, slots=True)
class Verification:
    """Deviations of the loss (first), of every gradient, and of weights and buffers after one update.

    loss: the reference's.
    differing: one line for each tensor that the factory has built otherwise on another rank than on rank 0.
    not_eager: the reason why the module itself could not be compared with the graph; empty where it was.
    allowed_of_run: the largest allowed deviation of the loss of the run itself.
    """

    loss: float
    deviations: tuple[Deviation, ...]
    differing: tuple[str, ...] = ()
    not_eager: str = ""
    allowed_of_run: float = ALLOWED_OF_RUN

    @property
    def ok(self) -> bool:
        """True where all deviations are allowed, the module's own among them, and all ranks have built the same."""
        return (
            not self.differing and not self.not_eager and all(deviation.ok for deviation in self.deviations)
        )

    def with_run(self, first_loss: float) -> Verification:
        """Return the verification with one more deviation: of the loss of the run's own first step."""
        run = loss_deviation(first_loss, self.loss, RUN_LOSS, self.allowed_of_run)
        return replace(self, deviations=(*self.deviations, run))

    @property
    def worst(self) -> Deviation:
        """The deviation that is the largest relative to the allowed one."""
        return by_severity(self.deviations)[0]

    @property
    def failure(self) -> str | None:
        """Why a strategy is not verified, in one line; None: it is."""
        if not isfinite(self.loss):
            return (
                f"verification: the graph's loss on one device is {self.loss}, must be a finite number; check what "
                "the module itself gives for its inputs"
            )
        if self.differing:
            more = f" (and {len(self.differing) - 1} more)" if len(self.differing) > 1 else ""
            return (
                f"verification: {self.differing[0]}{more}, must be the same on all; seed everything that the factory "
                "draws, and let it depend on nothing of its process"
            )
        worst = self.worst
        tensor = f"{worst.what} of {worst.name}" if worst.what != "loss" else f"loss {worst.name}"
        deviates = f"deviates by {worst.relative:.2e}, must be within {worst.allowed:.0e}"
        if not worst.ok and not worst.from_eager:
            return (
                f"verification: {tensor} {deviates} of the graph on one device; report it with the strategy"
            )
        if not worst.ok:
            return (
                f"verification: {tensor} {deviates} of the module in plain PyTorch; export keeps the operators of a "
                "forward alone: leave out backwards of your own, hooks, and what Python draws or counts"
            )
        if self.not_eager:
            return (
                f"verification: the module itself cannot be compared, {self.not_eager}, must run in plain PyTorch; "
                "correct its factory or forward"
            )
        return None


def by_severity(deviations: Iterable[Deviation]) -> list[Deviation]:
    """Return deviations in descending order, relative to the allowed ones; NaN first."""

    def key(item: Deviation) -> tuple[bool, float]:
        share = item.relative / item.allowed
        return (item.ok, -inf if isnan(share) else -share)

    return sorted(deviations, key=key)


def interpret(
    graph: OperatorGraph, tensors: InitialTensors, context: ExecutionContext, strategy: Strategy | None = None
) -> Reference:
    """Execute the graph on one device: whole local calls in order, plain autograd.

    Operators whose statistics are each part's own, by definition, run in the parts of `strategy`, where it is given.
    """
    import torch

    from runtime.lowering.loss_count import counted_loss, over_all

    counted = counted_loss(graph)
    weights = {
        name: parameter.detach().clone().requires_grad_(graph.value_by_name[name].requires_gradient)
        for name, parameter in tensors.parameters.items()
    }
    values: dict[str, torch.Tensor] = {**tensors.inputs, **tensors.buffers, **weights}
    for index, operator in enumerate(graph.operators):
        degrees: Degrees = (1,) * len(operator.space.axes)
        if strategy is not None and operator.target in OWN_STATISTICS:
            # Replicas compute the same: one of each is enough.
            degrees = (*strategy.configurations[index].degrees[:-1], 1)
        inputs = [values[name] for name in operator.inputs]
        if index == counted:
            inputs = [over_all(inputs[0], context)]
        results = execute(graph, operator, degrees, inputs, context)
        values.update(zip(operator.outputs, results, strict=True))
    loss = values[graph.loss]
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    gradients: tuple[torch.Tensor | None, ...] = (None,) * len(trained)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, [weights[name] for name in trained], allow_unused=True)
    return Reference(
        loss=float(loss.detach()),
        gradients={
            name: torch.zeros_like(weights[name]) if gradient is None else gradient
            for name, gradient in zip(trained, gradients, strict=True)
        },
        buffers={buffer: values[value].detach() for buffer, value in graph.buffer_updates},
    )


def of_step(references: Sequence[Reference], share: float) -> Reference:
    """Return the step of several micro-batches: their losses and gradients added up, and the last one's buffers.

    share: of each one's loss in that of the step.
    """
    if len(references) == 1:
        return references[0]
    return Reference(
        loss=share * sum(reference.loss for reference in references),
        gradients={
            name: share * sum((reference.gradients[name] for reference in references[1:]), gradient)
            for name, gradient in references[0].gradients.items()
        },
        buffers=references[-1].buffers,
    )


def execute(
    graph: OperatorGraph,
    operator: Operator,
    degrees: Degrees,
    inputs: Sequence[torch.Tensor],
    context: ExecutionContext,
) -> list[torch.Tensor]:
    """Execute all tasks of an operator on parts of whole inputs and return its whole outputs."""
    from profiler.operators import compile_call
    from runtime.instructions.region_assembly import Recipe, assemble
    from runtime.instructions.selections import Selection, selection_of

    pieces = parts(operator, degrees)
    results = []
    for piece, call in zip(pieces, local_calls(graph, operator, degrees), strict=True):
        # A slice reads a part of its input even where it is not split.
        local = [
            selection_of(region, tuple(whole.shape), whole.device).take(whole)
            for region, whole in zip(piece.inputs, inputs, strict=True)
        ]
        results.append(compile_call(call)(local, context))
    outputs = []
    for position, spec in enumerate(graph.output_specs(operator)):
        regions = [piece.outputs[position] for piece in pieces]
        recipe = Recipe(full_region(spec.shape), regions, context.device)
        selections = [Selection(region, region, context.device) for region in regions]
        outputs.append(assemble(recipe, selections, [result[position] for result in results]))
    return outputs


def deviations(
    what: str, actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[Deviation]:
    """Return the deviations of tensors from the expected ones, by name; a missing tensor counts as zeros."""
    # Buffers may be booleans, which have no differences.
    expected = {name: tensor.double() for name, tensor in expected.items()}
    largest = [float(tensor.abs().max()) for tensor in expected.values() if tensor.numel()]
    floor = NOISE_FLOOR * max(largest, default=1.0) or 1.0
    result = []
    for name, tensor in expected.items():
        distance = tensor if name not in actual else actual[name].to(tensor.device, tensor.dtype) - tensor
        difference = float(distance.abs().max()) if distance.numel() else 0.0
        own = float(tensor.abs().max()) if tensor.numel() else 0.0
        result.append(Deviation(what, name, difference, difference / max(own, floor), ALLOWED))
    return result


def loss_deviation(
    loss: float, expected: float, name: str = "in float64", allowed: float = ALLOWED
) -> Deviation:
    """Return the deviation of a loss from the expected one."""
    difference = abs(loss - expected)
    return Deviation("loss", name, difference, difference / (abs(expected) or 1.0), allowed)


def deviations_in(
    precision: str,
    actual: Mapping[str, torch.Tensor],
    alone: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
) -> list[Deviation]:
    """Return the deviations of gradients in a precision from those in float64, allowed by those of one device.

    A small tensor on one device may be exact by chance, so that the distance of all gradients together counts as well
    as its own.

    Args:
        precision: a key of `ROUNDING`.
        found: gradients of the strategy.
        alone: gradients of the graph on one device, in the same precision.
        exact: those in float64, from the same weights and inputs.
    """
    usual = [deviation.relative for deviation in deviations("gradient", alone, exact)]
    least = max(ROUNDING[precision], _distance(alone, exact))
    return [
        replace(deviation, allowed=ALLOWED_TIMES * max(own, least))
        for deviation, own in zip(deviations(f"gradient in {precision}", actual, exact), usual, strict=True)
    ]


def _distance(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the Euclidean distance of all tensors together from the expected ones, relative to these."""
    difference = sum(
        float((actual[name].to(tensor.dtype) - tensor).square().sum()) for name, tensor in expected.items()
    )
    size = sum(float(tensor.square().sum()) for tensor in expected.values())
    return sqrt(difference / size) if size else 0.0
