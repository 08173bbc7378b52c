"""Soapstone's application: command line, database, use cases and analysis on top of the library packages.

For a notebook: `from app import open_database` gives what is stored, as DuckDB's SQL and pandas frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.analytics.notebook import open_database

__all__ = ["open_database"]


def __getattr__(name: str) -> Any:
    # When it is asked for: the command line imports this package, and must answer at once.
    if name == "open_database":
        from app.analytics.notebook import open_database

        return open_database
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
