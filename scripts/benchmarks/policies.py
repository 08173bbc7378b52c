"""Policies of gradients' sums between hosts: data parallelism with buckets and with P3, predicted and measured.

On two hosts of two devices joined by a wire (`scripts/testbed`, so it needs root), with whatever all-reduce is the
cheapest there. A gain is the share of the step with buckets that a policy saves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from scripts.benchmarks import collectives
from scripts.benchmarks.collectives import BANDWIDTHS, DEVICES, ITERATIONS, QUICK, SIZES, WireRun, gains
from scripts.benchmarks.on_testbed import Command, app, hosts

if TYPE_CHECKING:
    from scripts.benchmarks.result import BenchmarkResult

NETWORKS = collectives.__name__

BUCKETS = "fifo"
# P3's slices as in the paper, and five times as large.
POLICIES = (BUCKETS, "p3:200000", "p3:1000000")


def run(*, quick: bool) -> BenchmarkResult:
    """Measure all networks; in quick mode one, at one bandwidth.

    Raises:
        RuntimeFailure: a command failed; the message holds what it said.
    """
    networks, bandwidths = (QUICK, BANDWIDTHS[:1]) if quick else (tuple(SIZES), BANDWIDTHS)
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        command = partial(app, f"sqlite:///{folder}/x.sqlite")
        for network in networks:
            command("profile", "--model", f"{NETWORKS}:{network}", "--device", "cpu", "--devices", "2")
        runs = [ran for bandwidth in bandwidths for ran in _measured(command, bandwidth, networks)]
    return gains("policies", "policy", BUCKETS, runs)


def _measured(command: Command, bandwidth: str, networks: tuple[str, ...]) -> Iterator[WireRun]:
    name = f"wire-{bandwidth}"
    with hosts(bandwidth, devices=DEVICES) as on_hosts:
        on_hosts(command, "topology", "probe", "--device", "cpu", "--name", name)
        for network in networks:
            for policy in POLICIES:
                ran = on_hosts(
                    command, "run", "--model", f"{NETWORKS}:{network}", "--topology", name,
                    "--strategy", "data-parallel", "--policy", policy, "--iterations", str(ITERATIONS),
                )  # fmt: skip
                yield WireRun(network, bandwidth, policy, ran["predicted_step_time_s"], ran["median_s"])
