"""How much copies slow what one GPU computes: with a single card, copies stand in for messages."""

from __future__ import annotations

from collections.abc import Callable

from profiler.contention import MOST_OVERLAPPED, OF_GPUS, OVERLAP_SHARE, Rounds, computations
from profiler.rank_clock import RankClock
from scripts.gpu_check.calls import own_device
from scripts.gpu_check.report import PieceResult, Row, add_row

MIB = 2**20
SIZES = (1, 4, 16, 64, 256)
COMPUTE_S = 0.02


def check(gpu: int, *, quick: bool) -> PieceResult:
    """Lay copies within the GPU and from the host beside products and sums, by size."""
    device = own_device(gpu)
    clock = RankClock(device)
    clock.warm_up()
    rows: list[Row] = []
    for computation, compute in computations(clock, OF_GPUS).items():
        for size in SIZES[:2] if quick else SIZES:
            for place in ("device", "host"):
                factor = _factor(clock, compute, place, size * MIB)
                add_row(rows, {"computation": computation, "copies": place, "mib": size, "factor": factor})
    factors = [row["factor"] for row in rows]
    summary = f"a second of copies costs {min(factors):.2f} to {max(factors):.2f} s of computing"
    return PieceResult(passed=True, summary=summary, rows=rows)


def _factor(clock: RankClock, compute: Rounds, place: str, size_bytes: int) -> float:
    """Return the seconds that a second of copies, of so many bytes each, adds to a computation beside it."""
    import torch

    name = clock.device.torch_name
    side, main = torch.cuda.Stream(name), torch.cuda.current_stream(name)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=name)
    source = (
        torch.empty_like(target)
        if place == "device"
        else torch.empty(size_bytes, dtype=torch.uint8).pin_memory()
    )
    copy_s = _seconds(clock, lambda: target.copy_(source, non_blocking=True))
    round_s = _seconds(clock, lambda: compute(4)) / 4
    count = min(MOST_OVERLAPPED, max(1, round(OVERLAP_SHARE * max(COMPUTE_S, round_s) / copy_s)))
    rounds = max(1, round(count * copy_s / OVERLAP_SHARE / round_s))

    def copies() -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(count):
                target.copy_(source, non_blocking=True)

    def copies_alone() -> None:
        copies()
        main.wait_stream(side)

    def both() -> None:
        copies()
        compute(rounds)
        main.wait_stream(side)

    alone_s = _seconds(clock, lambda: compute(rounds))
    return (_seconds(clock, both) - alone_s) / _seconds(clock, copies_alone)


def _seconds(clock: RankClock, work: Callable[[], object]) -> float:
    clock.restart()
    return min(clock.seconds(work, lambda: None, lambda condition: condition) for _ in range(3))
