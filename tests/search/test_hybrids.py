"""What chains start from and propose on many devices, and that a search there gets better than both."""

import numpy as np
import pytest

from graph.axes import AxisKind, tasks
from graph.strategy import Configuration
from graph.training import Training
from search.algorithms.chain import SearchOptions
from search.algorithms.mcmc import SearchResult, search
from search.algorithms.moves import Moves, MoveShares, shares_for
from search.cost.cost_table import CostTable
from search.problem import Problem
from search.simulate.simulator import simulate
from search.space.baselines import (
    FEW_DEVICES,
    all_baselines,
    data_parallel,
    first_axis,
    random_strategy,
    row_lengths,
    starting_baselines,
    usual_baselines,
)
from search.space.configurations import configured
from search.space.groups import find_groups, follow
from search.space.hybrids import hybrids, random_grid
from search.space.placements import recognized
from tests.search.builders import MadeUpCosts, branches, devices, local_calls, two_layers, unrolled

MANY = 72
GRAPHS = {"branches": branches(), "unrolled": unrolled(), "two layers": two_layers(144, 48)}


@pytest.mark.parametrize("count", [6, 8, MANY])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_random_grid_is_legal_and_keeps_rows_on_devices_side_by_side(name: str, count: int) -> None:
    graph, rng = GRAPHS[name], np.random.default_rng(3)
    whole = set()
    for operator in graph.operators:
        axes, sample = operator.space.axes, first_axis(operator, AxisKind.SAMPLE)
        for _ in range(40):
            drawn = configured(random_grid(operator, count, rng), count)
            assert len(drawn.devices) == len(set(drawn.devices)) <= count
            assert all(
                degree <= axis.size or axis.kind is AxisKind.REPLICA
                for degree, axis in zip(drawn.degrees, axes, strict=True)
            )
            if sample is None or tasks(drawn.degrees) < count:
                continue
            parts = np.array(drawn.devices).reshape(drawn.degrees)
            rows = np.moveaxis(parts, sample, 0).reshape(drawn.degrees[sample], -1)
            row = count // drawn.degrees[sample]
            assert rows.tolist() == np.arange(count).reshape(-1, row).tolist()
            whole.add(row)
    assert name != "two layers" or whole == {1, *row_lengths(count)}


@pytest.mark.parametrize("name", GRAPHS)
def test_hybrids_differ_and_come_from_what_they_are_drawn_as(name: str) -> None:
    graph = GRAPHS[name]
    groups = find_groups(graph)
    found = hybrids(graph, groups, MANY)
    assert len({one.configurations for one in found}) == len(found) > 1
    for hybrid in found:
        assert hybrid.configurations == tuple(configured(one, MANY) for one in hybrid.origins)
        chosen: dict[int, Configuration] = {}
        for group, configuration in zip(groups, hybrid.configurations, strict=True):
            chosen |= follow(group, configuration)
        assert sorted(chosen) == list(range(len(graph.operators)))


def test_few_devices_begin_at_the_usual_baselines() -> None:
    graph = GRAPHS["two layers"]
    assert starting_baselines(graph, FEW_DEVICES) == usual_baselines(graph, FEW_DEVICES)


@pytest.mark.parametrize("count", [1, 2, 6, 8, FEW_DEVICES])
@pytest.mark.parametrize("name", GRAPHS)
def test_on_few_devices_every_baseline_of_all_layers_without_sharing_is_a_hybrid_but_reductions(
    name: str, count: int
) -> None:
    """Those that treat one kind of layer otherwise than the rest are none."""
    graph = GRAPHS[name]
    groups = find_groups(graph)
    found = {one.configurations for one in hybrids(graph, groups, count)}
    for baseline in all_baselines(graph, count):
        of_some = baseline.name.startswith(("stanza", "hugectr", "insightface"))
        if baseline.strategy.sharding or of_some or baseline.name.endswith("-reduction"):
            continue
        given = tuple(baseline.strategy.configurations[group.head] for group in groups)
        # Configurations on devices that no family of device lists gives cannot be recorded.
        assert given in found or any(recognized(one.devices, count) is None for one in given)
    if count > 1:
        assert len(found) > 1


def test_a_walk_from_a_random_strategy_reaches_data_parallelism_by_hybrids() -> None:
    graph = GRAPHS["two layers"]
    moves = Moves(graph, 8, MoveShares(hybrid=1.0))
    rng = np.random.default_rng(0)
    strategy = random_strategy(graph, 8, rng)
    configurations, wanted = list(strategy.configurations), data_parallel(graph, 8).configurations
    for _ in range(2_000):
        for index, one in moves.propose(configurations, rng).changed.items():
            if one == wanted[index]:
                configurations[index] = one
    heads = [group.head for group in moves.groups]
    assert [configurations[head] for head in heads] == [wanted[head] for head in heads]


def test_many_devices_begin_at_data_parallelism_and_short_rows_each_once() -> None:
    graph = GRAPHS["two layers"]
    found = starting_baselines(graph, MANY)
    assert [one.name for one in found] == ["data-parallel", *(f"megatron-{row}" for row in row_lengths(MANY))]
    assert len({one.strategy for one in found}) == len(found)
    for one in found:
        one.strategy.validate(graph, MANY)


def run(seed: int, workers: int = 1) -> SearchResult:
    return search(
        Problem(
            GRAPHS["two layers"],
            devices(MANY),
            CostTable(MadeUpCosts(1e-9)),
            Training(144),
            local_calls=local_calls,
        ),
        SearchOptions(proposals=120, chains=3, seed=seed, shares=shares_for(MANY)),
        workers=workers,
    )


def test_a_search_on_many_devices_gets_better_than_what_it_starts_from() -> None:
    result = run(0)
    assert result.chains[0].start == "data_parallel"
    assert result.chains[1].start.startswith("megatron_")
    assert result.step_time_s < min(chain.initial_s for chain in result.chains)
    again = simulate(
        GRAPHS["two layers"],
        result.strategy,
        devices(MANY),
        CostTable(MadeUpCosts(1e-9)),
        Training(144),
        local_calls=local_calls,
    )
    assert again.step_time_s == result.step_time_s


def test_a_search_on_many_devices_gives_the_same_again_however_many_walk_it() -> None:
    first, second, apart = run(4), run(4), run(4, workers=2)
    assert first.strategy == second.strategy == apart.strategy
    assert first.chains == second.chains == apart.chains
