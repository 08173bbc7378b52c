"""`app topology`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli import options

if TYPE_CHECKING:
    from graph.topology import Topology

application = typer.Typer(
    help="Device topologies: packaged, from a file, or this machine's.", no_args_is_help=True
)


@application.command("list")
def list_topologies(as_json: options.AsJson = False) -> None:
    """List the packaged topologies.

    Example: app topology list
    """
    from app.cli.output import print_json, print_table
    from graph.topology import load_topology, packaged_topologies

    found = [load_topology(name) for name in packaged_topologies()]
    rows = [
        {
            "name": one.name,
            "devices": len(one.devices),
            "nodes": one.node_count,
            "kinds": [kind.name for kind in one.kinds],
        }
        for one in found
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["name", "nodes", "devices", "kinds"],
        [[one.name, one.node_count, len(one.devices), ", ".join(k.name for k in one.kinds)] for one in found],
    )


@application.command("show")
def show_topology(
    topology: Annotated[str, typer.Argument(help="local, a packaged topology, or a YAML file.")],
    nodes: options.Nodes = None,
    devices: options.Devices = None,
    device: options.Device = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Show devices and links of a topology; local ones are measured if they never were.

    Example: app topology show p100-cluster
    """
    from app.cli.output import TerminalProgress
    from app.db.store import Store
    from app.services.predicting import LOCAL, find_target
    from graph.errors import UsageError
    from graph.topology import load_topology

    if topology != LOCAL and device is not None:
        raise UsageError(f"--device: is for topology local, must be left out for {topology}; leave it out")
    if topology == LOCAL:
        with TerminalProgress(quiet=as_json) as progress, Store.open(database) as store:
            found = find_target(
                store, topology, progress, devices=devices, nodes=nodes, processor=options.processor(device)
            ).topology
    else:
        found = load_topology(topology, nodes)
        found = found if devices is None else found.subset(devices)
    _show(found, as_json=as_json)


@application.command("probe")
def probe_topology(
    devices: options.Devices = None,
    device: options.Device = None,
    database: options.Database = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure the links between this machine's devices again.

    Example: app topology probe --device cpu --devices 2
    """
    from app.cli.output import TerminalProgress
    from app.db.store import Store
    from app.services.machine import default_processor, describe, local_devices, local_links, topology_of
    from graph.errors import UsageError

    found_devices = local_devices(options.processor(device) or default_processor(), devices)
    if len(found_devices) < 2:
        raise UsageError(
            "topology probe: there is 1 device, must be at least 2 to have links; give more --devices"
        )
    with TerminalProgress(quiet=as_json) as progress, Store.open(database) as store:
        machine = describe(store, found_devices)
        found = topology_of(machine, local_links(store, machine, progress, again=True))
    _show(found, as_json=as_json)


def _show(topology: Topology, *, as_json: bool) -> None:
    import json

    from app.cli.output import print_json, print_lines, print_table

    if as_json:
        print_json(json.loads(topology.to_json()))
        return
    print_lines(f"{topology.name}: {len(topology.devices)} devices in {topology.node_count} nodes")
    print_table(
        ["device kind", "devices", "float32", "memory", "memory bandwidth", "contention"],
        [
            [
                kind.name,
                sum(one.kind_name == kind.name for one in topology.devices),
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
