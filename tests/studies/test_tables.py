"""The study's sums: speedups, the paper's ranges, what the zoo's rows say, and the experts' strategy by depth."""

from __future__ import annotations

from typing import Any

import pytest

from app.services.models.models import import_graph, requested_model
from graph.aliasing import base_name
from graph.errors import UsageError
from graph.topology import load_topology
from scripts.benchmarks.line_plot import nice_step
from scripts.studies import show, tables
from scripts.studies.cells import (
    CLUSTERS,
    K80,
    P100,
    PAPER_NETWORKS,
    ZOO_PLACES,
    Request,
    StudyCell,
    cells,
    study_cells,
    zoo_cells,
)
from scripts.studies.experts import by_depth
from scripts.studies.paper import REPORTED, Reported
from scripts.studies.results import StudyResult


def result(
    network: str,
    times_s: dict[str, float],
    *,
    topology: str = P100,
    devices: int = 16,
    batch_size: int = 1024,
    optcnn_s: float | None = None,
    chains: tuple[tuple[str, float | None], ...] = (),
    unfit: tuple[str, ...] = (),
    gap: float | None = None,
) -> StudyResult:
    """Return a result with these step times."""
    document: dict[str, Any] = {
        "failure": None,
        "strategies": {
            name: {
                "step_time_s": time_s, "bytes_moved": 10**9, "compute_s": 2.0, "feasible": name not in unfit,
            }
            for name, time_s in times_s.items()
        },
        "optcnn": None if optcnn_s is None else {"step_time_s": optcnn_s},
        "chains": [{"start": start, "best_s": best_s} for start, best_s in chains],
        "proposals": 2000,
        "search_s": 1.0,
        "gap": gap,
        "lower_bound_s": 0.05,
    }  # fmt: skip
    return StudyResult(StudyCell(network, topology, devices, batch_size, "paper", 2000, 4, 0), document)


def test_speedups_are_ratios_of_step_times_and_throughput_is_of_the_whole_batch() -> None:
    one = result(
        "inception", {"found": 0.2, "data-parallel": 0.3, "expert": 0.5, "stanza": 0.25}, optcnn_s=0.22
    )
    (row,) = tables.throughput_table([one]).rows
    assert row["found /s"] == pytest.approx(5120)
    assert row["over data parallel"] == pytest.approx(1.5)
    assert row["over expert"] == pytest.approx(2.5)
    assert row["over OptCNN"] == pytest.approx(1.1)
    assert row["best baseline"] == "stanza"
    assert row["over best baseline"] == pytest.approx(1.25)


def test_recurrent_networks_are_compared_with_the_experts_strategy_by_depth() -> None:
    one = result("nmt", {"found": 0.2, "data-parallel": 0.3, "expert": 0.9, "expert-by-depth": 0.4})
    (row,) = tables.throughput_table([one]).rows
    assert row["over expert"] == pytest.approx(2.0)


def test_an_expert_that_is_data_parallelism_itself_has_its_time() -> None:
    one = result("inception", {"found": 0.2, "data-parallel": 0.3})
    assert one.time_s("expert") == 0.3
    assert one.time_s("stanza") is None


def test_what_does_not_fit_is_no_baseline() -> None:
    one = result("inception", {"found": 0.2, "data-parallel": 0.3, "stanza": 0.1}, unfit=("stanza",))
    assert (one.best_baseline, one.throughput("stanza")) == ("data-parallel", None)


@pytest.mark.parametrize(
    ("speedup", "verdict"), [(1.294, "below"), (1.296, "within"), (3.304, "within"), (3.31, "above")]
)
def test_a_speedup_is_held_against_a_range_to_two_decimals(speedup: float, verdict: str) -> None:
    assert Reported("nmt", P100, 16, "data-parallel", 1.3, 3.3).verdict(speedup) == verdict


def test_every_range_of_the_paper_has_a_cell_in_both_readings_of_the_batch() -> None:
    request = Request()
    both = [(study_cells(request), True), (zoo_cells(request), False)]
    for found, weak in both:
        places = {(one.network, one.topology, one.devices) for one in found if tables.is_weak(one) is weak}
        assert {(one.network, one.topology, one.devices) for one in REPORTED} <= places


def test_both_readings_of_the_batch_stand_beside_the_range() -> None:
    weak = result("nmt", {"found": 0.2, "data-parallel": 0.22, "expert-by-depth": 0.4}, optcnn_s=0.2)
    strong = result("nmt", {"found": 0.1, "data-parallel": 0.2, "expert-by-depth": 0.4}, batch_size=64)
    rows = {row["over"]: row for row in tables.paper_table([weak, strong]).rows}
    parallel = rows["data-parallel"]
    assert [parallel["batch each"], parallel["batch in all"]] == pytest.approx([1.1, 2.0])
    assert [parallel["batch each:"], parallel["batch in all:"]] == ["below", "within"]
    assert rows["expert"]["batch in all:"] == "above"
    assert rows["optcnn"]["batch in all"] is None


def test_transfers_are_those_of_nmt_on_64_k80() -> None:
    times = {"found": 0.2, "data-parallel": 0.3, "expert-by-depth": 0.4}
    elsewhere = result("nmt", times)
    there = result("nmt", times, topology=K80, devices=64, batch_size=4096)
    rows = tables.transfer_table([elsewhere, there]).rows
    assert [row["strategy"] for row in rows] == ["data-parallel", "expert", "found"]
    assert [row["paper GB"] for row in rows] == pytest.approx([65.8, 24.2, 12.1])
    assert {row["transfers GB"] for row in rows} == {1.0}


def test_a_step_is_made_up_of_what_a_mean_device_computes_and_of_transfers() -> None:
    one = result("nmt", {"found": 0.2, "data-parallel": 0.3, "expert-by-depth": 0.4})
    small = result("nmt", {"found": 0.2, "data-parallel": 0.3}, devices=8)
    (row,) = tables.step_table([one, small]).rows
    assert (row["expert ms"], row["found: computing ms"]) == pytest.approx((400, 125))
    assert row["data parallel: GB"] == 1.0


@pytest.mark.parametrize(
    ("found_s", "chains", "gap", "text"),
    [
        (0.2, (("random", 0.21), ("optcnn", 0.29)), 0.5, "ahead, also without"),
        (0.2, (("random", 0.31), ("data-parallel", 0.2)), 0.5, "ahead, with baselines alone"),
        (0.2, (("random", None),), 0.5, "ahead, with baselines alone"),
        (0.3, (("random", 0.4),), 0.012, "none can be ahead by over 1.2 %"),
        (0.3, (("random", 0.4),), 0.5, "none found in 2,000 proposals"),
    ],
)
def test_a_row_of_the_zoo_says_who_is_ahead_or_why_nobody(
    found_s: float, chains: tuple[tuple[str, float | None], ...], gap: float, text: str
) -> None:
    one = result("vgg16", {"found": found_s, "data-parallel": 0.3}, chains=chains, gap=gap, batch_size=256)
    assert tables.why(one) == text


def test_a_network_that_nothing_fits_says_so_and_is_counted() -> None:
    cell = StudyCell("gpt2", P100, 4, 512, "paper", 2000, 4, 0)
    one = StudyResult(cell, {"failure": "search: every strategy met exceeds the devices' memories"})
    (row,) = tables.zoo_table([one]).rows
    assert (row["why"], row["found ms"]) == ("nothing fits the memory", None)
    assert tables.summary([one])["nothing fits"] == 1


def test_what_is_found_without_baselines_is_of_random_chains_and_optcnn() -> None:
    one = result(
        "vgg16", {"found": 0.1, "data-parallel": 0.3}, optcnn_s=0.25,
        chains=(("data-parallel", 0.1), ("random", 0.28), ("optcnn", None)),
    )  # fmt: skip
    (row,) = tables.zoo_table([one]).rows
    assert (row["without baselines ms"], row["random starts ms"]) == pytest.approx((250, 280))
    assert row["its gain"] == pytest.approx(1.2)


def test_cells_are_the_papers_and_the_zoos_each_once() -> None:
    request = Request()
    assert len(study_cells(request)) == len(PAPER_NETWORKS) * sum(len(counts) for counts in CLUSTERS.values())
    assert {one.batch_size for one in study_cells(request) if one.devices == 64} == {64 * 64, 64 * 256}
    assert {(one.topology, one.devices) for one in zoo_cells(request)} == set(ZOO_PLACES)
    every = cells(request)
    assert len(set(every)) == len(every) == len({one.key for one in every})


def test_optcnn_is_searched_wherever_the_paper_has_it() -> None:
    with_optcnn = {
        (one.network, one.topology, one.devices)
        for one in study_cells(Request())
        if one.algorithms.startswith("optcnn")
    }
    assert {
        (one.network, one.topology, one.devices) for one in REPORTED if one.over == "optcnn"
    } <= with_optcnn
    assert ("inception", K80, 64) not in with_optcnn


def test_a_cell_is_of_the_networks_and_devices_that_were_asked_for() -> None:
    found = cells(Request(networks=("nmt", "dlrm"), devices=(16, 64), budget=7))
    assert {(one.network, one.devices, one.proposals) for one in found} == {
        ("nmt", 16, 7), ("nmt", 64, 7), ("dlrm", 16, 7), ("dlrm", 64, 7),
    }  # fmt: skip
    with pytest.raises(UsageError, match="no network is on so many devices"):
        cells(Request(tables=("study",), networks=("dlrm",)))


def test_layers_are_on_devices_of_their_own_and_samples_are_split_over_nodes() -> None:
    graph = import_graph(requested_model("rnntc", "small", 8), batch_norm="synchronized").graph
    topology = load_topology(P100).subset(8)
    strategy = by_depth(graph, topology)
    strategy.validate(graph, 8)
    places: dict[str, set[tuple[int, ...]]] = {}
    for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
        if base_name(operator.target) == "lstm_cell":
            weight = next(name for name in operator.inputs if "weight_hh" in name)
            places.setdefault(weight, set()).add(configuration.devices)
    # Both steps of a layer stay where its weights are: one device of either node of four.
    assert all(len(found) == 1 for found in places.values())
    (first,), (second,) = places.values()
    assert (len(first), first[0] // 4, first[1] // 4) == (2, 0, 1)
    assert set(first).isdisjoint(second)


def test_a_network_without_cells_has_no_depths() -> None:
    graph = import_graph(requested_model("mlp", "small", 8), batch_norm="synchronized").graph
    with pytest.raises(UsageError, match="mlp-small has no recurrent cells"):
        by_depth(graph, load_topology(P100).subset(4))


def test_markdown_has_a_line_a_row_and_a_dash_for_what_is_not_known() -> None:
    table = tables.throughput_table([result("inception", {"found": 0.2, "data-parallel": 0.3})])
    lines = show.markdown([table]).splitlines()
    assert lines[0] == f"## {table.title}"
    assert lines[4].startswith(
        "| inception | p100-cluster | 16 | 3,413 | 3,413 | - | data-parallel | 5,120 | 1.50 |"
    )
    assert lines[3].startswith("| --- | --- | ---: |")


@pytest.mark.parametrize(("top", "step"), [(0.31, 0.1), (7.0, 2.0), (16.0, 5.0), (2900.0, 500.0)])
def test_axes_have_three_to_seven_round_ticks(top: float, step: float) -> None:
    assert nice_step(top) == pytest.approx(step)
    assert 3 <= top / nice_step(top) <= 7.5


def test_three_ticks_are_found_where_a_third_is_not_exact() -> None:
    assert nice_step(0.3) == 0.1
