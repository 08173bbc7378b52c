"""Sharing more, or making more again, where what was found does not fit after all.

Algorithms `sharding` and `recomputation` go by the sum of memory that a search keeps, and do no more than must be. A
device's program may take more than the sum says (`app.services.predict.peak_memory`): then by so much less memory is
left to the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from app.services.predict.predict import Setting
from app.services.search.run_algorithms import problem_of
from graph.strategy import Strategy
from graph.topology import Topology
from search.algorithms.greedy import TrialResult
from search.algorithms.mcmc import SearchOptions

ROUNDS = 3
"""A strategy that is changed takes more beyond its sum by another amount, though seldom by much."""

# The bytes that each device takes: by its program, or by the sum.
Peaks = Callable[[Strategy], Sequence[int]]


def made_to_fit(
    setting: Setting,
    strategy: Strategy,
    change: Callable[..., TrialResult],
    options: SearchOptions,
    walked: Peaks,
    summed: Peaks,
) -> Strategy:
    """Return the strategy changed so far that all programs fit, or the last that was tried.

    Args:
        setting: what it is for.
        strategy: the strategy.
        change: `search.algorithms.weight_sharding.share_weights` or
            `search.algorithms.activation_checkpointing.recompute`.
        options: of the search.
        walked: the bytes of each device by its program.
        summed: those by the sum.

    Raises:
        CostError: a local call has no cost.
    """
    for _ in range(ROUNDS):
        beyond = [
            max(0, most - least) for most, least in zip(walked(strategy), summed(strategy), strict=True)
        ]
        # Not the builder of the setting, which knows of all the memory.
        problem = replace(problem_of(setting), topology=_with_less(setting.topology, beyond), builder=None)
        tried = change(problem, (strategy,), most=max(1, options.proposals), order=options.order).strategy
        if tried == strategy:
            break
        strategy = tried
        if _fits(setting.topology, walked(strategy)):
            break
    return strategy


def _with_less(topology: Topology, beyond: Sequence[int]) -> Topology:
    """Return the topology with less memory: of each kind by the most that one of its devices takes beyond its sum."""
    most: dict[str, int] = {}
    for device, size_bytes in zip(topology.devices, beyond, strict=True):
        most[device.kind_name] = max(most.get(device.kind_name, 0), size_bytes)
    kinds = tuple(
        replace(kind, memory_bytes=max(1, kind.memory_bytes - most.get(kind.name, 0)))
        for kind in topology.kinds
    )
    return replace(topology, kinds=kinds)


def _fits(topology: Topology, peaks: Sequence[int]) -> bool:
    return all(peak <= topology.kind_of(device).memory_bytes for device, peak in enumerate(peaks))
