"""GPUs that are not there: their clocks, streams, events and memory. `virtual_torch` shows them to torch.

The host takes `Speeds.host_s` to issue a kernel, which starts when it is issued and its stream is free, and takes
`Speeds.kernel_s` and what its bytes take, on virtual clocks that nobody waits for. The queue of a device holds so many
kernels; a host that issues more waits. A thread computes on its own current GPU, which it must have set.
"""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VARIABLE = "VIRTUAL_GPUS"
NAME = "NVIDIA H100 80GB HBM3"
MEMORY_BYTES = 80 * 2**30
# Launches that a CUDA stream holds before the host must wait.
QUEUE_LENGTH = 1024
CLOCK_HZ, IDLE_CLOCK_HZ = 1.98e9, 345e6
# The host's time of one look at an event.
QUERY_S = 1e-6


@dataclass
class Speeds:
    """The seconds that things take, as a device is told to take them.

    event_s: of the host to record an event.
    kernel_s: of each kernel, beside `memory_bytes_per_s` (0: bytes take no time). names: of single operators, instead.
    message_s, message_bytes_per_s: of a message, or of a collective of so many bytes.
    contention: the share of its speed that a kernel loses while this GPU communicates. contentions: of single
        operators, instead.
    missed_bytes_per_s: at which operands are read, beside the rest, that are not in the `cache_bytes` that were read or
        written last (0: at once).
    most_computed: operators on more elements give any numbers, at once, and messages of more carry none: for tests of
        times.
    """

    count: int = 8
    host_s: float = 30e-6
    event_s: float = 0.0
    kernel_s: float = 5e-6
    memory_bytes_per_s: float = 0.0
    names: dict[str, float] = field(default_factory=dict)
    message_s: float = 20e-6
    message_bytes_per_s: float = 100e9
    contention: float = 0.0
    contentions: dict[str, float] = field(default_factory=dict)
    most_computed: float = float("inf")
    cache_bytes: int = 50 * 2**20
    missed_bytes_per_s: float = 0.0

    @classmethod
    def of_environment(cls) -> Speeds:
        """Return the speeds in the file that the environment names, else the default ones."""
        file = Path(os.environ.get(VARIABLE, ""))
        return cls(**json.loads(file.read_text())) if file.is_file() else cls()

    def write(self, file: Path) -> None:
        """Write the speeds into the file that the environment of processes names."""
        file.write_text(json.dumps(asdict(self)))


class Stream:
    """Work in order on one GPU: `free_s` is when the last of it ends."""

    def __init__(self, device: Any = None) -> None:
        self.device_index = virtual._index(device)
        self.device = torch.device("cuda", self.device_index)
        self.free_s = 0.0
        self.ends_s: deque[float] = deque()

    def wait_event(self, event: Event) -> None:
        """Let later work wait for an event."""
        self.free_s = max(self.free_s, event.at_s)

    def wait_stream(self, other: Stream) -> None:
        """Let later work wait for the work of another stream so far."""
        self.free_s = max(self.free_s, other.free_s)

    def synchronize(self) -> None:
        """Let the host wait."""
        virtual.wait_until(self.free_s)

    def query(self) -> bool:
        """Return whether all work is done."""
        return virtual.has_passed(self.free_s)


class Event:
    """A mark in a stream: it fires when the work before is done, and not before it is recorded."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the event behind all work of a stream."""
        chosen = virtual.stream() if stream is None else stream
        virtual.now_s += virtual.speeds.event_s
        self.at_s = max(virtual.now_s, chosen.free_s)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for the event."""
        (virtual.stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        """Return whether the event has fired."""
        return virtual.has_passed(self.at_s)

    def synchronize(self) -> None:
        """Let the host wait."""
        virtual.wait_until(self.at_s)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds until another event."""
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if max(self.at_s, end.at_s) > virtual.now_s:
            raise RuntimeError("CUDA error: device not ready")
        return (end.at_s - self.at_s) * 1e3


class Virtual:
    """The host's clock and the GPUs of this process."""

    def __init__(self) -> None:
        self.speeds = Speeds()
        self.now_s = 0.0
        self.launches: Counter[str] = Counter()
        self.host_waits: Counter[str] = Counter()
        # While a GPU communicates: (start, end), in order.
        self.busy_s: list[tuple[float, float]] = []
        # Called before a host waits for a GPU, for works that are still to be priced.
        self.settle: Callable[[], None] = lambda: None
        # Executes the operators of a thread that has set its GPU.
        self.kernels: Callable[[], TorchDispatchMode] = TorchDispatchMode
        self._streams: dict[int, Stream] = {}
        self._of_thread = threading.local()
        self._allocated: Counter[int] = Counter()
        # The GPU of the last operator's tensors.
        self.last: int | None = None
        # By GPU: addresses and bytes of what its cache holds, the latest last.
        self._cached: dict[int, OrderedDict[int, int]] = {}
        self._peaks: Counter[int] = Counter()

    # ---- the host

    def wait_until(self, moment_s: float) -> None:
        """Let the host's clock go on to a moment, if it has not passed."""
        if math.isinf(moment_s):
            raise AssertionError("the host waits for ever, for a GPU that waits for a peer that is gone")
        self.now_s = max(self.now_s, moment_s)

    def has_passed(self, moment_s: float) -> bool:
        """Return whether a moment has passed, and let a little time go by where it has not."""
        if self.now_s >= moment_s:
            return True
        self.now_s += QUERY_S
        return False

    # ---- the current device of a thread

    @property
    def current(self) -> int | None:
        """The GPU that this thread has set; None: CUDA would take the first one."""
        return getattr(self._of_thread, "index", None)

    def set_current(self, index: int) -> None:
        """Let this thread compute on a GPU from now on."""
        if not 0 <= index < self.speeds.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        if self.current is None:
            if VARIABLE in os.environ:
                # Of a server's child: the file may be newer than the server.
                self.speeds = Speeds.of_environment()
            self._of_thread.mode = self.kernels()
            self._of_thread.mode.__enter__()
        self._of_thread.index = index

    def forget_thread(self) -> None:
        """Undo `set_current`."""
        if self.current is not None:
            self._of_thread.mode.__exit__(None, None, None)
            self._of_thread.index = None

    # ---- GPUs

    def stream(self, index: int | None = None) -> Stream:
        """Return the stream of a GPU on which kernels run."""
        chosen = (self.current or 0) if index is None else index
        if chosen not in self._streams:
            self._streams[chosen] = Stream(chosen)
        return self._streams[chosen]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Let kernels run on another stream of a GPU while the context lasts."""
        before = self.stream(stream.device_index)
        self._streams[stream.device_index] = stream
        try:
            yield
        finally:
            self._streams[stream.device_index] = before

    def launch(self, index: int, name: str, seconds: float) -> None:
        """Issue a kernel: the host goes on at once."""
        stream = self.stream(index)
        self.now_s += self.speeds.host_s
        while stream.ends_s and stream.ends_s[0] <= self.now_s:
            stream.ends_s.popleft()
        if len(stream.ends_s) >= QUEUE_LENGTH:
            self.wait_until(stream.ends_s.popleft())
        start = max(self.now_s, stream.free_s)
        stream.free_s = self._end_s(start, seconds, self.speeds.contentions.get(name, self.speeds.contention))
        stream.ends_s.append(stream.free_s)
        self.launches[name] += 1

    def _end_s(self, start_s: float, seconds: float, lost: float) -> float:
        """Return when a kernel ends that starts at a moment: beside communication it loses a share of its speed."""
        moment, left = start_s, seconds
        for began, ended in self.busy_s if lost else ():
            if ended <= moment:
                continue
            if moment + left <= began:
                break
            left -= max(0.0, began - moment)
            moment = max(moment, began)
            done = (ended - moment) * (1 - lost)
            if left <= done:
                return moment + left / (1 - lost)
            left, moment = left - done, ended
        return moment + left

    def wait_for_host(self, index: int, name: str) -> None:
        """Let the host wait for all work of a GPU, as an operator does whose result the host reads."""
        self.host_waits[name] += 1
        self.stream(index).synchronize()

    def missed_bytes(self, index: int, read: list[torch.Tensor], written: list[torch.Tensor]) -> int:
        """Return how many bytes of what is read are not in a GPU's cache; the cache holds all of it then."""
        cached, missed = self._cached.setdefault(index, OrderedDict()), 0
        for tensor in (*read, *written):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in cached and any(tensor is other for other in read):
                missed += storage.nbytes()
            cached[address] = storage.nbytes()
            cached.move_to_end(address)
        while cached and sum(cached.values()) > self.speeds.cache_bytes:
            cached.popitem(last=False)
        return missed

    # ---- memory

    def keep(self, tensor: torch.Tensor, index: int) -> None:
        """Let a tensor's memory be a GPU's."""
        storage: Any = tensor.untyped_storage()
        if getattr(storage, "gpu", None) is not None or storage.device.type == "meta":
            return
        storage.gpu = index
        size = storage.nbytes()
        self._allocated[index] += size
        self._peaks[index] = max(self._peaks[index], self._allocated[index])
        weakref.finalize(storage, self._free, index, size)

    def _free(self, index: int, size: int) -> None:
        self._allocated[index] -= size

    def allocated(self, device: Any = None) -> int:
        """Return the bytes of the tensors of a GPU."""
        return self._allocated[self._index(device)]

    def peak(self, device: Any = None) -> int:
        """Return the most that there were since `reset_peak`."""
        return self._peaks[self._index(device)]

    def reset_peak(self, device: Any = None) -> None:
        """Count the peak from now on."""
        index = self._index(device)
        self._peaks[index] = self._allocated[index]

    def _index(self, device: Any) -> int:
        index = None if device is None else device if isinstance(device, int) else torch.device(device).index
        return (self.current or 0) if index is None else index


virtual = Virtual()


def gpu_of(tensor: torch.Tensor) -> int | None:
    """Return the GPU on which a tensor says it is."""
    if tensor.layout is not torch.strided:
        return None
    try:
        index: int | None = getattr(tensor.untyped_storage(), "gpu", None)
    except (NotImplementedError, RuntimeError):
        return None  # without a storage
    return index


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of the host's is in memory that a GPU reads by itself."""
    return getattr(tensor.untyped_storage(), "pinned", False)
