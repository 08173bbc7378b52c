"""Topologies that were measured between hosts: stored under a name, found by later commands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.db.records import TopologyRecord
from app.db.store import Store
from app.services.costs.machine import describe, local_devices
from app.services.costs.topologies import (
    NamedTopology,
    check_new_name,
    measured_topologies,
    named_topology,
    put_measured,
)
from app.services.predict.predict import find_target
from app.services.progress import Progress
from app.services.run.cluster import RankDevice, check_ranks, measured_topology
from graph.collectives import CollectiveKind
from graph.errors import SoapstoneError, TopologyError, UsageError
from graph.topology import DeviceKind, Topology, load_topology
from profiler.link_worker import ExchangeTime
from profiler.links import KIB, MIB, LinkProbe, measurement
from search.cost.collective_cost import Prices
from search.cost.cost_table import Origin
from tests.app.conftest import Command

CORE = DeviceKind("core", "cpu", (("float32", 1e9),), 2**30, 1e9, 0.0)
HOSTS = ("a", "a", "b", "b")
# Seconds of a small message or sum, and bytes per second: within a host, and between hosts.
INSIDE, BETWEEN = (1e-4, 1e9), (1e-3, 1e8)
EXCHANGE_S = 2e-3


def ranks_of(hosts: tuple[str, ...] = HOSTS, kind: DeviceKind = CORE) -> list[RankDevice]:
    return [RankDevice(host, kind) for host in hosts]


def probe_of(slower: float = 1.0) -> LinkProbe:
    """Return a probe of two hosts of two devices each, whose times are `slower` as long as the lines above say."""

    def times(line: tuple[float, float]) -> dict[int, tuple[float, ...]]:
        return {
            size: (slower * (line[0] + size / line[1]),) * 3
            for size in (KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB)
        }

    return LinkProbe(
        (
            *(measurement("p2p", pair, times(INSIDE)) for pair in ((0, 1), (2, 3))),
            measurement("p2p", (0, 2), times(BETWEEN)),
            *(measurement("all_reduce", pair, times(INSIDE)) for pair in ((0, 1), (2, 3))),
            *(measurement("all_reduce", group, times(BETWEEN)) for group in ((0, 2), (0, 1, 2, 3))),
        ),
        contentions=(0.5,) * 4,
        exchange=ExchangeTime(EXCHANGE_S + slower * INSIDE[0]),
    )


@pytest.fixture
def store(database: Path) -> Iterator[Store]:
    """A store over the test's database."""
    with Store.open(database) as opened:
        yield opened


def measure(store: Store, name: str, slower: float = 1.0, kind: DeviceKind = CORE) -> Topology:
    environment_id = describe(store, local_devices("cpu", 1)).environment_id
    probe = probe_of(slower)
    topology = measured_topology(name, ranks_of(kind=kind), probe)
    put_measured(store, topology, probe, environment_id)
    return topology


def test_a_measured_topology_has_the_costs_of_each_class_of_pair_and_of_its_groups(store: Store) -> None:
    stored = measure(store, "wire")
    named = named_topology(store, "wire")
    topology = named.topology
    assert topology == stored
    assert named.links is not None
    assert [device.node for device in topology.devices] == [0, 0, 1, 1]
    assert topology.contention_of("core") == 0.5
    for pair, (latency_s, bandwidth) in (
        ((0, 1), INSIDE),
        ((3, 2), INSIDE),
        ((0, 2), BETWEEN),
        ((3, 1), BETWEEN),
    ):
        assert topology.transfer_time_s(*pair, 10**7) == pytest.approx(
            EXCHANGE_S + latency_s + 1e7 / bandwidth, rel=1e-3
        )
    assert named.links.costs.transfers is Origin.MEASURED
    messages = named.links.costs.messages
    for pair, (latency_s, bandwidth) in (((3, 2), INSIDE), ((3, 1), BETWEEN)):
        expected_s = EXCHANGE_S + latency_s + 1e7 / bandwidth
        assert messages[pair].seconds(10**7) == pytest.approx(expected_s, rel=1e-3)
    prices = Prices(topology, named.links.costs)
    for group, (latency_s, bandwidth) in (((2, 3), INSIDE), ((0, 2), BETWEEN), ((0, 1, 2, 3), BETWEEN)):
        collective = prices.of(group, CollectiveKind.ALL_REDUCE)
        assert collective.origin is Origin.MEASURED
        assert collective.duration_ns(10**7) == pytest.approx(1e9 * (latency_s + 1e7 / bandwidth), rel=1e-3)
    assert prices.of((1, 3), CollectiveKind.ALL_REDUCE).origin is Origin.ESTIMATED


def test_all_raw_samples_are_kept(store: Store) -> None:
    measure(store, "wire")
    (kind,) = [kind for kind in store.device_kinds() if kind.description.get("topology") == "wire"]
    environment_id = describe(store, local_devices("cpu", 1)).environment_id
    rows = {(row.pattern, row.size_bytes): row for row in store.link_costs(kind.id, environment_id)}
    for link in probe_of().links:
        members = ",".join(map(str, link.members)) if len(link.members) < 4 else "0-3"
        for sample in link.samples:
            assert rows[f"{link.pattern} {members}", sample.size_bytes].samples_s == sample.samples_s


def test_the_newest_of_a_name_counts(store: Store) -> None:
    measure(store, "wire")
    measure(store, "other", 2.0)
    newest = measure(store, "wire", 3.0)
    assert named_topology(store, "wire").topology == newest
    assert [topology.name for topology in measured_topologies(store)] == ["other", "wire"]
    assert measured_topologies(store)[1] == newest


def test_a_topology_of_that_name_that_was_not_measured_is_another(store: Store) -> None:
    measured = measure(store, "wire")
    drawn = replace(load_topology("p100-cluster", 1), name="wire")
    store.put_topology(TopologyRecord(drawn.digest, "wire", len(drawn.devices), drawn.to_json()))
    assert named_topology(store, "wire").topology == measured
    with pytest.raises(TopologyError, match="is neither a file nor packaged"):
        named_topology(store, "p100")


def test_packaged_names_are_those_of_packaged_topologies(store: Store) -> None:
    assert named_topology(store, "p100-cluster", nodes=1) == NamedTopology(
        load_topology("p100-cluster", 1), None
    )


@pytest.mark.parametrize("part", [{"devices": 2}, {"nodes": 1}])
def test_a_part_of_a_measured_topology_is_refused(store: Store, part: dict[str, int]) -> None:
    measure(store, "wire")
    assert named_topology(store, "wire", devices=4).topology.name == "wire"
    with pytest.raises(UsageError, match="wire: was measured over 4 devices as a whole"):
        named_topology(store, "wire", **part)


@pytest.mark.parametrize("name", ["", "local", "p100-cluster", "a.yaml", "../wire", "1st", "x" * 65, "w\x1b"])
def test_names_of_other_topologies_and_of_files_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name: is"):
        check_new_name(name)


def test_ranks_on_other_hosts_are_not_those_that_were_measured(store: Store) -> None:
    topology = measure(store, "wire")
    check_ranks(topology, ranks_of(), measured=True)
    check_ranks(topology, ranks_of(("a", "b", "c", "d")), measured=False)
    for ranks in (
        ranks_of(("a", "b", "a", "b")),
        ranks_of(kind=replace(CORE, name="other")),
        ranks_of(("a", "b")),
    ):
        with pytest.raises(SoapstoneError, match="topology wire: "):
            check_ranks(topology, ranks, measured=True)


def test_costs_of_devices_that_are_here_can_be_measured(store: Store) -> None:
    (device,) = local_devices("cpu", 1)
    measure(store, "wire", kind=device.kind)
    measure(store, "elsewhere", 2.0)
    target = find_target(store, "wire", Progress())
    group = target.group(device.kind.name)
    assert group is not None
    assert {of_group.kind for of_group in group.devices} == {device.kind}
    assert find_target(store, "elsewhere", Progress()).machine is None


def test_a_search_finds_a_measured_topology_by_its_name(command: Command, database: Path) -> None:
    with Store.open(database) as store:
        topology = measure(store, "wire")
    options = ("--model", "mlp", "--preset", "small", "--proposals", "20", "--workers", "1")
    document = command("search", *options, "--topology", "wire", "--json").document
    assert (document["topology"], document["devices"]) == ("wire", 4)
    with Store.open(database) as store:
        (search,) = store.searches()
        record = store.topology(search.topology_id)
        assert record is not None
        assert record.digest == topology.digest
    shown = command("topology", "show", "wire", "--json").document
    assert {"p2p 0,1", "p2p 0,2", "all_reduce 0-3"} <= {fit["pattern"] for fit in shown["measured"]}
    assert {"name": "wire", "devices": 4, "nodes": 2, "kinds": ["core"]} in command(
        "topology", "list", "--json"
    ).document


def test_an_unknown_topology_makes_no_database(command: Command, database: Path) -> None:
    database.unlink(missing_ok=True)
    outcome = command("search", "--model", "mlp", "--preset", "small", "--topology", "nonesuch")
    assert (outcome.code, database.exists()) == (2, False)
    assert "topology nonesuch: is neither a file nor packaged" in outcome.errors


def test_a_name_is_for_ranks(command: Command) -> None:
    outcome = command("topology", "probe", "--name", "wire", "--device", "cpu")
    assert (outcome.code, outcome.errors.count("\n")) == (2, 1)
    assert "--name: is for ranks that torchrun started" in outcome.errors
