"""Columns made by their buffers are those that pyarrow makes of the same values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from app.db.columns import booleans, lists, numbers, texts, view

COUNTS = [0, 1, 7, 8, 9, 1000]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", [pa.int16(), pa.int32(), pa.int64(), pa.uint32()])
def test_numbers(count: int, kind: pa.DataType) -> None:
    rng = np.random.default_rng(count)
    # Of another type, and not side by side.
    values = rng.integers(0, 2**15, 2 * count)[::2]
    valid = rng.random(count) < 0.5
    assert numbers(values, kind).equals(pa.array(values, kind))
    found = numbers(values, kind, valid)
    found.validate(full=True)
    assert found.equals(pa.array(values, kind, mask=~valid))
    assert found.null_count == count - valid.sum()
    nothing = numbers(values, kind, np.zeros(count, np.bool_))
    assert nothing.to_pylist() == [None] * count


@pytest.mark.parametrize("count", COUNTS)
def test_truth_values_and_texts(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.random(count) < 0.5
    assert booleans(values).equals(pa.array(values))
    words = [("", "copied", "größer", "x" * 300)[place] for place in rng.integers(4, size=count)]
    found = texts(words)
    found.validate(full=True)
    assert found.equals(pa.array(words, pa.string()))


@pytest.mark.parametrize("count", COUNTS)
def test_lists(count: int) -> None:
    rng = np.random.default_rng(count)
    rows = [tuple(rng.integers(-(2**31), 2**31, size).tolist()) for size in rng.integers(4, size=count)]
    kind = pa.list_(pa.int32())
    assert lists(rows).equals(pa.array(rows, kind))
    valid = rng.random(count) < 0.5
    some = [row if there else None for row, there in zip(rows, valid, strict=True)]
    found = lists(some, valid)
    found.validate(full=True)
    assert found.equals(pa.array(some, kind))


def test_a_view_of_pieces_is_their_numbers() -> None:
    whole = pa.array(range(10), pa.int16())
    column = pa.chunked_array([whole.slice(3, 4), whole.slice(0, 0), whole.slice(9)])
    assert view(column).tolist() == [3, 4, 5, 6, 9]
    assert view(pa.chunked_array([], pa.int64())).tolist() == []
