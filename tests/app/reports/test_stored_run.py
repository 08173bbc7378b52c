"""`app run --profile`, `app trace` and `app report` on one database, of a real search and a real run."""

from __future__ import annotations

import json
import shutil
import sqlite3
import statistics
from pathlib import Path
from typing import Any

import pytest

from app.cli.output import percent, ratio
from app.db.store import Store
from app.services.timeline.store import read_recording, recording_path
from tests.app.conftest import Command, Outcome, store_results
from tests.app.reports.browser import browser, opened
from tests.app.tracing.trace_format import check_trace

MLP = ("--model", "mlp", "--preset", "small", "--batch-size", "8", "--device", "cpu", "--devices", "2")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, probed: Path) -> Path:
    """A database with a search, a recorded run of data parallelism, and a run that recorded nothing."""
    path = tmp_path_factory.mktemp("stored") / "test.sqlite"
    shutil.copy(probed, path)
    store_results(
        path,
        ("search", *MLP, "--proposals", "60", "--seed", "1", "--json"),
        ("run", *MLP, "--strategy", "data-parallel", "--iterations", "2", "--profile", "--json"),
        ("run", *MLP, "--strategy", "single-device", "--iterations", "2", "--json"),
    )
    return path


def one_line(outcome: Outcome, *words: str, code: int = 2) -> None:
    assert outcome.code == code, outcome
    assert outcome.errors.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in outcome.errors
    assert all(word in outcome.errors for word in words)


def test_simulated_and_measured_stand_side_by_side_under_the_same_names(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    outcome = run("trace", "--execution", "1", "--output", str(file), "--json")
    assert outcome.code == 0, outcome
    document = json.loads(file.read_text())
    tracks = check_trace(document)
    assert outcome.document["events"] == sum(map(len, tracks.values()))
    for device in (0, 1):
        names = {
            kind: {
                name
                for name, _, _ in tracks[f"device {device} / {kind}"]
                if name.startswith(("forward", "back"))
            }
            for kind in ("simulated", "measured")
        }
        assert names["simulated"] == names["measured"]
        assert any(
            name.startswith("wait for all-reduce") for name, _, _ in tracks[f"device {device} / measured"]
        )
    simulated_end = max(
        end for track, events in tracks.items() if track.endswith("simulated") for *_, end in events
    )
    assert simulated_end / 1e9 == pytest.approx(outcome.document["simulated_step_time_s"])
    assert document["otherData"]["execution"] == 1


def test_differences_add_up_to_the_error_of_the_step(run: Command, stored: Path, tmp_path: Path) -> None:
    found = run("trace", "--execution", "1", "--output", str(tmp_path / "t.json"), "--json").document[
        "attribution"
    ]
    error = found["measured_s"] - found["predicted_s"]
    for rows in (found["rows"], found["kinds"]):
        assert sum(row["predicted_s"] for row in rows) == pytest.approx(found["predicted_s"])
        assert sum(row["measured_s"] for row in rows) == pytest.approx(found["measured_s"])
        assert sum(row["difference_s"] for row in rows) == pytest.approx(error)
        sizes = [abs(row["difference_s"]) for row in rows]
        assert sizes == sorted(sizes, reverse=True)
    assert {"forward", "backward", "update", "wait"} <= {row["kind"] for row in found["kinds"]}
    with Store.open(stored) as store:
        recording = read_recording(store, store.execution(1))
    mean_s = sum(step.step_ns for step in recording.steps) / len(recording.steps) / 1e9
    assert (found["recorded_steps"], found["measured_s"]) == (len(recording.steps), pytest.approx(mean_s))


def test_compare_attributes_the_error_as_trace_does(run: Command, tmp_path: Path) -> None:
    compared = run("compare", "--execution", "1", "--json")
    assert compared.code == 0, compared
    traced = run("trace", "--execution", "1", "--output", str(tmp_path / "t.json"), "--json")
    assert compared.document == traced.document["attribution"]
    assert "largest differences" in run("compare", "--execution", "1").output


def test_a_step_that_is_predicted_anew_says_so(
    stored: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where costs have changed, or no prediction is stored; and what is predicted so is not stored."""
    copy = tmp_path / "copy.sqlite"
    shutil.copy(stored, copy)
    shutil.copytree(stored.with_suffix(".traces"), copy.with_suffix(".traces"))
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{copy}")
    trace = ("trace", "--execution", "1", "--output", str(tmp_path / "t.json"))
    strategy = command("query", "SELECT strategy_id AS id FROM executions WHERE id = 1", "--json")
    number = str(strategy.document[0]["id"])
    asked = (trace, ("compare", "--execution", "1"), ("strategy", "show", number))
    simulations = ("query", "SELECT * FROM simulations ORDER BY id", "--json")
    before = command(*simulations).document
    for words in asked:
        assert "anew" not in command(*words).errors
    fits = command(*trace, "--json").document
    assert fits["stored_prediction_s"] == fits["simulated_step_time_s"]

    def change(statement: str) -> None:
        with sqlite3.connect(copy) as connection:
            connection.execute(statement)
        connection.close()

    change("UPDATE op_costs SET median_s = 3 * median_s, p10_s = 3 * p10_s")
    for words in asked:
        outcome = command(*words)
        assert outcome.code == 0, outcome
        (line,) = [line for line in outcome.errors.splitlines() if "anew" in line]
        assert "is predicted anew, with the costs that are stored now: " in line
        assert line.endswith(
            f" is {fits['simulated_step_time_s'] * 1e3:.3f} ms, and the new one is not stored"
        )
    anew = command(*trace, "--json").document
    assert anew["stored_prediction_s"] == fits["stored_prediction_s"] != anew["simulated_step_time_s"]
    assert command(*simulations).document == before
    change(f"DELETE FROM simulations WHERE strategy_id = {number}")
    assert "; no prediction of it is stored, and the new one is not stored\n" in command(*trace).errors
    assert command(*trace, "--json").document["stored_prediction_s"] is None


def test_scheduling_stands_beside_simulated_and_recorded_steps(run: Command) -> None:
    keys = ("scheduling_efficiency", "speedup_potential")
    found = run("compare", "--execution", "1", "--json").document
    for efficiency, potential in (keys, tuple(f"recorded_{key}" for key in keys)):
        assert 0 <= found[efficiency] <= 1
        assert found[potential] >= 0
    said = run("compare", "--execution", "1").output
    assert f"scheduling efficiency {percent(found[keys[0]])} predicted" in said
    assert f"{percent(found['recorded_' + keys[0]])} recorded" in said
    assert f"{ratio(found['recorded_' + keys[1]])} recorded" in said
    # The same of the stored strategy, and of each step in a query.
    shown = run("strategy", "show", "1", "--json").document
    assert all(shown[key] >= 0 for key in keys)
    assert "scheduling efficiency" in run("strategy", "show", "1").output
    # And in the comparison of all strategies, beside what is stored of the prediction.
    rows = run("compare", "--json").document["strategies"]
    (compared,) = [row for row in rows if row["recorded_scheduling_efficiency"] is not None]
    for key in keys:
        assert compared[f"recorded_{key}"] == pytest.approx(found[f"recorded_{key}"])
        assert compared[f"predicted_{key}"] == pytest.approx(found[key])
    table = run("compare").output
    assert "┃ strategy     ┃ E " in table
    for key in keys:
        assert f"{compared[f'predicted_{key}']:.2f} / {compared[f'recorded_{key}']:.2f}" in table
    (alone,) = [row for row in rows if row["source"] == "single-device"]
    assert f"{alone['predicted_scheduling_efficiency']:.2f} / -" in table
    steps = run("query", "FROM recorded_steps", "--format", "json").document
    assert len(steps) == found["recorded_steps"]
    for key in keys:
        assert statistics.median(step[key] for step in steps) == pytest.approx(found[f"recorded_{key}"])


def test_a_run_that_is_profiled_prints_its_scheduling(command: Command, database: Path, probed: Path) -> None:
    shutil.copy(probed, database)
    arguments = ("run", *MLP, "--strategy", "data-parallel", "--iterations", "1", "--on-miss", "estimate")
    recorded = command(*arguments, "--profile")
    assert recorded.code == 0, recorded
    assert "% predicted" in recorded.output
    assert "recorded; speed-up potential" in recorded.output
    alone = command(*arguments, "--json").document
    assert 0 <= alone["scheduling_efficiency"] <= 1
    assert alone["recorded_scheduling_efficiency"] is None


def test_compare_says_how_good_the_predictions_are(run: Command) -> None:
    found = run("compare", "--json").document
    (accuracy,) = found["accuracy"]
    errors = [abs(row["relative_error"]) for row in found["strategies"] if row["relative_error"] is not None]
    assert accuracy["strategies"] == len(errors) == 2
    assert accuracy["mean_error"] == pytest.approx(sum(errors) / 2)
    assert accuracy["worst_error"] == max(errors)
    assert "tau: Kendall's" in run("compare").output


def test_the_table_of_differences_is_printed(run: Command, tmp_path: Path) -> None:
    outcome = run("trace", "--execution", "1", "--output", str(tmp_path / "t.json"), "--rows", "3")
    assert outcome.code == 0, outcome
    for word in ("forward", "backward", "wait", "largest differences", "ui.perfetto.dev"):
        assert word in outcome.output


def test_a_strategy_is_traced_with_its_newest_recorded_run_or_alone(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    strategies = {one["source"]: str(one["id"]) for one in run("strategy", "list", "--json").document}
    recorded = run("trace", "--strategy", strategies["data-parallel"], "--output", str(file), "--json")
    assert recorded.document["execution"] == 1
    alone = run("trace", "--strategy", strategies["single-device"], "--output", str(file), "--json")
    assert (alone.document["execution"], alone.document["attribution"]) == (None, None)
    assert set(check_trace(json.loads(file.read_text()))) == {f"device {n} / simulated" for n in (0, 1)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("trace",), ("--execution", "--strategy")),
        (("trace", "--execution", "2"), ("execution 2", "--profile")),
        (("trace", "--execution", "77"), ("execution 77",)),
        (("trace", "--strategy", "ffffffff"), ("ffffffff",)),
        (("trace", "--strategy", "1", "--topology", "moon"), ("moon", "local")),
        (("trace", "--execution", "1", "--output", "/nowhere/t.json"), ("/nowhere/t.json",)),
        (("compare", "--execution", "2"), ("execution 2", "--profile")),
        (("compare", "--execution", "1", "--topology", "local"), ("--execution", "--topology")),
        (("compare", "--execution", "1", "--model", "mlp-small"), ("mlp-small", "package.module:factory")),
        (("report", "--model", "inception"), ("inception", "mlp-small")),
        (("report", "--topology", "moon"), ("moon", "local")),
        (("report", "--search", "77"), ("search 77",)),
        (("report", "--execution", "1", "--strategy", "1"), ("--execution", "--strategy")),
        (("report", "--output", "/nowhere/r.html"), ("/nowhere/r.html",)),
    ],
)
def test_a_mistake_is_one_line(run: Command, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    one_line(run(*arguments), *words)


def test_a_broken_recording_is_named(run: Command, stored: Path, tmp_path: Path) -> None:
    with Store.open(stored) as store:
        path = recording_path(store, store.execution(1))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        outcome = run("trace", "--execution", "1", "--output", str(tmp_path / "t.json"))
        one_line(outcome, str(path), code=1)
    finally:
        path.write_bytes(whole)


def test_the_report_of_a_real_search_and_run_is_drawn_in_a_browser(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    outcome = run("report", "--output", str(file), "--json")
    assert outcome.code == 0, outcome
    sections = {"searches", "scatter", "costs", "timeline", "graph", "pcg", "memory"}
    assert set(outcome.document["drawn"]) == sections
    with browser() as started, opened(started, file) as page:
        drawn: dict[str, Any] = page.figures()
        page.assert_quiet()
        text = page.page.inner_text("body")
    assert set(drawn) == sections
    for name, figure in drawn.items():
        assert figure["groups"] == len(figure["traces"]) >= 1, name
        assert figure["marks"] >= len(figure["traces"]), name
    assert {"forward", "backward", "wait", "update"} <= set(drawn["timeline"]["traces"])
    assert len(drawn["searches"]["traces"]) == 1
    assert "execution 1" in text
    assert "mlp-small" in text


def test_a_report_of_an_empty_database_says_what_is_missing(
    command: Command, database: Path, tmp_path: Path
) -> None:
    assert command("db", "upgrade").code == 0
    outcome = command("report", "--output", str(tmp_path / "report.html"), "--json")
    assert outcome.code == 0, outcome
    assert outcome.document["drawn"] == []
    assert "app search" in outcome.document["left_out"]["timeline"]


@pytest.mark.parametrize("name", ["plotly", "jinja2"])
def test_without_the_extra_the_error_names_it(
    command: Command, database: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted)
    )
    one_line(command("report"), name, "pip install 'soapstone[report]'")
    assert not database.exists()
