"""One rank's run of a job: build, step, time, verify, collect."""

from __future__ import annotations

import gc
import math
import statistics
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch

from graph.plan import Plan
from profiler.operators.counter_rng import forget_positions
from profiler.others import LostTime
from profiler.reference import ReferenceKernel
from profiler.timers import MOST_SLEEP_CYCLES, timer_for
from runtime.communication import World
from runtime.execution.executor import Executor, InitialTensors
from runtime.execution.full_state import full_buffers, full_weights
from runtime.jobs.job import Job, JobResult
from runtime.jobs.models import tensors_of
from runtime.jobs.verified_program import collect_gradients, verify_strategy
from runtime.jobs.verify import Verification
from runtime.ranks.watchdog import heartbeat

if TYPE_CHECKING:
    from runtime.jobs.job import Arrays
    from runtime.observe.communication_clock import CommunicationClock
    from runtime.observe.measured_peak import MeasuredPeak
    from runtime.observe.spans import RecordedStep

# Beyond it a device that awakes before a step is issued has a host that waits for it.
LONGEST_SLEEP_CYCLES = 8 * MOST_SLEEP_CYCLES


@dataclass(slots=True)
class _Steps:
    """Seconds of the measured steps on this rank, and those lost to other processes; of every step the loss.

    reference_s: what the reference kernel took between and behind them, of steps in succession before and behind all of
        them; None on GPUs.
    ends_s: of steps in succession, when the first one began and each one ended, since a barrier of all ranks.
    """

    times_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    lost_s: list[float | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: Arrays | None = None
    reference_s: float | None = None


class JobRun:
    """A job on this rank."""

    def __init__(self, job: Job, plan: Plan, device: str) -> None:
        """Build the module and compile the rank's program."""
        self._job = job
        self._device = torch.device(device)
        self._world = World(job.strategy.device_count, job.all_reduces)
        self._plan = plan
        heartbeat("building the module")
        self._tensors = tensors_of(job.graph, job.model.build(job.seed), job.strategy.micro_batches.count)
        # Before the run's own tensors are made, so that the two are not in memory at once.
        self._verified = self._verify() if job.verify else None
        # Cached positions of an earlier job or the verification's whole network would take memory beside the run's.
        forget_positions()
        heartbeat("compiling its program")
        self._executor = Executor(
            self._plan,
            self._world,
            self._tensors,
            job.training,
            seed=job.seed,
            learning_rate=job.learning_rate,
            device=self._device,
        )
        if not job.collect:
            # The rank has its parts: on a CPU the whole module would take memory beside them.
            self._tensors = InitialTensors({}, {}, {})

    def result(self) -> JobResult | None:
        """Execute all steps; return the result on rank 0."""
        job = self._job
        steps = self._measured_steps()
        weights: Arrays | None = None
        buffers: Arrays | None = None
        if job.collect:
            weights, buffers = self._collect_state()
        recorded = self._recorded_steps()
        peak = self._peak_of_step(job.steps + job.recorded) if job.peak else None
        measured = self._world.gather(
            (
                tuple(steps.times_s),
                tuple(steps.ends_s),
                tuple(steps.lost_s),
                steps.reference_s,
                peak,
                recorded,
            )
        )
        if measured is None:
            return None
        rank_times, rank_ends, rank_lost, references, peaks, rank_recorded = zip(*measured, strict=True)
        recorded_steps = tuple(zip(*rank_recorded, strict=True))
        longest = [max(times_of_step) for times_of_step in zip(*rank_times, strict=True)]
        if steps.ends_s:
            # The slowest rank is another in each step: what one is late in a step it has less to wait in the next.
            latest = [max(ends) for ends in zip(*rank_ends, strict=True)]
            longest = [end - begin for begin, end in pairwise(latest)]
        return JobResult(
            step_times_s=tuple(longest),
            rank_times_s=rank_times,
            losses=tuple(steps.losses),
            verification=None if self._verified is None else self._verified.with_run(steps.losses[0]),
            lost_s=None if None in chain(*rank_lost) else tuple(zip(*rank_lost, strict=True)),
            reference_s=None if None in references else statistics.fmean(references),
            peaks=tuple(peak for peak in peaks if peak is not None),
            gradients=steps.gradients,
            weights=weights,
            buffers=buffers,
            recorded=tuple(tuple(step.spans for step in ranks) for ranks in recorded_steps),
            communications=tuple(
                tuple(step.communications for step in ranks) for ranks in recorded_steps if job.communications
            ),
        )

    def _measured_steps(self) -> _Steps:
        """Execute the steps, on a CPU core between samples of its speed if any of them is measured."""
        kernel = ReferenceKernel() if self._device.type == "cpu" and self._job.iterations else None
        if self._executor.in_succession:
            # Between two of these steps a sample would hide the first one's sums.
            if kernel is not None:
                kernel.sample()
            steps = self._steps_in_succession()
        else:
            steps = self._steps_apart(kernel)
        if kernel is not None:
            kernel.sample()
            steps.reference_s = kernel.recent_s(math.inf)
        return steps

    def _steps_apart(self, kernel: ReferenceKernel | None) -> _Steps:
        """Execute the steps one by one, each behind a barrier; time the reference kernel between measured ones."""
        job, steps = self._job, _Steps()
        for number in range(job.steps):
            if kernel is not None and number >= job.warmup:
                kernel.sample()
            elapsed_s, lost_s = self._timed_step(number)
            if job.warmup <= number < job.warmup + job.iterations:
                steps.times_s.append(elapsed_s)
                steps.lost_s.append(lost_s)
            steps.losses.append(self._executor.loss())
            if number == 0 and job.collect:
                steps.gradients = self._collect_gradients()
        return steps

    def _steps_in_succession(self) -> _Steps:
        """Execute the steps one behind the other: a barrier, or a sum of losses, would wait for the last one's sums.

        A step's time is that from the end of the step before it, which leaves a part of its work to it, to its own end.
        """
        job, steps = self._job, _Steps()
        timer = timer_for(self._device)
        marks: list[Any] = []
        losses = []
        self._world.barrier(self._device)
        together = timer.mark()
        lost = LostTime()
        for number in range(job.steps):
            heartbeat(f"in step {number}")
            if number == max(job.warmup - 1, 0):
                # No garbage of building or verifying may be collected inside a measured step.
                gc.collect()
            if number == job.warmup:
                marks.append(timer.mark())
                lost = LostTime()
            self._executor.step(number)
            losses.append(self._executor.own_loss().clone())
            if job.warmup <= number < job.warmup + job.iterations:
                marks.append(timer.mark())
                steps.lost_s.append(lost.seconds())
                lost = LostTime()
            if number == 0 and job.collect:
                steps.gradients = self._collect_gradients()
        self._executor.finish()
        self._world.wait_for_device(self._device)
        steps.ends_s = [timer.elapsed_s(together, mark) for mark in marks]
        steps.times_s = [end - begin for begin, end in pairwise(steps.ends_s)]
        steps.losses = self._world.sum(torch.stack(losses)).tolist()
        return steps

    def _timed_step(self, number: int) -> tuple[float, float | None]:
        """Return the seconds of a step, and those that this rank lost to other processes meanwhile."""
        timer = timer_for(self._device)
        heartbeat(f"in step {number}")
        if number == self._job.warmup:
            # No garbage of building or verifying may be collected inside a measured step.
            gc.collect()
        self._world.barrier(self._device)
        lost = LostTime()
        start = timer.mark()
        self._executor.step(number)
        end = timer.mark()
        self._world.wait_for_device(self._device)
        return timer.elapsed_s(start, end), lost.seconds()

    def _recorded_steps(self) -> list[RecordedStep]:
        if not self._job.recorded:
            return []
        from runtime.observe.communication_clock import CommunicationClock

        communications = CommunicationClock(self._device) if self._job.communications else None
        steps = []
        try:
            for number in range(self._job.steps, self._job.steps + self._job.recorded):
                heartbeat(f"in recorded step {number}")
                gc.collect()
                steps.append(self._recorded_step(number, communications))
        finally:
            if communications is not None:
                communications.close()
        return steps

    def _recorded_step(self, number: int, communications: CommunicationClock | None) -> RecordedStep:
        """Return a recorded step; repeat it with a longer sleep where a device awoke too early."""
        from runtime.observe.recorder import record_step

        cycles = MOST_SLEEP_CYCLES if self._job.asleep and self._device.type == "cuda" else 0
        while True:
            step = record_step(
                self._executor,
                self._plan,
                self._world,
                self._device,
                number,
                communications=communications,
                sleep_cycles=cycles,
            )
            if not cycles:
                return step
            # Where one device awoke too early, all sleep for longer.
            woken = self._world.sum(torch.tensor(float(not step.is_ahead), device=self._device))
            if not woken.item() or cycles >= LONGEST_SLEEP_CYCLES:
                return step
            cycles *= 2

    def _verify(self) -> Verification | None:
        heartbeat("verifying")
        verified = verify_strategy(self._job, self._world, self._tensors, self._device)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        return verified

    def _collect_gradients(self) -> Arrays:
        whole = collect_gradients(self._plan, self._world, self._executor, self._tensors, self._device)
        return _arrays(whole)

    def _collect_state(self) -> tuple[Arrays, Arrays]:
        weights = full_weights(
            self._plan, self._world, self._executor.weights(), self._tensors.parameters, self._device
        )
        buffers = full_buffers(self._world, self._executor.buffers(), self._tensors.buffers)
        return _arrays(weights), _arrays(buffers)

    def _peak_of_step(self, number: int) -> MeasuredPeak:
        from runtime.observe.measured_peak import measure_peak

        heartbeat(f"in step {number}, whose memory is measured")
        self._executor.forget_step()

        def whole_step() -> None:
            self._executor.step(number)
            # Sums under way in threads of gloo, where torch's profiler ends, would write to memory that it has freed.
            self._executor.finish()

        with self._world.settling():
            return measure_peak(whole_step, self._device)


def _arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Return tensors as arrays; numpy has no bfloat16, whose values float32 holds exactly."""
    cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in cpu.items()
    }
