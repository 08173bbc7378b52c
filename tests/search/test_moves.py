"""Moves are legal, change whole groups, and say where every configuration comes from."""

from hashlib import sha256

import numpy as np
import pytest

from graph.axes import tasks
from graph.errors import UsageError
from graph.operators import OperatorGraph
from graph.strategy import Configuration, Strategy
from search.algorithms.moves import ONE_GROUP, Move, Moves, MoveShares, copied
from search.space.baselines import data_parallel, random_strategy
from search.space.configurations import configured
from search.space.groups import follow
from search.space.neighbours import like_groups, sharing_groups
from search.space.placements import Drawn, ProposalOrigin
from tests.search.builders import branches, random_anywhere, statistics, unrolled

DEVICES = 6
KINDS = {
    "alone": ONE_GROUP,
    "alike": MoveShares(alike=1.0, sharing=0.0, spread=0.0),
    "sharing": MoveShares(alike=0.0, sharing=1.0, spread=0.0),
    "spread": MoveShares(alike=0.0, sharing=0.0, spread=1.0),
    "hybrid": MoveShares(hybrid=1.0),
    "many": MoveShares(hybrid=0.5, grid=0.75),
    "default": MoveShares(),
}
GRAPHS = {"branches": branches(), "statistics": statistics(), "unrolled": unrolled()}


def walk(graph: OperatorGraph, shares: MoveShares, count: int) -> list[tuple[list[Configuration], Move]]:
    """Return random moves, each with the configurations before it; half of them are made."""
    rng = np.random.default_rng(8)
    moves = Moves(graph, DEVICES, shares)
    # Tasks that share devices, and more tasks than devices, are legal starts.
    odd = random_anywhere(graph, DEVICES, rng).configurations
    found = []
    for start in (odd, random_strategy(graph, DEVICES, rng).configurations):
        configurations = list(start)
        for _ in range(count):
            move = moves.propose(configurations, rng)
            found.append((list(configurations), move))
            if rng.random() < 0.5:
                for index, configuration in move.changed.items():
                    configurations[index] = configuration
    return found


def parts(move: Move) -> list[tuple[int, Configuration, ProposalOrigin]]:
    others = [(head, part.configuration, part.origin) for part in move.others for head in part.heads]
    return [(move.head, move.configuration, move.origin), *others]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_moves_are_legal_and_change_whole_groups(name: str, kind: str) -> None:
    graph = GRAPHS[name]
    groups = {group.head: group for group in Moves(graph, DEVICES).groups}
    for before, move in walk(graph, KINDS[kind], 150):
        expected: dict[int, Configuration] = {}
        for head, configuration, _ in parts(move):
            assert expected.keys().isdisjoint(groups[head].operators), "a group is changed once"
            expected |= follow(groups[head], configuration)
        assert move.changed == expected
        after = [move.changed.get(index, one) for index, one in enumerate(before)]
        Strategy(graph.digest, tuple(after)).validate(graph, DEVICES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_part_is_what_its_origin_says(name: str, kind: str) -> None:
    """A copy is of what its source does after the parts before it; traces rely on that."""
    for before, move in walk(GRAPHS[name], KINDS[kind], 150):
        now = list(before)
        for head, configuration, origin in parts(move):
            if isinstance(origin, Drawn):
                expected = configured(origin, DEVICES)
            else:
                source = now[origin.head]
                expected = source if origin.axes is None else copied(origin.axes, source)
            assert configuration == expected
            now[head] = configuration


def test_like_groups_get_the_same_at_once() -> None:
    graph = GRAPHS["unrolled"]
    moves = Moves(graph, DEVICES)
    places = {group.head: place for place, group in enumerate(moves.groups)}
    like = like_groups(graph, moves.groups)
    sizes = set()
    for _, move in walk(graph, KINDS["alike"], 150):
        touched = sorted(places[head] for head, _, _ in parts(move))
        family = like[touched[0]]
        first = family.index(touched[0])
        assert tuple(touched) == family[first : first + len(touched)], "neighbours in their order"
        assert {configuration for _, configuration, _ in parts(move)} == {move.configuration}
        sizes.add((len(touched), len(family)))
    # "first" is like the steps' products; "last" is like none.
    assert {size for size in sizes if size[1] == 9} >= {(2, 9), (5, 9), (9, 9)}
    assert (1, 1) in sizes


def test_uses_of_a_weight_get_the_same_at_once() -> None:
    graph = GRAPHS["unrolled"]
    moves = Moves(graph, DEVICES)
    names = [graph.operators[group.head].name for group in moves.groups]
    families = {tuple(names[place] for place in places) for places in sharing_groups(graph, moves.groups)}
    steps = range(4)
    expected = {("first",), ("last",), tuple(f"in{step}" for step in steps)}
    assert families >= expected | {tuple(f"state{step}" for step in steps)}
    for _, move in walk(graph, KINDS["sharing"], 150):
        assert tuple(sorted(graph.operators[head].name for head, _, _ in parts(move))) in families
        assert {configuration for _, configuration, _ in parts(move)} == {move.configuration}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_spreads_loses_no_task_and_goes_from_neighbour_to_neighbour(name: str) -> None:
    sizes = set()
    for _, move in walk(GRAPHS[name], KINDS["spread"], 150):
        reached = {move.head}
        for part in move.others:
            assert not isinstance(part.origin, Drawn)
            assert part.origin.head in reached
            assert part.origin.axes is not None
            assert tasks(part.configuration.degrees) == tasks(move.configuration.degrees)
            assert set(part.configuration.devices) == set(move.configuration.devices)
            reached |= set(part.heads)
        sizes.add(len(reached))
    # Two groups are all there is of "statistics".
    assert {1, 2} <= sizes
    assert name == "statistics" or max(sizes) > 3


def test_a_group_may_keep_what_the_others_then_take() -> None:
    shares = MoveShares(alike=1.0, sharing=0.0, spread=0.0, keep=1.0)
    for before, move in walk(GRAPHS["unrolled"], shares, 50):
        if move.others:
            assert move.configuration == before[move.head]


def test_moves_of_one_group_are_those_of_older_searches() -> None:
    """These go on with the moves that they would have made."""
    graph = branches()
    moves, rng = Moves(graph, DEVICES, ONE_GROUP), np.random.default_rng(5)
    configurations = list(data_parallel(graph, DEVICES).configurations)
    drawn = []
    for _ in range(200):
        move = moves.propose(configurations, rng)
        drawn.append((move.head, move.configuration.degrees, move.configuration.devices))
        for index, configuration in move.changed.items():
            configurations[index] = configuration
    assert sha256(repr(drawn).encode()).hexdigest()[:16] == "e1be51cbf01764f8"


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"devices": -0.1}, r"share of devices is -0.1, must be between 0 and 1"),
        ({"keep": 1.5}, r"share of keep is 1.5"),
        ({"alike": 0.6, "sharing": 0.3, "spread": 0.2}, r"share of alike, sharing and spread is 1.1"),
        ({"devices": 0.6, "copy_like": 0.6}, r"share of devices, copy_like and copy_neighbour is 1.35"),
        ({"spread": float("nan")}, r"share of spread is nan"),
    ],
)
def test_shares_that_cannot_be_are_one_line(shares: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MoveShares(**shares)


def test_a_copy_takes_shared_axes_and_the_first_part_of_others() -> None:
    # Ours is (neighbour's axis 1, nothing, neighbour's axis 0); its axis 2 and replicas are dropped.
    theirs = Configuration((2, 3, 2, 1), tuple(range(12)))
    assert copied((1, -1, 0), theirs) == Configuration((3, 1, 2, 1), (0, 6, 2, 8, 4, 10))
