"""Makespans and peaks of chains in micro-batches, as they are published, and what their gradients' sums cost."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from graph.calls import LocalCall
from graph.schedule import GradientSums, MicroBatches, Schedule
from graph.strategy import Configuration, Sharding, Strategy
from graph.training import Training
from search.cost.cost_table import CostTable
from search.cost.link_costs import Curve, LinkCosts
from search.simulate.simulator import Simulation, simulate
from search.space.baselines import data_parallel
from tests.search.builders import all_reduces, devices, local_calls
from tests.search.chains import UNIT_NS, UNIT_S, LayerCosts, chain

GPIPE, IN_TURN, INTERLEAVED, ZERO_BUBBLE, ACTORS = Schedule
SAMPLES, WIDTH = 2, 4


def pipelined(
    count: int,
    micro_batches: MicroBatches,
    *,
    chunks: int = 1,
    transfer_s: float = 0.0,
    units: Callable[[LocalCall], tuple[int, int]] = lambda _: (1, 2),
) -> Simulation:
    """Return the step of a chain of one layer a stage, stage s on device s modulo `count`.

    The forward of a layer takes a unit, its backward two, or what `units` say.
    """
    graph = chain([WIDTH] * (count * chunks + 1), SAMPLES)
    placed = [*range(count * chunks), count * chunks - 1, count * chunks - 1]
    configurations = tuple(
        Configuration((1,) * len(operator.space.axes), (stage % count,))
        for operator, stage in zip(graph.operators, placed, strict=True)
    )
    messages = {
        (source, destination): Curve.line(transfer_s, 0.0)
        for source, destination in product(range(count), repeat=2)
        if source != destination
    }
    return simulate(
        graph,
        Strategy(graph.digest, configurations, micro_batches=micro_batches),
        devices(count),
        CostTable(LayerCosts(units)),
        Training(SAMPLES, optimizer="sgd"),
        links=LinkCosts(messages=messages),
        local_calls=local_calls,
    )


@pytest.mark.parametrize("schedule", [GPIPE, IN_TURN, ACTORS])
@pytest.mark.parametrize(("count", "batches"), [(2, 4), (4, 8), (4, 2), (3, 1)])
def test_makespan_is_that_of_the_papers(schedule: Schedule, count: int, batches: int) -> None:
    simulation = pipelined(count, MicroBatches(batches, schedule))
    assert simulation.step_time_ns == 3 * (batches + count - 1) * UNIT_NS


def test_transfers_cost_one_forward_one_backward_more_than_gpipe() -> None:
    times = {
        schedule: pipelined(4, MicroBatches(8, schedule), transfer_s=UNIT_S).step_time_ns
        for schedule in (GPIPE, IN_TURN, ACTORS)
    }
    # Actors have as many micro-batches in flight as one forward, one backward, and its time.
    assert times == {GPIPE: 39 * UNIT_NS, IN_TURN: 49 * UNIT_NS, ACTORS: 49 * UNIT_NS}


def test_more_credits_hide_transfers() -> None:
    """With one more for each transfer on the way to the last stage and back, actors are as fast as gpipe."""
    times = [
        pipelined(4, MicroBatches(8, ACTORS, credits_S), transfer_s=UNIT_S).step_time_ns // UNIT_NS
        for credits_S in ((1, 1, 1, 1), (4, 3, 2, 1), (6, 5, 3, 1), (7, 5, 3, 1), (8, 8, 8, 8))
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] == 8 * (4 * 3 + 2 * 3)
    assert times[1] == 49
    assert times[-1] == times[-2] == 39


def test_credits_bound_what_is_kept() -> None:
    """A stage never has more in flight than its credits, nor than a stage before it."""
    peaks = [
        pipelined(4, MicroBatches(8, ACTORS, credits_S)).peak_memory_bytes
        for credits_S in ((1, 1, 1, 1), (2, 2, 2, 1), (3, 2, 4, 4), (8, 8, 8, 8))
    ]
    tensor_bytes = 4 * SAMPLES * WIDTH
    base = np.array(peaks[0])
    kept = np.array([tensor_bytes, 2 * tensor_bytes, 2 * tensor_bytes, 2 * tensor_bytes + 8])
    assert [((np.array(peak) - base) / kept).tolist() for peak in peaks[1:]] == [
        [1, 1, 1, 0],
        [2, 1, 1, 1],
        [7, 7, 7, 7],
    ]
    assert peaks[-1] == pipelined(4, MicroBatches(8, GPIPE)).peak_memory_bytes


@pytest.mark.parametrize(("count", "chunks", "rounds"), [(2, 2, 2), (4, 2, 2), (4, 3, 1), (3, 2, 3)])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(
    count: int, chunks: int, rounds: int
) -> None:
    batches = rounds * count
    simulation = pipelined(count, MicroBatches(batches, INTERLEAVED), chunks=chunks)
    assert simulation.step_time_ns == 3 * (batches * chunks + count - 1) * UNIT_NS


def parts(call: LocalCall) -> tuple[int, int]:
    """Return the units of a layer: one forward, and one for each part of its backward, also of the first layer."""
    return 1, sum(call.gradients[:2])


@pytest.mark.parametrize(("count", "batches", "published"), [(4, 8, 27), (4, 16, 51), (2, 4, 13), (3, 3, 11)])
def test_makespan_of_zero_bubble_is_that_of_its_paper(count: int, batches: int, published: int) -> None:
    zero_bubble = pipelined(count, MicroBatches(batches, ZERO_BUBBLE), units=parts)
    assert zero_bubble.step_time_ns == published * UNIT_NS
    # The first layer's input needs no gradient, so that 1f1b has one unit less to do at its end.
    in_turn = pipelined(count, MicroBatches(batches, IN_TURN), units=parts)
    assert in_turn.step_time_ns == (3 * (batches + count - 1) - 1) * UNIT_NS


@pytest.mark.parametrize(("schedule", "in_flight"), [(GPIPE, (8, 8, 8, 8)), (IN_TURN, (4, 3, 2, 1))], ids=str)
def test_peak_memory_is_what_the_micro_batches_in_flight_keep(
    schedule: Schedule, in_flight: tuple[int, ...]
) -> None:
    tensor_bytes = 4 * SAMPLES * WIDTH
    # Each device has a weight and its gradient; SGD has no state. The first also has the inputs of all micro-batches.
    static_bytes = [2 * 4 * WIDTH * WIDTH] * 4
    static_bytes[0] += 8 * tensor_bytes
    # A layer keeps its input, which comes from another device but on the first, and the next one keeps its output. The
    # loss keeps its sum and its count, and what cross entropy needs beside them.
    kept_bytes = [tensor_bytes, 2 * tensor_bytes, 2 * tensor_bytes, tensor_bytes + tensor_bytes + 8]
    assert pipelined(4, MicroBatches(8, schedule)).peak_memory_bytes == tuple(
        static + number * kept
        for static, number, kept in zip(static_bytes, in_flight, kept_bytes, strict=True)
    )


def test_names_say_the_micro_batch_of_what_is_done_for_each() -> None:
    tasks = pipelined(2, MicroBatches(2)).tasks
    named = tasks.names()
    assert named[:2] == ["forward layer0[0] of micro-batch 0", "send layer0 0->1 of micro-batch 0"]
    assert named[-4:] == [
        "send gradient of layer0 1->0 of micro-batch 1",
        "backward layer0[0] of micro-batch 1",
        "update device 0",
        "update device 1",
    ]
    assert tasks.names([1]) == named[1:2]


def replicated(sum_s: float, gradients: GradientSums, sharding: Sharding = Sharding.NONE) -> Simulation:
    """Return the step of one layer on two devices in three micro-batches, each 3 units, whose sums take `sum_s`."""
    graph = chain([WIDTH, WIDTH], SAMPLES)
    plain = data_parallel(graph, 2)
    return simulate(
        graph,
        replace(
            plain,
            sharding=(sharding,) * len(graph.weights),
            micro_batches=MicroBatches(3, gradients=gradients),
        ),
        devices(2),
        CostTable(LayerCosts(lambda _: (1, 2))),
        Training(3 * SAMPLES, optimizer="sgd"),
        links=all_reduces({2: (sum_s, 0.0)}),
        local_calls=local_calls,
    )


@pytest.mark.parametrize(
    ("sum_units", "last_units", "each_units"),
    [
        # Three micro-batches of three units and a sum. Where each is summed, the loss of the next goes over the link
        # behind the sum, and its backward begins when both are there: a forward, and a backward and a sum three times.
        (2, 9 + 2, 1 + 3 * (2 + 2)),
        (4, 9 + 4, 1 + 3 * (2 + 4)),
    ],
)
def test_sums_of_each_micro_batch_take_the_link_from_the_next(
    sum_units: int, last_units: int, each_units: int
) -> None:
    times = [
        replicated(sum_units * UNIT_S, gradients).step_time_ns // UNIT_NS
        for gradients in (GradientSums.LAST, GradientSums.EACH)
    ]
    assert times == [last_units, each_units]


def test_shares_of_gradients_are_all_that_is_kept_where_each_is_summed() -> None:
    weight_bytes = 4 * WIDTH * WIDTH
    plain_last, plain_each, last, each = (
        replicated(UNIT_S, gradients, sharding).peak_memory_bytes[0]
        for sharding in (Sharding.NONE, Sharding.OPTIMIZER)
        for gradients in (GradientSums.LAST, GradientSums.EACH)
    )
    assert plain_last == plain_each == last == each + weight_bytes // 2
