"""How ranks on GPUs join their groups: each from its own GPU, in every thread, in one order."""

from __future__ import annotations

import os
import threading
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from tests.gpu.ranks import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("speeds")


def _joined(rank: int, count: int, meeting: str, timeout_s: float = 30.0) -> None:
    import torch.distributed as dist

    from runtime.launch.processes import join_group

    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    join_group(f"cuda:{rank}", timeout_s, store=store, rank=rank, size=count)


def _exchange(rank: int, count: int, meeting: str) -> list[Any]:
    from runtime.communication import make_groups
    from runtime.ranks.ranks import gather_everywhere

    _joined(rank, count, meeting)
    make_groups([(0, 1), (0, 1, 2)], 30.0)
    return gather_everywhere(rank)


def test_ranks_on_gpus_of_their_own_exchange_objects() -> None:
    assert run_ranks(_exchange, 3) == [[0, 1, 2]] * 3


def _in_a_thread(rank: int, count: int, meeting: str) -> Any:
    import torch.distributed as dist

    from runtime.launch.rank_leader import LaunchedRanks

    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    launched = LaunchedRanks(store, rank, count, f"cuda:{rank}", 30.0)
    return launched.execute(lambda: (threading.current_thread().name, _sum_of_ranks(rank, count)))


def _sum_of_ranks(rank: int, count: int) -> float:
    import torch

    from runtime.communication import World, make_groups

    make_groups([tuple(range(count))], 30.0)
    world, tensor = World(count), torch.full((2,), float(rank), device=f"cuda:{rank}")
    work = world.all_reduce(tensor, tuple(range(count)))
    assert tensor.isnan().all()
    world.wait(work)
    return float(tensor[0])


def test_a_leaders_thread_communicates_from_its_ranks_gpu() -> None:
    assert run_ranks(_in_a_thread) == [("work", 1.0)] * 2


def _gathered(planted: str | None, rank: int, count: int, meeting: str) -> Any:
    """Gather in the thread that joins, then in that of the work; threads of a `planted` module set no GPU."""
    import torch.distributed as dist

    from runtime.launch.rank_leader import LaunchedRanks
    from runtime.ranks.ranks import gather_everywhere

    if planted is not None:
        module: Any = import_module(planted)
        module.communicate_from = lambda _device: None
    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    launched = LaunchedRanks(store, rank, count, f"cuda:{rank}", 30.0)
    return gather_everywhere(rank), launched.execute(lambda: gather_everywhere(rank))


def test_each_thread_of_a_rank_communicates_from_its_gpu() -> None:
    assert run_ranks(partial(_gathered, None)) == [([0, 1], [0, 1])] * 2


@pytest.mark.parametrize(
    ("planted", "error"),
    [
        ("profiler.process_groups", "AssertionError"),
        ("runtime.launch.rank_leader", "graph.errors.RankFailure: rank [01]: AssertionError"),
    ],
)
def test_a_planted_thread_that_communicates_but_sets_no_gpu_is_refused(planted: str, error: str) -> None:
    with pytest.raises(RankError, match=f"\n{error}: a thread communicates that has set no GPU"):
        run_ranks(partial(_gathered, planted))


def _lost_peer(rank: int, count: int, meeting: str) -> str:
    import torch

    from runtime.communication import PeerFailure, World, make_groups
    from runtime.launch.processes import leave_group

    _joined(rank, count, meeting, timeout_s=0.5)
    make_groups([(0, 1)], 0.5)
    world, device = World(count), torch.device("cuda", rank)
    world.barrier(device)
    if rank == 1:
        leave_group()
        return ""
    world.wait(world.all_reduce(torch.ones(3, device=device), (0, 1)))  # the host goes on
    with pytest.raises(PeerFailure, match="rank 0: lost contact with another rank") as lost:
        world.wait_for_device(device)
    return str(lost.value)


def test_the_host_waits_for_a_lost_peer_no_longer_than_it_may() -> None:
    message, _ = run_ranks(_lost_peer)
    assert "cuda:0 was not done with its messages within 0.5 s" in message


def _many_groups(rank: int, count: int, meeting: str) -> list[str]:
    from graph.errors import RuntimeFailure
    from runtime import communication

    _joined(rank, count, meeting)
    communication.MOST_COMMUNICATORS = 4
    communication.make_groups([(0, 1), (0, 1, 2), (1, 2)], 30.0, returning=[(0, 1)])
    reasons = []
    for wanted, returning in ([(0, 2)], []), ([], [(1, 2)]):
        with pytest.raises(RuntimeFailure, match="5 groups of ranks") as refused:
            communication.make_groups(wanted, 30.0, returning=returning)
        reasons.append(str(refused.value))
    return reasons


def test_more_groups_than_nccl_has_room_for_are_refused_by_all_ranks() -> None:
    first, *others = run_ranks(_many_groups, 3)
    assert others == [first, first]


def _without_launch_order(rank: int, count: int, meeting: str) -> None:
    from profiler import process_groups
    from runtime.communication import make_groups

    process_groups.NCCL_VARIABLES = {}
    os.environ.pop("NCCL_LAUNCH_ORDER_IMPLICIT", None)
    _joined(rank, count, meeting)
    make_groups([(0, 1, 2)], 30.0)  # the communicator of all ranks
    make_groups([(0, 1)], 30.0)


def test_planted_communicators_that_nccl_may_start_in_any_order_are_refused() -> None:
    with pytest.raises(RankError, match="several communicators without NCCL_LAUNCH_ORDER_IMPLICIT=1"):
        run_ranks(_without_launch_order, 3)


def _careless(rank: int, count: int, meeting: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=count)
    import torch

    torch.cuda.set_device(0)
    dist.all_gather_object([None] * count, rank)


def test_two_ranks_on_one_gpu_are_found() -> None:
    with pytest.raises(RankError, match="Duplicate GPU detected"):
        run_ranks(_careless)
