"""NCCL between GPUs that are not there: gloo carries the data, and what NCCL does otherwise is done or checked.

- A batch of messages is one work. A work's `wait` makes the current stream wait, and the host never: of a peer that is
  gone the host hears nothing, and its device never comes to an end.
- What is received is poison until it is waited for; what is sent must not change until then. All must be contiguous,
  on the GPU of this rank.
- A thread that communicates has set its GPU. No two ranks of a host may have the same one.
- Each group of ranks is a communicator with a stream of its own. Several of them deadlock unless NCCL starts their
  works in the order of the host's calls.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tests.gpu.virtual_device import gpu_of, virtual

ORDER_VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
_STAMP_TAG = 1
# torch's own functions, by name.
_torch: dict[str, Callable[..., Any]] = {}


@dataclass
class Communicator:
    """A group of ranks on NCCL. `pending`: works whose ends are not known yet, in order."""

    group: Any
    members: tuple[int, ...]
    free_s: float = 0.0
    pending: list[Work] = field(default_factory=list)


@dataclass
class _State:
    device: int | None = None
    communicators: dict[tuple[int, ...], Communicator] = field(default_factory=dict)
    # Of all communicators: members, kind and bytes of what this rank issued.
    issued: list[tuple[tuple[int, ...], str, int]] = field(default_factory=list)


state = _State()


class Work:
    """Messages or a collective under way."""

    def __init__(
        self,
        communicator: Communicator,
        handles: Sequence[Any],
        stamps: Callable[[], float],
        duration_s: float,
    ) -> None:
        self.communicator, self._handles, self._stamps = communicator, list(handles), stamps
        self._duration_s = duration_s
        self._results: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent: list[tuple[torch.Tensor, int]] = []
        self.end_s: float | None = None
        communicator.pending.append(self)
        if virtual.speeds.contention or virtual.speeds.contentions:
            self.settle()

    def receive(self, tensor: torch.Tensor, shadow: torch.Tensor) -> None:
        """Write into a tensor when the work is waited for; until then it is poison."""
        with torch.no_grad():
            self._results.append((tensor, shadow))

    def read(self, tensor: torch.Tensor) -> None:
        """Check that a tensor is not written to before the work is waited for."""
        self._sent.append((tensor, tensor._version))

    def settle(self) -> None:
        """Find out when the work ends, after all that were issued before it on its communicator."""
        while self.end_s is None:
            first = self.communicator.pending.pop(0)
            first._settle()

    def _settle(self) -> None:
        try:
            with _disable_current_modes():
                for handle in self._handles:
                    handle.wait()
                start_s = max(self._stamps(), self.communicator.free_s)
        except RuntimeError:
            # A peer is gone. NCCL's kernel spins until the communicator is aborted.
            start_s = math.inf
        self.end_s = self.communicator.free_s = start_s + self._duration_s
        if math.isfinite(self.end_s):
            virtual.busy_s.append((start_s, self.end_s))

    def wait(self, _timeout: Any = None) -> bool:
        """Let the current stream wait."""
        self.settle()
        for tensor, version in self._sent:
            if tensor._version != version:
                raise AssertionError("a tensor was written to while NCCL was sending it")
        self._sent.clear()
        with _disable_current_modes():
            for tensor, shadow in self._results:
                tensor.data.copy_(shadow)
        self._results.clear()
        stream = virtual.stream()
        stream.free_s = max(stream.free_s, self.end_s or 0.0)
        return True

    def is_completed(self) -> bool:
        """Return whether the work has ended on the device."""
        self.settle()
        return virtual.has_passed(self.end_s or 0.0)


def settle_all() -> None:
    """Find out when all works end that were issued, as a device that is synchronized with must."""
    for communicator in state.communicators.values():
        for work in list(communicator.pending):
            work.settle()
        stream = virtual.stream()
        stream.free_s = max(stream.free_s, communicator.free_s)


def _check_thread() -> int:
    current = virtual.current
    if current is None:
        raise AssertionError("a thread communicates that has set no GPU: it would take the first one")
    return current


def _connect(group: Any, members: tuple[int, ...]) -> Communicator:
    """Make the communicator of a group: all of its ranks must be here."""
    if members in state.communicators:
        return state.communicators[members]
    if state.communicators and os.environ.get(ORDER_VARIABLE) != "1":
        raise AssertionError(
            f"several communicators without {ORDER_VARIABLE}=1: they may wait for each other for ever"
        )
    index = state.device if state.device is not None else (virtual.current or 0)
    places: list[Any] = [None] * len(members)
    with _disable_current_modes():
        _torch["all_gather_object"](places, (_host(), index), group=group)
    for rank, place in enumerate(places):
        if place in places[:rank]:
            raise RuntimeError(
                f"Duplicate GPU detected : rank {rank} and rank {places.index(place)} both on {place[1]}"
            )
    state.communicators[members] = Communicator(group, members)
    return state.communicators[members]


def _host() -> str:
    # Agents of torchrun on one machine stand for hosts.
    return f"{os.environ.get('GROUP_RANK', '')}/{socket.gethostname()}"


def _communicator(group: Any) -> Communicator:
    _check_thread()
    chosen = dist.group.WORLD if group is None else group
    return _connect(chosen, tuple(dist.get_process_group_ranks(chosen)))


def _check_tensor(tensor: torch.Tensor) -> None:
    if gpu_of(tensor) is None:
        raise RuntimeError("No backend type associated with device type cpu")
    if state.device is not None and gpu_of(tensor) != state.device:
        raise RuntimeError(
            f"Tensor found on device cuda:{gpu_of(tensor)} but backend constrained to cuda:{state.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")


def _ready_s() -> float:
    return max(virtual.now_s, virtual.stream().free_s)


def _shadow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().data.clone()


def _is_carried(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether a message's data travel, or its time alone."""
    return all(tensor.numel() <= virtual.speeds.most_computed for tensor in tensors)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.data.fill_(math.nan)
    else:
        tensor.data.fill_(85)


def _collective(name: str, outputs: Sequence[int], size_index: int) -> Callable[..., Any]:
    """Return what stands in for a collective whose arguments at `outputs` are written to.

    `size_index`: the argument whose bytes are those of the collective.
    """

    def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if not is_nccl():
            return _torch[name](*args, group=group, async_op=async_op, **kwargs)
        communicator = _communicator(group)
        tensors = {index: item for index, item in enumerate(args) if isinstance(item, torch.Tensor)}
        for tensor in tensors.values():
            _check_tensor(tensor)
        virtual.now_s += virtual.speeds.host_s
        ready_s = _ready_s()
        carried = _is_carried(tensors.values())
        with _disable_current_modes():
            shadows = {index: _shadow(tensor) for index, tensor in tensors.items()} if carried else {}
            stamps = [torch.zeros(1, dtype=torch.float64) for _ in communicator.members]
            handles = [
                _torch["all_gather"](
                    stamps,
                    torch.tensor([ready_s], dtype=torch.float64),
                    group=communicator.group,
                    async_op=True,
                )
            ]
            if carried:
                handles.append(
                    _torch[name](
                        *(shadows.get(index, item) for index, item in enumerate(args)),
                        group=communicator.group,
                        async_op=True,
                        **kwargs,
                    )
                )
        duration_s = _duration_s(tensors[size_index].nbytes)
        work = Work(
            communicator, handles, lambda: max(float(stamp.numpy()[0]) for stamp in stamps), duration_s
        )
        state.issued.append((communicator.members, name, tensors[size_index].nbytes))
        for index, tensor in tensors.items():
            if index not in outputs:
                work.read(tensor)
            elif carried:
                with _disable_current_modes():
                    _poison(tensor)
                work.receive(tensor, shadows[index])
        if async_op:
            return work
        work.wait()
        return None

    return call


def _duration_s(size_bytes: float) -> float:
    return virtual.speeds.message_s + size_bytes / virtual.speeds.message_bytes_per_s


def _batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[Any]:
    if not is_nccl():
        works: list[Any] = _torch["batch_isend_irecv"](operations)
        return works
    communicator = _communicator(operations[0].group)
    virtual.now_s += virtual.speeds.host_s
    ready_s, handles = _ready_s(), []
    received: list[tuple[torch.Tensor, torch.Tensor]] = []
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    stamps: list[torch.Tensor] = []
    for operation in operations:
        tensor, peer = operation.tensor, operation.peer
        _check_tensor(tensor)
        receives = operation.op.__name__ == "irecv"
        shadow, transfer = tensor, _torch["irecv" if receives else "isend"]
        with _disable_current_modes():
            stamp = torch.tensor([ready_s], dtype=torch.float64)
            handles.append(transfer(stamp, peer, group=communicator.group, tag=_STAMP_TAG))
            if _is_carried([tensor]):
                shadow = torch.empty_like(tensor.data) if receives else _shadow(tensor)
                handles.append(transfer(shadow, peer, group=communicator.group))
                if receives:
                    _poison(tensor)
        stamps.append(stamp)
        (received if receives else sent).append((tensor, shadow))
    size = max(sum(tensor.nbytes for tensor, _ in one_way) for one_way in (received, sent))
    work = Work(
        communicator, handles, lambda: max(float(stamp.numpy()[0]) for stamp in stamps), _duration_s(size)
    )
    state.issued.append((tuple(sorted({dist.get_rank(), *(o.peer for o in operations)})), "messages", size))
    for tensor, shadow in received:
        if shadow is not tensor:
            work.receive(tensor, shadow)
    for tensor, _ in sent:
        work.read(tensor)
    return [work]


def _objects(name: str) -> Callable[..., Any]:
    """Return what stands in for a collective of objects, which NCCL carries on the thread's current GPU."""

    def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        if not is_nccl():
            return _torch[name](*args, group=group, **kwargs)
        communicator = _communicator(group)
        settle_all()
        virtual.stream().synchronize()
        with _disable_current_modes():
            return _torch[name](*args, group=communicator.group, **kwargs)

    return call


def is_nccl() -> bool:
    """Return whether the process group stands for one of NCCL's."""
    return bool(state.communicators) or state.device is not None or _lazy[0]


_lazy = [False]


def _init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
    if backend != "nccl":
        _torch["init_process_group"](backend, *args, **kwargs)
        return
    with _disable_current_modes():
        _torch["init_process_group"]("gloo", *args, **kwargs)
    _lazy[0] = True
    if device_id is not None:
        # Connected at once; else by the first collective.
        state.device = device_id.index
        _connect(dist.group.WORLD, tuple(range(dist.get_world_size())))


def _new_group(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        group = _torch["new_group"](ranks, *args, **kwargs)
    if state.device is not None and ranks is not None and dist.get_rank() in ranks:
        _connect(group, tuple(ranks))
    return group


def _destroy_process_group(group: Any = None) -> None:
    if is_nccl() and group is not None:
        state.communicators.pop(tuple(dist.get_process_group_ranks(group)), None)
    elif is_nccl():
        state.communicators.clear()
        state.device, _lazy[0] = None, False
    _torch["destroy_process_group"](group)


def install() -> None:
    """Let this process's `torch.distributed` have NCCL; for the rest of its life."""
    virtual.settle = settle_all
    replacements = {
        "all_reduce": _collective("all_reduce", (0,), 0),
        "broadcast": _collective("broadcast", (0,), 0),
        "reduce": _collective("reduce", (0,), 0),
        "all_gather_into_tensor": _collective("all_gather_into_tensor", (0,), 0),
        "all_gather_single": _collective("all_gather_single", (0,), 0),
        "reduce_scatter_tensor": _collective("reduce_scatter_tensor", (0,), 1),
        "reduce_scatter_single": _collective("reduce_scatter_single", (0,), 1),
        "all_to_all_single": _collective("all_to_all_single", (0,), 1),
        "batch_isend_irecv": _batch_isend_irecv,
        "gather_object": _objects("gather_object"),
        "all_gather_object": _objects("all_gather_object"),
        "broadcast_object_list": _objects("broadcast_object_list"),
        "init_process_group": _init_process_group,
        "new_group": _new_group,
        "destroy_process_group": _destroy_process_group,
        "get_backend": lambda group=None: "nccl" if is_nccl() else _torch["get_backend"](group),
    }
    for name in (*replacements, "all_gather", "isend", "irecv"):
        if hasattr(dist, name):
            _torch[name] = getattr(dist, name)
    for name, item in replacements.items():
        if name in _torch:
            setattr(dist, name, item)
