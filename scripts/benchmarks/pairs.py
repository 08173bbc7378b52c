"""Two ways to do the same, timed in turn in the same processes: their ratio holds where the machine's speed drifts."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from profiler.pinning import child_variables, started_with, usable_cores
from runtime.launch.processes import join_group, leave_group, occupy
from scripts.benchmarks.launches import Launches, count_launches

TIMEOUT_S = 600.0
# A pair's maker: gets the device's name and the task's keywords, returns what to time.
Prepare = Callable[..., "StepPair"]


@dataclass(frozen=True, slots=True)
class StepPair:
    """One step of ours and one of theirs; both ready to run any number of times."""

    ours: Callable[[], object]
    theirs: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _BenchmarkProcess:
    """A process of a benchmark: its rank among `size`, and its core or GPU; they meet at the file `store`."""

    rank: int
    size: int
    number: int
    processor: str
    store: str


@dataclass(frozen=True, slots=True)
class _Side:
    """What one process saw of ours or of theirs: wall and processor seconds of a step, by block; launches."""

    s: tuple[list[float], list[float]]
    launches: Launches


@dataclass(frozen=True, slots=True)
class Timing:
    """One step of each: seconds, block by block, as the slowest process saw them; processor time; launches.

    ours_processor_s, theirs_processor_s: seconds of all processes and threads, block by block.
    ours_launches, theirs_launches: of the process that has most; zeros where they were not counted.
    """

    ours_s: tuple[float, ...]
    theirs_s: tuple[float, ...]
    ours_processor_s: tuple[float, ...]
    theirs_processor_s: tuple[float, ...]
    ours_launches: Launches
    theirs_launches: Launches

    @property
    def ratios(self) -> list[float]:
        """Ours / theirs, block by block."""
        return [ours_s / theirs_s for ours_s, theirs_s in zip(self.ours_s, self.theirs_s, strict=True)]

    @property
    def ratio(self) -> float:
        """The median over all blocks of ours / theirs."""
        return statistics.median(self.ratios)

    @property
    def processor_ratio(self) -> float:
        """The median over all blocks of ours / theirs, in processor time: what others do on the machine counts less."""
        pairs = zip(self.ours_processor_s, self.theirs_processor_s, strict=True)
        return statistics.median(ours_s / theirs_s for ours_s, theirs_s in pairs)


def time_pair(
    prepare: Prepare,
    processes: int,
    *,
    blocks: int,
    steps: int,
    warmup: int = 2,
    processor: str = "cpu",
    counted: bool = False,
    **keywords: Any,
) -> Timing:
    """Run a pair on processes joined by gloo or NCCL, and return its times.

    Args:
        prepare: importable by name; called in every process with the name of its device and `keywords`.
        processes: how many. On "cpu" each is pinned to a core and computes on one thread, on "cuda" each has a GPU.
        blocks: how often ours and theirs take turns; which comes first alternates.
        steps: steps in a row in one turn.
        warmup: steps of each before the first turn.
        processor: "cpu" or "cuda".
        counted: count the launches of another step of each; what `torch.compile` made does not bear it.
        keywords: for `prepare`.

    Raises:
        RuntimeError: a process failed.
    """
    context = multiprocessing.get_context("spawn")
    cores = usable_cores()
    with tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        connections, children = [], []
        with started_with(child_variables()):
            for rank in range(processes):
                near, far = context.Pipe()
                number = cores[rank % len(cores)] if processor == "cpu" else rank
                process = _BenchmarkProcess(rank, processes, number, processor, str(Path(folder) / "store"))
                child = context.Process(
                    target=_work,
                    args=(far, process, prepare, (blocks, steps, warmup, counted), keywords),
                    daemon=True,
                )
                child.start()
                far.close()
                connections.append(near)
                children.append(child)
        answers = [_answer(connection, rank) for rank, connection in enumerate(connections)]
        for child in children:
            child.join()
    walls, processors = (
        [
            tuple(
                combined(times) for times in zip(*(answer[which].s[kind] for answer in answers), strict=True)
            )
            for which in (0, 1)
        ]
        for kind, combined in ((0, max), (1, sum))
    )
    ours, theirs = (max(answer[which].launches for answer in answers) for which in (0, 1))
    return Timing(walls[0], walls[1], processors[0], processors[1], ours, theirs)


def _answer(connection: Connection, rank: int) -> tuple[_Side, _Side]:
    try:
        answer: tuple[_Side, _Side] = connection.recv()
    except EOFError:
        raise RuntimeError(f"process {rank} of the benchmark failed; see its message above") from None
    return answer


def _work(
    connection: Connection,
    process: _BenchmarkProcess,
    prepare: Prepare,
    amount: tuple[int, int, int, bool],
    keywords: dict[str, Any],
) -> None:
    blocks, steps, warmup, counted = amount
    device = occupy(process.number, process.processor)
    alone = process.size == 1
    if not alone:
        import torch.distributed as dist

        store = dist.FileStore(process.store, process.size)  # type: ignore[attr-defined]
        join_group(device, TIMEOUT_S, store=store, rank=process.rank, size=process.size)
    pair = prepare(device=device, **keywords)
    steps_of = (pair.ours, pair.theirs)
    for _ in range(warmup):
        for step in steps_of:
            step()
    sides = tuple(_Side(([], []), count_launches(step) if counted else Launches(0, 0)) for step in steps_of)
    gc.collect()
    for block in range(blocks):
        for which in (0, 1) if block % 2 == 0 else (1, 0):
            if not alone:
                dist.barrier()
            for times, taken_s in zip(sides[which].s, _block_s(steps_of[which], steps, device), strict=True):
                times.append(taken_s)
    connection.send(sides)
    connection.close()
    if not alone:
        leave_group()


def _block_s(step: Callable[[], object], steps: int, device: str) -> tuple[float, float]:
    """Return the seconds, and processor seconds, of one of `steps` steps in a row."""
    import torch

    from profiler.timers import synchronize

    synchronize(torch.device(device))
    start, processor_start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    synchronize(torch.device(device))
    wall_s, processor_s = time.perf_counter() - start, time.process_time() - processor_start
    return wall_s / steps, processor_s / steps
