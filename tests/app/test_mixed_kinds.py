"""Devices of several kinds in one machine: costs of each kind, one topology, a search over it, and a run on it.

The kinds are two names for the cores of this machine; everything that is measured is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.db.store import Store
from app.services.costs.link_costs import stored_links
from app.services.costs.machine import describe, links_kind_name
from app.services.costs.profile import profile
from app.services.models.models import ModelRequest, import_graph
from app.services.predict.predict import Target, local_target, predict, prepare
from app.services.progress import Progress
from app.services.run.run import RunRequest, run_on
from app.services.timeline.simulated_step import step_of_execution
from graph.errors import UsageError
from graph.strategy import Configuration, Strategy
from graph.training import Training
from profiler.devices import PhysicalDevice, available_devices, cpu_devices
from search.algorithms import mcmc
from search.algorithms.chain import SearchOptions
from search.problem import Problem
from search.space import baselines

MODEL = ModelRequest("mlp", "small", 8, str(Path.cwd()))
SLOWER = 10.0


def as_two_kinds(devices: tuple[PhysicalDevice, ...]) -> tuple[PhysicalDevice, ...]:
    """Return the devices under two names of kinds, in turn."""
    return tuple(
        replace(device, kind=replace(device.kind, name=f"{device.kind.name} {'AB'[place % 2]}"))
        for place, device in enumerate(devices)
    )


def moved(strategy: Strategy, device: int) -> Strategy:
    """Return a strategy of one device on another one."""
    return Strategy(
        strategy.graph_digest,
        tuple(Configuration(one.degrees, (device,)) for one in strategy.configurations),
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An opened store without rows."""
    with Store.open(tmp_path / "mixed.sqlite") as opened:
        yield opened


def profile_and_search(store: Store, devices: tuple[PhysicalDevice, ...]) -> Target:
    """Check what is measured and searched on two devices of two kinds; return their topology."""
    model, training, progress = import_graph(MODEL, batch_norm="synchronized"), Training(8), Progress()
    machine = describe(store, devices)
    first, second = (device.kind.name for device in devices)
    report = profile(store, machine, [model], ["sgd"], progress)
    assert report.device_kind == f"1 x {first} + 1 x {second}"
    assert [one.device_kind for one in report.kinds] == [first, second]
    for one in report.kinds:
        assert (one.measured, one.known, one.failures) == (one.needed, 0, ())
        assert one.needed > 0
    held = {one.device_kind.name: one for one in store.cost_summaries()}
    assert held.keys() == {first, second, report.device_kind}
    assert held[first].measured == held[second].measured > report.kinds[0].needed
    assert [held[name].link_fits > 0 for name in (first, second, report.device_kind)] == [False, False, True]
    assert stored_links(store, machine) is not None

    target = local_target(store, devices, progress)
    assert [kind.name for kind in target.topology.kinds] == [first, second]
    assert [device.kind_name for device in target.topology.devices] == [first, second]
    # As if the second kind had been measured to be slower.
    slow = store.op_costs(machine.groups[1].kind_id, machine.environment_id)
    store.put_op_costs(
        machine.groups[1].kind_id,
        machine.environment_id,
        [replace(cost, median_s=SLOWER * (cost.median_s or 0.0)) for cost in slow.values()],
    )
    with prepare(store, model, target, training, "fail", progress) as setting:
        whole = baselines.single_device(model.graph)
        fast_s, slow_s = (
            predict(store, setting, moved(whole, device), "single-device")[1].step_time_s
            for device in range(2)
        )
        assert slow_s > 2 * fast_s
        found = mcmc.search(
            Problem(model.graph, setting.topology, setting.table, training, setting.target.link_costs),
            SearchOptions(proposals=60, chains=3),
        )
        assert found.step_time_s <= fast_s
    return target


def run_and_simulate_again(store: Store, target: Target) -> None:
    """Check a run on them, and that the database alone tells what it was predicted to take."""
    request = RunRequest(
        model=MODEL,
        strategy="data-parallel",
        devices=None,
        processor=None,
        optimizer="sgd",
        batch_norm="synchronized",
        iterations=2,
        warmup=1,
        seed=0,
        verify=True,
        on_miss="fail",
        timeout_s=120.0,
    )
    progress = Progress()
    model = import_graph(MODEL, batch_norm="synchronized")
    ran = run_on(store, request, model, Training(8), target, progress)
    assert ran is not None
    assert (ran.verified, ran.devices) == (True, 2)
    # Simulated again from the database alone: the same costs and links.
    again = step_of_execution(store, store.executions()[0], progress)
    assert again.simulation.step_time_s == pytest.approx(ran.predicted_s)


def test_two_kinds_in_one_machine_are_profiled_and_searched_over(store: Store, probed: Path) -> None:
    devices = as_two_kinds(cpu_devices(2))
    # What was measured between the same two cores under one name, so that the quick tests measure it once.
    with Store.open(probed) as known:
        alike = describe(known, cpu_devices(2))
        fits = known.link_fits(alike.links_kind_id, alike.environment_id)
    mixed = describe(store, devices)
    store.put_link_fits(mixed.links_kind_id, mixed.environment_id, fits)
    profile_and_search(store, devices)


@pytest.mark.slow
def test_two_kinds_in_one_machine_are_run_on_over_measured_links(store: Store) -> None:
    run_and_simulate_again(store, profile_and_search(store, as_two_kinds(cpu_devices(2))))


@pytest.mark.cuda
def test_two_kinds_of_gpus_in_one_machine_are_profiled_searched_over_and_run_on(store: Store) -> None:
    devices = available_devices("cuda")[:2]
    if len(devices) < 2:
        pytest.skip("one GPU is of one kind")
    run_and_simulate_again(store, profile_and_search(store, as_two_kinds(devices)))


def test_links_of_a_mix_are_those_of_no_kind(store: Store) -> None:
    devices = as_two_kinds(cpu_devices(4))
    mixed = describe(store, devices)
    alike = describe(store, (devices[0], devices[2]))
    assert mixed.links_kind_id not in {group.kind_id for group in mixed.groups}
    assert alike.links_kind_id == alike.groups[0].kind_id == mixed.groups[0].kind_id
    assert [len(group.devices) for group in mixed.groups] == [2, 2]
    swapped = describe(store, devices[::-1])
    assert swapped.links_kind_id != mixed.links_kind_id
    assert links_kind_name(["A", "A", "B", "A"]) == "2 x A + 1 x B + 1 x A"


def test_gpus_and_cores_are_no_machine(store: Store) -> None:
    core = cpu_devices(1)[0]
    with pytest.raises(
        UsageError, match=r"devices: are \[cpu:0, cuda:0\], must be at least one, and all GPUs"
    ):
        describe(store, (core, replace(core, processor="cuda")))
    with pytest.raises(UsageError, match=r"devices: are \[\]"):
        describe(store, ())
