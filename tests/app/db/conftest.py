"""The tests of the database run over every backend."""

from tests.app.db.backends import database_url, migrated_postgres, migrated_sqlite, postgres_host, store

__all__ = ["database_url", "migrated_postgres", "migrated_sqlite", "postgres_host", "store"]
