"""Alembic's environment: Soapstone hands in a connection; the `alembic` command connects by itself.

The `alembic` command takes the database from SOAPSTONE_DATABASE_URL, or from `-x database=URL`.
"""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa
from alembic import context
from alembic.autogenerate.api import AutogenContext

from app.db.engine import migration_engine, resolve_url
from app.db.models import UtcDateTime, metadata


def render_item(kind: str, item: Any, _autogen: AutogenContext) -> str | Literal[False]:
    """Write our own column types as what they are in the database: a migration must not depend on the models."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime()"
    return False


def migrate(connection: sa.Connection) -> None:
    """Run the migrations that the caller asked for, in the caller's transaction if there is one."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_item=render_item,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    context.configure(
        url=resolve_url(context.get_x_argument(as_dictionary=True).get("database")),
        target_metadata=metadata,
        literal_binds=True,
    )
    with context.begin_transaction():
        context.run_migrations()
elif (given := context.config.attributes.get("connection")) is not None:
    migrate(given)
else:
    engine = migration_engine(resolve_url(context.get_x_argument(as_dictionary=True).get("database")))
    with engine.begin() as own:
        migrate(own)
    engine.dispose()
