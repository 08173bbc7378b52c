"""Peak memory as a user has it: predicted beside measured, stored with the run, and deciding what fits."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest

from app.services.predict.predicted_peaks import predicted_peaks, shares
from graph.axes import AxisKind
from graph.operators import OperatorGraph
from graph.plan import build_plan
from graph.schedule import GradientSums, MicroBatches, Schedule
from graph.strategy import Configuration, Strategy
from graph.training import Training
from runtime.observe.memory_trace import trace_memory
from search.space.baselines import fsdp
from tests.app.conftest import Command
from tests.quick import seeds
from tests.runtime.oracle import graph_of
from tests.runtime.strategies import by_kind, in_turn, random_strategy
from tests.search.builders import devices

TWO = ("--device", "cpu", "--devices", "2", "--strategy", "data-parallel", "--on-miss", "estimate")
# Without convolutions, for which libraries take scratch memory that depends on the processor.
RUN = ("run", "--model", "gpt2", "--preset", "small", *TWO, "--iterations", "1")
QUERY = "SELECT peak_bytes, process_bytes, lost_s, undisturbed_s, median_s FROM executions"


@pytest.mark.usefixtures("known_links")
def test_a_run_shows_and_stores_what_each_device_took(command: Command) -> None:
    done = command(*RUN, "--json")
    assert done.code == 0, done
    found = done.document["memory"]
    assert done.document["memory_account"] == "walk"
    assert [one["device"] for one in found] == [0, 1]
    for one in found:
        assert abs(one["relative_error"]) < 0.001
        assert one["relative_error"] == pytest.approx(
            one["predicted_peak_bytes"] / one["measured_peak_bytes"] - 1
        )
        assert one["process_bytes"] > one["measured_peak_bytes"]
    (row,) = command("query", QUERY, "--json").document
    assert json.loads(row["peak_bytes"]) == [one["measured_peak_bytes"] for one in found]
    assert json.loads(row["process_bytes"]) == [one["process_bytes"] for one in found]
    if row["lost_s"] is not None:  # on Linux
        (lost_s,) = json.loads(row["lost_s"])
        assert lost_s >= 0
        assert row["undisturbed_s"] == pytest.approx(row["median_s"] - lost_s)
    (row,) = command("query", "SELECT peak_bytes FROM simulations", "--json").document
    assert json.loads(row["peak_bytes"]) == [one["predicted_peak_bytes"] for one in found]


@pytest.mark.usefixtures("known_links")
def test_a_run_says_how_full_the_fullest_device_was(command: Command) -> None:
    done = command(*RUN)
    assert done.code == 0, done
    assert "the fullest: predicted " in done.output


@pytest.mark.parametrize("seed", seeds(2, 12))
def test_devices_that_share_a_walk_take_the_same(seed: int) -> None:
    graph = graph_of("convolutions")
    strategy = random_strategy(graph, 4, seed)
    plan, training = build_plan(graph, strategy, (0,) * 4), Training(1)
    found = shares(plan, 4)
    walked = [trace_memory(plan, training, device).peak_bytes for device in range(4)]
    for one, other in itertools.combinations(range(4), 2):
        if found[one] == found[other]:
            assert walked[one] == pytest.approx(walked[other], rel=0.01)


def test_devices_of_a_split_batch_share_a_walk_but_not_those_of_a_split_network() -> None:
    graph = graph_of("convolutions", batch_size=200)
    alike = shares(build_plan(graph, by_kind(graph, [AxisKind.SAMPLE], range(4)), (0,) * 4), 4)
    assert alike[1] == alike[2] == alike[3]
    assert len(set(shares(build_plan(graph, in_turn(graph, range(4)), (0,) * 4), 4))) == 4


def test_devices_without_work_take_nothing() -> None:
    graph = graph_of("perceptron")
    found = predicted_peaks(graph, in_turn(graph, [0]), devices(3), Training(1))
    assert found is not None
    assert [one.peak_bytes > 0 for one in found] == [True, False, False]


@pytest.mark.parametrize(("most", "walked"), [(0, True), (-1, False)])
def test_devices_that_all_differ_are_walked_up_to_a_limit(most: int, *, walked: bool) -> None:
    graph = graph_of("perceptron")
    count = len(graph.operators)
    strategy = in_turn(graph, range(count))
    found = predicted_peaks(graph, strategy, devices(count), Training(1), most_operators=count * count + most)
    assert (found is not None) == walked


def in_stages(graph: OperatorGraph, groups: int, chunks: int, micro_batches: MicroBatches) -> Strategy:
    """Return runs of about as many operators, on devices in turn."""
    runs, count = groups * chunks, len(graph.operators)
    configurations = tuple(
        Configuration((1,) * len(operator.space.axes), (index * runs // count % groups,))
        for index, operator in enumerate(graph.operators)
    )
    return Strategy(graph.digest, configurations, micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("schedule", "groups", "chunks", "count"),
    [
        (Schedule.ONE_F_ONE_B, 1, 1, 9),
        (Schedule.ONE_F_ONE_B, 2, 1, 8),
        (Schedule.INTERLEAVED, 2, 2, 16),
        (Schedule.GPIPE, 2, 1, 8),
        (Schedule.ACTORS, 2, 1, 8),
        (Schedule.ZERO_BUBBLE, 2, 1, 8),
        (Schedule.ZERO_BUBBLE, 3, 1, 10),
    ],
)
def test_peaks_of_many_micro_batches_are_those_of_walking_all(
    schedule: Schedule, groups: int, chunks: int, count: int
) -> None:
    graph, training = graph_of("convolutions"), Training(1, optimizer="adam")
    strategy = in_stages(graph, groups, chunks, MicroBatches(count, schedule))
    strategy.validate(graph, groups)
    plan = build_plan(graph, strategy, (0,) * groups)
    found = predicted_peaks(graph, strategy, devices(groups), training)
    assert found == tuple(trace_memory(plan, training, device) for device in range(groups))
    assert (
        predicted_peaks(graph, strategy, devices(groups), training, most_operators=len(graph.operators))
        is None
    )


@pytest.mark.parametrize("gradients", GradientSums)
def test_peaks_of_many_micro_batches_that_gather_weights_are_those_of_walking_all(
    gradients: GradientSums,
) -> None:
    graph, training = graph_of("convolutions", batch_size=4), Training(1, optimizer="adam")
    strategy = replace(fsdp(graph, 2), micro_batches=MicroBatches(9, gradients=gradients))
    strategy.validate(graph, 2)
    plan = build_plan(graph, strategy, (0, 0))
    found = predicted_peaks(graph, strategy, devices(2), training)
    assert found is not None
    for device in range(2):
        # Devices whose parts differ little share a walk.
        assert found[device].peak_bytes == pytest.approx(
            trace_memory(plan, training, device).peak_bytes, rel=0.002
        )
