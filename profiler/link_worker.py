"""What each process of a link probe does. All ranks go through the same steps in the same order."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from profiler.devices import PhysicalDevice
from profiler.measure import describe_error
from profiler.pinning import threads_that_yield
from profiler.timers import synchronize, timer_for

if TYPE_CHECKING:
    import torch

MIB = 2**20
WARM_UPS = 2
# An exchanged piece is the right half of a tensor of so many rows; tensors take turns.
ROWS = 8
SOURCES = 3
# Written before each message, so that neither data nor code is left in the caches, as after a convolution.
EVICTED_BYTES = 16 * MIB
BETWEEN = ((2, 64, 35, 35), (96, 64, 3, 3))
# The computation that communication is laid beside: a matrix product, bound by arithmetic, and a sum, bound by memory.
MATRIX_SIZE = 512
SUM_ELEMENTS = 2**20
COMPUTE_S = 0.15
OVERLAP_BYTES = 4 * MIB
# Communication fills this share of the computation, so that all of it overlaps.
OVERLAP_SHARE = 0.4
MOST_OVERLAPPED = 64
OVERLAP_ROUNDS = 5

Pair = tuple[int, int]
# What every rank does last, in the process group, on its device: returns seconds, on rank 0 at least.
Exercise = Callable[[PhysicalDevice], float | None]


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """One rank's part in a probe. `rendezvous` is a path that all ranks share and that does not exist yet."""

    rank: int
    world_size: int
    rendezvous: str
    pairs: tuple[Pair, ...]
    p2p_sizes: tuple[int, ...]
    all_reduce_sizes: tuple[int, ...]
    limit_s: float
    exercise: Exercise | None = None


@dataclass(slots=True)
class ProbeReport:
    """Seconds that one rank saw: exchanges by pair and size, collectives by size, and of each
    round of overlapping (the device's seconds for computation alone, the seconds of communication alone, the device's
    seconds for both at once until both are done). `exercise_s`: what the plan's exercise returned."""

    p2p_s: dict[tuple[Pair, int], list[float]] = field(default_factory=dict)
    all_reduce_s: dict[int, list[float]] = field(default_factory=dict)
    overlaps: list[tuple[float, float, float]] = field(default_factory=list)
    exercise_s: float | None = None


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """Why a rank could not do its part."""

    reason: str


def repetitions(size_bytes: int) -> int:
    """Return how often a message of this size is timed: fixed, since all ranks must agree without asking."""
    return 30 if size_bytes <= 64 * 2**10 else 15 if size_bytes <= MIB else 7


def probe(connection: Connection, device: PhysicalDevice, plan: ProbePlan) -> None:
    """Do this rank's part and send a `ProbeReport` or a `ProbeFailure`."""
    try:
        with _group(device, plan):
            report = _Rank(device, plan).run()
        connection.send(report)
    except Exception as error:  # sent to the parent, which raises it with the rank's name
        connection.send(ProbeFailure(describe_error(error)))


def probe_joined(device: PhysicalDevice, plan: ProbePlan) -> ProbeReport:
    """Do this rank's part in the process group that this process has joined; all of its ranks must."""
    return _Rank(device, plan).run()


@contextmanager
def _group(device: PhysicalDevice, plan: ProbePlan) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    with threads_that_yield():
        dist.init_process_group(
            backend="nccl" if device.processor == "cuda" else "gloo",
            init_method=f"file://{plan.rendezvous}",
            rank=plan.rank,
            world_size=plan.world_size,
            timeout=datetime.timedelta(seconds=plan.limit_s),
            device_id=torch.device(device.torch_name) if device.processor == "cuda" else None,
        )
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Rank:
    """One rank of the probe, inside its process group."""

    def __init__(self, device: PhysicalDevice, plan: ProbePlan) -> None:
        self.device, self.plan = device, plan
        self.timer = timer_for(device.torch_name)
        self.report = ProbeReport()

    def run(self) -> ProbeReport:
        for pair in self.plan.pairs:
            for size in self.plan.p2p_sizes:
                self._measure_messages(pair, size)
        for size in self.plan.all_reduce_sizes:
            self._measure_all_reduce(size)
        self._measure_overlap()
        if self.plan.exercise is not None:
            self.report.exercise_s = self.plan.exercise(self.device)
        return self.report

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        import torch

        return torch.zeros(max(1, size_bytes // 4), dtype=torch.float32, device=self.device.torch_name)

    def _timed(self, work: Callable[[], object]) -> float:
        synchronize(self.device.torch_name)
        start = self.timer.mark()
        work()
        return self.timer.elapsed_s(start, self.timer.mark())

    def _occupied(self, work: Callable[[], object]) -> float:
        """Return the seconds for which `work` occupies the device: of a CPU device, its process's own CPU seconds.

        On a core, what communication takes from computation is CPU time of its threads, and unlike the clock on the
        wall it does not count what other programs take.
        """
        if self.device.processor == "cuda":
            return self._timed(work)
        start = time.process_time()
        work()
        return time.process_time() - start

    def _barrier(self) -> None:
        import torch.distributed as dist

        # Not dist.barrier, which warns without a device id; the effect is the same.
        dist.all_reduce(self._buffer(4))
        synchronize(self.device.torch_name)

    def _measure_messages(self, pair: Pair, size: int) -> None:
        """Time an exchange as a training step has it: both ways at once, after a convolution, with data and code out
        of the caches, cut out of a larger tensor and put in place beside the rank's own part, into memory that was
        never written before.

        A bare ping-pong of one warm buffer is ten times as fast on a CPU, and predicts nothing.
        """
        import torch
        import torch.distributed as dist

        other = pair[1] if self.plan.rank == pair[0] else pair[0]
        taking_part = self.plan.rank in pair
        columns = max(1, size // 4 // ROWS)
        sources = [self._buffer(2 * ROWS * columns * 4).view(ROWS, 2 * columns) for _ in range(SOURCES)]
        eviction = self._buffer(EVICTED_BYTES)
        images, filters = (torch.zeros(sizes, device=self.device.torch_name) for sizes in BETWEEN)

        def exchange(source: torch.Tensor) -> None:
            outgoing = source[:, columns:].contiguous()
            incoming = torch.empty_like(outgoing)
            messages = [dist.P2POp(dist.isend, outgoing, other), dist.P2POp(dist.irecv, incoming, other)]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
            torch.cat([source[:, :columns], incoming], 1)

        times = []
        for repetition in range(WARM_UPS + repetitions(size)):
            self._barrier()
            torch.conv2d(images, filters)
            eviction.add_(1.0)
            if taking_part:
                source = sources[repetition % SOURCES]
                times.append(self._timed(lambda source=source: exchange(source)))  # type: ignore[misc]
        if taking_part:
            self.report.p2p_s[pair, size] = times[WARM_UPS:]

    def _measure_all_reduce(self, size: int) -> None:
        """Time an all-reduce as a training step has it: what backward made is copied into the buffer first."""
        import torch
        import torch.distributed as dist

        buffer = self._buffer(size)
        sources = [torch.ones_like(buffer) for _ in range(SOURCES)]
        eviction, times = self._buffer(EVICTED_BYTES), []

        def reduce(source: torch.Tensor) -> None:
            buffer.copy_(source)
            dist.all_reduce(buffer)

        for repetition in range(WARM_UPS + repetitions(size)):
            source = sources[repetition % SOURCES]
            self._barrier()
            eviction.add_(1.0)
            times.append(self._timed(lambda source=source: reduce(source)))  # type: ignore[misc]
        self.report.all_reduce_s[size] = times[WARM_UPS:]

    def _measure_overlap(self) -> None:
        """Time computation and messages around a ring, each alone and then together."""
        import torch.distributed as dist

        compute = self._computation()
        self._timed(lambda: compute(2))
        rounds = self._agree(COMPUTE_S / (self._timed(lambda: compute(4)) / 4), 1_000_000)
        outgoing = [self._buffer(OVERLAP_BYTES) for _ in range(MOST_OVERLAPPED)]
        incoming = [self._buffer(OVERLAP_BYTES) for _ in range(MOST_OVERLAPPED)]
        following = (self.plan.rank + 1) % self.plan.world_size
        preceding = (self.plan.rank - 1) % self.plan.world_size

        def communicate(count: int) -> list[dist.Work]:
            started: list[dist.Work] = []
            for sent, received in zip(outgoing[:count], incoming[:count], strict=True):
                messages = [
                    dist.P2POp(dist.isend, sent, following),
                    dist.P2POp(dist.irecv, received, preceding),
                ]
                started.extend(dist.batch_isend_irecv(messages))
            return started

        def wait_for(count: int) -> None:
            for work in communicate(count):
                work.wait()

        def both() -> None:
            pending = communicate(count)
            compute(rounds)
            # Until both are done: a computation that merely starves the communication has not hidden it.
            for work in pending:
                work.wait()

        self._timed(lambda: wait_for(2))
        self._barrier()
        one = self._timed(lambda: wait_for(4)) / 4
        count = self._agree(OVERLAP_SHARE * COMPUTE_S / one, MOST_OVERLAPPED)
        for _ in range(OVERLAP_ROUNDS):
            self._barrier()
            alone = self._occupied(lambda: compute(rounds))
            self._barrier()
            communication = self._timed(lambda: wait_for(count))
            self._barrier()
            together = self._occupied(both)
            self.report.overlaps.append((alone, communication, together))

    def _agree(self, wish: float, most: int) -> int:
        """Return the least of all ranks' wishes, between 1 and `most`."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([min(float(most), max(1.0, wish))], device=self.device.torch_name)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value.item())

    def _computation(self) -> Callable[[int], None]:
        import torch

        name = self.device.torch_name
        left, right = (torch.rand(MATRIX_SIZE, MATRIX_SIZE, device=name) for _ in range(2))
        product = torch.empty_like(left)
        total, term = (torch.zeros(SUM_ELEMENTS, device=name) for _ in range(2))

        def compute(rounds: int) -> None:
            for _ in range(rounds):
                torch.mm(left, right, out=product)
                torch.add(total, term, out=total)

        return compute
