"""Scheduling efficiency and speed-up potential of a step, simulated or recorded.

Source: TicTac (SysML 2019). With m the makespan, U the time of all operations together and L that of the operations of
the busiest resource: E = (U - m) / (U - L), S = (U - L) / L.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheduling:
    """A step's makespan, and the least and the most that an order can make of its operations: L <= m <= U."""

    makespan_ns: int
    busiest_ns: int
    total_ns: int

    @property
    def efficiency(self) -> float:
        """E: the share of what a good order can save that is saved; 1 where the busiest resource never stands still.

        Where U = L, one resource does all there is: no order is better or worse, and E is 1.
        """
        if self.total_ns <= self.busiest_ns:
            return 1.0
        return (self.total_ns - self.makespan_ns) / (self.total_ns - self.busiest_ns)

    @property
    def speedup_potential(self) -> float:
        """S: by how much running side by side can speed up what runs one after the other at most; of nothing, 0."""
        return (self.total_ns - self.busiest_ns) / self.busiest_ns if self.busiest_ns else 0.0

    def to_json(self) -> dict[str, float]:
        """Return times in seconds, efficiency and potential as a JSON document."""
        return {
            "step_s": self.makespan_ns / 1e9,
            "busiest_s": self.busiest_ns / 1e9,
            "total_s": self.total_ns / 1e9,
            "scheduling_efficiency": self.efficiency,
            "speedup_potential": self.speedup_potential,
        }
