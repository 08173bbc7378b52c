"""The measured peak memory of a step on a rank.

On a GPU it is the peak of torch's allocator. On a CPU it is computed from the tensors alive before the step, and every
allocation and release of torch's CPU allocator during it, as its profiler reports them. Beside it is the peak of the
whole process, with the interpreter, torch itself, the communication library's buffers, and freed memory that the
process keeps (`profiler.pinning.keep_freed_memory`).
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

# The name of an allocation or a release in torch's profiler.
_MEMORY_EVENT = "[memory]"
# Other classes wrap these, or are tensors without data.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
# Above all levels of torch's profiler, kineto.
_SILENT = "99"


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """The measured peak memory of a rank's step, in bytes.

    tensor_bytes: of the tensors alive. On CUDA, `torch.cuda.max_memory_allocated`.
    process_bytes: of the whole process since its start.
    """

    tensor_bytes: int
    process_bytes: int


def measure_peak(step: Callable[[], None], device: torch.device) -> MeasuredPeak:
    """Execute a step and return its peak memory.

    Tensors of the last step that this one replaces must be dropped before: the release of a tensor from before the step
    is not reported.
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return MeasuredPeak(torch.cuda.max_memory_allocated(device), process_peak_bytes())
    return MeasuredPeak(_cpu_peak_bytes(step), process_peak_bytes())


def begin_profiling() -> None:
    """Use torch's profiler once, in the main thread: first used in another one, its library writes an error line."""
    with _profile():
        pass


def _profile() -> torch.autograd.profiler.profile:
    # Its library writes lines to standard error otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    # Not torch.profiler: it imports torch's compiler, a second of every rank's.
    return torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)


def _cpu_peak_bytes(step: Callable[[], None]) -> int:
    before = bytes_alive(candidate for candidate in gc.get_objects() if type(candidate) in _TENSORS)
    with _profile() as profiled:
        step()
    results = profiled.kineto_results
    if results is None:
        raise RuntimeError("torch's profiler returned no events")
    changes: list[tuple[int, int, int]] = sorted(
        (event.start_ns(), order, event.nbytes())
        for order, event in enumerate(results.events())
        if event.name() == _MEMORY_EVENT
    )
    return before + max(accumulate((size for _, _, size in changes), initial=0))


def bytes_alive(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors on the CPU; views of one storage count once."""
    sizes = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def process_peak_bytes() -> int:
    """Return the peak resident size of this process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
