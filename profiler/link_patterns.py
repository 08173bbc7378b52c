"""Patterns of communication as a training step has them: the work of one rank that a link probe times.

The calls are those of the runtime, with its copies around them: an exchange's pieces are parts of larger tensors and
packed, received ones are allocated and assembled. A bare collective of one warm buffer is several times as fast on a
CPU, and predicts nothing.

Bytes N are those of `search.cost.collective_cost`: what one device holds in the end or, of a reduce-scatter or
reduce, in the beginning; of an all-to-all what one device sends, its own share with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from graph.collective_algorithms import read_algorithm

if TYPE_CHECKING:
    import torch

# "p2p", one of the collectives, or all_reduce/ALGORITHM: by another algorithm than the library's.
Pattern = str
COLLECTIVE_PATTERNS: tuple[Pattern, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"
)  # fmt: skip
ALGORITHM = "all_reduce/"
# An exchanged piece is the right half of a tensor of so many rows; tensors take turns, unless no cache holds one.
ROWS = 8
SOURCES, LARGEST_IN_TURNS = 3, 16 * 2**20
ITEM_BYTES = 4

# The n-th repetition.
Repetition = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Participant:
    """A rank in a pattern: among the ranks `members`, in their process group (None: that of all ranks).

    rings: further process groups, by their ranks, that all-reduces need between GPUs.
    """

    rank: int
    members: tuple[int, ...]
    group: Any
    device_name: str
    rings: Mapping[tuple[int, ...], Any] = field(default_factory=dict)

    def zeros(self, *sizes: int) -> torch.Tensor:
        """Return a tensor that was written to."""
        import torch

        return torch.zeros(sizes, device=self.device_name)

    def empty(self, elements: int) -> torch.Tensor:
        """Return a flat tensor that was not written to."""
        import torch

        return torch.empty(elements, device=self.device_name)


def prepare(pattern: Pattern, participant: Participant, size_bytes: int) -> Repetition:
    """Return the work of one rank in one repetition of a pattern over N = `size_bytes`, with its tensors allocated."""
    if pattern.startswith(ALGORITHM):
        return _all_reduce_by(pattern.removeprefix(ALGORITHM), participant, size_bytes)
    return _PREPARE[pattern](participant, size_bytes)


def _messages(participant: Participant, size_bytes: int) -> Repetition:
    """Messages both ways at once, parts of a larger tensor, joined with the rank's own part."""
    import torch
    import torch.distributed as dist

    first, second = participant.members
    other = second if participant.rank == first else first
    sources, columns = _halves(participant, size_bytes // ITEM_BYTES)

    def work(repetition: int) -> torch.Tensor:
        source = sources[repetition % len(sources)]
        outgoing = source[:, columns:].contiguous()
        incoming = torch.empty_like(outgoing)
        messages = [dist.P2POp(dist.irecv, incoming, other), dist.P2POp(dist.isend, outgoing, other)]
        for started in dist.batch_isend_irecv(messages):
            started.wait()
        return torch.cat([source[:, :columns], incoming], 1)

    return work


def _all_reduce(participant: Participant, size_bytes: int) -> Repetition:
    import torch.distributed as dist

    return _bucket(participant, size_bytes, lambda bucket: dist.all_reduce(bucket, group=participant.group))


def _all_reduce_by(algorithm_text: str, participant: Participant, size_bytes: int) -> Repetition:
    from profiler.composed_all_reduce import (
        CommunicationThread,
        all_reduce_by_collectives,
        all_reduce_by_messages,
    )

    members, rank = participant.members, participant.rank
    algorithm = read_algorithm(algorithm_text, len(members))
    if participant.device_name != "cpu":
        groups = participant.rings.__getitem__
        return _bucket(
            participant,
            size_bytes,
            lambda bucket: all_reduce_by_collectives(bucket, algorithm, members, rank, groups),
        )
    thread = CommunicationThread()

    def by_thread(bucket: torch.Tensor) -> None:
        thread.start(
            partial(all_reduce_by_messages, bucket, algorithm, members, rank, participant.group)
        ).wait()

    return _bucket(participant, size_bytes, by_thread)


def _bucket(
    participant: Participant, size_bytes: int, reduce: Callable[[torch.Tensor], object]
) -> Repetition:
    """Return the sum of a bucket of gradients, which are copied into it first."""
    bucket = participant.zeros(max(1, size_bytes // ITEM_BYTES))
    sources = [participant.zeros(len(bucket)) for _ in range(_turns(size_bytes))]

    def work(repetition: int) -> torch.Tensor:
        bucket.copy_(sources[repetition % len(sources)])
        reduce(bucket)
        return bucket

    return work


def _all_gather(participant: Participant, size_bytes: int) -> Repetition:
    import torch
    import torch.distributed as dist

    # torch 2.13 renamed it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    count = len(participant.members)
    sources, columns = _halves(participant, size_bytes // ITEM_BYTES // count)

    def work(repetition: int) -> torch.Tensor:
        part = sources[repetition % len(sources)][:, columns:].contiguous()
        result = participant.empty(count * part.numel())
        gather(result, part.view(-1), group=participant.group)
        return torch.cat(result.view(count, ROWS, columns).unbind(), 1)

    return work


def _reduce_scatter(participant: Participant, size_bytes: int) -> Repetition:
    import torch.distributed as dist

    # torch 2.13 renamed it.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    sources, columns = _wholes(participant, size_bytes)

    def work(repetition: int) -> torch.Tensor:
        packed = _packed(sources[repetition % len(sources)], columns)
        result = participant.empty(ROWS * columns)
        scatter(result, packed, group=participant.group)
        return result

    return work


def _all_to_all(participant: Participant, size_bytes: int) -> Repetition:
    import torch
    import torch.distributed as dist

    count = len(participant.members)
    sources, columns = _wholes(participant, size_bytes)
    sizes = [ROWS * columns] * count

    def work(repetition: int) -> torch.Tensor:
        packed = _packed(sources[repetition % len(sources)], columns)
        result = participant.empty(len(packed))
        dist.all_to_all_single(result, packed, sizes, sizes, group=participant.group)
        return torch.cat(result.view(count, ROWS, columns).unbind(), 1)

    return work


def _broadcast(participant: Participant, size_bytes: int) -> Repetition:
    import torch.distributed as dist

    root = participant.members[0]
    sources, columns = _halves(participant, size_bytes // ITEM_BYTES)

    def work(repetition: int) -> torch.Tensor:
        if participant.rank == root:
            value = sources[repetition % len(sources)][:, columns:].contiguous().view(-1)
        else:
            value = participant.empty(ROWS * columns)
        dist.broadcast(value, root, group=participant.group)
        return value

    return work


def _reduce(participant: Participant, size_bytes: int) -> Repetition:
    import torch.distributed as dist

    sources, columns = _halves(participant, size_bytes // ITEM_BYTES)

    def work(repetition: int) -> torch.Tensor:
        # The tensors of all ranks are new ones: they are overwritten.
        value = sources[repetition % len(sources)][:, columns:].contiguous().view(-1)
        dist.reduce(value, participant.members[0], group=participant.group)
        return value

    return work


def _turns(size_bytes: int) -> int:
    return SOURCES if size_bytes <= LARGEST_IN_TURNS else 1


def _halves(participant: Participant, elements: int) -> tuple[list[torch.Tensor], int]:
    """Return tensors whose right halves have so many elements, and the columns of a half."""
    columns = max(1, elements // ROWS)
    return [participant.zeros(ROWS, 2 * columns) for _ in range(_turns(elements * ITEM_BYTES))], columns


def _wholes(participant: Participant, size_bytes: int) -> tuple[list[torch.Tensor], int]:
    """Return tensors with a slice of columns for each rank, and the columns of a slice."""
    columns = max(1, size_bytes // ITEM_BYTES // ROWS // len(participant.members))
    count = len(participant.members)
    return [participant.zeros(ROWS, columns * count) for _ in range(_turns(size_bytes))], columns


def _packed(source: torch.Tensor, columns: int) -> torch.Tensor:
    import torch

    return torch.cat([piece.reshape(-1) for piece in source.split(columns, 1)])


_PREPARE: dict[Pattern, Callable[[Participant, int], Repetition]] = {
    "p2p": _messages,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
}
