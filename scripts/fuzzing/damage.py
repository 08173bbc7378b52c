"""Random damage of the files of a case."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from random import Random

import yaml

from scripts.fuzzing.row_damage import damage_model, damage_row, damage_schema, damaged_cell
from scripts.fuzzing.values import any_value, chance, mutated, nested

# For strategies and topologies: JSON and YAML that readers stumble over.
WHOLE_DOCUMENTS = (
    "!!python/object/apply:tripwire.run []", "a: &a [*a, *a]", "&a {a: *a}",
    "kinds: !!python/name:tripwire.run", "{", "- " * 5000, nested(50_000), "\x00", "\ufeff{}",
    "a: " + "9" * 6000, '{"format": ' + "9" * 5000 + "}", "--- 1\n--- 2", '{"format":1,"format":1}',
    "\x1b[31m", "'", "x: 0x" + "f" * 9000,
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d,*d]",
    "2001-01-01: 2001-01-01\n? [1]\n: 2", "kinds: {1: 2, null: 3, true: 4, 1.5: 5}", "<<: {a: 1}\n",
)  # fmt: skip
STRAY_FOLDERS = ("db.traces", "db.traces/search-1", "db.traces/search-2", "cache", "db.traces/executions")
STRAYS = (
    "chunk-000002.parquet", "chunk-000001.1.tmp", "search-9", ".hidden", "chunk-x.parquet", "x\x1b[31m",
    "starts-000002.parquet",
)  # fmt: skip
RandomDamage = Callable[[Path, Random], str]


def damage(folder: Path, random: Random) -> str:
    """Damage some files of the folder, and return a description."""
    kinds: list[RandomDamage] = random.choices(
        (
            damage_bytes,
            damage_row,
            damage_document,
            damage_parquet,
            damage_names,
            damage_schema,
            damage_model,
        ),
        weights=(6, 8, 4, 4, 3, 1, 2),
        k=random.choice((1, 1, 1, 2, 3)),
    )
    return "; ".join(_done(kind, folder, random) for kind in kinds)


def _done(kind: RandomDamage, folder: Path, random: Random) -> str:
    """Do one kind of damage and return its description; earlier damage may leave nothing to damage."""
    if any(path.is_fifo() for path in folder.rglob("*")):
        return f"{kind.__name__} would wait at a pipe"
    try:
        return kind(folder, random)
    except (sqlite3.Error, IndexError, OSError, ValueError) as error:
        return f"{kind.__name__} had nothing to damage ({error})"


def _files(folder: Path) -> list[Path]:
    """Return the files that are data."""
    data = [path for path in folder.glob("db.*") if path.is_file() and path.stat().st_size]
    data += [path for path in folder.glob("db.traces/*/*") if path.is_file()]
    data += [folder / name for name in ("costs.parquet", "strategy.json", "topology.yaml")]
    data += list(folder.glob("cache/**/*.json"))
    # A database is the largest; it would be chosen seldom otherwise.
    return [path for path in sorted([*data, *[folder / "db.sqlite"] * 4]) if path.is_file()]


def damage_bytes(folder: Path, random: Random) -> str:
    """Change bytes of a file."""
    path = random.choice(_files(folder))
    content = bytearray(path.read_bytes())
    size = len(content)
    at = min(random.randrange(size), random.randrange(size)) if size else 0
    # Headers, and where SQLite's schema is, are looked at first by whoever reads.
    if chance(random, 0.3):
        at = random.randrange(min(size, 120)) if size else 0
    kind = random.choice(("flip", "flip", "truncate", "insert", "delete", "zero", "tail"))
    count = random.choice((1, 2, 8, 100, 5000))
    match kind:
        case "flip":
            for _ in range(count if size else 0):
                content[(at + random.randrange(count)) % size] ^= 1 << random.randrange(8)
        case "truncate":
            del content[random.choice((at, 0, size - 1, 16, 100)) :]
        case "insert":
            content[at:at] = random.randbytes(count)
        case "delete":
            del content[at : at + count]
        case "zero":
            content[at : at + count] = bytes(min(count, max(size - at, 0)))
        case "tail":
            content += random.randbytes(count)
    path.write_bytes(content)
    return f"{path.relative_to(folder)}: {kind} {count} at {at}"


def damage_document(folder: Path, random: Random) -> str:
    """Change a strategy, a topology or a kept graph in a place that is right in JSON or YAML."""
    files = [
        folder / "strategy.json",
        folder / "strategy.json",
        folder / "topology.yaml",
        folder / "topology.yaml",
    ]
    files += sorted(folder.glob("cache/**/*.json"))
    path = random.choice(files)
    try:
        text = path.read_text()
        document = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        return f"{path.name} unchanged ({type(error).__name__})"
    name = str(path.relative_to(folder))
    if chance(random, 0.12):
        chosen = random.choice(WHOLE_DOCUMENTS)
        path.write_text(chosen)
        return f"{name} = {chosen[:60]!r}"
    document, words = mutated(document, random)
    text = yaml.safe_dump(document, allow_unicode=True) if path.suffix == ".yaml" else json.dumps(document)
    path.write_bytes(text.encode("utf-8", "replace"))
    return f"{name}: {words}"


def damage_parquet(folder: Path, random: Random) -> str:
    """Change a column, the rows or the metadata of a pack or a chunk, which stays a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = random.choice([folder / "costs.parquet"] * 3 + sorted(folder.glob("db.traces/*/*.parquet")))
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException):
        return f"{path.name} unchanged"
    name = str(path.relative_to(folder))
    column = random.randrange(table.num_columns) if table.num_columns else 0
    kind = random.choice(
        ("value", "value", "value", "value", "drop", "add", "type", "rows", "metadata", "order")
    )
    title = table.column_names[column]
    values = table.column(column).to_pylist()
    match kind:
        case "value" if values:
            row = random.randrange(len(values))
            old, words = values[row], f"{title}[{row}]"
            try:
                if isinstance(old, str) and old[:1] in "{[" and chance(random, 0.7):
                    values[row] = json.dumps(mutated(json.loads(old), random)[0])
                else:
                    values[row] = (
                        damaged_cell(title, None, random) if isinstance(old, str) else any_value(random)
                    )
                changed = pa.array(values, type=table.schema.field(column).type)
                words += f" = {str(values[row])[:100]!r}"
            except (pa.ArrowException, OverflowError, TypeError, ValueError, UnicodeEncodeError):
                values[row] = None
                changed = pa.array(values, type=table.schema.field(column).type)
                words += " = null"
            table = table.set_column(column, title, changed)
        case "drop":
            table, words = table.remove_column(column), f"{title} dropped"
        case "add":
            table, words = table.append_column("x\x1b[31m", pa.array([1] * len(values))), "a column added"
        case "type":
            table, words = (
                table.set_column(column, title, pa.array([str(value) for value in values])),
                f"{title} as text",
            )
        case "rows":
            count = random.choice((0, 1, len(values) // 2))
            table, words = table.slice(0, count), f"{count} rows"
        case "metadata":
            metadata = dict(table.schema.metadata or {})
            for key in list(metadata):
                metadata[key] = random.choice((b"", b"{", b"9999", b"\xff", b"null", b"1" * 5000))
            table, words = (
                table.replace_schema_metadata(metadata or None),
                f"metadata {sorted(metadata)} = {list(metadata.values())}"[:200],
            )
        case _:
            names = list(reversed(table.column_names))
            table, words = table.select(names), "columns reversed"
    pq.write_table(table, path)
    return f"{name}: {words}"


def damage_names(folder: Path, random: Random) -> str:
    """Remove, swap, or add files."""
    path = random.choice(_files(folder))
    name = path.relative_to(folder)
    match random.choice(
        ("remove", "swap", "folder", "stray", "stray", "loop", "device", "pipe", "journal", "lock", "copy")
    ):
        case "remove":
            path.unlink()
            return f"{name} removed"
        case "swap":
            other = random.choice(_files(folder))
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return f"{name} swapped with {other.relative_to(folder)}"
        case "folder":
            path.unlink()
            path.mkdir()
            return f"{name} is a folder"
        case "stray":
            home, stray = random.choice(STRAY_FOLDERS), random.choice(STRAYS)
            (folder / home).mkdir(exist_ok=True, parents=True)
            (folder / home / stray).write_bytes(
                random.choice((b"", b"x", b"PAR1PAR1", random.randbytes(100)))
            )
            return f"stray {home}/{stray}"
        case "loop":
            path.unlink()
            path.symlink_to(path.name)
            return f"{name} is a link to itself"
        case "device":
            path.unlink()
            device = random.choice(("/dev/zero", "/dev/null", "/dev/full"))
            path.symlink_to(device)
            return f"{name} is {device}"
        case "pipe":
            path.unlink()
            os.mkfifo(path)
            return f"{name} is a pipe"
        case "journal":
            suffix = random.choice(("-journal", "-wal", "-shm"))
            (folder / f"db.sqlite{suffix}").write_bytes(
                random.choice((b"", random.randbytes(64), random.randbytes(40000)))
            )
            return f"db.sqlite{suffix} of random bytes"
        case "lock":
            lock = folder / "db.traces" / "readers.lock"
            if lock.is_file():
                lock.unlink()
            lock.mkdir(parents=True, exist_ok=True)
            return "readers.lock is a folder"
        case _:
            shutil.copy(random.choice(_files(folder)), path, follow_symlinks=True)
            return f"{name} copied over"
