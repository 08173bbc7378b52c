"""Computation and communication at once: how much each second of communication takes from what a device computes.

A GPU computes large matrix products, bound by arithmetic, or sums that no cache holds, bound by memory, beside messages
around a ring or an all-reduce; a core does a small product and a sum in turn, beside messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from profiler.call_inputs import cache_bytes
from profiler.process_groups import Message, start_messages
from profiler.rank_clock import RankClock

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

MIB = 2**20
Computation = Literal["arithmetic", "memory", "both"]
# Communication fills this share of the computation, so that all of it overlaps.
OVERLAP_SHARE = 0.4
MOST_OVERLAPPED = 64
# The sums of a GPU read and write tensors of so many times its largest cache.
CACHES = 4

# Of computation alone, of communication alone, and of both at once until both are done.
Seconds = tuple[float, float, float]
# So many rounds of a computation.
Rounds = Callable[[int], None]
# So many messages, or collectives.
Started = Callable[[int], list["dist.Work"]]
# Messages before it is known how many are laid beside a computation.
FIRST_MESSAGES = 4


@dataclass(frozen=True, slots=True)
class OverlapSizes:
    """The sizes of what a device computes and sends.

    matrix_size: rows and columns of both factors. compute_s: about so long it computes. size_bytes: of each message.
    buffers: so many messages have memory of their own.
    """

    matrix_size: int
    compute_s: float
    size_bytes: int
    buffers: int


OF_CORES = OverlapSizes(matrix_size=512, compute_s=0.15, size_bytes=4 * MIB, buffers=MOST_OVERLAPPED)
# A message larger than most caches, and few of them at once: a GPU's queue holds 1024 kernels.
OF_GPUS = OverlapSizes(matrix_size=4096, compute_s=0.02, size_bytes=64 * MIB, buffers=4)
SUM_ELEMENTS = 2**20


def measure_overlaps(
    clock: RankClock, rank: int, world_size: int, repetitions: int
) -> dict[tuple[Computation, str], list[Seconds]]:
    """Time each computation and each pattern of communication alone and together; all ranks must call it."""
    sizes = OF_GPUS if clock.on_gpu else OF_CORES
    communications = {"p2p": _ring(clock, rank, world_size, sizes)}
    if clock.on_gpu:
        communications["all_reduce"] = _all_reduces(clock, sizes)
    return {
        (computation, pattern): _measure(clock, compute, communicate, sizes, repetitions)
        for computation, compute in computations(clock, sizes).items()
        for pattern, communicate in communications.items()
    }


def _measure(
    clock: RankClock, compute: Rounds, communicate: Started, sizes: OverlapSizes, repetitions: int
) -> list[Seconds]:
    def wait_for(count: int) -> None:
        for work in communicate(count):
            work.wait()

    def both() -> None:
        pending = communicate(count)
        compute(rounds)
        # Until both are done: a computation that merely starves the communication has not hidden it.
        for work in pending:
            work.wait()

    def seconds(work: Callable[[], object]) -> float:
        return clock.seconds(work, clock.meet, clock.everywhere)

    def occupied_s(work: Callable[[], object]) -> float:
        return clock.occupied_s(work, clock.meet, clock.everywhere)

    clock.restart()
    seconds(lambda: compute(2))
    round_s = seconds(lambda: compute(4)) / 4
    seconds(lambda: wait_for(FIRST_MESSAGES))
    message_s = seconds(lambda: wait_for(FIRST_MESSAGES)) / FIRST_MESSAGES
    wanted_s = OVERLAP_SHARE * max(sizes.compute_s, round_s)
    count = clock.agree(round(wanted_s / message_s), MOST_OVERLAPPED)
    rounds = clock.agree(round(count * message_s / OVERLAP_SHARE / round_s), 1_000_000)
    seconds(lambda: wait_for(count))
    return [
        (occupied_s(lambda: compute(rounds)), seconds(lambda: wait_for(count)), occupied_s(both))
        for _ in range(repetitions)
    ]


def _buffers(clock: RankClock, sizes: OverlapSizes) -> Callable[[int], torch.Tensor]:
    """Return the memory of messages, by their numbers: made and written to where it is first asked for."""
    made: list[torch.Tensor] = []

    def buffer(number: int) -> torch.Tensor:
        place = number % sizes.buffers
        while len(made) <= place:
            made.append(clock.buffer(sizes.size_bytes))
        return made[place]

    return buffer


def _ring(clock: RankClock, rank: int, world_size: int, sizes: OverlapSizes) -> Started:
    """Return messages around a ring: each rank sends to the next one and receives from the one before."""
    outgoing, incoming = (_buffers(clock, sizes) for _ in range(2))
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size

    def communicate(count: int) -> list[dist.Work]:
        started: list[dist.Work] = []
        for number in range(count):
            started += start_messages(
                [Message(preceding, incoming(number))], [Message(following, outgoing(number))]
            )
        return started

    return communicate


def _all_reduces(clock: RankClock, sizes: OverlapSizes) -> Started:
    import torch.distributed as dist

    bucket = _buffers(clock, sizes)

    def communicate(count: int) -> list[dist.Work]:
        works = (dist.all_reduce(bucket(number), async_op=True) for number in range(count))
        return [work for work in works if work is not None]

    return communicate


def computations(clock: RankClock, sizes: OverlapSizes) -> Mapping[Computation, Rounds]:
    """Return the computations that communication is laid beside, by what bounds them."""
    import torch

    name = clock.device.torch_name
    dtype = _product_dtype() if clock.on_gpu else torch.float32
    left, right = (torch.rand(sizes.matrix_size, sizes.matrix_size, device=name).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    elements = CACHES * cache_bytes(clock.device) // 4 if clock.on_gpu else SUM_ELEMENTS
    total, term = (torch.zeros(elements, device=name) for _ in range(2))

    def multiply(rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(left, right, out=product)

    def add(rounds: int) -> None:
        for _ in range(rounds):
            torch.add(total, term, out=total)

    def both(rounds: int) -> None:
        for _ in range(rounds):
            multiply(1)
            add(1)

    return {"arithmetic": multiply, "memory": add} if clock.on_gpu else {"both": both}


def _product_dtype() -> torch.dtype:
    """Return the number format in which this GPU multiplies in its matrix units: bfloat16, before Ampere float16."""
    import torch

    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
