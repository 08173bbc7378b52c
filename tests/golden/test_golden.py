"""The search gives what it gave when `golden.json` was written: times to the nanosecond, proposals one by one."""

from __future__ import annotations

import pytest

from tests.golden.results import NETWORKS, golden, results

# They take longest to import.
SLOW = ("gpt2", "inception")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NETWORKS]
)
def test_simulations_and_proposals_are_as_they_were(name: str) -> None:
    assert dict(results(name)) == golden()[name]
