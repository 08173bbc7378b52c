"""One Parquet file of a trace: written whole or not at all, and checked whenever it is read.

A chunk carries a checksum for each page, and its columns are looked at before its rows: a flipped bit, a file of
another program or one that is gone is `DamagedDataError`, whoever reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.db.failures import MALFORMED, damaged_chunk, unwritable
from app.db.records import TraceKind
from app.db.rows import ADDED_COLUMNS, schema_of

if TYPE_CHECKING:
    import pyarrow as pa

CHECKPOINT = b"soapstone.checkpoint"
"""Of a chunk of proposals: the chains after its last proposals (or soon before), to go on from."""
GROUPS = b"soapstone.groups"
"""Of a chunk of starts: which operators follow which head, since proposals name heads alone."""


def write_file(path: Path, kind: TraceKind, table: pa.Table, *, compressed: bool = True) -> None:
    """Write a chunk that others see whole or not at all.

    `compressed`: not worth its time, two thirds of that of writing, where a small chunk soon becomes part of another.

    Raises:
        DatabaseFailure: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    # Numbers in ascending order take almost nothing as differences; times have too many values for a dictionary.
    encoding, dictionary = _ENCODINGS[kind]
    texts = table.schema.metadata or {}
    plain = table.replace_schema_metadata()
    # In memory first: a file of Python's would take the interpreter from the search for every page.
    content = pa.BufferOutputStream()
    with parquet.ParquetWriter(
        content,
        plain.schema,
        compression="zstd" if compressed else "none",
        compression_level=6 if compressed else None,
        column_encoding=encoding,
        use_dictionary=dictionary,  # type: ignore[arg-type]  # names are allowed
        store_schema=False,
        write_page_checksum=True,
    ) as writer:
        writer.write_table(plain)
        writer.add_key_value_metadata(texts)  # type: ignore[arg-type]  # bytes are allowed
    write_whole(path, content)


def write_whole(path: Path, content: pa.BufferOutputStream) -> None:
    """Write a file that others see whole or not at all.

    Raises:
        DatabaseFailure: it cannot be written.
    """
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.getvalue())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path.parent, error) from None
    finally:
        temporary.unlink(missing_ok=True)  # a signal may come at any moment


_ENCODINGS: dict[TraceKind, tuple[dict[str, str] | None, list[str]]] = {
    "starts": (
        {"configuration": "DELTA_BINARY_PACKED", "operator": "DELTA_BINARY_PACKED"},
        ["search", "chain", "start"],
    ),
    "configurations": (
        {"configuration": "DELTA_BINARY_PACKED"},
        ["search", "family", "device_count", "degrees.list.element", "axes.list.element"],
    ),
    "proposals": (
        {
            "step": "DELTA_BINARY_PACKED",
            "configuration": "DELTA_BINARY_PACKED",
            "simulated_ns": "DELTA_BINARY_PACKED",
            "bound_ns": "DELTA_BINARY_PACKED",
            # In the order of the operators, as they are, whole runs of them repeat.
            "other_operators.list.element": "PLAIN",
            "other_configurations.list.element": "PLAIN",
        },
        ["search", "chain", "operator"],
    ),
}


def with_text(table: pa.Table, key: bytes, text: str | None) -> pa.Table:
    """Return the table with a text that its chunk carries beside its rows."""
    return table if text is None else table.replace_schema_metadata({key: text.encode()})


def read_text(path: Path, key: bytes) -> str | None:
    """Return the text of `with_text` from a chunk, or None.

    Raises:
        DamagedDataError: the file is not there, or is no whole chunk.
    """
    from pyarrow import parquet

    with readable(path):
        text = (parquet.read_metadata(path).metadata or {}).get(key)
        return None if text is None else text.decode()


def read_table(
    path: Path, kind: TraceKind, columns: Sequence[str] | None = None, filters: Any = None
) -> pa.Table:
    """Return a chunk's table without the texts beside it: all columns or some, all rows or some.

    Raises:
        DamagedDataError: the file is not there, is no whole chunk, or was changed.
    """
    from pyarrow import parquet

    with readable(path):
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            if reason := _other_columns(schema, kind):
                raise damaged_chunk(path, reason)
            names = [name for name in columns or schema.names if name in schema.names]
            if filters is None:
                return file.read(names).replace_schema_metadata()
        # Imports pandas, which takes as long as writing a hundred chunks.
        table = parquet.read_table(path, columns=names, filters=filters, page_checksum_verification=True)
        return table.replace_schema_metadata()


def row_count(path: Path, kind: TraceKind) -> int | None:
    """Return the number of rows of a whole chunk of a kind; None for a file that is not one."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if _other_columns(parquet.read_schema(path), kind):
            return None
        return int(parquet.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError, ValueError):
        return None


def _other_columns(there: pa.Schema, kind: TraceKind) -> str | None:
    """Return the first difference of a file's columns from the columns of a kind, or None."""
    for field in schema_of(kind):
        if field.name not in there.names:
            if field.name in ADDED_COLUMNS.get(kind, ()):
                continue
            return f"has no column {field.name}"
        column = there.field(field.name)
        if not column.type.equals(field.type) or column.nullable != field.nullable:
            return f"column {field.name} is {column.type}"
    return None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise `DamagedDataError` with the file's name for any error of reading it."""
    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise damaged_chunk(path, "is missing") from None
    except OSError as error:
        raise damaged_chunk(path, f"cannot be read ({error.strerror or _first_line(error)})") from None
    # Names of columns and texts may be no UTF-8, and lengths no memory's.
    except (pa.ArrowException, *MALFORMED, MemoryError) as error:
        raise damaged_chunk(path, f"is no whole Parquet file ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
