"""Another strategy in place of one that does not fit after all.

Algorithms go by the sum of memory that a search keeps, and use all that there is. A device's program may take more than
that sum (`app.services.predict.predicted_peaks`): then the sum gets so much less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from app.services.predict.predict import Setting
from app.services.predict.problem import problem_of
from app.services.progress import Progress
from app.services.search.run_algorithms import SearchPlan, run_again
from graph.errors import StrategyError
from graph.strategy import Strategy
from graph.topology import Topology
from search.problem import Problem

ROUNDS = 3
"""The changed strategy exceeds its sum by another amount, though seldom by much."""

# Peak memory of each device, in bytes.
Peaks = Callable[[Strategy], Sequence[int]]


def repair_memory(
    setting: Setting,
    strategy: Strategy,
    change: Callable[[Problem, Strategy], Strategy],
    program_peaks: Peaks,
    summed_peaks: Peaks,
) -> Strategy:
    """Return the strategy changed until all programs fit, or the last one that was tried.

    Args:
        setting: of the strategy.
        strategy: does not fit.
        change: returns a strategy, begun at another one or not, for a problem whose devices have less memory.
        program_peaks: by a walk over the devices' programs.
        summed_peaks: by the search's sum.

    Raises:
        CostError: a local call has no cost.
    """
    for _ in range(ROUNDS):
        peaks = zip(program_peaks(strategy), summed_peaks(strategy), strict=True)
        excesses = [max(0, program - summed) for program, summed in peaks]
        # Without the builder of the setting, which has all the memory.
        problem = replace(problem_of(setting), topology=_with_less(setting.topology, excesses), builder=None)
        changed = change(problem, strategy)
        if changed == strategy:
            break
        strategy = changed
        if _fits(setting.topology, program_peaks(strategy)):
            break
    return strategy


class SearchAgain:
    """Runs the algorithms of a plan again for a problem with less memory, until the user interrupts it."""

    def __init__(self, setting: Setting, plan: SearchPlan, progress: Progress) -> None:
        self._setting, self._plan, self._progress = setting, plan, progress
        self._interrupted = False

    def __call__(self, problem: Problem, strategy: Strategy) -> Strategy:
        """Return the strategy that the algorithms find; the given one where nothing fits, or after an interruption."""
        if self._interrupted:
            return strategy
        try:
            result = run_again(self._setting, self._plan, problem, strategy, self._progress)
        except StrategyError:
            return strategy
        self._interrupted = result.interrupted
        return result.strategy


def _with_less(topology: Topology, excesses: Sequence[int]) -> Topology:
    """Return the topology with less memory: of each kind by the largest excess, in bytes, of a device of the kind."""
    most: dict[str, int] = {}
    for device, size_bytes in zip(topology.devices, excesses, strict=True):
        most[device.kind_name] = max(most.get(device.kind_name, 0), size_bytes)
    kinds = tuple(
        replace(kind, memory_bytes=max(1, kind.memory_bytes - most.get(kind.name, 0)))
        for kind in topology.kinds
    )
    return replace(topology, kinds=kinds)


def _fits(topology: Topology, peaks: Sequence[int]) -> bool:
    return all(peak <= topology.kind_of(device).memory_bytes for device, peak in enumerate(peaks))
