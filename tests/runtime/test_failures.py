"""A rank that fails ends the run on all ranks within seconds, and is named."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import psutil
import pytest

from graph.axes import AxisKind
from graph.errors import RuntimeFailure, UsageError
from graph.schedule import Schedule
from runtime.jobs.job import Job, run_job
from runtime.jobs.models import ModelReference
from runtime.launch.torchrun import launch
from tests.runtime.oracle import graph_of, make_job, reference
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind, in_micro_batches, in_turn, staged


def job_of(model: ModelReference) -> Job:
    graph = graph_of("perceptron")
    return make_job(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), model)


def test_exception_in_a_pool_names_the_rank() -> None:
    with LocalPool(2, timeout_s=60) as pool:
        with pytest.raises(RuntimeFailure, match=r"^rank 1: ValueError: no such weights$"):
            pool.run(job_of(ModelReference("tests.runtime.models:failing", {"rank": 1})))
        with pytest.raises(RuntimeFailure, match="failed before"):
            pool.run(job_of(reference("perceptron")))


class Unreadable:
    """Something that can be sent, and not read."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("none",)


def test_a_job_that_cannot_be_read_in_a_pool_says_why() -> None:
    job = job_of(ModelReference("tests.runtime.models:failing", {"rank": Unreadable()}))
    with (
        LocalPool(1, timeout_s=60) as pool,
        pytest.raises(RuntimeFailure, match=r"^rank 0: ValueError: .*'none'"),
    ):
        pool.run(replace(job, strategy=in_turn(job.graph, [0]), node_of=(0,)))


@pytest.mark.parametrize(
    ("stages", "schedule"), [(1, Schedule.GPIPE), (2, Schedule.ONE_F_ONE_B), (2, Schedule.ACTORS)]
)
def test_killed_rank_ends_the_pool(stages: int, schedule: Schedule) -> None:
    """Of two stages it is the last one, to which the first has messages of several micro-batches under way."""
    pool = LocalPool(2, timeout_s=60)
    processes = [psutil.Process(number) for number in pool.process_ids]
    killer = threading.Timer(0.5, os.kill, (pool.process_ids[1], signal.SIGKILL))
    graph = graph_of("perceptron", batch_size=2)
    strategy = by_kind(graph, [AxisKind.SAMPLE], [0, 1])
    if stages == 2:
        pipelined = staged(graph, [[0], [1]], 1, 1, split=False)
        strategy = in_micro_batches(pipelined, 4, schedule)
    model = reference("perceptron", batch_size=2 * strategy.micro_batches.count)
    endless = Job(
        graph=graph,
        strategy=strategy,
        node_of=(0, 0),
        training=make_job(graph, in_turn(graph, [0]), model).training,
        model=model,
        iterations=10**9,
    )
    killer.start()
    with pytest.raises(
        RuntimeFailure, match=r"^rank 1: its process was ended by signal SIGKILL .*out of memory"
    ):
        pool.run(endless)
    assert not any(process.is_running() for process in processes)


def test_killed_rank_ends_a_launch_within_seconds() -> None:
    # The survivor would wait for half an hour; the test's own time limit is far below that.
    with pytest.raises(RuntimeFailure, match=r"^rank 1: its process was ended by signal SIGKILL") as failure:
        launch(job_of(ModelReference("tests.runtime.models:dying", {"rank": 1})), [None, None])
    assert "\n" not in str(failure.value)


def test_exception_in_a_launch_names_rank_and_reason() -> None:
    with pytest.raises(
        RuntimeFailure, match=r"^rank 0: ValueError: no such weights; all processes were ended$"
    ):
        launch(job_of(ModelReference("tests.runtime.models:failing", {"rank": 0})), [None, None])


def test_a_rank_that_hangs_in_its_own_code_is_named_with_the_place() -> None:
    # The other rank waits for it, and is not to blame.
    with pytest.raises(
        RuntimeFailure,
        match=r"^rank 1: has been building the module for more than 6 s \(.*threading.py:\d+ in wait\), must go on",
    ):
        launch(job_of(ModelReference("tests.runtime.models:hanging", {"rank": 1})), [None, None], timeout_s=6)


def test_a_rank_out_of_memory_is_named_with_the_reason() -> None:
    with pytest.raises(
        RuntimeFailure, match=r"^rank 1: .*can't allocate memory.*; all processes were ended$"
    ):
        launch(job_of(ModelReference("tests.runtime.models:exhausting", {"rank": 1})), [None, None])


def test_too_few_devices() -> None:
    with pytest.raises(RuntimeFailure, match="there are 1 devices, must be 2"):
        launch(job_of(reference("perceptron")), [None])


def test_too_few_processes() -> None:
    with pytest.raises(RuntimeFailure, match="run: has 1 process, must have 2"):
        run_job(job_of(reference("perceptron")))


@pytest.mark.parametrize("factory", ["tests.runtime.models:none", "no_such_package:model", "perceptron"])
def test_unknown_factory(factory: str) -> None:
    graph = graph_of("perceptron")
    with pytest.raises(UsageError, match=f"^model {factory}: cannot be imported"):
        run_job(make_job(graph, in_turn(graph, [0]), ModelReference(factory)))


def test_module_of_other_sizes() -> None:
    graph = graph_of("perceptron")
    job = make_job(graph, in_turn(graph, [0]), reference("perceptron", batch_size=3))
    with pytest.raises(
        RuntimeFailure, match=r"input input.0: the module has shape \(3, 6\), must have shape \(7, 6\)"
    ):
        run_job(job)
