"""Shares of weights: they make up what is held, and a strategy that shares nothing is what it was."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graph.canonical import digest
from graph.errors import StrategyError
from graph.importer import import_module
from graph.intervals import IndexSet, Region, count, intersect_regions, normalize, slice_of, volume
from graph.plan import build_plan
from graph.strategy import FORMAT, Sharding, stays_whole, strategy_from_json
from graph.weight_placement import WeightCell, gathered_elements, share_elements, shares
from search.space.baselines import data_parallel, fsdp, zero
from tests.search.builders import statistics, two_layers

index_sets = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=3).map(
    lambda pairs: normalize([(start, start + length) for start, length in pairs])
)


def points(indexes: IndexSet) -> list[int]:
    return [index for start, stop in indexes for index in range(start, stop)]


@given(index_sets, st.data())
def test_a_slice_of_indexes_is_that_of_their_list(indexes: IndexSet, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, count(indexes)))
    stop = data.draw(st.integers(start, count(indexes)))
    assert points(slice_of(indexes, start, stop)) == points(indexes)[start:stop]


@given(st.lists(index_sets, max_size=3), st.integers(2, 6))
def test_shares_make_up_a_cell_and_overlap_nowhere(dims: list[IndexSet], holders: int) -> None:
    region: Region = tuple(dims)
    cell = WeightCell(region, tuple(range(holders)))
    found = shares(cell)
    there = [one for one in found if one is not None]
    assert sum(volume(one) for one in there) == volume(region)
    for place, one in enumerate(there):
        assert intersect_regions(one, region) == one
        assert all(intersect_regions(one, other) is None for other in there[place + 1 :]) or not dims
    sizes = tuple(count(indexes) for indexes in dims)
    elements = share_elements(sizes, holders)
    assert elements == tuple(0 if one is None else volume(one) for one in found)
    assert max(elements) == elements[0]
    assert gathered_elements(cell) == holders * elements[0] >= prod(sizes)


def test_a_strategy_that_shares_nothing_is_what_it_was() -> None:
    graph = two_layers()
    plain = data_parallel(graph, 3)
    configurations = [[list(one.degrees), list(one.devices)] for one in plain.configurations]
    assert plain.digest == digest([FORMAT, graph.digest, configurations])
    nothing = replace(plain, sharding=(Sharding.NONE,) * len(graph.weights))
    assert nothing == plain
    assert "sharding" not in plain.to_json(graph)


def test_what_is_shared_is_in_the_digest_and_survives_a_file() -> None:
    graph = two_layers()
    found = [data_parallel(graph, 3), zero(graph, 3), fsdp(graph, 3)]
    first = (Sharding.PARAMETERS, *(Sharding.NONE,) * (len(graph.weights) - 1))
    found.append(replace(found[0], sharding=first))
    assert len({one.digest for one in found}) == len(found)
    for one in found:
        assert strategy_from_json(one.to_json(graph), graph, 3) == one
    assert found[-1].to_json(graph)["sharding"] == {graph.weights[0].name: "parameters"}


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ({"nothing": "optimizer"}, "weight nothing is unknown"),
        ({"first.weight": "everything"}, "sharding is everything"),
        (["first.weight"], "sharding is no map"),
    ],
)
def test_a_file_that_shares_what_is_not_there_is_refused(sharding: object, message: str) -> None:
    graph = two_layers()
    document = {**data_parallel(graph, 2).to_json(graph), "sharding": sharding}
    with pytest.raises(StrategyError, match=message):
        strategy_from_json(document, graph, 2)


def test_sharing_for_another_number_of_weights_is_refused() -> None:
    graph = two_layers()
    strategy = replace(data_parallel(graph, 2), sharding=(Sharding.OPTIMIZER,))
    with pytest.raises(StrategyError, match="says of 1 weights how they are shared"):
        strategy.validate(graph, 2)


class Averaged(torch.nn.Module):
    """A weight of which the average over all steps is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))
        self.bias = torch.nn.Parameter(torch.zeros(4))
        self.register_buffer("average", torch.zeros(4, 4))
        self.average: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average.copy_(0.9 * self.average + 0.1 * self.weight)
        return torch.nn.functional.linear(x, self.weight, self.bias).sum()


def test_a_weight_that_is_read_after_the_backward_is_not_kept_in_shares() -> None:
    graph = import_module(Averaged(), (torch.zeros(6, 4),), {}, name="averaged")
    assert stays_whole(graph) == {"weight"}
    levels = dict(zip([one.name for one in graph.weights], fsdp(graph, 2).sharding, strict=True))
    assert levels == {"weight": Sharding.OPTIMIZER, "bias": Sharding.PARAMETERS}
    everything = replace(data_parallel(graph, 2), sharding=(Sharding.PARAMETERS,) * 2)
    with pytest.raises(StrategyError, match="weight weight: is kept in shares and read after the backward"):
        everything.validate(graph, 2)


def test_what_devices_update_makes_up_what_they_hold() -> None:
    graph = statistics()
    for strategy in (data_parallel(graph, 3), zero(graph, 3), fsdp(graph, 3)):
        plan = build_plan(graph, strategy, (0, 0, 0))
        for weight in graph.weights:
            updated = sum(volume(region) for _, region in plan.updated(weight.name))
            assert updated == weight.spec.elements
        assert bool(plan.forward_gathers) == (Sharding.PARAMETERS in strategy.sharding)
