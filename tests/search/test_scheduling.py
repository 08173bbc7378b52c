"""Scheduling efficiency and speed-up potential, as TicTac defines them."""

import pytest

from search.simulate.scheduling import Scheduling


@pytest.mark.parametrize(
    ("makespan", "busiest", "total", "efficiency", "potential"),
    [
        # Two branches of communications (3, 1) and computations (1, 3), in both orders.
        (5, 4, 8, 0.75, 1.0),
        (7, 4, 8, 0.25, 1.0),
        (4, 4, 8, 1.0, 1.0),
        (8, 4, 8, 0.0, 1.0),
        # One resource does all there is.
        (6, 6, 6, 1.0, 0.0),
        (0, 0, 0, 1.0, 0.0),
        # Three alike side by side.
        (2, 2, 6, 1.0, 2.0),
    ],
)
def test_known_steps(makespan: int, busiest: int, total: int, efficiency: float, potential: float) -> None:
    scheduling = Scheduling(makespan, busiest, total)
    assert (scheduling.efficiency, scheduling.speedup_potential) == (efficiency, potential)
