"""The ranks of one execution and the messages between them.

Device r of a plan is rank r of a `World`. All calls are asynchronous and return works for `wait`, which turns a lost
peer into a one-line error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

# Before any process group is made: its functions' defaults would keep that group for ever (see `_groups`).
import torch.distributed.nn

from graph.collective_algorithms import BY_LIBRARY, Choices, algorithm_for
from graph.collectives import CollectiveKind
from graph.errors import RuntimeFailure
from profiler.composed_all_reduce import (
    CommunicationThread,
    all_reduce_by_collectives,
    all_reduce_by_messages,
    gpu_groups,
    start_on_stream,
)
from profiler.process_groups import (
    Message,
    all_gather_by_messages,
    new_process_group,
    start_messages,
    wait_for_device,
)

# torch 2.13 renamed both.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _gather_by_messages(slices: torch.Tensor, *, group: Any, async_op: bool) -> _AllMessages:
    assert async_op
    return _AllMessages(all_gather_by_messages(slices, group))


KIND_OF: Mapping[Callable[..., Any], CollectiveKind] = {
    dist.all_reduce: CollectiveKind.ALL_REDUCE,
    _all_gather: CollectiveKind.ALL_GATHER,
    _gather_by_messages: CollectiveKind.ALL_GATHER,
    _reduce_scatter: CollectiveKind.REDUCE_SCATTER,
    dist.all_to_all_single: CollectiveKind.ALL_TO_ALL,
    dist.broadcast: CollectiveKind.BROADCAST,
    dist.reduce: CollectiveKind.REDUCE,
}
"""The kind of collective that each of torch's functions executes."""
# The dtypes of all of torch's communication libraries; other dtypes travel as bytes.
_SUPPORTED = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)

LIBRARY_ONLY: Choices = ((0, BY_LIBRARY),)

# Each has buffers on every one of its GPUs, of a few MB for each peer and channel, and a stream. An assumption: no GPU
# was at hand to see where it gets tight.
MOST_COMMUNICATORS = 64

# gloo's thread takes microseconds; where it never lets go, a measured peak is too high, but no rank waits for ever.
_SETTLE_LIMIT_S = 1.0


class PeerFailure(RuntimeFailure):
    """A message did not arrive: the cause is on another rank."""


@contextmanager
def naming_lost_peers(rank: int) -> Iterator[None]:
    """Turn torch's error for a peer that is gone or silent into a `PeerFailure` of this rank."""
    try:
        yield
    except RuntimeError as error:
        raise lost_peer(rank, error) from error


def lost_peer(rank: int, error: RuntimeError) -> PeerFailure:
    """Return the failure of a rank that stands for torch's error for a peer that is gone or silent."""
    reason = str(error).strip().splitlines()
    return PeerFailure(
        f"rank {rank}: lost contact with another rank ({reason[0] if reason else type(error).__name__}), "
        "all ranks must stay alive; see that rank's own message"
    )


def is_of_messages(error: BaseException) -> bool:
    """Return whether an error came from messages between ranks, for torch raises RuntimeErrors of all kinds."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


@dataclass(slots=True)
class _AllMessages:
    """Several messages as one work."""

    works: list[Any]

    def wait(self) -> None:
        """Wait for all; a second call does nothing, where gloo would wait for another message."""
        while self.works:
            self.works.pop().wait()


class _LentTensors:
    """Tensors lent to gloo: aliases of the caller's tensors, to which only gloo has further references."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = tuple(tensor.detach() for tensor in tensors)
        self._before = self._references()

    def returned(self) -> bool:
        """Return whether gloo has no reference to any of them any more."""
        return self._references() == self._before

    def _references(self) -> list[tuple[int, int]]:
        # torch releases the Python object a moment after the tensor, since its thread needs the interpreter for that.
        # The count of the tensor itself has no annotation.
        return [(cast(Any, tensor)._use_count(), sys.getrefcount(tensor)) for tensor in self.tensors]


@dataclass(slots=True)
class _SettledWork:
    """A work of gloo that is done when gloo's own thread has released its tensors, too."""

    work: Any
    lent: _LentTensors | None

    def wait(self) -> None:
        """Wait for the work, then for the thread; a second call does nothing."""
        if self.lent is None:
            return
        self.work.wait()
        self.work = None
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        while not self.lent.returned() and time.monotonic() < deadline:
            time.sleep(0)
        self.lent = None


@dataclass(frozen=True, slots=True)
class _CopyingWork:
    """A work whose result is a part of its tensor, which is copied then."""

    work: Any
    result: torch.Tensor
    part: torch.Tensor

    def wait(self) -> None:
        """Wait, then copy."""
        self.work.wait()
        self.result.copy_(self.part)


@dataclass(frozen=True, slots=True)
class DoneWork:
    """A work that was done before it was returned."""

    def wait(self) -> None:
        """Return at once."""


class World:
    """The first `size` ranks of the default process group; without one, a world of a single rank.

    takes_time: whether messages do, so that what a rank can do next depends on what has arrived.
    """

    takes_time = True

    def __init__(self, size: int, all_reduces: Mapping[tuple[int, ...], Choices] | None = None) -> None:
        """Use the groups that `make_groups` made, that of all `size` ranks among them.

        all_reduces: by ranks, the algorithms of all-reduces over them; of others the library's own.
        """
        self.size = size
        self._all_reduces = all_reduces or {}
        self._stream: torch.cuda.Stream | None = None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._ranks = tuple(range(size))
        self._settles = False
        self._returns = False

    @property
    def returning(self) -> World:
        """The same ranks with process groups of their own: each rank has its own order between both."""
        world = copy(self)
        world._returns = True
        return world

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Let waits for collectives between CPUs last until gloo's thread has released their tensors.

        That thread may otherwise be the last to release one, unseen by torch's profiler, which records the releases of
        the thread in which it was started.
        """
        self._settles = True
        try:
            yield
        finally:
            self._settles = False

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        """Start all messages of one event; return the works of the sends and of the receives, one for each.

        Both sides must list their common messages in the same order.
        """
        if not sends and not receives:
            return [], []
        with naming_lost_peers(self.rank):
            works = start_messages(receives, sends, _group(self._ranks))
        return works[len(receives) :], works[: len(receives)]

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start the sum of contiguous `tensor` over `ranks`, in place; return its work."""
        algorithm = algorithm_for(self._all_reduces.get(ranks, LIBRARY_ONLY), tensor.nbytes)
        if algorithm == BY_LIBRARY or self._returns:
            return self._start(dist.all_reduce, ranks, tensor)
        if tensor.device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(tensor.device)
            return start_on_stream(
                self._stream,
                tensor,
                partial(all_reduce_by_collectives, tensor, algorithm, ranks, self.rank, _group),
            )
        if _messages is None:
            raise RuntimeFailure("process group of messages: is not there, must be; this process has left it")
        by_messages = partial(all_reduce_by_messages, tensor, algorithm, ranks, self.rank, _messages)
        if not self._settles:
            return _thread.start(by_messages)
        with naming_lost_peers(self.rank):
            by_messages()
        return DoneWork()

    def all_gather(self, result: torch.Tensor, part: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start to gather the equal flat `part`s of `ranks`, in their order, in `result`; return the work."""
        if result.device.type != "cpu":
            return self._start(_all_gather, ranks, _plain(result), _plain(part))
        result.view(len(ranks), -1)[ranks.index(self.rank)].copy_(part.detach())
        return self.all_gather_in_place(result, ranks)

    def reduce_scatter(self, result: torch.Tensor, parts: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start the sums over `ranks` of equal slices of flat `parts`, one slice a rank; return the work."""
        return self._start(_reduce_scatter, ranks, result, parts)

    def reduce_scatter_in_place(
        self, result: torch.Tensor, parts: torch.Tensor, ranks: tuple[int, ...]
    ) -> Any:
        """As `reduce_scatter`, but `parts` are overwritten.

        Gloo, between CPUs, makes a reduce-scatter of an all-reduce of a copy; here it is an all-reduce in place.
        """
        if parts.device.type != "cpu":
            return self.reduce_scatter(result, parts, ranks)
        own = parts.view(len(ranks), -1)[ranks.index(self.rank)]
        return _CopyingWork(self._start(dist.all_reduce, ranks, parts), result, own)

    def all_gather_in_place(self, slices: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start to fill flat equal `slices`, one of each rank in their order, from this rank's own among them."""
        if slices.device.type != "cpu":
            return self.all_gather(slices, slices.view(len(ranks), -1)[ranks.index(self.rank)], ranks)
        return self._start(_gather_by_messages, ranks, _plain(slices))

    def all_to_all(
        self,
        result: torch.Tensor,
        parts: torch.Tensor,
        result_sizes: Sequence[int],
        part_sizes: Sequence[int],
        ranks: tuple[int, ...],
    ) -> Any:
        """Start to send slice k of flat `parts` to the k-th of `ranks`, and to receive its slice of `result`."""
        plain_result, plain_parts = _plain(result), _plain(parts)
        words = result.element_size() // plain_result.element_size()
        return self._start(
            dist.all_to_all_single,
            ranks,
            plain_result,
            plain_parts,
            [size * words for size in result_sizes],
            [size * words for size in part_sizes],
        )

    def broadcast(self, tensor: torch.Tensor, root: int, ranks: tuple[int, ...]) -> Any:
        """Start to copy `root`'s flat `tensor` to all of `ranks`; return the work."""
        return self._start(dist.broadcast, ranks, _plain(tensor), root)

    def reduce(self, tensor: torch.Tensor, root: int, ranks: tuple[int, ...]) -> Any:
        """Start the sum of `tensor` over `ranks` at `root`; elsewhere `tensor` is overwritten. Return the work."""
        return self._start(dist.reduce, ranks, tensor, root)

    def _start(self, operation: Callable[..., Any], ranks: tuple[int, ...], *arguments: Any) -> Any:
        group = _group(ranks, returning=self._returns)
        lent: _LentTensors | None = None
        tensors = [item for item in arguments if isinstance(item, torch.Tensor)]
        if self._settles and all(tensor.device.type == "cpu" for tensor in tensors):
            lent = _LentTensors(tensors)
            aliases = iter(lent.tensors)
            arguments = tuple(next(aliases) if isinstance(item, torch.Tensor) else item for item in arguments)
        with naming_lost_peers(self.rank):
            work = operation(*arguments, group=group, async_op=True)
        return work if lent is None else _SettledWork(work, lent)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks of this world."""
        if self.size > 1:
            self.wait(self.all_reduce(tensor, self._ranks))
        return tensor

    def wait(self, work: Any) -> None:
        """Wait for a work; on CUDA, make the current stream wait, and not the host (`wait_for_device`).

        Raises:
            PeerFailure: the other side is gone or silent.
        """
        with naming_lost_peers(self.rank):
            work.wait()

    def wait_for_device(self, device: torch.device) -> None:
        """Wait until all work issued to `device` is done: before the host reads what came by messages.

        Raises:
            PeerFailure: the other side is gone or silent.
        """
        with naming_lost_peers(self.rank):
            wait_for_device(device)

    def barrier(self, device: torch.device) -> None:
        """Wait until all ranks of this world have called it."""
        if self.size > 1:
            self.sum(torch.zeros(1, device=device))
            self.wait_for_device(device)

    def gather(self, item: object) -> list[Any] | None:
        """Return on rank 0 every rank's `item`, by rank; None elsewhere. For small results only."""
        if self.size == 1:
            return [item]
        received: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with naming_lost_peers(self.rank):
            dist.gather_object(item, received, dst=0, group=_group(self._ranks))
        return received


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor to send in a dtype that communication libraries support."""
    return tensor if tensor.dtype in _SUPPORTED else tensor.view(torch.uint8)


# Process groups by their ranks; they live as long as the default process group. Nothing else may hold one: a group that
# outlives `forget_groups` keeps its threads, and a process that ends beside them can be aborted.
_groups: dict[tuple[int, ...], Any] = {}
# Of those that have a second one for what goes back (`World.returning`).
_returning: dict[tuple[int, ...], Any] = {}
# Of all ranks, for the messages of all-reduces that a thread executes beside other messages.
_messages: Any = None
_thread = CommunicationThread()


def _group(ranks: tuple[int, ...], *, returning: bool = False) -> Any:
    try:
        return (_returning if returning else _groups)[ranks]
    except KeyError as error:
        raise RuntimeFailure(
            f"process group of ranks {ranks}: is not there, must be; this process has left it, so do no more with it"
        ) from error


def make_groups(
    wanted: Iterable[tuple[int, ...]],
    timeout_s: float,
    all_reduces: Mapping[tuple[int, ...], Choices] | None = None,
    returning: Iterable[tuple[int, ...]] = (),
) -> None:
    """Make the process groups that do not exist yet, those of all-reduces by several algorithms among them.

    Of the `returning` ones there is a second one each (`World.returning`).

    Every rank of the default process group must call it with the same arguments, members or not: torch numbers groups
    by how many a process has seen (its `use_local_synchronization` does too, so it cannot help).

    Raises:
        RuntimeFailure: they would be more than NCCL has room for.
    """
    global _messages
    if not dist.is_initialized():
        return
    composed = [
        (algorithm, ranks)
        for ranks, choices in (all_reduces or {}).items()
        for _, algorithm in choices
        if algorithm != BY_LIBRARY
    ]
    if dist.get_backend() == "nccl":
        wanted = [
            *wanted,
            *(group for algorithm, ranks in composed for group in gpu_groups(algorithm, ranks)),
        ]
    elif composed and _messages is None:
        with naming_lost_peers(dist.get_rank()):
            _messages = new_process_group(range(dist.get_world_size()), timeout_s)
    missing = [ranks for ranks in dict.fromkeys(wanted) if len(ranks) > 1 and ranks not in _groups]
    missing_returning = [ranks for ranks in dict.fromkeys(returning) if ranks not in _returning]
    count = len(_groups) + len(missing) + len(_returning) + len(missing_returning)
    if count > MOST_COMMUNICATORS and dist.get_backend() == "nccl":
        raise RuntimeFailure(
            f"process groups: {count} groups of ranks communicate, must be at most {MOST_COMMUNICATORS} over "
            "NCCL, where each takes memory of every GPU in it; choose a strategy that splits operators over "
            "fewer sets of devices"
        )
    for ranks in missing:
        if ranks == tuple(range(dist.get_world_size())):
            _groups[ranks] = dist.group.WORLD
        else:
            with naming_lost_peers(dist.get_rank()):
                _groups[ranks] = new_process_group(ranks, timeout_s)
    for ranks in missing_returning:
        with naming_lost_peers(dist.get_rank()):
            _returning[ranks] = new_process_group(ranks, timeout_s)


def forget_groups() -> None:
    """Drop all groups, before `destroy_process_group`."""
    global _messages
    _thread.end()
    _messages = None
    _groups.clear()
    _returning.clear()
