"""Placement: the least makespan of whole operators, as brute force over placements and a plain walk find it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from graph.errors import StrategyError, UsageError
from graph.operators import OperatorGraph, ValueKind
from graph.strategy import Configuration, Strategy
from graph.training import OPTIMIZER_STATE, Training
from search.algorithms.algorithm import AlgorithmContext
from search.algorithms.chain import SearchOptions
from search.algorithms.placement import place
from search.algorithms.registry import run
from search.bounds.whole_placement import placement_model
from search.cost.cost_table import CostTable, nanoseconds
from search.cost.link_costs import LinkCosts
from search.problem import Problem
from search.space.groups import find_groups, following, is_view
from tests.reference.links import message_s
from tests.search.builders import GraphBuilder, MadeUpCosts, branches, devices, local_calls
from tests.search.small import small_topology


def random_dag(rng: np.random.Generator) -> OperatorGraph:
    """Products, poolings and sums of earlier values, of which the loss reads the last two; one weight may be shared."""
    builder = GraphBuilder()
    known = [builder.value("input.0", (4, 4), ValueKind.INPUT)]
    products: list[str] = []
    for place_number in range(int(rng.integers(4, 6))):
        name, source = f"o{place_number}", str(rng.choice(known[-3:]))
        kind = str(rng.choice(["linear", "linear", "shared", "window", "add"]))
        if kind == "shared" and products:
            known.append(builder.linear(name, source, 4, weight=f"{products[0]}.weight"))
        elif kind == "window":
            known.append(builder.window(name, source))
        elif kind == "add" and len(known) > 2:
            known.append(builder.pointwise(name, *known[-2:]))
        else:
            known.append(builder.linear(name, source, 4))
            products.append(name)
    builder.loss(builder.pointwise("sum", *known[-2:]))
    return builder.finish()


def random_problem(seed: int, *, tight: bool = False) -> Problem:
    rng = np.random.default_rng(seed)
    while not (graph := random_dag(rng)).weights:
        pass
    topology = small_topology(rng, int(rng.integers(2, 4)), 1 << 40)
    costs = CostTable(MadeUpCosts(float(10 ** rng.uniform(-8, -6))))
    training = Training(4, optimizer=str(rng.choice(["sgd", "adam"])))
    problem = Problem(graph, topology, costs, training, LinkCosts(), local_calls)
    if not tight:
        return problem
    # Room for two thirds of all.
    whole = sum(kept(problem, strategy, 0) for strategy in placements(problem, most=1))
    topology = small_topology(np.random.default_rng(seed), problem.device_count, max(1, whole * 2 // 3))
    return Problem(graph, topology, costs, training, LinkCosts(), local_calls)


def placements(problem: Problem, most: int | None = None) -> Iterator[Strategy]:
    """Give the strategies of whole operators in which nobody shares a weight with another device."""
    graph, groups = problem.graph, find_groups(problem.graph)
    for chosen in itertools.islice(itertools.product(range(problem.device_count), repeat=len(groups)), most):
        heads = [
            Configuration((1,) * len(graph.operators[group.head].space.axes), (device,))
            for group, device in zip(groups, chosen, strict=True)
        ]
        strategy = following(graph, zip(groups, heads, strict=True))
        on = [configuration.devices[0] for configuration in strategy.configurations]
        if all(len({on[index] for index, _ in graph.readers[weight.name]}) < 2 for weight in graph.weights):
            yield strategy


def unit_of(graph: OperatorGraph) -> dict[int, int]:
    """By operator, a number of those that are on one device: a group, or several that share weights."""
    group_of = {index: number for number, group in enumerate(find_groups(graph)) for index in group.operators}
    merged = {number: number for number in group_of.values()}
    for weight in graph.weights:
        readers = {merged[group_of[index]] for index, _ in graph.readers[weight.name]}
        merged = {number: min(readers) if to in readers else to for number, to in merged.items()}
    return {index: merged[number] for index, number in group_of.items()}


def kept(problem: Problem, strategy: Strategy, device: int) -> int:
    """The bytes of a device, as the model's first lines say it."""
    graph = problem.graph
    on = [configuration.devices[0] for configuration in strategy.configurations]
    total = 0
    for value in graph.values:
        readers = [index for index, _ in graph.readers[value.name]]
        if value.kind in (ValueKind.INPUT, ValueKind.BUFFER):
            units = unit_of(graph)
            total += value.spec.size_bytes * len({units[index] for index in readers if on[index] == device})
        if value.kind is ValueKind.WEIGHT:
            trained = any(graph.has_backward(graph.operators[index]) for index in readers)
            copies = 2 + OPTIMIZER_STATE[problem.training.optimizer] if trained else 1
            total += copies * value.spec.size_bytes * any(on[index] == device for index in readers)
    for index, operator in enumerate(graph.operators):
        if on[index] == device and not is_view(operator):
            total += sum(spec.size_bytes for spec in graph.output_specs(operator))
    return total


def plain_makespan_ns(problem: Problem, strategy: Strategy) -> int:
    """The makespan of one placement, from the nouns alone: what waits for what, recursively."""
    graph, topology = problem.graph, problem.topology
    on = [configuration.devices[0] for configuration in strategy.configurations]
    order = [*graph.order.of_loss, *graph.order.of_buffers]
    steps = [(index, False) for index in order]
    steps += [(index, True) for index in reversed(order) if graph.has_backward(graph.operators[index])]
    end: dict[tuple[int, bool], int] = {}
    busy = [0] * problem.device_count

    def arrival(source: tuple[int, bool], device: int, size_bytes: int) -> int:
        there = on[source[0]]
        if there == device:
            return end[source]
        return end[source] + nanoseconds(message_s(topology, problem.links, there, device, size_bytes))

    for index, back in steps:
        operator, device = graph.operators[index], on[index]
        kind = topology.devices[device].kind_name
        (call,) = local_calls(graph, operator, (1,) * len(operator.space.axes))
        (cost,) = problem.costs.costs([call], kind)
        waits = [busy[device]]
        if back:
            taken = problem.costs.backward_ns(cost, call, graph.summed_slots[index], kind)
            for name in operator.outputs:
                for reader, slot in graph.readers[name]:
                    if (
                        graph.has_backward(graph.operators[reader])
                        and graph.value_by_name[name].requires_gradient
                    ):
                        assert graph.gradient_inputs(graph.operators[reader])[slot]
                        waits.append(
                            arrival((reader, True), device, graph.value_by_name[name].spec.size_bytes)
                        )
        else:
            taken = cost.forward_ns
            for name in operator.inputs:
                if name in graph.producer:
                    size_bytes = graph.value_by_name[name].spec.size_bytes
                    waits.append(arrival((graph.producer[name][0], False), device, size_bytes))
        end[index, back] = busy[device] = max(waits) + taken
    return max(time_ns + updates_ns(problem, on, device) for device, time_ns in enumerate(busy))


def updates_ns(problem: Problem, on: Sequence[int], device: int) -> int:
    """What a device takes to update its weights, those of each group of operators that share some by themselves."""
    graph = problem.graph
    units = unit_of(graph)
    elements: dict[int, int] = {}
    for weight in graph.weights:
        reader = graph.readers[weight.name][0][0]
        if on[reader] == device:
            elements[units[reader]] = elements.get(units[reader], 0) + weight.spec.elements
    kind = problem.topology.devices[device].kind_name
    return sum(
        problem.costs.update_ns(held, problem.training.optimizer, graph.weight_dtype, kind)[0]
        for held in elements.values()
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_least_makespan_is_that_of_brute_force(seed: int) -> None:
    pytest.importorskip("highspy")
    problem = random_problem(seed)
    found = place(placement_model(problem))
    assert found.makespan_ns == plain_makespan_ns(problem, found.strategy)
    assert found.makespan_ns == min(plain_makespan_ns(problem, one) for one in placements(problem))


@pytest.mark.parametrize("seed", range(20, 28))
def test_the_least_makespan_within_memories_is_that_of_brute_force(seed: int) -> None:
    pytest.importorskip("highspy")
    problem = random_problem(seed, tight=True)
    capacity = problem.topology.kind_of(0).memory_bytes
    fitting = [
        one
        for one in placements(problem)
        if all(kept(problem, one, device) <= capacity for device in range(problem.device_count))
    ]
    if not fitting:
        with pytest.raises(StrategyError, match="no placement of whole operators fits the devices' memories"):
            place(placement_model(problem))
        return
    found = place(placement_model(problem))
    assert found.strategy in fitting
    assert found.makespan_ns == min(plain_makespan_ns(problem, one) for one in fitting)


@pytest.mark.parametrize("seed", range(6))
def test_every_placement_has_the_makespan_of_the_plain_walk(seed: int) -> None:
    problem = random_problem(seed)
    model = placement_model(problem)
    for devices_of_units in itertools.product(range(problem.device_count), repeat=model.units):
        strategy = model.strategy(devices_of_units)
        assert model.makespan_ns(devices_of_units) == plain_makespan_ns(problem, strategy)


def test_what_is_found_is_simulated_and_said_to_be_the_least_of_the_model() -> None:
    pytest.importorskip("highspy")
    problem = random_problem(3)
    (found,) = run(("placement",), problem, AlgorithmContext(SearchOptions()))
    assert {len(set(configuration.devices)) for configuration in found.strategy.configurations} == {1}
    assert found.proven.startswith("the least makespan (")
    assert found.step_time_s < float("inf")


def test_graphs_that_are_too_large_and_a_missing_solver_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Problem(branches(), devices(16), CostTable(MadeUpCosts()), Training(4), LinkCosts(), local_calls)
    with pytest.raises(
        UsageError, match=r"groups of operators on 16 devices are \d+ choices, must be at most 64"
    ):
        place(placement_model(large))
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(
        UsageError, match="package highspy is not installed, must be; install it with pip install"
    ):
        place(placement_model(random_problem(0)))
