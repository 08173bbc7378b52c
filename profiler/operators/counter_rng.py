"""A counter-based RNG: random bits are a function of (seed, step, operator, global position), the same in any split.

A position is (row, column): row numbers the elements of all dims but the last. Of a row there are 64 mixed bits, once
and for all; added to those of seed, step and operator they enter two rounds of a 32-bit integer hash of the column, in
wrapping int32 arithmetic, which vectorizes on every device. Shifts are of two words at once: torch shifts int64 faster
than int32, and what comes from the other word is masked away.
The hash's constants are those of Chris Wellons' "lowbias32"; those of the keys are of splitmix64 (Steele et al. 2014).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from graph.intervals import Region, full_region

_MASK64 = (1 << 64) - 1
# So that a chunk's temporaries stay in the cache of a core; on a GPU, in two tensors of 16 MiB. The GPU's is an
# assumption: no card was at hand to see from which size on kernels take longer than their launch.
_CHUNK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 22}


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_MULTIPLIER_1 = _signed(0x7FEB352D, 32)
_MULTIPLIER_2 = _signed(0x846CA68B, 32)
_COLUMN_MULTIPLIER = _signed(0x9E3779B9, 32)
_ROW_INCREMENT = _signed(0x9E3779B97F4A7C15, 64)
_ROW_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9, 64)
_ROW_MULTIPLIER_2 = _signed(0x94D049BB133111EB, 64)


def _mix_key(*parts: int) -> int:
    """Return 64 bits of a few integers (splitmix64 as a sponge)."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


@lru_cache(maxsize=64)
def _positions(
    region: Region, shape: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixed int64 row numbers and the hashed int32 columns, shifted, of a region of a tensor of `shape`."""

    def indexes(intervals: Sequence[tuple[int, int]]) -> torch.Tensor:
        ranges = [torch.arange(start, stop, device=device) for start, stop in intervals]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)

    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for intervals, size in zip(region[:-1], shape[:-1], strict=True):
        rows = (rows[:, None] * size + indexes(intervals)[None, :]).reshape(-1)
    columns = indexes(region[-1]) if region else torch.zeros(1, dtype=torch.int64, device=device)
    return _mixed(rows), _xor_shift_(columns.to(torch.int32) * _COLUMN_MULTIPLIER, 16)


def _mixed(rows: torch.Tensor) -> torch.Tensor:
    """Return 64 bits of each row number (splitmix64)."""
    mixed = rows.mul_(_ROW_INCREMENT)
    _xor_shift_(mixed, 30).mul_(_ROW_MULTIPLIER_1)
    _xor_shift_(mixed, 27).mul_(_ROW_MULTIPLIER_2)
    return _xor_shift_(mixed, 31)


def forget_positions() -> None:
    """Clear the cache of positions: within torch's fake mode they are tensors without data, outside they are not."""
    _positions.cache_clear()


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a logical shift of signed integers."""
    width = values.element_size() * 8
    return torch.bitwise_right_shift(values, bits).bitwise_and_((1 << (width - bits)) - 1)


def _xor_shift_(values: torch.Tensor, bits: int) -> torch.Tensor:
    return values.bitwise_xor_(_shift_right(values, bits))


def _keys(rows: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two int32 keys a row: the halves of its mixed number and a key of 64 bits, added up."""
    first, second = (rows + _signed(key, 64)).view(torch.int32).view(-1, 2).unbind(1)
    return first, second


def keep_mask(
    region: Region,
    shape: tuple[int, ...],
    probability: float,
    key: tuple[int, int | torch.Tensor, int],
    device: torch.device,
) -> torch.Tensor:
    """Return the bool mask, in the region's shape, of the elements that dropout keeps.

    Args:
        region: index sets of the elements, one a dim.
        shape: shape of the whole tensor.
        probability: of an element to be dropped.
        key: seed, step and operator number. The step is a tensor where torch.compile traces, for which the mask is
            one operator: a compiled function must not depend on the step.
        device: where to make it.
    """
    seed, step, operator = key[:3]
    if isinstance(step, torch.Tensor):
        mask: torch.Tensor = _keep_mask_at(
            step, [*_numbers(region), *shape], probability, seed, operator, device
        )
        return mask
    threshold = round(probability * 2**32) - 2**31
    keep = _empty(region, torch.bool, device)
    if threshold > 2**31 - 1:
        return keep.zero_()
    # The last shift decides only where the upper halves are equal: there it is by the threshold's own upper half.
    last = (threshold >> 16) & 0xFFFF if threshold & 0xFFFF else 0

    def write(words: list[_Words], into: torch.Tensor) -> None:
        bits = words[0].numbers
        if last:
            bits.bitwise_xor_(last)
        if bits.device.type == "cpu":
            into.copy_(bits.ge_(threshold))  # torch's comparison to bool is not vectorized: 3 times as long
        else:
            torch.ge(bits, threshold, out=into)

    _each_chunk(region, shape, ((seed, step, operator, *key[3:]),), keep, write)
    return keep


@torch.library.custom_op("soapstone::keep_mask", mutates_args=())
def _keep_mask_at(
    step: torch.Tensor,
    place: Sequence[int],
    probability: float,
    seed: int,
    operator: int,
    device: torch.device,
) -> torch.Tensor:
    """As `keep_mask`, with the step's number in a tensor, and region and shape as integers (`_numbers`)."""
    region, shape = _region_of(place)
    return keep_mask(region, shape, probability, (seed, int(step), operator), device)


@_keep_mask_at.register_fake
def _(
    _step: torch.Tensor,
    place: Sequence[int],
    _probability: float,
    _seed: int,
    _operator: int,
    device: torch.device,
) -> torch.Tensor:
    return _empty(_region_of(place)[0], torch.bool, device)


def _numbers(region: Region) -> list[int]:
    """Return a region as integers: its dims, and of each how many intervals there are, and these."""
    return [
        len(region),
        *(number for intervals in region for number in (len(intervals), *itertools.chain(*intervals))),
    ]


def _region_of(place: Sequence[int]) -> tuple[Region, tuple[int, ...]]:
    """Return the region that `_numbers` wrote, and the shape that follows it."""
    rest = iter(place)
    region = tuple(tuple((next(rest), next(rest)) for _ in range(next(rest))) for _ in range(next(rest)))
    return region, tuple(rest)


def _empty(region: Region, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    sizes = [sum(stop - start for start, stop in intervals) for intervals in region]
    return torch.empty(sizes, dtype=dtype, device=device)


class _Words:
    """Room for 32 bits an element of a chunk: `pairs` as int64, two elements each; `numbers` as the chunk's matrix."""

    def __init__(self, elements: int, device: torch.device) -> None:
        self._room = torch.empty((elements + 1) // 2, dtype=torch.int64, device=device)
        self.pairs = self._room
        self.numbers = self._room.view(torch.int32)

    def begin(self, rows: int, columns: int) -> None:
        """Let `pairs` and `numbers` be those of a chunk of so many rows and columns."""
        self.pairs = self._room[: (rows * columns + 1) // 2]
        self.numbers = self._room.view(torch.int32)[: rows * columns].view(rows, columns)

    def xor_shift_(self, bits: int, spare: torch.Tensor) -> None:
        """Xor each word with itself shifted to the right; `spare` is int64 memory of the same size."""
        mask = (1 << (32 - bits)) - 1
        shifted = torch.bitwise_right_shift(self.pairs, bits, out=spare[: self.pairs.numel()])
        self.pairs.bitwise_xor_(shifted.bitwise_and_(mask << 32 | mask))


def _each_chunk(
    region: Region,
    shape: tuple[int, ...],
    keys: Sequence[tuple[int, ...]],
    result: torch.Tensor,
    write: Callable[[list[_Words], torch.Tensor], object],
) -> None:
    """Call `write` on the words of each of `keys` for an element, and the rows of `result` they are for.

    The words lack the hash's last shift, which `_finished` does.
    """
    rows, columns = _positions(region, shape, result.device)
    halves = [_keys(rows, _mix_key(*key)) for key in keys]
    matrix = result.view(rows.numel(), columns.numel())
    step = max(1, _CHUNK_ELEMENTS.get(result.device.type, 1 << 22) // max(columns.numel(), 1))
    elements = min(step, rows.numel()) * columns.numel()
    words = [_Words(elements, result.device) for _ in keys]
    spare = torch.empty((elements + 1) // 2, dtype=torch.int64, device=result.device)
    # Tensors without data (torch's fake ones) are for tracing memory: all chunks take the same.
    chunks = range(0, rows.numel(), step) if type(rows) is torch.Tensor else (0,)
    for start in chunks:
        into = matrix[start : start + step]
        for word, (first, second) in zip(words, halves, strict=True):
            word.begin(*into.shape)
            chosen = slice(start, start + step)
            _hash(word, first[chosen], second[chosen], columns, spare)
        write(words, into)


def _hash(
    word: _Words, first: torch.Tensor, second: torch.Tensor, columns: torch.Tensor, spare: torch.Tensor
) -> None:
    """Write the hash of a chunk's positions but for its last shift; its first one is that of the columns."""
    bits = torch.bitwise_xor(first[:, None], columns[None, :], out=word.numbers)
    torch.add(second[:, None], bits, alpha=_MULTIPLIER_1, out=bits)
    word.xor_shift_(15, spare)
    bits.mul_(_MULTIPLIER_2)


def random_numbers(
    distribution: str,
    region: Region,
    shape: tuple[int, ...],
    key: tuple[int, int, int],
    result: tuple[torch.dtype, torch.device],
) -> torch.Tensor:
    """Return the numbers of a region of a tensor of `shape` whose elements are drawn independently.

    A number in a format of fewer bits is that of float64, rounded; a uniform one is cut off, so that it stays below 1.

    Args:
        distribution: "uniform" (in [0, 1)), "normal" (standard), "exponential" (rate 1, never 0), or "integers"
            (all of 62 bits alike; of int64).
        region: index sets of the elements, one a dim.
        shape: shape of the whole tensor.
        key: seed, step and operator number.
        result: dtype and device of the numbers.
    """
    dtype, device = result
    convert, words = _DISTRIBUTIONS[distribution]
    numbers = _empty(region, dtype, device)
    keys = [(*key, word) for word in range(words)]
    _each_chunk(
        region, shape, keys, numbers, lambda words, into: into.copy_(convert(_finished(words), dtype))
    )
    return numbers


def _finished(words: list[_Words]) -> list[torch.Tensor]:
    return [_xor_shift_(word.numbers, 16) for word in words]


def _fractions(bits: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers of (0, 1), the middles of 2**32 intervals."""
    return bits.double().add_(2**31 + 0.5).mul_(2.0**-32)


def _uniform(words: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    steps = 2.0 ** min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return _fractions(words[0]).mul_(steps).floor_().div_(steps)


def _normal(words: list[torch.Tensor], _dtype: torch.dtype) -> torch.Tensor:
    """Return normal numbers (Box and Muller 1958)."""
    radius = _fractions(words[0]).log_().mul_(-2.0).sqrt_()
    return _fractions(words[1]).mul_(2 * math.pi).cos_().mul_(radius)


def _exponential(words: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return _fractions(words[0]).log_().neg_().clamp_(min=torch.finfo(dtype).tiny)


def _integers(words: list[torch.Tensor], _dtype: torch.dtype) -> torch.Tensor:
    high, low = (_shift_right(word, 1).long() for word in words)
    return high.bitwise_left_shift_(31).bitwise_or_(low)


# By name: from words of 32 bits to numbers, and of how many words.
_DISTRIBUTIONS: dict[str, tuple[Callable[[list[torch.Tensor], torch.dtype], torch.Tensor], int]] = {
    "uniform": (_uniform, 1),
    "normal": (_normal, 2),
    "exponential": (_exponential, 1),
    "integers": (_integers, 2),
}


class _Dropout(torch.autograd.Function):
    """Masked and scaled values; saves the mask alone."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        if values.device.type == "cuda":
            # The same in one kernel; on a CPU that one makes the mask of the values' dtype first.
            scaled: torch.Tensor = torch.ops.aten.native_dropout_backward.default(values, mask, scale)
            return scaled
        return (values * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward.default(gradients[0], mask, ctx.scale), None, None


def whole_region(shape: Sequence[int]) -> tuple[Region, tuple[int, ...]]:
    """Return the region and shape of a whole tensor, for a call without bindings."""
    return full_region(shape), tuple(shape)


def dropout(values: torch.Tensor, mask: torch.Tensor, probability: float) -> torch.Tensor:
    """Return the values that `mask` keeps, divided by the probability of being kept, and zeros."""
    scale = 1.0 / (1.0 - probability) if probability < 1 else 0.0
    result: torch.Tensor = _Dropout.apply(values, mask, scale)  # type: ignore[no-untyped-call]
    return result
