"""Stagings: pipelined strategies by where their stages begin, how each is split, and in which order they work.

A staging is what the `pipeline` algorithm changes; `Stagings` makes its strategy, those of 3-D parallelism as baselines
(Megatron-LM), and those that dynamic programming finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import cast

from graph.errors import StrategyError
from graph.operator_ranges import OperatorRange, OperatorRanges
from graph.schedule import GradientSums, MicroBatches, Schedule
from graph.strategy import Configuration, Sharding, Strategy
from search.algorithms.best_tracker import builder_of
from search.bounds.pipeline_costs import NO_SAVING, MemorySaving, PipelineCosts
from search.bounds.stage_division import Division, StageTable, divided, divisions
from search.problem import Problem
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import Baseline, shared
from search.space.groups import Group, find_groups, follow
from search.space.pipelines import (
    MOST_STAGES,
    Split,
    Splits,
    balanced,
    cut_points,
    has_stages,
    moved,
    staged,
    triples,
)

MOST_CHUNKS = 4
"""Stages that a group of devices has under schedule interleaved, at most."""


@dataclass(frozen=True, slots=True)
class Staging:
    """A pipelined strategy.

    firsts: the segments that stages but the first begin with.
    splits: of each group of devices, which follow each other; under schedule interleaved stages are on them in turn.
    shares_optimizer: whether all weights' gradients and optimizer state are shared (ZeRO-2).
    recomputed: the segments whose activations are made again, each by itself.
    changed: configurations of operator groups within a stage, on the stage's devices numbered from 0: (stage, number of
        the operator group, configuration of its head).
    registers: of schedule actors, the micro-batches that each stage may have in flight; empty: those of 1f1b.
    sums_each: whether gradients are summed in every micro-batch, so that what is shared is kept in shares.
    shares_weights: whether weights themselves are shared, beside gradients and optimizer state (ZeRO-3), where a stage
        can gather them.
    """

    firsts: tuple[int, ...]
    splits: tuple[Split, ...]
    schedule: Schedule = Schedule.ONE_F_ONE_B
    shares_optimizer: bool = False
    recomputed: frozenset[int] = frozenset()
    changed: tuple[tuple[int, int, Configuration], ...] = ()
    registers: tuple[int, ...] = ()
    sums_each: bool = False
    shares_weights: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.firsts) + 1

    def devices(self, stage: int) -> tuple[int, ...]:
        """Return the devices of a stage."""
        group = stage % len(self.splits)
        first = sum(split.devices for split in self.splits[:group])
        return tuple(range(first, first + self.splits[group].devices))

    @property
    def name(self) -> str:
        """The name of a baseline whose stages are all split alike: data x tensor x pipeline degree, and the rest."""
        split, chunks = self.splits[0], self.stages // len(self.splits)
        parts = [f"3d-{split.data}x{split.tensor}x{len(self.splits)}"]
        if self.schedule is not Schedule.ONE_F_ONE_B:
            parts.append(self.schedule.value + (f"-{chunks}" if chunks > 1 else ""))
        return "-".join([*parts, *(["zero"] if self.shares_optimizer else [])])


class Stagings:
    """Stagings of a problem, and their strategies."""

    def __init__(self, problem: Problem, builder: TaskGraphBuilder | None = None) -> None:
        """Take a problem, whose fragments are those of `builder`."""
        self.problem = problem
        self.graph = problem.graph
        self.splits = Splits(problem.graph)
        self.cuts = cut_points(problem.graph)
        self.costs = PipelineCosts(problem, self.splits, self.cuts, builder or builder_of(problem))
        self.groups: tuple[Group, ...] = find_groups(problem.graph)
        # By whether all micro-batches are in flight; ascending.
        self._divisions: dict[tuple[bool, MemorySaving], tuple[StageTable, list[Division]]] = {}
        self._of_triples: dict[tuple[Split, int, bool], Division | None] = {}

    @property
    def most_stages(self) -> int:
        """The most stages that there are."""
        return min(self.problem.device_count, self.costs.segments, MOST_STAGES)

    def schedules(self, groups: int) -> tuple[Schedule, ...]:
        """Return the schedules that so many groups of devices may have, without interleaved."""
        if self.problem.micro_batches == 1:
            return (Schedule.ONE_F_ONE_B,)
        if self.problem.schedule is not None:
            return () if self.problem.schedule is Schedule.INTERLEAVED else (self.problem.schedule,)
        if groups == 1:
            return (Schedule.ONE_F_ONE_B,)
        # Where no stage finds its own order, actors with the credits of 1f1b are 1f1b.
        actors = [Schedule.ACTORS] if self.problem.topology.acts else []
        return Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZERO_BUBBLE, *actors

    def chunks(self, groups: int) -> tuple[int, ...]:
        """Return how many stages a group may have under schedule interleaved; none where it is none."""
        count = self.problem.micro_batches
        if (
            self.problem.schedule not in (None, Schedule.INTERLEAVED)
            or count == 1
            or groups == 1
            or count % groups
        ):
            return ()
        return tuple(chunks for chunks in range(2, MOST_CHUNKS + 1) if groups * chunks <= self.costs.segments)

    @property
    def may_sum_each(self) -> bool:
        """Whether it is a choice to sum gradients in every micro-batch."""
        return self.problem.micro_batches > 1 and self.problem.gradients is None

    def may_share_weights(self, staging: Staging) -> bool:
        """Whether weights themselves may be kept in shares: not for the weight parts of backwards."""
        return self.problem.shares_weights and staging.schedule is not Schedule.ZERO_BUBBLE

    # ---- strategies

    def strategy(self, staging: Staging) -> Strategy | None:
        """Return the strategy of a staging; None where operators do not make the stages that are meant."""
        places = tuple(self.cuts[first - 1] for first in staging.firsts)
        stages = range(staging.stages)
        parts = [
            replace(
                self.splits.part(staging.splits[stage % len(staging.splits)], 0),
                devices=staging.devices(stage),
            )
            for stage in stages
        ]
        strategy = staged(self.graph, places, parts)
        if staging.changed:
            strategy = self._changed(strategy, staging)
        if not has_stages(self.graph, strategy, places, staging.schedule):
            return None
        strategy = replace(
            strategy,
            micro_batches=MicroBatches(
                self.problem.micro_batches,
                staging.schedule,
                staging.registers,
                GradientSums.EACH if staging.sums_each else self.problem.gradients or GradientSums.LAST,
            ),
            recomputation=self._recomputation(staging),
        )
        if staging.shares_optimizer:
            level = Sharding.PARAMETERS if staging.shares_weights else Sharding.OPTIMIZER
            strategy = shared(self.graph, strategy, level)
        try:
            # Configurations are legal by how they are made; to check them all takes a tenth of a search.
            strategy.check_micro_batches(self.graph)
        except StrategyError:
            return None
        return strategy

    def _changed(self, strategy: Strategy, staging: Staging) -> Strategy:
        configurations = list(strategy.configurations)
        ends = (*staging.firsts, self.costs.segments)
        for stage, number, configuration in staging.changed:
            first = (0, *staging.firsts)[stage]
            devices = staging.devices(stage)
            for index, own in follow(self.groups[number], configuration).items():
                if first <= self.costs.segment_of(index) < ends[stage]:
                    configurations[index] = moved(own, devices)
        return strategy.with_configurations(tuple(configurations))

    @cached_property
    def _segment_ranges(self) -> tuple[OperatorRange | None, ...]:
        """Of every segment, from the first to the last operator that has a backward."""
        graph, of_loss = self.graph, self.graph.order.of_loss
        ranges: list[OperatorRange | None] = []
        for first, last in pairwise((0, *self.cuts, len(of_loss))):
            reached = [index for index in of_loss[first:last] if graph.has_backward(graph.operators[index])]
            ranges.append(OperatorRange(reached[0], reached[-1]) if reached else None)
        return tuple(ranges)

    def _recomputation(self, staging: Staging) -> OperatorRanges:
        ranges = (self._segment_ranges[segment] for segment in sorted(staging.recomputed))
        return tuple(segment for segment in ranges if segment is not None)

    def segments(self, staging: Staging, stage: int) -> range:
        """Return the segments of a stage."""
        return range(*(0, *staging.firsts, self.costs.segments)[stage : stage + 2])

    def recomputing(self, staging: Staging, share: float) -> Staging:
        """Return a staging in which a share of every stage's segments is made again."""
        chosen: list[int] = []
        for stage in range(staging.stages):
            segments = self.segments(staging, stage)
            chosen += (
                segment
                for place, segment in enumerate(segments)
                if int((place + 1) * share) > int(place * share)
            )
        return replace(staging, recomputed=frozenset(chosen))

    # ---- 3-D parallelism

    def of_triple(self, split: Split, stages: int, schedule: Schedule, chunks: int = 1) -> Staging:
        """Return the staging of data, tensor and pipeline parallelism, whose slowest stage is as fast as can be.

        Raises:
            CostError: a local call has no cost.
        """
        division = None
        if chunks == 1:
            key = split, stages, schedule is Schedule.GPIPE
            if key not in self._of_triples:
                table = self.costs.table(self.problem.micro_batches, keeps_all=key[-1], split=split)
                self._of_triples[key] = divided(table, stages)
            division = self._of_triples[key]
        if division is not None:
            firsts = tuple(stage.first for stage in division.stages[1:])
        else:
            # Interleaved, or more than the memories hold.
            micro_ns_B = self.costs.stage_costs(split, 0, NO_SAVING).micro_ns_B
            micro_ns = [int(after - before) for before, after in pairwise(micro_ns_B.tolist())]
            firsts = balanced(micro_ns, stages * chunks)
        return Staging(firsts, (split,) * stages, schedule)

    def baselines(self) -> Iterator[Staging]:
        """Give those of all degrees of data, tensor and pipeline parallelism that take all devices, by schedule.

        Raises:
            CostError: a local call has no cost.
        """
        for split, stages in triples(self.splits, self.problem.device_count, self.most_stages):
            for schedule in self.schedules(stages):
                yield self.of_triple(split, stages, schedule)
            for chunks in self.chunks(stages):
                yield self.of_triple(split, stages, Schedule.INTERLEAVED, chunks)

    # ---- dynamic programming

    def divided(self, schedule: Schedule, saving: MemorySaving, most: int) -> list[Staging]:
        """Return the stagings of the least predicted totals, ascending, at most `most`.

        Raises:
            CostError: a local call has no cost.
        """
        key = schedule is Schedule.GPIPE, saving
        if key not in self._divisions:
            table = self.costs.table(self.problem.micro_batches, keeps_all=key[0], saving=saving)
            ascending = sorted(divisions(table, self.most_stages), key=lambda division: division.total_ns)
            self._divisions[key] = table, ascending
        table, found = self._divisions[key]
        return [self._of_division(table, division, schedule, saving) for division in found[:most]]

    def _of_division(
        self, table: StageTable, division: Division, schedule: Schedule, saving: MemorySaving
    ) -> Staging:
        splits = (table.options[stage.device][stage.option].label for stage in division.stages)
        return Staging(
            tuple(stage.first for stage in division.stages[1:]),
            tuple(cast(Split, split) for split in splits),
            schedule,
            saving.shares_optimizer,
            frozenset(range(self.costs.segments)) if saving.recomputes else frozenset(),
            sums_each=saving.sums_each,
        )


def pipeline_baselines(problem: Problem) -> tuple[Baseline, ...]:
    """Return 3-D parallelism by all degrees and schedules, without and with ZeRO-2.

    Names are as `3d-2x4x2-gpipe-zero`: data x tensor x pipeline degree, the schedule but for 1f1b.

    Source: Megatron-LM (arXiv:2104.04473), sections 2 and 3.

    Raises:
        CostError: a local call has no cost.
    """
    stagings = Stagings(problem)
    baselines = []
    for staging in stagings.baselines():
        for each in (staging, replace(staging, shares_optimizer=True)):
            strategy = stagings.strategy(each)
            if strategy is not None:
                baselines.append(Baseline(each.name, strategy))
    return tuple(baselines)
