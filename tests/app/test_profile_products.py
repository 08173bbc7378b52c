"""`app profile --products`: products of sizes between those of the networks are measured for the estimates' sake."""

from __future__ import annotations

from pathlib import Path

from app.db.store import Store
from profiler.products import PRODUCTS
from tests.app.conftest import Command

PROFILE = (
    "profile",
    "--model",
    "mlp",
    "--preset",
    "small",
    "--batch-size",
    "8",
    "--device",
    "cpu",
    "--devices",
    "1",
)


def _stored_products(database: Path) -> int:
    with Store.open(f"sqlite:///{database}") as store:
        (summary,) = store.cost_summaries()
        costs = store.op_costs(summary.device_kind.id, summary.environment.id)
        return len({name for (name, _), record in costs.items() if record.cost_key.target in PRODUCTS})


def test_so_many_products_more_are_measured_and_found_again(command: Command, database: Path) -> None:
    plain = command(*PROFILE, "--json")
    assert plain.code == 0, plain
    before = _stored_products(database)
    more = command(*PROFILE, "--products", "5", "--json")
    assert more.code == 0, more
    added = more.document["needed"] - plain.document["needed"]
    assert 3 <= added <= 6  # shares of the kinds of products are rounded
    assert (more.document["measured"], more.document["failed"]) == (added, 0)
    assert _stored_products(database) == before + added
    again = command(*PROFILE, "--products", "5", "--json")
    assert (again.document["measured"], again.document["known"]) == (0, more.document["needed"])


def test_a_negative_number_of_products_is_a_mistake(command: Command, database: Path) -> None:
    assert command(*PROFILE, "--products", "-1").code == 2
    assert command("profile", "--check", "--products", "5").code == 2
    assert not database.exists()
