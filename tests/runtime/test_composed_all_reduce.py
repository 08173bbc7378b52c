"""All-reduces of several levels on real processes: sums, steps, bytes sent, order, lost peers, whole training steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graph.collective_algorithms import (
    BY_LIBRARY,
    AllReduceAlgorithm,
    algorithm_for,
    chosen_algorithms,
    read_algorithm,
)
from graph.strategy import Strategy
from search.space.baselines import data_parallel
from tests.gpu.ranks import run_ranks
from tests.runtime.oracle import assert_equal, graph_of, make_job, reference, train_plain
from tests.runtime.pool import LocalPool

# By the ranks that take part; 37 and 1,000 elements are no multiples of these numbers of devices, 1 is fewer.
ALGORITHMS = {
    8: ("ring", "halving-doubling", "blueconnect-4x2", "blueconnect-2x4", "leaders-4x2", "leaders-2x4"),
    6: ("ring", "blueconnect-3x2", "blueconnect-2x3", "leaders-3x2"),
    4: ("halving-doubling", "leaders-2x2"),
}
LENGTHS = (0, 1, 37, 48, 1000)
RANKS = 8


def members_of(count: int) -> tuple[int, ...]:
    """Return ranks that are not all beside each other, where there are fewer than all."""
    return tuple(range(RANKS)) if count == RANKS else (0, *range(RANKS - count + 1, RANKS))


def join(rank: int, count: int, meeting: str) -> None:
    import torch.distributed as dist

    from runtime.launch.processes import join_group

    join_group("cpu", 60.0, store=dist.FileStore(meeting, count), rank=rank, size=count)  # type: ignore[attr-defined]


def tensor_of(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(length) * (rank + 3)) % 11 - 5).to(dtype)


def _sums(rank: int, count: int, meeting: str) -> dict[Any, Any]:
    """Return, by ranks, algorithm, length and dtype, whether the sum is right, and what was sent in how many steps."""
    import torch.distributed as dist

    from runtime.communication import World, make_groups

    join(rank, count, meeting)
    sent: list[int] = []
    send = dist.isend

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(tensor.numel())
        return send(tensor, *arguments, **options)

    dist.isend = counting
    results: dict[Any, Any] = {}
    for size, texts in ALGORITHMS.items():
        members = members_of(size)
        for text in texts:
            choices = {members: ((0, read_algorithm(text, size)),)}
            make_groups([tuple(range(count)), members], 60.0, choices)
            world = World(count, choices)
            for length in LENGTHS if rank in members else ():
                for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16):
                    tensor = tensor_of(rank, length, dtype)
                    sent.clear()
                    world.wait(world.all_reduce(tensor, members))
                    expected = sum(tensor_of(member, length, torch.int64) for member in members)
                    right = torch.equal(tensor, torch.as_tensor(expected).to(dtype))
                    results[size, text, length, dtype] = right, tuple(sent)
    return results


@pytest.fixture(scope="module")
def by_rank() -> list[dict[Any, Any]]:
    """What each rank has of `_sums`."""
    return run_ranks(_sums, RANKS)


def test_sums_are_those_of_all_ranks_and_steps_and_bytes_those_of_the_algorithm(
    by_rank: list[dict[Any, Any]],
) -> None:
    seen = 0
    for rank, results in enumerate(by_rank):
        for (size, text, length, _), (right, sent) in results.items():
            assert right, (rank, text, length)
            seen += 1
            algorithm = read_algorithm(text, size)
            if algorithm.kind == "leaders":
                continue
            padded = length + -length % math.prod(algorithm.levels)
            steps, parts, left = 0, [], padded
            for ring in algorithm.levels if length else ():
                steps += 2 * (ring - 1)
                parts.append(2 * (ring - 1) * (left := left // ring))
            assert len(sent) == steps
            assert sum(sent) == sum(parts) == 2 * padded * (size - 1) // size
    per_member = len(LENGTHS) * 4
    assert seen == sum(size * len(texts) * per_member for size, texts in ALGORITHMS.items())


def test_leaders_alone_send_to_the_other_groups(by_rank: list[dict[Any, Any]]) -> None:
    for rank, results in enumerate(by_rank):
        _, sent = results[8, "leaders-4x2", 48, torch.float32]
        # Of four in a chain the last sends up, the leader down, the others both ways; leaders exchange halves twice.
        expected = {0: [24, 24, 48], 3: [48], 1: [48, 48], 2: [48, 48]}[rank % 4]
        assert list(sent) == expected


def _delayed(rank: int, count: int, meeting: str) -> list[str]:
    """Return the order in which a rank that is late with some executes all-reduces that are started at once."""
    import time

    from runtime import communication
    from runtime.communication import World, make_groups

    names: dict[str, Any] = vars(communication)

    join(rank, count, meeting)
    members = tuple(range(count))
    choices = {members: ((0, read_algorithm("ring", count)),)}
    make_groups([members], 60.0, choices)
    world, order = World(count, choices), []
    execute: Callable[..., None] = names["all_reduce_by_messages"]

    def noted(tensor: torch.Tensor, *others: Any) -> None:
        order.append(str(len(tensor)))
        execute(tensor, *others)

    names["all_reduce_by_messages"] = noted
    tensors = [torch.full((length,), 1.0) for length in (5, 4, 30_000, 2, 1)]
    works = []
    for number, tensor in enumerate(tensors):
        time.sleep(0.05 * ((number + rank) % 3))
        works.append(world.all_reduce(tensor, members))
    for work in reversed(works):
        world.wait(work)
    assert all(torch.equal(tensor, torch.full_like(tensor, float(count))) for tensor in tensors)
    return order


def test_ranks_that_are_late_execute_all_reduces_in_the_order_of_their_start() -> None:
    assert run_ranks(_delayed, 3) == [["5", "4", "30000", "2", "1"]] * 3


def _lost(rank: int, count: int, meeting: str) -> str:
    from runtime.communication import PeerFailure, World, make_groups

    join(rank, count, meeting)
    members = tuple(range(count))
    choices = {members: ((0, read_algorithm("ring", count)),)}
    make_groups([members], 60.0, choices)
    world = World(count, choices)
    world.barrier(torch.device("cpu"))
    if rank == 1:
        return ""
    works = [world.all_reduce(torch.ones(1000), members) for _ in range(2)]
    for work in works:
        with pytest.raises(PeerFailure, match=f"rank {rank}: lost contact with another rank") as lost:
            world.wait(work)
    return str(lost.value)


def test_a_lost_peer_is_an_error_of_one_line_for_all_that_was_started() -> None:
    messages = run_ranks(_lost, 3)
    assert messages[1] == ""
    for message in (messages[0], messages[2]):
        assert message
        assert "\n" not in message


def chosen(strategy: Strategy, text: str) -> Strategy:
    members = tuple(range(strategy.device_count))
    return replace(strategy, collective_algorithms=((members, read_algorithm(text, strategy.device_count)),))


@pytest.mark.parametrize("text", ["ring", "halving-doubling", "leaders-2x2"])
def test_training_by_an_algorithm_gives_what_the_plain_module_gives(pool: LocalPool, text: str) -> None:
    model, graph = reference("convolutions", batch_size=8), graph_of("convolutions", batch_size=8)
    strategy = chosen(data_parallel(graph, 4), text)
    job = make_job(graph, strategy, model)
    job = replace(job, all_reduces=chosen_algorithms(strategy.collective_algorithms))
    assert_equal(pool.run(job), train_plain(model))


def test_sizes_below_the_first_of_an_algorithm_are_left_to_the_library() -> None:
    ring = AllReduceAlgorithm("ring", (4,))
    choices = ((0, BY_LIBRARY), (4096, ring))
    assert algorithm_for(choices, torch.empty(1023).nbytes) == BY_LIBRARY
    assert algorithm_for(choices, torch.empty(1024).nbytes) == ring
