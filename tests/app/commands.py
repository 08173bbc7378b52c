"""All commands, with their options and arguments, as they are declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from app.cli.application import application


@dataclass(frozen=True)
class Parameter:
    """An option or argument of a command; `option` is None for an argument. `information` is Typer's."""

    command: str
    name: str
    option: str | None
    kinds: tuple[Any, ...]
    information: Any

    @property
    def is_path(self) -> bool:
        """True where it takes the path of a file."""
        return Path in self.kinds

    def given(self, value: object) -> tuple[str, ...]:
        """Return the words that give it a value."""
        return (str(value),) if self.option is None else (self.option, str(value))


def all_parameters() -> Iterator[Parameter]:
    """Give every parameter of every command, whose name is such as "strategy export"."""
    yield from _below("", application)


def _below(prefix: str, group: typer.Typer) -> Iterator[Parameter]:
    for command in group.registered_commands:
        name = f"{prefix} {command.name}".strip()
        for parameter, hint in get_type_hints(command.callback, include_extras=True).items():
            kind, *metadata = get_args(hint) or (hint,)
            for information in metadata:
                # Within Annotated, Typer takes the first name for a default.
                declared = [
                    getattr(information, "default", None),
                    *(getattr(information, "param_decls", None) or ()),
                ]
                option = next((text for text in declared if str(text).startswith("--")), None)
                yield Parameter(name, parameter, option, get_args(kind) or (kind,), information)
    for below in group.registered_groups:
        assert below.typer_instance is not None
        yield from _below(f"{prefix} {below.name}".strip(), below.typer_instance)
