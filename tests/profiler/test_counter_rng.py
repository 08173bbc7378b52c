"""Masks of dropout: each element by its word and the threshold, in few passes over memory."""

from __future__ import annotations

import pytest
import torch

from profiler.operators.counter_rng import keep_mask, random_numbers, whole_region
from scripts.benchmarks.launches import CountedOperators

CPU = torch.device("cpu")
KEY = (7, 3, 11)


def words(shape: tuple[int, ...]) -> torch.Tensor:
    """Return the 32 bits of each element as float64 numbers from 0 on: uniform numbers have all of them."""
    numbers = random_numbers("uniform", *whole_region(shape), KEY, (torch.float64, CPU))
    return numbers * 2.0**32


def mask(shape: tuple[int, ...], threshold: float) -> torch.Tensor:
    """Return the mask of the elements whose words are at least a threshold."""
    key = (*KEY, 0)  # of the first word of random numbers
    return keep_mask(*whole_region(shape), threshold / 2**32, key, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (5,), (3, 1), (257, 3), (3, 40001)])
def test_an_element_is_kept_where_its_word_is_at_least_the_threshold(shape: tuple[int, ...]) -> None:
    drawn = words(shape)
    for word in drawn.reshape(-1)[:5].tolist():
        upper = word // 65536 * 65536
        # The word itself and its neighbours, and the ends of the range of its upper half.
        for threshold in (word - 1, word, word + 1, upper, upper + 1, upper + 65535, upper + 65536):
            assert torch.equal(mask(shape, threshold), drawn >= threshold)


def test_a_chunk_takes_nine_passes_over_memory() -> None:
    counts = []
    for chunks in (1, 3):
        shape = (64 * chunks, 1024)  # a chunk on a CPU has 65,536 elements
        mask(shape, 0.1 * 2**32)  # positions are kept
        with CountedOperators() as counted:
            mask(shape, 0.1 * 2**32)
        counts.append(counted.kernels.total())
    assert counts[1] - counts[0] == 2 * 9
