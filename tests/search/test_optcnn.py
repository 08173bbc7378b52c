"""OptCNN: the least additive cost, as brute force over strategies and a plain evaluation of the cost find it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from graph.axes import operand_regions, tasks
from graph.collectives import BACKWARD, SUMMABLE, recognize
from graph.errors import UsageError
from graph.exchange import exchange
from graph.intervals import volume
from graph.operators import OperatorGraph, ValueKind
from graph.plan import consumers_of
from graph.strategy import Strategy
from graph.training import Training
from graph.weight_placement import cells, held_regions
from search.algorithms.optcnn import MOST_WHOLE, default_space, factors, least_additive, optcnn, small_tables
from search.bounds.elimination import CostFunction, TooWide, minimize, smallest
from search.cost.cost_table import CostTable, nanoseconds
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from search.space.baselines import random_strategy, single_device
from search.space.enumerated_space import (
    Space,
    all_degrees,
    count_contiguous,
    dividing_degrees,
    leading_space,
    whole_space,
)
from search.space.groups import find_groups, following
from search.tables import Tables
from tests.quick import seeds
from tests.reference.links import collective_price, message_s
from tests.reference.taskgraph import moved
from tests.search.builders import MadeUpCosts, branches, cluster, devices, local_calls, two_layers
from tests.search.small import small_problem, strategies


def additive_ns(problem: Problem, strategies: Sequence[Strategy]) -> list[int]:
    """Return the additive costs of strategies whose operators follow their heads."""
    groups = find_groups(problem.graph)
    choices = tuple(
        tuple(dict.fromkeys(strategy.configurations[group.head] for strategy in strategies))
        for group in groups
    )
    space = Space(problem.graph, problem.device_count, groups, choices, "given strategies", whole=False)
    functions = factors(Tables(problem, space))
    costs = []
    for strategy in strategies:
        chosen = [
            configurations.index(strategy.configurations[group.head])
            for group, configurations in zip(groups, choices, strict=True)
        ]
        costs.append(
            sum(
                int(function.table[tuple(chosen[variable] for variable in function.scope)])
                for function in functions
            )
        )
    return costs


def plain_additive_ns(one: Problem, strategy: Strategy) -> int:
    """The cost of one strategy, as the module's first lines say it, from the nouns alone."""
    graph = one.graph
    total = sum(_operator_ns(one, strategy, index) for index in range(len(graph.operators)))
    for value in graph.values:
        if value.kind is ValueKind.OPERATOR:
            total += sum(
                _exchange_ns(one, strategy, value.name, reading)
                for reading in range(len(graph.readers[value.name]))
            )
    return total + sum(_sync_ns(one, strategy, group.operators) for group in find_groups(graph))


def _operator_ns(one: Problem, strategy: Strategy, index: int) -> int:
    graph, configuration = one.graph, strategy.configurations[index]
    calls = local_calls(graph, graph.operators[index], configuration.degrees)
    forward_ns, backward_ns, summed = [], [], graph.summed_slots[index]
    for call, device in zip(calls, configuration.devices, strict=True):
        kind = one.topology.devices[device].kind_name
        (cost,) = one.costs.costs([call], kind)
        forward_ns.append(cost.forward_ns)
        backward_ns.append(one.costs.backward_ns(cost, call, summed, kind))
    return max(forward_ns) + max(backward_ns)


def _exchange_ns(one: Problem, strategy: Strategy, name: str, reading: int) -> int:
    graph, topology = one.graph, one.topology
    producer, output = graph.producer[name]
    spec = graph.value_by_name[name].spec
    read = consumers_of(graph, strategy, name)[reading]
    assemblies = exchange(
        graph.operators[producer].space,
        output,
        strategy.configurations[producer],
        [read],
        [device.node for device in topology.devices],
    )
    reader = graph.operators[read.operator]
    gradient = graph.gradient_inputs(reader)[read.slot] and graph.has_backward(reader)
    collectives = recognize(assemblies, summable=spec.dtype in SUMMABLE)
    served = {number for collective in collectives for number in collective.assemblies}
    total = 0
    for back in (False, True) if gradient else (False,):
        busy = [0] * len(topology.links)
        for collective in collectives:
            kind = BACKWARD[collective.kind] if back else collective.kind
            price = collective_price(topology, collective.devices, one.links, kind, collective.root)
            for link in price.links:
                busy[link] += price.duration_ns(moved(collective, assemblies).largest * spec.item_bytes)
        for number, assembly in enumerate(assemblies):
            for piece in assembly.remote_pieces if number not in served else ():
                ends = piece.source_device, assembly.device
                there, here = reversed(ends) if back else ends
                time_s = message_s(topology, one.links, there, here, volume(piece.region) * spec.item_bytes)
                for link in topology.route(there, here):
                    busy[link] += nanoseconds(time_s)
        total += max(busy, default=0)
    return total


def _sync_ns(one: Problem, strategy: Strategy, group: Sequence[int]) -> int:
    graph, topology = one.graph, one.topology
    shared: dict[tuple[int, ...], int] = {}
    elements: dict[int, int] = {}
    for weight in graph.weights:
        readers = [(index, slot) for index, slot in graph.readers[weight.name] if index in group]
        if not any(graph.has_backward(graph.operators[index]) for index, _ in graph.readers[weight.name]):
            continue
        held = held_regions(
            (device, region)
            for index, slot in readers
            for device, region in zip(
                strategy.configurations[index].devices,
                operand_regions(
                    graph.operators[index].space.axes,
                    graph.operators[index].space.inputs[slot],
                    strategy.configurations[index].degrees,
                ),
                strict=True,
            )
        )
        for device, region in held.items():
            elements[device] = elements.get(device, 0) + volume(region)
        for cell in cells(held) if held else ():
            if len(cell.devices) > 1:
                size = volume(cell.region) * weight.spec.item_bytes
                shared[cell.devices] = shared.get(cell.devices, 0) + size
    busy = [0] * len(topology.devices)
    for members, size in shared.items():
        for device in members:
            busy[device] += collective_price(topology, members, one.links).duration_ns(size)
    updates = [
        one.costs.update_ns(
            held, one.training.optimizer, one.graph.weight_dtype, topology.devices[device].kind_name
        )[0]
        for device, held in elements.items()
    ]
    return max(busy) + max(updates, default=0)


def larger(graph: OperatorGraph, count: int) -> Problem:
    topology = cluster() if count == 8 else devices(count)
    return Problem(graph, topology, CostTable(MadeUpCosts(1e-7)), Training(4), LinkCosts(), local_calls)


@pytest.mark.parametrize("seed", range(8))
def test_the_least_additive_cost_is_that_of_brute_force(seed: int) -> None:
    one = small_problem(seed, 200)
    found = optcnn(one, whole_space(one.graph, one.device_count))
    least = min(plain_additive_ns(one, strategy) for strategy in strategies(one.graph, one.device_count))
    assert found.cost_ns == least == plain_additive_ns(one, found.strategy)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_the_least_additive_cost_is_that_of_brute_force_in_larger_spaces(seed: int) -> None:
    one = small_problem(seed, 4000)
    found = optcnn(one, whole_space(one.graph, one.device_count))
    least = min(plain_additive_ns(one, strategy) for strategy in strategies(one.graph, one.device_count))
    assert found.cost_ns == least == plain_additive_ns(one, found.strategy)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_the_cost_of_any_strategy_is_the_sum_that_it_claims(count: int) -> None:
    """On larger graphs, with collectives, several nodes and a weight that two groups share."""
    one = larger(branches(), count)
    rng = np.random.default_rng(count)
    some = [random_strategy(one.graph, count, rng) for _ in range(12)]
    assert additive_ns(one, some) == [plain_additive_ns(one, strategy) for strategy in some]


@pytest.mark.parametrize("count", [4, 8])
def test_nothing_in_its_space_costs_less(count: int) -> None:
    one = larger(branches(), count)
    found = optcnn(one)
    found.strategy.validate(one.graph, count)
    assert additive_ns(one, [found.strategy]) == [found.cost_ns]
    rng = np.random.default_rng(2)
    drawn = [[int(rng.integers(len(some))) for some in found.space.choices] for _ in range(30)]
    assert min(additive_ns(one, [found.space.strategy(numbers) for numbers in drawn])) >= found.cost_ns
    assert found.cost_ns <= additive_ns(one, [single_device(one.graph)])[0]


def test_few_devices_have_the_whole_space_and_many_a_compact_one() -> None:
    assert default_space(larger(two_layers(), 3)).whole
    assert "aligned lists of neighbours" in default_space(larger(two_layers(), 4)).name
    large = default_space(larger(two_layers(samples=64, features=64), 8))
    assert max(len(choices) for choices in large.choices) <= 64


def test_a_group_of_too_many_choices_keeps_those_that_cost_least_by_themselves() -> None:
    one = larger(branches(), 48)
    every, kept = leading_space(one.graph, 48), default_space(one)
    too_many = 0
    for number, group in enumerate(every.groups):
        costs = []
        for choice in every.choices[number]:
            strategy = following(one.graph, [(group, choice)], single_device(one.graph).configurations)
            own_ns = sum(_operator_ns(one, strategy, index) for index in group.operators)
            costs.append(own_ns + _sync_ns(one, strategy, group.operators))
        cheapest = sorted(range(len(costs)), key=lambda choice: (costs[choice], choice))[:MOST_WHOLE]
        assert kept.choices[number] == tuple(every.choices[number][choice] for choice in sorted(cheapest))
        too_many += len(costs) > MOST_WHOLE
    assert too_many


def test_tables_of_too_many_pairs_are_those_of_fewer_configurations_a_group() -> None:
    one = larger(branches(), 48)
    whole = small_tables(one, 1 << 20)
    assert whole is not None
    assert whole.space.choices == default_space(one).choices
    small = small_tables(one, whole.pair_count // 3)
    assert small is not None
    assert small.pair_count <= whole.pair_count // 3
    assert max(len(choices) for choices in small.space.choices) == MOST_WHOLE // 2
    assert all(
        set(few) <= set(many) for few, many in zip(small.space.choices, whole.space.choices, strict=True)
    )
    assert small_tables(one, whole.pair_count // 1000) is None
    # What was known of choices is what is found of them anew.
    assert least_additive(small) == least_additive(Tables(one, small.space))


@pytest.mark.parametrize("count", [6, 8, 12])
def test_listed_degrees_are_all_those_whose_tasks_divide_the_number_of_devices(count: int) -> None:
    for operator in branches().operators:
        divide = [degrees for degrees in all_degrees(operator, count) if count % tasks(degrees) == 0]
        assert dividing_degrees(operator, count) == divide
        assert count_contiguous(operator, count) == sum(count // tasks(degrees) for degrees in divide)


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_elimination_finds_the_least_sum_on_any_graph_of_functions(seed: int) -> None:
    """Series-parallel or not, with functions of one to three variables."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 7)))]
    factors = []
    for _ in range(int(rng.integers(1, 10))):
        count = min(len(sizes), int(rng.integers(1, 4)))
        scope = tuple(sorted(rng.choice(len(sizes), count, replace=False).tolist()))
        factors.append(CostFunction(scope, rng.integers(0, 50, tuple(sizes[one] for one in scope))))
    found = minimize(sizes, factors)

    def value(chosen: Sequence[int]) -> int:
        return sum(int(factor.table[tuple(chosen[one] for one in factor.scope)]) for factor in factors)

    least = min(value(chosen) for chosen in itertools.product(*(range(size) for size in sizes)))
    assert found.value == least == value(found.chosen)
    # And so are those after it, each of other values.
    all_values = sorted(value(chosen) for chosen in itertools.product(*(range(size) for size in sizes)))
    several = smallest(sizes, factors, 10)
    assert [one.value for one in several] == all_values[:10] == [value(one.chosen) for one in several]
    assert len({one.chosen for one in several}) == len(several)


def test_chains_need_no_function_of_more_than_one_variable() -> None:
    rng = np.random.default_rng(0)
    chain = [CostFunction((k, k + 1), rng.integers(0, 9, (4, 4))) for k in range(20)]
    assert minimize([4] * 21, chain).widest == 1


def test_variables_of_one_value_cost_no_dim() -> None:
    """On one device each group has one choice, and one of NMT's has more neighbours than an array has dims."""
    star = [CostFunction((0, other), np.array([[3], [1]])) for other in range(1, 70)]
    found = minimize([2, *[1] * 69], star)
    assert (found.value, found.chosen, found.widest) == (69, (1, *[0] * 69), 0)
    alone = minimize([1] * 70, [CostFunction((0, other), np.array([[2]])) for other in range(1, 70)])
    assert (alone.value, alone.chosen) == (138, (0,) * 70)


def test_a_core_that_is_too_large_is_refused() -> None:
    rng = np.random.default_rng(0)
    clique = [CostFunction(pair, rng.integers(0, 9, (6, 6))) for pair in itertools.combinations(range(6), 2)]
    assert minimize([6] * 6, clique).widest == 5
    with pytest.raises(TooWide):
        minimize([6] * 6, clique, limit=1000)
    one = larger(branches(), 4)
    with pytest.raises(
        UsageError, match=r"eliminations leave \d+ of 6 groups, whose tables need \d+ entries"
    ):
        optcnn(one, limit=10)
