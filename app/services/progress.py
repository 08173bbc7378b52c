"""Progress of a service: the command line draws it, other callers may ignore it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of a long use case while it runs."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def warn(self, text: str) -> None:
        """A line about something that makes a result weaker."""

    def begin(self, text: str, total: int | None) -> None:
        """A stage starts; `total` steps, None where the number is unknown."""

    def advance(self, steps: int = 1, text: str | None = None) -> None:
        """The current stage went `steps` steps on; `text` replaces its description."""

    def end(self) -> None:
        """The current stage is over."""


class Silent:
    """A progress that says nothing."""

    def say(self, text: str) -> None:
        """Ignore a line."""

    def warn(self, text: str) -> None:
        """Ignore a warning."""

    def begin(self, text: str, total: int | None) -> None:
        """Ignore a stage."""

    def advance(self, steps: int = 1, text: str | None = None) -> None:
        """Ignore a step."""

    def end(self) -> None:
        """Ignore the end of a stage."""
