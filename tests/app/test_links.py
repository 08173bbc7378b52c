"""Links in the database: what a probe measured is kept with its error, and is what predictions take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from app.cli.output import TerminalProgress
from app.db.records import DeviceKindRecord, EnvironmentRecord
from app.db.store import Store
from app.services.costs import link_costs as links
from app.services.costs.link_costs import (
    LONGEST_PATTERN,
    cost_records,
    fit_records,
    links_between,
    links_of,
    local_links,
    members_text,
    places_named,
    stored_links,
    topology_of,
)
from app.services.costs.machine import describe, local_devices
from app.services.costs.packs import merge_pack, read_pack, write_pack
from app.services.predict.predict import Target
from app.services.progress import Progress
from graph.collectives import CollectiveKind
from graph.errors import UsageError
from graph.topology import DeviceKind, local_topology
from profiler.link_patterns import COLLECTIVE_PATTERNS, SUCCESSIVE, Pattern
from profiler.link_worker import ExchangeTime
from profiler.links import MIB, LinkProbe, measurement
from profiler.pinning import usable_cores
from search.cost.collective_cost import Prices
from search.cost.cost_table import Origin
from search.cost.link_costs import Curve
from tests.app.conftest import Command

PATTERNS: tuple[Pattern, ...] = ("p2p", *COLLECTIVE_PATTERNS, SUCCESSIVE + "library")
PAIR = ("--device", "cpu", "--devices", "2")


def test_what_a_probe_measured_is_what_predictions_take(probed: Path) -> None:
    with Store.open(probed) as store:
        machine = describe(store, local_devices("cpu", 2))
        links = stored_links(store, machine)
        assert links is not None
        fits = {fit.pattern: fit for fit in store.link_fits(machine.links_kind_id, machine.environment_id)}
        medians: dict[str, dict[int, float]] = {pattern: {} for pattern in PATTERNS}
        for row in store.link_costs(machine.links_kind_id, machine.environment_id):
            medians[row.pattern][row.size_bytes] = row.median_s
    assert set(fits) == {"p2p", "contention", "exchange", *COLLECTIVE_PATTERNS, SUCCESSIVE + "library"}
    costs = Target(topology_of(machine, links), machine, links).link_costs
    assert links.unmeasured == ()
    assert (costs.transfers, costs.by_members) == (Origin.MEASURED, {})
    exchange_s = fits["exchange"].latency_s
    assert exchange_s is not None
    for kind in CollectiveKind:
        curve = Curve.through(medians[kind.value.replace("-", "_")])
        # What stands for messages between operators takes what an exchange takes besides.
        besides_s = 0.0 if kind is CollectiveKind.ALL_REDUCE else exchange_s
        assert costs.by_size[kind, 2] == curve.later(besides_s)
    curve = Curve.through(medians["p2p"]).later(exchange_s)
    assert costs.messages == {(0, 1): curve, (1, 0): curve}


def test_residuals_are_those_of_the_raw_samples_that_are_kept(probed: Path) -> None:
    with Store.open(probed) as store:
        machine = describe(store, local_devices("cpu", 2))
        costs = store.link_costs(machine.links_kind_id, machine.environment_id)
        fits = store.link_fits(machine.links_kind_id, machine.environment_id)
    checked = 0
    for fit in fits:
        if fit.latency_s is None or fit.bandwidth_bytes_per_s is None:
            continue
        medians = {
            cost.size_bytes: statistics.median(cost.samples_s)
            for cost in costs
            if cost.pattern == fit.pattern
        }
        errors = [
            abs(fit.latency_s + size / fit.bandwidth_bytes_per_s - time) / time
            for size, time in medians.items()
        ]
        assert len(errors) >= 2
        assert fit.residual == pytest.approx(statistics.mean(errors))
        checked += 1
    assert checked == len(PATTERNS)


@pytest.mark.parametrize(
    "words",
    [
        ("topology", "probe"),
        ("topology", "show", "local"),
        ("search", "--model", "mlp", "--preset", "small"),
        ("run", "--model", "mlp", "--preset", "small"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_more_devices_than_cores_are_warned_of_before_links_are_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def measure(*_arguments: object) -> None:
        raise UsageError("measured")

    monkeypatch.setattr(links, "probe", measure)
    cores = len(usable_cores())
    outcome = command(*words, "--device", "cpu", "--devices", str(2 * cores))
    (warning,) = [line for line in outcome.errors.splitlines() if line.startswith("warning: CPU devices")]
    assert warning.startswith(f"warning: CPU devices: {2 * cores} share {cores} core(s)"), outcome
    assert (outcome.code, outcome.errors.splitlines()[-1]) == (2, "error: measured")
    if cores > 1:
        assert "warning" not in command(*words, *PAIR).errors


@pytest.mark.usefixtures("known_links")
def test_residuals_are_shown(command: Command) -> None:
    shown = command("topology", "show", "local", *PAIR).output
    document = command("topology", "show", "local", *PAIR, "--json").document
    fits = {fit["pattern"]: fit for fit in document["measured"]}
    for pattern in PATTERNS:
        assert 0 <= fits[pattern]["residual"] < 1
        assert f"{fits[pattern]['residual']:.1%}" in shown
    assert fits["contention"]["contention_factor"] >= 0
    rows = command("query", "SELECT DISTINCT pattern, residual FROM link_costs", "--json").document
    assert {row["pattern"]: row["residual"] for row in rows} == {
        pattern: pytest.approx(fits[pattern]["residual"]) for pattern in PATTERNS
    }


@pytest.mark.usefixtures("known_links")
def test_a_database_from_before_still_predicts_without_the_new_patterns(
    command: Command, database: Path
) -> None:
    """It knows messages and the all-reduce over the whole group, and no residual."""
    forget_patterns(database)
    with Store.open(database) as store:
        machine = describe(store, local_devices("cpu", 2))
        links = stored_links(store, machine)
    assert links is not None
    assert links.unmeasured == tuple(kind for kind in CollectiveKind if kind is not CollectiveKind.ALL_REDUCE)
    prices = Prices(topology_of(machine, links), links.costs)
    assert prices.of((0, 1)).origin is Origin.MEASURED
    assert prices.of((0, 1), CollectiveKind.ALL_GATHER).origin is Origin.ESTIMATED
    assert prices.of((0, 1), CollectiveKind.BROADCAST, 0).origin is Origin.ESTIMATED
    small = ("--model", "mlp", "--preset", "small", "--proposals", "10", "--on-miss", "estimate")
    assert command("search", *small, *PAIR).code == 0
    assert command("topology", "show", "local", *PAIR).code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("known_links")
def test_what_a_database_from_before_lacks_is_measured_by_the_next_profile(database: Path) -> None:
    forget_patterns(database)
    with Store.open(database) as store:
        machine = describe(store, local_devices("cpu", 2))
        links = local_links(store, machine, Progress(), complete=True)
    assert links is not None
    assert links.unmeasured == ()


def forget_patterns(database: Path) -> None:
    engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        known = "('p2p', 'all_reduce', 'large all_reduce', 'contention', 'exchange')"
        for table in ("link_costs", "link_fits"):
            connection.execute(text(f"DELETE FROM {table} WHERE pattern NOT IN {known}"))
        connection.execute(text("UPDATE link_fits SET residual = NULL"))
    engine.dispose()


# ---- several groups of one size; the times are made up: this machine's groups of a size are all alike


def seconds(pattern: str, members: Sequence[int], size: int) -> float:
    """Made-up times: devices apart take longer."""
    apart = members[-1] - members[0] - len(members) + 2
    return apart * (1e-5 * len(members) * (1 + len(pattern)) + size * 1e-9)


def test_a_probe_that_others_disturbed_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = made_up_probe(((0, 1),), (0.1,) * 2)
    with TerminalProgress() as progress:
        links.warn_if_disturbed(quiet, progress)
        assert not capsys.readouterr().err
        links.warn_if_disturbed(replace(quiet, disturbed=2), progress)
    (said,) = capsys.readouterr().err.splitlines()
    # Three sizes of messages, and of each collective.
    assert f"20% of a core each time that 2 of {3 * len(PATTERNS)} sizes were measured" in said


def made_up_probe(
    groups: Sequence[tuple[int, ...]], contentions: tuple[float, ...], host_s: float | None = None
) -> LinkProbe:
    sizes = (1024, 4 * MIB, 16 * MIB)
    pairs = [group for group in groups if len(group) == 2]
    links = [
        measurement(pattern, group, {size: [seconds(pattern, group, size)] for size in sizes})
        for pattern in PATTERNS
        for group in (pairs if pattern == "p2p" else groups)
    ]
    return LinkProbe(tuple(links), contentions, ExchangeTime(0.5, host_s))


GROUPS = ((0, 1), (2, 3), (0, 2), (0, 1, 2, 3))


def test_each_group_has_its_own_line_and_the_slowest_stands_for_its_size() -> None:
    probe = made_up_probe(GROUPS, (0.1,) * 4)
    indices = (4, 5, 6, 7)
    fits = fit_records(probe, indices, ["k"] * 4)
    assert {fit.pattern for fit in fits if fit.pattern.startswith("all_reduce")} == {
        "all_reduce", "all_reduce 4,5", "all_reduce 6,7", "all_reduce 4,6",
    }  # fmt: skip
    assert max(len(fit.pattern) for fit in fits) <= LONGEST_PATTERN
    rows = {(cost.pattern, cost.group_size) for cost in cost_records(probe, indices)}
    assert rows == {(fit.pattern, fit.group_size) for fit in fits if fit.bandwidth_bytes_per_s}
    links = links_of(fits, cost_records(probe, indices), indices)
    assert links is not None
    device = DeviceKind("k", "cuda", (("float32", 1e12),), 2**30, 1e12, 0.0)
    price = Prices(local_topology(4, device, 1e9, 1e-6), links.costs)
    for kind in CollectiveKind:
        pattern = kind.value.replace("-", "_")
        besides_s = 0.0 if kind is CollectiveKind.ALL_REDUCE else probe.overhead_s
        for group in GROUPS:
            expected_s = seconds(pattern, group, 2**20) + besides_s
            assert price.of(group, kind, group[0]).duration_ns(2**20) == pytest.approx(
                expected_s * 1e9, abs=2
            )
        unknown = price.of((1, 3), kind, 1).duration_ns(2**20)
        assert unknown == pytest.approx((seconds(pattern, (0, 2), 2**20) + besides_s) * 1e9, abs=2)
    assert links.pairs[2, 3] == links.pairs[3, 2]
    assert links.pairs[0, 1][0] == pytest.approx(1e9)
    assert links.pairs[0, 2][0] == pytest.approx(0.5e9)
    assert links.bytes_per_s == pytest.approx(0.5e9)
    message_s = [seconds("p2p", pair, 2**20) + probe.overhead_s for pair in ((0, 1), (0, 2))]
    assert links.costs.messages[1, 0].seconds(2**20) == pytest.approx(message_s[0])
    # The slowest pair stands for one that was not measured.
    assert links.costs.messages[1, 3].seconds(2**20) == pytest.approx(message_s[1])


def test_what_hosts_issue_in_takes_time_where_the_devices_are_gpus() -> None:
    of_gpus, of_cpus = (made_up_probe(GROUPS, (0.1,) * 4, host_s) for host_s in (6e-6, None))
    gpus, cpus = (fit_records(probe, range(4), ["k"] * 4) for probe in (of_gpus, of_cpus))
    assert [(fit.group_size, fit.latency_s) for fit in gpus if fit.pattern == "issue"] == [(4, 6e-6)]
    assert not [fit for fit in cpus if fit.pattern == "issue"]
    for fits, issue_s in ((gpus, 6e-6), (cpus, 0.0)):
        links = links_of(fits, [], range(4))
        assert links is not None
        assert (links.costs.issue_s, links.knows_hosts) == (issue_s, issue_s > 0)
    # Those of a smaller group are another probe's.
    of_two = replace(next(fit for fit in gpus if fit.pattern == "issue"), group_size=2)
    links = links_of([*cpus, of_two], [], range(4))
    assert links is not None
    assert links.costs.issue_s == 0


def test_where_only_lines_are_known_they_count() -> None:
    """As in a pack or a repaired database without raw samples."""
    probe = made_up_probe(GROUPS, (0.1,) * 4)
    links = links_of(fit_records(probe, range(4), ["k"] * 4), [], range(4))
    assert links is not None
    for size in (1, 10**6, 10**9):
        reduced_s = links.costs.by_members[CollectiveKind.ALL_REDUCE, (0, 1)].seconds(size)
        assert reduced_s == pytest.approx(seconds("all_reduce", (0, 1), size))
        message_s = links.costs.messages[0, 1].seconds(size)
        assert message_s == pytest.approx(seconds("p2p", (0, 1), size) + probe.overhead_s)


@given(st.sets(st.integers(0, 40), min_size=2, max_size=9), st.data())
def test_devices_are_found_again_by_the_name_of_their_rows(indices: set[int], data: st.DataObject) -> None:
    known = sorted(indices)
    chosen = data.draw(st.lists(st.sampled_from(range(len(known))), min_size=1, unique=True).map(sorted))
    name = members_text([known[place] for place in chosen])
    assert places_named(name, known) == tuple(chosen)
    assert places_named(name, [index + 100 for index in known]) is None


@pytest.mark.parametrize(
    ("indices", "name"),
    [((0, 3), "0,3"), ((4, 5, 6, 7), "4-7"), ((0, 2, 4, 6), "0-6/2"), ((0, 1, 4), "0,1,4"), ((3,), "3")],
)
def test_names_of_groups_are_short(indices: tuple[int, ...], name: str) -> None:
    assert members_text(indices) == name


def test_each_kind_of_device_has_its_own_contention() -> None:
    """Of like devices the median counts; of a mix that of each kind."""
    probe = made_up_probe(GROUPS, (0.1, 0.2, 0.9, 0.5))
    alike = links_of(fit_records(probe, range(4), ["a"] * 4), [], range(4))
    mixed = links_of(fit_records(probe, range(4), ["a", "a", "b", "b"]), [], range(4))
    assert alike is not None
    assert mixed is not None
    assert alike.contention == pytest.approx(0.35)
    assert alike.contentions == {}
    assert mixed.contentions == pytest.approx({0: 0.15, 1: 0.15, 2: 0.7, 3: 0.7})


def test_what_is_stored_of_one_kind_is_read_for_that_kind_alone(database: Path) -> None:
    with Store.open(database) as store:
        environment = store.put_environment(EnvironmentRecord({"torch": "2"}))
        kinds = [store.put_device_kind(DeviceKindRecord(name, "cuda", 2**30, {})) for name in ("a", "b", "c")]
        for kind, factor in zip(kinds, (0.25, 0.75), strict=False):
            probe = made_up_probe(GROUPS, (factor,) * 4)
            store.put_link_fits(kind, environment, fit_records(probe, range(4), ["k"] * 4))
        found = [links_between(store, kind, environment, range(4)) for kind in kinds]
        assert links_between(store, kinds[0], environment + 1, range(4)) is None
        assert links_between(store, kinds[0], environment, range(3)) is None
    assert [one and one.contention for one in found] == [0.25, 0.75, None]


def test_a_pack_carries_all_patterns_and_groups(database: Path, tmp_path: Path) -> None:
    probe, indices = made_up_probe(GROUPS, (0.1, 0.2, 0.9, 0.5), host_s=6e-6), range(4)
    fits = fit_records(probe, indices, ["a", "a", "b", "b"])
    file = tmp_path / "links.parquet"
    with Store.open(database) as store:
        kind = store.put_device_kind(DeviceKindRecord("mix", "cuda", 2**30, {}))
        environment = store.put_environment(EnvironmentRecord({"torch": "2"}))
        store.put_link_costs(kind, environment, cost_records(probe, indices))
        store.put_link_fits(kind, environment, fits)
        expected = links_between(store, kind, environment, range(4))
        assert write_pack(store, file).link_fits == len(fits)
    with Store.open(tmp_path / "other.sqlite") as store:
        assert merge_pack(store, read_pack(file)).link_costs == len(cost_records(probe, indices))
        found = links_between(store, 1, 1, range(4))
    assert expected is not None
    assert found is not None
    assert (found.costs, found.pairs, found.contentions) == (
        expected.costs,
        expected.pairs,
        expected.contentions,
    )
