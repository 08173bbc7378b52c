"""Runs the command line in this process, against a database of the test's own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    output: str
    errors: str

    @property
    def document(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.output)


Command = Callable[..., Outcome]


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a database that does not exist yet; commands use it by default."""
    path = tmp_path / "test.sqlite"
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{path}")
    return path


@pytest.fixture
def command(database: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`app` as a function of its arguments."""
    from app.cli.main import main

    def invoke(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["app", *arguments])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        printed = capfd.readouterr()
        return Outcome(code, printed.out, printed.err)

    return invoke
