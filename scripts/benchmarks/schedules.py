"""Schedules of micro-batches as executed: steps of stages that only sleep, against the papers' makespans.

Processes joined by gloo execute a chain of one small layer a stage; every forward sleeps until it has taken one unit,
every backward two, under zero-bubble one for the gradients of inputs and one for those of weights, so that a step's
time is that of the order in which stages work, and what messages and Python add. Each pair of rows is gpipe and another
schedule in turns, in the same processes, with the same work a device. Expected is the papers' time, in which messages
take none: (M + K - 1) (f + b) of K stages, of v stages a device (M + (K - 1) / v) (f + b); of zero-bubble, with b and w
for the two parts of a backward, M (f + b + w) + (K - 1) (f + b - w).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graph.schedule import MicroBatches, Schedule
from graph.strategy import Configuration, Strategy
from graph.training import Training
from runtime.instructions.base import Instruction, WrappedInstruction
from runtime.instructions.compute import (
    Call,
    Differentiate,
    DifferentiateInputs,
    DifferentiateWeights,
    EnterMicroBatch,
)
from scripts.benchmarks.pairs import StepPair, time_pair
from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number

if TYPE_CHECKING:
    from runtime.instructions.state import StepState

UNIT_S = 0.02
FORWARD, BACKWARD = 1, 2
# Of the parts of a backward, where they are apart.
PART = 1
WIDTH, SAMPLES = 8, 2
# Groups of devices, micro-batches, stages a group, and the schedule beside gpipe.
ROWS = (
    (2, 4, 1, Schedule.ONE_F_ONE_B),
    (4, 8, 1, Schedule.ONE_F_ONE_B),
    (4, 2, 1, Schedule.ONE_F_ONE_B),
    (2, 4, 1, Schedule.ACTORS),
    (4, 8, 1, Schedule.ACTORS),
    (2, 4, 2, Schedule.INTERLEAVED),
    (4, 8, 2, Schedule.INTERLEAVED),
    (2, 4, 1, Schedule.ZERO_BUBBLE),
    (4, 8, 1, Schedule.ZERO_BUBBLE),
    (4, 16, 1, Schedule.ZERO_BUBBLE),
)


def run(*, quick: bool) -> BenchmarkResult:
    """Measure steps of sleeping stages."""
    table: list[Row] = []
    for groups, count, chunks, schedule in ROWS[:1] if quick else ROWS:
        timing = time_pair(
            sleeping_pair, groups, blocks=2 if quick else 5, steps=1, warmup=1,
            groups=groups, count=count, chunks=chunks, schedule=schedule.value,
        )  # fmt: skip
        for of, stages, times_s in ((Schedule.GPIPE, 1, timing.ours_s), (schedule, chunks, timing.theirs_s)):
            # Of one of a device's stages: its own work, and the bubble of one stage less than there are devices.
            # A device has the same work whatever its number of stages.
            idle = FORWARD if of is Schedule.ZERO_BUBBLE else FORWARD + BACKWARD
            units = (FORWARD + BACKWARD) * count * stages + idle * (groups - 1)
            expected_s = units * UNIT_S * chunks / stages
            measured_s = statistics.median(times_s)
            table.append(
                {
                    "schedule": of.value,
                    "groups": groups,
                    "stages a group": stages,
                    "micro-batches": count,
                    "expected ms": expected_s * 1e3,
                    "measured ms": measured_s * 1e3,
                    "off": measured_s / expected_s - 1,
                }
            )
    return BenchmarkResult(
        benchmark="schedules",
        conditions={"unit": f"{UNIT_S * 1e3:g} ms", "forward": FORWARD, "backward": BACKWARD},
        measurements=[
            measurement(
                "largest deviation", 100 * max(abs(number(row, "off")) for row in table), "%", at_most=5.0
            )
        ],
        table=table,
        formats={"expected ms": ".1f", "measured ms": ".1f", "off": "+.1%"},
    )


def sleeping_pair(device: str, groups: int, count: int, chunks: int, schedule: str) -> StepPair:
    """Return gpipe with one stage a group, and another schedule with `chunks` of them, both of the same work."""
    return StepPair(
        _sleeping_step(device, groups, 1, MicroBatches(count, Schedule.GPIPE), chunks * UNIT_S),
        _sleeping_step(device, groups, chunks, MicroBatches(count, Schedule(schedule)), UNIT_S),
    )


def _sleeping_step(
    device: str, groups: int, chunks: int, micro_batches: MicroBatches, unit_s: float
) -> Callable[[], None]:
    """Return a step of `groups` x `chunks` stages of one layer each."""
    import torch
    from torch import nn

    from graph.importer import import_module
    from runtime.communication import World
    from scripts.benchmarks.runtime import executor_of

    class MeanSquare(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().mean()

    torch.manual_seed(0)
    stages = groups * chunks
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(stages)]
    module = nn.Sequential(*layers, MeanSquare())
    graph = import_module(module, (torch.randn(SAMPLES, WIDTH),), {}, name="chain")
    if len(graph.operators) < stages:
        raise ValueError(f"chain: has {len(graph.operators)} operators, must have one a stage, {stages}")
    configurations = tuple(
        Configuration((1,) * len(operator.space.axes), (min(index, stages - 1) % groups,))
        for index, operator in enumerate(graph.operators)
    )
    strategy = Strategy(graph.digest, configurations, micro_batches=micro_batches)
    strategy.validate(graph, groups)
    batch = torch.randn(SAMPLES * micro_batches.count, WIDTH)
    executor = executor_of(graph, strategy, (module, (batch,), {}), Training(len(batch)), device, 0.01)
    instructions = tuple(_slowed(executor.program.instructions, unit_s))
    world = World(groups)

    def step() -> None:
        with executor.running(instructions, world):
            executor.step(0)

    return step


@dataclass(frozen=True, slots=True)
class _Sleeping(WrappedInstruction):
    """An instruction that lasts a given number of seconds: its own computation, then a sleep for the time left."""

    seconds: float

    def run(self, state: StepState) -> None:
        ends = time.perf_counter() + self.seconds
        self.inner.run(state)
        time.sleep(max(0.0, ends - time.perf_counter()))


def _slowed(instructions: Sequence[Instruction], unit_s: float) -> Iterator[Instruction]:
    """Yield the instructions; the first call of a forward, and the first differentiation of a backward, sleep.

    In parts, the first of each part does: beside them there are operators without weights.
    """
    sleeps: dict[type[Instruction], float] = {}
    parts: dict[type[Instruction], float] = {
        DifferentiateInputs: PART * unit_s,
        DifferentiateWeights: PART * unit_s,
    }
    in_parts = any(type(instruction) in parts for instruction in instructions)
    for instruction in instructions:
        if isinstance(instruction, EnterMicroBatch):
            sleeps = {Call: FORWARD * unit_s}
            sleeps.update(parts if in_parts else {Differentiate: BACKWARD * unit_s})
        inner = instruction.inner if isinstance(instruction, WrappedInstruction) else instruction
        if type(inner) in sleeps:
            yield _Sleeping(instruction, sleeps.pop(type(inner)))
        else:
            yield instruction
