"""The simulated timeline: every task is in the trace once a resource, at its time; devices' slices fill the step."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.timeline.chrome import chrome_trace
from app.services.timeline.timeline import Slice, StepTimeline, simulated_timeline, with_waits
from graph.training import Training
from search.cost.cost_table import CostTable
from search.orders import Order
from search.simulate.simulator import Simulation, simulate
from search.space.baselines import data_parallel
from tests.app.tracing.trace_format import check_trace
from tests.search.builders import MadeUpCosts, branches, cluster, devices, local_calls, random_anywhere


def simulated(seed: int, order: Order = "program") -> Simulation:
    """Simulate a random strategy on three devices whose links share routes."""
    graph, topology = branches(), cluster().subset(3)
    strategy = random_anywhere(graph, 3, np.random.default_rng(seed))
    return simulate(
        graph, strategy, topology, CostTable(MadeUpCosts()), Training(8), order=order, local_calls=local_calls
    )


@given(seed=st.integers(0, 10_000), order=st.sampled_from(["program", "fifo", "priority"]))
def test_every_task_is_in_the_trace_once_for_each_resource_that_it_holds(seed: int, order: Order) -> None:
    simulation = simulated(seed, order)
    tasks = simulation.tasks
    names, resources = tasks.names(), tasks.resource_names()
    expected = Counter(
        (resources[resource], names[task], int(simulation.start_ns[task]), int(simulation.end_ns[task]))
        for task in range(tasks.task_count)
        for resource in tasks.resources(task)
    )
    tracks = check_trace(chrome_trace({"simulated": simulated_timeline(simulation)}, {}))
    found = Counter(
        (track.removesuffix(" / simulated").removeprefix("links / "), *event)
        for track, events in tracks.items()
        for event in events
    )
    assert found == expected


@given(seed=st.integers(0, 10_000), order=st.sampled_from(["program", "fifo", "priority"]))
def test_tasks_and_waits_of_a_device_fill_the_step_without_a_gap(seed: int, order: Order) -> None:
    simulation = simulated(seed, order)
    timeline = with_waits(simulation, simulated_timeline(simulation))
    for device, slices in enumerate(timeline.devices):
        moments = [0, *(one.end_ns for one in slices)]
        assert [one.start_ns for one in slices] == moments[:-1]
        assert moments[-1] == simulation.step_time_ns
        computing = sum(one.duration_ns for one in slices if one.kind != "wait")
        assert computing / 1e9 == pytest.approx(simulation.compute_s[device])


def test_a_wait_is_for_what_ended_it() -> None:
    simulation = simulated(3)
    names = simulation.tasks.names()
    timeline = with_waits(simulation, simulated_timeline(simulation))
    ends = {
        int(simulation.end_ns[task])
        for task in range(simulation.tasks.task_count)
        if names[task].startswith(("send", "all", "reduce", "broadcast"))
    }
    waits = [one for slices in timeline.devices for one in slices if one.kind == "wait"]
    awaited = [one for one in waits if one.subject != "the end of the step"]
    assert awaited
    assert all(one.end_ns in ends for one in awaited)


def test_timelines_of_one_device_are_threads_of_one_process() -> None:
    def timeline(name: str) -> StepTimeline:
        return StepTimeline(5, ((Slice("forward", "fc", f"forward fc[{name}]", 0, 5),),) * 2, {})

    document = chrome_trace({"simulated": timeline("0"), "measured": timeline("1")}, {"model": "mlp"})
    assert check_trace(json.loads(json.dumps(document))) == {
        f"device {device} / {kind}": [(f"forward fc[{number}]", 0, 5)]
        for device in (0, 1)
        for number, kind in enumerate(("simulated", "measured"))
    }
    assert document["otherData"] == {"model": "mlp"}


def test_data_parallelism_names_the_all_reduce_of_each_bucket() -> None:
    graph = branches()
    simulation = simulate(
        graph,
        data_parallel(graph, 2),
        devices(2),
        CostTable(MadeUpCosts()),
        Training(8),
        local_calls=local_calls,
    )
    kinds = {one.kind: one.name for slices in simulated_timeline(simulation).links.values() for one in slices}
    assert kinds["collective"].startswith("all-reduce bucket")
