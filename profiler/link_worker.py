"""The work of each process of a link probe. All ranks execute the same steps in the same order.

One pair or group communicates at a time, while all others wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import psutil

from profiler.devices import PhysicalDevice
from profiler.link_patterns import COLLECTIVE_PATTERNS, Participant, Pattern, prepare
from profiler.measure import describe_error
from profiler.process_groups import join_process_group, new_process_group, wait_for_device
from profiler.processors import memory_bytes
from profiler.timers import synchronize, timer_for

if TYPE_CHECKING:
    import torch

MIB = 2**20
WARM_UPS = 2
# Timed at least so often, however long it takes.
FEWEST = 5
# Larger messages are left out where they would take too long, or where there is no memory for so many times their
# bytes; still larger ones are timed so often.
LARGE_BYTES, LARGE_COPIES = MIB, 8
HUGE_BYTES, HUGE_FEWEST = 16 * MIB, 3
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

# Ranks, ascending; of messages two.
Members = tuple[int, ...]
# The last step of every rank, in the process group, on its device: returns seconds, on rank 0 at least.
Exercise = Callable[[PhysicalDevice], float | None]


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """One rank's part in a probe.

    rendezvous: a path that all ranks share and that does not exist yet.
    pairs: between which messages are measured.
    groups: between which collectives are.
    sizes: bytes of each pattern.
    measurement_s: seconds after which a collective of one size is timed no more often; that counts for all of it.
    large_s: seconds beyond which a pattern of one large size, and those of larger ones, are left out.
    overlap_rounds: how often computation and messages are laid beside each other.
    """

    rank: int
    world_size: int
    rendezvous: str
    pairs: tuple[Members, ...]
    groups: tuple[Members, ...]
    sizes: Mapping[Pattern, tuple[int, ...]]
    measurement_s: float
    large_s: float
    limit_s: float
    exercise: Exercise | None = None
    overlap_rounds: int = OVERLAP_ROUNDS


@dataclass(slots=True)
class ProbeReport:
    """Seconds that one rank saw.

    times_s: by pattern, members (the rank is one) and size, of each repetition.
    overlaps: of each round of overlapping, the device's seconds for computation alone, the seconds of communication
        alone, and the device's seconds for both at once until both are done.
    exercise_s: what the plan's exercise returned.
    """

    times_s: dict[tuple[Pattern, Members, int], list[float]] = field(default_factory=dict)
    overlaps: list[tuple[float, float, float]] = field(default_factory=list)
    exercise_s: float | None = None


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """The reason why a rank could not measure."""

    reason: str


def repetitions(pattern: Pattern, size_bytes: int) -> int:
    """Return how often a pattern is timed at most: messages and all-reduces, which every run has, more often."""
    if pattern in ("p2p", "all_reduce"):
        return 30 if size_bytes <= 64 * 2**10 else 15 if size_bytes <= MIB else 7
    return 10 if size_bytes <= MIB else 6


def continued_s(times_s: Mapping[int, float], size_bytes: int) -> float:
    """Return the seconds of a size on the line through the two largest of those timed; 0 where fewer were."""
    if len(times_s) < 2:
        return 0.0
    (before, before_s), (last, last_s) = sorted(times_s.items())[-2:]
    return last_s + max(0.0, last_s - before_s) / (last - before) * (size_bytes - last)


def probe(connection: Connection, device: PhysicalDevice, plan: ProbePlan) -> None:
    """Measure as one rank and send a `ProbeReport` or a `ProbeFailure`."""
    try:
        with process_group(device, plan):
            report = ProbeRank(device, plan).run()
        connection.send(report)
    except Exception as error:  # sent to the parent, which raises it with the rank's name
        connection.send(ProbeFailure(describe_error(error)))


def probe_joined(device: PhysicalDevice, plan: ProbePlan) -> ProbeReport:
    """Do this rank's part in the process group that this process has joined; all of its ranks must."""
    return ProbeRank(device, plan).run()


@contextmanager
def process_group(device: PhysicalDevice, plan: ProbePlan) -> Iterator[None]:
    """Be this rank of a new process group of all ranks: over NCCL between GPUs, else over gloo."""
    import torch.distributed as dist

    join_process_group(
        device.torch_name,
        plan.limit_s,
        init_method=f"file://{plan.rendezvous}",
        rank=plan.rank,
        world_size=plan.world_size,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class ProbeRank:
    """One rank of the probe, inside its process group."""

    def __init__(self, device: PhysicalDevice, plan: ProbePlan) -> None:
        self.device, self.plan = device, plan
        self.timer = timer_for(device.torch_name)
        self.report = ProbeReport()

    def run(self) -> ProbeReport:
        """Execute the whole plan; every rank must call it."""
        for pair in self.plan.pairs:
            self._barrier()
            if self.plan.rank in pair:
                self._measure_pair(pair)
        self.measure_collectives()
        self._barrier()
        self._measure_overlap()
        if self.plan.exercise is not None:
            self.report.exercise_s = self.plan.exercise(self.device)
        return self.report

    def measure_collectives(self) -> None:
        """Measure the collectives of all groups, one group after the other; every rank must call it."""
        for members in self.plan.groups:
            with self._subgroup(members) as group:
                self._barrier()
                if self.plan.rank in members:
                    self._measure_group(members, group)

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

    @contextmanager
    def _subgroup(self, members: Members) -> Iterator[Any]:
        """Make the process group of `members`: every rank must, at the same time, members or not."""
        import torch.distributed as dist

        if members == tuple(range(self.plan.world_size)):
            yield None
            return
        group = new_process_group(members, self.plan.limit_s)
        yield group
        if self.plan.rank in members:
            dist.destroy_process_group(group)

    def _barrier(self, group: Any = None) -> None:
        import torch.distributed as dist

        # Not dist.barrier, which warns without a device id; the effect is the same.
        dist.all_reduce(self._buffer(4), group=group)
        wait_for_device(self.device.torch_name)

    def _measure_pair(self, pair: Members) -> None:
        self._measure_sizes("p2p", Participant(self.plan.rank, pair, None, self.device.torch_name))

    def _measure_group(self, members: Members, group: Any) -> None:
        participant = Participant(self.plan.rank, members, group, self.device.torch_name)
        for pattern in COLLECTIVE_PATTERNS:
            self._measure_sizes(pattern, participant)

    def _measure_sizes(self, pattern: Pattern, participant: Participant) -> None:
        """Time a pattern of all sizes, up to the first that is too large for the time or the memory there is."""
        least_s: dict[int, float] = {}
        for size in self.plan.sizes[pattern]:
            if size > LARGE_BYTES:
                takes_s = (WARM_UPS + HUGE_FEWEST) * continued_s(least_s, size)
                is_possible = takes_s <= self.plan.large_s and LARGE_COPIES * size <= self._free_bytes()
                if not self._least(float(is_possible), pattern, participant):
                    return
            least_s[size] = self._measure(pattern, participant, size, repetitions(pattern, size))

    def _free_bytes(self) -> int:
        """Return the memory that this rank may take: of a host's, as if all ranks were on it."""
        import torch

        if self.device.processor == "cuda":
            return int(torch.cuda.mem_get_info(self.device.torch_name)[0])
        available = min(int(psutil.virtual_memory().available), memory_bytes() // 2)
        return available // self.plan.world_size

    def _measure(self, pattern: Pattern, participant: Participant, size: int, most: int) -> float:
        """Time a pattern with data and code out of the caches; return the least seconds of it."""
        work, disturb = prepare(pattern, participant, size), self._disturbance(pattern)
        times: list[float] = []

        def repeat() -> float:
            start = time.perf_counter()
            self._meet(pattern, participant)
            disturb()
            times.append(self._timed(lambda: work(len(times))))
            return time.perf_counter() - start

        least_s = min(repeat() for _ in range(WARM_UPS))
        if size > HUGE_BYTES:
            most = HUGE_FEWEST
        elif pattern != "p2p":
            most = max(FEWEST, self._agree(self.plan.measurement_s / least_s, most, participant.group))
        for _ in range(most):
            repeat()
        self.report.times_s[pattern, participant.members, size] = times[WARM_UPS:]
        return min(times)

    def _least(self, value: float, pattern: Pattern, participant: Participant) -> float:
        """Return the least value of the ranks of a pair or a group."""
        import torch
        import torch.distributed as dist

        values = torch.tensor([value], device=self.device.torch_name)
        if pattern != "p2p":
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=participant.group)
            return float(values.item())
        (other,) = (rank for rank in participant.members if rank != self.plan.rank)
        received = torch.empty_like(values)
        messages = [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, values, other)]
        for started in dist.batch_isend_irecv(messages):
            started.wait()
        return min(value, float(received.item()))

    def _meet(self, pattern: Pattern, participant: Participant) -> None:
        """Wait for the other ranks of `place`; a pair has no process group, so that its two exchange messages."""
        if pattern != "p2p":
            self._barrier(participant.group)
            return
        prepare(pattern, participant, 1)(0)
        wait_for_device(self.device.torch_name)

    def _disturbance(self, pattern: Pattern) -> Callable[[], object]:
        """Return the disturbance of caches before a repetition: written memory and, mostly, a convolution."""
        import torch

        eviction = self._buffer(EVICTED_BYTES)
        if pattern == "all_reduce":
            return lambda: eviction.add_(1.0)
        images, filters = (torch.zeros(sizes, device=self.device.torch_name) for sizes in BETWEEN)

        def disturb() -> None:
            torch.conv2d(images, filters)
            eviction.add_(1.0)

        return disturb

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
                    dist.P2POp(dist.irecv, received, preceding),
                    dist.P2POp(dist.isend, sent, following),
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
        message_s = self._timed(lambda: wait_for(4)) / 4
        count = self._agree(OVERLAP_SHARE * COMPUTE_S / message_s, MOST_OVERLAPPED)
        for _ in range(self.plan.overlap_rounds):
            self._barrier()
            alone = self._occupied(lambda: compute(rounds))
            self._barrier()
            communication = self._timed(lambda: wait_for(count))
            self._barrier()
            together = self._occupied(both)
            self.report.overlaps.append((alone, communication, together))

    def _agree(self, wish: float, most: int, group: Any = None) -> int:
        """Return the least of the wishes of all ranks of a group, between 1 and `most`."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([min(float(most), max(1.0, wish))], device=self.device.torch_name)
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group)
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
