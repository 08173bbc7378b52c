"""The dispatcher of scripts/bench: names, exit codes, and the shape of what a benchmark returns."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from scripts.benchmarks.__main__ import benchmark_names, main
from scripts.benchmarks.result import BenchmarkResult, measurement, meets_target, show


def test_every_benchmark_is_known_by_its_name() -> None:
    paths = Path("scripts/benchmarks").glob("*.py")
    assert set(benchmark_names()) == {path.stem for path in paths if "\ndef run(" in path.read_text()}


def test_unknown_benchmark_is_one_line_that_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["nonesuch"])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert all(name in error for name in benchmark_names())


@pytest.mark.parametrize(("value", "met"), [(0.4, True), (0.5, True), (0.6, False)])
def test_value_is_held_to_its_upper_target(value: float, met: bool) -> None:  # noqa: FBT001 (parametrized)
    assert meets_target(measurement("time", value, "s", at_most=0.5)) is met


def test_value_is_held_to_its_lower_target() -> None:
    assert not meets_target(measurement("rate", 9.0, "1/s", at_least=10.0))


def test_table_shows_target_beside_value() -> None:
    shown = io.StringIO()
    measured = [measurement("median", 0.25, "s", at_most=0.5), measurement("minimum", 0.2, "s")]
    show(
        BenchmarkResult(benchmark="cli", conditions={"runs": 5}, measurements=measured),
        Console(file=shown, width=100),
    )
    (line,) = [line for line in shown.getvalue().splitlines() if "median" in line]
    assert "0.25 s" in line
    assert "<= 0.5 s" in line


def test_cli_benchmark_reports_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cli", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["benchmark"] == "cli"
    assert [measured["name"] for measured in result["measurements"]] == ["median", "minimum", "maximum"]


def test_estimator_without_costs_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{tmp_path}/empty.sqlite")
    assert main(["estimator"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line
        == "error: estimator: the database holds no costs, must hold measured ones; run app profile first"
    )
