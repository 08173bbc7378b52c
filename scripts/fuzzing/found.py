"""Cases that once found something, in words of their own: a seed gives another case when the fuzzer changes.

Every run begins with them.
"""

from __future__ import annotations

import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.fuzzing.running import Stop

DamageFolder = Callable[[Path], None]


@dataclass(frozen=True)
class FoundCase:
    """A command, the damage to its files, and the signal that stopped it."""

    arguments: tuple[str, ...]
    damage: DamageFolder | None = None
    stop: Stop | None = None


def _sql(statement: str) -> DamageFolder:
    def damage(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "db.sqlite", isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints=ON")
            connection.execute(statement)

    return damage


def _files(pattern: str, change: Callable[[Path], object]) -> DamageFolder:
    def damage(folder: Path) -> None:
        for path in folder.glob(pattern):
            change(path)

    return damage


def _bytes(pattern: str, change: Callable[[bytes], bytes]) -> DamageFolder:
    return _files(pattern, lambda path: path.write_bytes(change(path.read_bytes())))


def _linked(pattern: str, target: str) -> DamageFolder:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return _files(pattern, link)


def _removed(pattern: str) -> DamageFolder:
    return _files(pattern, lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink())


def _parquet(pattern: str, change: Callable[[Any], Any]) -> DamageFolder:
    def rewrite(path: Path) -> None:
        import pyarrow.parquet as pq

        pq.write_table(change(pq.read_table(path)), path)

    return _files(pattern, rewrite)


def _without_column(pattern: str, column: str) -> DamageFolder:
    return _parquet(pattern, lambda table: table.drop_columns([column]))


def _without_rows(pattern: str) -> DamageFolder:
    return _parquet(pattern, lambda table: table.slice(0, 0))


def _without_value(pattern: str, column: str) -> DamageFolder:
    def change(table: Any) -> Any:
        import pyarrow as pa

        index = table.column_names.index(column)
        values = [*table.column(column).to_pylist()[:-1], None]
        return table.set_column(index, column, pa.array(values, table.schema.field(index).type))

    return _parquet(pattern, change)


def _metadata(pattern: str, key: str, value: str) -> DamageFolder:
    def change(table: Any) -> Any:
        metadata = {**(table.schema.metadata or {}), key.encode(): value.encode()}
        return table.replace_schema_metadata(metadata)

    return _parquet(pattern, change)


_SMALL = ("--model", "mlp", "--preset", "small")
_ON_CORES = (
    "search", *_SMALL, "--device", "cpu", "--devices", "2", "--proposals", "5", "--on-miss", "estimate"
)  # fmt: skip
_WALK = ("search", *_SMALL, "--topology", "topology.yaml", "--proposals", "5")
_REBUILD = ("strategy", "rebuild", "1")
_CHUNK = "db.traces/search-1/chunk-*.parquet"
_QUERY = ("query", "SELECT * FROM best_per_model")
_LARGE = "9" * 20

FOUND = (
    FoundCase(("db", "export", "loop")),
    FoundCase(("db", "export", "other.sqlite")),
    FoundCase(("db", "export", "new\x1b[31m.json")),
    FoundCase(("strategy", "export", "1", "db.sqlite")),
    FoundCase(("trace", "--strategy", "1", "--output", "db.traces/search-1/chunk-000001.parquet")),
    FoundCase(("db", "export", "9" * 300)),
    FoundCase(("profile", "--preset")),
    FoundCase(("strategy", "list", "9" * 5000)),
    FoundCase(("strategy", "rebuild", _LARGE)),
    FoundCase(("strategy", "rebuild", "1", "--chain", _LARGE)),
    FoundCase(("strategy", "list", "--limit", _LARGE)),
    FoundCase(("search", "--resume", _LARGE)),
    FoundCase(("compare", "--execution", _LARGE)),
    FoundCase(("report", "--search", _LARGE)),
    FoundCase(("trace", "--execution", _LARGE)),
    FoundCase(_REBUILD, stop=Stop(signal.SIGTERM, 0.15)),
    FoundCase(("compare",), stop=Stop(signal.SIGINT, 0.25)),
    FoundCase(("report",), stop=Stop(signal.SIGTERM, 0.5)),
    FoundCase(("report", "--search", "1"), _sql("UPDATE op_signatures SET flops = '.'")),
    FoundCase(("report",), _sql("UPDATE executions SET median_s = '1_000'")),
    FoundCase(("report", "--execution", "1"), _sql("UPDATE op_costs SET median_s = '[]'")),
    FoundCase(("report",), _sql("UPDATE searches SET best_time_s = 'a:'")),
    FoundCase(("report", "--search", "1"), _sql("UPDATE graphs SET name = x'fffe'")),
    FoundCase(("report",), _without_value("db.traces/executions/*.parquet", "start_ns")),
    FoundCase(("strategy", "show", "1"), _sql("UPDATE graphs SET model = '1e999'")),
    FoundCase(("strategy", "show", "1"), _sql("UPDATE executions SET finished_at = x'00'")),
    FoundCase(("strategy", "list"), _sql("UPDATE strategies SET created_at = 'x'")),
    FoundCase(("strategy", "list"), _sql("UPDATE strategies SET graph_id = 'x' WHERE id = 3")),
    FoundCase(("strategy", "export", "1", "new.json"), _sql("DELETE FROM graphs")),
    FoundCase(("compare", "--execution", "1"), _sql("UPDATE graphs SET model = '{}'")),
    FoundCase(("compare", "--execution", "1"), _sql("UPDATE executions SET step_times_s = 'x'")),
    FoundCase(("compare", "--search", "1"), _sql("UPDATE trainings SET document = 'x'")),
    FoundCase(("compare", "--search", "1"), _sql("UPDATE traces SET search_id = '-inf' WHERE id = 3")),
    FoundCase(("compare", "--json"), _sql("UPDATE topologies SET name = x'00'")),
    FoundCase(_QUERY, _sql("UPDATE traces SET search_id = x'c3fc' WHERE id = 3")),
    FoundCase(_QUERY, _bytes("db.sqlite", lambda raw: raw[:89967] + b"\xc8" + raw[89967:])),
    FoundCase(("trace", "--execution", "1"), _sql("DELETE FROM graphs")),
    FoundCase(("trace", "--strategy", "1"), _sql("DELETE FROM topologies WHERE id = 1")),
    FoundCase(("trace", "--strategy", "1"), _sql("UPDATE graphs SET model = '{\"name\":\"tripwire:factory\"}'")),
    FoundCase(_ON_CORES, _sql("UPDATE environments SET facts = '\"x\"'")),
    FoundCase(_ON_CORES, _sql("UPDATE op_signatures SET key = '{}'")),
    FoundCase(_WALK, _linked("cache/**/*.json", "/dev/zero")),
    FoundCase(_REBUILD, _metadata(_CHUNK, "soapstone.checkpoint", "9999")),
    FoundCase(_REBUILD, _metadata(_CHUNK, "soapstone.checkpoint", "{")),
    FoundCase(_REBUILD, _without_column("db.traces/search-1/configurations-*.parquet", "family")),
    FoundCase(_REBUILD, _bytes(_CHUNK, lambda raw: raw[:-200] + bytes([raw[-200] ^ 4]) + raw[-199:])),
    FoundCase(_REBUILD, _removed(_CHUNK)),
    FoundCase(_QUERY, _linked("db.traces/search-2/chunk-000001.parquet", "chunk-000001.parquet")),
    FoundCase(("compare",), _bytes("db.sqlite", lambda _: b"")),
    FoundCase(("report",), _sql("UPDATE trainings SET document = json_remove(document, '$.optimizer')")),
    FoundCase(("report", "--model", "\udcff")),
    FoundCase(("trace", "--execution", "1"), _without_rows("db.traces/executions/*.parquet")),
    FoundCase(("db", "status"), _sql("UPDATE link_fits SET device_kind_id = 'x' WHERE id = 14")),
    FoundCase(("db", "status", "--database", "a" * 300)),
    FoundCase(("search", *_SMALL, "--topology", "a" * 300)),
    FoundCase(("db", "import", "a" * 300)),
    FoundCase(("strategy", "import", "a" * 300)),
    FoundCase(("trace", *_SMALL, "--strategy", "a" * 300)),
    FoundCase(
        ("db", "export", "new.parquet"), _sql("UPDATE environments SET facts = '{\"memory_gib\":NaN}'")
    ),
    FoundCase(
        ("db", "export", "new.parquet"), _sql("UPDATE device_kinds SET description = '{\"cores\":1e999}'")
    ),
    FoundCase(("run", *_SMALL, "--limit", "5e-324")),
    FoundCase(("compare", "--model", "\udcff", "--topology", "\udcff")),
)  # fmt: skip
