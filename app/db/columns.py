"""Arrow columns made of numpy's, by their buffers.

`pyarrow.array` imports pandas whatever it is given, which takes as long as writing a hundred chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

Mask = npt.NDArray[np.bool_]


def numbers(values: npt.NDArray[Any], kind: pa.DataType, valid: Mask | None = None) -> pa.Array[Any]:
    """Return numbers as an Arrow column, NULL where they are not valid."""
    import pyarrow as pa

    data = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(data), [_bits(valid), pa.py_buffer(data.data)])


def booleans(values: Mask) -> pa.Array[Any]:
    """Return truth values as an Arrow column."""
    import pyarrow as pa

    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _packed(values)])


def texts(values: Sequence[str]) -> pa.Array[Any]:
    """Return texts as an Arrow column; best if few differ."""
    import pyarrow as pa

    encoded = {value: value.encode() for value in set(values)}
    items = [encoded[value] for value in values]
    buffers = [
        None,
        _offsets(np.fromiter(map(len, items), np.int32, len(items))),
        pa.py_buffer(b"".join(items)),
    ]
    return pa.Array.from_buffers(pa.string(), len(items), buffers)


def lists(rows: Sequence[Sequence[int] | None], valid: Mask | None = None) -> pa.Array[Any]:
    """Return lists of 32-bit numbers as an Arrow column; `valid` says which of them are not None."""
    import pyarrow as pa

    valid_rows = [row for row in rows if row is not None]
    lengths = np.zeros(len(rows), np.int32)
    lengths[slice(None) if valid is None else valid] = np.fromiter(
        map(len, valid_rows), np.int32, len(valid_rows)
    )
    items = np.fromiter(chain.from_iterable(valid_rows), np.int32, int(lengths.sum()))
    return pa.Array.from_buffers(
        pa.list_(pa.int32()),
        len(rows),
        [_bits(valid), _offsets(lengths)],
        children=[numbers(items, pa.int32())],
    )


def sparse_lists(
    lengths: npt.NDArray[np.int64], items: npt.NDArray[np.int64], kind: pa.DataType
) -> pa.Array[Any]:
    """Return lists of numbers, one after the other in `items`, as an Arrow column, NULL where a list is empty."""
    import pyarrow as pa

    return pa.Array.from_buffers(
        pa.list_(kind), len(lengths), [_bits(lengths > 0), _offsets(lengths)], children=[numbers(items, kind)]
    )


def view(column: pa.ChunkedArray[Any]) -> npt.NDArray[Any]:
    """Return a column of numbers, none of them NULL, as numpy's."""
    kind = column.type.to_pandas_dtype()
    parts = [np.empty(0, kind)]
    for part in column.chunks:
        _, data = part.buffers()
        if len(part) and data is not None:
            parts.append(np.frombuffer(memoryview(data), kind)[part.offset : part.offset + len(part)])
    return np.concatenate(parts)


def _offsets(lengths: npt.NDArray[np.integer[Any]]) -> pa.Buffer:
    import pyarrow as pa

    ends = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    return pa.py_buffer(ends.data)


def _bits(valid: Mask | None) -> pa.Buffer | None:
    return None if valid is None or valid.all() else _packed(valid)


def _packed(values: Mask) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(values, bitorder="little").data)
