"""Check that the migrations and the models agree: `python -m app.db.check` prints what differs and exits with 1."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from app.db.engine import migration_engine, resolve_url
from app.db.models import metadata
from app.db.schema import HEAD, alembic_config, upgrade


def differences(url: sa.URL) -> list[Any]:
    """Return the changes by which Alembic would turn the database's schema into the models'."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = migration_engine(url)
    try:
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection, opts={"compare_type": True, "compare_server_default": True}
            )
            return list(compare_metadata(context, metadata))
    finally:
        engine.dispose()


def check() -> list[str]:
    """Return one line for each disagreement between migrations, models and `schema.HEAD`."""
    from alembic.script import ScriptDirectory

    heads = ScriptDirectory.from_config(alembic_config()).get_heads()
    problems = (
        [] if heads == [HEAD] else [f"migrations: newest is {heads}, app.db.schema.HEAD is {HEAD!r}; set it"]
    )
    with tempfile.TemporaryDirectory() as folder:
        url = resolve_url(Path(folder) / "check.sqlite")
        upgrade(url)
        problems += [f"models: differ from the migrations: {difference}" for difference in differences(url)]
    return problems


def main() -> int:
    """Print the disagreements; return the exit code."""
    problems = check()
    for line in problems:
        sys.stdout.write(f"{line}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
