"""Legal configurations: all of them can be drawn, nothing else is."""

import itertools

import numpy as np

from graph.axes import tasks
from graph.strategy import Configuration, check_configuration
from search.cost.calls_to_profile import calls_to_profile
from search.space.baselines import data_parallel, expert, random_strategy, single_device
from search.space.configurations import enumerate_degrees, random_configuration
from search.space.placements import place, random_placement
from tests.search.builders import branches, local_calls, two_layers


def test_drawn_configurations_are_legal_and_on_distinct_devices() -> None:
    graph = branches()
    rng = np.random.default_rng(1)
    for operator in graph.operators:
        for _ in range(200):
            configuration = random_configuration(operator, 7, rng)
            check_configuration(operator, configuration, 7)
            assert len(set(configuration.devices)) == len(configuration.devices)


def test_every_configuration_on_distinct_devices_is_drawn() -> None:
    operator = two_layers(samples=2, features=3).operators[0]
    legal = {
        Configuration(degrees, devices)
        for degrees in itertools.product((1, 2), (1, 2, 3), (1, 2, 3), (1, 2, 3))
        if tasks(degrees) <= 3
        for devices in itertools.permutations(range(3), tasks(degrees))
    }
    rng = np.random.default_rng(2)
    drawn = {random_configuration(operator, 3, rng) for _ in range(30_000)}
    assert drawn == legal


def test_device_families_cover_contiguous_and_strided_lists() -> None:
    rng = np.random.default_rng(4)
    drawn = {place(random_placement(8, rng), 4, 8) for _ in range(3000)}
    assert {(0, 1, 2, 3), (6, 7, 0, 1), (0, 2, 4, 6), (1, 3, 5, 7)} <= drawn


def test_profiled_degrees_are_whole_and_splits_of_one_or_two_axes() -> None:
    operator = two_layers(samples=2, features=8).operators[0]
    expected = {
        degrees
        for degrees in itertools.product(range(1, 3), range(1, 9), range(1, 9), (1,))
        if tasks(degrees) <= 6 and sum(degree > 1 for degree in degrees) <= 2
    }
    found = enumerate_degrees(operator, 6)
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_needed_calls_are_distinct_ordered_and_enough_for_the_baselines() -> None:
    graph = branches()
    calls = calls_to_profile(graph, 3, local_calls)
    digests = [call.digest for call in calls]
    assert len(set(digests)) == len(digests)
    assert digests == [call.digest for call in calls_to_profile(graph, 3, local_calls)]
    for strategy in (data_parallel(graph, 3), single_device(graph), expert(graph, 3)):
        for operator, configuration in zip(graph.operators, strategy.configurations, strict=True):
            for call in local_calls(graph, operator, configuration.degrees):
                assert call.digest in digests


def test_baselines_are_legal() -> None:
    rng = np.random.default_rng(6)
    for graph in (branches(), two_layers(samples=3)):
        for count in (1, 2, 5, 8):
            data_parallel(graph, count).validate(graph, count)
            expert(graph, count).validate(graph, count)
            single_device(graph, count - 1).validate(graph, count)
            for _ in range(20):
                random_strategy(graph, count, rng).validate(graph, count)


def test_data_parallel_does_what_ddp_does() -> None:
    graph = branches()
    by_name = dict(zip(graph.index_by_name, data_parallel(graph, 4).configurations, strict=True))
    assert by_name["first"] == Configuration((4, 1, 1, 1), (0, 1, 2, 3))
    assert by_name["norm.statistics"] == Configuration((1, 4), (0, 1, 2, 3))
    assert by_name["loss"] == Configuration((1,), (0,))


def test_more_devices_than_samples_leave_devices_idle() -> None:
    graph = two_layers(samples=3)
    assert data_parallel(graph, 8).configurations[0] == Configuration((3, 1, 1, 1), (0, 1, 2))


def test_expert_splits_fully_connected_layers_by_channel() -> None:
    graph = branches()
    by_name = dict(zip(graph.index_by_name, expert(graph, 4).configurations, strict=True))
    assert by_name["first"] == Configuration((1, 4, 1, 1), (0, 1, 2, 3))
    assert by_name["relu"] == Configuration((1, 4, 1), (0, 1, 2, 3))
    assert by_name["window"] == Configuration((4, 1, 1), (0, 1, 2, 3))
