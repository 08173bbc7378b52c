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


def test_a_mask_takes_ten_launches_on_a_cpu_however_few_its_elements() -> None:
    mask((3, 5), 0.1 * 2**32)  # positions are kept
    with CountedOperators() as counted:
        mask((3, 5), 0.1 * 2**32)
    # Nine passes, and one in which the key enters.
    assert counted.kernels.total() == 10


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    pair = torch.stack([first.double().reshape(-1), second.double().reshape(-1)])
    return float(torch.corrcoef(pair)[0, 1])


@pytest.mark.parametrize("other", [(7, 3, 12), (7, 4, 11), (8, 3, 11), (7, 3, 11 + 2**16)])
def test_masks_of_other_seeds_steps_and_operators_have_nothing_to_do_with_each_other(
    other: tuple[int, int, int],
) -> None:
    rows, columns, bound = 2048, 1024, 5 / 2**10.5  # five standard deviations of chance
    one, two = (keep_mask(*whole_region((rows, columns)), 0.3, key, CPU) for key in (KEY, other))
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 16), (16, 0), (512, 0), (0, 512)):
        shifted = two.roll((row, column), (0, 1))
        assert abs(correlation(one, shifted)) < bound
        if (row, column) != (0, 0):
            assert abs(correlation(one, one.roll((row, column), (0, 1)))) < bound
    # Nor have whole rows and columns: how many they keep is binomial.
    for dim, length in ((0, rows), (1, columns)):
        for mask_ in (one, two):
            kept = mask_.double().mean(dim)
            expected = (0.3 * 0.7 / length) ** 0.5
            assert kept.std() == pytest.approx(expected, rel=0.15)
        assert abs(correlation(one.double().mean(dim), two.double().mean(dim))) < 0.17


def test_words_of_one_position_in_many_steps_are_uniform_and_do_not_depend_on_each_other() -> None:
    """As in a single element's life: its words step by step, by the bits of which they consist."""
    steps = 4096
    numbers = torch.stack(
        [
            random_numbers("uniform", *whole_region((2, 2)), (7, step, 11), (torch.float64, CPU))
            for step in range(steps)
        ]
    ).reshape(steps, 4)
    bits = (numbers[:, :, None] * 2.0 ** torch.arange(1, 17)).floor() % 2
    assert (bits.mean(0) - 0.5).abs().max() < 5 * 0.5 / steps**0.5
    for later in (1, 2, 3):
        for element in range(4):
            for neighbour in range(4):
                drawn = correlation(numbers[later:, element], numbers[:-later, neighbour])
                assert abs(drawn) < 5 / steps**0.5
