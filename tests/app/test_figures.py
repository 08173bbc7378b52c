"""Figures as commands print them: nothing is minus nothing, and little is not nothing."""

from __future__ import annotations

import pytest

from app.cli.output import byte_size, percent, recomputation_line
from app.services.predict.recomputation_report import RecomputationReport


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "-"),
        (0.0, "0.0 %"),
        (-0.0, "0.0 %"),
        (-0.0004, "0.0 %"),
        (-0.0006, "-0.1 %"),
        (0.125, "12.5 %"),
    ],
)
def test_shares_have_a_sign_where_a_digit_does(share: float | None, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (None, "-"),
        (0, "0.0 MiB"),
        (512, "0.5 KiB"),
        (100 * 2**10, "100.0 KiB"),
        (2**20 / 10, "0.1 MiB"),
        (3 * 2**29, "1536.0 MiB"),
    ],
)
def test_few_bytes_are_in_kibibytes(size_bytes: float | None, text: str) -> None:
    assert byte_size(size_bytes) == text


@pytest.mark.parametrize(("saved_bytes", "text"), [(2**20, "1.0 MiB less"), (-512, "0.5 KiB more")])
def test_memory_that_recomputation_costs_is_more(saved_bytes: int, text: str) -> None:
    report = RecomputationReport((("a", "b"),), 2, 7, added_s=0.001, saved_bytes=saved_bytes)
    assert recomputation_line(report).endswith(
        f"1.000 ms a step more, and {text} on the fullest device (roughly)"
    )
