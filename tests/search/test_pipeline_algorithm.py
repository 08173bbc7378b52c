"""The pipeline algorithm: no worse than 3-D parallelism, the same for the same seed, near the best of all stagings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from graph.errors import StrategyError, UsageError
from graph.operators import OperatorGraph
from graph.schedule import ONE_BATCH, GradientSums, MicroBatches, Schedule, stages_of
from graph.strategy import Sharding, Strategy
from graph.synchronization import Policy, Synchronization
from graph.training import Training
from search.algorithms.best_tracker import builder_of, simulated
from search.algorithms.pipeline import pipeline
from search.algorithms.staging import Staging, Stagings, pipeline_baselines
from search.algorithms.weight_sharding import share_weights
from search.bounds.pipeline_costs import NO_SAVING
from search.bounds.stage_division import divisions
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts
from search.evaluate.evaluator import outcome
from search.outcome import Outcome
from search.problem import Problem
from search.space.baselines import data_parallel, fsdp, shared
from search.space.pipelines import Split
from tests.quick import few
from tests.search.builders import (
    MadeUpCosts,
    branches,
    cluster,
    devices,
    joined,
    local_calls,
    statistics,
    two_layers,
    unrolled,
    viewed,
)

GRAPHS = {"branches": branches(), "joined": joined(), "unrolled": unrolled(), "viewed": viewed()}
MOST = 900


def problem(graph: OperatorGraph, micro_batches: int, count: int = 4, memory_bytes: int = 1 << 40) -> Problem:
    topology = devices(count, contention=0.3, memory_bytes=memory_bytes)
    return Problem(
        graph,
        topology,
        CostTable(MadeUpCosts(1e-6)),
        Training(6 * micro_batches),
        LinkCosts(),
        local_calls,
        micro_batches=micro_batches,
    )


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", few(("branches", "viewed"), GRAPHS))
def test_the_result_is_no_worse_than_any_3d_baseline_and_takes_what_is_reported(
    name: str, micro_batches: int
) -> None:
    posed = problem(GRAPHS[name], micro_batches)
    result = pipeline(posed, most=MOST, seed=3)
    result.strategy.validate(posed.graph, 4)
    assert result.strategy.micro_batches.count == micro_batches
    assert result.outcome == simulated(posed, result.strategy, "program")
    baselines = pipeline_baselines(posed)
    assert baselines
    for baseline in baselines:
        assert result.outcome <= simulated(posed, baseline.strategy, "program"), baseline.name


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", GRAPHS)
def test_under_a_limit_an_outcome_is_exact_or_shows_that_the_exact_one_is_not_below_it(
    name: str, micro_batches: int
) -> None:
    posed = problem(GRAPHS[name], micro_batches, memory_bytes=4000)
    builder = builder_of(posed)
    layouts = [builder.layout(baseline.strategy) for baseline in pipeline_baselines(posed)[::4]]
    exact = [outcome(layout, "program") for layout in layouts]
    passed_by = 0
    for layout, own in zip(layouts, exact, strict=True):
        for limit in (min(exact), Outcome(own.excess_bytes, own.step_time_ns + 1), Outcome(0, 0)):
            limited = outcome(layout, "program", limit)
            assert limited.excess_bytes == own.excess_bytes
            assert limited <= own
            assert limited == own or own >= limited >= limit
            passed_by += limited != own
    assert passed_by


@pytest.mark.parametrize("name", ["branches", "joined"])
def test_where_memory_is_short_shares_of_gradients_are_tried(name: str) -> None:
    """Memories are as large as the 3-D parallelism with gradients summed in each micro-batch needs that takes least."""
    ample = problem(GRAPHS[name], 4)
    stagings = Stagings(ample)
    strategies = [
        stagings.strategy(replace(staging, shares_optimizer=True, sums_each=True))
        for staging in stagings.baselines()
    ]
    in_each = [strategy for strategy in strategies if strategy is not None]
    builder = builder_of(ample)
    needed_bytes = [int(builder.build(strategy).peak_memory_D.max()) for strategy in in_each]
    posed = problem(GRAPHS[name], 4, memory_bytes=min(needed_bytes))
    result = pipeline(posed, most=MOST, seed=3)
    assert not result.outcome.excess_bytes
    for strategy in in_each:
        assert result.outcome <= simulated(posed, strategy, "program")


@pytest.mark.parametrize("gradients", GradientSums)
def test_gradients_are_summed_as_the_problem_says(gradients: GradientSums) -> None:
    posed = replace(problem(branches(), 4, memory_bytes=4000), gradients=gradients)
    result = pipeline(posed, most=200, seed=3)
    assert result.strategy.micro_batches.gradients is gradients


@pytest.mark.parametrize("seed", [1, 4])
def test_no_stage_is_made_again_for_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories are ample, and short walks of these seeds end where a stage is made again that nobody waits for."""
    for number in ("FEWEST_MOVES", "MOST_MOVES", "MOST_DRAWS"):
        monkeypatch.setattr(f"search.algorithms.pipeline.{number}", 60)
    posed = problem(viewed(), 4)
    result = pipeline(posed, most=MOST, seed=seed)
    assert result.simulated < MOST
    strategy = result.strategy
    for stage in stages_of(posed.graph, strategy.configurations, strategy.micro_batches.schedule):
        rest = tuple(group for group in strategy.recomputation if not stage.first <= group.first < stage.last)
        if rest != strategy.recomputation:
            without = replace(strategy, recomputation=rest)
            assert result.outcome < simulated(posed, without, "program")


def test_one_seed_gives_one_result_and_keeps_to_its_budget() -> None:
    posed = problem(branches(), 4)
    results = [pipeline(posed, most=300, seed=5) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0].simulated == 300
    assert pipeline(posed, most=7, seed=5).simulated == 7


@pytest.mark.parametrize("memory_bytes", [1 << 40, 4000])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_strategy_that_is_tried_is_legal(
    name: str, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    posed = replace(problem(GRAPHS[name], 4, memory_bytes=memory_bytes), shares_weights=True)
    tried: list[Strategy] = []
    strategy_of = Stagings.strategy

    def noted(stagings: Stagings, staging: Staging) -> Strategy | None:
        strategy = strategy_of(stagings, staging)
        if strategy is not None:
            tried.append(strategy)
        return strategy

    monkeypatch.setattr(Stagings, "strategy", noted)
    pipeline(posed, most=300, seed=4)
    assert len({strategy.digest for strategy in tried}) > 100
    assert any(Sharding.PARAMETERS in strategy.sharding for strategy in tried)
    for strategy in tried:
        strategy.validate(posed.graph, posed.device_count)


def stagings_of(stagings: Stagings, count: int, splits: tuple[Split, ...] = ()) -> Iterator[Staging]:
    """Give all stagings in contiguous stages with Megatron's splits on neighbouring devices, under both schedules."""
    used = sum(split.devices for split in splits)
    if used == count:
        for firsts in combinations(range(1, stagings.costs.segments), len(splits) - 1):
            for schedule in stagings.schedules(len(splits)):
                yield Staging(firsts, splits, schedule)
        return
    for size in range(1, count - used + 1):
        for split in stagings.splits.of(size):
            yield from stagings_of(stagings, count, (*splits, split))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", few(("joined",), ["branches", "joined", "viewed"]))
def test_the_result_is_no_worse_than_any_contiguous_staging_of_three_devices(
    name: str, micro_batches: int
) -> None:
    posed = problem(GRAPHS[name], micro_batches, 3)
    stagings = Stagings(posed)
    strategies = [stagings.strategy(staging) for staging in stagings_of(stagings, 3)]
    best = min(simulated(posed, strategy, "program") for strategy in strategies if strategy is not None)
    assert pipeline(posed, most=MOST, seed=1).outcome <= best


@pytest.mark.parametrize("name", few(("branches",), ["branches", "joined", "unrolled"]))
@pytest.mark.parametrize("micro_batches", [2, 6])
def test_the_divisions_are_near_the_best_contiguous_staging(name: str, micro_batches: int) -> None:
    """Of what the dynamic program predicts best, the fastest takes at most a fifth longer, as simulated."""
    posed = problem(GRAPHS[name], micro_batches, 3)
    stagings = Stagings(posed)

    def outcomes(candidates: list[Staging]) -> list[int]:
        strategies = [stagings.strategy(staging) for staging in candidates]
        return [
            simulated(posed, strategy, "program").step_time_ns
            for strategy in strategies
            if strategy is not None
        ]

    divisions = [
        staging for schedule in stagings.schedules(3) for staging in stagings.divided(schedule, NO_SAVING, 6)
    ]
    assert min(outcomes(divisions)) <= 1.2 * min(outcomes(list(stagings_of(stagings, 3))))


@pytest.mark.parametrize("micro_batches", [2, 6])
def test_the_divisions_that_are_kept_are_those_of_the_least_totals(micro_batches: int) -> None:
    stagings = Stagings(problem(GRAPHS["branches"], micro_batches, 3))
    table = stagings.costs.table(micro_batches, keeps_all=False, saving=NO_SAVING)
    ascending = sorted(divisions(table, stagings.most_stages), key=lambda division: division.total_ns)
    assert ascending[0].total_ns < ascending[-1].total_ns
    for most in range(1, len(ascending) + 1):
        kept = stagings.divided(Schedule.ONE_F_ONE_B, NO_SAVING, most)
        assert [(0, *staging.firsts) for staging in kept] == [
            tuple(stage.first for stage in division.stages) for division in ascending[:most]
        ]


def test_where_memory_is_short_a_strategy_that_fits_is_found() -> None:
    graph = two_layers(samples=64, features=64)
    plenty = problem(graph, 4)
    fastest = pipeline(plenty, most=MOST, seed=0)
    layout = builder_of(plenty).layout(fastest.strategy)
    layout.run("program")
    tight = problem(graph, 4, memory_bytes=int(layout.peak_memory_D.max()) * 3 // 4)
    result = pipeline(tight, most=MOST, seed=0)
    assert result.outcome.excess_bytes == 0
    assert result.outcome.step_time_ns >= fastest.outcome.step_time_ns


@pytest.mark.parametrize("name", ["branches", "joined"])
def test_where_memory_is_short_weights_are_kept_in_shares_if_that_is_asked_for(name: str) -> None:
    """Memories are as large as the 3-D parallelism with all of it in shares needs that takes least."""
    ample = problem(GRAPHS[name], 4)
    stagings = Stagings(ample)
    strategies = [
        stagings.strategy(replace(staging, shares_optimizer=True, shares_weights=True, sums_each=True))
        for staging in stagings.baselines()
    ]
    in_shares = [strategy for strategy in strategies if strategy is not None]
    builder = builder_of(ample)
    needed_bytes = [int(builder.build(strategy).peak_memory_D.max()) for strategy in in_shares]
    posed = replace(problem(GRAPHS[name], 4, memory_bytes=min(needed_bytes)), shares_weights=True)
    result = pipeline(posed, most=MOST, seed=3)
    assert not result.outcome.excess_bytes
    result.strategy.validate(posed.graph, posed.device_count)
    assert result == pipeline(posed, most=MOST, seed=3)
    # Nobody else has strategies whose weights themselves are shared.
    assert Sharding.PARAMETERS not in pipeline(ample, most=MOST, seed=3).strategy.sharding


@pytest.mark.parametrize("schedule", [None, *Schedule])
def test_algorithms_leave_weights_whole_that_no_stage_can_gather(schedule: Schedule | None) -> None:
    posed = replace(problem(unrolled(), 4), schedule=schedule, shares_weights=True)
    starts = [fsdp(posed.graph, 4), shared(posed.graph, data_parallel(posed.graph, 2), Sharding.PARAMETERS)]
    for search in (pipeline, share_weights):
        found = search(posed, starts, most=60, seed=1).strategy
        assert found.micro_batches.count == 4
        found.validate(posed.graph, posed.device_count)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_share_of_every_stage_is_made_again_within_it(share: float) -> None:
    graph = unrolled(12)
    stagings = Stagings(problem(graph, 4))
    staging = stagings.recomputing(stagings.of_triple(Split(1), 4, Schedule.GPIPE), share)
    for stage in range(4):
        segments = stagings.segments(staging, stage)
        assert len(staging.recomputed & set(segments)) == int(share * len(segments))
    strategy = stagings.strategy(staging)
    assert strategy is not None
    stages = stages_of(graph, strategy.configurations, Schedule.GPIPE)
    assert strategy.recomputation
    for group in strategy.recomputation:
        assert any(stage.first <= group.first <= group.last < stage.last for stage in stages)


def test_starts_are_taken_with_the_micro_batches_of_the_problem() -> None:
    posed = problem(branches(), 4)
    start = fsdp(posed.graph, 4)
    late = replace(data_parallel(posed.graph, 4), synchronization=Synchronization(Policy.TIC))
    for each in (start, late):
        result = pipeline(posed, [each], most=1)
        assert result.strategy.micro_batches == MicroBatches(4, Schedule.ONE_F_ONE_B)
        assert result.strategy.sharding == each.sharding
        result.strategy.validate(posed.graph, 4)
    kept = replace(data_parallel(posed.graph, 4), micro_batches=MicroBatches(4, Schedule.GPIPE))
    assert pipeline(posed, [kept], most=1).strategy == kept


def test_of_one_batch_a_start_stays_as_it_is() -> None:
    posed = problem(branches(), 1)
    start = fsdp(posed.graph, 4)
    result = pipeline(posed, [start], most=1)
    assert result.strategy == start
    assert result.strategy.micro_batches == ONE_BATCH


def test_stages_of_a_cluster_are_found_as_well() -> None:
    posed = replace(problem(unrolled(8), 4), topology=cluster())
    result = pipeline(posed, most=400, seed=2)
    result.strategy.validate(posed.graph, 8)
    again = pipeline(posed, most=400, seed=2)
    assert again == result


def test_a_network_that_cannot_be_trained_in_micro_batches_is_refused() -> None:
    with pytest.raises(StrategyError, match="reads buffer offset, which the micro-batch before renews"):
        pipeline(problem(statistics(), 2), most=MOST)


def test_micro_batches_that_no_number_of_groups_divides_are_refused_for_interleaved() -> None:
    posed = replace(problem(branches(), 3, 2), schedule=Schedule.INTERLEAVED)
    with pytest.raises(
        UsageError, match="schedule interleaved with 3 micro-batches has no strategy on 2 devices"
    ):
        pipeline(posed, most=MOST)
