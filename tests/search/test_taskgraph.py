"""The task graph is `graph.plan`, task by task; and changes build the same one as a fresh start."""

import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from graph.collectives import BACKWARD, FEWEST_DEVICES, CollectiveKind
from graph.operators import OperatorGraph
from graph.plan import build_plan
from graph.strategy import Configuration, Strategy
from graph.topology import Topology, load_topology
from graph.training import Training
from search.cost.cost_table import CostTable, Origin
from search.cost.link_costs import COLLECTIVE_KINDS, LinkCosts
from search.simulate.arrays import operator_values
from search.simulate.task_graph import TaskGraph, TaskGraphBuilder, TaskKind
from search.space.baselines import data_parallel, expert, random_strategy, single_device
from tests.reference import taskgraph as reference
from tests.search.builders import (
    ISSUED,
    SOME_MEASURED,
    LaunchedCosts,
    MadeUpCosts,
    all_reduces,
    branches,
    cluster,
    devices,
    local_calls,
    random_anywhere,
    random_mesh,
    statistics,
    two_layers,
)

TRAINING = Training(8, optimizer="adam")
BUCKET_BYTES = 200
KINDS = {
    "forward": TaskKind.FORWARD,
    "backward": TaskKind.BACKWARD,
    "transfer": TaskKind.TRANSFER,
    "gradient": TaskKind.GRADIENT_TRANSFER,
    "renew": TaskKind.BUFFER_TRANSFER,
    "synchronize": TaskKind.SYNCHRONIZE,
    "update": TaskKind.UPDATE,
    "collective": TaskKind.COLLECTIVE,
    "gradient collective": TaskKind.GRADIENT_COLLECTIVE,
    "buffer collective": TaskKind.BUFFER_COLLECTIVE,
    "forward gather": TaskKind.FORWARD_GATHER,
    "backward gather": TaskKind.BACKWARD_GATHER,
    "update gather": TaskKind.UPDATE_GATHER,
    "recompute": TaskKind.RECOMPUTE,
}


def built(graph: OperatorGraph, strategy: Strategy, topology: Topology, links: LinkCosts) -> TaskGraph:
    return TaskGraphBuilder(
        graph,
        topology,
        CostTable(LaunchedCosts()),
        TRAINING,
        links=links,
        bucket_bytes=BUCKET_BYTES,
        local_calls=local_calls,
    ).build(strategy)


def subject(graph: OperatorGraph, key: reference.Key) -> int:
    """The number by which the arrays name what a reference task is about."""
    kind, name = key[0], key[1]
    if kind in ("forward", "backward", "recompute", "synchronize", "update") or str(kind).endswith("gather"):
        return int(name)
    values = [value.name for value in operator_values(graph)]
    values += [buffer for buffer, _ in graph.buffer_updates]
    return values.index(
        str(name), len(operator_values(graph)) if kind in ("renew", "buffer collective") else 0
    )


def check_equal(tasks: TaskGraph, expected: list[reference.Task]) -> None:
    place = {task.key: index for index, task in enumerate(expected)}
    assert tasks.task_count == len(expected)
    for index, task in enumerate(expected):
        kind = KINDS[str(task.key[0])]
        assert TaskKind(int(tasks.kind_T[index])) is kind, task.key
        assert tasks.subject_T[index] == subject(tasks.graph, task.key)
        assert tasks.run_ns_T[index] == task.run_ns, task.key
        assert tasks.resources(index) == task.resources, task.key
        assert tasks.size_bytes_T[index] == task.size_bytes, task.key
        if task.ends:
            assert tasks.ends(index) == task.ends, task.key
        found = set(tasks.pred_E[tasks.pred_ptr_T1[index] : tasks.pred_ptr_T1[index + 1]].tolist())
        assert found == {place[key] for key in task.predecessors}, task.key


GRAPHS = {"two_layers": two_layers, "branches": branches, "statistics": statistics}
TOPOLOGIES = {
    "one node": devices(3, contention=0.5),
    "four alike": devices(4, contention=0.25),
    "two nodes": cluster(),
    "four nodes": load_topology("p100-cluster", nodes=4),
}
LINKS = SOME_MEASURED


def strategies_of(graph: OperatorGraph, count: int) -> list[Strategy]:
    rng = np.random.default_rng(3)
    few = 40 if count < 16 else 12
    return [
        data_parallel(graph, count),
        single_device(graph, count - 1),
        expert(graph, count),
        *(random_anywhere(graph, count, rng) for _ in range(few)),
        *(random_strategy(graph, count, rng) for _ in range(few // 2)),
        *(random_mesh(graph, count, rng) for _ in range(2 * few)),
    ]


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
def test_task_graph_is_the_plan(make: Callable[[], OperatorGraph], topology: Topology) -> None:
    graph = make()
    for strategy in strategies_of(graph, len(topology.devices)):
        deriver = reference.Deriver(
            graph, strategy, topology, LaunchedCosts(), TRAINING, local_calls, BUCKET_BYTES, ISSUED
        )
        expected = deriver.derive()
        tasks = built(graph, strategy, topology, ISSUED)
        check_equal(tasks, expected)
        assert tasks.launched_ns_T.tolist() == deriver.launched_ns()
        assert tasks.launched_ns_T.any()
        assert tasks.peak_memory_D.tolist() == deriver.peak_memory()


def test_strategies_of_the_test_above_have_every_collective_there_and_back() -> None:
    there: Counter[CollectiveKind] = Counter()
    back: Counter[CollectiveKind] = Counter()
    renewing = 0
    for make, topology in itertools.product(GRAPHS.values(), TOPOLOGIES.values()):
        graph = make()
        node_of = [device.node for device in topology.devices]
        for strategy in strategies_of(graph, len(topology.devices)):
            plan = build_plan(graph, strategy, node_of)
            there.update(one.kind for found in plan.collectives.values() for one in found)
            back.update(
                BACKWARD[plan.collectives[one.value][one.number].kind]
                for found in plan.gradient_collectives.values()
                for one in found
            )
            renewing += sum(len(found) for found in plan.buffer_collectives.values())
    assert min(there[kind] for kind in CollectiveKind) >= 10, there
    assert min(back[kind] for kind in CollectiveKind) >= 10, back
    assert renewing >= 10


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
def test_changes_build_what_a_fresh_start_builds(make: Callable[[], OperatorGraph]) -> None:
    graph = make()
    topology = cluster()
    rng = np.random.default_rng(11)
    builder = TaskGraphBuilder(
        graph,
        topology,
        CostTable(MadeUpCosts()),
        TRAINING,
        bucket_bytes=BUCKET_BYTES,
        local_calls=local_calls,
    )
    layout = builder.layout(random_mesh(graph, 8, rng))
    for _ in range(60):
        draw = random_mesh if rng.random() < 0.5 else random_anywhere
        other = draw(graph, 8, rng).configurations
        changed = rng.choice(len(other), size=int(rng.integers(1, 4)), replace=False)
        undo = layout.change({int(index): other[index] for index in changed})
        if rng.random() < 0.3:
            layout.undo(undo)
        makespan_ns, timeline = layout.run("program")
        strategy = Strategy(graph.digest, tuple(layout.configurations))
        fresh = TaskGraphBuilder(
            graph,
            topology,
            CostTable(MadeUpCosts()),
            TRAINING,
            bucket_bytes=BUCKET_BYTES,
            local_calls=local_calls,
        )
        expected = fresh.layout(strategy)
        expected_ns, expected_timeline = expected.run("program")
        count = layout.task_count
        assert (makespan_ns, count) == (expected_ns, expected.task_count)
        assert timeline.end_ns[:count].tolist() == expected_timeline.end_ns[:count].tolist()
        assert layout.peak_memory_D.tolist() == expected.peak_memory_D.tolist()


def test_an_emptied_arena_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, topology = branches(), cluster()
    strategies = [random_anywhere(graph, 8, np.random.default_rng(seed)) for seed in range(6)]

    def makespans() -> list[int]:
        builder = TaskGraphBuilder(
            graph, topology, CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls
        )
        layout = builder.layout(strategies[0])
        found = [layout.run("program")[0]]
        for strategy in strategies[1:]:
            undo = layout.change(dict(enumerate(strategy.configurations)))
            found.append(layout.run("program")[0])
            layout.undo(undo)
            found.append(layout.run("program")[0])
        return found

    expected = makespans()
    monkeypatch.setattr("search.simulate.fragment_cache.ARENA_WORDS", 1)
    assert makespans() == expected


def test_equal_costs_are_asked_for_once() -> None:
    source = MadeUpCosts()
    table = CostTable(source)
    graph = two_layers()
    for _ in range(2):
        TaskGraphBuilder(graph, devices(2), table, TRAINING, local_calls=local_calls).build(
            data_parallel(graph, 2)
        )
    assert len(source.asked) == len(set(source.asked)) == len(table.met().calls)
    # First and second layer are the same call but for the gradient of the input; two halves are one call.
    assert len(source.asked) == 5


def test_names_say_what_a_task_does() -> None:
    graph = two_layers()
    tasks = built(graph, data_parallel(graph, 2), devices(2), LINKS)
    names = tasks.names()
    assert names[0] == "forward first[0]"
    assert "send loss.sum 1->0" in names
    assert "send gradient of loss.sum 0->1" in names
    assert "all-reduce bucket 0 over 0, 1" in names
    assert names[-1] == "update device 1"
    assert len(tasks.resource_names()) == tasks.resource_count


def test_kernels_number_collectives_as_the_graph_does() -> None:
    from search.kernels import records

    codes = [getattr(records, kind.name) for kind in CollectiveKind]
    assert (
        codes
        == list(range(len(COLLECTIVE_KINDS)))
        == [COLLECTIVE_KINDS.index(kind) for kind in CollectiveKind]
    )
    assert records.FEWEST_DEVICES == FEWEST_DEVICES
    assert [getattr(records, kind.name) for kind in TaskKind] == [int(kind) for kind in TaskKind]


def renewing_on_one_device() -> TaskGraph:
    """Four devices share the samples; the first renews the buffer that all of them read."""
    graph = statistics()
    configurations = list(data_parallel(graph, 4).configurations)
    renewed = graph.index_by_name["renewed"]
    configurations[renewed] = Configuration((1,) * len(graph.operators[renewed].space.axes), (0,))
    return built(graph, Strategy(graph.digest, tuple(configurations)), devices(4), LINKS)


def test_names_of_collectives_say_what_they_do() -> None:
    names = renewing_on_one_device().names()
    assert "all-reduce sum over 0, 1, 2, 3" in names
    assert "all-reduce gradient of sum over 0, 1, 2, 3" in names
    assert "reduce loss.sum over 0, 1, 2, 3" in names
    assert "broadcast gradient of loss.sum over 0, 1, 2, 3" in names
    assert "broadcast new offset over 0, 1, 2, 3" in names
    assert "all-reduce bucket 0 over 0, 1, 2, 3" in names


def test_what_only_renews_buffers_comes_after_the_backward() -> None:
    tasks = renewing_on_one_device()
    names = tasks.names()
    kinds = [TaskKind(int(kind)) for kind in tasks.kind_T]
    last_backward = max(place for place, kind in enumerate(kinds) if kind is TaskKind.BACKWARD)
    renewal = names.index("forward renewed[0]")
    assert last_backward < renewal < names.index("broadcast new offset over 0, 1, 2, 3")
    assert kinds[-1] is TaskKind.UPDATE


def test_collectives_rest_on_what_their_costs_rest_on() -> None:
    graph = two_layers()
    links = all_reduces({2: (1e-5, 2e-9)}, transfers=Origin.ESTIMATED)
    tasks = built(graph, data_parallel(graph, 2), devices(2), links)
    assert set(tasks.origin_T[tasks.kind_T == TaskKind.SYNCHRONIZE].tolist()) == {0}
    assert set(tasks.origin_T[tasks.kind_T == TaskKind.TRANSFER].tolist()) == {1}
