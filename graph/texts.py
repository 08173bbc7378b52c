"""How messages show what was given: names and values from a file or a command line, whatever their size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

LONGEST = 40


def shown(item: object) -> str:
    """Return a value in a few words: a long number by its digits, a long text by its beginning, more by its kind."""
    if isinstance(item, int) and not isinstance(item, bool):
        # Its decimal digits would take long to find out, or Python refuses to.
        digits = item.bit_length() * 30103 // 100000 + 1
        return str(item) if digits <= LONGEST else f"a number of about {digits} digits"
    if isinstance(item, str):
        return item if len(item) <= LONGEST else f"{item[:LONGEST]}... ({len(item)} letters)"
    if item is None:
        return "nothing"
    if isinstance(item, Mapping):
        return "a map" if item else "an empty map"
    if isinstance(item, Collection):
        return "a list" if item else "an empty list"
    return shown(str(item))


def meant(name: str, names: Iterable[str]) -> str:
    """Return the advice for a mistyped name: the one of `names` that it is most like, or to choose one."""
    close = get_close_matches(name.lower(), list(names), n=1)
    return f"did you mean {close[0]}?" if close else "choose one"


def unreadable(error: Exception) -> str:
    """Return why a file cannot be read as text."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else " ".join(str(error).split())
