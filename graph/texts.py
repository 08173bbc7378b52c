"""Names and values as messages show them: from a file or a command line, whatever their size; numbers; ends."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from json import JSONDecodeError
from typing import TypeVar

from graph.errors import UsageError

LONGEST = 40

Choice = TypeVar("Choice", bound=str)


def shown(item: object, longest: int = LONGEST) -> str:
    """Return a value in a few words: a long number by its digits, a long text by its beginning, more by its kind."""
    if isinstance(item, int) and not isinstance(item, bool):
        # Python refuses to find out some thousands of digits.
        digits = item.bit_length() * 30103 // 100000 if item.bit_length() > 10_000 else len(str(abs(item)))
        return str(item) if digits <= longest else f"a number of {digits} digits"
    if isinstance(item, str):
        return item if len(item) <= longest else f"{item[:longest]}... ({len(item)} letters)"
    if item is None:
        return "nothing"
    if isinstance(item, Mapping):
        return "a map" if item else "an empty map"
    if isinstance(item, Collection):
        return "a list" if item else "an empty list"
    return shown(str(item), longest)


def one_of(choices: Iterable[Choice], text: str, option: str) -> Choice:
    """Return the choice that a user names.

    Raises:
        UsageError: it is none; the message begins with the `option`.
    """
    for choice in choices:
        if choice == text:
            return choice
    raise UsageError(f"{option}: is {shown(text)}, must be one of {', '.join(choices)}; choose one of them")


def meant(name: str, names: Iterable[str], otherwise: str = "choose one") -> str:
    """Return the advice for a mistyped name: the one of `names` that it is most like, `otherwise` for none."""
    candidates = list(names)
    begun = [candidate for candidate in candidates if name and candidate.startswith(name.lower())]
    close = begun if len(begun) == 1 else get_close_matches(name.lower(), candidates, n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def unreadable(error: Exception) -> str:
    """Return why a file cannot be read as text, or its text not as JSON or YAML."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, JSONDecodeError):
        return f"see line {error.lineno}, column {error.colno}"
    if "set_int_max_str_digits" in str(error):
        # Python's own advice is about Python.
        return "a number in it has thousands of digits"
    strerror = getattr(error, "strerror", None)
    return str(strerror).lower() if strerror else " ".join(str(error).split())


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: of one as it is, of others the `plural`, or the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def ranges(numbers: Sequence[int]) -> list[str]:
    """Return numbers in their order, each run of consecutive ones as first-last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


def describe_exit(code: int) -> str:
    """Return an exit code, negative for a signal, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    advice = " (perhaps out of memory)" if name == "SIGKILL" else ""
    return f"was ended by signal {name}{advice}"
