"""Random argument lists, from the tree of commands that Typer makes of the application."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, get_args

from scripts.fuzzing.values import FLOATS, INTEGERS, any_text, chance

# Names of files in the folder of a case, see scripts.fuzzing.corpus.
FILES = (
    "db.sqlite", "other.sqlite", "db.sqlite-wal", "link.sqlite", "costs.parquet", "strategy.json", "plan.py",
    "topology.yaml", "notes.txt", "folder", "tripwire.py", "db.traces",
    "db.traces/search-1/chunk-000001.parquet", "missing.txt", "no/where.txt", "new.json", "new.csv",
    "new.parquet", "new.html", "./db.sqlite", "folder/../db.sqlite", "/dev/null", "/dev/full", "/dev/zero",
    "/dev/stdout", "/proc/self/mem", "/proc/1/environ", "db.traces/readers.lock", "loop", "cache",
    "new\x1b[31m.json",
)  # fmt: skip
QUERIES = (
    "SELECT 1", "SELECT * FROM proposals LIMIT 5", "SELECT * FROM strategies", "SELECT count(*) FROM op_costs",
    "SELECT * FROM best_per_model", "SUMMARIZE searches", "SHOW ALL TABLES", "DESCRIBE graphs",
    "EXPLAIN SELECT 1", "SELECT chr(27) || '[31m' AS x", "SELECT chr(0)", "SELECT 'a' AS \"\x1b[2J\"", "SELECT",
    "", ";", "SELECT 1;", "SELECT 1; SELECT 2", "DROP TABLE searches", "INSTALL httpfs", "LOAD httpfs",
    "COPY (SELECT 1) TO 'stolen.csv'", "ATTACH 'new.db'", "SELECT * FROM read_csv('notes.txt')",
    "SELECT * FROM 'costs.parquet'", "SELECT * FROM read_text('tripwire.py')", "PRAGMA database_list",
    "SET memory_limit='1GB'", "SELECT getenv('HOME')", "SELECT * FROM glob('*')",
    "WITH a AS (SELECT 1) SELECT * FROM a", "SELECT 1/0", "SELECT 'x'::INTEGER", "SELECT repeat('x', 1000)",
    "SELECT NULL", "SELECT [1,2], {'a': 1}", "SELECT 1 AS a, 2 AS a", "SELECT * FROM searches WHERE false",
    "SELECT 'NaN'::DOUBLE, 'inf'::DOUBLE", "SELECT DATE '2020-01-01', INTERVAL 1 DAY",
    "SELECT 10::HUGEINT ** 30", "SELECT '\\xAA'::BLOB", "FROM searches",
    "PIVOT (SELECT 1 AS a, 2 AS b) ON a USING sum(b)", "VALUES (1)", "CALL pragma_version()",
    "SELECT length(array_to_string(range(10000000), ','))", "CREATE TABLE x AS SELECT 1",
    "SELECT * FROM range(10000)", "SELECT current_setting('home_directory')",
)  # fmt: skip
GOOD: dict[str, tuple[str, ...]] = {
    "model": ("mlp", "mlp", "mlp", "mlp-small", "tripwire:factory", "mlp:factory"),
    "preset": ("small", "small", "small", "paper", "xl"),
    "topology": ("p100-cluster", "xeon", "topology.yaml", "p100-cluster", "local", "k80-cluster"),
    "device": ("cpu", "cpu", "cuda"),
    "precision": ("float32", "bfloat16", "float16", "tf32"),
    "optimizer": ("sgd", "momentum", "adam"),
    "batch_norm": ("synchronized", "local"),
    "order": ("program", "fifo", "priority", "priority-tic", "priority-tac"),
    "on_miss": ("estimate", "measure", "fail"),
    "algorithm": (
        "mcmc", "optcnn", "tofu", "greedy", "random", "exhaustive", "sharding", "recomputation", "mcmc,greedy", ",",
        "mcmc,,", "placement",
    ),
    "recompute": ("all", "none"),
    "strategy": (
        "1", "2", "strategy.json", "best", "data-parallel", "megatron-4", "fsdp", "zero", "single-device", "expert",
        "0" * 8,
    ),
    "one": ("1", "2", "3"),
    "other": ("1", "2", "3"),
    "start": ("1", "2", "99"),
    "file_format": ("table", "csv", "json", "parquet", "dtensor"),
    "sql": QUERIES,
    "database": (
        "db.sqlite", "other.sqlite", "new.sqlite", "sqlite:///db.sqlite", "sqlite://", "postgresql://127.0.0.1:1/x",
        "mysql://x",
    ),
    "gpus": ("0", "0-7", "7-0", "0,0", "0-", ",", "0-99999999999"),
    "device_kind": ("P100-SXM2", "nothing"),
    "search": ("1", "2"),
    "execution": ("1",),
    "resume": ("1", "2", "3"),
    "proposals": ("0", "5", "40"),
    "chains": ("1", "2"),
    "devices": ("1", "2", "4"),
    "iterations": ("1", "2"),
    "timeout": ("0.001", "5", "60"),
    "limit": ("0.5", "20", "60"),
    "products": ("0", "1"),
    "step": ("0", "1", "5"),
    "chain": ("0", "1"),
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """An option or an argument of a command."""

    name: str
    option: str  # empty for an argument
    kind: str  # flag, int, float, path or str
    required: bool


@dataclass(frozen=True)
class Command:
    """A command of the application: its names and parameters."""

    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]


@cache
def commands() -> tuple[Command, ...]:
    """Return every command of the application."""
    from typer.main import get_command

    from app.cli.application import application

    return tuple(_commands(get_command(application), ()))


def _commands(group: Any, names: tuple[str, ...]) -> Iterator[Command]:
    inside = getattr(group, "commands", None)
    if inside is None:
        yield Command(names, tuple(_parameter(parameter) for parameter in group.params))
        return
    for name, command in inside.items():
        yield from _commands(command, (*names, name))


def _parameter(parameter: Any) -> Parameter:
    hints = f"{parameter.type_descriptor.annotation} {get_args(parameter.type_descriptor.annotation)}"
    kinds = [kind for kind in ("int", "float", "Path") if kind in hints]
    is_option = parameter.opts[0].startswith("-")
    flag = bool(getattr(parameter, "is_flag", False))
    return Parameter(
        parameter.name,
        parameter.opts[0] if is_option else "",
        "flag" if flag else kinds[0].lower() if kinds else "str",
        bool(parameter.required),
    )


def random_arguments(random: Random) -> tuple[str, ...]:
    """Return an argument list: mostly nearly right, now and then nonsense."""
    if chance(random, 0.02):
        return tuple(any_text(random) for _ in range(random.randrange(4)))
    command = random.choice(commands())
    hostility = random.choice((0.02, 0.1, 0.5))
    typed = list(command.names)
    usual = random.uniform(0, 0.6)
    for parameter in command.parameters:
        needed = parameter.required or parameter.name in ("model", "preset", "sql", "topology", "file")
        if chance(random, 0.95 if needed else usual * 0.5):
            typed += _given(parameter, random, hostility)
    if chance(random, 0.03):
        typed.insert(random.randrange(len(typed) + 1), any_text(random))
    if chance(random, 0.02):
        typed.insert(
            random.randrange(len(command.names), len(typed) + 1),
            random.choice(("--help", "--version", "--nothing", "-h")),
        )
    if chance(random, 0.02):
        typed.pop()
    return tuple(typed)


def _given(parameter: Parameter, random: Random, hostility: float) -> list[str]:
    if parameter.kind == "flag":
        return [parameter.option]
    value = any_text(random) if chance(random, hostility * 0.5) else _value(parameter, random, hostility)
    if not parameter.option:
        return [value]
    return [f"{parameter.option}={value}"] if chance(random, 0.1) else [parameter.option, value]


def _value(parameter: Parameter, random: Random, hostility: float) -> str:
    if chance(random, hostility):
        match parameter.kind:
            case "int":
                return random.choice(INTEGERS)
            case "float":
                return random.choice(FLOATS)
            case _:
                return random.choice(FILES)
    if parameter.name in GOOD:
        return random.choice(GOOD[parameter.name])
    match parameter.kind:
        case "int":
            return random.choice(("0", "1", "2", "3"))
        case "float":
            return random.choice(("0", "0.5", "1", "100"))
        case "path":
            return random.choice(FILES)
        case _:
            return any_text(random)
