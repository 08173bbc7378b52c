"""Which cases of a test run always; the others run only under scripts/test --all."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

# A convolutional network with branches, a recurrent one, one with attention, one with embedding tables.
FEW_NETWORKS = ("densenet121", "nmt", "gpt2", "dlrm")


def seeds(quick: int, full: int) -> list[Any]:
    """Return the parameters of a test: seeds, of which all but the first few run only under scripts/test --all."""
    return [pytest.param(seed, marks=() if seed < quick else pytest.mark.slow) for seed in range(full)]


def few(quick: Collection[str | int], names: Iterable[str | int]) -> list[Any]:
    """Return the parameters of a test: names or seeds, of which all but a few run only under scripts/test --all."""
    names = tuple(names)
    assert set(quick) <= set(names), set(quick) - set(names)
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def half(*choices: Sequence[Any]) -> list[Any]:
    """Return the parameters of a test: all combinations of choices, of which every second runs only under --all.

    Any choices but one are among those that run always, in every combination: any two, where there are three.
    """
    return [
        pytest.param(
            *(choice for _, choice in numbered),
            marks=pytest.mark.slow if sum(number for number, _ in numbered) % 2 else (),
        )
        for numbered in itertools.product(*map(enumerate, choices))
    ]
