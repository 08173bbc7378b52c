"""Shows virtual GPUs to this process: `torch.cuda`, tensors that say they are on a GPU, NVML, and the host's clock.

A process in which `install` was called sees GPUs; `time.perf_counter` is the clock of `tests.gpu.virtual_device`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.gpu.virtual_device import (
    CLOCK_HZ,
    IDLE_CLOCK_HZ,
    MEMORY_BYTES,
    NAME,
    Event,
    Speeds,
    Stream,
    Virtual,
    gpu_of,
    is_pinned,
    virtual,
)
from tests.gpu.virtual_kernels import Kernels

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
    virtual.kernels = Kernels
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
