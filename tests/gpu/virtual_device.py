"""GPUs that are not there: tensors on the CPU that say they are on a GPU, and clocks that nobody waits for.

A process in which `install` was called sees GPUs through `torch.cuda`. Every operator on their tensors computes at
once, on the CPU; its time passes on virtual clocks alone. The host takes `Speeds.host_s` to issue a kernel, which
starts when it is issued and its stream is free, and takes `Speeds.kernel_s` and what its bytes take. The queue of a
device holds so many kernels; a host that issues more waits. `time.perf_counter` is the host's clock.

What a GPU refuses is refused: tensors of several devices in one operator, and operands that its kernels do not take
(`tests.gpu.preconditions`). A thread computes on its own current GPU, which it must have set.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.kernels import CUDA_ONLY
from tests.gpu.preconditions import check_preconditions

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
        self._streams: dict[int, Stream] = {}
        self._of_thread = threading.local()
        self._allocated: Counter[int] = Counter()
        # By GPU: addresses and bytes of what its cache holds, the latest last.
        # The GPU of the last operator's tensors.
        self.last: int | None = None
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
            self._of_thread.mode = _Kernels()
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


# Their results are the host's.
_READ_BY_HOST = frozenset(
    {
        *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"),
        *("unique_consecutive", "_unique2", "unique_dim", "bincount", "repeat_interleave"),
    }
)
# They run no kernel.
_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh"})


# Their indexes may be on the host.
_ANY_INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class _Kernels(TorchDispatchMode):
    """Executes operators on the CPU, and issues a kernel for each on the GPU of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.rpartition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {gpu_of(tensor) for tensor in tensors if tensor.dim() or gpu_of(tensor) is not None}
        target, indexes = kwargs.get("device"), places - {None}
        if places:
            virtual.last = next(iter(indexes), None)
        if target is not None and target.type == "cpu" and torch._C._current_graph_task_id() != -1:
            # Made by a formula of autograd's, in C++, which takes the tensors' device from themselves.
            index = virtual.last
        elif target is not None:
            kwargs["device"] = torch.device("cpu") if target.type == "cuda" else target
            index = virtual._index(target) if target.type == "cuda" else None
        else:
            index = next(iter(indexes), None)
        if name in ("copy_", "_to_copy", "_foreach_copy_"):
            index = self._copy(
                name, tensors, index, non_blocking=bool(kwargs.get("non_blocking", args[2:3] == (True,)))
            )
        elif len(places) > 1 and indexes and name not in _ANY_INDEXES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {sorted(map(str, places))} in {name}"
            )
        if indexes:
            check_preconditions(name, func, args, kwargs)
        if index is not None and sum(tensor.numel() for tensor in tensors) > virtual.speeds.most_computed:
            result = _without_computing(func, args, kwargs)
        else:
            result = CUDA_ONLY.get(name, func)(*args, **kwargs)
        if index is None:
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            virtual.keep(tensor, index)
        if not (func.is_view or name in _NO_KERNEL or func.namespace in ("c10d", "prim")):
            seconds = virtual.speeds.names.get(name)
            if seconds is None:
                seconds = virtual.speeds.kernel_s
                if virtual.speeds.missed_bytes_per_s:
                    missed = virtual.missed_bytes(index, tensors, made)
                    seconds += missed / virtual.speeds.missed_bytes_per_s
                if virtual.speeds.memory_bytes_per_s:
                    moved = sum(tensor.nbytes for tensor in (*tensors, *made))
                    seconds += moved / virtual.speeds.memory_bytes_per_s
            virtual.launch(index, name, seconds)
        if name in _READ_BY_HOST or (name in _ANY_INDEXES and _has_mask(args[1:2])):
            virtual.wait_for_host(index, name)
        return result

    def _copy(
        self, name: str, tensors: list[torch.Tensor], target: int | None, *, non_blocking: bool
    ) -> int | None:
        """Return on which GPU a copy's result is; the host waits for a copy from its own memory that is not pinned."""
        if name == "_to_copy":
            source = gpu_of(tensors[0])
            made = target
        else:
            made, source = gpu_of(tensors[0]), gpu_of(tensors[-1])
        pinned = is_pinned(tensors[-1]) and tensors[-1].is_contiguous()
        if source != made and not (non_blocking and (source is not None or pinned)):
            virtual.wait_for_host(
                made if made is not None else source or 0, f"{name} between host and device"
            )
        return made


def _has_mask(indexes: Any) -> bool:
    """Return whether positions are those where a mask is true, so that the host must count them."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool for leaf in tree_leaves(indexes))


def _without_computing(func: Any, args: Any, kwargs: Any) -> Any:
    """Return tensors such as an operator makes, with any numbers."""
    if func.is_view:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        return kwargs.get("out", args[0]) if func._schema.returns else None

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)

    kwargs = {
        **tree_map(described, kwargs),
        **({"device": torch.device("meta")} if "device" in kwargs else {}),
    }
    try:
        return tree_map(made, func(*tree_map(described, args), **kwargs))
    except NotImplementedError:
        return func(*args, **kwargs)


_base_device = torch._C.TensorBase.device
_host_sleep = time.sleep
_Generator = torch.Generator
_base_to, _base_tolist, _tensor = torch.Tensor.to, torch.Tensor.tolist, torch.tensor


def _device(tensor: torch.Tensor) -> torch.device:
    index = gpu_of(tensor)
    return _base_device.__get__(tensor) if index is None else torch.device("cuda", index)


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `Tensor.to`, which would find that a tensor of a virtual GPU is on the CPU already."""
    wanted = kwargs.get("device", args[0] if args else None)
    if isinstance(wanted, torch.Tensor):
        return _to(tensor, wanted.device, wanted.dtype, *args[1:])
    own = gpu_of(tensor)
    if not isinstance(wanted, str | int | torch.device):
        return _base_to(tensor, *args, **kwargs)
    device = torch.device("cuda", wanted) if isinstance(wanted, int) else torch.device(wanted)
    target = virtual._index(device) if device.type == "cuda" else None
    if device.type == "meta" or (own is None and target is None):
        return _base_to(tensor, *args, **kwargs)
    dtype = kwargs.get("dtype") or next(
        (item for item in args if isinstance(item, torch.dtype)), tensor.dtype
    )
    if own == target and dtype == tensor.dtype and not kwargs.get("copy"):
        return tensor
    result: torch.Tensor = torch.ops.aten._to_copy(
        tensor, dtype=dtype, device=device, non_blocking=kwargs.get("non_blocking", False)
    )
    return result


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return _to(tensor, "cpu")


def _tolist(tensor: torch.Tensor) -> Any:
    index = gpu_of(tensor)
    if index is not None:
        virtual.wait_for_host(index, "tolist")
    return _base_tolist(tensor)


def _pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.clone()
    storage: Any = pinned.untyped_storage()
    storage.pinned = True
    return pinned


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of the host's is in memory that a GPU reads by itself."""
    return getattr(tensor.untyped_storage(), "pinned", False)


def _made(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
    made = _tensor(data, **kwargs)
    return made if device is None or torch.device(device).type != "cuda" else made.to(device)


class _VirtualGenerator(_Generator):
    """As torch's, which has none of a GPU that is not there."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator("cpu" if "cuda" in str(device) else device)


def _properties(device: Any = None) -> SimpleNamespace:
    index = virtual._index(device)
    return SimpleNamespace(
        name=NAME,
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        L2_cache_size=virtual.speeds.cache_bytes,
        major=9,
        minor=0,
        uuid=f"virtual-{index}",
    )


def _sleep(cycles: int) -> None:
    virtual.launch(virtual._index(None), "_sleep", cycles / CLOCK_HZ)


def _sleep_of_host(seconds: float) -> None:
    virtual.now_s += seconds
    _host_sleep(seconds)


def _synchronize(device: Any = None) -> None:
    virtual.settle()
    virtual.stream(virtual._index(device)).synchronize()


def _perf_counter() -> float:
    return virtual.now_s


def _perf_counter_ns() -> int:
    return round(virtual.now_s * 1e9)


class _Nvml(ModuleType):
    """The driver's library, as far as Soapstone asks it."""

    NVML_CLOCK_SM = 1
    NVMLError = RuntimeError

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        """Nothing."""

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:  # noqa: N802
        """Return a GPU's index."""
        return int(name.rpartition("-")[2])

    def nvmlDeviceGetClockInfo(self, handle: int, _clock: int) -> float:  # noqa: N802
        """Return a GPU's clock in MHz: a low one where it has nothing to do."""
        busy = virtual.stream(handle).free_s > virtual.now_s
        return (CLOCK_HZ if busy else IDLE_CLOCK_HZ) / 1e6

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: int) -> int:  # noqa: N802
        """Return that it is idle, which slows nothing."""
        return 1


def _replacements() -> list[tuple[Any, str, Any]]:
    """Return what stands in for what: object, name and replacement."""
    of_cuda = {
        "_lazy_init": lambda: None,
        "_sleep": _sleep,
        "is_available": lambda: True,
        "is_initialized": lambda: virtual.current is not None,
        "device_count": lambda: virtual.speeds.count,
        "current_device": lambda: virtual._index(None),
        "set_device": lambda device: virtual.set_current(virtual._index(device)),
        "get_device_properties": _properties,
        "get_device_name": lambda _device=None: NAME,
        "get_device_capability": lambda _device=None: (9, 0),
        "Stream": Stream,
        "stream": virtual.on,
        "current_stream": lambda device=None: virtual.stream(virtual._index(device)),
        "synchronize": _synchronize,
        "empty_cache": lambda: None,
        "memory_allocated": virtual.allocated,
        "max_memory_allocated": virtual.peak,
        "reset_peak_memory_stats": virtual.reset_peak,
        "mem_get_info": lambda device=None: (MEMORY_BYTES - virtual.allocated(device), MEMORY_BYTES),
        "Event": Event,
        # Nothing is drawn on a GPU: Soapstone counts (`profiler.operators.counter_rng`).
        # Operators draw from the CPU's generator, whose state moves on with each draw.
        "get_rng_state": lambda _device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _device=None: torch.set_rng_state(state),
        "manual_seed_all": lambda _seed: None,
    }
    of_tensors = {
        "device": property(_device),
        "is_cuda": property(lambda tensor: gpu_of(tensor) is not None),
        "to": _to,
        "cpu": _cpu,
        "tolist": _tolist,
        "pin_memory": _pin_memory,
        "is_pinned": is_pinned,
    }
    return [
        *((torch.cuda, name, item) for name, item in of_cuda.items()),
        *((torch.Tensor, name, item) for name, item in of_tensors.items()),
        (torch, "tensor", _made),
        (torch, "Generator", _VirtualGenerator),
        # torch.export asks it, where there are GPUs.
        (torch._C, "_cuda_getDevice", lambda: virtual._index(None)),
        (time, "sleep", _sleep_of_host),
        (time, "perf_counter", _perf_counter),
        (time, "perf_counter_ns", _perf_counter_ns),
    ]


def install(speeds: Speeds | None = None) -> Callable[[], None]:
    """Let this process see GPUs that are not there; return what undoes it."""
    virtual.__init__()  # type: ignore[misc]
    virtual.speeds = Speeds.of_environment() if speeds is None else speeds
    before = []
    for owner, name, item in _replacements():
        before.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, item)
    sys.modules["pynvml"] = _Nvml("pynvml")

    def undo() -> None:
        virtual.forget_thread()
        del sys.modules["pynvml"]
        for owner, name, item in reversed(before):
            if item is None:
                delattr(owner, name)
            else:
                setattr(owner, name, item)

    return undo


@contextmanager
def virtual_gpus(speeds: Speeds | None = None) -> Iterator[Virtual]:
    """See GPUs that are not there while the context lasts, in this process and in those that it starts."""
    undo = install(speeds)
    try:
        yield virtual
    finally:
        undo()
