"""Groups that are made again in the backward: in digest and files, checked, and what a strategy without them is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph.canonical import digest
from graph.errors import StrategyError
from graph.operator_ranges import OperatorRange, group_numbers
from graph.plan import build_plan
from graph.recomputation import needed_at
from graph.strategy import FORMAT, strategy_from_json
from search.space.baselines import data_parallel, fsdp
from search.space.strategy_transfer import adapt
from tests.search.builders import two_layers


def test_a_strategy_that_makes_nothing_again_is_what_it_was() -> None:
    graph = two_layers()
    plain = data_parallel(graph, 3)
    configurations = [[list(one.degrees), list(one.devices)] for one in plain.configurations]
    assert plain.digest == digest([FORMAT, graph.digest, configurations])
    assert "recomputation" not in plain.to_json(graph)


def test_what_is_made_again_is_in_the_digest_and_survives_a_file() -> None:
    graph = two_layers()
    plain = data_parallel(graph, 3)
    groups = [(), (OperatorRange(0, 1),), (OperatorRange(0, 2),), (OperatorRange(0, 0), OperatorRange(1, 2))]
    found = [replace(one, recomputation=two) for one in (plain, fsdp(graph, 3)) for two in groups]
    assert len({one.digest for one in found}) == len(found)
    for one in found:
        assert strategy_from_json(one.to_json(graph), graph, 3) == one
    names = [operator.name for operator in graph.operators]
    assert found[3].to_json(graph)["recomputation"] == [[names[0], names[0]], [names[1], names[2]]]


def test_a_strategy_made_for_other_devices_makes_the_same_again() -> None:
    graph = two_layers()
    strategy = replace(data_parallel(graph, 3), recomputation=(OperatorRange(1, 2),))
    assert adapt(strategy.to_json(graph), 3, graph, 4).recomputation == strategy.recomputation


@pytest.mark.parametrize(
    ("recomputation", "message"),
    [
        ({"first": "relu"}, "recomputation is no list"),
        (["first"], "recomputation has the entry first"),
        ([["first"]], "must have pairs of a first and a last operator"),
        ([["first", 2]], "must have pairs of a first and a last operator"),
        ([["first", "nothing"]], "operator nothing of recomputation is unknown"),
        ([["relu", "first"]], "a group goes from operator 1 to 0"),
        ([["first", "relu"], ["relu", "second"]], "the group of relu begins before that of first has ended"),
        (
            [["second", "second"], ["first", "first"]],
            "the group of first begins before that of second has ended",
        ),
    ],
)
def test_a_file_with_groups_that_do_not_fit_is_refused(recomputation: object, message: str) -> None:
    graph = two_layers()
    document = {**data_parallel(graph, 2).to_json(graph), "recomputation": recomputation}
    with pytest.raises(StrategyError, match=message):
        strategy_from_json(document, graph, 2)


def test_a_group_beyond_the_network_is_refused() -> None:
    graph = two_layers()
    count = len(graph.operators)
    strategy = replace(data_parallel(graph, 2), recomputation=(OperatorRange(0, count),))
    with pytest.raises(StrategyError, match=f"from operator 0 to {count}, must go from an operator to"):
        strategy.validate(graph, 2)


def test_operators_know_their_groups() -> None:
    graph = two_layers()
    groups = (OperatorRange(0, 1), OperatorRange(3, 3))
    assert group_numbers(graph, groups)[:5] == [0, 0, -1, 1, -1]
    assert [needed_at(groups, index) for index in range(5)] == [1, 1, 2, 3, 4]


def test_weights_kept_in_shares_are_gathered_before_their_group_is_made_again() -> None:
    graph = two_layers()
    plain = fsdp(graph, 2)
    last = graph.operators.index(graph.operator_by_name["relu"])
    strategy = replace(plain, recomputation=(OperatorRange(0, last),))
    assert list(build_plan(graph, plain, (0, 0), 1).backward_gathers) == [2, 0]
    assert list(build_plan(graph, strategy, (0, 0), 1).backward_gathers) == [2, last]
