"""Short numbers that differ where tensors differ: whether all ranks have the same values, without sending them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache

import torch

# Of a larger tensor so many bytes count, in blocks spread evenly over it: reading all of a batch takes long.
MOST_BYTES = 1024 * 1024
BLOCK_BYTES = 4 * 1024
_WORD_BYTES = 8
# Odd, so that no bit of a word is lost when it is multiplied (2**64 / golden ratio, as a signed number).
_SPREAD = -7046029254386353131
# Fingerprints are added up in float64, which is exact up to here.
_BITS = 52


def fingerprint(tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one whole number for some tensors, float64 on `device`, at least zero: cheap enough for every step.

    It differs, all but surely, where their bytes or the order of these differ. Nothing waits for a GPU.
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors.values():
        if tensor.numel():
            checksum = _checksum(tensor.detach())
            # The host's number is an argument of a kernel, its tensor a copy for which it would wait.
            total = total * _SPREAD + (
                int(checksum) if checksum.device.type == "cpu" else checksum.to(device)
            )
    # The highest bits would be lost with those that float64 has no room for.
    folded = (total ^ (total >> 20)) & ((1 << _BITS) - 1)
    return folded.to(torch.float64)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's words, each times an odd number of its place, modulo 2**64."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    count, left = divmod(len(data), _WORD_BYTES)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    words = data[: count * _WORD_BYTES].view(torch.int64)
    blocks, most = len(data) // BLOCK_BYTES, MOST_BYTES // BLOCK_BYTES
    if blocks > most:
        length = BLOCK_BYTES // _WORD_BYTES
        words = words[: blocks * length].view(blocks, length)[:: -(-blocks // most)].reshape(-1)
    factors = _factors(words.device)[: len(words)]
    total = torch.dot(words, factors) if words.device.type == "cpu" else (words * factors).sum()
    return total + data[len(data) - left :].long().cumsum(0).sum() if left else total


@lru_cache(maxsize=2)
def _factors(device: torch.device) -> torch.Tensor:
    positions = torch.arange(MOST_BYTES // _WORD_BYTES + BLOCK_BYTES // _WORD_BYTES, device=device)
    return (positions * _SPREAD) | 1


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes, by name."""
    return {name: _fingerprint(tensor) for name, tensor in tensors.items()}


def _fingerprint(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)
