"""Progress of a service: the command line draws it, other callers may ignore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Receives the progress of a long use case while it runs; this one ignores it, and its children show it."""

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

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """A stage of unknown length, which is over when the context is left."""
        self.begin(text, None)
        try:
            yield
        finally:
            self.end()
