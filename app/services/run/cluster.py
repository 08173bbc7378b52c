"""`app run` under torchrun: the devices of the ranks, and the topology that they form.

Device r of a strategy is rank r. On one host the topology is `local`, as without torchrun; over several it is a file
that the user names, or is measured between the ranks themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from app.db.store import Store
from app.services.costs.exchange_overhead import OverheadJobs, overhead_jobs
from app.services.costs.link_costs import (
    LocalLinks,
    cost_records,
    fit_records,
    links_of,
    warn_if_besides,
    warn_if_disturbed,
)
from app.services.costs.machine import describe, local_devices
from app.services.costs.topologies import (
    LOCAL,
    NamedTopology,
    check_new_name,
    named_topology,
    put_measured,
)
from app.services.predict.predict import Target, local_target
from app.services.progress import Progress
from graph.collective_algorithms import measured_algorithms, node_levels
from graph.errors import RankFailure, SoapstoneError, UsageError
from graph.texts import counted
from graph.topology import Device, DeviceKind, Link, Processor, Topology, with_ports
from runtime.launch.rank_leader import LaunchedRanks
from runtime.ranks.ranks import gather_everywhere, nodes_of, own_host, rank_variable

if TYPE_CHECKING:
    from profiler.devices import PhysicalDevice
    from profiler.link_worker import Algorithms
    from profiler.links import LinkOptions, LinkProbe
    from runtime.jobs.job import Job, JobResult

Result = TypeVar("Result")

MEASURED = "ranks"


@dataclass(frozen=True)
class RankDevice:
    """One rank: its host and the kind of its device."""

    host: str
    kind: DeviceKind


@dataclass(frozen=True)
class ProbeOrder:
    """Rank 0 asks all ranks to measure messages within `pairs`, collectives within `groups`, and an exchange's cost.

    algorithms: of some groups, by which others than the library's all-reduces are measured.
    """

    pairs: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    jobs: OverheadJobs
    options: LinkOptions
    algorithms: Algorithms


@dataclass(frozen=True)
class JobOrder:
    """Rank 0 asks all ranks to execute a job."""

    job: Job
    timeout_s: float


class Leaving:
    """Rank 0 has no more orders."""


def own_devices(processor: Processor | None, gpus: str | None) -> tuple[PhysicalDevice, ...]:
    """Return the devices of this host's ranks, by local rank.

    Raises:
        UsageError: the host has fewer, or `gpus` are not as many as its ranks.
    """
    here = rank_variable("LOCAL_WORLD_SIZE", 1)
    if gpus is None:
        return local_devices(processor, here)
    devices = local_devices(processor, None, gpus)
    if len(devices) != here:
        raise UsageError(
            f"--gpus: names {len(devices)} GPUs, must name {here}, as many as torchrun started processes on this host"
        )
    return devices


def own_device(devices: Sequence[PhysicalDevice]) -> PhysicalDevice:
    """Return this rank's device."""
    return devices[rank_variable("LOCAL_RANK", 0)]


def members(device: PhysicalDevice) -> list[RankDevice]:
    """Return all ranks, by rank; every rank must call it."""
    ranks: list[RankDevice] = gather_everywhere(RankDevice(own_host(), device.kind))
    return ranks


def cluster_target(
    store: Store,
    launched: LaunchedRanks,
    ranks: Sequence[RankDevice],
    devices: tuple[PhysicalDevice, ...],
    topology: str,
    wanted: int | None,
    progress: Progress,
) -> Target:
    """Return, on rank 0, the topology of all ranks: a file's, `local` on one host, else measured between the hosts.

    Raises:
        UsageError: the topology, or the number of devices asked for, is not that of the processes.
        TopologyError: there is no such topology.
    """
    if wanted is not None and wanted != launched.size:
        raise UsageError(
            f"--devices: is {wanted}, must be {launched.size}, as many as torchrun started processes; leave it out"
        )
    nodes = nodes_of([member.host for member in ranks])
    if topology == LOCAL and len(set(nodes)) == 1:
        return local_target(store, devices, progress)
    machine = describe(store, devices)
    if topology != LOCAL:
        named = named_topology(store, topology)
        check_ranks(named.topology, ranks, measured=named.links is not None)
        return Target(named.topology, machine, named.links)
    probe = _probe(launched, nodes, own_device(devices), _short_options(), progress)
    return Target(measured_topology(MEASURED, ranks, probe), machine, measured_links(ranks, probe))


def check_ranks(topology: Topology, ranks: Sequence[RankDevice], *, measured: bool) -> None:
    """Check that the ranks can be the devices of a topology, and are those that it was `measured` between.

    Raises:
        UsageError: they are not.
    """
    if len(topology.devices) != len(ranks):
        raise UsageError(
            f"topology {topology.name}: has {len(topology.devices)} devices, must have {len(ranks)}, one for each "
            "process that torchrun started; start as many, or pass another topology"
        )
    nodes = nodes_of([member.host for member in ranks])
    devices = [(device.node, device.kind_name) for device in topology.devices]
    if measured and devices != [(node, member.kind.name) for node, member in zip(nodes, ranks, strict=True)]:
        raise UsageError(
            f"topology {topology.name}: was measured between {len({node for node, _ in devices})} hosts with other "
            f"devices than these {len(set(nodes))} have, must be that of the ranks; measure them: app topology probe "
            "--name"
        )


def probe_cluster(
    database: str | None,
    name: str,
    processor: Processor | None,
    gpus: str | None,
    timeout_s: float,
    progress: Progress,
) -> NamedTopology | None:
    """Measure the links between all ranks, of one host or several, and store them; all ranks must call it.

    Returns the topology and its links on rank 0, which alone opens the database, and None on the others.

    Raises:
        UsageError: the name is that of another topology, or there is one rank.
        RankFailure: a rank failed.
    """
    from profiler.links import SUCCESSIVE_SIZES, LinkOptions

    check_new_name(name)
    devices = own_devices(processor, gpus)

    def lead(launched: LaunchedRanks) -> NamedTopology:
        if launched.size < 2:
            raise UsageError("topology probe: there is 1 rank, must be at least 2 to have links; start more")
        device = own_device(devices)
        ranks = launched.execute(lambda: members(device))
        with Store.open(database) as store:
            machine = describe(store, devices)
            nodes = nodes_of([member.host for member in ranks])
            options = LinkOptions(successive_sizes=SUCCESSIVE_SIZES)
            probe = _probe(launched, nodes, device, options, progress)
            warn_if_disturbed(probe, progress)
            warn_if_besides(probe, progress)
            topology = measured_topology(name, ranks, probe)
            links = put_measured(store, topology, probe, machine.environment_id)
        launched.execute(lambda: launched.dismiss(Leaving()))
        return NamedTopology(topology, links)

    return as_rank(devices, timeout_s, lead)


def as_rank(
    devices: Sequence[PhysicalDevice], timeout_s: float, lead: Callable[[LaunchedRanks], Result]
) -> Result | None:
    """Return, on rank 0, the result of `lead`; on the others None, after they have followed its orders.

    Args:
        devices: of this host's ranks, by local rank.
        timeout_s: how long a rank waits for another one.
        lead: what rank 0 does.

    Raises:
        SoapstoneError: rank 0 refuses to go on.
        RankFailure: a rank failed.
    """
    device = own_device(devices)
    launched = LaunchedRanks.join(device.torch_name, timeout_s)
    try:
        result = None
        if launched.leads:
            result = lead(launched)
        else:
            launched.execute(lambda: follow(launched, device))
    except RankFailure:
        raise
    except (KeyboardInterrupt, SystemExit):
        failure = launched.cause_of_signal()
        if failure is not None:
            raise failure from None
        raise
    except BaseException as error:
        # Whatever it is, the others must not wait for it.
        launched.refuse(error, error.exit_code if isinstance(error, SoapstoneError) else 1)
        raise
    launched.leave()
    return result


def _probe(
    launched: LaunchedRanks,
    nodes: Sequence[int],
    device: PhysicalDevice,
    options: LinkOptions,
    progress: Progress,
) -> LinkProbe:
    """Measure between all ranks, as rank 0, which the others follow."""
    hosts = len(set(nodes))
    with progress.stage(f"measuring links between {len(nodes)} ranks on {counted(hosts, 'host')}"):
        order = ProbeOrder(
            probed_pairs(nodes),
            probed_groups(nodes),
            overhead_jobs(options.limit_s),
            options,
            probed_algorithms(nodes),
        )

        def ordered() -> LinkProbe:
            launched.give(order)
            return probe_ranks(device, order)

        return launched.execute(ordered)


def probed_pairs(nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ranks whose messages stand for all: two of each host, and each other host with the first."""
    first, *others = _by_node(nodes)
    inside = [(ranks[0], ranks[1]) for ranks in (first, *others) if len(ranks) > 1]
    return (*inside, *((first[0], ranks[0]) for ranks in others))


def probed_groups(nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks whose collectives are measured: each host's, the first of each host, and all."""
    hosts = _by_node(nodes)
    groups = [*hosts, tuple(ranks[0] for ranks in hosts), tuple(range(len(nodes)))]
    return tuple(dict.fromkeys(group for group in groups if len(group) > 1))


def probed_algorithms(nodes: Sequence[int]) -> Algorithms:
    """Return the algorithms by which all-reduces over all ranks are measured beside the library's; none on one host."""
    levels = node_levels(nodes)
    return {} if levels is None else {tuple(range(len(nodes))): measured_algorithms(*levels)}


def _by_node(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(rank for rank, of in enumerate(nodes) if of == node) for node in dict.fromkeys(nodes)]


def _short_options() -> LinkOptions:
    """Return the sizes for one run alone."""
    from profiler.links import KIB, MIB, LinkOptions

    sizes = (KIB, 64 * KIB, MIB, 4 * MIB)
    return LinkOptions(p2p_sizes=sizes, all_reduce_sizes=sizes, exchange_sizes=(KIB, 64 * KIB, 4 * MIB))


def probe_ranks(device: PhysicalDevice, order: ProbeOrder) -> LinkProbe:
    """Measure messages, collectives and contention between all ranks, in their process group; all must call it."""
    import torch.distributed as dist

    from profiler.link_worker import probe_joined
    from profiler.links import summarize

    device.occupy()
    plan = order.options.plan(
        dist.get_rank(),
        dist.get_world_size(),
        order.pairs,
        order.groups,
        exercise=order.jobs,
        algorithms=order.algorithms,
    )
    return summarize(gather_everywhere(probe_joined(device, plan)))


def measured_links(ranks: Sequence[RankDevice], probe: LinkProbe) -> LocalLinks:
    """Return the links measured by a probe of all ranks."""
    places, kinds = range(len(ranks)), [member.kind.name for member in ranks]
    links = links_of(
        fit_records(probe, places, kinds, alike=False),
        cost_records(probe, places, alike=False),
        places,
        nodes_of([member.host for member in ranks]),
    )
    if links is None:
        raise UsageError("links: the probe measured no all-reduce over all ranks, must; start two or more")
    return links


def measured_topology(name: str, ranks: Sequence[RankDevice], probe: LinkProbe) -> Topology:
    """Return the topology of the ranks: inside a host a link a pair, between hosts each host's two network links."""
    nodes = nodes_of([member.host for member in ranks])
    kinds = {member.kind.name: member.kind for member in ranks}
    local_index: dict[int, int] = {}
    devices = []
    for rank, (member, node) in enumerate(zip(ranks, nodes, strict=True)):
        devices.append(Device(rank, member.kind.name, node, local_index.get(node, 0)))
        local_index[node] = local_index.get(node, 0) + 1
    inside: dict[int, tuple[float, float]] = {}
    outside: dict[int, tuple[float, float]] = {}
    for pair, (bandwidth, bare_latency) in probe.pairs.items():
        latency = bare_latency + probe.overhead_s
        first, second = (nodes[rank] for rank in pair)
        if first == second:
            inside[first] = (bandwidth, latency)
        else:
            # Half of the latency at each end; the first host's own links are those of the fastest pair.
            for node in (first, second):
                fastest = outside.get(node, (0.0, float("inf")))
                outside[node] = (max(fastest[0], bandwidth), min(fastest[1], latency / 2))
    links: list[Link] = []
    network = {}
    for node, (bandwidth, latency) in outside.items():
        for direction in ("out", "in"):
            network[node, direction] = len(links)
            links.append(Link(f"nic/{node}/{direction}", "nic", bandwidth, latency))
    routes: dict[tuple[int, int], tuple[int, ...]] = {}
    for source in range(len(ranks)):
        for destination in range(len(ranks)):
            if source == destination:
                continue
            if nodes[source] != nodes[destination]:
                routes[source, destination] = (
                    network[nodes[source], "out"],
                    network[nodes[destination], "in"],
                )
            else:
                routes[source, destination] = (len(links),)
                links.append(Link(f"memory/{source}->{destination}", "memory", *inside[nodes[source]]))
    inside_hosts = {pair: route for pair, route in routes.items() if nodes[pair[0]] == nodes[pair[1]]}
    links, ported = with_ports(links, inside_hosts, [member.kind.processor for member in ranks])
    routes.update(ported)
    return Topology(
        name=name,
        kinds=tuple(kinds.values()),
        devices=tuple(devices),
        links=tuple(links),
        routes=routes,
        contention=tuple((name, factor) for name, factor in _contention(ranks, probe) if factor),
    )


def _contention(ranks: Sequence[RankDevice], probe: LinkProbe) -> list[tuple[str, float]]:
    """Return each device kind's contention: the median over the ranks that have it."""
    by_kind: dict[str, list[float]] = {}
    for member, factor in zip(ranks, probe.contentions, strict=True):
        by_kind.setdefault(member.kind.name, []).append(factor)
    return [(name, statistics.median(factors)) for name, factors in by_kind.items()]


def follow(launched: LaunchedRanks, device: PhysicalDevice) -> None:
    """Execute the orders of rank 0, until it has no more; for all other ranks."""
    members(device)
    while not isinstance(order := launched.take(), Leaving):
        if isinstance(order, ProbeOrder):
            probe_ranks(device, order)
        elif isinstance(order, JobOrder):
            _execute(_of_this_host(order.job), device, order.timeout_s)


def lead(launched: LaunchedRanks, job: Job, device: PhysicalDevice, timeout_s: float) -> JobResult | None:
    """Execute a job on all ranks and let the others go; return rank 0's result.

    Raises:
        RankFailure: a rank failed; one line with the rank and the reason.
    """

    def ordered() -> JobResult | None:
        launched.give(JobOrder(job.without_caches(), timeout_s))
        result = _execute(job, device, timeout_s)
        launched.dismiss(Leaving())
        return result

    return launched.execute(ordered)


def _execute(job: Job, device: PhysicalDevice, timeout_s: float) -> JobResult | None:
    from runtime.jobs.job import run_job
    from runtime.launch.processes import occupy

    core_or_gpu = device.core if device.processor == "cpu" else device.index
    return run_job(job, occupy(core_or_gpu, device.processor), timeout_s)


def _of_this_host(job: Job) -> Job:
    """Return the job with its model's folder replaced by this rank's own: hosts need not have equal paths."""
    keywords = {**job.model.keywords, "folder": str(Path.cwd())}
    return replace(job, model=replace(job.model, keywords=keywords))
