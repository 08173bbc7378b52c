"""The ranks of one execution and the messages between them.

Device r of a plan is rank r of a `World`. All calls are asynchronous; what they return is waited for through `wait`,
which turns a lost peer into a one-line error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graph.errors import RuntimeFailure


class PeerFailure(RuntimeFailure):
    """A message did not arrive: the cause is on another rank."""


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor to or from a peer; a received one is written into `tensor`."""

    peer: int
    tensor: torch.Tensor


class World:
    """The first `size` ranks of the default process group; without one, a world of a single rank."""

    def __init__(self, size: int) -> None:
        """Use the groups that `make_groups` made, that of all `size` ranks among them."""
        self.size = size
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._everyone = _groups[tuple(range(size))] if size > 1 else None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        """Start all messages of one event; return the works of the sends and of the receives, one for each.

        Both sides must list their common messages in the same order.
        """
        operations = [dist.P2POp(dist.isend, m.tensor, m.peer, self._everyone) for m in sends]
        operations += [dist.P2POp(dist.irecv, m.tensor, m.peer, self._everyone) for m in receives]
        if not operations:
            return [], []
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._lost(error) from error
        if len(works) != len(operations):
            # NCCL groups a batch into one launch: one work stands for all of them.
            works = [works[-1]] * len(operations)
        return works[: len(sends)], works[len(sends) :]

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start the sum of `tensor` over `ranks`, in place; return its work."""
        try:
            return dist.all_reduce(tensor, group=_groups[ranks], async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks of this world."""
        if self.size > 1:
            self.wait(self.all_reduce(tensor, tuple(range(self.size))))
        return tensor

    def wait(self, work: Any) -> None:
        """Wait for a work; on CUDA, make the current stream wait.

        Raises:
            PeerFailure: the other side is gone or silent.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def barrier(self, device: torch.device) -> None:
        """Wait until all ranks of this world are here."""
        if self.size > 1:
            self.sum(torch.zeros(1, device=device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def gather(self, item: object) -> list[Any] | None:
        """Return on rank 0 every rank's `item`, by rank; None elsewhere. For small results only."""
        if self.size == 1:
            return [item]
        received: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(item, received, dst=0, group=self._everyone)
        return received

    def _lost(self, error: RuntimeError) -> PeerFailure:
        reason = str(error).strip().splitlines()
        return PeerFailure(
            f"rank {self.rank}: lost contact with another rank ({reason[0] if reason else type(error).__name__}), "
            "all ranks must stay alive; see that rank's own message"
        )


# Process groups by their ranks; they live as long as the default process group.
_groups: dict[tuple[int, ...], Any] = {}


def make_groups(wanted: Iterable[tuple[int, ...]], timeout_s: float) -> None:
    """Make the process groups that are not there yet.

    Every rank of the default process group must call it with the same `wanted`, members or not: torch numbers groups
    by how many a process has seen (its `use_local_synchronization` does too, so it cannot help).
    """
    if not dist.is_initialized():
        return
    for ranks in wanted:
        if len(ranks) < 2 or ranks in _groups:
            continue
        if ranks == tuple(range(dist.get_world_size())):
            _groups[ranks] = dist.group.WORLD
        else:
            _groups[ranks] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))


def forget_groups() -> None:
    """Drop all groups, before `destroy_process_group`."""
    _groups.clear()
