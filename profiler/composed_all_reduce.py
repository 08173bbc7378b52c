"""All-reduces by the algorithms of `graph.collective_algorithms`, made of torch's messages and collectives.

Between CPUs every step is a message and an addition, so that as many bytes are sent as the algorithm says: gloo makes a
reduce-scatter of an all-reduce. A thread executes them, one all-reduce after the other. Between GPUs they are NCCL's
reduce-scatters and all-gathers, one after the other on a stream. Either way all ranks must start them in one order.

A sum is added up once, by one rank, and copied to the others: all have the same bits.

Source: BlueConnect (SysML 2019), section 3.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from graph.collective_algorithms import LEADERS, AllReduceAlgorithm

# Along a chain to or from a leader, a tensor goes in pieces of so many bytes.
PIECE_BYTES = 2**20

# torch 2.13 renamed both.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

GroupOf = Callable[[tuple[int, ...]], Any]
"""Returns the process group of some ranks."""


def gpu_groups(algorithm: AllReduceAlgorithm, ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of all process groups that an all-reduce over `ranks` needs between GPUs."""
    rings = [algorithm.rings(level) for level in range(len(algorithm.levels))]
    if algorithm.kind == LEADERS:
        rings[1] = rings[1][:1]
    return [tuple(ranks[place] for place in ring) for of_level in rings for ring in of_level]


class _Ring(Protocol):
    """A level of BlueConnect, as one of its ranks executes it."""

    @property
    def size(self) -> int:
        """The number of its ranks."""

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's of `size` slices of a flat tensor, summed; `whole` may be overwritten."""

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Write all slices into a flat tensor, of which each rank has its `own`, as `reduce_scatter` returned it."""


def _along(rings: Sequence[_Ring], flat: torch.Tensor) -> None:
    """Sum a flat tensor in place: reduce-scatters along the rings, innermost first, and all-gathers back."""
    missing = -len(flat) % math.prod(ring.size for ring in rings)
    whole = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
    parts = [whole]
    for ring in rings:
        parts.append(ring.reduce_scatter(parts[-1]))
    for ring in reversed(rings):
        own = parts.pop()
        ring.all_gather(parts[-1], own)
    if missing:
        flat.copy_(whole[: len(flat)])


# ---- between CPUs


def all_reduce_by_messages(
    tensor: torch.Tensor, algorithm: AllReduceAlgorithm, ranks: Sequence[int], rank: int, group: Any
) -> None:
    """Sum a contiguous tensor over `ranks`, in place; return when it is done. For CPUs.

    group: of which `ranks` are members, and in which nothing else is under way between them.
    """
    place, flat = ranks.index(rank), tensor.view(-1)
    rings = [
        _MessageRing(tuple(ranks[member] for member in algorithm.ring_of(place, level)), rank, group)
        for level in range(len(algorithm.levels))
    ]
    if not len(flat):
        return
    with torch.no_grad():
        if algorithm.kind == LEADERS:
            _by_leaders(flat, *rings)
        else:
            _along(rings, flat)


def _by_leaders(flat: torch.Tensor, chain: _MessageRing, leaders: _MessageRing) -> None:
    """Sum along the chain to its first rank, among the leaders, and tell the chain, a piece after the other."""
    place, group = chain.place, chain.group
    before = chain.ranks[place - 1] if place else None
    behind = chain.ranks[place + 1] if place + 1 < chain.size else None
    pieces = flat.split(max(1, PIECE_BYTES // flat.element_size()))
    sent = []
    received = torch.empty_like(pieces[0])
    for piece in pieces:
        if behind is not None:
            dist.recv(received[: len(piece)], behind, group=group)
            piece += received[: len(piece)]
        if before is not None:
            sent.append(dist.isend(piece, before, group=group))
    _wait(sent)
    if before is None:
        _along([leaders], flat)
    sent = []
    for piece in pieces:
        if before is not None:
            dist.recv(piece, before, group=group)
        if behind is not None:
            sent.append(dist.isend(piece, behind, group=group))
    _wait(sent)


@dataclass(frozen=True, slots=True)
class _MessageRing:
    """A ring of messages: every step sends to the next of its ranks, and receives from the one before."""

    ranks: tuple[int, ...]
    rank: int
    group: Any

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return len(self.ranks)

    @property
    def place(self) -> int:
        """This rank's place among them, and the number of the slice whose sums it comes to have."""
        return self.ranks.index(self.rank)

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice, a view; the other slices hold sums of some ranks then."""
        size, place = self.size, self.place
        slices = whole.view(size, -1)
        received = torch.empty_like(slices[0])
        for step in range(1, size):
            self._step(slices[(place - step) % size], received)
            slices[(place - step - 1) % size].add_(received)
        return slices[place]

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:  # noqa: ARG002 - it is a view of the whole
        """Receive the other ranks' slices."""
        size, place = self.size, self.place
        slices = whole.view(size, -1)
        for step in range(size - 1):
            self._step(slices[(place - step) % size], slices[(place - step - 1) % size])

    def _step(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        # Receives first: gloo sends when the peer has said that it receives.
        receiving = dist.irecv(incoming, self.ranks[(self.place - 1) % self.size], group=self.group)
        sending = dist.isend(outgoing, self.ranks[(self.place + 1) % self.size], group=self.group)
        _wait([receiving, sending])


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


# ---- between GPUs


def all_reduce_by_collectives(
    tensor: torch.Tensor, algorithm: AllReduceAlgorithm, ranks: Sequence[int], rank: int, group_of: GroupOf
) -> None:
    """Sum a contiguous tensor over `ranks`, in place, on the current stream. For GPUs."""
    place, flat = ranks.index(rank), tensor.view(-1)
    rings = [
        tuple(ranks[member] for member in algorithm.ring_of(place, level))
        for level in range(len(algorithm.levels))
    ]
    if not len(flat):
        return
    with torch.no_grad():
        if algorithm.kind != LEADERS:
            _along([_CollectiveRing(len(ring), group_of(ring)) for ring in rings], flat)
            return
        leader, group = rings[0][0], group_of(rings[0])
        dist.reduce(flat, leader, group=group)
        if rank == leader:
            dist.all_reduce(flat, group=group_of(rings[1]))
        dist.broadcast(flat, leader, group=group)


@dataclass(frozen=True, slots=True)
class _CollectiveRing:
    """A ring that the library makes of a process group."""

    size: int
    group: Any

    def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice in memory of its own."""
        summed = whole.new_empty(len(whole) // self.size)
        _reduce_scatter(summed, whole, group=self.group)
        return summed

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Gather all ranks' slices."""
        _all_gather(whole, own, group=self.group)


# ---- beside what else a rank does


@dataclass(eq=False)
class _ThreadWork:
    """An all-reduce that the thread executes."""

    execute: Callable[[], None] | None
    _done: threading.Event = field(default_factory=threading.Event)
    _failure: BaseException | None = None

    def run(self, failure: BaseException | None) -> BaseException | None:
        """Execute it, unless an earlier one failed; return why it, or that one, failed."""
        try:
            if failure is None and self.execute is not None:
                self.execute()
        except BaseException as error:  # raised where it is waited for
            failure = error
        self.execute, self._failure = None, failure
        self._done.set()
        return failure

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: a peer is gone or silent.
        """
        self._done.wait()
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure


class CommunicationThread:
    """Executes all-reduces between CPUs, one after the other; it ends with the process, or by `end`."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[_ThreadWork | None] | None = None

    def start(self, execute: Callable[[], None]) -> _ThreadWork:
        """Have a function executed after all earlier ones; return its work."""
        if self._works is None:
            self._works = queue.SimpleQueue()
            threading.Thread(target=_execute, args=(self._works,), name="all-reduces", daemon=True).start()
        work = _ThreadWork(execute)
        self._works.put(work)
        return work

    def end(self) -> None:
        """Let the thread end when it has executed what was started."""
        if self._works is not None:
            self._works.put(None)
            self._works = None


def _execute(works: queue.SimpleQueue[_ThreadWork | None]) -> None:
    failure: BaseException | None = None
    while (work := works.get()) is not None:
        failure = work.run(failure)
        del work


@dataclass(frozen=True, slots=True)
class StreamWork:
    """An all-reduce on a stream; `wait` makes the current stream wait, and not the host.

    tensor: stays until this is dropped, since its memory is another stream's.
    """

    reached: torch.cuda.Event
    tensor: torch.Tensor

    def wait(self) -> None:
        """Let the current stream wait for it."""
        torch.cuda.current_stream().wait_event(self.reached)


def start_on_stream(
    stream: torch.cuda.Stream, tensor: torch.Tensor, execute: Callable[[], None]
) -> StreamWork:
    """Execute a function that works on a GPU's tensor on a stream, after what its current one has; return the work."""
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        execute()
        reached = torch.cuda.Event()
        reached.record(stream)
    return StreamWork(reached, tensor)
