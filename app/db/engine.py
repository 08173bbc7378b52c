"""Where the database is, and how connections to it behave.

SQLite: write-ahead log, so that readers never wait; every writing transaction begins with BEGIN IMMEDIATE,
because a deferred one that reads before it writes fails as soon as another process writes in between; 60 s of
patience for the lock. Reads go through a second engine, whose connections refuse to write. A SQLite file that
cannot be written to is read without a log and without locks. PostgreSQL: psycopg.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import exc

from app.db.failures import Connection, is_locked
from app.db.owners import writer_of
from app.folders import user_folder
from graph.errors import DatabaseError

ENVIRONMENT_VARIABLE = "SOAPSTONE_DATABASE_URL"
FILE_NAME = "soapstone.sqlite"
LOCK_TIMEOUT_S = 60.0
NOTICE_S = 3.0
"""Whoever waits for a lock for so long says for whom, and is not deaf to signals for longer."""
LOG_SUFFIXES = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database, after the database's name."""
# How files of SQLite begin: a database; a write-ahead log in either byte order; a rollback journal.
_BEGINNINGS = (
    b"SQLite format 3\0",
    b"\x37\x7f\x06\x82",
    b"\x37\x7f\x06\x83",
    b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7",
)

_logger = logging.getLogger(__name__)

# Whatever it logs it raises as well; where nobody has set up logging, Python would print the traceback.
logging.getLogger("sqlalchemy").addHandler(logging.NullHandler())


@dataclass(frozen=True, slots=True)
class Database:
    """An opened database: one engine that writes, one that only reads, and the folder that traces are relative to.

    is_read_only: whether it is a SQLite file that cannot be written to, which was opened to be read.
    """

    url: sa.URL
    write_engine: sa.Engine
    read_engine: sa.Engine
    trace_root: Path
    trace_folder: Path
    is_read_only: bool = False

    @property
    def name(self) -> str:
        """The name of this database in messages: a file's path, or a URL without its password."""
        return display_name(self.url)

    def dispose(self) -> None:
        """Close all idle connections."""
        self.write_engine.dispose()
        self.read_engine.dispose()


def default_folder() -> Path:
    """Return the user's data folder for Soapstone, which need not exist.

    Raises:
        DatabaseError: the user has none.
    """
    folder = user_folder("data")
    if folder is None:
        raise DatabaseError(
            "database: you have no home folder, must have one for the default; set HOME, or name a file by --database "
            f"or {ENVIRONMENT_VARIABLE}"
        )
    return folder


def default_path() -> Path:
    """Return the SQLite file that is used where nobody names another."""
    return default_folder() / FILE_NAME


def display_name(url: sa.URL) -> str:
    """Return a file's path for SQLite, else the URL with its password hidden."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)


def resolve_url(database: str | os.PathLike[str] | None = None) -> sa.URL:
    """Return the URL of the database that is meant.

    `database` is a URL or the path of a SQLite file; None means the environment variable
    SOAPSTONE_DATABASE_URL, else the file in the user's data folder. Plain `postgresql://` and `postgres://`
    are taken to mean psycopg.

    Raises:
        DatabaseError: the URL cannot be read, or names neither SQLite nor PostgreSQL.
    """
    text = os.fspath(database) if database is not None else os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not text:
        if database is not None:
            raise DatabaseError(
                "database: name is empty, must be a path or a URL; leave it out for the default"
            )
        return _sqlite_url(default_path())
    if "://" not in text:
        try:
            return _sqlite_url(Path(text).expanduser())
        except RuntimeError:
            raise DatabaseError(
                f"database {text}: {text.partition('/')[0]} is nobody's home folder, must be; correct the path"
            ) from None
    try:
        url = sa.make_url(text)
    except (exc.ArgumentError, ValueError):
        raise DatabaseError(
            f"database: {_without_password(text)!r} is not a URL, must be a path, sqlite:///PATH or "
            "postgresql://USER:PASSWORD@HOST/NAME; correct it"
        ) from None
    match url.get_backend_name():
        case "sqlite":
            if not url.database or url.database == ":memory:" or "mode=memory" in text:
                raise DatabaseError(
                    f"database {text!r}: is in memory, must be a file, since several processes write to it; use a path"
                )
            return _sqlite_url(Path(url.database))
        case "postgresql" | "postgres":
            return _postgresql_url(url)
        case other:
            raise DatabaseError(
                f"database: {other!r} is no known kind, must be sqlite or postgresql; correct the URL"
            )


def connect_engines(url: sa.URL, *, to_read: bool = False) -> Database:
    """Return the database at `url`, with engines that connect on first use; its schema is not looked at.

    to_read: whether a SQLite file will do that cannot be written to.

    Raises:
        DatabaseError: the folder of a SQLite file is missing or unusable, or it cannot be read, or not be written to.
    """
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database))
        try:
            _check_sqlite_path(path)
            is_read_only = to_read and path.exists() and _unwritable(path) is not None
            if not is_read_only:
                _check_writable(path)
        except OSError as error:  # too long, links in a circle
            raise DatabaseError(
                f"database {path}: cannot be used ({error.strerror}), must be; name another by --database"
            ) from None
        if is_read_only:
            _check_log(path)
            write_engine = read_engine = _read_only_engine(url)
        else:
            write_engine = _sqlite_engine(url, begin="BEGIN IMMEDIATE", pragmas=("foreign_keys=ON",))
            read_engine = _sqlite_engine(url, begin="BEGIN", pragmas=("query_only=ON",))
        return Database(
            url=url,
            write_engine=write_engine,
            read_engine=read_engine,
            trace_root=path.parent,
            trace_folder=path.parent / f"{path.stem}.traces",
            is_read_only=is_read_only,
        )
    root = default_folder()
    # One folder a database: searches of different databases have the same numbers.
    name = f"{url.host or 'local'}-{url.port or 5432}-{url.database}"
    return Database(
        url=url,
        write_engine=sa.create_engine(url, pool_pre_ping=True),
        # One statement after another must see one state, as they do in a transaction of SQLite.
        read_engine=sa.create_engine(
            url,
            pool_pre_ping=True,
            isolation_level="REPEATABLE READ",
            execution_options={"postgresql_readonly": True},
        ),
        trace_root=root,
        trace_folder=root / f"{''.join(c if c.isalnum() or c in '-._' else '_' for c in name)}.traces",
    )


def sqlite_files(path: Path) -> list[Path]:
    """Return the paths of a SQLite database and of the logs that SQLite may keep beside it."""
    return [path, *(path.with_name(path.name + suffix) for suffix in LOG_SUFFIXES)]


def read_only_uri(path: Path) -> str:
    """Return the URI by which SQLite reads a file and writes nothing.

    Without locks and a log where there is none, so that nothing is made beside it. Where there is a log, it is read
    along, and SQLite may write its index (`-shm`) anew. Logs are beside the file that a link leads to.
    """
    _, *logs = sqlite_files(path.resolve())
    mode = "mode=ro" if any(log.exists() for log in logs) else "immutable=1"
    return f"file:{quote(str(path))}?{mode}"


def check_writable(database: str | os.PathLike[str] | None = None) -> None:
    """Refuse a SQLite file that cannot be written to, before the work whose result it is to keep. Nothing is made.

    Raises:
        DatabaseError: it cannot be written to, or names no database.
    """
    url = resolve_url(database)
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database))
        with suppress(OSError):  # `connect_engines` says what is wrong with such a name
            if path.parent.is_dir():
                _check_writable(path)


def begins_as_sqlite(path: Path) -> bool:
    """Return whether there is a file that begins as a database of SQLite's or one of its logs, and can be read."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(16).startswith(_BEGINNINGS)
    except PermissionError:
        return False


def not_sqlite(name: str) -> DatabaseError:
    """Return the error for a file that SQLite cannot read as a database."""
    return DatabaseError(
        f"database {name}: is not a SQLite database, must be one; name another by --database"
    )


def migration_engine(url: sa.URL) -> sa.Engine:
    """Return an engine for schema changes: writing, and on SQLite without foreign keys.

    SQLite changes a table by writing a new one and dropping the old one; with foreign keys on, the drop would
    delete the rows that refer to it.
    """
    if url.get_backend_name() == "sqlite":
        return _sqlite_engine(url, begin="BEGIN IMMEDIATE", pragmas=("foreign_keys=OFF",))
    return sa.create_engine(url)


def _sqlite_url(path: Path) -> sa.URL:
    try:
        encoded = str(path).encode()  # paths of traces are text in the database
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise DatabaseError(
            f"database {path}: has bytes in its name that are no text, must be a path; rename it"
        )
    return sa.URL.create("sqlite", database=str(path.absolute()))


def _postgresql_url(url: sa.URL) -> sa.URL:
    if importlib.util.find_spec("psycopg") is None:
        raise DatabaseError(
            "database: the PostgreSQL driver psycopg is not installed, must be; run pip install 'soapstone[pg]'"
        )
    if not url.database:
        raise DatabaseError(
            f"database {url.render_as_string(hide_password=True)!r}: has no database name, must have one; append /NAME"
        )
    return url.set(drivername="postgresql+psycopg")


def _without_password(text: str) -> str:
    scheme, _, rest = text.partition("://")
    credentials, separator, host = rest.rpartition("@")
    return f"{scheme}://{credentials.partition(':')[0]}:***@{host}" if separator else text


def _check_sqlite_path(path: Path) -> None:
    if (folder := user_folder("data")) is not None and path == folder / FILE_NAME:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"database {path}: its folder cannot be made ({error.strerror}); name another by --database or "
                f"{ENVIRONMENT_VARIABLE}"
            ) from None
    if path.is_dir():
        raise DatabaseError(f"database {path}: is a folder, must be a file; add a file name")
    if path.exists() and not path.is_file():
        raise DatabaseError(f"database {path}: is no regular file, must be one; name another by --database")
    # SQLite takes a file of one byte for a new database, and would write over it.
    if path.exists() and path.stat().st_size == 1:
        raise not_sqlite(str(path))
    if not path.parent.is_dir():
        raise DatabaseError(
            f"database {path}: folder {path.parent} does not exist, must exist; make it first"
        )
    if path.exists() and not os.access(path, os.R_OK):
        raise DatabaseError(f"database {path}: cannot be read, must be; change its permissions")


def _unwritable(path: Path) -> str | None:
    """Return the reason for which a SQLite file cannot be written to, in words; None where it can be."""
    if path.exists() and not os.access(path, os.W_OK):
        return "cannot be written to, must be"
    folder = path.resolve().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"folder {folder} cannot be written to, must be (SQLite keeps its log there)"
    return None


def _check_writable(path: Path) -> None:
    reason = _unwritable(path)
    if reason is not None:
        raise DatabaseError(
            f"database {path}: {reason}; let it be written to, or copy the database and name the copy by --database"
        )


def _check_log(path: Path) -> None:
    """Refuse a log that SQLite could not read: it needs an index of it, which it makes beside the file.

    And a journal: what a write that was cut short left in the file has to be taken back first.
    """
    file, log, index, journal = sqlite_files(path.resolve())
    unread = (
        [log] if log.exists() and not index.exists() and not os.access(file.parent, os.W_OK | os.X_OK) else []
    )
    if journal.exists() and journal.stat().st_size:
        unread.append(journal)
    if unread:
        raise DatabaseError(
            f"database {path}: has a log, {unread[0].name}, must have none where it cannot be written to; copy both "
            "files to another folder, and name the copy by --database"
        )


def _read_only_engine(url: sa.URL) -> sa.Engine:
    """Return an engine for a file that cannot be written to: SQLite refuses whatever would write."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            read_only_uri(Path(str(url.database))),
            uri=True,
            timeout=LOCK_TIMEOUT_S,
            factory=Connection,
            isolation_level=None,
            check_same_thread=False,
        )

    engine = sa.create_engine(url, creator=connect)

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


def _sqlite_engine(url: sa.URL, *, begin: str, pragmas: tuple[str, ...]) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": LOCK_TIMEOUT_S, "factory": Connection})
    path = Path(str(url.database))

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: sqlite3.Connection, _record: Any) -> None:
        # The driver must not begin transactions by itself: it would begin deferred ones.
        connection.isolation_level = None
        # A file system that cannot do it (some network ones) answers with the mode that stays: slower, still right.
        _patiently(connection, path, lambda: connection.execute("PRAGMA journal_mode=WAL").fetchone())
        for pragma in ("synchronous=NORMAL", *pragmas):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        driver: Any = connection.connection.driver_connection
        _patiently(driver, path, lambda: connection.exec_driver_sql(begin))

    return engine


def _patiently(connection: sqlite3.Connection, path: Path, take: Callable[[], Any]) -> None:
    """Take a lock of a SQLite file, which another process may have: say so after a while, and give up in the end."""
    begun = time.monotonic()
    said = False
    connection.execute(f"PRAGMA busy_timeout={NOTICE_S * 1e3:.0f}")
    try:
        while True:
            try:
                take()
                return
            except (sqlite3.OperationalError, exc.OperationalError) as error:
                waited_s = time.monotonic() - begun
                if not is_locked(error) or waited_s + NOTICE_S > LOCK_TIMEOUT_S:
                    raise
            if waited_s >= NOTICE_S and not said:
                said = True
                _logger.warning(
                    "database %s: %s writes to it; waiting for at most %.0f s",
                    path,
                    writer_of(path),
                    LOCK_TIMEOUT_S,
                )
            time.sleep(0.02)  # SQLite does not wait for the switch to the write-ahead log
    finally:
        connection.execute(f"PRAGMA busy_timeout={LOCK_TIMEOUT_S * 1e3:.0f}")
