"""Random damage of a database's rows and schema, as somebody with SQLite's shell could do it."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from scripts.fuzzing.values import any_text, any_value, chance, mutated, nested


def damage_row(folder: Path, random: Random) -> str:
    """Change a value of a row in the database, as somebody with SQLite's shell could."""
    path = folder / "db.sqlite"
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints=ON")
            return _damage_row(connection, random)
    except (sqlite3.Error, UnicodeDecodeError) as error:  # damaged already
        return f"no row changed ({error})"


def _damage_row(connection: sqlite3.Connection, random: Random) -> str:
    names = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table' ORDER BY name")
    ]
    likely = [
        name
        for name in ("graphs", "strategies", "searches", "traces", "topologies", "trainings", "executions")
        if name in names
    ]
    table = random.choice([*names, *likely, *likely])
    rows = [row for (row,) in connection.execute(f"SELECT rowid FROM {table} ORDER BY rowid")]
    if not rows:
        return f"{table} is empty"
    row = random.choice(rows)
    if chance(random, 0.08):
        connection.execute(f"DELETE FROM {table} WHERE rowid=?", (row,))
        return f"{table} {row} deleted"
    columns = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
    column = random.choice(columns)
    ((old,),) = connection.execute(f'SELECT "{column}" FROM {table} WHERE rowid=?', (row,)).fetchall()
    new = damaged_cell(column, old, random)
    try:
        connection.execute(f'UPDATE {table} SET "{column}"=? WHERE rowid=?', (new, row))
    except (sqlite3.IntegrityError, OverflowError, UnicodeEncodeError):
        connection.execute(f"UPDATE {table} SET \"{column}\"='x' WHERE rowid=?", (row,))
        new = "x"
    return f"{table}.{column} of {row} = {str(new)[:150]!r}"


def damaged_cell(column: str, old: Any, random: Random) -> Any:
    """Return another value for a cell of a database or of a Parquet file."""
    if isinstance(old, str) and old[:1] in "{[" and chance(random, 0.75):
        if chance(random, 0.1):
            return random.choice(
                (
                    "",
                    "{",
                    "[]",
                    "null",
                    "0",
                    '"x"',
                    "NaN",
                    nested(100_000),
                    old[:-1],
                    old + "}",
                    '{"a":1,"a":2}',
                )
            )
        try:
            return json.dumps(mutated(json.loads(old), random)[0])
        except ValueError:
            return old[: len(old) // 2]
    match random.choice(("hostile", "value", "text", "number", "blob", "null", "tripwire", "path")):
        case "hostile" | "text":
            return any_text(random)
        case "value":
            value = any_value(random)
            return value if isinstance(value, (str, float)) or value is None else str(value)
        case "number":
            return random.choice((0, -1, 1, 2, 99, 2**62, -(2**63), 0.5, 1e308, float("inf")))
        case "blob":
            return random.choice((b"", b"\x00", b"\xff\xfe", random.randbytes(20)))
        case "tripwire":
            return random.choice(
                (
                    '"tripwire:factory"',
                    "tripwire:factory",
                    '{"batch_size":null,"name":"tripwire:factory","preset":"small"}',
                )
            )
        case "path" if "path" in column:
            return random.choice(
                (
                    "/etc/passwd",
                    "../../costs.parquet",
                    "costs.parquet",
                    "/dev/zero",
                    "",
                    "db.traces",
                    "x\x1b[31m",
                )
            )
        case _:
            return None


def damage_model(folder: Path, random: Random) -> str:
    """Let the database name a module where it names the network."""
    model = json.dumps(
        {"batch_size": None, "name": random.choice(("tripwire:factory", "os:abort")), "preset": "small"}
    )
    statements = (
        "UPDATE graphs SET model = ?", "UPDATE graphs SET model = json_extract(?, '$.name')",
        "UPDATE searches SET options = json_set(options, '$.request.model', json(?))",
        "UPDATE searches SET options = json_set(options, '$.request.model.name', json_extract(?, '$.name'))",
    )  # fmt: skip
    statement = random.choice(statements)
    return _executed(folder, statement, model)


def damage_schema(folder: Path, random: Random) -> str:
    """Change the database's schema, or of which revision it says to be."""
    statements = (
        "UPDATE alembic_version SET version_num='9999'", "UPDATE alembic_version SET version_num='0001'",
        "DELETE FROM alembic_version", "INSERT INTO alembic_version VALUES ('0002')",
        "DROP TABLE alembic_version", "DROP TABLE traces", "DROP TABLE graphs",
        "ALTER TABLE strategies DROP COLUMN source", "ALTER TABLE searches RENAME COLUMN options TO choices",
        "ALTER TABLE graphs ADD COLUMN x", "CREATE VIEW zzz AS SELECT * FROM nowhere",
        "CREATE TABLE proposals (x)", "DROP INDEX ix_graphs_name", "PRAGMA user_version=7",
        "PRAGMA application_id=7", "PRAGMA journal_mode=DELETE", "PRAGMA journal_mode=WAL",
        "CREATE TRIGGER t AFTER INSERT ON searches BEGIN DELETE FROM graphs; END",
        "CREATE TABLE \"a\x1b[31mb\" (x)", "DROP TABLE simulations", "DROP TABLE op_costs",
        "UPDATE alembic_version SET version_num='\x1b[31m'",
    )  # fmt: skip
    statement = random.choice(statements)
    return _executed(folder, statement)


def _executed(folder: Path, statement: str, *values: str) -> str:
    try:
        with closing(sqlite3.connect(folder / "db.sqlite", isolation_level=None)) as connection:
            connection.execute(statement, values)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return f"database unchanged ({error})"
    return ": ".join((statement, *values))
