"""What is stored runs nothing: a function that a database names is followed only where the user has named it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sqlite3
from pathlib import Path

import pytest

from app.services.models import trust
from tests.app.commands import all_parameters
from tests.app.conftest import REPOSITORY, USERS_NETWORK, Command, Outcome, store_results, unchanged_imports

NETWORK = "package.tripwire:fine"
SEARCHED = (
    "--batch-size", "8", "--devices", "2", "--topology", "p100-cluster", "--proposals", "20", "--workers", "1",
)  # fmt: skip
# On one device, between which and others no link is measured.
RUN = ("--batch-size", "8", "--devices", "1", "--device", "cpu", "--iterations", "1", "--on-miss", "estimate")
# A module that leaves a file behind wherever it is imported, in whatever process.
TRIPWIRE = "open(__file__ + '.ran', 'a').close()\n" + USERS_NETWORK
RAN = Path("package", "tripwire.py.ran")

# By command: arguments of each call.
Cases = dict[str, list[tuple[str, ...]]]
# Those that make it follow the model of what is stored.
FOLLOWING: Cases = {
    "trace": [("--strategy", "1"), ("--execution", "1")],
    "report": [("--execution", "1")],
    "compare": [("--execution", "1")],
    "search": [("--resume", "1")],
    "strategy show": [("1",)],
    "strategy diff": [("1", "2")],
    "strategy export": [("1", "plan.py", "--format", "dtensor")],
    "strategy import": [("strategy.json", "--batch-size", "8")],
}
# Those that name something stored of which no model is needed, or another that the user names.
NOT_FOLLOWING: Cases = {
    "compare": [(), ("--search", "1")],
    "strategy list": [()],
    "strategy rebuild": [("1",)],
    "strategy export": [("1", "exported.json")],
    "run": [("--model", "mlp", "--preset", "small", *RUN, "--strategy", "1")],
    "search": [("--model", "mlp", "--preset", "small", *SEARCHED, "--start", "1")],
    "db status": [()],
    "report": [(), ("--search", "1")],
}
# Parameters that name something stored.
REFERENCES = {"execution", "strategy", "search", "resume", "start", "one", "other", "file"}


def calls(table: Cases) -> list[tuple[str, ...]]:
    return [(*name.split(), *words) for name, variants in table.items() for words in variants]


def test_every_command_that_names_something_stored_is_tried() -> None:
    naming = {one.command for one in all_parameters() if one.name in REFERENCES}
    # Packs name no model.
    assert naming - {"db export", "db import"} <= FOLLOWING.keys() | NOT_FOLLOWING.keys()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as somebody else may hand it over: a database, its traces, a strategy file, and the module of it all."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "tripwire.py").write_text(TRIPWIRE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv(trust.ENVIRONMENT_VARIABLE, str(tmp_path_factory.mktemp("theirs")))
        with unchanged_imports():
            store_results(
                folder / "test.sqlite",
                ("search", "--model", NETWORK, *SEARCHED),
                ("run", "--model", NETWORK, *RUN, "--strategy", "single-device", "--profile"),
                ("strategy", "export", "1", "strategy.json"),
            )
    with sqlite3.connect(folder / "test.sqlite") as connection:
        connection.execute("UPDATE searches SET status = 'interrupted'")
    connection.close()
    (folder / RAN).unlink()
    return folder


@pytest.fixture
def mine(shared: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, a copy of `shared`; the user has named nothing yet."""
    folder = database.parent
    shutil.copytree(shared, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv(trust.ENVIRONMENT_VARIABLE, str(folder / "state"))
    return folder


def assert_refused(outcome: Outcome) -> None:
    """Assert one line that says what to do, and that nothing ran."""
    assert outcome.code == 2, outcome
    assert outcome.errors.splitlines()[-1] == (
        f"error: model {NETWORK}: comes from the database, must be named by you to be run from here; add --model "
        f"{NETWORK} if you trust it"
    )
    assert not RAN.exists(), outcome


def test_what_a_database_names_is_refused_by_all_that_follow_it(command: Command, mine: Path) -> None:
    del mine
    for words in calls(FOLLOWING):
        assert_refused(command(*words))


def test_what_follows_no_model_runs_none(command: Command, mine: Path) -> None:
    for words in calls(NOT_FOLLOWING):
        outcome = command(*words)
        assert not (mine / RAN).exists(), words
        assert "Traceback" not in outcome.errors, words


def test_a_report_stands_without_the_step_that_it_may_not_draw(command: Command, mine: Path) -> None:
    outcome = command("report", "--json")
    assert outcome.code == 0, outcome
    assert f"add --model {NETWORK}" in outcome.document["left_out"]["timeline"]
    assert not (mine / RAN).exists()


@pytest.mark.parametrize("words", calls(FOLLOWING), ids=" ".join)
def test_what_the_user_names_is_run(command: Command, mine: Path, words: tuple[str, ...]) -> None:
    another = command(*words, "--model", "package.another:fine")
    assert another.code == 2, another
    assert not (mine / RAN).exists()
    outcome = command(*words, "--model", NETWORK)
    assert outcome.code == 0, outcome
    assert (mine / RAN).exists()


def test_what_was_named_once_is_followed_from_then_on_but_in_no_other_file(
    command: Command, mine: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("models", "show", NETWORK).code == 0
    (mine / RAN).unlink()
    assert command("strategy", "show", "1").code == 0
    (mine / RAN).unlink()
    # Neither of the same name elsewhere, nor another function here.
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(mine / "package", elsewhere / "package")
    monkeypatch.chdir(elsewhere)
    assert_refused(command("strategy", "show", "1"))
    (elsewhere / "package").rename(elsewhere / "other")
    (elsewhere / "package").symlink_to(elsewhere / "other")
    assert_refused(command("strategy", "show", "1"))
    monkeypatch.chdir(mine)
    (mine / "package" / "tripwire").mkdir()
    (mine / "package" / "tripwire" / "__init__.py").write_text(TRIPWIRE)
    assert_refused(command("strategy", "show", "1"))


@pytest.mark.parametrize("kept", ["{", "[]", '{"model": 1}', "[" * 100_000, "\0"])
def test_a_damaged_file_of_consents_permits_nothing(command: Command, mine: Path, kept: str) -> None:
    (mine / "state").mkdir()
    (mine / "state" / "models.json").write_text(kept)
    assert_refused(command("strategy", "show", "1"))
    assert command("strategy", "show", "1", "--model", NETWORK).code == 0
    assert json.loads((mine / "state" / "models.json").read_text())[0]["model"] == NETWORK


def test_what_is_named_is_run_even_where_that_cannot_be_kept(
    command: Command, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_not_kept", [])
    (mine / "state").write_text("no folder")
    assert command("strategy", "show", "1", "--model", NETWORK).code == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"name": "os:abort"}, ("os:abort", "add --model os:abort")),
        ({"name": "app.services.models.models:build_model"}, ("add --model",)),
        ({"name": "package.tripwire"}, ("package.tripwire", "unknown")),
        ({"name": "../package/tripwire:fine"}, ("add --model",)),
        ({"name": "mlp", "folder": "/tmp"}, ("JSON object",)),
        ({"name": NETWORK, "folder": "."}, ("JSON object",)),
        ({"name": "mlp", "batch_size": 1e300}, ("JSON object",)),
        ({"name": "mlp", "preset": ["small"]}, ("JSON object",)),
        ({"name": "mlp", "preset": "huge"}, ("huge", "small")),
        ({"preset": "small"}, ("JSON object",)),
        ([], ("JSON object",)),
    ],
)
def test_what_is_no_model_is_one_line(
    command: Command, mine: Path, model: object, words: tuple[str, ...]
) -> None:
    with sqlite3.connect(mine / "test.sqlite") as connection:
        connection.execute("UPDATE graphs SET model = ?", [json.dumps(model)])
    connection.close()
    outcome = command("trace", "--strategy", "1")
    assert outcome.code == (1 if "JSON object" in words else 2), (
        outcome
    )  # damage, or a name that is not followed
    line = outcome.errors.splitlines()[-1]
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert not (mine / RAN).exists()


def test_requests_are_made_in_one_module_alone() -> None:
    makers = [path.name for path in (REPOSITORY / "app").rglob("*.py") if "ModelRequest(" in path.read_text()]
    assert makers == ["models.py"]


@pytest.mark.parametrize("how", ["relative", "no home", "somebody's", "for all"])
def test_consents_that_are_not_surely_the_users_permit_nothing(
    command: Command, mine: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A file of them may lie in what is shared, and name what lies there: in the folder where the user is."""
    assert command("strategy", "show", "1", "--model", NETWORK).code == 0
    (mine / RAN).unlink()
    kept = mine / "state" / "models.json"
    if how == "relative":
        monkeypatch.setenv(trust.ENVIRONMENT_VARIABLE, "state")
        outcome = command("strategy", "show", "1")
        assert (outcome.code, "must be an absolute path" in outcome.errors) == (2, True), outcome
        assert not (mine / RAN).exists()
        return
    if how == "no home":
        monkeypatch.delenv(trust.ENVIRONMENT_VARIABLE)
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
        beside = mine / "~" / ".local" / "state" / "soapstone"
        beside.parent.mkdir(parents=True)
        (mine / "state").rename(beside)
    elif how == "for all":
        kept.chmod(0o666)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(kept, 12345, 12345)
    assert_refused(command("strategy", "show", "1"))
    # Nothing is added to such a file, nor is it replaced.
    monkeypatch.setattr(trust, "_not_kept", [])
    before = kept.read_bytes() if kept.exists() else None
    assert command("strategy", "show", "1", "--model", NETWORK).code == 0
    assert (kept.read_bytes() if kept.exists() else None) == before
