"""The schema's version: where the migrations are, how a database gets to the newest, and the check at every open.

An empty or missing database gets its tables at its first open, so that a new user needs no command. An older
schema is never changed silently: a running process of an older Soapstone may still use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy import exc

from app.db.engine import Database, connect_engines, display_name, migration_engine, not_sqlite, resolve_url
from app.db.failures import database_failure, is_damage, is_full, is_locked, one_line
from app.db.models import metadata
from graph.errors import DamagedDataError, DatabaseError
from graph.texts import shown

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0009"
"""The newest revision, so that an open needs no Alembic; a test holds it equal to the migrations'."""

# Any number that nobody else is likely to lock in the same PostgreSQL database.
_ADVISORY_LOCK = 0x50415053

# Alembic's own table, as it makes it.
_version = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def locate_migrations() -> Path:
    """Return the folder of the Alembic environment: `app/_migrations` of a wheel, else the repository's.

    Raises:
        DatabaseError: there is neither.
    """
    packaged = Path(__file__).resolve().parent.parent / "_migrations"
    repository = packaged.parent.parent / "migrations"
    for folder in (packaged, repository):
        if (folder / "env.py").is_file():
            return folder
    raise DatabaseError(
        f"migrations: not found at {packaged} or {repository}, must be there; install Soapstone again"
    )


def open_database(
    database: str | os.PathLike[str] | None = None, *, create: bool = True, to_read: bool = False
) -> Database:
    """Open a database, by URL or path (see `resolve_url`), and check its schema; an empty one gets the schema.

    create: whether to make a database that is not there; else it is refused, as an empty one is.
    to_read: nothing will be written: none is made, and a file will do that cannot be written to.

    Raises:
        DatabaseError: it cannot be opened, is not one of Soapstone's, or its schema is older or newer than
        this code.
    """
    url = resolve_url(database)
    create = create and not to_read
    if not create and _is_unmade_file(url):
        raise _unmade(url)
    opened = connect_engines(url, to_read=to_read)
    try:
        current = _current(opened.read_engine)
        if current is not None:
            check_current(url, current, database)
        elif create:
            create_tables(url)
        else:
            raise _unmade(url)
    except exc.DBAPIError as error:
        opened.dispose()
        raise unusable(url, error) from None
    except DatabaseError:
        opened.dispose()
        raise
    return opened


def upgrade(database: str | os.PathLike[str] | sa.URL | None = None, *, revision: str = "head") -> str:
    """Bring a database to a revision, in one transaction; return its revision before, or "" for none.

    Processes that do so at once wait for each other.

    Raises:
        DatabaseError: it cannot be opened, belongs to another program, or is newer than this code.
    """
    return _migrate(database, "upgrade", revision)


def downgrade(database: str | os.PathLike[str] | sa.URL | None = None, *, revision: str) -> str:
    """Take a database back to an older revision ("base" drops every table); return its revision before."""
    return _migrate(database, "downgrade", revision)


def status(database: str | os.PathLike[str] | sa.URL | None = None) -> tuple[str | None, str]:
    """Return the database's revision, None where it has no tables yet, and the newest that this code knows.

    A SQLite file that does not exist is not created, and an empty one stays empty.

    Raises:
        DatabaseError: it cannot be opened, or belongs to another program.
    """
    url = database if isinstance(database, sa.URL) else resolve_url(database)
    if _is_unmade_file(url):
        return None, HEAD
    opened = connect_engines(url, to_read=True)
    try:
        return _current(opened.read_engine), HEAD
    except exc.DBAPIError as error:
        raise unusable(url, error) from None
    finally:
        opened.dispose()


def alembic_config() -> Config:
    """Return Alembic's configuration, without a file and without output."""
    from alembic.config import Config

    with closing(open(os.devnull, "w", encoding="utf-8")) as silent:
        config = Config(stdout=silent)
    config.set_main_option("script_location", str(locate_migrations()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _migrate(database: str | os.PathLike[str] | sa.URL | None, direction: str, revision: str) -> str:
    from alembic import command

    url = database if isinstance(database, sa.URL) else resolve_url(database)
    with _changing(url) as (connection, current):
        if current is not None:
            _check_known(url, current)
        config = alembic_config()
        config.attributes["connection"] = connection
        getattr(command, direction)(config, revision)
        _check_foreign_keys(connection)
    return current or ""


def create_tables(url: sa.URL) -> None:
    """Make the tables of an empty database, unless another process has made them meanwhile.

    From the models, as Alembic's cookbook has it ("Building an Up to Date Database from Scratch"): the migrations end
    in the same tables, and take several times as long.

    Raises:
        DatabaseError: it cannot be opened, or another process has made it what this code does not know.
    """
    with _changing(url) as (connection, current):
        if current is not None:
            check_current(url, current)
            return
        metadata.create_all(connection)
        _version.create(connection, checkfirst=True)
        connection.execute(_version.insert().values(version_num=HEAD))


@contextmanager
def _changing(url: sa.URL) -> Iterator[tuple[sa.Connection, str | None]]:
    """Yield a connection in a transaction that changes the schema, and the schema's revision.

    Processes that change it at once wait for each other.
    """
    connect_engines(url).dispose()  # checks the path
    engine = migration_engine(url)
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            yield connection, _current_on(connection, display_name(url))
    except exc.DBAPIError as error:
        raise unusable(url, error) from None
    finally:
        engine.dispose()


def _is_unmade_file(url: sa.URL) -> bool:
    """Return whether a SQLite file is missing or empty: a connection to it would already write."""
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database))
        with suppress(OSError):  # `connect_engines` says what is wrong with such a name
            return not path.exists() or (path.is_file() and path.stat().st_size == 0)
    return False


def _unmade(url: sa.URL) -> DatabaseError:
    return DatabaseError(
        f"database {display_name(url)}: is not made yet, must be to be read; run app search first, or name another "
        "by --database"
    )


def _current(engine: sa.Engine) -> str | None:
    with engine.connect() as connection:
        return _current_on(connection, display_name(engine.url))


def foreign_objects(connection: sa.Connection) -> dict[str, str]:
    """Return the triggers of a SQLite file, and its views that are called as tables of ours, each with its kind.

    SQLite runs them itself: a trigger changes rows whatever is written, and a view need not end.
    """
    if connection.dialect.name != "sqlite":
        return {}
    names = {*metadata.tables, "alembic_version"}
    rows = connection.exec_driver_sql(
        "SELECT name, type FROM sqlite_master WHERE type IN ('trigger', 'view')"
    )
    return {str(name): kind for name, kind in rows if kind == "trigger" or str(name).casefold() in names}


def foreign_object_error(name: str, foreign: str, kind: str) -> DamagedDataError:
    """Return the error for a database with one of `foreign_objects`."""
    remedy = "restore the database from a copy" if kind == "view" else "run: app db check --repair NEW"
    return DamagedDataError(
        f"database {name}: has a {kind} {shown(foreign)}, which is none of Soapstone's, must have none; {remedy}"
    )


def _current_on(connection: sa.Connection, name: str) -> str | None:
    for foreign, kind in foreign_objects(connection).items():
        raise foreign_object_error(name, foreign, kind)
    tables = set(sa.inspect(connection).get_table_names())
    if "alembic_version" in tables:
        revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        if revision is not None:
            return str(revision)
    if others := sorted(tables - {"alembic_version"}):
        raise DatabaseError(
            f"database {name}: has tables of another program ({', '.join(others[:3])}), must be empty or Soapstone's; "
            "name another by --database"
        )
    return None


def check_current(url: sa.URL, revision: str, database: str | os.PathLike[str] | None = None) -> None:
    """Check that a revision is this code's; `database` is how the user named it.

    Raises:
        DatabaseError: it is older or newer; the message says what to do.
    """
    if revision == HEAD:
        return
    _check_known(url, revision)
    raise DatabaseError(
        f"database {display_name(url)}: schema is {revision}, must be {HEAD}; run: "
        f"app db upgrade{_database_option(database)}"
    )


def _check_known(url: sa.URL, revision: str) -> None:
    if revision == HEAD:
        return
    from alembic.script import ScriptDirectory

    revisions = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if revision not in revisions:
        raise DatabaseError(
            f"database {display_name(url)}: schema is {revision}, this Soapstone knows up to {HEAD} and is older than "
            "the database; install a newer Soapstone"
        )


def _check_foreign_keys(connection: sa.Connection) -> None:
    """Foreign keys were off during a SQLite migration: make sure that it left no dangling reference."""
    if connection.dialect.name != "sqlite":
        return
    if dangling := connection.exec_driver_sql("PRAGMA foreign_key_check").first():
        raise DatabaseError(
            f"database: migration would leave row {dangling[1]} of {dangling[0]} without its {dangling[2]} row; "
            "nothing was changed, report this"
        )


def _database_option(database: str | os.PathLike[str] | None) -> str:
    if database is None:
        return ""
    import shlex

    text = os.fspath(database)
    if "://" in text and "@" in text:
        text = sa.make_url(text).render_as_string(hide_password=True)
    return f" --database {shlex.quote(text)}"


def unusable(url: sa.URL, error: exc.DBAPIError) -> DatabaseError:
    """Return the error for a database that cannot be opened."""
    if is_damage(error) or is_full(error) or is_locked(error):
        return database_failure(display_name(url), error)
    reason = one_line(error)
    if "file is not a database" in reason:
        return not_sqlite(display_name(url))
    return DatabaseError(
        f"database {display_name(url)}: cannot be used ({reason}); check the file or the URL"
    )
