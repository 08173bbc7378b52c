"""Strategies for the runtime's tests: by kind of axis, and random legal ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from graph.axes import AxisKind, Degrees, tasks
from graph.operator_ranges import OperatorRange, OperatorRanges
from graph.operators import Operator, OperatorGraph
from graph.plan import Plan
from graph.pulls import Pull
from graph.schedule import MicroBatches, Schedule
from graph.strategy import Configuration, Sharding, Strategy, stays_whole, with_whole_weights

MOST_TASKS = 8


def by_kind(graph: OperatorGraph, kinds: Sequence[AxisKind], devices: Sequence[int]) -> Strategy:
    """Split every operator along its first axis of one of `kinds` over `devices`; others run on the first device."""

    def configure(operator: Operator) -> Configuration:
        degrees = [1] * len(operator.space.axes)
        for index, axis in enumerate(operator.space.axes):
            if axis.kind in kinds:
                degrees[index] = min(len(devices), axis.size)
                break
        return Configuration(tuple(degrees), tuple(devices[: tasks(tuple(degrees))]))

    return Strategy(graph.digest, tuple(configure(operator) for operator in graph.operators))


def in_turn(graph: OperatorGraph, devices: Sequence[int]) -> Strategy:
    """Run every operator whole, on one device after another."""
    return Strategy(
        graph.digest,
        tuple(
            Configuration((1,) * len(operator.space.axes), (devices[index % len(devices)],))
            for index, operator in enumerate(graph.operators)
        ),
    )


def random_strategy(graph: OperatorGraph, device_count: int, seed: int) -> Strategy:
    """Return a random legal strategy.

    Any axes, several at once, REPLICA among them; degrees that need not divide sizes, any device for each task, so
    that tasks share devices and operators use disjoint ones. One strategy in three is regular instead: operators are
    split alike over the same devices, so that patterns of collectives arise. The last device is always used, so that
    the strategy needs `device_count` processes.
    """
    generator = random.Random(seed)
    regular = generator.random() < 1 / 3
    kinds = list(AxisKind)
    configurations = []
    for operator in graph.operators:
        if regular:
            if generator.random() < 0.2:
                generator.shuffle(kinds)
            degrees = _regular_degrees(operator, kinds, device_count, generator)
            devices = tuple(task % device_count for task in range(tasks(degrees)))
        else:
            degrees = _random_degrees(operator, generator)
            pool = generator.sample(range(device_count), generator.randint(1, device_count))
            devices = tuple(generator.choice(pool) for _ in range(tasks(degrees)))
        configurations.append(Configuration(degrees, devices))
    if all(device_count - 1 not in c.devices for c in configurations):
        first = configurations[0]
        configurations[0] = Configuration(first.degrees, (device_count - 1, *first.devices[1:]))
    strategy = Strategy(graph.digest, tuple(configurations))
    strategy.validate(graph, device_count)
    return strategy


def _random_degrees(operator: Operator, generator: random.Random) -> Degrees:
    """Return degrees of up to three axes, now and then as many parts as an axis has points."""
    degrees = [1] * len(operator.space.axes)
    for index in generator.sample(range(len(degrees)), min(generator.randint(1, 3), len(degrees))):
        axis = operator.space.axes[index]
        largest = 3 if axis.kind is AxisKind.REPLICA else min(axis.size, 5)
        degree = generator.randint(1, largest)
        if tasks(tuple(degrees)) * degree <= MOST_TASKS:
            degrees[index] = degree
    return tuple(degrees)


def _regular_degrees(
    operator: Operator, kinds: Sequence[AxisKind], device_count: int, generator: random.Random
) -> Degrees:
    """Split over all devices along the first axis, in the order of `kinds`, that is long enough, or along two."""
    degrees = [1] * len(operator.space.axes)
    left = device_count
    if device_count == 4 and generator.random() < 0.3:
        left = 2
    for kind in kinds:
        for index, axis in enumerate(operator.space.axes):
            fits = axis.size >= left or axis.kind is AxisKind.REPLICA
            if axis.kind is kind and fits and tasks(tuple(degrees)) * left <= device_count:
                degrees[index] = left
    return tuple(degrees)


def staged(
    graph: OperatorGraph, groups: list[list[int]], chunks: int, seed: int, *, split: bool = True
) -> Strategy:
    """Return a random strategy whose operators are in turn, in runs, on groups of devices."""
    generator = random.Random(seed)
    order = graph.order.of_loss
    count = len(groups) * chunks
    bounds = [0, *sorted(generator.sample(range(1, len(order)), count - 1)), len(order)]
    configurations: list[Configuration] = []
    inside = [random_strategy(graph, len(devices), seed).configurations for devices in groups]
    for index, operator in enumerate(graph.operators):
        # Operators that renew buffers run where the last ones of the loss do.
        place = order.index(index) if index in order else len(order) - 1
        group = sum(place >= bound for bound in bounds[1:-1]) % len(groups)
        chosen = inside[group][index]
        if not split:
            chosen = Configuration((1,) * len(operator.space.axes), (0,))
        devices = tuple(groups[group][device] for device in chosen.devices)
        configurations.append(Configuration(chosen.degrees, devices))
    return Strategy(graph.digest, tuple(configurations))


def in_micro_batches(strategy: Strategy, count: int, schedule: Schedule) -> Strategy:
    """Return the strategy with steps of so many micro-batches."""
    return replace(strategy, micro_batches=MicroBatches(count, schedule))


def randomly_shared(strategy: Strategy, graph: OperatorGraph, seed: int) -> Strategy:
    """Return the strategy with what is shared of each weight drawn at random, as far as its micro-batches allow."""
    generator, whole = random.Random(seed), stays_whole(graph)
    levels = [
        Sharding.OPTIMIZER if one.name in whole else generator.choice(list(Sharding)) for one in graph.weights
    ]
    return with_whole_weights(graph, replace(strategy, sharding=tuple(levels)))


def without_kept_shares(strategy: Strategy) -> Strategy:
    """Return the strategy with the update alone shared of weights that are kept in shares."""
    levels = (Sharding.OPTIMIZER if level is Sharding.PARAMETERS else level for level in strategy.sharding)
    return replace(strategy, sharding=tuple(levels))


def random_pulls(plan: Plan, slice_order: Sequence[int], seed: int) -> tuple[Pull, ...]:
    """Return pulls of a plan of p3 in a random order, with sums between them, each at a random place."""
    generator = random.Random(seed)
    bounds = plan.pull_bounds
    # Sums in their order, and each pull somewhere behind the sum of its slice.
    starts: list[tuple[int, bool]] = []
    summed: list[int] = []
    for bucket in slice_order:
        starts.append((bucket, False))
        summed += [bucket] if bucket in bounds.shared else []
        while summed and generator.random() < 0.4:
            starts.append((summed.pop(generator.randrange(len(summed))), True))
    generator.shuffle(summed)
    starts += [(bucket, True) for bucket in summed]
    # Each stands before who needs it, or any of those behind it.
    ends = list(accumulate((bounds.latest[bucket] for bucket, _ in reversed(starts)), min))[::-1]
    pulls: list[Pull] = []
    at = sums = 0
    for (bucket, is_pull), end in zip(starts, ends, strict=True):
        at = max(at, bounds.soonest[bucket] if is_pull else bucket)
        if is_pull:
            at = generator.randint(at, end)
            pulls.append(Pull(bucket, *plan.stands_at(at), sums))
        sums += not is_pull
    return tuple(pulls)


def groups_of(graph: OperatorGraph, size: int) -> OperatorRanges:
    """Return groups of so many operators that make up the graph."""
    count = len(graph.operators)
    return tuple(OperatorRange(first, min(first + size, count) - 1) for first in range(0, count, size))


def random_groups(graph: OperatorGraph, seed: int) -> OperatorRanges:
    """Return groups of random lengths, now and then with operators between them that are in none."""
    generator = random.Random(seed)
    groups, first = [], 0
    while first < len(graph.operators):
        last = min(first + generator.choice((0, 1, 2, 4, 8)), len(graph.operators) - 1)
        if generator.random() < 0.75:
            groups.append(OperatorRange(first, last))
        first = last + 1
    return tuple(groups)
