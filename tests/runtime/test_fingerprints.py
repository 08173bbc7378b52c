"""The number by which ranks notice in every step that they were given different batches."""

from __future__ import annotations

import pytest
import torch

from runtime.execution.fingerprints import BLOCK_BYTES, MOST_BYTES, fingerprint

CPU = torch.device("cpu")


def number_of(*tensors: torch.Tensor) -> float:
    return float(fingerprint({str(place): tensor for place, tensor in enumerate(tensors)}, CPU))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("sizes", [(), (1,), (3,), (5, 7), (16, 8)])
def test_every_element_and_its_place_counts(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (
        (torch.rand(sizes) > 0.5).to(dtype) if dtype is torch.bool else (9 * torch.randn(sizes)).to(dtype)
    )
    number = number_of(tensor)
    assert number == number_of(tensor.clone())
    assert 0 <= number < 2**52
    assert number == int(number)
    for place in range(tensor.numel()):
        other = tensor.clone()
        element = other.view(-1)[place : place + 1]
        element.copy_(~element if dtype is torch.bool else -element + (element == 0))
        assert number_of(other) != number
    if len(set(tensor.view(-1).tolist())) > 2:
        assert number_of(tensor.view(-1).roll(1).view(sizes)) != number


def test_how_a_batch_lies_in_memory_does_not_count() -> None:
    base = torch.randn(9, 7, 5)
    for view in (base[1:], base.transpose(0, 2), base[:, 1:, ::2], base.expand(9, 7, 5)):
        assert number_of(view) == number_of(view.contiguous().clone())
    assert number_of(base, base[0]) != number_of(base[0], base)
    assert number_of(torch.empty(0)) == 0


def test_blocks_of_a_large_batch_count() -> None:
    """A sample of more than some blocks that differs is noticed, and so are samples in another order."""
    batch = torch.randn(16, 3 * MOST_BYTES // 4 // 16)
    number = number_of(batch)
    for sample in range(16):
        other = batch.clone()
        other[sample] += 1
        assert number_of(other) != number
    assert number_of(batch.flip(0)) != number
    assert batch[0].nbytes > 4 * BLOCK_BYTES
