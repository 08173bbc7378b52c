"""Pipelined strategies: runs of operators as stages, each on devices of its own and split there in a way of its own.

A stage is split as Megatron's strategy of few devices, or any other strategy, which is moved onto the stage's devices.
Operators that only renew buffers are where what they read is made. What several stages read (masks, positions) is made
in the stage where it stands, and sent to the others. A weight that operators of two stages read (tied embeddings) is
held by both, and its gradients are summed over them.

A network has hundreds of operators, between which it is cut at a hundred places at most (`cut_points`): about equal
work apart, and each time where the fewest bytes cross.

Sources: GPipe (arXiv:1811.06965); PipeDream (SOSP 2019), section 3.1; Megatron-LM (arXiv:2104.04473), section 3, for
tensor parallelism within a node, data parallelism and stages between nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from graph.axes import AxisKind
from graph.errors import StrategyError
from graph.operators import OperatorGraph
from graph.schedule import Schedule, stages_of
from graph.strategy import Configuration, Strategy
from search.space.baselines import LONGEST_ROW, first_axis, megatron, points_of

MOST_CUTS = 100
"""Places where a network may be cut, at most."""
MOST_STAGES = 32
"""Stages at most; of more devices every stage has several."""


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Megatron's split of a stage: `data` parts of the samples, each on `tensor` devices side by side."""

    data: int
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.tensor


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage's strategy and devices: device number n of the strategy is `devices[n]`."""

    strategy: Strategy
    devices: tuple[int, ...]


def crossing_bytes(graph: OperatorGraph) -> tuple[list[int], list[int]]:
    """Return, for each place between operators, the bytes that are made before it and read behind it.

    Place p is before the operator at position p of the order of the loss; the last one is behind all. The second list
    counts what has a gradient alone.
    """
    of_loss = graph.order.of_loss
    position = {index: place for place, index in enumerate(of_loss)}
    changes = [[0] * (len(of_loss) + 2) for _ in range(2)]
    for index in of_loss:
        for name in graph.operators[index].outputs:
            behind = [position[reader] for reader, _ in graph.consumers[name] if reader in position]
            if behind:
                value = graph.value_by_name[name]
                for change in changes[: 1 + value.requires_gradient]:
                    change[position[index] + 1] += value.spec.size_bytes
                    change[max(behind) + 1] -= value.spec.size_bytes
    everything, gradients = (list(accumulate(change))[: len(of_loss) + 1] for change in changes)
    return everything, gradients


def cut_points(graph: OperatorGraph, most: int = MOST_CUTS) -> tuple[int, ...]:
    """Return the places where a network may be cut, as positions in the order of the loss, ascending.

    All places, or, of a larger network, one for each of `most` + 1 parts of equal work but the first: the place near
    its beginning where the fewest bytes cross. Work is counted as points of iteration spaces.
    """
    of_loss = graph.order.of_loss
    if len(of_loss) - 1 <= most:
        return tuple(range(1, len(of_loss)))
    crossing, _ = crossing_bytes(graph)
    before = [0, *accumulate(points_of(graph.operators[index]) for index in of_loss)]
    cuts: list[int] = []
    for number in range(1, most + 1):
        least, end = (before[-1] * (2 * number + side) // (2 * (most + 1)) for side in (-1, 1))
        within = [
            place
            for place in range(max(1, bisect_right(before, least - 1)), len(of_loss))
            if least <= before[place] < end and (not cuts or place > cuts[-1])
        ]
        if within:
            cuts.append(min(within, key=lambda place: (crossing[place], place)))
    return tuple(cuts)


@lru_cache(maxsize=1 << 16)
def moved(configuration: Configuration, devices: tuple[int, ...]) -> Configuration:
    """Return a configuration with its device n replaced by `devices[n]`; equal ones are one object."""
    return Configuration(configuration.degrees, tuple(map(devices.__getitem__, configuration.devices)))


def stage_numbers(graph: OperatorGraph, cuts: Sequence[int]) -> list[int]:
    """Return the stage of every operator, where the order of the loss is cut before the positions `cuts`.

    An operator outside of the loss is in the latest stage that makes something that it reads, else where operators of
    the loss read a buffer that it reads, else in that of the operator before it.
    """
    numbers = [0] * len(graph.operators)
    for position, index in enumerate(graph.order.of_loss):
        numbers[index] = bisect_right(cuts, position)
    late = frozenset(graph.order.of_buffers)
    for index in graph.order.of_buffers:
        inputs = graph.operators[index].inputs
        made = [numbers[graph.producer[name][0]] for name in inputs if name in graph.producer]
        read = [
            numbers[reader] for name in inputs for reader, _ in graph.consumers[name] if reader not in late
        ]
        numbers[index] = max(made) if made else read[0] if read else numbers[max(0, index - 1)]
    return numbers


def staged(graph: OperatorGraph, cuts: Sequence[int], parts: Sequence[StagePart]) -> Strategy:
    """Return the strategy whose stages begin at the positions `cuts` of the order of the loss, and at its beginning.

    Raises:
        ValueError: there is not one part more than there are cuts.
    """
    if len(parts) != len(cuts) + 1:
        raise ValueError(f"stages: {len(cuts)} cuts have {len(parts)} parts, must have {len(cuts) + 1}")
    return Strategy(
        graph.digest,
        tuple(
            moved(parts[stage].strategy.configurations[index], parts[stage].devices)
            for index, stage in enumerate(stage_numbers(graph, cuts))
        ),
    )


def has_stages(graph: OperatorGraph, strategy: Strategy, cuts: Sequence[int], schedule: Schedule) -> bool:
    """Return whether a strategy's stages begin just where the order of the loss was cut."""
    try:
        stages = stages_of(graph, strategy.configurations, schedule)
    except StrategyError:
        return False
    of_loss = graph.order.of_loss
    return [stage.first for stage in stages] == [of_loss[0], *(of_loss[cut] for cut in cuts)]


class Splits:
    """Megatron's strategies of a graph on few devices, and which of them split what they say."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self._strategies: dict[Split, Strategy] = {}
        self._is_useful: dict[int, bool] = {1: True}
        samples = [
            operator.space.axes[axis].size
            for operator in graph.operators
            if (axis := first_axis(operator, AxisKind.SAMPLE)) is not None
        ]
        self.samples = max(samples, default=1)

    def strategy(self, split: Split) -> Strategy:
        """Return a split's strategy, on its devices from 0 on."""
        if split not in self._strategies:
            self._strategies[split] = megatron(self.graph, split.tensor, split.data)
        return self._strategies[split]

    def of(self, device_count: int) -> tuple[Split, ...]:
        """Return the splits over so many devices that leave no device with a copy of all that another one does.

        There are no more parts of the samples than samples; a degree of tensor parallelism splits something.
        """
        return tuple(
            Split(device_count // tensor, tensor)
            for tensor in range(1, min(device_count, LONGEST_ROW) + 1)
            if device_count % tensor == 0
            and device_count // tensor <= self.samples
            and self._splits_something(tensor)
        )

    def _splits_something(self, tensor: int) -> bool:
        if tensor not in self._is_useful:
            self._is_useful[tensor] = any(
                max(configuration.degrees[:-1], default=1) > 1
                for configuration in self.strategy(Split(1, tensor)).configurations
            )
        return self._is_useful[tensor]

    def part(self, split: Split, first: int) -> StagePart:
        """Return a stage's part that is split so, on neighbours from device `first` on."""
        return StagePart(self.strategy(split), tuple(range(first, first + split.devices)))


def stage_sizes(device_count: int) -> tuple[int, ...]:
    """Return the numbers of devices that a stage may have: powers of two, and what divides all devices, ascending.

    The least is such that there are at most `MOST_STAGES` stages.
    """
    return tuple(
        size
        for size in range(-(-device_count // MOST_STAGES), device_count + 1)
        if device_count % size == 0 or size & (size - 1) == 0
    )


def triples(splits: Splits, device_count: int, most_stages: int) -> tuple[tuple[Split, int], ...]:
    """Return the splits and numbers of stages that take all devices: data x tensor x pipeline parallelism."""
    return tuple(
        (split, stages)
        for stages in range(1, min(device_count, most_stages) + 1)
        if device_count % stages == 0
        for split in splits.of(device_count // stages)
    )


def balanced(weights: Sequence[int], count: int) -> tuple[int, ...]:
    """Return where to cut a row of weights into `count` runs so that the heaviest is as light as can be.

    Raises:
        ValueError: there are fewer weights than runs.
    """
    if not 1 <= count <= len(weights):
        raise ValueError(f"runs: are {count}, must be from 1 to the number of weights, {len(weights)}")
    before = [0, *accumulate(weights)]
    # Of the first `end` weights in so many runs: the heaviest, and where the last begins.
    best = [(total, 0) for total in before]
    chosen = [best]
    for runs in range(2, count + 1):
        nothing = (before[-1] + 1, 0)
        best = [
            min(
                ((max(best[start][0], before[end] - before[start]), start) for start in range(runs - 1, end)),
                default=nothing,
            )
            for end in range(len(before))
        ]
        chosen.append(best)
    cuts: list[int] = []
    end = len(weights)
    for best in reversed(chosen[1:]):
        end = best[end][1]
        cuts.append(end)
    return tuple(reversed(cuts))
