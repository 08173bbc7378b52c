"""Legal configurations of a head: sampled, never listed.

A configuration has any degrees within the axes' sizes (replica unbounded) whose product is at most the number of
devices; powers of two have no preference. Its tasks are put on distinct devices. Two tasks on one device are legal
too, but are not proposed. Every configuration on distinct devices of a few has a positive probability; of many
devices there are more orders than seeds (2^32) to draw them from.

Source: FlexFlow (arXiv:1807.05358) section 4; the families of device lists are ours.
"""

from __future__ import annotations

import numpy as np

from graph.axes import AxisKind, Degrees, prime_factors, tasks
from graph.operators import Operator
from graph.strategy import Configuration
from search.space.placements import Drawn, place, random_placement

# Share of prime factors that make replicas: they spend compute to save communication, which seldom pays.
REPLICA_SHARE = 1 / 16


def random_degrees(operator: Operator, device_count: int, rng: np.random.Generator) -> Degrees:
    """Return degrees with at most `device_count` tasks; half of the draws aim at all devices.

    Prime factors of the aim are dealt to the axes that have room for them; those that fit nowhere are dropped.
    """
    axes = operator.space.axes
    aim = device_count if rng.random() < 0.5 else int(rng.integers(1, device_count + 1))
    degrees = [1] * len(axes)
    for prime in prime_factors(aim):
        room = [
            index
            for index, axis in enumerate(axes)
            if axis.kind is not AxisKind.REPLICA and degrees[index] * prime <= axis.size
        ]
        if rng.random() < REPLICA_SHARE:
            degrees[-1] *= prime
        elif room:
            degrees[room[int(rng.integers(len(room)))]] *= prime
    return tuple(degrees)


def random_configuration(operator: Operator, device_count: int, rng: np.random.Generator) -> Configuration:
    """Return a legal configuration with all tasks on distinct devices."""
    return configured(random_draw(operator, device_count, rng), device_count)


def random_draw(operator: Operator, device_count: int, rng: np.random.Generator) -> Drawn:
    """Return what `random_configuration` draws."""
    degrees = random_degrees(operator, device_count, rng)
    return Drawn(degrees, random_placement(device_count, rng))


def configured(drawn: Drawn, device_count: int) -> Configuration:
    """Return the configuration that was drawn."""
    return Configuration(drawn.degrees, place(drawn.placement, tasks(drawn.degrees), device_count))


def enumerate_degrees(operator: Operator, limit: int) -> list[Degrees]:
    """Return the degrees that profiling covers: whole, and all splits of one or two axes in at most `limit` tasks.

    Replicas are left out: their local call is the whole one.
    """
    axes = operator.space.axes
    whole = (1,) * len(axes)
    sizes = [(index, axis.size) for index, axis in enumerate(axes) if axis.kind is not AxisKind.REPLICA]
    vectors = [whole]
    for index, size in sizes:
        vectors.extend(_with(whole, {index: degree}) for degree in range(2, min(size, limit) + 1))
    for position, (first, first_size) in enumerate(sizes):
        for second, second_size in sizes[position + 1 :]:
            vectors.extend(
                _with(whole, {first: left, second: right})
                for left in range(2, min(first_size, limit // 2) + 1)
                for right in range(2, min(second_size, limit // left) + 1)
            )
    return vectors


def _with(degrees: Degrees, changed: dict[int, int]) -> Degrees:
    return tuple(changed.get(index, degree) for index, degree in enumerate(degrees))
