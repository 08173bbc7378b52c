"""The rank of this process, its device, and exchange of small objects between ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from graph.errors import RuntimeFailure, SoapstoneError, UsageError
from profiler.process_groups import join_process_group

if TYPE_CHECKING:
    import torch

    from graph.collective_algorithms import Choices
    from graph.plan import Plan

Result = TypeVar("Result")

# Environment variables that torchrun, or another launcher, sets.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_rank() -> bool:
    """True in a process that torchrun (or another launcher of its kind) started as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_variable(name: str, default: int) -> int:
    """Return a number that the launcher set.

    Raises:
        UsageError: the variable is no number.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(
            f"environment: {name} is {text}, must be a whole number; start the processes with torchrun"
        ) from error


def own_device(device: str | torch.device | None = None) -> torch.device:
    """Return this rank's device: `device`, else the GPU of its local rank, else the CPU; make a GPU the current one.

    Raises:
        UsageError: this host has GPUs, but fewer than ranks.
    """
    import torch

    if device is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here, local = rank_variable("LOCAL_WORLD_SIZE", 1), rank_variable("LOCAL_RANK", 0)
        if 0 < count < here or (count and local >= count):
            raise UsageError(
                f"device: this host has {count} GPUs for {here} processes, must have one for each; start fewer "
                'processes, or pass device="cpu"'
            )
        device = f"cuda:{local}" if count else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def join_ranks(device: torch.device, timeout_s: float) -> bool:
    """Initialize the default process group as the environment describes it; return whether that was needed.

    A process that no launcher started stays alone, without a group.

    Raises:
        UsageError: the environment names a rank but not where the ranks meet.
        RuntimeFailure: the ranks cannot meet.
    """
    import torch.distributed as dist

    if dist.is_initialized() or not is_rank():
        return False
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    if missing:
        raise UsageError(
            f"environment: RANK is set and {missing[0]} is not, must be; start the processes with torchrun"
        )
    try:
        join_process_group(device, timeout_s)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeFailure(
            f"rank {os.environ['RANK']}: cannot meet the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({reason}), must; start all {os.environ['WORLD_SIZE']} processes"
        ) from error
    return True


def prepare_groups(
    plan: Plan,
    size: int,
    timeout_s: float,
    all_reduces: Mapping[tuple[int, ...], Choices] | None = None,
) -> None:
    """Make the process groups that a plan over the first `size` ranks needs; all ranks must call it.

    all_reduces: the algorithms of all-reduces, see `runtime.communication.World`.
    """
    from runtime.communication import make_groups

    groups = [tuple(range(size)), *plan.device_groups]
    make_groups(groups, timeout_s, all_reduces, plan.returning_groups)


def gather_everywhere(item: object) -> list[Any]:
    """Return every rank's `item`, by rank, on all ranks of the default group; for small objects only."""
    import torch.distributed as dist

    from runtime.communication import naming_lost_peers

    if not dist.is_initialized():
        return [item]
    received: list[Any] = [None] * dist.get_world_size()
    with naming_lost_peers(dist.get_rank()):
        dist.all_gather_object(received, item)
    return received


def from_rank_0(item: object) -> Any:
    """Return rank 0's `item` on all ranks of the default group; for small objects only."""
    import torch.distributed as dist

    from runtime.communication import naming_lost_peers

    if not dist.is_initialized():
        return item
    shared = [item]
    with naming_lost_peers(dist.get_rank()):
        dist.broadcast_object_list(shared, src=0)
    return shared[0]


def everywhere(make: Callable[[], Result]) -> Result:
    """Return the result of `make`; where it fails on any rank, raise on all of them. All ranks must call it.

    Otherwise the other ranks would wait for one that has refused.

    Raises:
        SoapstoneError: as the first rank on which it failed raised it; a RuntimeFailure where that rank raised another
            exception. A rank's own exception of another kind goes on as it is.
    """
    result: list[Result] = []
    failure: Exception | None = None
    try:
        result.append(make())
    except Exception as error:
        failure = error
    failures = gather_everywhere(_portable(failure))
    if failure is not None and not isinstance(failure, SoapstoneError):
        raise failure
    for rank, of_rank in enumerate(failures):
        if of_rank is not None:
            kind, message = of_rank
            common = all(other == of_rank for other in failures)
            raise kind(message if common else f"rank {rank}: {message}") from failure
    return result[0]


def _portable(failure: Exception | None) -> tuple[type[SoapstoneError], str] | None:
    """Return the class and the message with which other ranks raise a failure."""
    if failure is None:
        return None
    if isinstance(failure, SoapstoneError):
        return type(failure), str(failure)
    reason = (str(failure).splitlines() or [""])[0]
    return (
        RuntimeFailure,
        f"{type(failure).__name__} ({reason}), must not fail; correct what is passed there",
    )


def own_host() -> str:
    """Return the identity of this rank's host: torchrun's node number where it is set, and the host name."""
    return f"{os.environ.get('GROUP_RANK', '')}/{socket.gethostname()}"


def nodes_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return, for each rank, the number of its host, in order of first appearance."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(numbers[host] for host in hosts)
