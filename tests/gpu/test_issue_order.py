"""No order in which ranks issue their communication lets GPUs wait for each other for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from graph.axes import AxisKind
from graph.operators import OperatorGraph
from graph.plan import Plan, build_plan
from graph.strategy import Strategy
from graph.training import Training
from tests.gpu.issue_order import Issue, deadlock, issue_orders
from tests.gpu.ranks import run_ranks
from tests.gpu.virtual_device import Speeds
from tests.quick import seeds
from tests.runtime import oracle
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


def _plan_of_several_groups() -> Plan:
    graph = oracle.graph_of("perceptron")
    plan = build_plan(graph, random_strategy(graph, DEVICES, seed=3), (0,) * DEVICES, bucket_bytes=200)
    assert [bucket.devices for bucket in plan.buckets] == [(0, 1), (0, 1, 2, 3), (2, 3), (0, 1, 2, 3)]
    return plan


def test_sums_that_one_rank_alone_starts_in_a_planted_order_are_found() -> None:
    plan = _plan_of_several_groups()
    planted = replace(plan, slice_order=plan.slice_order[::-1])
    orders, others = issue_orders(plan, ADAM), issue_orders(planted, ADAM)
    # It is as good an order as the first one where all ranks have it.
    assert deadlock(others) is None
    for rank in range(DEVICES):
        stuck = deadlock([*orders[:rank], others[rank], *orders[rank + 1 :]])
        assert stuck is not None
        if rank in (0, 1):
            # One of the two waits on their communicator, the other one on that of all.
            assert "members=(0, 1)" in stuck
            assert "members=(0, 1, 2, 3)" in stuck


def _issued_by_a_rank(plan: Plan, rank: int, count: int, meeting: str) -> list[tuple[int, ...]]:
    import torch
    import torch.distributed as dist

    from runtime.communication import World
    from runtime.execution.executor import Executor
    from runtime.jobs.models import tensors_of
    from runtime.launch.processes import join_group
    from runtime.ranks.ranks import prepare_groups
    from tests.gpu.virtual_nccl import state

    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    join_group(f"cuda:{rank}", 30.0, store=store, rank=rank, size=count)
    prepare_groups(plan, count, 30.0)
    tensors = tensors_of(plan.graph, oracle.reference("perceptron").build(0))
    executor = Executor(
        plan, World(count), tensors, ADAM, seed=0, learning_rate=0.0, device=torch.device("cuda", rank)
    )
    state.issued.clear()
    executor.step(0)
    executor.loss_tensor()
    return [members for members, _, _ in state.issued]


def test_ranks_on_gpus_issue_in_the_order_that_is_looked_at_for_deadlocks(
    speeds: Callable[[Speeds], None],
) -> None:
    plan = _plan_of_several_groups()
    expected = [
        [tuple(sorted({rank, *issue.partners})) for issue in order]
        for rank, order in enumerate(issue_orders(plan, ADAM))
    ]
    assert run_ranks(partial(_issued_by_a_rank, plan), DEVICES) == expected


def test_messages_whose_sizes_differ_are_found() -> None:
    fits = [[Issue("messages", sends=((1, 8),))], [Issue("messages", receives=((0, 8),))]]
    assert deadlock(fits) is None
    assert deadlock([fits[0], [Issue("messages", receives=((0, 4),))]]) is not None
