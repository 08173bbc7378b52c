"""Dropout: the same draws on any split, the right share of them, and torch's arithmetic."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from graph.intervals import full_region
from profiler.operators import ExecutionContext
from profiler.operators.counter_rng import keep_mask
from tests.reference.randoms import floats
from tests.reference.rules import Case, check_case

CPU = torch.device("cpu")
CONTEXT = ExecutionContext(seed=7, step=3)


def _mask(shape: tuple[int, ...], p: float, seed: int = 7, step: int = 3, operator: int = 0) -> torch.Tensor:
    return keep_mask(full_region(shape), shape, p, (seed, step, operator), CPU)


@pytest.mark.parametrize("seed", range(24))
def test_dropout_on_parts(seed: int) -> None:
    generator = random.Random(seed)
    shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(1, 4)))
    x = floats(*shape, seed=seed)
    p = generator.choice([0.1, 0.5, 0.9, 1.0])
    case = Case(
        "soapstone.dropout",
        {"self": x, "p": p},
        (x,),
        lambda x: x * _mask(shape, p) / (1 - p) if p < 1 else x * 0,
    )
    for _ in range(2):
        check_case(case, generator, context=CONTEXT)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_on_parts(seed: int, *, causal: bool) -> None:
    generator = random.Random(seed)
    batch, heads, rows, size = (generator.randint(1, 4) for _ in range(4))
    keys = rows if causal else generator.randint(1, 5)
    query, key = floats(batch, heads, rows, size, seed=seed), floats(batch, heads, keys, size, seed=seed + 1)
    value = floats(batch, heads, keys, size, seed=seed + 2)

    def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.mT / size**0.5
        if causal:
            scores = scores + torch.full((rows, keys), float("-inf")).triu(1)
        weights: torch.Tensor = scores.softmax(-1) * _mask((batch, heads, rows, keys), 0.3) / 0.7
        return weights @ value

    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": None,
        "dropout_p": 0.3,
        "is_causal": causal,
        "scale": None,
        "enable_gqa": False,
        "start": 0,
    }
    case = Case("soapstone.attention", arguments, (query, key, value), reference)
    for _ in range(2):
        check_case(case, generator, context=CONTEXT)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_share_of_dropped_elements(p: float) -> None:
    """Within five standard deviations, over the whole, along rows and along columns."""
    keep = _mask((300, 400), p).double()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(keep.mean().item() - (1 - p)) < 5 * deviation / 120_000**0.5
    assert (keep.mean(0) - (1 - p)).abs().max().item() < 5 * deviation / 300**0.5
    assert (keep.mean(1) - (1 - p)).abs().max().item() < 5 * deviation / 400**0.5


def test_draws_are_unrelated() -> None:
    """Masks of other seeds, steps, operators, and of neighbouring rows and columns agree by chance alone."""
    shape = (200, 250)
    masks = [
        _mask(shape, 0.5, seed, step, operator)
        for seed, step, operator in itertools.product(range(2), repeat=3)
    ]
    for left, right in itertools.combinations(masks, 2):
        assert abs((left == right).double().mean().item() - 0.5) < 5 * 0.5 / 50_000**0.5
    for distance in (1, 2, 64):
        for dim in (0, 1):
            size = shape[dim] - distance
            left, right = masks[0].narrow(dim, 0, size), masks[0].narrow(dim, distance, size)
            assert abs((left == right).double().mean().item() - 0.5) < 5 * 0.5 / left.numel() ** 0.5


def test_rows_beyond_32_bits_differ() -> None:
    region = (((0, 2),), ((0, 1), (2**31, 2**31 + 1), (2**32, 2**32 + 1)), ((0, 4000),))
    keep = keep_mask(region, (2, 2**33, 4000), 0.5, (0, 0, 0), CPU).reshape(6, 4000)
    for left, right in itertools.combinations(range(6), 2):
        assert abs((keep[left] == keep[right]).double().mean().item() - 0.5) < 0.05
