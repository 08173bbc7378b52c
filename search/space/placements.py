"""Device lists by what they were drawn from, so that a list of a thousand devices is written as two numbers.

A list is strided (every `stride`-th device from `start` on, then those beside; stride 1: contiguous), a prefix of
a permutation that a seed gives, or what part of another configuration's list remains when that is copied along
shared axes. What a seed gives is fixed here, and not by a library that may change it: a list that was written
stays readable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from graph.axes import Degrees

SEEDS = 1 << 32


@dataclass(frozen=True, slots=True)
class Strided:
    """Devices start, start + stride, ... as `strided_devices` lists them."""

    start: int
    stride: int


@dataclass(frozen=True, slots=True)
class Permuted:
    """The first devices of the permutation that `seed` gives."""

    seed: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """A configuration by its degrees and the family of its device list."""

    degrees: Degrees
    placement: Strided | Permuted


@dataclass(frozen=True, slots=True)
class Copied:
    """What a head's configuration was when it was copied; `axes` as in `moves.copied`, None for all of it."""

    head: int
    axes: tuple[int, ...] | None


ProposalOrigin = Drawn | Copied
"""Where a proposed configuration comes from."""


def random_placement(device_count: int, rng: np.random.Generator) -> Strided | Permuted:
    """Return a family's member: contiguous, strided, or permuted, each for a third of the draws."""
    family = int(rng.integers(3))
    if family == 2:
        return Permuted(int(rng.integers(SEEDS)))
    stride = 1 if family == 0 else int(rng.integers(1, device_count + 1))
    return Strided(int(rng.integers(device_count)), stride)


def place(placement: Strided | Permuted, count: int, device_count: int) -> tuple[int, ...]:
    """Return `count` distinct devices of `device_count`."""
    if isinstance(placement, Permuted):
        return tuple(permutation_of(placement.seed, device_count)[:count].tolist())
    return strided_devices(placement.start, placement.stride, count, device_count)


def strided_devices(start: int, stride: int, count: int, device_count: int) -> tuple[int, ...]:
    """Return `count` entries from place `start` on, round and round, of 0, stride, 2 stride, ..., 1, stride + 1, ..."""
    ordered, start = _ordered(stride, device_count), start % device_count
    return (ordered[start:] + ordered * (count // device_count + 1))[:count]


@lru_cache(maxsize=1 << 11)
def _ordered(stride: int, device_count: int) -> tuple[int, ...]:
    return tuple(device for first in range(stride) for device in range(first, device_count, stride))


def permutation_of(seed: int, device_count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the permutation of all devices that `seed` gives: the order of their SplitMix64 numbers.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    mixed = np.arange(1, device_count + 1, dtype=np.uint64) + np.uint64(seed << 32)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def recognized(devices: tuple[int, ...], device_count: int) -> Strided | None:
    """Return the strided placement that gives a list, or None where none does."""
    start, count = devices[0], len(devices)
    if count == 1:
        return Strided(start, 1)
    # A list whose second entry begins a new round is found only if it is contiguous.
    stride = max(1, devices[1] - start)
    if len(set(devices)) != count or max(devices) >= device_count:
        return None
    strided = Strided(_ordered(stride, device_count).index(start), stride)
    return strided if place(strided, count, device_count) == devices else None
