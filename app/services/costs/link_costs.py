"""The measured links between this machine's devices: their rows, their costs in predictions, and the topology `local`.

A row's pattern is "p2p" or a collective's name. Where several pairs or groups of one size were measured, the slowest
stands for all of the size, and each has rows of its own under its name and its devices: "p2p 0,3", "all_reduce 4-7".
So has the contention of each kind of device where there are several. "contention arithmetic" and "contention memory"
are those of computation that is bound by either; predictions take their mean, "contention". Of GPUs, the latency of
"exchange" is what an exchange takes the device beyond its message, that of "issue" what it takes the host to issue one.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from app.db.records import LinkCostRecord, LinkFitRecord
from app.db.store import Store
from app.services.costs.machine import LocalMachine
from app.services.progress import Progress
from graph.collective_algorithms import AllReduceAlgorithm, read_algorithm
from graph.collectives import CollectiveKind
from graph.errors import StrategyError, UsageError
from graph.topology import Pair, Topology, local_topology
from profiler.contention import Computation
from profiler.link_patterns import ALGORITHM, SUCCESSIVE
from profiler.link_worker import DISTURBED_SHARE
from search.cost.cost_table import Origin
from search.cost.link_costs import Curve, LinkCosts

if TYPE_CHECKING:
    from profiler.links import LinkMeasurement, LinkProbe

P2P = "p2p"
CONTENTION = "contention"
EXCHANGE = "exchange"
# The latency of this row: seconds in which the host of a GPU issues an exchange.
ISSUE = "issue"
# Of several measured pairs that a pair is like, the one counts where a message of so many bytes takes longest.
COMPARED_BYTES = 2**20
KIND_OF: Mapping[str, CollectiveKind] = {kind.value.replace("-", "_"): kind for kind in CollectiveKind}
# The length of the column; a group whose devices do not fit into it has no rows of its own.
LONGEST_PATTERN = 32


@dataclass(frozen=True, slots=True)
class LocalLinks:
    """Fitted communication between `count` devices.

    `latency_s` is that of an exchange inside a training step (`exchange_overhead`), not of a bare message; so are
    those of `pairs` (bandwidth in bytes per second, latency), which differ from the rest. `contentions` are those of
    devices, by place, whose kind's is not that of all. `fits` are the rows that all of this rests on.
    """

    count: int
    latency_s: float
    bytes_per_s: float
    contention: float
    contentions: Mapping[int, float]
    pairs: Mapping[Pair, tuple[float, float]]
    costs: LinkCosts
    fits: tuple[LinkFitRecord, ...]

    @property
    def contention_of(self) -> dict[str, float]:
        """The contention of computation that is bound by arithmetic, and by memory, where they were measured apart."""
        return {
            bound: fit.contention_factor
            for fit in self.fits
            for name, _, bound in [fit.pattern.partition(" ")]
            if name == CONTENTION and bound in get_args(Computation) and fit.contention_factor is not None
        }

    @property
    def knows_hosts(self) -> bool:
        """Whether the time of GPUs' hosts was measured; a database of an earlier version lacks it."""
        return any(fit.pattern == ISSUE for fit in self.fits)

    @property
    def unmeasured(self) -> tuple[CollectiveKind, ...]:
        """The collectives over all devices that were not measured: a database from before lacks all but one."""
        return tuple(kind for kind in CollectiveKind if (kind, self.count) not in self.costs.by_size)


def is_of_one_group(pattern: str) -> bool:
    """Return whether a row is of just the devices that its pattern names, and does not stand for all of its size."""
    return " " in pattern


# ---- from fits


def stored_links(store: Store, machine: LocalMachine) -> LocalLinks | None:
    """Return the links that an earlier probe of as many devices measured in this environment, or None."""
    return links_between(
        store, machine.links_kind_id, machine.environment_id, [device.index for device in machine.devices]
    )


def links_between(
    store: Store,
    kind_id: int,
    environment_id: int,
    indices: Sequence[int],
    nodes: Sequence[int] | None = None,
) -> LocalLinks | None:
    """Return the links that a probe of devices of a kind measured in an environment, as `links_of` does."""
    samples = store.link_costs(kind_id, environment_id)
    return links_of(store.link_fits(kind_id, environment_id), samples, indices, nodes)


def links_of(
    fits: Iterable[LinkFitRecord],
    samples: Iterable[LinkCostRecord],
    indices: Sequence[int],
    nodes: Sequence[int] | None = None,
) -> LocalLinks | None:
    """Return the links between the devices of these indices, from measurements and the lines fitted to them.

    Costs are the curves through what was measured; where only a line is known, as in a database that was repaired, the
    line. None where messages, an all-reduce over all of them, contention, or the cost of an exchange is not among the
    fits; collectives of other kinds and sizes may be missing.

    Args:
        fits: the lines.
        samples: what they were fitted to.
        indices: of the devices.
        nodes: the node of each, where the pairs measured stand for those of their nodes, else None.
    """
    count = len(indices)
    chosen = {
        (fit.pattern, fit.group_size): fit
        for fit in fits
        if fit.group_size == count
        or (fit.group_size < count and not fit.pattern.startswith((CONTENTION, EXCHANGE, ISSUE)))
    }
    point, contention = _line(chosen, P2P, 2), chosen.get((CONTENTION, count))
    exchange, issue = chosen.get((EXCHANGE, count)), chosen.get((ISSUE, count))
    if (
        point is None
        or _line(chosen, "all_reduce", count) is None
        or contention is None
        or contention.contention_factor is None
        or exchange is None
        or exchange.latency_s is None
    ):
        return None
    points: dict[tuple[str, int], dict[int, float]] = {}
    for sample in samples:
        points.setdefault((sample.pattern, sample.group_size), {})[sample.size_bytes] = sample.median_s
    contentions: dict[int, float] = {}
    pairs: dict[Pair, tuple[float, float]] = {}
    messages: dict[Pair, Curve] = {}
    by_size: dict[tuple[CollectiveKind, int], Curve] = {}
    by_members: dict[tuple[CollectiveKind, tuple[int, ...]], Curve] = {}
    algorithms: dict[AllReduceAlgorithm, Curve] = {}
    successive: dict[AllReduceAlgorithm, Curve] = {}
    for (pattern, size), fit in chosen.items():
        name, _, named = pattern.partition(" ")
        members = places_named(named, indices) if named else ()
        line = _line(chosen, pattern, size)
        if members is None:
            continue
        if name == CONTENTION and fit.contention_factor is not None:
            contentions |= dict.fromkeys(members, fit.contention_factor)
        if line is None:
            continue
        if name == P2P and members:
            first, second = members
            pairs[first, second] = pairs[second, first] = (line[1], line[0] + exchange.latency_s)
            curve = _curve(line, points.get((pattern, size)), exchange.latency_s)
            messages[first, second] = messages[second, first] = curve
        elif name in KIND_OF:
            kind = KIND_OF[name]
            # All but the sums of weights' gradients stand in for messages between operators.
            extra_s = 0.0 if kind is CollectiveKind.ALL_REDUCE else exchange.latency_s
            curve = _curve(line, points.get((pattern, size)), extra_s)
            if members:
                by_members[kind, members] = curve
            else:
                by_size[kind, size] = curve
        elif name.startswith((ALGORITHM, SUCCESSIVE)) and size == count:
            with suppress(StrategyError):  # another version's
                algorithm = read_algorithm(name.partition("/")[2], size)
                of_kind = algorithms if name.startswith(ALGORITHM) else successive
                of_kind[algorithm] = _curve(line, points.get((pattern, size)), 0.0)
    slowest = _curve(point, points.get((P2P, 2)), exchange.latency_s)
    return LocalLinks(
        count,
        point[0] + exchange.latency_s,
        point[1],
        contention.contention_factor,
        contentions,
        pairs,
        LinkCosts(
            by_size,
            by_members,
            Origin.MEASURED,
            _all_messages(messages, slowest, count, nodes),
            {tuple(range(count)): algorithms} if algorithms else {},
            {tuple(range(count)): successive} if successive else {},
            issue_s=0.0 if issue is None or issue.latency_s is None else issue.latency_s,
        ),
        tuple(chosen.values()),
    )


def _line(
    fits: Mapping[tuple[str, int], LinkFitRecord], pattern: str, size: int
) -> tuple[float, float] | None:
    """Return latency and bandwidth in bytes per second, where both were fitted."""
    fit = fits.get((pattern, size))
    if fit is None or fit.latency_s is None or fit.bandwidth_bytes_per_s is None:
        return None
    return fit.latency_s, fit.bandwidth_bytes_per_s


def _curve(fitted: tuple[float, float], points: Mapping[int, float] | None, extra_s: float) -> Curve:
    """Return the curve through measured seconds of several sizes, else the fitted line; `extra_s` higher."""
    if points is None or len(points) < 2:
        return Curve.line(fitted[0] + extra_s, 1 / fitted[1])
    return Curve.through(points).later(extra_s)


def _all_messages(
    measured: Mapping[Pair, Curve], slowest: Curve, count: int, nodes: Sequence[int] | None
) -> dict[Pair, Curve]:
    """Return the curves of all pairs of devices: of those not measured, what was measured between their nodes."""
    pairs = list(itertools.permutations(range(count), 2))
    if nodes is None:
        return {pair: measured.get(pair, slowest) for pair in pairs}
    by_nodes: dict[frozenset[int], list[Curve]] = {}
    for (source, destination), curve in measured.items():
        by_nodes.setdefault(frozenset((nodes[source], nodes[destination])), []).append(curve)
    curves = {}
    for pair in pairs:
        ends = {nodes[rank] for rank in pair}
        # Between nodes, each was measured with the first.
        spans = [ends] if len(ends) == 1 else [{nodes[0], end} for end in ends - {nodes[0]}]
        alike = [curve for span in spans for curve in by_nodes.get(frozenset(span), ())]
        slowest_alike = max(alike, key=lambda curve: curve.seconds(COMPARED_BYTES), default=slowest)
        curves[pair] = measured.get(pair, slowest_alike)
    return curves


def members_text(indices: Sequence[int]) -> str:
    """Return the pattern's text of a group of devices: "0,3", "4-7", "0-6/2" (every second), "0,1,4"."""
    steps = {after - before for before, after in itertools.pairwise(indices)}
    if len(indices) > 2 and len(steps) == 1:
        (step,) = steps
        return f"{indices[0]}-{indices[-1]}" + (f"/{step}" if step != 1 else "")
    return ",".join(str(index) for index in indices)


def places_named(text: str, indices: Sequence[int]) -> tuple[int, ...] | None:
    """Return the places, among `indices`, of the devices that a row names, see `members_text`; None where one lacks."""
    try:
        span, _, step = text.partition("/")
        first, dash, last = span.partition("-")
        named = range(int(first), int(last) + 1, int(step or 1)) if dash else map(int, span.split(","))
        return tuple(sorted(indices.index(index) for index in named))
    except ValueError:
        return None


# ---- from a probe


def warn_if_disturbed(result: LinkProbe, progress: Progress) -> None:
    """Warn where other processes worked beside the links whenever they were measured."""
    if result.disturbed:
        timed = sum(len(link.samples) for link in result.links)
        progress.warn(
            f"links: other processes took over {DISTURBED_SHARE:.0%} of a core each time that {result.disturbed} of "
            f"{timed} sizes were measured, should take less; measure again when they rest: app topology probe"
        )


def warn_if_besides(result: LinkProbe, progress: Progress) -> None:
    """Warn where more of a GPU's memory is no tensor's than predictions keep free for that."""
    from profiler.kinds import RESERVED_BYTES

    besides = result.besides_bytes
    if besides is not None and besides > RESERVED_BYTES:
        progress.warn(
            f"memory: {besides / 2**30:.1f} GiB of a GPU are taken beside tensors (contexts, NCCL, other processes), "
            f"predictions keep {RESERVED_BYTES / 2**30:.1f} GiB free; a strategy that nearly fills it may not fit"
        )


def probe(store: Store, machine: LocalMachine, progress: Progress) -> LocalLinks:
    """Measure the links between the machine's devices, store raw samples and fits, and return the fits."""
    from app.services.costs.exchange_overhead import overhead_jobs
    from profiler.links import SUCCESSIVE_SIZES, LinkOptions, probe_links

    options = LinkOptions(successive_sizes=SUCCESSIVE_SIZES)
    exercise = overhead_jobs(options.limit_s)
    result = probe_links(machine.devices, options, exercise)
    warn_if_disturbed(result, progress)
    warn_if_besides(result, progress)
    indices = [device.index for device in machine.devices]
    kinds = [device.kind.name for device in machine.devices]
    store.put_link_costs(machine.links_kind_id, machine.environment_id, cost_records(result, indices))
    store.put_link_fits(machine.links_kind_id, machine.environment_id, fit_records(result, indices, kinds))
    links = stored_links(store, machine)
    if links is None:
        raise UsageError(
            "links: the probe measured no all-reduce over the whole group, must; give two devices or more"
        )
    return links


def cost_records(result: LinkProbe, indices: Sequence[int], *, alike: bool = True) -> list[LinkCostRecord]:
    """Return the rows of a probe's raw samples; `indices` and `alike` as in `fit_records`."""
    return [
        LinkCostRecord(
            pattern=pattern,
            group_size=link.group_size,
            size_bytes=sample.size_bytes,
            minimum_s=sample.minimum_s,
            median_s=sample.median_s,
            samples_s=sample.samples_s,
        )
        for pattern, link in _named(result, indices, alike=alike)
        for sample in link.samples
    ]


def fit_records(
    result: LinkProbe, indices: Sequence[int], kinds: Sequence[str], *, alike: bool = True
) -> list[LinkFitRecord]:
    """Return the rows of the lines fitted to a probe.

    Args:
        result: the probe.
        indices: the indices of its devices, by rank.
        kinds: the names of their kinds.
        alike: whether the slowest group of a size stands for all of its size. On one machine it does; of hosts'
            devices, a group within one of them says nothing of groups across.
    """
    count = len(indices)
    records = []
    for pattern, link in _named(result, indices, alike=alike):
        size = link.group_size
        records.append(
            LinkFitRecord(pattern, size, link.latency_s, link.bandwidth_bytes_per_s, residual=link.residual)
        )
    for kind in sorted(set(kinds)) if len(set(kinds)) > 1 else ():
        ranks = [rank for rank in range(count) if kinds[rank] == kind]
        pattern = f"{CONTENTION} {members_text([indices[rank] for rank in ranks])}"
        if len(pattern) <= LONGEST_PATTERN:
            factor = statistics.median(result.contentions[rank] for rank in ranks)
            records.append(LinkFitRecord(pattern, count, contention_factor=factor))
    if len(result.contention_of) > 1:
        records += [
            LinkFitRecord(f"{CONTENTION} {computation}", count, contention_factor=factor)
            for computation, factor in result.contention_of.items()
        ]
    return [
        *records,
        LinkFitRecord(CONTENTION, count, contention_factor=result.contention),
        LinkFitRecord(EXCHANGE, count, latency_s=result.overhead_s),
        *([] if result.issue_s is None else [LinkFitRecord(ISSUE, count, latency_s=result.issue_s)]),
    ]


def _named(
    result: LinkProbe, indices: Sequence[int], *, alike: bool = True
) -> Iterator[tuple[str, LinkMeasurement]]:
    """Yield the measurements under the patterns of their rows."""
    by_size: dict[tuple[str, int], list[LinkMeasurement]] = {}
    for link in result.links:
        by_size.setdefault((link.pattern, link.group_size), []).append(link)
    for (pattern, size), links in by_size.items():
        if alike or size == len(indices) or pattern == P2P:
            yield pattern, min(links, key=lambda link: link.bandwidth_bytes_per_s)
        if len(links) > 1 or not alike:
            for link in links:
                own = f"{pattern} {members_text([indices[member] for member in link.members])}"
                if len(own) <= LONGEST_PATTERN:
                    yield own, link


def local_links(
    store: Store, machine: LocalMachine, progress: Progress, *, again: bool = False, complete: bool = False
) -> LocalLinks | None:
    """Return the machine's links from the database, else measured now; None for a single device.

    Args:
        store: the database.
        machine: the devices.
        progress: what the user sees meanwhile.
        again: measure them in any case.
        complete: measure them also where an earlier version of Soapstone measured some patterns only.
    """
    if machine.count < 2:
        return None
    links = None if again else stored_links(store, machine)
    if links is None or (
        complete and (links.unmeasured or (machine.processor == "cuda" and not links.knows_hosts))
    ):
        with progress.stage(f"measuring links between {machine.count} {machine.processor} devices"):
            links = probe(store, machine, progress)
    return links


def topology_of(machine: LocalMachine, links: LocalLinks | None) -> Topology:
    """Return the topology `local` of this machine's devices."""
    kinds = [device.kind for device in machine.devices]
    if links is None:
        return local_topology(machine.count, kinds, bandwidth_bytes_per_s=1.0, latency_s=0.0)
    topology = local_topology(
        machine.count,
        kinds,
        links.bytes_per_s,
        links.latency_s,
        link_kind="memory" if machine.processor == "cpu" else "nvlink",
        measured=links.pairs,
    )
    factors = {kind.name: links.contentions.get(index, links.contention) for index, kind in enumerate(kinds)}
    return replace(topology, contention=tuple((name, factor) for name, factor in factors.items() if factor))
