"""Rows of an answer as CSV, JSON and Parquet.

CSV: a header, NULL as nothing, lists and structures as JSON. JSON: a list of objects, one a line; what JSON has no
word for is null (NaN, infinity) or text (moments as ISO 8601, binary as hexadecimal).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from app.analytics.answer import Answer
from graph.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["table", "csv", "json", "parquet"]
FORMATS: tuple[Format, ...] = ("table", "csv", "json", "parquet")


def rows(answer: Answer) -> Iterator[tuple[Any, ...]]:
    """Yield the rows as plain values: None, bool, int, float, str, or lists and mappings of them."""
    for batch in answer.batches:
        columns = [[plain(value) for value in _values(column)] for column in batch.columns]
        yield from zip(*columns, strict=True)


def plain(value: Any) -> Any:
    """Return a value as JSON would have it, save for numbers that are not finite."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Decimal):
        # What DuckDB makes of a sum of integers is an integer here too.
        return (
            int(value)
            if value == value.to_integral_value() and value.as_tuple().exponent == 0
            else float(value)
        )
    if isinstance(value, datetime | date | time):
        return value.isoformat(sep=" ") if isinstance(value, datetime) else value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [plain(item) for item in value]
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def write_csv(answer: Answer, file: TextIO) -> int:
    """Write all rows; return their number."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(answer.schema.names)
    count = 0
    for row in rows(answer):
        writer.writerow(
            [json.dumps(_finite(cell)) if isinstance(cell, dict | list) else _csv_cell(cell) for cell in row]
        )
        count += 1
    return count


def write_json(answer: Answer, file: TextIO) -> int:
    """Write all rows; return their number."""
    names = answer.schema.names
    count = 0
    file.write("[")
    for row in rows(answer):
        file.write("\n " if count == 0 else ",\n ")
        file.write(json.dumps(dict(zip(names, (_finite(cell) for cell in row), strict=True))))
        count += 1
    file.write("\n]\n" if count else "]\n")
    return count


def write_parquet(answer: Answer, path: Path) -> int:
    """Write all rows; return their number.

    Raises:
        UsageError: Parquet has no such type.
    """
    import pyarrow as pa
    from pyarrow import parquet

    count = 0
    try:
        with parquet.ParquetWriter(path, answer.schema, compression="zstd") as writer:
            for batch in answer.batches:
                writer.write_batch(batch)
                count += batch.num_rows
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise UsageError(
            f"--format parquet: {' '.join(str(error).split())}; cast the column in the query"
        ) from None
    return count


def _values(column: pa.Array[Any]) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    elif pa.types.is_time(kind) and kind.bit_width == 64 and kind.unit == "ns":
        column = column.cast(pa.time64("us"), safe=False)
    values: list[Any] = column.to_pylist()
    return values


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
