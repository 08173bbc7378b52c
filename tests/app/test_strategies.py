"""`app strategy show`, `diff`, `export` and `import`: what they say is what is simulated, and no file does anything."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.db.store import Store
from app.services.progress import Progress
from app.services.report.parallel_graph import drawn_parallel_graph
from app.services.strategies.strategies import MOST_DEVICES, operator_costs
from app.services.timeline.simulated_step import step_of_strategy
from graph.canonical import canonical_json
from graph.operator_ranges import OperatorRange
from graph.parallel_graph import parallel_graph
from tests.app.conftest import Command, Outcome, store_results

MLP = ("--model", "mlp", "--preset", "small", "--batch-size", "8")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with the baselines of two networks on four simulated devices."""
    path = tmp_path_factory.mktemp("stored") / "test.sqlite"
    models = (MLP, ("--model", "candle-uno", "--preset", "small"))
    simulated = ("--topology", "p100-cluster", "--devices", "4", "--proposals", "0", "--json")
    store_results(path, *(("search", *model, *simulated) for model in models))
    return path


def number(run: Command, source: str, model: str = "mlp-small") -> str:
    listed = run("strategy", "list", "--json").document
    return next(str(one["id"]) for one in listed if (one["source"], one["model"]) == (source, model))


@pytest.fixture
def exported(run: Command, tmp_path: Path) -> dict[str, Any]:
    """The document of data parallelism."""
    file = tmp_path / "exported.json"
    assert run("strategy", "export", number(run, "data-parallel"), str(file)).code == 0
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def refused(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 2, outcome
    (line,) = [line for line in outcome.errors.splitlines() if line.startswith("error: ")]
    assert outcome.errors.splitlines()[-1] == line
    assert line.isprintable()
    assert "Traceback" not in outcome.errors
    for word in words:
        assert word in line


def test_shown_costs_add_up_to_the_time_of_all_simulated_tasks(stored: Path) -> None:
    with Store.open(stored) as store:
        for record in store.strategies():
            case = step_of_strategy(store, str(record.id), None, Progress())
            simulation = case.simulation
            costs, shared = operator_costs(case)
            assert list(costs) == [operator.name for operator in case.graph.operators]
            if record.source == "single-device":
                # One device: the busiest is the only one, nothing is sent, and nothing overlaps.
                everything = sum(one.total_s for one in (*costs.values(), *shared.values()))
                assert everything == pytest.approx(simulation.step_time_s)
            moved = sum(one.communication_s for one in (*costs.values(), *shared.values()))
            tasks = simulation.tasks
            messages = [
                int(simulation.end_ns[task] - simulation.start_ns[task])
                for task in range(tasks.task_count)
                if len(tasks.resources(task)) > 1 or tasks.resources(task)[0] >= len(case.topology.devices)
            ]
            assert moved == pytest.approx(sum(messages) / 1e9)
            assert (
                max(simulation.compute_s)
                <= sum(one.compute_s for one in (*costs.values(), *shared.values())) + 1e-12
            )


def test_show_gives_every_operator_as_exported(run: Command, exported: dict[str, Any]) -> None:
    shown = run("strategy", "show", number(run, "data-parallel"), "--json").document
    assert {
        one["name"]: {"degrees": one["degrees"], "devices": one["devices"]} for one in shown["operators"]
    } == exported["operators"]
    # In the order of the graph, both.
    assert [one["name"] for one in shown["operators"]] == list(exported["operators"])
    assert list(exported["operators"]) != sorted(exported["operators"])
    assert shown["simulated_step_time_s"] > 0
    text = run("strategy", "show", number(run, "data-parallel"), "--rows", "2").output
    assert f"the 2 dearest of {len(shown['operators'])} operators" in text
    assert "simulated step" in text


def test_show_pcg_gives_degrees_machine_views_and_chains(run: Command, exported: dict[str, Any]) -> None:
    reference = number(run, "data-parallel")
    pcg = run("strategy", "show", reference, "--pcg", "--json").document["pcg"]
    assert {placed["name"]: placed["degrees"] for placed in pcg["operators"]} == {
        name: entry["degrees"] for name, entry in exported["operators"].items()
    }
    for placed in pcg["operators"]:
        view, (extent,) = placed["view"], (*placed["degrees"].values(), 1)[:1]
        (stride,) = (*view["strides"].values(), 1)[:1]
        devices = [view["start"] + index * stride for index in range(extent)]
        assert exported["operators"][placed["name"]]["devices"] == devices
    shown = run("strategy", "show", reference, "--pcg", "--rows", "0")
    assert shown.code == 0, shown
    for text in ("-> input.0", "Partition(0, 4)", "Replicate(4)", "Reduce(4)", "0 + sample", "[8/4, "):
        assert text in shown.output, text
    brief = run("strategy", "show", reference, "--pcg", "--rows", "2").output
    assert f"the first 2 of {len(pcg['operators'])} operators" in brief


def test_show_pcg_refuses_what_it_cannot_express(
    run: Command, exported: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "shared.json"
    file.write_text(json.dumps({**exported, "sharding": {"layers.0.weight": "optimizer"}}))
    imported = run("strategy", "import", str(file), "--json").document
    refused(run("strategy", "show", str(imported["id"]), "--pcg"), "weight layers.0.weight", "(ZeRO)")
    both = ("--pcg", "--topology", "p100-cluster")
    refused(run("strategy", "show", number(run, "data-parallel"), *both), "--topology", "--pcg")


def test_the_report_draws_every_node_or_says_why_not(
    run: Command, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(stored) as store:
        step = step_of_strategy(store, number(run, "data-parallel"), None, Progress())
    parallel = parallel_graph(step.graph, step.strategy)
    figure, text = drawn_parallel_graph(step)
    assert figure is not None
    nodes = [len(trace["x"]) for trace in figure["data"] if trace["mode"] == "markers"]
    assert sum(nodes) == len(parallel.operators) + parallel.parallel_operators
    assert text.startswith(f"{sum(nodes)} nodes, {parallel.parallel_operators} of ")
    remade = replace(step, strategy=replace(step.strategy, recomputation=(OperatorRange(0, 1),)))
    nothing, reason = drawn_parallel_graph(remade)
    assert nothing is None
    assert "has no parallel computation graph: operator linear: is made again" in reason
    monkeypatch.setattr("app.services.report.parallel_graph.MOST_NODES", 3)
    nothing, reason = drawn_parallel_graph(step)
    assert nothing is None
    assert f"It has {sum(nodes)} nodes, more than the 3 that are drawn" in reason


def test_diff_names_exactly_the_operators_that_differ_and_their_costs(
    run: Command, exported: dict[str, Any], tmp_path: Path
) -> None:
    first = number(run, "data-parallel")
    changed = json.loads(json.dumps(exported))
    name = next(name for name, entry in changed["operators"].items() if entry["degrees"])
    changed["operators"][name] = {"degrees": {}, "devices": [3]}
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(changed))
    imported = run("strategy", "import", str(file), "--json")
    assert imported.code == 0, imported
    assert imported.document["known"] is False
    assert imported.document["devices"] == 4

    found = run("strategy", "diff", first, str(imported.document["id"]), "--json").document
    assert [one["name"] for one in found["operators"]] == [name]
    before, after = found["operators"][0]["strategies"]
    assert (before["degrees"], before["devices"]) == (exported["operators"][name]["degrees"], [0, 1, 2, 3])
    assert (after["degrees"], after["devices"]) == ({}, [3])
    # The whole batch on one device takes longer there than a quarter of it.
    assert after["cost"]["compute_s"] > before["cost"]["compute_s"] > 0
    for side, reference in ((before, first), (after, str(imported.document["id"]))):
        shown = run("strategy", "show", reference, "--json").document
        assert side in shown["operators"]
    text = run("strategy", "diff", first, str(imported.document["id"])).output
    assert "1 operator differs, " in text
    assert "no operator differs" in run("strategy", "diff", first, first).output


def test_importing_what_was_exported_is_the_same_strategy(
    run: Command, exported: dict[str, Any], tmp_path: Path
) -> None:
    first = number(run, "data-parallel")
    again = run("strategy", "import", str(tmp_path / "exported.json"), "--json")
    assert again.code == 0, again
    assert (str(again.document["id"]), again.document["known"]) == (first, True)


def test_a_file_for_a_network_that_is_not_stored_needs_its_name(
    run: Command, exported: dict[str, Any], tmp_path: Path
) -> None:
    file, elsewhere = tmp_path / "exported.json", ("--database", str(tmp_path / "elsewhere.sqlite"))
    refused(run("strategy", "import", str(file), *elsewhere), "--model")
    named = run("strategy", "import", str(file), *MLP, *elsewhere, "--json")
    assert named.code == 0, named
    assert (named.document["model"], named.document["known"]) == ("mlp-small", False)
    refused(run("strategy", "import", str(file), *MLP[:-1], "16", *elsewhere), "is for graph")


def test_hostile_files_are_refused_in_one_line_and_leave_nothing(
    run: Command, stored: Path, exported: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(stored) as store:
        before = store.table_counts()
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    name = next(name for name, entry in exported["operators"].items() if entry["degrees"])

    def entry(value: Any) -> str:
        return json.dumps({**exported, "operators": {**exported["operators"], name: value}})

    texts: list[str | bytes] = [
        "",
        "[]",
        "null",
        "1e999999",
        "NaN",
        "{" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        b"PK\x03\x04",
        "!!python/object/apply:os.system ['touch hacked']",
        "__import__('os').system('touch hacked')",
        json.dumps({**exported, "format": 2}),
        json.dumps({**exported, "format": True}),
        json.dumps({**exported, "graph": "../../etc/passwd"}),
        json.dumps({**exported, "graph": ["x"]}),
        json.dumps({**exported, "graph": {"__class__": "os.system"}}),
        json.dumps({**exported, "operators": []}),
        json.dumps({**exported, "operators": {}}),
        json.dumps({**exported, "operators": {**exported["operators"], "\x1b[2J\n\x07": {}}}),
        json.dumps(exported)[:-1] + ', "format": 1}',
        entry(None),
        entry("__import__('os')"),
        entry({"degrees": {}, "devices": []}),
        entry({"degrees": {}, "devices": [-1]}),
        entry({"degrees": {}, "devices": [MOST_DEVICES]}),
        entry({"degrees": {}, "devices": [10**30]}),
        entry({"degrees": {}, "devices": ["0"]}),
        entry({"degrees": {}, "devices": [0.0]}),
        entry({"degrees": {}, "devices": [True]}),
        entry({"degrees": {"sample": 0}, "devices": []}),
        entry({"degrees": {"sample": -2}, "devices": [0, 1]}),
        entry({"degrees": {"sample": 9}, "devices": list(range(9))}),
        entry({"degrees": {"replica": 10**18}, "devices": [0]}),
        entry({"degrees": {"replica": 10**4000}, "devices": [0]}),
        entry({"degrees": {"\x1b]0;x\x07": 2}, "devices": [0, 1]}),
        entry({"degrees": [["sample", 2]], "devices": [0, 1]}),
        entry({"degrees": {}, "devices": [0], "\x1b[31mnote": 1}),
    ]
    file = tmp_path / "hostile.json"
    for text in texts:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        refused(run("strategy", "import", str(file)))
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for odd in (pipe, Path("/dev/zero"), tmp_path, tmp_path / "missing.json", tmp_path / ("x" * 300)):
        refused(run("strategy", "import", str(odd)), "strategy file")
    sparse = tmp_path / "large.json"
    with open(sparse, "wb") as stream:
        stream.truncate(2**40)
    refused(run("strategy", "import", str(sparse)), "must have at most")
    with Store.open(stored) as store:
        assert store.table_counts() == before
    assert list(folder.iterdir()) == []


def test_names_of_the_database_steer_no_terminal(stored: Path, command: Command, database: Path) -> None:
    shutil.copy(stored, database)
    evil = "\x1b[31m[b]\x9b2J\u202e\nforged"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE graphs SET name = ?", (evil,))
        (text,) = connection.execute("SELECT document FROM topologies").fetchone()
        document = canonical_json({**json.loads(text), "name": evil})
        connection.execute("UPDATE topologies SET name = ?, document = ?", (evil, document))
    for arguments in (("show", "1"), ("diff", "1", "2")):
        outcome = command("strategy", *arguments)
        assert (outcome.code, "?[31m[b]?2J? forged" in outcome.output) == (0, True), outcome
        assert {letter for letter in outcome.output + outcome.errors if not letter.isprintable()} == {"\n"}


def test_an_unknown_key_is_refused_with_the_one_that_it_is_like(
    run: Command, exported: dict[str, Any], tmp_path: Path
) -> None:
    name, entry = next(iter(exported["operators"].items()))
    misspelt = {"degree": entry["degrees"], "devices": entry["devices"]}
    file = tmp_path / "misspelt.json"
    for document, words in (
        (
            {**exported, "shardings": {}},
            ("strategy file: key shardings is unknown", "did you mean sharding?"),
        ),
        (
            {**exported, "comment": "mine"},
            (
                "key comment is unknown",
                "must be one of collective_algorithms, compiled, format",
                "leave it out",
            ),
        ),
        (
            {**exported, "operators": {**exported["operators"], name: misspelt}},
            (f"operator {name}: key degree is unknown", "did you mean degrees?"),
        ),
    ):
        file.write_text(json.dumps(document))
        refused(run("strategy", "import", str(file)), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("show", "77"), ("77",)),
        (("show", "ffffffff"), ("ffffffff",)),
        (("show", "1", "--topology", "moon"), ("moon", "p100-cluster")),
        (("diff", "1", "77"), ("77",)),
        (("diff", "1"), ("missing argument",)),
        (("import",), ("missing argument",)),
        (("import", "x.json", "--devices", "0"), ("--devices",)),
    ],
)
def test_a_mistake_is_one_line(run: Command, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("strategy", *arguments), *words)


def test_strategies_for_two_networks_are_not_compared(run: Command) -> None:
    outcome = run("strategy", "diff", number(run, "expert"), number(run, "expert", "candle-uno-small"))
    refused(outcome, "mlp-small", "candle-uno-small")
