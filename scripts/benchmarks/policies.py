"""Policies between hosts, predicted and measured: gradients' sums in buckets and by P3, gathers by TIC and TAC.

On two hosts of two devices joined by a wire (`scripts/testbed`, so it needs root), with whatever all-reduce is the
cheapest there. A gain is the share of the step with buckets that a policy saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.benchmarks.collectives import gains, on_wires

if TYPE_CHECKING:
    from scripts.benchmarks.result import BenchmarkResult

# Strategies with the policies of their synchronization; the first of each is what its others are compared with. P3's
# slices are as in the paper, and five times as large.
WAYS = (
    "data-parallel fifo", "data-parallel p3:200000", "data-parallel p3:1000000",
    "zero fifo", "zero tic", "zero tac", "zero p3:1000000",
)  # fmt: skip


def run(*, quick: bool) -> BenchmarkResult:
    """Measure all networks; in quick mode one, at one bandwidth.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    runs = on_wires(WAYS, lambda _, way: _arguments(way), quick=quick)
    return gains("policies", "policy", lambda way: f"{way.split()[0]} fifo", runs)


def _arguments(way: str) -> tuple[str, ...]:
    strategy, policy = way.split()
    return ("--strategy", strategy, "--policy", policy)
