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

from graph.collective_algorithms import BY_LIBRARY, read_algorithm
from profiler.process_groups import Message, all_gather_by_messages, start_messages

if TYPE_CHECKING:
    import torch

# "p2p", one of the collectives, all_reduce/ALGORITHM: by another algorithm than the library's, or successive/ALGORITHM:
# of several all-reduces that are started one behind the other, as slices of gradients are.
Pattern = str
COLLECTIVE_PATTERNS: tuple[Pattern, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"
)  # fmt: skip
ALGORITHM = "all_reduce/"
SUCCESSIVE, SUCCESSIVE_SUMS = "successive/", 8
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
    if pattern.startswith(SUCCESSIVE):
        return _successive_sums(pattern.removeprefix(SUCCESSIVE), participant, size_bytes)
    return _PREPARE[pattern](participant, size_bytes)


def _messages(participant: Participant, size_bytes: int) -> Repetition:
    """Messages both ways at once, parts of a larger tensor, joined with the rank's own part."""
    import torch

    first, second = participant.members
    other = second if participant.rank == first else first
    sources, columns = _halves(participant, size_bytes // ITEM_BYTES)

    def work(repetition: int) -> torch.Tensor:
        source = sources[repetition % len(sources)]
        outgoing = source[:, columns:].contiguous()
        incoming = torch.empty_like(outgoing)
        for started in start_messages([Message(other, incoming)], [Message(other, outgoing)]):
            started.wait()
        return torch.cat([source[:, :columns], incoming], 1)

    return work


def _all_reduce(participant: Participant, size_bytes: int) -> Repetition:
    import torch.distributed as dist

    return _bucket(participant, size_bytes, lambda bucket: dist.all_reduce(bucket, group=participant.group))


def _all_reduce_by(algorithm_text: str, participant: Participant, size_bytes: int) -> Repetition:
    start = _starting(algorithm_text, participant)
    return _bucket(participant, size_bytes, lambda bucket: start(bucket).wait())


def _successive_sums(algorithm_text: str, participant: Participant, size_bytes: int) -> Repetition:
    """Return the sums of so many slices of a full bucket, one behind the other."""
    flat = participant.zeros(SUCCESSIVE_SUMS * max(1, size_bytes // ITEM_BYTES))
    start = _starting(algorithm_text, participant)

    def work(_repetition: int) -> torch.Tensor:
        for started in [start(part) for part in flat.chunk(SUCCESSIVE_SUMS)]:
            started.wait()
        return flat

    return work


class _Done:
    """The work of what is ordered by a GPU's stream."""

    def wait(self) -> None:
        """Wait for nothing."""


def _starting(algorithm_text: str, participant: Participant) -> Callable[[torch.Tensor], Any]:
    """Return the function that starts an all-reduce by an algorithm and returns its work."""
    import torch.distributed as dist

    from profiler.composed_all_reduce import (
        CommunicationThread,
        all_reduce_by_collectives,
        all_reduce_by_messages,
    )

    members, rank = participant.members, participant.rank
    algorithm = read_algorithm(algorithm_text, len(members))
    if algorithm == BY_LIBRARY:
        return lambda tensor: dist.all_reduce(tensor, group=participant.group, async_op=True)
    if participant.device_name != "cpu":
        groups = participant.rings.__getitem__

        def on_stream(tensor: torch.Tensor) -> _Done:
            all_reduce_by_collectives(tensor, algorithm, members, rank, groups)
            return _Done()

        return on_stream
    thread = CommunicationThread()
    return lambda tensor: thread.start(
        partial(all_reduce_by_messages, tensor, algorithm, members, rank, participant.group)
    )


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
    own = participant.members.index(participant.rank)
    sources, columns = _halves(participant, size_bytes // ITEM_BYTES // count)

    def work(repetition: int) -> torch.Tensor:
        part = sources[repetition % len(sources)][:, columns:]
        result = participant.empty(count * part.numel())
        rows = result.view(count, ROWS, columns)
        if result.device.type == "cpu":  # as ranks do (`runtime/communication.py`)
            rows[own].copy_(part)
            for message in all_gather_by_messages(result, participant.group):
                message.wait()
        else:
            gather(result, part.contiguous().view(-1), group=participant.group)
        return torch.cat(rows.unbind(), 1)

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
