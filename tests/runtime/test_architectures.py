"""Architectures from outside of the zoo are imported, and equal to their modules, as docs/models.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra hf is not installed")

from scripts.architectures import table
from scripts.architectures.catalog import names
from scripts.architectures.checking import Checking
from tests.runtime.pool import LocalPool

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
# Sums over tokens and over channels; attention with dropout.
QUICK = ("mlp_mixer", "distilbert")


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names()]


@pytest.mark.parametrize("name", cases())
def test_an_architecture_does_as_its_row_says(pool: LocalPool, name: str) -> None:
    # Another pool than the tests' for what may break it.
    outcome = Checking(pool).check(name) if name in QUICK else _apart(name)
    assert table.row(outcome) in PAGE, outcome.failures
    assert table.summary(outcome).count("\n") == 0


def _apart(name: str) -> Any:
    with Checking() as checking:
        return checking.check(name)
