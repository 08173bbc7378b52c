"""Rows that others refer to: a foreign key promises them, and a damaged database does not keep the promise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from app.db.failures import damaged_row

Value = TypeVar("Value")


class Referred(dict[int, Value]):
    """Something of each row of a table, by id; an id that is not there is `DamagedDataError`."""

    def __init__(self, table: str, items: Iterable[tuple[int, Value]]) -> None:
        super().__init__(items)
        self._table = table

    def __missing__(self, number: int) -> Value:
        return required(None, self._table, number)


def required(record: Value | None, table: str, number: int) -> Value:
    """Return the record that another row refers to.

    Raises:
        DamagedDataError: there is none.
    """
    if record is None:
        raise damaged_row(f"table {table}, row {number}", "is not there, while another row refers to it")
    return record
