"""What a strategy costs, as the search compares strategies."""

from __future__ import annotations

from dataclasses import dataclass

NEVER_NS = 2**63 - 1
"""Beyond every makespan."""


@dataclass(frozen=True, slots=True, order=True)
class Outcome:
    """What a strategy costs: bytes beyond the devices' memories come first, then nanoseconds."""

    excess_bytes: int
    step_time_ns: int

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite where the memory does not suffice."""
        return self.step_time_ns / 1e9 if self.excess_bytes == 0 else float("inf")
