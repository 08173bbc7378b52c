"""Text from files, databases and other people, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text as one line of letters that only show: all that a command prints goes through here.

    Control characters (escape sequences, new lines), marks that turn the direction of writing and half characters steer
    a terminal, or hide or forge what stands beside them. Spaces of any sort become plain ones, the others `?`.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)
