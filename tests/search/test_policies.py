"""Communication policies: the papers' small cases, the slow reference, and brute force over all orders."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.errors import UsageError
from graph.strategy import Sharding
from search.orders import Order
from search.simulate.priorities import layer, tac, tic
from search.simulate.simulator import Simulation, simulate_tasks
from search.simulate.task_graph import TaskGraph
from search.space.baselines import shared
from tests.reference import policies as slow
from tests.reference import simulate as reference
from tests.search.builders import cluster, random_mesh
from tests.search.test_delta import GRAPHS, builder_of
from tests.search.test_simulator import DEVICES, flat, task_lists

CHANNEL = DEVICES

# An operator: its time, and what it needs: receives r0, r1, ... and operators, by their numbers.
Operator = tuple[int, set[int], set[int]]


def worker(receive_ns: list[int], operators: list[Operator]) -> TaskGraph:
    """Return receives over one channel and operators on one device, as tasks in this order."""
    count = len(receive_ns)
    tasks = [reference.Task(ns, (), (CHANNEL,), None) for ns in receive_ns]
    for ns, receives, before in operators:
        tasks.append(
            reference.Task(ns, (*sorted(receives), *sorted(count + other for other in before)), (0,), 0)
        )
    return flat(tasks, [0] * DEVICES)


def in_order(tasks: TaskGraph, order: tuple[int, ...]) -> Simulation:
    """Simulate with the receives in an order."""
    numbers = np.zeros(tasks.task_count, np.int64)
    numbers[list(order)] = np.arange(len(order))
    return simulate_tasks(tasks, "priority", priority_T=numbers)


def by_tac(tasks: TaskGraph) -> Simulation:
    return simulate_tasks(tasks, "priority", priority_T=tac(tasks))


def order_of(numbers: np.ndarray, receives: int) -> list[int]:
    return sorted(range(receives), key=lambda receive: int(numbers[receive]))


BRANCHES = worker([3, 1], [(1, {0}, set()), (3, {1}, set())])
FOUR = worker([2, 2, 1, 3], [(4, {0, 1}, set()), (2, {2}, set()), (1, {3}, {0, 1})])


def test_two_branches_go_by_johnsons_rule() -> None:
    good, bad = in_order(BRANCHES, (1, 0)), in_order(BRANCHES, (0, 1))
    assert (good.step_time_ns, bad.step_time_ns) == (5, 7)
    assert (good.efficiency, bad.efficiency) == (0.75, 0.25)
    assert good.speedup_potential == bad.speedup_potential == 1
    assert order_of(tac(BRANCHES), 2) == [1, 0]


def test_four_receives_go_in_the_order_of_tac() -> None:
    assert order_of(tac(FOUR), 4) == [2, 0, 1, 3]
    found = {order: in_order(FOUR, order).step_time_ns for order in itertools.permutations(range(4))}
    assert found[2, 0, 1, 3] == min(found.values()) == 10
    assert (found[0, 1, 2, 3], found[3, 2, 1, 0]) == (11, 13)


def test_tic_ranks_by_what_is_needed_together() -> None:
    # M+ is 2, 2, 4, 4; operator 5 waits for r2 alone, operator 6 is the first that waits for r3.
    assert tic(FOUR)[:4].tolist() == [0, 0, 1, 2]


def test_ties_do_not_mislead_tac() -> None:
    tasks = worker([3, 1, 3], [(1, {0}, set()), (1, {1}, set()), (3, {2}, set())])
    assert by_tac(tasks).step_time_ns == 8


def test_tac_is_no_optimum_in_general() -> None:
    tasks = worker([3, 3, 3], [(1, {2}, set()), (4, {0, 1}, set())])
    best = min(in_order(tasks, order).step_time_ns for order in itertools.permutations(range(3)))
    assert (by_tac(tasks).step_time_ns, best) == (13, 11)


@pytest.mark.parametrize("numbers", [[0] * 6, [-1] * 7, [2**31] * 7])
def test_numbers_that_are_none_are_refused(numbers: list[int]) -> None:
    with pytest.raises(UsageError, match=r"^simulation: .* one for each of 7 tasks, from 0 to 2147483647; "):
        simulate_tasks(FOUR, "priority", priority_T=np.array(numbers, np.int64))


def test_tac_refuses_what_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search.simulate.priorities.MOST_FOR_TAC", 10)
    with pytest.raises(
        UsageError, match=r"^order priority-tac: is for 4 communications and 6 dependencies, .* 10; "
    ):
        tac(FOUR)


def random_worker(rng: np.random.Generator, receives: int) -> tuple[list[int], list[Operator]]:
    """Return random times of receives, and operators each of which needs some receives and some operators before."""
    operators: list[Operator] = []
    for place in range(int(rng.integers(receives - 1, receives + 3))):
        needed = set(rng.choice(receives, int(rng.integers(1, 3)), replace=False).tolist())
        before = set(rng.choice(place, min(place, int(rng.integers(0, 3))), replace=False).tolist())
        operators.append((int(rng.integers(1, 20)), needed, before))
    return rng.choice(np.arange(1, 30), receives, replace=False).tolist(), operators


@pytest.mark.parametrize("seed", range(4))
def test_tac_is_optimal_where_each_receive_has_its_own_operator(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tasks = worker(
        rng.integers(1, 9, 5).tolist(), [(int(rng.integers(1, 9)), {place}, set()) for place in range(5)]
    )
    best = min(in_order(tasks, order).step_time_ns for order in itertools.permutations(range(5)))
    assert by_tac(tasks).step_time_ns == best


def test_tac_is_near_the_optimum_and_random_orders_are_not() -> None:
    of_tac, of_random = [], []
    for seed in range(12):
        tasks = worker(*random_worker(np.random.default_rng(seed), 6))
        found = [in_order(tasks, order) for order in itertools.permutations(range(6))]
        best_ns = min(one.step_time_ns for one in found)
        of_tac.append(by_tac(tasks).step_time_ns / best_ns)
        of_random.append(statistics.fmean(one.step_time_ns for one in found) / best_ns)
    assert min(of_tac) >= 1
    assert statistics.fmean(of_tac) < 1.05 < 1.1 < statistics.fmean(of_random)


@given(seed=st.integers(0, 10**6), order=st.permutations(range(5)))
def test_other_names_of_receives_change_nothing(seed: int, order: list[int]) -> None:
    times_ns, operators = random_worker(np.random.default_rng(seed), 5)
    named = worker(times_ns, operators)
    renamed = worker(
        [times_ns[place] for place in order],
        [(ns, {order.index(one) for one in receives}, before) for ns, receives, before in operators],
    )
    for policy in (tic, tac):
        assert policy(renamed)[:5].tolist() == policy(named)[order].tolist()


@given(tasks=task_lists())
def test_tic_and_tac_are_those_of_the_reference(tasks: list[reference.Task]) -> None:
    graph = flat(tasks, [0] * DEVICES)
    assert tic(graph).tolist() == slow.tic(graph)
    assert tac(graph).tolist() == slow.tac(graph)


@given(tasks=task_lists())
def test_tac_sends_nothing_that_another_should_precede(tasks: list[reference.Task]) -> None:
    """Of what is left, no other has min(P of the chosen, its M) < min(its P, M of the chosen), as the paper has it."""
    graph = flat(tasks, [0] * DEVICES)
    numbers, dep, time_ns = tac(graph), slow.waited_for(graph), graph.run_ns_T.tolist()
    left = {task for task in range(len(tasks)) if slow.is_communication(graph, task)}
    for chosen in sorted(left, key=lambda task: int(numbers[task])):
        saved = slow.alone(dep, left, time_ns)
        for other in left - {chosen}:
            assert min(saved[chosen], time_ns[other]) >= min(saved[other], time_ns[chosen])
        left.remove(chosen)


@given(
    tasks=task_lists(),
    contention_ppm=st.lists(st.sampled_from([0, 300_000, 1_750_001]), min_size=3, max_size=3),
)
def test_a_step_takes_no_less_than_a_resource_and_no_more_than_all(
    tasks: list[reference.Task], contention_ppm: list[int]
) -> None:
    graph = flat(tasks, contention_ppm)
    for policy in (tic, tac):
        simulation = simulate_tasks(graph, "priority", priority_T=policy(graph))
        least_ns, most_ns = simulation.bounds_ns
        assert least_ns <= simulation.step_time_ns <= most_ns
        assert 0 <= simulation.efficiency <= 1
        assert simulation.speedup_potential >= 0


def rotated(forward_ns: list[int], backward_ns: list[int], send_ns: list[int], slice_ns: int) -> TaskGraph:
    """Return backward, gradients in slices over one channel, and the next forward, which waits for them by layer."""
    tasks: list[reference.Task] = []
    backwards: dict[int, int] = {}
    slices: dict[int, list[int]] = {}
    layers = len(forward_ns)
    for place in reversed(range(layers)):
        backwards[place] = len(tasks)
        before = (backwards[place + 1],) if place + 1 < layers else ()
        tasks.append(reference.Task(backward_ns[place], before, (0,), 0))
    for place in range(layers):
        parts = [min(slice_ns, send_ns[place] - first) for first in range(0, send_ns[place], slice_ns)]
        slices[place] = list(range(len(tasks), len(tasks) + len(parts)))
        tasks += [reference.Task(ns, (backwards[place],), (CHANNEL,), None) for ns in parts]
    for place in range(layers):
        latest = (backwards[0],) if place == 0 else (len(tasks) - 1,)
        tasks.append(reference.Task(forward_ns[place], (*latest, *slices[place]), (0,), 0))
    return flat(tasks, [0] * DEVICES)


@pytest.mark.parametrize(
    ("forward_ns", "backward_ns", "send_ns", "fifo_ns", "whole_ns", "sliced_ns"),
    [
        ([1] * 3, [1] * 3, [2] * 3, 10, 9, 8),
        ([1] * 4, [2] * 4, [3] * 4, 18, 17, 15),
        ([1] * 3, [1] * 3, [1, 1, 6], 12, 11, 10),
    ],
)
def test_layers_go_as_in_p3(
    forward_ns: list[int],
    backward_ns: list[int],
    send_ns: list[int],
    fifo_ns: int,
    whole_ns: int,
    sliced_ns: int,
) -> None:
    """FIFO and priority of whole layers, and slices of one unit, which change over where P3 in the limit does."""

    def step_ns(slice_ns: int) -> int:
        tasks = rotated(forward_ns, backward_ns, send_ns, slice_ns)
        # A slice's layer is that of the forward that waits for it.
        numbers = [slow.consumer(tasks, task) for task in range(tasks.task_count)]
        return simulate_tasks(tasks, "priority", priority_T=np.array(numbers)).step_time_ns

    whole = max(send_ns)
    assert simulate_tasks(rotated(forward_ns, backward_ns, send_ns, whole), "fifo").step_time_ns == fifo_ns
    assert (step_ns(whole), step_ns(1)) == (whole_ns, sliced_ns)


@pytest.mark.parametrize("graph", sorted(GRAPHS))
@pytest.mark.parametrize("sharing", Sharding)
def test_layer_is_that_of_the_reference(graph: str, sharing: Sharding) -> None:
    one = GRAPHS[graph]
    for seed in range(4):
        plain = random_mesh(one, 8, np.random.default_rng(seed))
        strategy = plain if sharing is Sharding.NONE else shared(one, plain, sharing)
        tasks = builder_of(one, cluster()).build(strategy)
        assert layer(tasks).tolist() == slow.layer(tasks)


@pytest.mark.parametrize("order", ["priority", "priority-tic", "priority-tac"])
def test_the_walk_numbers_as_the_policy_does(order: Order) -> None:
    one = GRAPHS["statistics"]
    strategy = random_mesh(one, 8, np.random.default_rng(3))
    builder = builder_of(one, cluster())
    tasks = builder.build(strategy)
    numbers = {"priority": slow.layer, "priority-tic": slow.tic, "priority-tac": slow.tac}[order](tasks)
    expected = simulate_tasks(tasks, "priority", priority_T=np.array(numbers))
    assert simulate_tasks(tasks, order).step_time_ns == expected.step_time_ns
    assert builder.layout(strategy).run(order)[0] == expected.step_time_ns
