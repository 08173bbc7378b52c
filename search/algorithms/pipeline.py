"""Pipeline parallelism: stages of any sizes and splits, and the schedule of the problem's micro-batches.

First 3-D parallelism of all degrees under all schedules, without and with ZeRO-2, then what dynamic programming finds;
where memory does not suffice, with gradients that are summed in every micro-batch, with weights kept in shares where
that is asked for (ZeRO-3), and with activations that are made again. From the best a walk changes one thing at a time:
where a stage begins, how many devices it has, how it is split, one group of its operators, the schedule, what is shared
and when it is summed, what is made again. Every step is simulated exactly, and the best of all is kept, so that the
result is no worse than any of the baselines that the budget lets it simulate; these come first.

Sources: Megatron-LM (arXiv:2104.04473) for the baselines; Alpa (OSDI 2022) for the dynamic program; Metropolis
acceptance as in FlexFlow (arXiv:1807.05358), section 6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log

import numpy as np

from graph.errors import StrategyError, UsageError
from graph.schedule import MicroBatches, Schedule
from graph.strategy import Strategy
from graph.synchronization import BY_DEFAULT
from search.algorithms.algorithm import Algorithm
from search.algorithms.staging import Staging, Stagings
from search.algorithms.trials import Trial, TrialSearch
from search.bounds.pipeline_costs import MEMORY_SAVINGS
from search.outcome import Outcome
from search.problem import Problem
from search.space.baselines import data_parallel
from search.space.configurations import configured, random_draw
from search.space.hybrids import random_grid
from search.space.pipelines import Split

MOST_DIVISIONS = 6
"""Divisions of a dynamic program that are simulated, by schedule and saving of memory."""
RECOMPUTED_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The shares of every stage's segments of which the first that suffices for the memories is made again."""
FEWEST_MOVES, MOST_MOVES = 400, 1500
OPERATORS_WALKED = 1_000_000
"""A walk has as many moves as have so many operators in all their micro-batches together, within these numbers."""
TASKS_WALKED = 56_000_000
"""Nor has a walk more moves than have so many operators in all micro-batches on all devices together."""
DEVICES_WALKED = 16
"""Of more devices a walk has fewer moves in proportion: the start is chosen among more, and each move takes longer."""
MOVES_ASTRAY = 50
"""Moves after which a walk goes on from its best."""
MOST_DRAWS = 200
"""Draws of a move in a row that give nothing new, after which the walk ends."""
TEMPERATURE = 0.01
"""By what share of its time a step is worse that is accepted once in e times."""
_LEAST_CHANCE = 2.0**-64


def _pipeline(trial: Trial, starts: Sequence[Strategy], seed: int) -> None:
    """Take the starts with the problem's micro-batches, 3-D parallelism, divisions, and a walk from the best."""
    search = _PipelineSearch(trial)
    for start in starts:
        search.take_start(start)
    for staging in search.stagings.baselines():
        search.take_fitting(staging)
    search.take_divisions()
    search.walk(np.random.default_rng(seed))
    if trial.found is None:
        _refuse(trial.problem)


def _refuse(problem: Problem) -> None:
    """Say why a problem has no pipelined strategy.

    Raises:
        StrategyError: its network cannot be trained in micro-batches.
        UsageError: its devices and micro-batches do not go with its schedule.
    """
    strategy = data_parallel(problem.graph, problem.device_count)
    replace(strategy, micro_batches=MicroBatches(problem.micro_batches)).validate(
        problem.graph, problem.device_count
    )
    raise UsageError(
        f"pipeline: schedule {problem.schedule or Schedule.ONE_F_ONE_B} with {problem.micro_batches} micro-batches "
        f"has no strategy on {problem.device_count} devices, must have groups of devices whose number divides that of "
        "the micro-batches; choose another schedule or number"
    )


class _PipelineSearch:
    """The stagings that were simulated, and their outcomes; None of one that has no strategy.

    Of a staging that cannot be the best of its kind, nor a step of a walk, the outcome is only as much as shows it: its
    excess, and what a step takes at least.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.stagings = Stagings(trial.problem, trial.builder)
        self.outcomes: dict[Staging, Outcome | None] = {}
        # By kind: from one to another a walk seldom comes. The best, and its staging.
        self.best: dict[tuple[bool, bool], tuple[Outcome, Staging]] = {}

    def take(self, staging: Staging, limit: Callable[[], Outcome] | None = None) -> Outcome | None:
        """Simulate a staging that was not yet; return its outcome, or None where it has no strategy.

        limit: returns what it must be below to count, not below the best so far; None: the best of its kind.
        """
        if staging not in self.outcomes:
            strategy = self.stagings.strategy(staging)
            if strategy is None:
                self.outcomes[staging] = None
            else:
                self.trial.take(strategy, self._best_of(staging) if limit is None else limit())
                self.outcomes[staging] = self.trial.latest
                if limit is None:
                    self._keep(staging, self.trial.latest)
        return self.outcomes[staging]

    def _best_of(self, staging: Staging) -> Outcome | None:
        """Return the best outcome of a staging's kind; None where there is none yet."""
        best = self.best.get(_kind(staging))
        return None if best is None else best[0]

    def _keep(self, staging: Staging, outcome: Outcome) -> None:
        best = self._best_of(staging)
        if best is None or outcome < best:
            self.best[_kind(staging)] = outcome, staging

    def take_fitting(self, staging: Staging) -> None:
        """Simulate a staging without and with ZeRO-2 and, as long as both exceed memories, more and more made again.

        Meanwhile also with gradients that are summed in every micro-batch, until that fits, and with weights kept in
        shares, likewise. Not where it takes too long without what is made again, which only adds to it.
        """
        tries_each, tries_shares = self.stagings.may_sum_each, self.stagings.may_share_weights(staging)
        for share in RECOMPUTED_SHARES:
            again = self.stagings.recomputing(staging, share)
            outcomes = [self.take(replace(again, shares_optimizer=shares)) for shares in (False, True)]
            if any(outcome is None or not outcome.excess_bytes for outcome in outcomes):
                return
            if tries_each:
                in_each = self.take(replace(again, shares_optimizer=True, sums_each=True))
                tries_each = in_each is not None and in_each.excess_bytes > 0
            if tries_shares:
                kept = replace(again, shares_optimizer=True, shares_weights=True)
                in_shares = self.take(replace(kept, sums_each=self.stagings.may_sum_each))
                tries_shares = in_shares is not None and in_shares.excess_bytes > 0
            best = self._best_of(staging)
            # Of what exceeds memories, once something fits, outcomes have the least time.
            if best is not None and not best.excess_bytes and not share:
                times = [outcome.step_time_ns for outcome in outcomes if outcome is not None]
                if min(times) >= best.step_time_ns:
                    return

    def take_start(self, start: Strategy) -> None:
        """Simulate a start with the problem's micro-batches, and without what these do not go with."""
        problem = self.trial.problem
        own = start.micro_batches
        if own.count != problem.micro_batches or problem.schedule not in (None, own.schedule):
            schedule = problem.schedule or Schedule.ONE_F_ONE_B
            start = replace(start, micro_batches=MicroBatches(problem.micro_batches, schedule))
        if problem.micro_batches > 1:
            start = replace(start, compiled=(), synchronization=BY_DEFAULT)
        try:
            start = problem.in_micro_batches(start)
            start.validate(problem.graph, problem.device_count)
        except StrategyError:
            return
        self.trial.take(start)

    def take_divisions(self) -> None:
        """Simulate the best that dynamic programming finds; of savings of memory the first that fits the memories."""
        schedules = self.stagings.schedules(self.stagings.most_stages)
        # Actors with the credits of 1f1b would divide as it does.
        for schedule in [one for one in schedules if one is not Schedule.ACTORS] or schedules:
            for saving in MEMORY_SAVINGS:
                if saving.sums_each and not self.stagings.may_sum_each:
                    continue
                if saving.recomputes and schedule is Schedule.GPIPE and len(schedules) > 1:
                    # 1f1b is predicted to take as long, and keeps less.
                    break
                stagings = self.stagings.divided(schedule, saving, MOST_DIVISIONS)
                if saving.recomputes:
                    # That everything is made again is more than most need.
                    for staging in stagings:
                        self.take_fitting(staging)
                outcomes = [self.take(staging) for staging in stagings]
                # To make activations again may cost less than to sum gradients in every micro-batch.
                fits = any(outcome is not None and not outcome.excess_bytes for outcome in outcomes)
                if fits and not saving.sums_each:
                    break

    def walk(self, rng: np.random.Generator) -> None:
        """Walk from the best staging of one stage, of one a group of devices, and of several a group."""
        starts = dict(self.best)
        found = [self._walk_from(*starts[kind], rng) for kind in sorted(starts)]
        if found:
            self._keep_activations(*min(found, key=lambda best: best[0]))

    def _keep_activations(self, best: Outcome, staging: Staging) -> None:
        """Leave out of the best staging the recomputation of each stage that is no worse without."""
        for stage in range(staging.stages):
            kept = staging.recomputed - set(self.stagings.segments(staging, stage))
            strategy = self.stagings.strategy(replace(staging, recomputed=kept))
            if kept == staging.recomputed or strategy is None:
                continue
            limit = Outcome(best.excess_bytes, best.step_time_ns + 1)
            self.trial.take(strategy, limit, instead_of_equals=True)
            if self.trial.latest <= best:
                best, staging = self.trial.latest, replace(staging, recomputed=kept)

    def _walk_from(self, cost: Outcome, start: Staging, rng: np.random.Generator) -> tuple[Outcome, Staging]:
        """Walk from a staging; return the best on the way, and its outcome."""
        moves = _Moves(self.stagings, rng)
        current = best = start
        costs = {start: cost}
        taken = idle = 0
        operators = len(self.stagings.graph.operators) * self.trial.problem.micro_batches
        most = min(MOST_MOVES, max(FEWEST_MOVES, OPERATORS_WALKED // operators))
        devices = self.trial.problem.device_count
        most = min(most, max(1, TASKS_WALKED // (operators * devices)))
        most = max(1, most * min(devices, DEVICES_WALKED) // devices)
        while taken < most and idle < MOST_DRAWS:
            proposal = moves.proposed(current)
            bound = _Bound(costs[current], rng)
            outcome = None if proposal is None or proposal in self.outcomes else self.take(proposal, bound)
            if proposal is None or outcome is None:
                idle += 1
                continue
            taken, idle = taken + 1, 0
            costs[proposal] = outcome
            if outcome < bound.drawn:
                current = proposal
            if outcome < costs[best]:
                best = proposal
            elif taken % MOVES_ASTRAY == 0:
                current = best
        return costs[best], best


def _kind(staging: Staging) -> tuple[bool, bool]:
    """Return whether groups of devices have several stages, and whether there are several at all.

    From kind to kind it is far: stages of another one have other sizes, and there are more of them.
    """
    return staging.schedule is Schedule.INTERLEAVED, staging.stages > 1


class _Bound:
    """The outcome that a step is made below: to what is no worse, else by Metropolis if it exceeds no more.

    It is drawn when it is asked for, so that proposals without a strategy draw nothing.
    """

    def __init__(self, current: Outcome, rng: np.random.Generator) -> None:
        self.drawn = current
        self._rng = rng

    def __call__(self) -> Outcome:
        """Draw and return it."""
        chance = max(self._rng.random(), _LEAST_CHANCE)
        most_ns = int(self.drawn.step_time_ns * (1 - TEMPERATURE * log(chance)))
        self.drawn = Outcome(self.drawn.excess_bytes, most_ns + 1)
        return self.drawn


class _Moves:
    """Random changes of stagings."""

    def __init__(self, stagings: Stagings, rng: np.random.Generator) -> None:
        self._stagings = stagings
        self._rng = rng
        self._groups = stagings.groups
        self._classes = stagings.costs.classes
        # Groups by the class of their head.
        self._like: dict[int, list[int]] = {}
        for number, group in enumerate(self._groups):
            self._like.setdefault(self._classes[group.head], []).append(number)

    def proposed(self, staging: Staging) -> Staging | None:
        """Return a changed staging, or None where the drawn change cannot be made."""
        changes = (
            self._boundary_moved, self._boundary_moved, self._devices_given, self._stages_merged, self._stage_cut,
            self._split_changed, self._configuration_changed, self._configuration_changed,
            self._configuration_changed, self._schedule_changed, self._sharing_changed, self._recomputation_changed,
        )  # fmt: skip
        return changes[self._below(len(changes))](staging)

    def _below(self, end: int) -> int:
        return int(self._rng.integers(end))

    def _boundary_moved(self, staging: Staging) -> Staging | None:
        """Return a staging in which a stage begins up to two segments earlier or later."""
        if not staging.firsts:
            return None
        stage = self._below(len(staging.firsts))
        firsts = list(staging.firsts)
        firsts[stage] += (-2, -1, 1, 2)[self._below(4)]
        bounds = [0, *firsts, self._stagings.costs.segments]
        if not bounds[stage] < firsts[stage] < bounds[stage + 2]:
            return None
        return replace(staging, firsts=tuple(firsts))

    def _drawn_split(self, devices: int) -> Split | None:
        """Return a split over so many devices, of which there may be any number; None where there is none."""
        splits = self._stagings.splits.of(devices)
        return splits[self._below(len(splits))] if splits else None

    def _devices_given(self, staging: Staging) -> Staging | None:
        """Return a staging in which two neighbours have divided their devices in another way."""
        if len(staging.splits) == 1:
            return None
        group = self._below(len(staging.splits) - 1)
        total = staging.splits[group].devices + staging.splits[group + 1].devices
        given = 1 + self._below(total - 1)
        halves = self._drawn_split(given), self._drawn_split(total - given)
        return self._with_splits(staging, group, 2, halves)

    def _split_changed(self, staging: Staging) -> Staging | None:
        """Return a staging in which a group of devices is split in another way."""
        group = self._below(len(staging.splits))
        return self._with_splits(staging, group, 1, (self._drawn_split(staging.splits[group].devices),))

    def _with_splits(
        self, staging: Staging, group: int, count: int, splits: Sequence[Split | None]
    ) -> Staging | None:
        """Return a staging in which `count` groups of devices from one on are replaced by others."""
        new = tuple(split for split in splits if split is not None)
        if len(new) < len(splits) or new == staging.splits[group : group + count]:
            return None
        groups = len(staging.splits)
        touched = range(group, group + count)
        return replace(
            staging,
            splits=(*staging.splits[:group], *new, *staging.splits[group + count :]),
            changed=tuple(change for change in staging.changed if change[0] % groups not in touched),
        )

    def _stages_merged(self, staging: Staging) -> Staging | None:
        """Return a staging in which two neighbours are one stage, on the devices of both."""
        if len(staging.splits) == 1 or staging.stages > len(staging.splits):
            return None
        stage = self._below(len(staging.splits) - 1)
        split = self._drawn_split(sum(split.devices for split in staging.splits[stage : stage + 2]))
        merged = self._with_splits(staging, stage, 2, (split,))
        if merged is None:
            return None
        firsts = (*staging.firsts[:stage], *staging.firsts[stage + 1 :])
        return self._renumbered(merged, firsts, stage, -1)

    def _stage_cut(self, staging: Staging) -> Staging | None:
        """Return a staging in which a stage is cut in two, as are its devices."""
        if staging.stages > len(staging.splits) or staging.stages == self._stagings.most_stages:
            return None
        stage = self._below(staging.stages)
        first, end = (0, *staging.firsts, self._stagings.costs.segments)[stage : stage + 2]
        devices = staging.splits[stage].devices
        if end - first < 2 or devices < 2:
            return None
        given = 1 + self._below(devices - 1)
        halves = self._drawn_split(given), self._drawn_split(devices - given)
        place = first + 1 + self._below(end - first - 1)
        cut = self._with_splits(staging, stage, 1, halves)
        if cut is None:
            return None
        return self._renumbered(cut, (*staging.firsts[:stage], place, *staging.firsts[stage:]), stage, 1)

    def _renumbered(self, staging: Staging, firsts: tuple[int, ...], stage: int, by: int) -> Staging:
        """Return a staging with other stages, where all behind a stage have another number."""
        changed = tuple(
            (number + by if number > stage else number, group, configuration)
            for number, group, configuration in staging.changed
        )
        return replace(
            staging,
            firsts=firsts,
            schedule=staging.schedule if firsts else Schedule.ONE_F_ONE_B,
            changed=changed,
            registers=(),
        )

    def _configuration_changed(self, staging: Staging) -> Staging | None:
        """Return a staging in which a group of operators, or all that are like it in its stage, are split otherwise.

        Layers that are alike seldom gain one by one: what goes from one to the next would change its split.
        """
        number = self._below(len(self._groups))
        head = self._groups[number].head
        stage = self._stage_of(staging, head)
        if stage is None:
            return None
        count = len(staging.devices(stage))
        operator = self._stagings.graph.operators[head]
        draw = (random_draw, random_grid)[self._below(2)]
        configuration = configured(draw(operator, count, self._rng), count)
        numbers = {number}
        if self._below(2):
            numbers |= {
                other
                for other in self._like[self._classes[head]]
                if self._stage_of(staging, self._groups[other].head) == stage
            }
        kept = (change for change in staging.changed if change[0] != stage or change[1] not in numbers)
        changed = (*kept, *((stage, other, configuration) for other in numbers))
        return replace(staging, changed=tuple(sorted(changed, key=lambda change: change[:2])))

    def _stage_of(self, staging: Staging, operator: int) -> int | None:
        """Return the stage of an operator; None of one outside of the loss."""
        segment = self._stagings.costs.segment_of(operator)
        return None if segment < 0 else sum(first <= segment for first in staging.firsts)

    def _schedule_changed(self, staging: Staging) -> Staging | None:
        """Return a staging under another of the schedules that keep its stages, or actors with other credits."""
        schedules = self._stagings.schedules(len(staging.splits))
        if len(schedules) > 1:
            schedules = tuple(dict.fromkeys((*schedules, Schedule.ACTORS)))
        others = [schedule for schedule in schedules if schedule is not staging.schedule]
        if staging.schedule is Schedule.ACTORS and (not others or self._below(2)):
            return self._credits_changed(staging)
        if staging.schedule is Schedule.INTERLEAVED or not others:
            return None
        return replace(staging, schedule=others[self._below(len(others))], registers=())

    def _credits_changed(self, staging: Staging) -> Staging | None:
        """Return a staging of actors in which a stage may have one micro-batch more in flight, or one less.

        So may all before it, as far as they must, or all behind it.
        """
        most = self._stagings.problem.micro_batches
        registers = list(MicroBatches(most, Schedule.ACTORS, staging.registers).credits_of(staging.stages))
        stage, by = self._below(staging.stages), (1, -1)[self._below(2)]
        changed = registers[stage] + by
        if not 1 <= changed <= most:
            return None
        before = [max(number, changed) for number in registers[:stage]]
        behind = [min(number, changed) for number in registers[stage + 1 :]]
        return replace(staging, registers=(*before, changed, *behind))

    def _sharing_changed(self, staging: Staging) -> Staging:
        """Return a staging that shares gradients and optimizer state, or no longer does; or weights beside these.

        Where activations are made again for want of memory, gradients may be kept in shares before that.
        """
        if self._stagings.may_share_weights(staging) and staging.shares_optimizer and self._below(2):
            return replace(staging, shares_weights=not staging.shares_weights)
        shares_alone = staging.shares_optimizer and not staging.sums_each
        if shares_alone and staging.recomputed and self._stagings.may_sum_each:
            return replace(staging, sums_each=True)
        return replace(
            staging, shares_optimizer=not staging.shares_optimizer, sums_each=False, shares_weights=False
        )

    def _recomputation_changed(self, staging: Staging) -> Staging:
        """Return a staging in which a stage's activations are made again or none of them are, or one segment's."""
        segments = self._stagings.segments(staging, self._below(staging.stages))
        if self._below(2):
            return replace(staging, recomputed=staging.recomputed ^ {segments[self._below(len(segments))]})
        rest = staging.recomputed - set(segments)
        return replace(staging, recomputed=rest if rest != staging.recomputed else rest | set(segments))


pipeline = TrialSearch("pipeline", _pipeline)
ALGORITHMS: Mapping[str, Algorithm] = {"pipeline": pipeline.solve}
