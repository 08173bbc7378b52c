"""The start and the end of every process of an execution: its device, its process group, its errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from graph.errors import SoapstoneError
from profiler.pinning import keep_freed_memory, limit_threads, pin_to_core
from profiler.process_groups import join_process_group
from runtime.communication import PeerFailure, forget_groups
from runtime.jobs.job import Job, JobResult, run_job

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# A rank that lost a peer waits this long before it reports it: the rank that failed first is to be named.
PEER_GRACE_S = 5.0


def occupy(index: int | None, processor: str) -> str:
    """Bind this process to its device; return torch's name of it.

    Args:
        index: on "cpu" the core (None: not pinned), on "cuda" the index of the device.
        processor: "cpu" or "cuda".
    """
    if processor == "cuda":
        import torch

        torch.cuda.set_device(index)
        return f"cuda:{index}"
    pin_to_core(index)
    limit_threads()
    keep_freed_memory()
    return "cpu"


def join_group(device: str, timeout_s: float, *, store: Store | None, rank: int, size: int) -> None:
    """Initialize the default process group with this rank's device, as `occupy` names it.

    Without a `store`, the launcher's environment variables say where the ranks meet.
    """
    join_process_group(
        device,
        timeout_s,
        store=store,
        init_method=None if store is not None else "env://",
        rank=rank,
        world_size=size,
    )


def leave_group() -> None:
    """Undo `join_group`."""
    import torch.distributed as dist

    forget_groups()
    dist.destroy_process_group()


def run_patiently(job: Job, device: str, timeout_s: float) -> JobResult | None:
    """Run a job; where a peer is lost, give the launcher time to learn the cause."""
    try:
        return run_job(job, device, timeout_s)
    except PeerFailure:
        time.sleep(PEER_GRACE_S)
        raise


def error_line(text: str, rank: int) -> str:
    """Return the first line of "ErrorClass: message" without our own error classes and the rank's own name."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    kind, separator, message = line.partition(": ")
    if separator and kind in _own_errors(SoapstoneError):
        line = message
    return line.removeprefix(f"rank {rank}: ")


def _own_errors(root: type[Exception]) -> set[str]:
    return {root.__name__}.union(*(_own_errors(child) for child in root.__subclasses__()))
