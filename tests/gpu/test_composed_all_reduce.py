"""All-reduces of several levels between GPUs: NCCL's collectives, one after the other, on a stream of their own."""

from __future__ import annotations

from typing import Any

import pytest

from graph.collective_algorithms import read_algorithm
from tests.gpu.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("speeds")

TEXTS = ("halving-doubling", "leaders-2x2", "ring")


def _sums(rank: int, count: int, meeting: str) -> list[tuple[bool, bool]]:
    import torch
    import torch.distributed as dist

    from runtime.communication import World, make_groups
    from runtime.launch.processes import join_group

    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    join_group(f"cuda:{rank}", 30.0, store=store, rank=rank, size=count)
    members, results = tuple(range(count)), []
    for text in TEXTS:
        choices = {members: ((0, read_algorithm(text, count)),)}
        make_groups([members], 30.0, choices)
        world = World(count, choices)
        for length in (8, 37):
            first, second = (
                torch.full((length,), float(rank + add), device=f"cuda:{rank}") for add in (0, 10)
            )
            works = [world.all_reduce(tensor, members) for tensor in (first, second)]
            for work in works:
                world.wait(work)
            world.wait_for_device(torch.device("cuda", rank))
            expected = [float(sum(members)), float(sum(members) + 10 * count)]
            results.append((bool((first == expected[0]).all()), bool((second == expected[1]).all())))
    return results


def test_sums_on_gpus_are_those_of_all_ranks() -> None:
    results: list[Any] = run_ranks(_sums, 4)
    assert results == [[(True, True)] * (2 * len(TEXTS))] * 4
