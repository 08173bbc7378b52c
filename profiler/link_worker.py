"""The work of each process of a link probe. All ranks execute the same steps in the same order.

One pair or group communicates at a time, while all others wait.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil

from graph.collective_algorithms import BY_LIBRARY, AllReduceAlgorithm
from profiler.call_inputs import cache_bytes
from profiler.contention import Computation, Seconds, measure_overlaps
from profiler.devices import PhysicalDevice
from profiler.link_patterns import (
    ALGORITHM,
    COLLECTIVE_PATTERNS,
    SUCCESSIVE,
    SUCCESSIVE_SUMS,
    Participant,
    Pattern,
    prepare,
)
from profiler.measure import describe_error, interval
from profiler.others import OthersMeter
from profiler.process_groups import Message, join_process_group, new_process_group, start_messages
from profiler.processors import memory_bytes
from profiler.rank_clock import RankClock

MIB = 2**20
WARM_UPS = 2
# Timed at least so often, however long it takes, and at most.
FEWEST, MOST = 5, 30
# Larger messages are left out where they would take too long, or where there is no memory for so many times their
# bytes; still larger ones are timed so often.
LARGE_BYTES, LARGE_COPIES = MIB, 8
HUGE_BYTES, HUGE_FEWEST, HUGE_WARM_UPS = 16 * MIB, 2, 1
# Sizes that would take longer are left out where the largest one timed took, to within this share, what the line
# through the two before it says: predictions go on along it.
STRAIGHT_BEYOND_S, STRAIGHT_SHARE = 0.5, 0.1
# Repetitions end where half the confidence interval of their median is no wider than this share of it.
NARROW = 0.05
# Written before each message, so that neither data nor code is left in the caches, as after a convolution; on a GPU,
# so many times the largest cache.
EVICTED_BYTES, EVICTED_CACHES = 16 * MIB, 2
BETWEEN = ((2, 64, 35, 35), (96, 64, 3, 3))
OVERLAP_ROUNDS = 5
# Beyond this share of a rank's core, others' work delays messages: they are timed again, after all others, so often.
DISTURBED_SHARE = 0.2
MOST_AGAIN = 4
# The last time where more than this share of them were disturbed once more.
RESTLESS_SHARE = 0.9

# Ranks, ascending; of messages two.
Members = tuple[int, ...]
Algorithms = Mapping[Members, tuple[AllReduceAlgorithm, ...]]


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Seconds that an exchange of values takes inside a step: of the device, and of the host to issue it.

    host_s: None where the device is a CPU, which does both.
    """

    device_s: float
    host_s: float | None = None


# The last step of every rank, in the process group, on its device: returns a result on rank 0 at least.
Exercise = Callable[[PhysicalDevice], ExchangeTime | None]


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
    most_again: how often a size is timed again that other processes disturbed.
    algorithms: of some groups, by which all-reduces are measured beside the library's own.
    fewest, most: how often each size is timed.
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
    most_again: int = MOST_AGAIN
    algorithms: Algorithms = field(default_factory=dict)
    fewest: int = FEWEST
    most: int = MOST


@dataclass(slots=True)
class ProbeReport:
    """Seconds that one rank saw.

    times_s: by pattern, members (the rank is one) and size, of each repetition; the same on all members.
    disturbed: of these, what other processes disturbed each time that it was timed, on some rank.
    overlaps: by computation and pattern, of each round of overlapping, the device's seconds for computation alone, the
        seconds of communication alone, and the device's seconds for both at once until both are done.
    exchange: what the plan's exercise returned.
    besides_bytes: of a GPU's memory, what is no tensor's and was not free at last: contexts, buffers of NCCL.
    """

    times_s: dict[tuple[Pattern, Members, int], list[float]] = field(default_factory=dict)
    disturbed: set[tuple[Pattern, Members, int]] = field(default_factory=set)
    overlaps: dict[tuple[Computation, str], list[Seconds]] = field(default_factory=dict)
    exchange: ExchangeTime | None = None
    besides_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """The reason why a rank could not measure."""

    reason: str


def repetitions(pattern: Pattern, size_bytes: int) -> int:
    """Return how often a pattern is timed at most: messages and all-reduces, which every run has, more often."""
    if pattern.startswith(("p2p", "all_reduce")):
        return MOST if size_bytes <= 64 * 2**10 else 15 if size_bytes <= MIB else 7
    return 10 if size_bytes <= MIB else 6


def continued_s(times_s: Mapping[int, float], size_bytes: int) -> float:
    """Return the seconds of a size on the line through the two largest of those timed; 0 where fewer were."""
    if len(times_s) < 2:
        return 0.0
    (before, before_s), (last, last_s) = sorted(times_s.items())[-2:]
    return last_s + max(0.0, last_s - before_s) / (last - before) * (size_bytes - last)


def is_straight(times_s: Mapping[int, float]) -> bool:
    """Return whether the largest of some sizes took what the line through the two before it says."""
    *before, (last, last_s) = sorted(times_s.items())
    continued = continued_s(dict(before), last)
    return abs(continued - last_s) <= STRAIGHT_SHARE * last_s


def probe(connection: Connection, device: PhysicalDevice, plan: ProbePlan) -> None:
    """Measure as one rank and send a `ProbeReport` or a `ProbeFailure`."""
    is_sent = False
    try:
        with process_group(device, plan):
            report = ProbeRank(device, plan).run()
            # Before the group is left, which NCCL may do for long, or fail in: the report is whole.
            connection.send(report)
            is_sent = True
    except Exception as error:  # sent to the parent, which raises it with the rank's name
        if not is_sent:
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
        self.clock = RankClock(device)
        self.report = ProbeReport()

    def run(self) -> ProbeReport:
        """Execute the whole plan; every rank must call it."""
        self.clock.warm_up()
        for pair in self.plan.pairs:
            self.clock.barrier()
            if self.plan.rank in pair:
                self._measure_pair(pair)
        self.measure_collectives()
        self.clock.barrier()
        self.report.overlaps = measure_overlaps(
            self.clock, self.plan.rank, self.plan.world_size, self.plan.overlap_rounds
        )
        if self.plan.exercise is not None:
            self.report.exchange = self.plan.exercise(self.device)
        if self.clock.on_gpu:
            self.report.besides_bytes = self._besides_bytes()
        return self.report

    def _besides_bytes(self) -> int:
        import torch

        name = self.device.torch_name
        free, total = torch.cuda.mem_get_info(name)
        return int(total - free - torch.cuda.memory_reserved(name))

    def measure_collectives(self) -> None:
        """Measure the collectives of all groups, one group after the other; every rank must call it."""
        for members in self.plan.groups:
            with self._subgroup(members) as group, self._rings(members) as rings:
                self.clock.barrier()
                if self.plan.rank in members:
                    self._measure_group(members, group, rings)

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

    @contextmanager
    def _rings(self, members: Members) -> Iterator[Mapping[Members, Any]]:
        """Make the process groups of a group's all-reduces by other algorithms, which GPUs need; as `_subgroup`."""
        import torch.distributed as dist

        from profiler.composed_all_reduce import gpu_groups

        algorithms = self.plan.algorithms.get(members, ()) if self.clock.on_gpu else ()
        wanted = [ring for algorithm in algorithms for ring in gpu_groups(algorithm, members)]
        rings = {ring: new_process_group(ring, self.plan.limit_s) for ring in dict.fromkeys(wanted)}
        yield rings
        for ring, group in rings.items():
            if self.plan.rank in ring:
                dist.destroy_process_group(group)

    def _measure_pair(self, pair: Members) -> None:
        self._measure_patterns(("p2p",), Participant(self.plan.rank, pair, None, self.device.torch_name))

    def _measure_group(self, members: Members, group: Any, rings: Mapping[Members, Any]) -> None:
        participant = Participant(self.plan.rank, members, group, self.device.torch_name, rings)
        others = self.plan.algorithms.get(members, ())
        patterns = [ALGORITHM + algorithm.text for algorithm in others]
        if len(members) == self.plan.world_size and self.plan.sizes.get("successive"):
            patterns += [SUCCESSIVE + algorithm.text for algorithm in (BY_LIBRARY, *others)]
        self._measure_patterns((*COLLECTIVE_PATTERNS, *patterns), participant)

    def _measure_patterns(self, patterns: Sequence[Pattern], participant: Participant) -> None:
        """Time some patterns of all sizes; those that other processes disturbed again, when all are timed.

        Not where nearly all were disturbed once more: those processes do not rest.
        """
        for pattern in patterns:
            self._measure_sizes(pattern, participant)

        def disturbed() -> list[tuple[Pattern, int]]:
            return sorted(
                (pattern, size)
                for pattern, members, size in self.report.disturbed
                if pattern in patterns and members == participant.members
            )

        for _ in range(self.plan.most_again):
            again = disturbed()
            for pattern, size in again:
                self._measure(pattern, participant, size)
            if len(disturbed()) > RESTLESS_SHARE * len(again):
                return

    def _measure_sizes(self, pattern: Pattern, participant: Participant) -> None:
        """Time a pattern of all sizes, up to the first that is too large for the time or the memory there is.

        One that takes long is left out, and those beyond it, where the line so far already leads to it.
        """
        median_s: dict[int, float] = {}
        for size in self.plan.sizes[pattern.partition("/")[0]]:
            if size > LARGE_BYTES:
                takes_s = (HUGE_WARM_UPS + HUGE_FEWEST) * continued_s(median_s, size)
                if takes_s > self.plan.large_s or (takes_s > STRAIGHT_BEYOND_S and is_straight(median_s)):
                    return
                if not self._everywhere(LARGE_COPIES * size <= self._free_bytes(), pattern, participant):
                    return
            median_s[size] = self._measure(pattern, participant, size)

    def _free_bytes(self) -> int:
        """Return the memory that this rank may take: of a host's, as if all ranks were on it."""
        import torch

        if self.device.processor == "cuda":
            return int(torch.cuda.mem_get_info(self.device.torch_name)[0])
        available = min(int(psutil.virtual_memory().available), memory_bytes() // 2)
        return available // self.plan.world_size

    def _measure(self, pattern: Pattern, participant: Participant, size: int) -> float:
        """Time a pattern with data and code out of the caches; return the median seconds, the same on all its ranks.

        Repetitions end where their median is known well enough. Of a GPU the cores say nothing of who disturbs it.
        """
        meter = OthersMeter([] if self.device.core is None else [self.device.core])
        work, disturb = prepare(pattern, participant, size), self._disturbance(pattern)
        meet = self._meeting(pattern, participant)
        times: list[float] = []
        fewest, most = self.plan.fewest, min(self.plan.most, repetitions(pattern, size))

        def repeat() -> float:
            start = time.perf_counter()
            seconds = self.clock.seconds(
                lambda: work(len(times)),
                meet,
                lambda condition: self._everywhere(condition, pattern, participant),
                before=disturb,
            )
            times.append(seconds / (SUCCESSIVE_SUMS if pattern.startswith(SUCCESSIVE) else 1))
            return time.perf_counter() - start

        self.clock.restart()
        warm_ups = WARM_UPS if size <= HUGE_BYTES else HUGE_WARM_UPS
        least_s = min(repeat() for _ in range(warm_ups))
        if size > HUGE_BYTES:
            most = HUGE_FEWEST
        elif pattern != "p2p":
            most = max(fewest, self.clock.agree(self.plan.measurement_s / least_s, most, participant.group))
        look_at, counted_s = min(fewest, most), list[float]()
        while len(counted_s) < most:
            while len(times) - warm_ups < look_at:
                repeat()
            counted_s = self._counted_s(times[warm_ups:], pattern, participant)
            if interval(counted_s) <= NARROW:
                break
            look_at = min(most, look_at + max(2, look_at // 4))
        key = pattern, participant.members, size
        self.report.times_s[key] = counted_s
        if self._everywhere((meter.share() or 0.0) <= DISTURBED_SHARE, pattern, participant):
            self.report.disturbed.discard(key)
        else:
            self.report.disturbed.add(key)
        return statistics.median(counted_s)

    def _counted_s(self, times: Sequence[float], pattern: Pattern, participant: Participant) -> list[float]:
        """Return the seconds that count of each repetition, the same on all ranks of a pair or a group.

        Communication ends when all have it: the slowest rank's count. Of a message, those of the rank that came last,
        which waited for no other's computation.
        """
        if pattern == "p2p":
            return self._least(times, pattern, participant)
        return [-seconds for seconds in self._least([-seconds for seconds in times], pattern, participant)]

    def _everywhere(self, condition: bool, pattern: Pattern, participant: Participant) -> bool:  # noqa: FBT001
        """Return whether something is true on all ranks of a pair or a group."""
        return bool(self._least([float(condition)], pattern, participant)[0])

    def _least(self, values: Sequence[float], pattern: Pattern, participant: Participant) -> list[float]:
        """Return the least of each value on all ranks of a pair or a group."""
        import torch

        if pattern != "p2p":
            return self.clock.least(values, participant.group)
        # A pair has no process group.
        own = torch.tensor(values, dtype=torch.float64, device=self.device.torch_name)
        received = torch.empty_like(own)
        (other,) = (rank for rank in participant.members if rank != self.plan.rank)
        for started in start_messages([Message(other, received)], [Message(other, own)]):
            started.wait()
        return [float(value) for value in torch.minimum(own, received).tolist()]

    def _meeting(self, pattern: Pattern, participant: Participant) -> Callable[[], object]:
        """Return communication that ends on all ranks of a group at once; a pair exchanges two messages."""
        if pattern != "p2p":
            return lambda: self.clock.meet(participant.group)
        exchange = prepare(pattern, participant, 1)
        return lambda: exchange(0)

    def _disturbance(self, pattern: Pattern) -> Callable[[], object]:
        """Return the disturbance of caches before a repetition: written memory and, mostly, a convolution."""
        import torch

        evicted_bytes = EVICTED_CACHES * cache_bytes(self.device) if self.clock.on_gpu else EVICTED_BYTES
        eviction = self.clock.buffer(evicted_bytes)
        if pattern.startswith("all_reduce"):
            return lambda: eviction.add_(1.0)
        images, filters = (torch.zeros(sizes, device=self.device.torch_name) for sizes in BETWEEN)

        def disturb() -> None:
            torch.conv2d(images, filters)
            eviction.add_(1.0)

        return disturb
