"""Names, levels and rings of an all-reduce's algorithms, and how strategies choose them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from graph.collective_algorithms import (
    BY_LIBRARY,
    AllReduceAlgorithm,
    algorithm_for,
    blueconnect,
    measured_algorithms,
    node_levels,
    read_algorithm,
)
from graph.errors import StrategyError
from graph.strategy import Strategy, strategy_from_json
from tests.search.builders import random_mesh, two_layers


@pytest.mark.parametrize("levels", [(8,), (4, 2), (2, 4), (2, 2, 2), (3, 2), (2, 3, 4)])
def test_the_rings_of_a_level_differ_in_its_digit_alone(levels: tuple[int, ...]) -> None:
    algorithm = blueconnect(levels)
    count = math.prod(levels)

    def digits(place: int) -> list[int]:
        found = []
        for length in levels:
            found.append(place % length)
            place //= length
        return found

    for level, length in enumerate(levels):
        rings = algorithm.rings(level)
        assert sorted(place for ring in rings for place in ring) == list(range(count))
        for ring in rings:
            assert len(ring) == length
            assert [digits(place)[level] for place in ring] == list(range(length))
            assert len({tuple(digits(place)[:level] + digits(place)[level + 1 :]) for place in ring}) == 1
            assert all(algorithm.ring_of(place, level) == ring for place in ring)


def test_every_algorithm_is_read_as_it_is_named() -> None:
    for inside, nodes in [(2, 2), (4, 2), (3, 2), (8, 4), (2, 96)]:
        for algorithm in (BY_LIBRARY, *measured_algorithms(inside, nodes)):
            assert read_algorithm(algorithm.text, inside * nodes) == algorithm
    assert read_algorithm("ring", 5) == AllReduceAlgorithm("ring", (5,))
    assert read_algorithm("halving-doubling", 8) == blueconnect((2, 2, 2))
    assert read_algorithm("blueconnect-2x2", 4).text == "halving-doubling"


@pytest.mark.parametrize(
    ("inside", "nodes", "texts"),
    [
        (2, 2, ["halving-doubling", "leaders-2x2"]),
        (4, 2, ["blueconnect-4x2", "halving-doubling", "leaders-4x2"]),
        (3, 2, ["blueconnect-3x2", "leaders-3x2"]),
        (6, 10, ["blueconnect-6x10", "blueconnect-2x3x2x5", "leaders-6x10"]),
    ],
)
def test_a_probe_measures_one_level_a_side_prime_factors_and_leaders(
    inside: int, nodes: int, texts: list[str]
) -> None:
    assert [algorithm.text for algorithm in measured_algorithms(inside, nodes)] == texts


@pytest.mark.parametrize(
    "text", ["rings", "halving-doubling", "blueconnect-4x2", "blueconnect-1x6", "leaders-2x3x1", "leaders-6", 3, None]
)  # fmt: skip
def test_what_is_no_algorithm_of_six_devices_is_refused(text: object) -> None:
    with pytest.raises(StrategyError, match="is no algorithm of an all-reduce over 6 devices"):
        read_algorithm(text, 6)


@pytest.mark.parametrize(
    ("nodes", "levels"),
    [
        ([0, 0, 1, 1], (2, 2)),
        ([5, 5, 5, 2, 2, 2], (3, 2)),
        ([0, 0, 0, 0], None),
        ([0, 1, 2, 3], None),
        ([0, 1, 0, 1], None),
        ([0, 0, 1, 1, 0, 0], None),
        ([0, 0, 1], None),
        ([0, 0, 0, 1, 1, 2], None),
        ([0, 0, 0, 1], None),
    ],
)
def test_a_hierarchy_has_as_many_devices_of_each_node_side_by_side(
    nodes: list[int], levels: tuple[int, int] | None
) -> None:
    assert node_levels(nodes) == levels


def test_the_algorithm_of_a_size_is_the_last_that_counts_from_there() -> None:
    ring = read_algorithm("ring", 4)
    choices = ((0, BY_LIBRARY), (100, ring))
    assert [algorithm_for(choices, size) for size in (0, 99, 100, 10**9)] == [
        BY_LIBRARY,
        BY_LIBRARY,
        ring,
        ring,
    ]


def test_strategies_keep_their_algorithms_and_defaults_are_no_part_of_the_digest() -> None:
    graph = two_layers()
    plain = random_mesh(graph, 4, np.random.default_rng(1))
    assert "collective_algorithms" not in plain.to_json(graph)
    chosen = replace(plain, collective_algorithms=(((0, 1), BY_LIBRARY), ((0, 1, 2, 3), blueconnect((2, 2)))))
    assert chosen.digest != plain.digest
    document = chosen.to_json(graph)
    assert document["collective_algorithms"][1] == {
        "devices": [0, 1, 2, 3],
        "algorithm": "halving-doubling",
    }
    assert strategy_from_json(document, graph, 4) == chosen
    document["collective_algorithms"].reverse()
    assert strategy_from_json(document, graph, 4).digest == chosen.digest


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "must be a list of devices with an algorithm each"),
        ([3], "must be a list of devices with an algorithm each"),
        ([{"devices": [0, 1]}], "an entry has devices, must have algorithm and devices"),
        ([{"devices": "01", "algorithm": "ring"}], "must list whole numbers"),
        ([{"devices": [0, True], "algorithm": "ring"}], "must list whole numbers"),
        ([{"devices": [1, 0], "algorithm": "ring"}], "must be two or more of 0 to 3, ascending"),
        ([{"devices": [0, 4], "algorithm": "ring"}], "must be two or more of 0 to 3, ascending"),
        ([{"devices": [0], "algorithm": "library"}], "must be two or more of 0 to 3, ascending"),
        ([{"devices": [0, 1], "algorithm": "ring"}] * 2, "devices 0, 1 are there twice"),
        (
            [{"devices": [0, 1, 2], "algorithm": "halving-doubling"}],
            "is no algorithm of an all-reduce over 3",
        ),
    ],
)
def test_malformed_choices_are_refused_in_one_line(entries: object, message: str) -> None:
    graph = two_layers()
    document = random_mesh(graph, 4, np.random.default_rng(1)).to_json(graph)
    with pytest.raises(StrategyError, match=message) as refused:
        strategy_from_json({**document, "collective_algorithms": entries}, graph, 4)
    assert "\n" not in str(refused.value)


def test_other_configurations_keep_the_algorithms() -> None:
    graph = two_layers()
    plain = random_mesh(graph, 4, np.random.default_rng(1))
    chosen: Strategy = replace(plain, collective_algorithms=(((0, 1), BY_LIBRARY),))
    other = random_mesh(graph, 4, np.random.default_rng(2))
    assert chosen.with_configurations(other.configurations).collective_algorithms == (((0, 1), BY_LIBRARY),)
