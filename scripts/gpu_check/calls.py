"""Calls of the zoo's networks on a GPU: their results beside a CPU's in float64, their times beside other clocks'."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from scripts.gpu_check.report import PieceResult, Row, add_row, judged

if TYPE_CHECKING:
    import torch

    from graph.calls import LocalCall
    from graph.operators import OperatorGraph
    from profiler.devices import PhysicalDevice

# Largest difference, as a share of the largest number of a result: float32, with sums in another order.
TOLERANCE = 1e-3
TIMED_CALLS = 100
# Two clocks of a call longer than this must agree so far.
LEAST_TIMED_S, TIMES_DIFFER = 20e-6, 0.05
REPLAYED = 20
DROPPED = (8, 16, 512, 512)


def kinds_of_calls(graphs: Iterable[OperatorGraph]) -> list[LocalCall]:
    """Return the least call of each kind that the networks' parts on two devices have."""
    from search.cost.calls_to_profile import calls_to_profile

    kinds: dict[object, LocalCall] = {}
    for graph in graphs:
        for call in calls_to_profile(graph, 2):
            operands = tuple((spec.dtype, len(spec.shape)) for spec in call.inputs)
            kind = (call.target, operands, call.gradients)
            kinds[kind] = min(kinds.get(kind, call), call, key=_elements)
    return [kinds[kind] for kind in sorted(kinds, key=repr)]


def _elements(call: LocalCall) -> int:
    return sum(spec.elements for spec in (*call.inputs, *call.outputs))


def _graphs(names: Sequence[str]) -> list[OperatorGraph]:
    from app.services.models.models import import_graph, requested_model

    models = [requested_model(name, "small", None, "float32") for name in names]
    return [import_graph(model, batch_norm="synchronized").graph for model in models]


def own_device(gpu: int) -> PhysicalDevice:
    from profiler.devices import select_devices

    (device,) = select_devices("cuda", (gpu,))
    device.occupy()
    return device


def check(gpu: int, *, quick: bool) -> PieceResult:
    """Execute every kind of call of the zoo, forward and backward, and compare with a CPU in float64."""
    from app.services.models.models import known_models

    device = own_device(gpu)
    rows: list[Row] = []
    for call in kinds_of_calls(_graphs(("mlp",) if quick else list(known_models()))):
        row: Row = {"call": call.target}
        try:
            row["off"] = _difference(call, device.torch_name)
            row["error"] = "" if row["off"] <= TOLERANCE else f"{call.target}: off by {row['off']:.2g}"
        except Exception as error:  # an operator may fail in any way that its implementation knows
            row["error"] = f"{call.target}: {type(error).__name__}: {error}"[:200]
        add_row(rows, row)
    return judged(rows, "kinds of calls give a CPU's results in float64")


def _difference(call: LocalCall, name: str) -> float:
    """Return the largest difference of results and gradients, as a share of the largest number of each."""

    from profiler.operators import random_inputs

    drawn = random_inputs(call, "cpu", seed=1)
    own = _results(call, [tensor.detach().to(name) for tensor in drawn], drawn, name)
    exact = [tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in drawn]
    worst = 0.0
    for mine, right in zip(own, _results(call, exact, drawn, "cpu"), strict=True):
        right = right.double()
        off = (mine.cpu().double() - right).abs().max().item() if mine.numel() else 0.0
        worst = max(worst, off / max(right.abs().max().item() if right.numel() else 0.0, 1.0))
    return worst if math.isfinite(worst) else math.inf


def _results(
    call: LocalCall, values: Sequence[torch.Tensor], drawn: Sequence[torch.Tensor], name: str
) -> list[torch.Tensor]:
    import torch

    from profiler.operators import ExecutionContext, compile_call

    inputs = [value.requires_grad_(like.requires_grad) for value, like in zip(values, drawn, strict=True)]
    made = list(compile_call(call)(inputs, ExecutionContext(device=torch.device(name))))
    results = [tensor.detach() for tensor in made if tensor.is_floating_point()]
    outputs = [tensor for tensor in made if tensor.requires_grad]
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    if call.has_backward and outputs and needed:
        ones = [torch.ones_like(tensor) for tensor in outputs]
        gradients = torch.autograd.grad(outputs, needed, ones, allow_unused=True)
        results += [gradient for gradient in gradients if gradient is not None]
    return results


def check_times(gpu: int, *, quick: bool) -> PieceResult:
    """Measure a hundred calls, and compare with the sums of CUPTI's kernels and with a replayed graph."""
    from profiler.measure import Measurement, measure_call

    device = own_device(gpu)
    calls = kinds_of_calls(_graphs(("mlp",) if quick else ("resnet101", "gpt2", "nmt", "inception")))
    rows: list[Row] = []
    for call in sorted(calls, key=_elements, reverse=True)[: 5 if quick else TIMED_CALLS]:
        forward = measure_call(call, device)[0]
        if not isinstance(forward, Measurement):
            add_row(rows, {"call": call.target, "error": forward.reason})
            continue
        row: Row = {
            "call": call.target,
            "cold_s": forward.median_s,
            "warm_s": forward.warm_s,
            "host_s": forward.launch_s,
            "clock_hz": forward.clock_hz,
            "replayed_s": _replayed_s(call, device.torch_name),
            "kernels_s": _kernels_s(call, device.torch_name),
        }
        others = [row[key] for key in ("replayed_s", "kernels_s") if row[key]]
        warm = forward.warm_s or forward.median_s
        if others and warm > LEAST_TIMED_S:
            row["off"] = max(warm / other - 1 for other in others)
        add_row(rows, row)
    off = [abs(row["off"]) for row in rows if "off" in row]
    if not off:
        return PieceResult(
            passed=None, summary="neither CUPTI nor a graph timed a call that is long enough", rows=rows
        )
    median = statistics.median(off)
    summary = f"{len(off)} calls compared, median difference {median:.1%}, largest {max(off):.1%}"
    return PieceResult(median <= TIMES_DIFFER, summary, rows)


def _replayed_s(call: LocalCall, name: str) -> float | None:
    """Return the seconds of a call in a graph of many, replayed; None where it cannot be captured."""
    import torch

    try:
        execute, graph = _executed(call, name), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPLAYED):
                execute()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / REPLAYED
    except (RuntimeError, AttributeError):
        return None


def _kernels_s(call: LocalCall, name: str) -> float | None:
    """Return the sum of a call's kernels, in seconds, as CUPTI reports them; None without it."""
    import torch

    try:
        execute = _executed(call, name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(REPLAYED):
                execute()
            torch.cuda.synchronize()
        total_us = sum(event.self_device_time_total for event in profiled.key_averages())
        return total_us * 1e-6 / REPLAYED or None
    except (RuntimeError, AttributeError, AssertionError):
        return None


def _executed(call: LocalCall, name: str) -> Callable[[], object]:
    """Return the execution of a call on random inputs, which has been done three times already."""
    import torch

    from profiler.operators import ExecutionContext, compile_call, random_inputs

    inputs, execute = random_inputs(call, name, seed=1), compile_call(call)
    context = ExecutionContext(device=torch.device(name))
    for _ in range(3):
        execute(inputs, context)
    return lambda: execute(inputs, context)


def check_memory(gpu: int, *, quick: bool) -> PieceResult:
    """Draw a large mask of dropout: memory beside it, and what of the GPU's memory is no tensor's."""
    import torch

    from graph.intervals import full_region
    from profiler.kinds import RESERVED_BYTES
    from profiler.operators.counter_rng import keep_mask

    device = torch.device(own_device(gpu).torch_name)
    shape = DROPPED[1:] if quick else DROPPED
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    mask = keep_mask(full_region(shape), shape, 0.1, (0, 0, 0), device)
    torch.cuda.synchronize(device)
    beside = torch.cuda.max_memory_allocated(device) - before - mask.nbytes
    torch.ones(4096, 4096, device=device) @ torch.ones(4096, 4096, device=device)
    free, total = torch.cuda.mem_get_info(device)
    besides = total - free - torch.cuda.memory_reserved(device)
    row = {
        "mask": mask.nbytes,
        "beside_mask": beside,
        "besides_tensors": besides,
        "kept_free": RESERVED_BYTES,
    }
    summary = (
        f"a mask of {mask.nbytes / 2**20:.0f} MiB takes {beside / 2**20:.0f} MiB beside itself; {besides / 2**20:.0f} "
        f"MiB of the GPU are no tensor's (contexts of all its processes), {RESERVED_BYTES / 2**20:.0f} are kept free"
    )
    return PieceResult(beside <= mask.nbytes + 2**28 and besides <= RESERVED_BYTES, summary, [row])
