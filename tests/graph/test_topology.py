"""Topologies: routes, times and digests, and what a malformed file says."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from graph.errors import TopologyError
from graph.topology import (
    Device,
    DeviceKind,
    Link,
    Topology,
    load_topology,
    local_topology,
    packaged_topologies,
)

CPU = DeviceKind("cpu", "cpu", (("float32", 1e11),), 2**33, 2e10, 1e-6)
DESCRIPTION: dict[str, Any] = {
    "kinds": {
        "P100": {
            "processor": "cuda",
            "peak_flops": {"float32": "10.6 TFLOP/s"},
            "memory": "16 GiB",
            "memory_bandwidth": "732 GB/s",
            "launch_latency": "5 us",
            "contention": 0.25,
        }
    },
    "nodes": {
        "count": 2,
        "devices": {"P100": 3},
        "interconnect": {"type": "nvlink", "bandwidth": "20 GB/s", "latency": "3 us"},
    },
    "network": {"nics": 2, "bandwidth": "100 Gb/s", "latency": "4 us"},
}


def link_names(topology: Topology, source: int, destination: int) -> list[str]:
    return [topology.links[index].name for index in topology.route(source, destination)]


def write(folder: Path, description: Any) -> Path:
    path = folder / "machine.yaml"
    path.write_text(
        description if isinstance(description, str) else yaml.safe_dump(description, sort_keys=False)
    )
    return path


def changed(place: str, value: Any) -> dict[str, Any]:
    """Return DESCRIPTION with the value at a dotted place replaced; with `...` removed."""
    description: dict[str, Any] = yaml.safe_load(yaml.safe_dump(DESCRIPTION))
    *path, last = place.split(".")
    entry = description
    for key in path:
        entry = entry[key]
    if value is ...:
        del entry[last]
    else:
        entry[last] = value
    return description


@pytest.mark.parametrize("name", packaged_topologies())
def test_packaged_topology_loads_with_complete_routes(name: str) -> None:
    topology = load_topology(name)
    assert topology.name == name
    for source in topology.devices:
        for destination in topology.devices:
            route = link_names(topology, source.index, destination.index)
            assert bool(route) == (source != destination)
            ends = {f"node{source.node}/", f"node{destination.node}/"}
            assert {link.split("/")[0] + "/" for link in route} <= ends
            crosses = source.node != destination.node
            assert crosses == any("/nic" in link for link in route)


@pytest.mark.parametrize(
    ("name", "nodes", "devices"),
    [
        ("p100-cluster", 4, 16),
        ("k80-cluster", 16, 64),
        ("dgx1-v100", 1, 8),
        ("dgx-a100", 1, 8),
        ("hgx-h100", 1, 8),
        ("summit", 32, 192),
    ],
)
def test_packaged_topology_has_its_nodes_and_devices(name: str, nodes: int, devices: int) -> None:
    topology = load_topology(name)
    assert (topology.node_count, len(topology.devices)) == (nodes, devices)
    assert [topology.device(index).node for index in (0, devices - 1)] == [0, nodes - 1]


def test_nvlink_joins_every_pair_both_ways() -> None:
    topology = load_topology("p100-cluster")
    assert link_names(topology, 1, 3) == ["node0/nvlink/1->3"]
    assert link_names(topology, 3, 1) == ["node0/nvlink/3->1"]
    # 20 GB/s, 5 us
    assert topology.transfer_time_s(1, 3, 200_000_000) == pytest.approx(0.010005)


def test_flow_between_nodes_takes_a_nic_at_each_end() -> None:
    topology = load_topology("p100-cluster")
    assert link_names(topology, 2, 13) == ["node0/nic0/out", "node3/nic0/in"]
    # 100 Gb/s are 12.5 GB/s; the latency of 5 us is shared out over both ends
    assert topology.transfer_time_s(2, 13, 125_000_000) == pytest.approx(0.010005)


def test_devices_take_nics_in_turn() -> None:
    topology = load_topology("dgx1-v100", nodes=2)
    assert topology.name == "dgx1-v100-x2"
    assert link_names(topology, 5, 8 + 2) == ["node0/nic1/out", "node1/nic2/in"]


def test_node_count_can_be_overridden() -> None:
    topology = load_topology("hgx-h200", nodes=4)
    assert (topology.node_count, len(topology.devices)) == (4, 32)
    assert link_names(topology, 7, 31) == ["node0/nic7/out", "node3/nic7/in"]
    # 400 Gb/s are 50 GB/s
    assert topology.transfer_time_s(7, 31, 50_000_000_000) == pytest.approx(1.000005)


def test_switch_has_one_link_up_and_one_down_per_device() -> None:
    topology = load_topology("dgx-a100")
    assert len(topology.links) == 16
    assert link_names(topology, 2, 6) == ["node0/nvswitch/2/up", "node0/nvswitch/6/down"]
    assert topology.transfer_time_s(2, 6, 300_000_000) == pytest.approx(0.001005)


def test_mesh_goes_over_the_widest_shortest_way() -> None:
    topology = load_topology("dgx1-v100")
    assert link_names(topology, 0, 3) == ["node0/nvlink/0->3"]
    # Two NVLinks between 0 and 3, one between 0 and 1.
    assert topology.transfer_time_s(0, 3, 50_000_000_000) == pytest.approx(1.000005)
    assert topology.transfer_time_s(0, 1, 50_000_000_000) == pytest.approx(2.000005)
    # Over 1 (1 and 2 NVLinks) or over 4 (2 and 1): equally wide, so the lower index.
    assert link_names(topology, 0, 5) == ["node0/nvlink/0->1", "node0/nvlink/1->5"]
    # Over 3 (2 and 1), 4 (2 and 2): the wider.
    assert link_names(topology, 0, 7) == ["node0/nvlink/0->4", "node0/nvlink/4->7"]


def test_devices_of_one_kind_have_six_nvlinks_each() -> None:
    topology = load_topology("dgx1-v100")
    for device in range(8):
        out = [link for link in topology.links if link.name.startswith(f"node0/nvlink/{device}->")]
        assert sum(link.bandwidth_bytes_per_s for link in out) == 6 * 25e9


def test_pcie_tree_goes_up_only_as_far_as_needed() -> None:
    topology = load_topology("k80-cluster")
    assert link_names(topology, 0, 1) == ["node0/pcie/device0/up", "node0/pcie/device1/down"]
    assert link_names(topology, 1, 2) == [
        "node0/pcie/device1/up",
        "node0/pcie/switch0/up",
        "node0/pcie/switch1/down",
        "node0/pcie/device2/down",
    ]
    # 15.75 GB/s, four times 2.5 us
    assert topology.transfer_time_s(1, 2, 15_750_000) == pytest.approx(0.00101)


def test_sockets_are_joined_by_qpi_and_half_duplex_shares_a_link(tmp_path: Path) -> None:
    interconnect = {
        "type": "pcie",
        "bandwidth": "10 GB/s",
        "latency": "1 us",
        "switches": [[0], [1], [2]],
        "sockets": [[0, 1], [2]],
        "qpi": {"bandwidth": "5 GB/s", "latency": "2 us"},
        "duplex": "half",
    }
    topology = load_topology(write(tmp_path, changed("nodes.interconnect", interconnect)))
    assert link_names(topology, 0, 2) == [
        "node0/pcie/device0/both",
        "node0/pcie/switch0/both",
        "node0/qpi/0->1",
        "node0/pcie/switch2/both",
        "node0/pcie/device2/both",
    ]
    assert link_names(topology, 2, 0)[2] == "node0/qpi/1->0"
    assert set(topology.route(0, 1)) == set(topology.route(1, 0))
    assert topology.transfer_time_s(0, 2, 5_000_000) == pytest.approx(0.001 + 6e-6)


def test_nodes_may_differ(tmp_path: Path) -> None:
    description = changed("kinds.K80", {**DESCRIPTION["kinds"]["P100"], "memory": "12 GiB", "contention": 0})
    single = {"count": 1, "devices": ["K80"]}
    mixed = {**DESCRIPTION["nodes"], "count": 1, "devices": ["P100", "K80"]}
    topology = load_topology(write(tmp_path, {**description, "nodes": [single, mixed]}))
    assert [device.kind_name for device in topology.devices] == ["K80", "P100", "K80"]
    assert [(device.node, device.local_index) for device in topology.devices] == [(0, 0), (1, 0), (1, 1)]
    assert topology.kind_of(0).memory_bytes == 12 * 2**30
    assert topology.contention_of("P100") == 0.25
    assert topology.contention_of("K80") == 0
    with pytest.raises(TopologyError, match="nodes: has 2 groups"):
        load_topology(tmp_path / "machine.yaml", nodes=3)


def test_quantities_have_units(tmp_path: Path) -> None:
    topology = load_topology(write(tmp_path, DESCRIPTION))
    kind = topology.kind("P100")
    assert kind.peak_flops_per_s("float32") == 10.6e12
    assert kind.memory_bytes == 16 * 2**30
    assert kind.memory_bandwidth_bytes_per_s == 732e9
    assert kind.launch_latency_s == pytest.approx(5e-6)
    with pytest.raises(TopologyError, match="P100: no peak for precision bfloat16, it has float32"):
        kind.peak_flops_per_s("bfloat16")
    same = changed("network.bandwidth", 12.5e9)
    same["network"]["latency"] = "4e-6"
    assert load_topology(write(tmp_path, same)).digest == topology.digest


MALFORMED = [
    ("kinds", ..., "kinds: is missing"),
    (
        "kinds.P100.memory",
        "16 GB/s",
        r"kinds.P100.memory: is '16 GB/s', must be a number, with a unit out of B, ",
    ),
    ("kinds.P100.memory", None, "kinds.P100.memory: is empty"),
    ("kinds.P100.memory", "1e30 B", "kinds.P100: .*memory is 1e.30 B, must be at most"),
    ("kinds.P100.contention", 1e30, "contention of P100 is 1e.30 s/s, must be at most 1e.06"),
    ("kinds.P100.memory_bandwidth", "-1 GB/s", "kinds.P100: .*memory bandwidth is -1e.09 B/s, must be > 0"),
    (
        "kinds.P100.memory_bandwidth",
        "1.2.3 GB/s",
        "kinds.P100.memory_bandwidth: is '1.2.3 GB/s', must be a number",
    ),
    ("kinds.P100.processor", "tpu", "kinds.P100.processor: is 'tpu', must be one of cpu, cuda"),
    (
        "kinds.P100.peak_flops",
        {"float8": 1},
        "kinds.P100.peak_flops.float8: is unknown, keys here are float32",
    ),
    ("kinds.P100.speed", 3, "kinds.P100.speed: is unknown"),
    ("kinds.P100.contention", -1, "contention of P100 is -1"),
    ("kinds.P100.contention", "1 s", "kinds.P100.contention: is '1 s', must be a number without a unit"),
    ("kinds", {4: {}}, "kinds: has the key 4, keys must be text"),
    ("nodes", 4, "nodes: is 4, must be a map of keys to values"),
    ("nodes.count", 0, "nodes.count: is 0, must be a whole number >= 1"),
    ("nodes.count", True, "nodes.count: is True, must be a whole number"),
    ("nodes.devices", {"V100": 2}, "nodes.devices.V100: is no kind of this file, those are P100"),
    ("nodes.devices", ["V100"], r"nodes.devices\[0\]: is 'V100', must be one of P100"),
    ("nodes.interconnect", ..., "nodes.interconnect: is missing, 3 devices need it"),
    (
        "nodes.interconnect.type",
        "torus",
        "nodes.interconnect.type: is 'torus', must be one of nvlink, switch, pcie",
    ),
    ("nodes.interconnect.type", ..., "nodes.interconnect.type: is missing"),
    ("nodes.interconnect.bandwidth", 0, "nodes.interconnect.bandwidth: is 0 B/s, must be > 0"),
    ("nodes.interconnect.latency", "-1 us", "nodes.interconnect.latency: is -1e-06 s, must be >= 0"),
    ("nodes.interconnect.connections", [[0, 1, 1]], "connections: leave devices 0 and 2 without a route"),
    (
        "nodes.interconnect.connections",
        [[0, 3, 1]],
        r"connections\[0\]: is \[0, 3, 1\], must be two of the 3 devices",
    ),
    (
        "nodes.interconnect.connections",
        [[0, 1, 1], [1, 0, 2]],
        r"connections\[1\]: names the pair \[0, 1\] again",
    ),
    ("network", ..., "network: is missing, 2 nodes need it"),
    ("network.nics", 1.5, "network.nics: is 1.5, must be a whole number >= 1"),
]


@pytest.mark.parametrize(("place", "value", "message"), MALFORMED)
def test_malformed_file_is_one_line_that_names_file_and_key(
    tmp_path: Path, place: str, value: Any, message: str
) -> None:
    path = write(tmp_path, changed(place, value))
    with pytest.raises(TopologyError, match=message) as caught:
        load_topology(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "kinds: [", "just words", "kinds:\n\t- tab", "\x00"])
def test_text_that_is_no_topology_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TopologyError) as caught:
        load_topology(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_pcie_groups_must_hold_every_device_once(tmp_path: Path) -> None:
    interconnect = {"type": "pcie", "bandwidth": 1, "latency": 0, "switches": [[0, 1], [1, 2]]}
    with pytest.raises(TopologyError, match=r"switches: is .*must hold each of 0 to 2 once"):
        load_topology(write(tmp_path, changed("nodes.interconnect", interconnect)))
    interconnect = {
        "type": "pcie",
        "bandwidth": 1,
        "latency": 0,
        "switches": [[0, 1], [2]],
        "sockets": [[0], [1]],
    }
    with pytest.raises(TopologyError, match=r"interconnect\.qpi: is missing, 2 sockets need it"):
        load_topology(write(tmp_path, changed("nodes.interconnect", interconnect)))


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        TopologyError, match=r"topology dgx9: is neither .* local, or dgx-a100, dgx1-v100, .*p100-cluster"
    ):
        load_topology("dgx9")


def test_node_count_must_be_positive() -> None:
    with pytest.raises(TopologyError, match=r"nodes is given as 0, must be >= 1"):
        load_topology("hgx-h100", nodes=0)


@pytest.mark.parametrize("name", packaged_topologies())
def test_json_round_trip_keeps_topology_and_digest(name: str) -> None:
    topology = load_topology(name)
    again = Topology.from_json(topology.to_json())
    assert again == topology
    assert (again.digest, hash(again)) == (topology.digest, hash(topology))


def test_digest_is_stable_and_tells_machines_apart() -> None:
    topology = local_topology(2, CPU, 4e9, 1e-4, 0.5)
    # A change of this value orphans every stored topology: raise FORMAT_VERSION with it.
    assert topology.digest == "110c14d91aa56643c22adc88bc50803e8cb25aec22e7b0abb8a944fc00b235d2"
    assert replace(topology, name="other").digest == topology.digest
    assert local_topology(2, CPU, 4e9, 1e-4, 0.25).digest != topology.digest
    assert local_topology(2, CPU, 5e9, 1e-4, 0.5).digest != topology.digest


def test_digest_ignores_the_order_of_routes() -> None:
    topology = local_topology(3, CPU, 4e9, 1e-4)
    turned = replace(topology, routes=dict(sorted(topology.routes.items(), reverse=True)))
    assert turned == topology
    assert turned.digest == topology.digest


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "name": "x"}'])
def test_malformed_json_is_one_line(text: str) -> None:
    with pytest.raises(TopologyError, match="topology JSON: ") as caught:
        Topology.from_json(text)
    assert "\n" not in str(caught.value)


@given(
    count=st.integers(1, 6),
    size_bytes=st.integers(0, 2**40),
    bandwidth=st.floats(1e6, 1e12),
    latency=st.floats(0, 1e-3),
)
def test_local_topology_has_a_link_per_ordered_pair(
    count: int, size_bytes: int, bandwidth: float, latency: float
) -> None:
    topology = local_topology(count, CPU, bandwidth, latency)
    assert len(topology.links) == count * (count - 1)
    used = [topology.route(i, j) for i in range(count) for j in range(count) if i != j]
    assert sorted(used) == [(index,) for index in range(len(topology.links))]
    assert topology.transfer_time_s(count - 1, count - 1, size_bytes) == 0
    if count > 1:
        assert topology.transfer_time_s(0, count - 1, size_bytes) == latency + size_bytes / bandwidth


def test_local_topology_takes_measured_pairs() -> None:
    topology = local_topology(2, CPU, 4e9, 1e-4, measured={(1, 0): (2e9, 3e-4)})
    assert topology.transfer_time_s(0, 1, 4_000_000) == pytest.approx(0.0011)
    assert topology.transfer_time_s(1, 0, 4_000_000) == pytest.approx(0.0023)


def test_messages_of_gpus_share_the_port_out_of_one_and_the_port_into_one() -> None:
    gpu, measured = replace(CPU, name="gpu", processor="cuda"), {(0, 1): (8e9, 2e-4)}
    topology = local_topology(4, gpu, 4e9, 1e-4, measured=measured)
    apart = local_topology(4, gpu, 4e9, 1e-4, measured=measured, ports=False)
    pairs = list(permutations(range(4), 2))
    for source, destination in pairs:
        expected = apart.transfer_time_s(source, destination, 10**7)
        assert topology.transfer_time_s(source, destination, 10**7) == expected
    for first, second in permutations(pairs, 2):
        shares = not set(topology.route(*first)).isdisjoint(topology.route(*second))
        assert shares == (first[0] == second[0] or first[1] == second[1])
        assert set(apart.route(*first)).isdisjoint(apart.route(*second))


def test_a_cpu_has_no_port_beside_gpus() -> None:
    gpu = replace(CPU, name="gpu", processor="cuda")
    topology = local_topology(3, [gpu, gpu, CPU], 4e9, 1e-4)
    assert [link.name for link in topology.links[6:]] == [
        "port/0/out",
        "port/1/out",
        "port/0/in",
        "port/1/in",
    ]
    assert len(topology.route(0, 1)) == 3
    assert len(topology.route(0, 2)) == len(topology.route(2, 1)) == 1


def test_subset_keeps_the_first_devices_and_their_routes() -> None:
    topology = load_topology("p100-cluster")
    part = topology.subset(6)
    assert part.name == "p100-cluster[:6]"
    assert part.devices == topology.devices[:6]
    for source in range(6):
        for destination in range(6):
            assert link_names(part, source, destination) == link_names(topology, source, destination)
    used = {index for route in part.routes.values() for index in route}
    assert used == set(range(len(part.links)))
    assert topology.subset(16) is topology
    assert topology.subset(1).links == ()
    for count in (0, 17):
        with pytest.raises(
            TopologyError, match=f"p100-cluster: {count} devices asked for, must be between 1 and 16"
        ):
            topology.subset(count)


@pytest.mark.parametrize("device", [-1, 2])
def test_unknown_device_is_named(device: int) -> None:
    topology = local_topology(2, CPU, 4e9, 1e-4)
    with pytest.raises(TopologyError, match=f"topology local: no device {device}, it has devices 0 to 1"):
        topology.route(0, device)


def two_devices(**changes: Any) -> Topology:
    values: dict[str, Any] = {
        "name": "pair",
        "kinds": (CPU,),
        "devices": (Device(0, "cpu", 0, 0), Device(1, "cpu", 0, 1)),
        "links": (Link("bus", "pcie", 1e9, 0.0),),
        "routes": {(0, 1): (0,), (1, 0): (0,)},
    }
    return Topology(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routes": {(0, 1): (0,)}}, "no route 1->0"),
        ({"routes": {(0, 1): (0,), (1, 0): (1,)}}, r"route 1->0 is \[1\], must be distinct links out of 1"),
        ({"routes": {(0, 1): (0, 0), (1, 0): (0,)}}, r"route 0->1 is \[0, 0\]"),
        ({"routes": {(0, 1): (), (1, 0): (0,)}}, r"route 0->1 is \[\]"),
        ({"routes": {(0, 1): (0,), (1, 0): (0,), (0, 2): (0,)}}, "route 0->2 does not join two of 2 devices"),
        ({"devices": ()}, "has no device"),
        ({"devices": (Device(1, "cpu", 0, 0),)}, "device at place 0 has index 1"),
        ({"devices": (Device(0, "gpu", 0, 0),)}, "device 0 is of kind gpu, known are cpu"),
        ({"kinds": (CPU, CPU)}, "kinds are cpu, cpu, must differ"),
        ({"contention": (("gpu", 0.1),)}, "contention names gpu"),
        ({"contention": (("cpu", float("nan")),)}, "contention of cpu is nan"),
    ],
)
def test_invalid_topology_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        two_devices(**changes)


def test_shared_bus_is_one_link_of_both_directions() -> None:
    assert two_devices().route(0, 1) == two_devices().route(1, 0) == (0,)


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (1.0, -1e-9)]
)
def test_link_needs_bandwidth_and_no_negative_latency(bandwidth: float, latency: float) -> None:
    with pytest.raises(TopologyError, match="link x: "):
        Link("x", "pcie", bandwidth, latency)


def test_negative_size_is_refused() -> None:
    with pytest.raises(TopologyError, match="size is -1 B, must be >= 0"):
        two_devices().transfer_time_s(0, 1, -1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("kinds: {}\nkinds: {}\nnodes: {}\n", "kinds is there twice"),
        ("[" * 20_000, "is not YAML"),
        (f"name: {'7' * 6000}\nkinds: {{}}\nnodes: {{}}\n", "too many digits"),
        (f"name: 0x{'7' * 6000}\nkinds: {{}}\nnodes: {{}}\n", "too many digits"),
        ("name: 2026-13-40\nkinds: {}\nnodes: {}\n", "is not YAML"),
    ],
)
def test_yaml_that_repeats_a_key_or_never_ends_is_one_line(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(TopologyError, match=words) as caught:
        load_topology(file)
    assert "\n" not in str(caught.value)


def test_more_devices_than_routes_can_be_kept_for_are_refused() -> None:
    with pytest.raises(TopologyError, match="at most 4096"):
        load_topology("p100-cluster", nodes=10_000_000)


@pytest.mark.parametrize("name", packaged_topologies())
def test_the_text_is_canonical_json(name: str) -> None:
    text = load_topology(name).to_json()
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
