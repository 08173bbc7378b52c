"""`app db export` and `import`: what one database measured, another need not measure."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from app.services.costs.packs import shipped_packs
from tests.app.conftest import Command

SMALL = ("--model", "mlp", "--preset", "small", "--device", "cpu", "--devices", "2")


@pytest.mark.usefixtures("known_links")
def test_an_imported_pack_is_as_good_as_a_profile(command: Command, database: Path, tmp_path: Path) -> None:
    first = command("profile", *SMALL, "--json").document
    assert first["measured"] == first["needed"] > 0
    file = tmp_path / "costs.parquet"
    exported = command("db", "export", str(file), "--json").document
    # Updates and phases beside: a call has one or two of them.
    assert exported["op_costs"] > first["needed"]
    searched = command("search", *SMALL, "--proposals", "20", "--fresh", "--no-confirm", "--json").document

    database.unlink()
    shutil.rmtree(database.with_suffix(".traces"))
    imported = command("db", "import", str(file), "--json").document
    assert imported["given"] == imported["new"]
    assert imported["new"] == {name: exported[name] for name in imported["new"]}
    assert command("db", "import", str(file)).code == 0
    again = command("profile", *SMALL, "--json").document
    assert (again["measured"], again["known"]) == (0, first["needed"])
    same = command("search", *SMALL, "--proposals", "20", "--fresh", "--no-confirm", "--json").document
    assert same["predictions"] == searched["predictions"]


def test_what_is_no_pack_is_refused_in_one_line_and_makes_no_database(
    command: Command, database: Path, tmp_path: Path
) -> None:
    file = tmp_path / "no.parquet"
    file.write_text("no")
    outcome = command("db", "import", str(file))
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.startswith(f"error: pack {file}: cannot be read")
    assert outcome.errors.count("\n") == 1
    assert not database.exists()


def test_shipped_packs_are_whole_and_let_any_machine_search_for_theirs(
    command: Command, database: Path, tmp_path: Path
) -> None:
    packs = shipped_packs()
    assert packs
    first = command("db", "import", "--shipped", "--json").document
    assert [Path(one["file"]) for one in first["packs"]] == list(packs)
    assert all(one["new"] == one["given"] and one["given"]["op_costs"] > 1000 for one in first["packs"])
    again = command("db", "import", "--shipped", "--json").document
    assert all(set(one["new"].values()) == {0} for one in again["packs"])
    # Every cost of a search over two devices is there; they need not be on this machine.
    searched = command(
        "search", "--model", "mlp", "--batch-size", "64", "--topology", "xeon", "--on-miss", "fail",
        "--proposals", "20", "--json",
    ).document  # fmt: skip
    assert searched["predictions"]
    for one in searched["predictions"]:
        # What is from the data sheet is the topology's links.
        assert one["shares"]["measured"] > 0.3
        assert one["shares"]["estimated"] == 0.0


def test_import_takes_a_file_or_the_shipped_packs(command: Command, tmp_path: Path) -> None:
    neither = command("db", "import")
    both = command("db", "import", str(tmp_path / "a.parquet"), "--shipped")
    for outcome in (neither, both):
        assert outcome.code == 2
        assert outcome.errors.startswith("error: app db import: got ")
