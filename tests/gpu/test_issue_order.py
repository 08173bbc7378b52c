"""No order in which ranks issue their communication lets GPUs wait for each other for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph.axes import AxisKind
from graph.operators import OperatorGraph
from graph.plan import build_plan
from graph.strategy import Strategy
from graph.training import Training
from tests.gpu.issue_order import Issue, deadlock, issue_orders
from tests.quick import seeds
from tests.runtime.networks import graph_of, network_of
from tests.runtime.strategies import by_kind, random_groups, random_strategy, randomly_shared

DEVICES = 4
ADAM = Training(batch_size=2, optimizer="adam")


def _orders(graph: OperatorGraph, strategy: Strategy) -> list[list[Issue]]:
    count = strategy.device_count
    return issue_orders(build_plan(graph, strategy, tuple(rank % 2 for rank in range(count))), ADAM)


@pytest.mark.parametrize("name", ["mlp", "alexnet", "gpt2", "nmt", "dlrm"])
@pytest.mark.parametrize("seed", seeds(1, 3))
def test_random_strategies_come_to_an_end(name: str, seed: int) -> None:
    graph = graph_of(network_of(name, seed))
    strategy = random_strategy(graph, DEVICES, seed)
    orders = _orders(graph, strategy)
    assert any(orders)
    assert deadlock(orders) is None


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_shared_weights_and_recomputation_come_to_an_end(name: str) -> None:
    graph = graph_of(network_of(name, 1))
    split = by_kind(graph, [AxisKind.SAMPLE], range(DEVICES))
    strategy = replace(randomly_shared(split, graph, 1), recomputation=random_groups(graph, 1))
    assert deadlock(_orders(graph, strategy)) is None


@pytest.mark.parametrize("kind", [AxisKind.SAMPLE, AxisKind.PARAMETER])
def test_a_deadlock_planted_in_the_order_of_one_rank_is_found(kind: AxisKind) -> None:
    graph = graph_of(network_of("gpt2", 1))
    orders = _orders(graph, by_kind(graph, [kind], range(DEVICES)))
    planted = 0
    for rank, order in enumerate(orders):
        for place in range(len(order) - 1):
            first, second = order[place : place + 2]
            if first == second or first.partners != second.partners:
                continue
            swapped = [*order[:place], second, first, *order[place + 2 :]]
            stuck = deadlock([*orders[:rank], swapped, *orders[rank + 1 :]])
            assert stuck is not None
            assert f"rank {rank} at {place}" in stuck
            planted += 1
            break
    assert planted > 1


def test_messages_whose_sizes_differ_are_found() -> None:
    fits = [[Issue("messages", sends=((1, 8),))], [Issue("messages", receives=((0, 8),))]]
    assert deadlock(fits) is None
    assert deadlock([fits[0], [Issue("messages", receives=((0, 4),))]]) is not None
