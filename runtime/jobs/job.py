"""A job: a strategy to execute for a number of iterations, and its result."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graph.collective_algorithms import Choices
from graph.errors import RuntimeFailure
from graph.operators import OperatorGraph
from graph.pulls import Pull
from graph.strategy import Strategy
from graph.texts import counted
from graph.training import Training
from runtime.jobs.models import ModelReference
from runtime.jobs.verify import Verification
from runtime.observe.spans import Communications, RecordedSteps

if TYPE_CHECKING:
    import numpy as np

    from graph.plan import Plan
    from runtime.observe.measured_peak import MeasuredPeak

    Arrays = dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A strategy to execute.

    graph: the operator graph of `model`.
    strategy: a validated strategy; its device r is rank r.
    node_of: for each device, its node.
    training: optimizer and precision.
    model: builds the module that holds parameters, buffers and inputs.
    seed: of the parameters and of dropout.
    iterations, warmup: measured steps, and steps before them.
    learning_rate: of the optimizer.
    verify: compare loss and every gradient with the graph on one device (`runtime.jobs.verified_program`), before the
    run. collect: return gradients of the first step, and weights and buffers after the last one.
    recorded: steps after the measured ones whose timeline is recorded (`runtime.observe.recorder`).
    communications: whether recorded steps have messages and collectives, too; these make waits a little longer.
    asleep: a recorded step is issued while the rank's GPU sleeps: spans are what the device takes by itself, and the
        time in which the host issued each stands beside it. On a CPU it changes nothing.
    peak: measure the peak memory of one more step, the last (`runtime.observe.measured_peak`).
    all_reduces: by ranks, the algorithms of all-reduces over them; of others the library's own.
    slice_order, gather_order, pulls: in which order slices of buckets are summed, and updated weights or slices
        gathered (`graph.plan.Plan`); without one, as buckets become full.
    """

    graph: OperatorGraph
    strategy: Strategy
    node_of: tuple[int, ...]
    training: Training
    model: ModelReference
    seed: int = 0
    iterations: int = 10
    warmup: int = 2
    learning_rate: float = 1e-3
    verify: bool = False
    collect: bool = False
    recorded: int = 0
    communications: bool = False
    asleep: bool = False
    peak: bool = False
    all_reduces: Mapping[tuple[int, ...], Choices] = field(default_factory=dict)
    slice_order: tuple[int, ...] = ()
    gather_order: tuple[int, ...] = ()
    pulls: tuple[Pull, ...] = ()

    @property
    def steps(self) -> int:
        """Steps to execute; at least one."""
        return max(self.warmup + self.iterations, 1)

    def plan(self, graph: OperatorGraph | None = None, bucket_bytes: int | None = None) -> Plan:
        """Return the plan of the strategy in the job's orders; of another graph, or with other buckets, where given."""
        from graph.plan import build_plan

        return build_plan(
            self.graph if graph is None else graph,
            self.strategy,
            self.node_of,
            bucket_bytes,
            slice_order=self.slice_order,
            gather_order=self.gather_order,
            pulls=self.pulls,
        )

    def without_caches(self) -> Job:
        """Return an equal job that is small to send: without the caches of a search on its graph."""
        return replace(self, graph=replace(self.graph, _cache={}))


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job.

    step_times_s: for each measured iteration, the longest time of any rank after a barrier; of steps that
        leave work to the next one, from the end of one step, on the last rank, to the end of the next.
    rank_times_s: the same by rank and iteration.
    losses: of every step, warm-up included.
    verification: where asked for.
    peaks: the peak memory of a step, by rank, where asked for.
    gradients, weights, buffers: whole tensors, where asked for.
    recorded: the timelines of the recorded steps. communications: those of each, where asked for.
    lost_s: for each measured iteration, the seconds that each rank lost to other processes; None: not counted.
    reference_s: what the reference kernel took between the measured steps and behind them (`profiler.reference`), of
        steps in succession before and behind all; the mean over the ranks; None on GPUs, and without any.
    """

    step_times_s: tuple[float, ...]
    rank_times_s: tuple[tuple[float, ...], ...]
    losses: tuple[float, ...]
    verification: Verification | None
    peaks: tuple[MeasuredPeak, ...] = ()
    gradients: Arrays | None = None
    weights: Arrays | None = None
    buffers: Arrays | None = None
    recorded: RecordedSteps = ()
    communications: Communications = ()
    lost_s: tuple[tuple[float, ...], ...] | None = None
    reference_s: float | None = None

    @property
    def minimum_s(self) -> float:
        """The shortest measured step."""
        return min(self.step_times_s)

    @property
    def median_s(self) -> float:
        """The median measured step."""
        return statistics.median(self.step_times_s)

    @property
    def most_lost_s(self) -> tuple[float, ...] | None:
        """For each measured iteration, the most that one rank lost to other processes; None: not counted."""
        return None if self.lost_s is None else tuple(max(of_step) for of_step in self.lost_s)

    @property
    def undisturbed_s(self) -> float | None:
        """The step without what other processes took of the cores; None where that was not counted.

        Ranks wait for each other, so that a step loses at least what one rank loses. That is taken off the half of the
        steps that lost least; the median of them.
        """
        lost = self.most_lost_s
        if not lost:
            return None
        most_s = statistics.median_low(lost)
        return statistics.median(
            step_s - lost_s
            for step_s, lost_s in zip(self.step_times_s, lost, strict=True)
            if lost_s <= most_s
        )


def run_job(job: Job, device: str = "cpu", timeout_s: float = 1800.0) -> JobResult | None:
    """Execute this rank's share of a job; return the result on rank 0, None elsewhere.

    All ranks of the default process group must call it, and be at least as many as the strategy has devices; ranks
    beyond them only help to make groups. A strategy of one device needs no process group.

    Raises:
        RuntimeFailure: too few ranks, or another rank is lost.
    """
    import torch.distributed as dist

    from profiler.operators.dtypes import multiply_in_tf32
    from runtime.jobs.run import JobRun
    from runtime.ranks.ranks import prepare_groups

    size = job.strategy.device_count
    available = dist.get_world_size() if dist.is_initialized() else 1
    if size > available:
        raise RuntimeFailure(
            f"run: has {counted(available, 'process', 'processes')}, must have {size}, one for each device of the "
            "strategy; start more"
        )
    plan = job.plan()
    prepare_groups(plan, size, timeout_s, job.all_reduces)
    if dist.is_initialized() and dist.get_rank() >= size:
        return None
    multiply_in_tf32(allowed=job.training.precision == "tf32")
    if dist.is_initialized():
        # A process of a rank's own, in which what is loaded stays: collections before measured steps pass it by.
        gc.collect()
        gc.freeze()
    return JobRun(job, plan, device).result()
