"""The memory that a step really takes, measured on a rank.

On a GPU it is what torch's allocator held at most. On a CPU it is the same thing by other means: the tensors that are
alive before the step, and every allocation and release of torch's CPU allocator during it, as its profiler reports
them. Beside it stands what the whole process has held at most; this includes the interpreter, torch itself, the
communication library's buffers, and freed memory that the process keeps (`profiler.pinning.keep_freed_memory`).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from profiler.timers import synchronize

# How torch's profiler calls an allocation or a release.
_MEMORY_EVENT = "[memory]"
# Other classes wrap these, or are tensors without data.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# Above all levels of torch's profiler, kineto.
_SILENT = "99"


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """What a rank's step takes, in bytes.

    tensor_bytes: the tensors alive at most. On CUDA, `torch.cuda.max_memory_allocated`.
    process_bytes: what the process has held of the machine's memory at most since it began.
    """

    tensor_bytes: int
    process_bytes: int


def measure_peak(step: Callable[[], None], device: torch.device) -> MeasuredPeak:
    """Do a step and return what it takes.

    What is alive before must be what a step finds: drop what the step before has left and the next one replaces, since
    the release of a tensor that was there before is not reported.
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return MeasuredPeak(torch.cuda.max_memory_allocated(device), process_peak_bytes())
    return MeasuredPeak(_cpu_peak_bytes(step), process_peak_bytes())


def _cpu_peak_bytes(step: Callable[[], None]) -> int:
    # Else its library writes lines to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    before = bytes_alive(one for one in gc.get_objects() if type(one) in _TENSORS)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        step()
    results = profiled.profiler.kineto_results if profiled.profiler is not None else None
    if results is None:
        raise RuntimeError("torch's profiler returned no events")
    changes: list[tuple[int, int, int]] = sorted(
        (event.start_ns(), place, event.nbytes())
        for place, event in enumerate(results.events())
        if event.name() == _MEMORY_EVENT
    )
    return before + max(accumulate((size for _, _, size in changes), initial=0))


def bytes_alive(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors on the CPU; those that share memory count once."""
    sizes = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def process_peak_bytes() -> int:
    """Return the largest resident size that this process has had."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
