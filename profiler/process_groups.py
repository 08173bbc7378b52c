"""Process groups: NCCL between GPUs, gloo between CPUs.

A GPU must be the current one of every thread that communicates, before the first message: NCCL takes it for the rank's,
and CUDA's own choice for a new thread is the first GPU, for all ranks alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from profiler.pinning import threads_that_yield

if TYPE_CHECKING:
    import torch

# Each group of ranks has a communicator, with a stream of its own; two that start in another order on another rank may
# wait for each other for ever. With this, NCCL starts them in the order of the host's calls, in which all ranks agree.
NCCL_VARIABLES = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


# NCCL's own watchdog ends the process, without a word about the peer: it comes later than `wait_for_device`.
WATCHDOG_GRACE_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3

# Seconds that this process waits for others, since it joined them.
_limit_s = float("inf")


def communicate_from(device: torch.device | str) -> None:
    """Let the calling thread communicate from `device`: of a GPU, make it the thread's current one."""
    import torch

    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)


def join_process_group(device: torch.device | str, timeout_s: float, **rendezvous: Any) -> None:
    """Initialize the default process group with this process's `device`, from which this thread then communicates.

    Args:
        device: of this rank; of a GPU its index is given.
        timeout_s: after which a collective of gloo is given up, and a wait for a GPU (`wait_for_device`).
        rendezvous: where the ranks meet, as `torch.distributed.init_process_group` takes it.
    """
    import torch
    import torch.distributed as dist

    global _limit_s
    _limit_s = timeout_s
    chosen = torch.device(device)
    communicate_from(chosen)
    on_gpu = chosen.type == "cuda"
    if on_gpu:
        for name, value in NCCL_VARIABLES.items():
            os.environ.setdefault(name, value)
    with threads_that_yield():
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=timeout_s + (WATCHDOG_GRACE_S if on_gpu else 0.0)),
            device_id=chosen if on_gpu else None,
            **rendezvous,
        )


def new_process_group(ranks: Sequence[int], timeout_s: float) -> Any:
    """Return a new process group of some ranks; all ranks of the default group must call it, members or not."""
    import torch.distributed as dist

    grace_s = WATCHDOG_GRACE_S if dist.get_backend() == "nccl" else 0.0
    with threads_that_yield():
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s + grace_s))


ALL_GATHER_TAG = 1
"""Of the messages of all-gathers, which come between others in another order on each rank."""


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor to or from a peer; a received one is written into `tensor`."""

    peer: int
    tensor: torch.Tensor


def start_messages(
    receives: Sequence[Message], sends: Sequence[Message], group: Any = None, tag: int = 0
) -> list[Any]:
    """Start messages at once, one at least; return the work of each, those of receives first.

    Both sides must list their common messages in the same order. Receives are started first. With gloo a peer sends
    once it hears that this rank receives; behind a large message on the same connection it hears it only after that,
    and where one rank is late one way follows the other.

    Args:
        group: of the ranks; None: the default process group.
        tag: of gloo's messages; those of different tags need no common order.
    """
    import torch.distributed as dist

    operations = [dist.P2POp(dist.irecv, message.tensor, message.peer, group, tag) for message in receives]
    operations += [dist.P2POp(dist.isend, message.tensor, message.peer, group, tag) for message in sends]
    works: list[Any] = dist.batch_isend_irecv(operations)
    # NCCL groups a batch into one launch: one work stands for all of them.
    return works if len(works) == len(operations) else [works[-1]] * len(operations)


def all_gather_by_messages(slices: torch.Tensor, group: Any = None) -> list[Any]:
    """Start to fill flat equal `slices`, one of each rank of a group, from this rank's own; return the messages' works.

    Between CPUs: gloo's own all-gather copies all that arrives once more, into memory of its own, and takes three to
    four times as long for 64 MiB between two processes of a host. Every rank sends its slice to every other one.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    rows, count = slices.view(len(ranks), -1), len(ranks)
    own = ranks.index(dist.get_rank())
    # Each begins with another peer, lest all send to one at once.
    receives = [
        Message(ranks[place], rows[place]) for place in ((own - by) % count for by in range(1, count))
    ]
    sends = [Message(ranks[(own + by) % count], rows[own]) for by in range(1, count)]
    return start_messages(receives, sends, group, ALL_GATHER_TAG)


def wait_for_device(device: torch.device | str) -> None:
    """Wait until all work issued to `device` is done: on a GPU, messages of peers with it.

    A work's `wait` makes a GPU's stream wait, and the host goes on; whichever host's wait comes next would last as long
    as a peer that is gone stays away.

    Raises:
        RuntimeError: it took longer than ranks wait for each other; their communicators are aborted.
    """
    import torch
    import torch.distributed as dist

    chosen = torch.device(device)
    if chosen.type != "cuda":
        return
    reached = torch.cuda.Event()
    reached.record(torch.cuda.current_stream(chosen))
    deadline, pause_s = time.monotonic() + _limit_s, FIRST_PAUSE_S
    while not reached.query():
        if time.monotonic() > deadline:
            with suppress(Exception):  # whatever is left of them: the message says why this process ends
                dist.distributed_c10d._abort_process_group()
            raise RuntimeError(f"{chosen} was not done with its messages within {_limit_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
