"""Random values: texts that a user may type, and values that a hostile file may hold."""

from __future__ import annotations

import json
from random import Random
from typing import Any

HOSTILE_TEXTS = (
    "", " ", "-", "--", ".", "..", "/", "~", "*", "%s", "{}", "'", '"', "';--", "\n", "\t", "\r", "a\nb",
    "\x1b[31mred", "\x1b]0;title\x07", "\x1b[2J", "\x07", "\x08", "\x7f", "\x9b31m", "\u202egnp", "\u200b",
    "\u2028", "\udcff", "x\udc80y", "é", "日本", "𝕏", "null", "None", "true", "[]", "{", "[bold]x[/bold]", "[/]",
    "a" * 300, "9" * 5000, "nan", "inf", "-inf", "1e999", "-1", "0", "1.5", "0x10", "1_000", " 1", "1 ", "+1",
    "1e3", "١", "²", "os:getpid", "tripwire:factory", "runtime:factory", "sys:exit", "a:b:c", ":", "a:", ":b",
    "../tripwire:factory", "mlp\x1b[31m",
)  # fmt: skip
INTEGERS = (
    "0", "1", "2", "3", "4", "7", "-1", "-0", "64", "1000", "2147483648", str(2**63 - 1), str(2**63),
    str(-(2**63)), str(10**30), "9" * 401, "1.0", "1e3", "0x10", "1_0", " 2", "", "x", "١", "²", "nan", "inf",
    "--1", "+2",
)  # fmt: skip
FLOATS = (
    "0", "1", "0.01", "-1", "nan", "inf", "-inf", "1e999", "1e-999", "-0.0", "1e308", "5e-324", "", "x", "1,5",
    "1_0.0", "0x1p3", "9" * 401, "١", "infinity",
)  # fmt: skip
# Written as JSON would be refused for some of them; Python's writer says NaN and Infinity.
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1000, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400,
    0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), [], {}, [[]], [None], [0, 1],
    {"": None}, {"x": 1}, "\x00", "tripwire:factory", "os:abort", "float32", "../../x", "/dev/zero", [1] * 2000,
)  # fmt: skip


def chance(random: Random, share: float) -> bool:
    """Return True in this share of all calls."""
    return random.random() < share


def any_text(random: Random) -> str:
    """Return a text that a command line can hold, mostly a hostile one."""
    if chance(random, 0.8):
        return random.choice(HOSTILE_TEXTS)
    length = random.randrange(1, 30)
    return "".join(
        chr(random.choice((random.randrange(1, 128), random.randrange(0xA0, 0x3000)))) for _ in range(length)
    )


def any_value(random: Random) -> Any:
    """Return a value that a JSON document can hold."""
    if chance(random, 0.3):
        return any_text(random).replace("\udcff", "\ufffd").replace("\udc80", "\ufffd")
    value = random.choice(HOSTILE_VALUES)
    return json.loads(json.dumps(value)) if isinstance(value, (list, dict)) else value


def nested(depth: int) -> str:
    """Return JSON of so many lists within each other."""
    return "[" * depth + "]" * depth


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a document."""
    children = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [path, *(place for key, value in children for place in places(value, (*path, key)))]


def mutated(document: Any, random: Random) -> tuple[Any, str]:
    """Return a changed document (the given one is changed too), and words for the change."""
    path = random.choice(places(document))
    if not path:
        value = any_value(random)
        return value, f"all = {str(value)[:60]!r}"
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    location = "/".join(str(part)[:40] for part in path)
    match random.choice(("replace", "replace", "replace", "remove", "add", "rename", "double", "digits")):
        case "remove":
            del holder[key]
            return document, f"{location} removed"
        case "add" if isinstance(holder, dict):
            added = any_text(random).encode("utf-8", "replace").decode()
            holder[added] = any_value(random)
            return document, f"{location}: beside it {added[:40]!r}"
        case "rename" if isinstance(holder, dict):
            renamed = any_text(random).encode("utf-8", "replace").decode()
            holder[renamed] = holder.pop(key)
            return document, f"{location} renamed {renamed[:40]!r}"
        case "double" if isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
            return document, f"{location} doubled"
        case "digits" if isinstance(holder[key], int):
            value = holder[key] + random.choice((-1, 1, 10, -holder[key]))
        case _:
            value = any_value(random)
    holder[key] = value
    return document, f"{location} = {str(value)[:60]!r}"
