"""One rank's run of a job: build, step, time, verify, collect."""

from __future__ import annotations

import gc
from itertools import chain
from typing import TYPE_CHECKING

import torch

from graph.plan import Plan
from profiler.operators.counter_rng import forget_positions
from profiler.others import LostTime
from profiler.timers import timer_for
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
    from runtime.observe.measured_peak import MeasuredPeak
    from runtime.observe.spans import Span


class JobRun:
    """A job on this rank."""

    def __init__(self, job: Job, plan: Plan, device: str) -> None:
        """Build the module and compile the rank's program."""
        self._job = job
        self._device = torch.device(device)
        self._world = World(job.strategy.device_count, job.all_reduces)
        self._plan = plan
        heartbeat("building the module")
        self._tensors = tensors_of(job.graph, job.model.build(job.seed))
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
        losses = []
        times: list[float] = []
        lost: list[float | None] = []
        gradients: Arrays | None = None
        for number in range(job.steps):
            elapsed_s, lost_s = self._timed_step(number)
            if job.warmup <= number < job.warmup + job.iterations:
                times.append(elapsed_s)
                lost.append(lost_s)
            losses.append(self._executor.loss())
            if number == 0 and job.collect:
                gradients = self._collect_gradients()
        weights: Arrays | None = None
        buffers: Arrays | None = None
        if job.collect:
            weights, buffers = self._collect_state()
        recorded = [self._recorded_step(job.steps + number) for number in range(job.recorded)]
        peak = self._peak_of_step(job.steps + job.recorded) if job.peak else None
        measured = self._world.gather((tuple(times), tuple(lost), peak, recorded))
        if measured is None:
            return None
        rank_times, rank_lost, peaks, rank_recorded = zip(*measured, strict=True)
        return JobResult(
            step_times_s=tuple(max(times_of_step) for times_of_step in zip(*rank_times, strict=True)),
            rank_times_s=rank_times,
            losses=tuple(losses),
            verification=None if self._verified is None else self._verified.with_run(losses[0]),
            lost_s=None if None in chain(*rank_lost) else tuple(zip(*rank_lost, strict=True)),
            peaks=tuple(peak for peak in peaks if peak is not None),
            gradients=gradients,
            weights=weights,
            buffers=buffers,
            recorded=tuple(zip(*rank_recorded, strict=True)),
        )

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

    def _recorded_step(self, number: int) -> tuple[Span, ...]:
        from runtime.observe.recorder import record_step

        heartbeat(f"in recorded step {number}")
        gc.collect()
        return tuple(record_step(self._executor, self._plan, self._world, self._device, number))

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
        with self._world.settling():
            return measure_peak(lambda: self._executor.step(number), self._device)


def _arrays(tensors: dict[str, torch.Tensor]) -> Arrays:
    """Return tensors as arrays; numpy has no bfloat16, whose values float32 holds exactly."""
    cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return {
        name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in cpu.items()
    }
