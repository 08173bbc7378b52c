"""Tasks that are alike execute the same call: what is made once for all of them is what each would make."""

from __future__ import annotations

import random

import pytest

from graph import rules
from graph.axes import AxisKind, Degrees, IterationSpace, tasks
from graph.zoo import zoo_names
from tests.graphs import small_graph
from tests.quick import FEW_NETWORKS, few, seeds

MOST_TASKS = 48


def random_degrees(space: IterationSpace, generator: random.Random) -> Degrees:
    """Return degrees of at most `MOST_TASKS` tasks, mostly such as leave parts of unequal sizes."""
    degrees = [1] * len(space.axes)
    for index in generator.sample(range(len(space.axes)), len(space.axes)):
        axis = space.axes[index]
        limit = MOST_TASKS // tasks(tuple(degrees))
        limit = min(2 if axis.kind is AxisKind.REPLICA else axis.size, limit)
        if limit > 1 and generator.random() < 0.7:
            degrees[index] = generator.randint(2, limit)
    return tuple(degrees)


@pytest.mark.parametrize("seed", seeds(1, 8))
@pytest.mark.parametrize("name", few(FEW_NETWORKS, zoo_names()))
def test_every_task_of_a_zoo_network_has_the_call_that_is_made_for_it_alone(name: str, seed: int) -> None:
    graph = small_graph(name, 6)
    generator = random.Random(f"{name} {seed}")
    kept = made = 0
    for operator in {(one.target, one.arguments, one.space): one for one in graph.operators}.values():
        # Degrees of one operator share the calls of their parts.
        for degrees in {random_degrees(operator.space, generator) for _ in range(2)}:
            calls = rules.local_calls(graph, operator, degrees)
            parts = rules.parts(operator, degrees)
            assert parts == tuple(rules.part(operator, degrees, task) for task in range(len(parts)))
            alone = tuple(rules.call_of(graph, operator, degrees, task) for task in range(len(parts)))
            assert calls == alone
            kept += len({id(call) for call in calls})
            made += len(set(alone))
    assert kept == made
