"""What rejects a proposal before it is derived never rejects one that is within the bound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from graph.operators import OperatorGraph
from graph.strategy import Configuration, Strategy
from graph.topology import Topology, load_topology
from scripts.benchmarks import simulator
from search.algorithms.moves import Moves
from search.cost.cost_table import CostTable
from search.evaluate.evaluator import FullEvaluation
from search.evaluate.incremental import IncrementalEvaluation
from search.evaluate.optimistic_bound import OptimisticBound
from search.simulate.backward_reachability import operators_with_backward
from search.simulate.task_graph import TaskGraphBuilder, TaskKind
from search.space.baselines import data_parallel, fsdp, zero
from tests.graphs import small_graph
from tests.search.builders import (
    SOME_MEASURED,
    MadeUpCosts,
    cluster,
    devices,
    local_calls,
    random_anywhere,
    random_mesh,
)
from tests.search.chains import chain
from tests.search.test_delta import FAR, GRAPHS, TRAINING

TOPOLOGIES = {"one node": devices(4, contention=0.5), "two nodes": cluster()}


def builder_of(graph: OperatorGraph, topology: Topology, **calls: object) -> TaskGraphBuilder:
    return TaskGraphBuilder(graph, topology, CostTable(MadeUpCosts()), TRAINING, **calls)  # type: ignore[arg-type]


class Counted(OptimisticBound):
    """Tries every proposal, and counts what was decided by part of it."""

    tried = decisions = 0

    def decided(self, *, exceeds: bool) -> None:
        type(self).tried += 1
        type(self).decisions += exceeds


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr("search.evaluate.incremental.OptimisticBound", Counted)
    monkeypatch.setattr(Counted, "tried", 0)
    monkeypatch.setattr(Counted, "decisions", 0)
    return Counted


def check_at_their_bounds(builder: TaskGraphBuilder, strategy: Strategy, proposals: int, seed: int) -> None:
    """Check that proposals are accepted at their own makespan, and rejected at a nanosecond less."""
    rng = np.random.default_rng(seed)
    delta, full = (
        IncrementalEvaluation(builder.layout(strategy)),
        FullEvaluation(builder.layout(strategy), "program"),
    )
    moves = Moves(builder.graph, len(builder.topology.devices), FAR)
    for number in range(proposals):
        changed = moves.propose(delta.configurations, rng).changed
        expected = full.propose(changed, 2**62)
        assert expected is not None
        for bound_ns in (expected.step_time_ns // 4, expected.step_time_ns - 1):
            assert delta.propose(changed, bound_ns) is None
            delta.roll_back()
        assert delta.propose(changed, expected.step_time_ns) == expected
        if number % 3:
            delta.roll_back()
            full.roll_back()
        else:
            delta.commit()
            full.commit()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("draw", [random_mesh, random_anywhere])
def test_a_proposal_is_rejected_beyond_its_makespan_and_not_at_it(
    name: str,
    topology: str,
    draw: Callable[[OperatorGraph, int, np.random.Generator], Strategy],
    counted: type[Counted],
) -> None:
    graph, rng = GRAPHS[name], np.random.default_rng(3)
    builder = builder_of(
        graph, TOPOLOGIES[topology], links=SOME_MEASURED, bucket_bytes=200, local_calls=local_calls
    )
    strategy = draw(graph, len(TOPOLOGIES[topology].devices), rng)
    check_at_their_bounds(builder, strategy, 60, seed=5)
    assert counted.decisions > 0


@pytest.mark.parametrize("share", [zero, fsdp])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", GRAPHS)
def test_so_it_is_where_weights_are_shared(
    name: str,
    topology: str,
    share: Callable[[OperatorGraph, int], Strategy],
    counted: type[Counted],
) -> None:
    graph, count = GRAPHS[name], len(TOPOLOGIES[topology].devices)
    builder = builder_of(
        graph, TOPOLOGIES[topology], links=SOME_MEASURED, bucket_bytes=200, local_calls=local_calls
    )
    check_at_their_bounds(builder, share(graph, count), 60, seed=4)
    assert counted.decisions > 0


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("alexnet", 2),
        pytest.param("inception", 4, marks=pytest.mark.slow),
        pytest.param("nmt", 2, marks=pytest.mark.slow),
        pytest.param("resnet101", 2, marks=pytest.mark.slow),
        pytest.param("gpt2", 2, marks=pytest.mark.slow),
    ],
)
def test_so_it_is_with_networks_of_the_zoo(name: str, nodes: int, counted: type[Counted]) -> None:
    graph, topology = small_graph(name), load_topology("p100-cluster", nodes)
    strategy = data_parallel(graph, len(topology.devices))
    check_at_their_bounds(builder_of(graph, topology), strategy, 40, seed=1)
    assert counted.tried > 40


@pytest.mark.parametrize("base_s", [1e-5, 3e-5])
def test_a_weight_that_completes_a_bucket_is_not_left_out(base_s: float) -> None:
    """Without it the large weight that it waits with would be summed far later: with the first layers' weights."""
    graph = chain([8, *[2] * 10, 500, 16], samples=8)
    builder = TaskGraphBuilder(
        graph,
        devices(8),
        CostTable(MadeUpCosts(seconds_per_element=1e-10, base_s=base_s)),
        TRAINING,
        bucket_bytes=4 * (2 * 500 + 500 * 16),
        local_calls=local_calls,
    )
    strategy = data_parallel(graph, 8)
    delta, full = (
        IncrementalEvaluation(builder.layout(strategy)),
        FullEvaluation(builder.layout(strategy), "program"),
    )
    changed = {10: Configuration(strategy.configurations[10].degrees, (1, 0, 2, 3, 4, 5, 6, 7))}
    expected = full.propose(changed, 2**62)
    assert expected is not None
    assert delta.propose(changed, expected.step_time_ns) == expected


def test_weights_of_changed_operators_are_left_out_where_no_other_is_summed_over_their_devices() -> None:
    graph = chain([8] * 4, samples=8)
    layout = builder_of(graph, cluster(), local_calls=local_calls).layout(data_parallel(graph, 8))
    layout.refresh()
    bound, middle = OptimisticBound(layout), layout.configurations[1]
    held = layout.fragments.static_at[1]
    for degrees, count, is_left_out in [
        ((4, 1, 1, 1), 4, True),
        ((4, 2, 1, 1), 8, True),
        ((8, 1, 1, 1), 8, False),
    ]:
        undo = bound.replace({1: Configuration(degrees, middle.devices[:count])})
        assert undo is not None
        sizes = layout.builder.store.set_sizes_at(int(layout.fragments.static_at[1])).tolist()
        assert (sizes == []) is is_left_out
        layout.undo(undo)
        assert layout.fragments.static_at[1] == held


@pytest.mark.parametrize("name", GRAPHS)
def test_sets_that_are_known_without_a_fragment_are_those_of_the_fragment(name: str) -> None:
    graph, rng = GRAPHS[name], np.random.default_rng(6)
    layout = builder_of(graph, cluster(), local_calls=local_calls).layout(data_parallel(graph, 8))
    store = layout.builder.store
    reader_of = {
        weight: static.readers[0].operator
        for weight, static in enumerate(store.classes.statics[: len(graph.weights)])
        if len(static.readers) == 1
    }
    known = 0
    for turn in range(40):
        drawn = (random_mesh if turn % 2 else random_anywhere)(graph, 8, rng).configurations
        layout.change(dict(enumerate(drawn)))
        for weight, operator in reader_of.items():
            numbers = np.array(store.configuration_numbers([drawn[operator]]))
            (size,) = store.set_sizes(np.array([weight]), numbers).tolist()
            axes = store._regions.cutting_axes(store.classes.statics[weight].readers[0].number)
            devices_of_tasks = drawn[operator].devices
            is_known = axes is not None and len(set(devices_of_tasks)) == len(devices_of_tasks)
            assert (size > 0) is is_known
            if size:
                of_fragment = set(store.set_sizes_at(int(layout.fragments.static_at[weight])).tolist())
                assert of_fragment == ({size} if size > 1 else set())
                known += 1
    assert known
    others = [weight for weight in range(len(graph.weights)) if weight not in reader_of]
    assert not store.set_sizes(np.array(others, np.int64), np.zeros(len(others), np.int64)).any()


@pytest.mark.parametrize("name", GRAPHS)
def test_weights_that_are_left_out_are_those_of_a_bound_that_was_just_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk's bound counts the sets of devices by the weights that change; the store is emptied now and then."""
    monkeypatch.setattr("search.simulate.fragment_cache.ARENA_WORDS", 20_000)
    for module in ("fragment_cache", "gradient_sets"):
        monkeypatch.setattr(f"search.simulate.{module}.FEWEST_DEGREES", 1)
    graph, rng = GRAPHS[name], np.random.default_rng(9)
    layout = builder_of(graph, cluster(), local_calls=local_calls).layout(data_parallel(graph, 8))
    store, walked, moves = layout.builder.store, OptimisticBound(layout), Moves(graph, 8, FAR)
    of_several = {
        port.operator
        for static in store.classes.statics[: len(graph.weights)]
        if len(static.readers) > 1
        for port in static.readers
    }
    left_out = 0
    for _ in range(150):
        changed = moves.propose(layout.configurations, rng).changed
        layout.refresh()
        apart = walked._apart(changed)
        assert list(apart) == list(OptimisticBound(layout)._apart(changed))
        left_out += len(apart)
        assert not apart or not of_several & set(changed)
        layout.change(changed)
    assert left_out
    assert store._gradient_sets._parts_PD.shape[1] > 1


def test_part_of_it_rejects_most_proposals_to_data_parallelism(counted: type[Counted]) -> None:
    graph = simulator.imported("alexnet")
    builder = simulator.builder_of(graph, 16)
    delta = IncrementalEvaluation(builder.layout(data_parallel(graph, 16)))
    moves, rng = Moves(graph, 16), np.random.default_rng(2)
    for _ in range(60):
        delta.propose(moves.propose(delta.configurations, rng).changed, delta.current().step_time_ns)
        delta.roll_back()
    assert counted.tried == 60
    assert counted.decisions > 30


@pytest.mark.parametrize("name", GRAPHS)
def test_parts_have_a_backward_surely_or_perhaps_as_in_every_strategy(name: str) -> None:
    """Surely: of every part some replica has one. Not even perhaps: no task has one."""
    graph, rng = GRAPHS[name], np.random.default_rng(8)
    builder = builder_of(graph, cluster(), local_calls=local_calls)
    surely, perhaps = (operators_with_backward(graph, surely=flag) for flag in (True, False))
    assert any(surely)
    for _ in range(20):
        strategy = random_anywhere(graph, 8, rng)
        tasks = builder.build(strategy)
        is_backward = tasks.kind_T == TaskKind.BACKWARD
        for index, configuration in enumerate(strategy.configurations):
            found = set(tasks.part_T[is_backward & (tasks.subject_T == index)].tolist())
            parts = {task // configuration.degrees[-1] for task in found}
            assert perhaps[index] or not found
            assert not surely[index] or len(parts) == len(configuration.devices) // configuration.degrees[-1]
