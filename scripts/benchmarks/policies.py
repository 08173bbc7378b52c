"""Policies of gradients' sums between hosts: data parallelism with buckets and with P3, predicted and measured.

On two hosts of two devices joined by a wire (`scripts/testbed`, so it needs root), with whatever all-reduce is the
cheapest there. A gain is the share of the step with buckets that a policy saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts.benchmarks.collectives import gains, on_wires

if TYPE_CHECKING:
    from scripts.benchmarks.result import BenchmarkResult

BUCKETS = "fifo"
# P3's slices as in the paper, and five times as large.
POLICIES = (BUCKETS, "p3:200000", "p3:1000000")


def run(*, quick: bool) -> BenchmarkResult:
    """Measure all networks; in quick mode one, at one bandwidth.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    runs = on_wires(
        POLICIES, lambda _, policy: ("--strategy", "data-parallel", "--policy", policy), quick=quick
    )
    return gains("policies", "policy", BUCKETS, runs)
