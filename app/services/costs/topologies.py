"""Topologies by name: packaged, of a YAML file, or measured between hosts by `app topology probe --name`.

A measured one is a row of topologies. Its links are rows of link_costs and link_fits, as the machine's own are, under a
kind of their own, which has the topology's name and digest: a later probe of the same name replaces nothing.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.db.records import DeviceKindRecord, TopologyRecord
from app.db.schema import status
from app.db.store import Store
from app.services.costs.link_costs import LocalLinks, cost_records, fit_records, links_between
from app.services.stored import topology_of
from graph.errors import UsageError
from graph.topology import Topology, load_topology, packaged_topologies

if TYPE_CHECKING:
    from profiler.links import LinkProbe

LOCAL = "local"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class NamedTopology:
    """A topology, and its measured links; None where they are those of a file."""

    topology: Topology
    links: LocalLinks | None


def check_new_name(name: str) -> None:
    """Check that a measured topology may have a name.

    Raises:
        UsageError: it is no name, or that of another topology.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name: is {name[:64]!a}, must be a letter, then at most 63 letters, digits, hyphens and underscores; "
            "choose another"
        )
    if name == LOCAL or name in packaged_topologies():
        raise UsageError(f"--name: is {name}, must not be the name of a packaged topology; choose another")


def find_topology(
    name: str,
    database: str | os.PathLike[str] | None,
    *,
    devices: int | None = None,
    nodes: int | None = None,
) -> NamedTopology:
    """Return a topology as `named_topology` does, before the database is opened; one that is not there is not made."""
    if _is_described(name) or status(database)[0] is None:
        return NamedTopology(_described(name, devices, nodes), None)
    with Store.open(database, to_read=True) as store:
        return named_topology(store, name, devices=devices, nodes=nodes)


def named_topology(
    store: Store, name: str, *, devices: int | None = None, nodes: int | None = None
) -> NamedTopology:
    """Return a packaged topology, that of a YAML file, or their first `devices`; else a measured one, whole.

    Raises:
        TopologyError: there is no such topology, or it has fewer devices.
        UsageError: part of a measured topology is asked for.
    """
    topologies = [] if _is_described(name) else measured_topologies(store, name)
    if not topologies:
        return NamedTopology(_described(name, devices, nodes), None)
    (measured,) = topologies
    count = len(measured.devices)
    if nodes is not None or devices not in (None, count):
        raise UsageError(
            f"topology {name}: was measured over {count} devices as a whole, --devices and --nodes must be left out; "
            "measure fewer under another name: app topology probe --name"
        )
    return NamedTopology(measured, measured_links(store, measured))


def measured_topologies(store: Store, name: str | None = None) -> list[Topology]:
    """Return the newest measured topology of each name, or of one alone, by name."""
    newest: dict[str, Topology] = {}
    for record in store.topologies():
        if (
            record.name not in newest
            and name in (None, record.name)
            and store.device_kind(_links_kind(record.name, record.digest)) is not None
        ):
            newest[record.name] = topology_of(record)
    return [newest[key] for key in sorted(newest)]


def measured_links(store: Store, topology: Topology) -> LocalLinks | None:
    """Return the links of a topology that was measured under a name; None for any other."""
    kind = store.device_kind(_links_kind(topology.name, topology.digest))
    if kind is None:
        return None
    nodes = [device.node for device in topology.devices]
    environments = {environment.fingerprint: environment.id for environment in store.environments()}
    environment_id = environments.get(str(kind.description.get("environment")))
    if environment_id is None:
        return None
    return links_between(store, kind.id, environment_id, range(len(nodes)), nodes)


def topology_record(topology: Topology) -> TopologyRecord:
    """Return the row of a topology."""
    return TopologyRecord(topology.digest, topology.name, len(topology.devices), topology.to_json())


def put_measured(store: Store, topology: Topology, probe: LinkProbe, environment_id: int) -> LocalLinks:
    """Store a measured topology with the raw samples and the fits of its links; return the links.

    Raises:
        UsageError: the probe lacks what predictions need.
    """
    environment = store.environment(environment_id)
    kinds = [device.kind_name for device in topology.devices]
    ranks = range(len(kinds))
    kind_id = store.put_device_kind(
        DeviceKindRecord(
            name=_links_kind(topology.name, topology.digest),
            processor=topology.kinds[0].processor,
            memory_bytes=sum(topology.kind(name).memory_bytes for name in kinds),
            description={
                "topology": topology.name,
                "environment": None if environment is None else environment.fingerprint,
            },
        )
    )
    store.put_link_costs(kind_id, environment_id, cost_records(probe, ranks, alike=False))
    store.put_link_fits(kind_id, environment_id, fit_records(probe, ranks, kinds, alike=False))
    store.put_topology(topology_record(topology))
    links = measured_links(store, topology)
    if links is None:
        raise UsageError("links: the probe measured no all-reduce over all ranks, must; start two or more")
    return links


def _links_kind(name: str, digest: str) -> str:
    return f"topology {name} {digest[:12]}"


def _is_described(name: str) -> bool:
    return name in packaged_topologies() or not NAME.fullmatch(name) or os.path.isfile(name)


def _described(name: str, devices: int | None, nodes: int | None) -> Topology:
    topology = load_topology(name, nodes)
    return topology if devices is None else topology.subset(devices)
