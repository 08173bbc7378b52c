"""Pipelined strategies: they have just the stages that were meant, on devices of their own, and are legal."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from graph.operators import OperatorGraph
from graph.plan import weight_placement
from graph.rules import local_calls
from graph.schedule import MicroBatches, Schedule, stages_of
from graph.topology import load_topology
from graph.training import Training
from search.algorithms.best_tracker import builder_of
from search.algorithms.staging import Staging, Stagings, pipeline_baselines
from search.bounds.stage_division import divided
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from search.space.baselines import data_parallel
from search.space.pipelines import (
    MOST_CUTS,
    Split,
    Splits,
    StagePart,
    balanced,
    crossing_bytes,
    cut_points,
    has_stages,
    stage_numbers,
    stage_sizes,
    staged,
    triples,
)
from tests.search.builders import MadeUpCosts, branches, joined, two_layers, unrolled, viewed
from tests.search.test_baselines import small

QUICK = ("gpt2", "nmt")
SLOW = ("bert-large", "resnet101", "hf-llama")
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
GRAPHS = {
    "branches": branches(),
    "joined": joined(),
    "two layers": two_layers(),
    "unrolled": unrolled(),
    "viewed": viewed(),
}


def problem(graph: OperatorGraph, micro_batches: int, schedule: Schedule | None = None) -> Problem:
    """Return the problem of a network of the zoo on two nodes of four devices."""
    return Problem(
        graph,
        load_topology("p100-cluster", nodes=2),
        CostTable(MadeUpCosts(1e-7)),
        Training(8 * micro_batches),
        LinkCosts(),
        local_calls,
        micro_batches=micro_batches,
        schedule=schedule,
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_triple_is_legal_and_has_stages_of_equal_numbers_of_devices(name: str) -> None:
    graph = small(name)
    stagings = Stagings(problem(graph, 4))
    for split, count in triples(stagings.splits, 8, stagings.most_stages):
        strategy = stagings.strategy(stagings.of_triple(split, count, Schedule.ONE_F_ONE_B))
        assert strategy is not None
        strategy.validate(graph, 8)
        stages = stages_of(graph, strategy.configurations, Schedule.ONE_F_ONE_B)
        devices = [sorted(stage.devices) for stage in stages]
        assert devices == np.arange(8).reshape(count, split.devices).tolist()
        assert strategy.micro_batches == MicroBatches(4, Schedule.ONE_F_ONE_B)


@pytest.mark.parametrize("name", QUICK)
def test_baselines_are_named_by_degrees_schedule_and_sharing(name: str) -> None:
    graph = small(name)
    baselines = pipeline_baselines(problem(graph, 4))
    by_name = {baseline.name: baseline.strategy for baseline in baselines}
    assert len(by_name) == len(baselines)
    for strategy in by_name.values():
        strategy.validate(graph, 8)
    for expected, stages, schedule, is_shared in (
        ("3d-8x1x1", 1, Schedule.ONE_F_ONE_B, False),
        ("3d-2x2x2", 2, Schedule.ONE_F_ONE_B, False),
        ("3d-2x1x4-gpipe-zero", 4, Schedule.GPIPE, True),
        ("3d-4x1x2-interleaved-2", 4, Schedule.INTERLEAVED, False),
    ):
        strategy = by_name[expected]
        assert strategy.micro_batches == MicroBatches(4, schedule)
        assert len(stages_of(graph, strategy.configurations, schedule)) == stages
        assert bool(strategy.sharding) == is_shared


def test_of_one_micro_batch_there_is_one_schedule() -> None:
    stagings = list(Stagings(problem(small("gpt2"), 1)).baselines())
    assert {staging.schedule for staging in stagings} == {Schedule.ONE_F_ONE_B}


@pytest.mark.parametrize("schedule", Schedule)
def test_only_the_schedule_of_the_problem_is_used(schedule: Schedule) -> None:
    stagings = Stagings(problem(small("gpt2"), 4, schedule))
    assert {staging.schedule for staging in stagings.baselines()} == {schedule}


def test_tensor_ranks_are_side_by_side_in_a_node() -> None:
    graph = small("gpt2")
    stagings = Stagings(problem(graph, 4))
    strategy = stagings.strategy(stagings.of_triple(Split(2, 2), 2, Schedule.ONE_F_ONE_B))
    assert strategy is not None
    held = weight_placement(graph, strategy, "layers.0.up.weight")
    assert list(held) == [0, 1, 2, 3]
    assert held[0] == held[2] != held[1] == held[3]


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_a_tied_embedding_is_held_by_the_stages_that_read_it(schedule: Schedule) -> None:
    graph = small("gpt2")
    stagings = Stagings(problem(graph, 4))
    strategy = stagings.strategy(stagings.of_triple(Split(2), 4, schedule))
    assert strategy is not None
    readers = graph.weight_readers["token_embedding.weight"]
    assert len(readers) > 1
    expected = {device for index in readers for device in strategy.configurations[index].devices}
    assert set(weight_placement(graph, strategy, "token_embedding.weight")) == expected == {0, 1, 6, 7}


def test_stages_may_differ_in_size_and_split() -> None:
    graph = small("gpt2")
    stagings = Stagings(problem(graph, 4))
    segments = stagings.costs.segments
    splits = (Split(1), Split(1, 2), Split(4), Split(1))
    staging = Staging(tuple(segments * stage // 4 for stage in (1, 2, 3)), splits)
    strategy = stagings.strategy(staging)
    assert strategy is not None
    stages = stages_of(graph, strategy.configurations, Schedule.ONE_F_ONE_B)
    assert [sorted(stage.devices) for stage in stages] == [[0], [1, 2], [3, 4, 5, 6], [7]]


@pytest.mark.parametrize("name", GRAPHS)
def test_cut_anywhere_operators_are_in_the_stages_that_were_meant(name: str) -> None:
    graph = GRAPHS[name]
    whole = data_parallel(graph, 1)
    for places in combinations(range(1, len(graph.order.of_loss)), 2):
        parts = [StagePart(whole, (device,)) for device in (2, 0, 1)]
        strategy = staged(graph, places, parts)
        strategy = replace(strategy, micro_batches=MicroBatches(3))
        strategy.validate(graph, 3)
        assert has_stages(graph, strategy, places, Schedule.ONE_F_ONE_B)


def test_an_operator_that_renews_a_buffer_is_where_its_statistics_are_made() -> None:
    graph = branches()
    moments, statistics = (graph.index_by_name[f"norm.{name}"] for name in ("moments", "statistics"))
    position = graph.order.of_loss.index(moments)
    assert stage_numbers(graph, (position,))[statistics] == 1
    assert stage_numbers(graph, (position + 1,))[statistics] == 0


def test_parts_that_are_not_as_many_as_stages_are_refused() -> None:
    graph = two_layers()
    with pytest.raises(ValueError, match="2 cuts have 1 parts, must have 3"):
        staged(graph, (1, 2), [StagePart(data_parallel(graph, 1), (0,))])


@pytest.mark.parametrize("name", GRAPHS)
def test_what_crosses_is_made_before_and_read_behind(name: str) -> None:
    graph = GRAPHS[name]
    of_loss = graph.order.of_loss
    everything, gradients = crossing_bytes(graph)
    for place in range(len(of_loss) + 1):
        before, behind = set(of_loss[:place]), set(of_loss[place:])
        values = [
            graph.value_by_name[value]
            for value, (maker, _) in graph.producer.items()
            if maker in before and any(reader in behind for reader, _ in graph.consumers[value])
        ]
        assert everything[place] == sum(value.spec.size_bytes for value in values)
        assert gradients[place] == sum(value.spec.size_bytes for value in values if value.requires_gradient)


def test_a_small_network_is_cut_anywhere_and_a_large_one_where_few_bytes_cross() -> None:
    few, many = branches(), unrolled(80)
    assert cut_points(few) == tuple(range(1, len(few.order.of_loss)))
    for most in (MOST_CUTS, 10):
        cuts = cut_points(many, most)
        assert most / 2 <= len(cuts) <= most
        assert list(cuts) == sorted(set(cuts))
    crossing, _ = crossing_bytes(many)
    state_bytes = 6 * 8 * 4
    assert {crossing[cut] for cut in cut_points(many, 10)} == {state_bytes}


@pytest.mark.parametrize("seed", range(20))
def test_the_heaviest_run_is_as_light_as_any(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 9, int(rng.integers(1, 8))).tolist()
    for count in range(1, len(weights) + 1):

        def heaviest(cuts: tuple[int, ...]) -> int:
            bounds = (0, *cuts, len(weights))
            return max(int(sum(weights[first:last])) for first, last in pairwise(bounds))

        expected = min(heaviest(cuts) for cuts in combinations(range(1, len(weights)), count - 1))
        cuts = balanced(weights, count)
        assert list(cuts) == sorted(set(cuts))
        assert len(cuts) == count - 1
        assert heaviest(cuts) == expected


def test_more_runs_than_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="runs: are 3, must be from 1 to the number of weights, 2"):
        balanced([1, 2], 3)


def test_stages_have_powers_of_two_or_equal_parts_of_all_devices() -> None:
    assert stage_sizes(12) == (1, 2, 3, 4, 6, 8, 12)
    assert stage_sizes(16) == (1, 2, 4, 8, 16)
    assert stage_sizes(128) == (4, 8, 16, 32, 64, 128)


def test_samples_are_not_split_into_more_parts_than_there_are() -> None:
    splits = Splits(two_layers(samples=4, features=16))
    assert splits.of(8) == (Split(4, 2), Split(2, 4), Split(1, 8))
    assert splits.of(2) == (Split(2, 1), Split(1, 2))


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("name", NAMES)
def test_stages_are_predicted_to_take_and_keep_about_what_is_simulated(name: str, schedule: Schedule) -> None:
    """Each operator waits for all of the one before it as predicted, and links are shared fairly as simulated."""
    posed = problem(small(name), 4)
    stagings = Stagings(posed)
    for split, count in ((Split(1), 8), (Split(2), 4), (Split(2, 2), 2)):
        table = stagings.costs.table(4, keeps_all=schedule is Schedule.GPIPE, split=split)
        division = divided(table, count)
        assert division is not None
        firsts = tuple(stage.first for stage in division.stages[1:])
        strategy = stagings.strategy(Staging(firsts, (split,) * count, schedule))
        assert strategy is not None
        layout = builder_of(posed).layout(strategy)
        step_time_ns, _ = layout.run("fifo")
        assert 0.9 * step_time_ns <= division.total_ns <= 1.35 * step_time_ns
        peaks = layout.peak_memory_D
        _, _, static, kept = table.options[0][0].costs.of_runs
        for place, stage in enumerate(division.stages):
            run = stage.last, stage.first
            predicted = static[run] + table.in_flight(count - place) * kept[run]
            simulated = peaks[stage.device : stage.device + split.devices].max()
            assert 0.85 * simulated <= predicted <= 2.5 * simulated
