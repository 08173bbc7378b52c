"""A GPU's clock over the first two seconds of work."""

from __future__ import annotations

import time

from scripts.gpu_check.calls import own_device
from scripts.gpu_check.report import PieceResult, Row

WATCHED_S, EVERY_S = 2.0, 0.01
MATRIX_SIZE = 4096
# The clock is steady from where it stays so near its last value.
STEADY_SHARE = 0.03


def check(gpu: int, *, quick: bool) -> PieceResult:
    """Read the GPU's clock over the first two seconds of matrix products."""
    import torch

    from profiler.clocks import ClockWatch

    device = own_device(gpu)
    left = torch.rand(MATRIX_SIZE, MATRIX_SIZE, device=device.torch_name)
    product = torch.empty_like(left)
    rows: list[Row] = []
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < (0.2 if quick else WATCHED_S):
        until = passed + EVERY_S
        while time.perf_counter() - began < until:
            torch.mm(left, left, out=product)
            torch.cuda.current_stream(device.torch_name).query()
        with ClockWatch(device) as clock:
            clock.read()
        rows.append({"at_s": passed, "clock_hz": clock.clock_hz, "throttle": clock.throttle})
        torch.cuda.synchronize(device.torch_name)
    clocks = [row["clock_hz"] for row in rows if row["clock_hz"] is not None]
    if not clocks:
        return PieceResult(
            None, "the driver tells no clock; install nvidia-ml-py (pip install -e '.[gpu]')", rows
        )
    last = clocks[-1]
    unsteady = [row["at_s"] for row in rows if abs((row["clock_hz"] or last) / last - 1) > STEADY_SHARE]
    steady_s = max(unsteady, default=0)
    summary = f"{clocks[0] / 1e6:.0f} MHz at first, {last / 1e6:.0f} at last, steady from {steady_s:.2f} s on"
    return PieceResult(passed=True, summary=summary, rows=rows)
