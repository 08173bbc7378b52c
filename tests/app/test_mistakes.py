"""A user's mistake is one line that says what is, what must be and what to do; exit code 2; nothing is lost."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import pytest

from tests.app.conftest import Command, Outcome

SMALL = ("--model", "mlp", "--preset", "small")


def assert_one_line(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 2, outcome
    (line,) = outcome.errors.splitlines()[-1:]
    assert line.startswith("error: ")
    assert "Traceback" not in outcome.errors
    for word in words:
        assert word in line


def test_gpus_that_are_not_there_are_named_and_nothing_is_written(command: Command, database: Path) -> None:
    outcome = command("profile", "--gpus", "90-97", "--model", "inception")
    assert_one_line(outcome, "--gpus", "GPU")
    assert len(outcome.errors.splitlines()) == 1
    assert not database.exists()


@pytest.mark.parametrize("name", ["search", "profile", "compare"])
def test_commands_of_one_process_are_refused_under_torchrun(
    name: str, command: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(variable, value)
    assert_one_line(command(name), f"app {name}: is started by torchrun, must be one process")
    assert not database.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("search", "--model", "incepton"), ("incepton", "inception")),
        (("search", "--model", "no_such_module:factory"), ("no_such_module",)),
        (("search", "--model", "runtime.model:factory"), ("runtime", "rename")),
        (("search", *SMALL, "--topology", "nowhere"), ("nowhere", "p100-cluster")),
        (("search", *SMALL, "--topology", "p100-cluster", "--devices", "17"), ("17", "16")),
        (("search", *SMALL, "--device", "tpu"), ("tpu", "cpu")),
        (("search", *SMALL, "--topology", "p100-cluster", "--order", "random"), ("random", "fifo")),
        (("search", *SMALL, "--topology", "p100-cluster", "--on-miss", "guess"), ("guess", "estimate")),
        (("search", *SMALL, "--topology", "p100-cluster", "--on-miss", "fail"), ("not measured", "P100")),
        (("search", *SMALL, "--topology", "p100-cluster", "--optimizer", "lion"), ("lion", "adam")),
        (
            ("search", *SMALL, "--topology", "p100-cluster", "--batch-size", "0"),
            ("--batch-size: is 0", "from 1"),
        ),
        (("search", "--model", "mlp", "--preset", "huge"), ("huge", "small")),
        (("profile",), ("--model",)),
        (("profile", *SMALL, "--gpus", "3-1"), ("3-1",)),
        (("profile", *SMALL, "--topology", "nowhere"), ("nowhere", "p100-cluster")),
        (
            ("profile", *SMALL, "--device", "cpu", "--topology", "p100-cluster"),
            ("P100", "core", "--topology"),
        ),
        (("profile", *SMALL, "--nodes", "2"), ("--nodes", "local")),
        (("profile", "--check", "--topology", "p100-cluster"), ("--check", "--topology")),
        (("topology", "show", "nowhere"), ("nowhere",)),
        (("models", "show", "nothing"), ("nothing",)),
        (("db", "status", "--database", "mysql://x/y"), ("mysql",)),
        (("frobnicate",), ("frobnicate", "app --help")),
        (("search",), ("--model", "app search --help")),
        (("query", "FROM searches", "--views"), ("--views", "leave one out")),
        (("search", "--resume", "1", "--seed", "3"), ("--seed", "--resume", "leave it out")),
        (("search", *SMALL, "--fresh", "--start", "1"), ("--fresh", "--start")),
        (("strategy", "rebuild", str(2**63)), (str(2**63 - 1),)),
        (("strategy", "rebuild", "1", "--chain", str(2**63)), ("--chain",)),
        (("search", *SMALL, "--devices", "two"), ("--devices is two", "whole number")),
        (("search", *SMALL, "--beta", "inf"), ("--beta", "inf")),
        (("search", *SMALL, "--seed", str(2**63)), ("--seed", str(2**63 - 1))),
        (("search", *SMALL, "--chains", "100000"), ("--chains", "1024")),
        (("search", "--model", ":factory"), (":factory", "package.module:factory")),
        (("search", "--model", "../mine:factory"), ("../mine", "package.module:factory")),
        (("run", *SMALL, "--timeout", "nan"), ("--timeout", "nan")),
        (("run", *SMALL, "--seed", str(2**63)), ("--seed",)),
        (("topology", "show", "p100-cluster", "--device", "cpu"), ("--device", "local")),
        (("topology", "show", "local", "--device", "cpu", "--devices", "100000"), ("100000", "fewer")),
        (("topology", "probe", "--device", "cpu", "--devices", "1"), ("1 device", "--devices")),
        (("search", "--model", "mlpp"), ("mlpp", "did you mean mlp?")),
        (("search", "--model", ""), ("without a name", "package.module:factory")),
        (("search", "--model", "x" * 5000), ("5000 letters",)),
        (
            ("search", *SMALL, "--batch-size", "9" * 20),
            ("--batch-size: is 99999999999999999999", "from 1 to"),
        ),
        (("search", *SMALL, "--batch-size", "9" * 900), ("--batch-size", "900 digits")),
        (("search", *SMALL, "--topolgy", "x"), ("--topolgy", "--topology")),
        (("search", *SMALL, "--algorithm", ""), ("algorithms: are ''", "name at least one")),
        (
            ("search", *SMALL, "--micro-batches", "auto", "--algorithm", ""),
            ("algorithms: are ''", "name at least one"),
        ),
        (
            ("search", *SMALL, "--micro-batches", "2", "--proposals", "0"),
            ("--proposals: is 0, must be at least 1 for algorithm pipeline",),
        ),
        (("search", *SMALL, "--algorithm", "unity", "--substitute"), ("--substitute", "leave it out")),
        (
            ("search", *SMALL, "--algorithm", "unity", "--micro-batches", "2"),
            ("--micro-batches: is 2, must be left out with --algorithm unity",),
        ),
        (("search", *SMALL, "--micro-batches", "-1"), ("--micro-batches: is -1, must be a number from 1",)),
        (("search", *SMALL, "--algorithm", "unit"), ("algorithm unit", "tofu, unity, or several")),
        (("run", *SMALL, "--strategy", "3d-1x1"), ("3d-1x1: is no 3-D parallelism", "3d-2x1x4")),
        (("run", *SMALL, "--strategy", "3d-1x0x2"), ("3d-1x0x2: is no 3-D parallelism",)),
        (("run", *SMALL, "--strategy", f"3d-1x1x{'9' * 5000}"), ("5007 letters",)),
        (
            ("run", *SMALL, "--strategy", "3d-1x1x2-interleaved"),
            ("3d-1x1x2-interleaved: is no 3-D parallelism", "-interleaved-2"),
        ),
        (("trace", "--execution", "1", "--strategy", "3"), ("--execution: is one run", "--strategy")),
        (("trace", "--execution", "1", "--topology", "x"), ("--execution: is one run", "--topology")),
        (("compare", "--search", "0"), ("--search is 0, must be at least 1",)),
        (("search", "--resume", "9" * 20), ("--resume", "at most")),
        (("strategy", "rebuild", "9" * 20), ("at most",)),
        (("search", "--resume", "0"), ("--resume is 0, must be at least 1",)),
        (("search", *SMALL, "--beta", "much"), ("--beta is much, must be a number",)),
        (("compare", "--rows", "5"), ("--rows: is the number", "must stand with --execution")),
        (("compare", "--search", "nan"), ("--search is nan, must be a whole number",)),
        (("strategy", "exprot"), ("exprot", "export")),
        (("topology", "show", "p100"), ("p100", "did you mean p100-cluster?")),
        (("db", "status", "--database", "/dev/zero"), ("/dev/zero: is no regular file", "--database")),
        (("db", "status", "--database", "."), ("is a folder", "file name")),
        (("db", "status", "--database", ""), ("name is empty", "path")),
        (("db", "import", "nowhere.parquet"), ("nowhere.parquet: is not there", "app db export")),
        (("strategy", "import", "nowhere.json"), ("nowhere.json", "no such file")),
    ],
)
def test_a_wrong_name_or_value_is_named(
    command: Command, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_one_line(command(*arguments), *words)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1"])
@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (("search", *SMALL, "--time"), "must be from 0 to"),
        (("search", *SMALL, "--beta"), "must be "),
        (("run", *SMALL, "--timeout"), "must be above 0"),
        (("run", *SMALL, "--limit"), "must be above 0"),
        (("query", "SELECT 1", "--timeout"), "must be above 0"),
        (("query", "SELECT 1", "--memory"), "must be between 0.125"),
    ],
    ids=lambda words: " ".join((words[0], words[-1])) if isinstance(words, tuple) else "",
)
def test_a_number_out_of_range_is_refused_in_one_line(
    command: Command, arguments: tuple[str, ...], least: str, value: str
) -> None:
    assert command("db", "upgrade").code == 0
    outcome = command(*arguments, value)
    assert_one_line(outcome, f"{arguments[-1]}", f"is {value}", least)
    assert outcome.errors.count("\n") == 1, outcome


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "--search", "12"), ("search 12",)),
        (("strategy", "export", "ffffffff", "x.json"), ("ffffffff",)),
        (("search", "--resume", "99"), ("search 99", "must be", 'app query "FROM searches"')),
        (("compare", "--execution", "99"), ("execution 99", "must be", 'app query "FROM executions"')),
        (("strategy", "rebuild", "99"), ("search 99", "must be")),
        (("strategy", "list", "--limit", str(2**63)), ("63 bits",)),
        (("strategy", "show", "7" * 500), ("500 letters", "app strategy list")),
    ],
)
def test_what_a_database_does_not_hold_is_named(
    command: Command, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert command("db", "upgrade").code == 0
    assert_one_line(command(*arguments), *words)


# What a newcomer may take for one of our files: its name, its bytes.
OTHER_FILES = {
    "empty": b"",
    "text": b"not of any kind",
    "list": b"[1, 2]",
    "map": b'{"a": 1}',
    "bytes": bytes(range(256)),
    "number": b'{"format": ' + b"9" * 6000 + b"}",
}


@pytest.mark.parametrize("kind", [*OTHER_FILES, "folder", "missing"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("strategy", "import"), "strategy"),
        (("topology", "show"), ""),
        (("db", "import"), "app db export"),
        (("db", "status", "--database"), "database"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_was_expected(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], expected: str, kind: str
) -> None:
    file = tmp_path / f"{kind}.file"
    if kind == "folder":
        file.mkdir()
    elif kind in OTHER_FILES:
        file.write_bytes(OTHER_FILES[kind])
    outcome = command(*arguments, str(file))
    if arguments[1] == "status" and kind in ("empty", "missing"):
        assert (outcome.code, outcome.errors) == (0, ""), outcome
        (line,) = outcome.output.splitlines()
        assert all(words in line for words in (file.name, "holds no database yet", "app db upgrade"))
        assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [(file.name, 0)] * (
            kind == "empty"
        )
        return
    assert_one_line(outcome, file.name, expected)
    said = outcome.errors.splitlines()[-1].replace(str(tmp_path), "")
    assert len(said) < 350, said
    for internal in ("None", "codec", "Expecting", "set_int_max_str_digits", "NoneType", "mapping"):
        assert internal not in said


def test_a_topology_file_with_a_mistake_names_file_and_key(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("kinds: {}\nnodes: 3\n")
    assert_one_line(command("search", *SMALL, "--topology", str(file)), "mine.yaml", "kinds")


def test_a_database_of_a_newer_soapstone_is_left_alone(command: Command, database: Path) -> None:
    assert command("db", "upgrade").code == 0
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = database.read_bytes()
    assert_one_line(command("compare"), "9999")
    assert_one_line(command("db", "upgrade"), "9999")
    assert_one_line(command("db", "status"), "9999", "newer")
    assert database.read_bytes() == before


USER_MODULE = """
import torch
from torch import nn

print("imported")


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        print("forward")
        return self.layer(x).square().mean()


def good(batch_size=6):
    print("built")
    return Mine(), (torch.randn(batch_size, 4),), {}


def keywords(**options):
    return good(**options)


def no_module():
    return 3, (torch.randn(6, 4),), {}


def no_keywords():
    return good()[:2]


def asks(size):
    return good(size)


def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of a user's own, and packages that are named as some of ours."""
    folder = tmp_path / "user"
    for package in ("runtime", "graph"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise RuntimeError('found instead of ours')\n")
    (folder / "users_own.py").write_text(USER_MODULE)
    (folder / "users_broken.py").write_text("1 / 0\n")
    (folder / "users_script.py").write_text("import sys\nsys.exit(7)\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("factory", ["good", "keywords"])
def test_what_a_users_module_prints_is_no_part_of_the_document(
    command: Command, user_folder: Path, factory: str
) -> None:
    outcome = command("models", "show", f"users_own:{factory}", "--batch-size", "5", "--json")
    assert outcome.code == 0, outcome
    assert outcome.document["batch_size"] == 5
    # Worker processes inherit sys.path: with the folder on it, its packages could be found instead of ours.
    assert str(user_folder) not in sys.path


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("users_own:no_module", ("returned (int, tuple, dict)", "(module, args, kwargs)")),
        ("users_own:no_keywords", ("returned (Mine, tuple)", "(module, args, kwargs)")),
        # Where it is called is no place to look at.
        ("users_own:asks", (": its factory failed (TypeError", "size")),
        ("users_own:leaves", ("SystemExit",)),
        ("users_broken:factory", ("ZeroDivisionError", "users_broken")),
        ("users_script:factory", ("SystemExit", "users_script")),
        ("graph:factory", ("graph", "rename")),
    ],
)
def test_a_users_module_that_fails_is_named(
    command: Command, user_folder: Path, model: str, words: tuple[str, ...]
) -> None:
    assert_one_line(command("models", "show", model), *words)


@pytest.mark.parametrize("kind", ["missing", "empty"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("compare",),
        ("compare", "--execution", "1"),
        ("query", "FROM searches"),
        ("strategy", "list"),
        ("strategy", "show", "1"),
        ("strategy", "show", "1", "--pcg"),
        ("strategy", "diff", "1", "2"),
        ("strategy", "export", "1", "x.json"),
        ("strategy", "rebuild", "1"),
        ("search", "--resume", "1"),
        ("trace", "--strategy", "1", "--output", "x.json"),
        ("report", "--output", "x.html"),
        ("db", "export", "x.parquet"),
    ],
    ids=" ".join,
)
def test_a_command_that_needs_what_is_stored_makes_no_database(
    command: Command, database: Path, kind: str, arguments: tuple[str, ...]
) -> None:
    if kind == "empty":
        database.touch()
    outcome = command(*arguments)
    assert_one_line(outcome, f"{database}: is not made yet", "app search", "--database")
    assert (outcome.output, outcome.errors.count("\n")) == ("", 1), outcome
    assert [(path.name, path.stat().st_size) for path in database.parent.iterdir()] == [
        (database.name, 0)
    ] * (kind == "empty")


def test_comparing_what_was_never_stored_names_what_is(command: Command, database: Path) -> None:
    assert command("db", "upgrade").code == 0
    assert command("compare", "--model", "nothing").code == 0
    searched = command("search", *SMALL, "--topology", "p100-cluster", "--devices", "2", "--proposals", "0")
    assert searched.code == 0, searched
    assert_one_line(command("compare", "--model", "nothing"), "nothing", "mlp-small")
    assert_one_line(command("compare", "--topology", "nowhere"), "nowhere", "p100-cluster")


@pytest.fixture
def strategy_document(command: Command, known_links: None, tmp_path: Path) -> dict[str, object]:
    """The file of a stored strategy of the small MLP on two CPU devices."""
    searched = command("search", *SMALL, "--device", "cpu", "--devices", "2", "--proposals", "10", "--json")
    assert searched.code == 0, searched
    file = tmp_path / "good.json"
    digest = searched.document["predictions"][0]["digest"]
    assert command("strategy", "export", digest, str(file)).code == 0
    document = json.loads(file.read_text())
    assert isinstance(document, dict)
    return document


def test_a_strategy_file_that_does_not_fit_is_refused_with_the_operator_named(
    command: Command, tmp_path: Path, strategy_document: dict[str, object]
) -> None:
    operators = strategy_document["operators"]
    assert isinstance(operators, dict)
    name = next(iter(operators))
    rest = {key: value for key, value in operators.items() if key != name}
    broken = {
        "wrong operator": ({**operators, "conv99": operators[name]}, "conv99"),
        "missing operator": (rest, name),
        "wrong degree": ({**rest, name: {"degrees": {"sample": 1000}, "devices": [0] * 1000}}, name),
        "wrong axis": ({**rest, name: {"degrees": {"depth": 2}, "devices": [0, 1]}}, "depth"),
        "wrong device": ({**rest, name: {"degrees": {}, "devices": [7]}}, "7"),
        "too few devices": ({**rest, name: {"degrees": {"sample": 2}, "devices": [0]}}, name),
    }
    for title, (entries, word) in broken.items():
        file = tmp_path / f"{title}.json"
        file.write_text(json.dumps({**strategy_document, "operators": entries}))
        outcome = command("run", *SMALL, "--device", "cpu", "--devices", "2", "--strategy", str(file))
        assert_one_line(outcome, word)
    text = json.dumps(strategy_document)
    unreadable = {
        "text": "not json",
        "deep": "[" * 100_000,
        "twice": text.replace('"operators": {', '"operators": {"a": 1, "a": 2, ', 1),
    }
    for title, content in unreadable.items():
        file = tmp_path / f"{title}.json"
        file.write_text(content)
        outcome = command("run", *SMALL, "--device", "cpu", "--devices", "2", "--strategy", str(file))
        assert_one_line(outcome, file.name, "JSON")
