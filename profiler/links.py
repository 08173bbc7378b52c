"""Measure the links between devices of this machine: messages, collectives, and how they slow computation.

One process a device, over torch.distributed: gloo between CPU devices, NCCL between GPUs, on the loopback interface.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from graph.errors import RuntimeFailure, UsageError
from profiler.contention import Computation
from profiler.devices import PhysicalDevice
from profiler.exclusive import held
from profiler.fits import fit_link
from profiler.link_patterns import COLLECTIVE_PATTERNS, Pattern
from profiler.link_worker import (
    FEWEST,
    MOST,
    MOST_AGAIN,
    OVERLAP_ROUNDS,
    Algorithms,
    ExchangeTime,
    Exercise,
    Members,
    ProbeFailure,
    ProbePlan,
    ProbeReport,
    probe,
)
from profiler.processes import KILL_WAIT_S, DeviceProcess

KIB, MIB = 2**10, 2**20
# While contention is measured, messages go around a ring: each rank is an end of two, one sent and one received.
MESSAGES_AT_ONCE = 2
# All collectives together are given about so long; the fewest repetitions of each may take longer.
COLLECTIVES_S = 8.0
# The larger sizes of all patterns together are given about so long.
LARGE_S = 24.0


# Of slices of gradients; larger ones take what they take alone.
SUCCESSIVE_SIZES = (64 * KIB, 256 * KIB, MIB)


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Sizes in bytes, the seconds after which a probe of two devices is given up, and the rounds of contention.

    most_again: how often a size is timed again that other processes disturbed. fewest, most: how often each is timed.

    The sizes of a message; of an all-reduce; of the other collectives, which are exchanges of operators' values (see
    `profiler.link_patterns` for what counts); and of all-reduces over all devices that follow each other; ascending.
    The largest are left out where they would take too long or too much memory (`profiler.link_worker`).
    """

    p2p_sizes: tuple[int, ...] = tuple(KIB * 4**power for power in range(10))  # 1 KiB to 256 MiB
    all_reduce_sizes: tuple[int, ...] = tuple(KIB * 4**power for power in range(11))  # to 1 GiB
    exchange_sizes: tuple[int, ...] = (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    successive_sizes: tuple[int, ...] = ()
    limit_s: float = 300.0
    overlap_rounds: int = OVERLAP_ROUNDS
    most_again: int = MOST_AGAIN
    fewest: int = FEWEST
    most: int = MOST

    def limit_of(self, pairs: int, groups: int, algorithms: int = 0) -> float:
        """Return the seconds after which a probe of so many pairs, groups and further all-reduces is given up.

        They grow with the messages and collectives of one size that are measured, beyond those of one pair and group.
        """
        return self.limit_s * max(1.0, self._series(pairs, groups, algorithms) / max(1, self._series(1, 1)))

    def _series(self, pairs: int, groups: int, algorithms: int = 0) -> int:
        of_group = len(self.all_reduce_sizes) + (len(COLLECTIVE_PATTERNS) - 1) * len(self.exchange_sizes)
        return pairs * len(self.p2p_sizes) + groups * of_group + algorithms * len(self.all_reduce_sizes)

    def plan(
        self,
        rank: int,
        world_size: int,
        pairs: tuple[Members, ...],
        groups: tuple[Members, ...],
        rendezvous: str = "",
        exercise: Exercise | None = None,
        algorithms: Algorithms | None = None,
    ) -> ProbePlan:
        """Return one rank's part in measuring messages within `pairs` and collectives within `groups`.

        algorithms: of some groups, by which others than the library's all-reduces are measured.
        """
        sizes: dict[Pattern, tuple[int, ...]] = dict.fromkeys(COLLECTIVE_PATTERNS, self.exchange_sizes)
        sizes |= {
            "p2p": self.p2p_sizes,
            "all_reduce": self.all_reduce_sizes,
            "successive": self.successive_sizes,
        }
        further = sum(len(of_group) for of_group in (algorithms or {}).values())
        measured = self._series(0, len(groups), further)
        return ProbePlan(
            rank,
            world_size,
            rendezvous,
            pairs,
            groups,
            sizes,
            COLLECTIVES_S / max(1, measured),
            LARGE_S / max(1, len(pairs) + len(groups) * len(COLLECTIVE_PATTERNS) + further),
            self.limit_of(len(pairs), len(groups), further),
            exercise,
            self.overlap_rounds,
            self.most_again,
            algorithms or {},
            self.fewest,
            self.most,
        )


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Times of one message size, in seconds of one message (one way) or one collective."""

    size_bytes: int
    minimum_s: float
    median_s: float
    samples_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """A communication pattern between the devices at places `members`, and the line fitted to its median times.

    Time = `latency_s` + bytes / `bandwidth_bytes_per_s`; for a collective the bytes are those of one rank's buffer.
    `residual` is the fit's mean absolute relative error.
    """

    pattern: Pattern
    members: tuple[int, ...]
    samples: tuple[LinkSample, ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    residual: float

    @property
    def group_size(self) -> int:
        """Number of devices that take part."""
        return len(self.members)


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """All link measurements of a group of devices.

    `contentions`: by rank, the extra compute seconds at each end per second of a message, as in `Topology.contention`:
    the mean over all computations and patterns of communication that were laid beside each other. `contention_of`:
    each computation's, the mean over the patterns, the median over the ranks. `besides_bytes`: the most of a GPU's
    memory that was no tensor's; None of CPU devices.
    `exchange`: the result of the exercise on rank 0, where one was given.
    `disturbed`: of so many sizes of patterns the times stand for more than the links', since other processes worked
    on the devices' cores whenever they were taken.
    """

    links: tuple[LinkMeasurement, ...]
    contentions: tuple[float, ...]
    exchange: ExchangeTime | None = None
    disturbed: int = 0
    contention_of: Mapping[Computation, float] = field(default_factory=dict)
    besides_bytes: int | None = None

    @property
    def contention(self) -> float:
        """The median of all ranks' contention."""
        return statistics.median(self.contentions)

    @property
    def pairs(self) -> dict[tuple[int, int], tuple[float, float]]:
        """(bandwidth in bytes per second, latency in seconds) of each pair measured, in both directions."""
        pairs = {}
        for link in self.links:
            if link.pattern == "p2p":
                first, second = link.members
                for pair in ((first, second), (second, first)):
                    pairs[pair] = (link.bandwidth_bytes_per_s, link.latency_s)
        return pairs

    @property
    def overhead_s(self) -> float:
        """Seconds of the exercise's device beyond a bare message between the first pair; 0 without an exercise.

        For an exercise that returns the time of an exchange between ranks 0 and 1.
        """
        if self.exchange is None:
            return 0.0
        first = next(link for link in self.links if link.pattern == "p2p")
        return max(0.0, self.exchange.device_s - first.latency_s)

    @property
    def issue_s(self) -> float | None:
        """Seconds in which a rank's host issues an exchange; None where devices are CPUs, and without an exercise."""
        return None if self.exchange is None else self.exchange.host_s


def pairs_to_measure(devices: Sequence[PhysicalDevice]) -> tuple[tuple[int, int], ...]:
    """Return the places of the pairs whose messages are measured.

    All pairs of GPUs, since NVLink, PCIe and the socket bus join them differently; one pair of CPU devices, since all
    of them meet in the same memory.
    """
    if devices[0].processor == "cpu":
        return ((0, 1),)
    return tuple((i, j) for i in range(len(devices)) for j in range(i + 1, len(devices)))


def groups_to_measure(devices: Sequence[PhysicalDevice]) -> tuple[Members, ...]:
    """Return the places of the groups whose collectives are measured: of every power of two, and all of `devices`.

    Of GPUs, for each size, those that lie beside each other (halves, quarters, ...) and those that lie as far apart as
    they can; of CPU devices, which meet in the same memory, the first ones.
    """
    count = len(devices)
    everyone = tuple(range(count))
    groups: list[Members] = []
    size = 2
    while size < count:
        if devices[0].processor == "cpu":
            groups.append(everyone[:size])
        else:
            groups += [everyone[start : start + size] for start in range(0, count - size + 1, size)]
            groups.append(everyone[:: count // size][:size])
        size *= 2
    return (*dict.fromkeys(groups), everyone)


def probe_links(
    devices: Sequence[PhysicalDevice],
    options: LinkOptions | None = None,
    exercise: Exercise | None = None,
) -> LinkProbe:
    """Measure messages, collectives, and contention between `devices`; then let all ranks do the `exercise`.

    Raises:
        UsageError: there are fewer than two devices, or CPU and CUDA devices are mixed.
        RuntimeFailure: a process failed or took too long; the message names it and the reason.
    """
    chosen = LinkOptions() if options is None else options
    if len(devices) < 2 or len({device.processor for device in devices}) > 1:
        raise UsageError(
            f"links: {len(devices)} devices [{', '.join(device.label for device in devices)}], must be two or "
            "more of one processor type; name more with --gpus or use fewer types"
        )
    # A file of our own: no port to be taken, so that probes at the same time do not meet.
    with tempfile.TemporaryDirectory(prefix="soapstone-links-") as folder, held(devices):
        return summarize(_run(devices, chosen, Path(folder) / "rendezvous", exercise))


def _run(
    devices: Sequence[PhysicalDevice],
    options: LinkOptions,
    rendezvous: Path,
    exercise: Exercise | None,
) -> list[ProbeReport]:
    pairs, groups = pairs_to_measure(devices), groups_to_measure(devices)
    processes: list[DeviceProcess] = []
    try:
        for rank, device in enumerate(devices):
            plan = options.plan(rank, len(devices), pairs, groups, str(rendezvous), exercise)
            processes.append(DeviceProcess(probe, device, plan))
        return _gather(processes, time.monotonic() + options.limit_of(len(pairs), len(groups)))
    finally:
        for process in processes:
            process.kill()


def _gather(processes: Sequence[DeviceProcess], deadline: float) -> list[ProbeReport]:
    """Return each rank's report, in order of ranks."""
    reports: dict[int, ProbeReport] = {}
    waiting = {process.connection: rank for rank, process in enumerate(processes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(processes[rank].device.label for rank in waiting.values())
            raise RuntimeFailure(
                f"link probe: no answer from {late} in time, must answer; check that nothing else occupies the devices"
            )
        for connection in ready:
            rank = next(rank for pipe, rank in waiting.items() if pipe is connection)
            label = processes[rank].device.label
            try:
                message = processes[rank].connection.recv()
            except (EOFError, ConnectionResetError) as error:
                processes[rank].process.join(KILL_WAIT_S)
                reason = processes[rank].death() or "it closed its pipe"
                raise RuntimeFailure(f"link probe on {label}: {reason}; try again") from error
            if isinstance(message, ProbeFailure):
                raise RuntimeFailure(f"link probe on {label}: {message.reason}; try again")
            reports[rank] = message
            del waiting[processes[rank].connection]
    return [reports[rank] for rank in range(len(processes))]


def summarize(reports: Sequence[ProbeReport]) -> LinkProbe:
    """Return the probe from all ranks' reports, by rank."""
    taken: dict[tuple[Pattern, Members], dict[int, list[float]]] = {}
    for pattern, members, size in dict.fromkeys(key for report in reports for key in report.times_s):
        times = reports[members[0]].times_s[pattern, members, size]
        taken.setdefault((pattern, members), {})[size] = times
    links = tuple(measurement(pattern, members, by_size) for (pattern, members), by_size in taken.items())
    factors = [
        {laid: contention_factor(rounds) for laid, rounds in report.overlaps.items()} for report in reports
    ]
    contention_of = {
        computation: statistics.median(
            statistics.mean(factor for (of, _), factor in of_rank.items() if of == computation)
            for of_rank in factors
        )
        for computation in dict.fromkeys(computation for computation, _ in factors[0])
    }
    contentions = tuple(statistics.mean(of_rank.values()) for of_rank in factors)
    besides = [report.besides_bytes for report in reports if report.besides_bytes is not None]
    return LinkProbe(
        links,
        contentions,
        reports[0].exchange,
        len(set().union(*(report.disturbed for report in reports))),
        contention_of,
        max(besides, default=None),
    )


def measurement(
    pattern: Pattern, members: tuple[int, ...], taken: Mapping[int, Sequence[float]]
) -> LinkMeasurement:
    """Return the measurement that rests on seconds by message size."""
    samples = tuple(
        LinkSample(size, min(times), statistics.median(times), tuple(times)) for size, times in taken.items()
    )
    fit = fit_link([sample.size_bytes for sample in samples], [sample.median_s for sample in samples])
    return LinkMeasurement(pattern, members, samples, fit.latency_s, fit.bandwidth_bytes_per_s, fit.residual)


def contention_factor(rounds: Sequence[tuple[float, float, float]]) -> float:
    """Return the extra compute seconds at each end of a message per second that the message takes, at least 0.

    `rounds`: device seconds of computation alone, seconds of communication alone, device seconds of both. The least
    of each counts: a disturbance only ever adds time, and would otherwise decide a difference of like numbers.
    """
    compute_s, communication_s, together_s = (min(times) for times in zip(*rounds, strict=True))
    return float(max(0.0, (together_s - compute_s) / communication_s)) / MESSAGES_AT_ONCE
