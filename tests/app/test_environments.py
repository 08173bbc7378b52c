"""Costs of another environment: they are not used where this one counts, and said where they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import pytest

from app.db.records import DeviceKindRecord, EnvironmentRecord, LinkFitRecord, OpCostRecord, utc_now
from app.db.store import Store
from app.services.costs.environments import differences, say_unused, say_used, shortened
from app.services.costs.machine import describe
from app.services.costs.operator_costs import cost_key_record
from app.services.progress import Progress
from graph.topology import load_topology
from profiler.devices import cpu_devices
from profiler.environment import environment
from profiler.updates import update_call
from tests.app.conftest import Command
from tests.app.db import samples

SMALL = ("--model", "mlp", "--preset", "small")
TORCH = str(environment("cpu").facts["torch"])


@dataclass
class Told(Progress):
    """A progress that keeps what it is told."""

    said: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Keep a line."""
        self.said.append(text)

    def warn(self, text: str) -> None:
        """Keep a warning."""
        self.warned.append(text)


def of_torch(version: str) -> EnvironmentRecord:
    """Return this machine's environment as it was with another torch."""
    return EnvironmentRecord({**environment("cpu").facts, "torch": version})


def cost(size: int, at: int) -> OpCostRecord:
    """Return the cost of an optimizer's update: a call that estimates can rest on."""
    return replace(
        samples.op_cost(1, at=at), cost_key=cost_key_record(update_call("sgd", size)), phase="update"
    )


def store_old_costs(path: Path, *versions: str) -> None:
    """Store costs of this machine's cores as earlier versions of torch had them: as many as the version's place."""
    with Store.open(path) as store:
        machine = describe(store, cpu_devices(2))
        for count, version in enumerate(versions, start=1):
            at = utc_now() - timedelta(days=10 - count)
            costs = [replace(samples.op_cost(key), measured_at=at) for key in range(1, count + 1)]
            store.put_op_costs(machine.groups[0].kind_id, store.put_environment(of_torch(version)), costs)


def test_differences_are_named_in_words_what_changes_often_first() -> None:
    before = {
        "torch": "2.12.0",
        "cores": 4,
        "driver": [{"name": "H100", "driver_version": "535.1", "clocks.max.sm": "1980 MHz"}],
        "operating_system": "Linux 6.1",
        "abc": 1,
    }
    now = {
        **before,
        "torch": "2.13.0",
        "driver": [{"name": "H100", "driver_version": "550.2", "clocks.max.sm": "1980 MHz"}],
        "abc": 2,
        "cudnn": 90100,
    }
    found = differences(before, now)
    assert found == (
        "torch 2.12.0 -> 2.13.0",
        "cudnn unknown -> 90100",
        "driver of H100: driver version 535.1 -> 550.2",
        "abc 1 -> 2",
    )
    assert differences(now, now) == ()
    assert shortened(["a", "b", "c", "d", "e", "f"]) == "a; b; c; d; and 2 more"


@pytest.mark.usefixtures("known_links")
def test_costs_of_another_torch_are_not_used_and_that_is_said(command: Command, database: Path) -> None:
    store_old_costs(database, "2.11.0", "2.12.0")
    searched = command(
        "search", *SMALL, "--device", "cpu", "--devices", "2", "--on-miss", "estimate", "--proposals", "0",
        "--no-confirm",
    )  # fmt: skip
    assert searched.code == 0, searched
    (line,) = [line for line in searched.errors.splitlines() if "not used" in line]
    assert line.startswith("3 stored costs of ")
    assert line.endswith(f"are not used: they are of 2 other environments (torch 2.12.0 -> {TORCH})")

    told = Told()
    with Store.open(database) as store:
        machine = describe(store, cpu_devices(2))
        (group,) = machine.groups
        say_unused(store, group, "tf32", told)
        assert told.said == [], "what is of another precision is not expected to be used"
        say_unused(store, group, "float32", told)
        assert len(told.said) == 1
        # As soon as this environment has costs, the others are history.
        store.put_op_costs(group.kind_id, group.environment_id, [samples.op_cost(1)])
        say_unused(store, group, "float32", told)
        assert len(told.said) == 1


def test_of_devices_that_are_not_here_it_is_said_which_environments_are_used(
    command: Command, database: Path
) -> None:
    kind = load_topology("p100-cluster").kinds[0]
    record = DeviceKindRecord(kind.name, kind.processor, kind.memory_bytes)
    with Store.open(database) as store:
        kind_id, told = store.put_device_kind(record), Told()
        say_used(store, kind.name, "float32", told)
        assert told == Told()
        old, new = (
            store.put_environment(EnvironmentRecord({"device_type": "cuda", "torch": version}))
            for version in ("2.12.0", "2.13.0")
        )
        store.put_op_costs(kind_id, old, [cost(key, at=1) for key in (1, 2, 3)])
        say_used(store, kind.name, "float32", told)
        assert told.said[0].startswith(f"3 stored costs of {kind.name} are used, all of torch 2.12.0 (")
        store.put_op_costs(kind_id, new, [cost(1, at=2)])
    arguments = ("search", *SMALL, "--topology", "p100-cluster", "--devices", "2", "--proposals", "0")
    searched = command(*arguments)
    assert searched.code == 0, searched
    (line,) = [line for line in searched.errors.splitlines() if "stored costs" in line]
    assert line.startswith(
        f"warning: 3 stored costs of {kind.name} are used, of 2 environments, of each cost the newest: "
        "2 of torch 2.12.0 ("
    )
    assert "1 of torch 2.13.0 (" in line
    assert line.endswith("torch 2.12.0 -> 2.13.0")
    document = command(*arguments, "--json").document
    assert [(one["torch"], one["costs"], one["current"]) for one in document["cost_environments"]] == [
        ("2.12.0", 2, False),
        ("2.13.0", 1, False),
    ]


def test_status_shows_what_is_held_how_old_it_is_and_how_environments_differ(
    command: Command, database: Path
) -> None:
    store_old_costs(database, "2.12.0")
    with Store.open(database) as store:
        machine = describe(store, cpu_devices(2))
        store.put_link_fits(
            machine.links_kind_id, machine.environment_id, [LinkFitRecord("p2p", 2, 1e-4, 1e9)]
        )
        gpu = store.put_device_kind(DeviceKindRecord("Imaginary", "cuda", 2**30))
        elsewhere = store.put_environment(EnvironmentRecord({"device_type": "imaginary", "torch": "2.13.0"}))
        store.put_op_costs(gpu, elsewhere, [samples.op_cost(1, at=5)])
    here, old, imaginary = command("db", "status", "--json").document["op_costs"]
    assert (here["current"], here["measured"], here["link_fits"], here["differences"]) == (True, 0, 1, [])
    assert here["newest_days"] == pytest.approx(0, abs=0.1)
    assert (old["current"], old["measured"], old["link_fits"]) == (False, 1, 0)
    assert old["differences"] == [f"torch 2.12.0 -> {TORCH}"]
    assert old["oldest_days"] == pytest.approx(9, abs=0.1)
    assert (imaginary["current"], imaginary["differences"]) == (False, None)
    shown = command("db", "status").output
    assert "(current)" in shown
    assert f"{old['environment'][:12]} is not this machine's: torch 2.12.0 -> {TORCH}" in shown
    assert f"{imaginary['environment'][:12]} is not this machine's: this machine has no such device" in shown
