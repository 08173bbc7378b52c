"""`app topology`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import options
from app.cli.output import TerminalProgress, print_json, print_lines, print_table
from graph.errors import UsageError
from graph.texts import counted

if TYPE_CHECKING:
    from app.services.costs.link_costs import LocalLinks
    from graph.topology import Topology

application = typer.Typer(
    help="Device topologies: packaged, from a file, or this machine's.", no_args_is_help=True
)


@application.command("list")
def list_topologies(database: options.Database = None, as_json: options.AsJson = False) -> None:
    """List the packaged topologies, and those that were measured under a name.

    Example: app topology list
    """
    from app.db.schema import status
    from app.db.store import Store
    from app.services.costs.topologies import measured_topologies
    from graph.topology import load_topology, packaged_topologies

    topologies = [load_topology(name) for name in packaged_topologies()]
    # A list makes no database.
    if status(database)[0] is not None:
        with Store.open(database, to_read=True) as store:
            topologies += measured_topologies(store)
    rows = [
        {
            "name": topology.name,
            "devices": len(topology.devices),
            "nodes": topology.node_count,
            "kinds": [kind.name for kind in topology.kinds],
        }
        for topology in topologies
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["name", "nodes", "devices", "kinds"],
        [
            [
                topology.name,
                topology.node_count,
                len(topology.devices),
                ", ".join(k.name for k in topology.kinds),
            ]
            for topology in topologies
        ],
    )


@application.command("show")
def show_topology(
    topology: Annotated[
        str, typer.Argument(help="local, a packaged topology, a YAML file, or the name of a measured one.")
    ],
    nodes: options.Nodes = None,
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    device: options.Device = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Show devices and links of a topology; those of topology local are measured if they never were.

    Example: app topology show p100-cluster
    """
    from app.db.store import Store
    from app.services.costs.topologies import LOCAL, find_topology
    from app.services.predict.predict import find_target

    for name, value in (("--device", device), ("--gpus", gpus)):
        if topology != LOCAL and value is not None:
            raise UsageError(f"{name}: is for topology local, must be left out for {topology}; leave it out")
    if topology == LOCAL:
        with TerminalProgress(quiet=as_json) as progress, Store.open(database) as store:
            target = find_target(
                store,
                topology,
                progress,
                devices=devices,
                nodes=nodes,
                processor=options.processor(device),
                gpus=gpus,
            )
            resolved, links = target.topology, target.links
    else:
        named = find_topology(topology, database, devices=devices, nodes=nodes)
        resolved, links = named.topology, named.links
    _show(resolved, links, as_json=as_json)


@application.command("probe")
def probe_topology(
    gpus: options.Gpus = None,
    devices: options.Devices = None,
    device: options.Device = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Under torchrun: the name under which the topology of all ranks is stored, for --topology.",
        ),
    ] = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure the links between this machine's devices again; under torchrun, those between all ranks.

    Example: app topology probe --device cpu --devices 2

    Example: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr HOST -m app topology probe --name mine
    """
    from runtime.ranks.ranks import is_rank

    if is_rank():
        _probe_ranks(name, devices, device, gpus, database, as_json=as_json)
        return
    from app.db.store import Store
    from app.services.costs.link_costs import local_links, topology_of
    from app.services.costs.machine import describe, local_devices
    from profiler.devices import device_warnings

    if name is not None:
        raise UsageError(
            "--name: is for ranks that torchrun started, must be left out; this machine's own topology is local"
        )
    local = local_devices(options.processor(device), devices, gpus)
    if len(local) < 2:
        raise UsageError(
            "topology probe: there is 1 device, must be at least 2 to have links; give more --devices or --gpus"
        )
    with TerminalProgress(quiet=as_json) as progress, Store.open(database) as store:
        for warning in device_warnings(local):
            progress.warn(warning)
        machine = describe(store, local)
        links = local_links(store, machine, progress, again=True)
        measured = topology_of(machine, links)
    _show(measured, links, as_json=as_json)


def _probe_ranks(
    name: str | None,
    devices: int | None,
    device: str | None,
    gpus: str | None,
    database: str | None,
    *,
    as_json: bool,
) -> None:
    from app.services.run.cluster import probe_cluster
    from runtime.launch.torchrun import DEFAULT_TIMEOUT_S

    if devices is not None:
        raise UsageError("--devices: was given under torchrun, must be left out; every rank is a device")
    if name is None:
        raise UsageError("--name: is missing, must be given under torchrun; name the topology of its ranks")
    with TerminalProgress(quiet=as_json) as progress:
        processor = options.processor(device)
        measured = probe_cluster(database, name, processor, gpus, DEFAULT_TIMEOUT_S, progress)
    if measured is not None:
        _show(measured.topology, measured.links, as_json=as_json)


def _show(topology: Topology, links: LocalLinks | None, *, as_json: bool) -> None:
    import json

    from app.services.costs.link_costs import is_of_one_group

    if as_json:
        document = json.loads(topology.to_json())
        print_json(document if links is None else {**document, "measured": _fits(links)})
        return
    print_lines(
        f"{topology.name}: {counted(len(topology.devices), 'device')} in {counted(topology.node_count, 'node')}"
    )
    print_table(
        ["device kind", "devices", "float32", "memory", "memory bandwidth", "contention"],
        [
            [
                kind.name,
                sum(device.kind_name == kind.name for device in topology.devices),
                f"{kind.peak_flops_per_s('float32') / 1e12:.3g} TFLOP/s",
                f"{kind.memory_bytes / 2**30:.1f} GiB",
                f"{kind.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s",
                f"{topology.contention_of(kind.name):.2f}",
            ]
            for kind in topology.kinds
        ],
    )
    print_table(
        ["link", "kind", "bandwidth", "latency"],
        [
            [
                link.name,
                link.kind,
                f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s",
                f"{link.latency_s * 1e6:.3g} us",
            ]
            for link in topology.links
        ],
    )
    if links is not None:
        fits = [fit for fit in _fits(links) if fit["latency_s"] is not None]
        own = sum(is_of_one_group(fit["pattern"]) for fit in fits)
        print_table(
            ["measured", "devices", "latency", "bandwidth", "residual"],
            [
                [
                    fit["pattern"],
                    fit["group_size"],
                    f"{fit['latency_s'] * 1e6:.3g} us",
                    "" if bandwidth is None else f"{bandwidth / 1e9:.3g} GB/s",
                    "" if residual is None else f"{residual:.1%}",
                ]
                for fit in fits
                for bandwidth, residual in [(fit["bandwidth_bytes_per_s"], fit["residual"])]
                if not is_of_one_group(fit["pattern"])
            ],
        )
        if links.contention_of:
            apart = ", ".join(
                f"{factor:.2f} bound by {bound}" for bound, factor in links.contention_of.items()
            )
            print_lines(f"contention of computation: {apart}; predictions take the mean")
        if own:
            print_lines(f"and {own} lines of single pairs and groups of devices: --json shows them")


def _fits(links: LocalLinks) -> list[dict[str, Any]]:
    """Return the lines fitted to measurements, and the other figures of a probe."""
    from app.services.costs.packs import LINK_FIT

    names = [name for name in LINK_FIT if name != "measured_at"]
    return [{name: getattr(fit, name) for name in names} for fit in links.fits]
