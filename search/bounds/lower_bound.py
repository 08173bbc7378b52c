"""A time that no strategy's step is below, for given costs and a given topology, with the proof.

Two bounds; the larger one counts.

`path_bound_ns`, for few devices, looks at every configuration on every list of devices, and at every exchange
between two of them: `search.bounds.critical_path` says why it holds. It is for strategies whose operators follow
their heads.

`best_times_bound`, for any number of devices D, looks at every operator by itself, under all degrees with at most D
tasks on distinct devices: it is for all strategies of such configurations, whoever follows whom. Its proof:

(1) Of an axis of n points cut into d parts the first has ceil(n / d) points, from the first on
    (`graph.intervals.part`). So what an operator's first task executes depends on these sizes alone, and replicas of
    it execute the same. The costs of all calls that first tasks can have are looked up; f and b are the least forward
    and backward among them, w the least of their sum at the same degrees.
(2) An edge is sure where the reader's first task needs something of what the producer's first task makes, under all
    degrees. That holds where it does for the first point of all axes alone: larger parts need and make that too.
    Along a sure edge the forward of a reader's first task waits for that of the producer's first task; where a
    gradient flows, and the reader's has a backward, the producer's has one that waits for it. The first task of what
    makes the loss has one (or a replica of it, whose chosen producers are then those on the path).
(3) So a path forward through sure edges to the loss, and back the same way, takes at least the sum of w over the
    operators that it visits twice, and of f over those that it visits once before. Recursion finds the longest.
(4) After its backward the device of a first task updates at least the weights that the task reads. Where r > 1 tasks
    read the same part of a weight that no other operator reads, these are on r devices, and the update waits for the
    all-reduce of a bucket that holds that part: over a ring 2 (r - 1) steps, by halving and doubling 2 log2(r), which
    send 2 (r - 1) / r of its bytes over links that are no faster than the fastest, or what was measured for r devices.
    Replicas only make r larger. Of the last operator on a path the least of w with all of this is taken, at the same
    degrees. Where holders may share weights, a device may have nothing of them to update, and nothing of this is taken.
(5) Every task waits for some task of each operator that it reads, and every backward is waited for by one of each
    operator that its gradient goes to. So between a path of least forwards to an operator (of any tasks, where all of
    them were looked up) and one of least backwards from it, all of its work is done. The work of the operators that
    have at least x before them and y after them is done by D devices: step >= x + work / D + y.
(6) The work of an operator is also at least what its operations and bytes as a whole take (`graph.rules.least`) at the
    best rate that the costs' source ever gives (`search.cost.cost_table.BoundedSource`): in any configuration its
    tasks do at least as much together. That counts where there are too many configurations to look at all tasks, and
    of a backward where every part has one. And each element of a weight that has a gradient is updated by some
    device, after the forward of an operator that reads it.

Costs are not negative, and the cost of an update does not fall with the number of elements. Contention, the order on
a device or a link, and memory only add to all of this. It holds in every order of simulation.

Sources: Graham, "Bounds on multiprocessing timing anomalies" (1969) for path and work; Carlier, "The one-machine
sequencing problem" (1982) for heads and tails around work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2, prod

import numpy as np

from graph.axes import Degrees, OperandMap, operand_region, read_elements
from graph.calls import LocalCall
from graph.collectives import CollectiveKind
from graph.intervals import intersect_regions, volume
from graph.operators import Operator, OperatorGraph, ValueKind
from search.bounds.critical_path import CriticalPaths
from search.cost.cost_table import nanoseconds
from search.cost.link_costs import Curve
from search.problem import Problem
from search.simulate.backward_reachability import operators_with_backward
from search.space.enumerated_space import all_degrees, count_degrees, count_whole, whole_space
from search.space.groups import find_groups
from search.tables import Array, Tables

# Pairs of configurations, over all edges, up to which every pair is looked at.
MOST_PAIRED = 100_000
# Costs that are looked up at most; operators beyond it count as nothing.
MOST_CALLS = 20_000
# Tasks of an operator up to which all of them are looked at, for its work.
MOST_TASKS = 400


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound. `whole`: every cost was looked up, so that nothing counts as nothing."""

    time_ns: int
    kind: str
    whole: bool

    @property
    def seconds(self) -> float:
        """Seconds that no step is below."""
        return self.time_ns / 1e9

    def gap(self, step_time_s: float) -> float:
        """Return the share by which a step is above the bound at most; 0 for one that is not of the space and below."""
        return max(0.0, step_time_s / self.seconds - 1.0) if self.time_ns else float("inf")


def lower_bound(problem: Problem, *, most_calls: int = MOST_CALLS, shared: bool = False) -> Bound:
    """Return the best bound that the problem's size allows; at most `most_calls` costs are looked up.

    With `shared` it is also for strategies whose weights are shared by their holders.

    Raises:
        CostError: a local call has no cost.
    """
    graph, count = problem.graph, problem.device_count
    best = best_times_bound(problem, most_calls=most_calls, shared=shared)
    if shared:
        # Paths hold all-reduces and whole updates.
        return best
    groups = find_groups(graph)
    choices = {
        index: number
        for group in groups
        for number in [count_whole(graph.operators[group.head], count)]
        for index in group.operators
    }
    pairs = sum(choices[reader] * choices[producer] for reader, _, producer, _, _ in _edges(graph))
    if pairs <= MOST_PAIRED:
        found_ns = path_bound_ns(problem)
        if found_ns >= best.time_ns:
            return Bound(found_ns, "longest path over all configurations", whole=True)
    return best


def path_bound_ns(problem: Problem) -> int:
    """Return the bound of `search.bounds.critical_path` over the whole space, and of the work that no choice avoids.

    Raises:
        UsageError: there are too many configurations.
        CostError: a local call has no cost.
    """
    paths = CriticalPaths(Tables(problem, whole_space(problem.graph, problem.device_count)))
    return paths.bound_ns()


def best_times_bound(problem: Problem, *, most_calls: int = MOST_CALLS, shared: bool = False) -> Bound:
    """Return the bound over every operator's best times, see the module; `shared`: also where weights are shared.

    Raises:
        CostError: a local call has no cost.
    """
    best = _BestTimes(problem, most_calls, shared=shared)
    return Bound(max(best.path_ns(), best.window_ns()), "best time of every operator", whole=best.whole)


@dataclass(frozen=True, slots=True)
class _Least:
    """Least nanoseconds of an operator over its degrees.

    forward, both: of the first task, without and with its backward. last: both, with what follows the backward.
    part_forward, part_backward: of any task. work: of all tasks together.
    """

    forward: int = 0
    both: int = 0
    last: int = 0
    part_forward: int = 0
    part_backward: int = 0
    work: int = 0


class _BestTimes:
    """Looks up all costs, then finds the longest path and the fullest window."""

    def __init__(self, problem: Problem, most_calls: int, *, shared: bool = False) -> None:
        self.problem, self.graph = problem, problem.graph
        self.shared = shared
        self.kinds = [kind.name for kind in problem.topology.kinds]
        self._curves: dict[int, list[Curve]] = {}
        self.whole = True
        self.surely_active = operators_with_backward(self.graph, surely=True)
        self.least = self._all_least(most_calls)
        # By reader: those that it reads, and whether a gradient flows back.
        self.sure_to: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
        self.any_to: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
        for reader, slot, producer, output, gradient in _edges(self.graph):
            if _needs_something(self.graph.operators[reader], slot):
                self.any_to[reader].append((producer, gradient))
            if _is_sure(self.graph.operators[producer], output, self.graph.operators[reader], slot):
                self.sure_to[reader].append((producer, gradient))

    def _all_least(self, most_calls: int) -> list[_Least]:
        """Return the least times of all operators; of like ones, once."""
        graph, count = self.graph, self.problem.device_count
        like: dict[str, list[int]] = {}
        for index, operator in enumerate(graph.operators):
            specs = (
                graph.input_specs(operator),
                graph.output_specs(operator),
                graph.gradient_inputs(operator),
            )
            weights = [
                (slot, operator.inputs.index(name), len(graph.consumers[name]))
                for slot, name in enumerate(operator.inputs)
                if graph.value_by_name[name].kind is ValueKind.WEIGHT
            ]
            summed = graph.summed_slots[index]
            warm = graph.rereads_weights[index]
            key = repr((operator.target, operator.arguments, specs, operator.space, weights, summed, warm))
            like.setdefault(key, []).append(index)
        wanted = [(some, sizes_degrees(graph.operators[some[0]], count)) for some in like.values()]
        # Those with few degrees first: most operators for the same number of costs.
        wanted.sort(key=lambda pair: (len(pair[1]) / len(pair[0]), pair[0][0]))
        least = [_Least()] * len(graph.operators)
        first_like = {index: some[0] for some in like.values() for index in some}
        self.like = [first_like[index] for index in range(len(graph.operators))]
        for some, degrees in wanted:
            if len(degrees) > most_calls:
                self.whole = False
                continue
            most_calls -= len(degrees)
            least_of_class = self._least(some[0], degrees)
            for index in some:
                least[index] = least_of_class
        return least

    def _least(self, index: int, all_of: Sequence[Degrees]) -> _Least:
        operator, count = self.graph.operators[index], self.problem.device_count
        backward = 1 if self.graph.has_backward(operator) else 0
        part_forward = part_backward = work = 0
        counted = count_degrees(operator.space.axes[:-1], count)
        calls_of: dict[Degrees, Sequence[LocalCall]] = {}
        if sum(number * ways for number, ways in counted.items()) <= MOST_TASKS:
            every = [degrees for degrees in all_degrees(operator, count) if degrees[-1] == 1]
            calls_of = {degrees: self.problem.local_calls(self.graph, operator, degrees) for degrees in every}
            rows = [self._cheapest(index, calls) for calls in calls_of.values()]
            part_forward = min(int(forward.min()) for forward, _ in rows)
            part_backward = backward * min(int(back.min()) for _, back in rows)
            work = min(int(forward.sum() + backward * back.sum()) for forward, back in rows)
        calls = [
            calls_of[degrees][0] if degrees in calls_of else self.problem.call_of_first(operator, degrees)
            for degrees in all_of
        ]
        forward_ns, backward_ns = self._cheapest(index, calls)
        after_ns = np.array([self._after_ns(index, degrees) for degrees in all_of], np.int64)
        both_ns = forward_ns + backward * backward_ns
        return _Least(
            forward=int(forward_ns.min()),
            both=int(both_ns.min()),
            last=int((both_ns + after_ns).min()),
            part_forward=part_forward,
            part_backward=part_backward,
            work=work,
        )

    def _cheapest(self, index: int, calls: Sequence[LocalCall]) -> tuple[Array, Array]:
        """Return forward and backward of each call of an operator on the kind where it takes least."""
        rows, costs = [], self.problem.costs
        summed = self.graph.summed_slots[index]
        for kind in self.kinds:
            of_kind = zip(costs.costs(calls, kind), calls, strict=True)
            rows.append(
                [(cost.forward_ns, costs.backward_ns(cost, call, summed, kind)) for cost, call in of_kind]
            )
        least = np.array(rows, np.int64).min(axis=0)
        return least[:, 0], least[:, 1]

    def _after_ns(self, index: int, degrees: Degrees) -> int:
        """Return the least time after the backward of the first task: all-reduces of its own weights, the update."""
        graph, operator = self.graph, self.graph.operators[index]
        if self.shared or not graph.has_backward(operator):
            return 0
        points = [
            (0, ceil(axis.size / degree)) for axis, degree in zip(operator.space.axes, degrees, strict=True)
        ]
        points[-1] = (0, 1)  # the replica axis
        elements, longest_ns = 0, 0
        for name in dict.fromkeys(operator.inputs):
            if graph.value_by_name[name].kind is not ValueKind.WEIGHT:
                continue
            operand = operator.space.inputs[operator.inputs.index(name)]
            held = volume(operand_region(operand, points))
            elements += held
            sharing = _sharing(operand, degrees) if len(graph.consumers[name]) == 1 else 1
            if sharing > 1:
                size_bytes = held * graph.value_by_name[name].spec.item_bytes
                longest_ns = max(longest_ns, self._all_reduce_ns(sharing, size_bytes))
        if not elements:
            return 0
        optimizer, costs = self.problem.training.optimizer, self.problem.costs
        dtype = graph.weight_dtype
        return longest_ns + min(costs.update_ns(elements, optimizer, dtype, kind)[0] for kind in self.kinds)

    def _all_reduce_ns(self, least_members: int, size_bytes: int) -> int:
        """Return the least time of an all-reduce over at least so many devices: of a bucket that holds these bytes."""
        if least_members not in self._curves:
            self._curves[least_members] = self._all_reduce_curves(least_members)
        least_s = min(curve.seconds(size_bytes) for curve in self._curves[least_members])
        # One nanosecond for rounding.
        return max(0, nanoseconds(least_s) - 1)

    def _all_reduce_curves(self, least_members: int) -> list[Curve]:
        """Return curves of which an all-reduce over at least so many devices is on or above one.

        What the formula gives rises with the number of devices, so that of the numbers that nobody measured the first
        is enough.
        """
        links, topology = self.problem.links, self.problem.topology
        fastest = max(link.bandwidth_bytes_per_s for link in topology.links)
        latency_s = min(link.latency_s for link in topology.links)
        curves: list[Curve] = []
        by_formula = False
        for members in range(least_members, self.problem.device_count + 1):
            # Groups of one size may cost differently; those that nobody measured are priced by formulas.
            curves += links.measured_over(CollectiveKind.ALL_REDUCE, members)
            if not by_formula and (CollectiveKind.ALL_REDUCE, members) not in links.by_size:
                least_s, s_per_byte = (
                    2 * ceil(log2(members)) * latency_s,
                    2 * (members - 1) / members / fastest,
                )
                curves.append(Curve.line(least_s, s_per_byte))
                by_formula = True
        return curves

    def path_ns(self) -> int:
        """Return the longest path through sure edges, forward to the loss and back."""
        graph, count = self.graph, len(self.graph.operators)
        loss = graph.producer[graph.loss][0]
        # From the start of a forward, by way of the loss, to the end of its backward; -1: the loss does not come of it.
        inner = [-1] * count
        inner[loss] = self.least[loss].both
        for index in range(count - 1, -1, -1):
            if inner[index] < 0:
                continue
            for producer, gradient in self.sure_to[index]:
                if gradient and graph.has_backward(graph.operators[producer]):
                    inner[producer] = max(inner[producer], inner[index] + self.least[producer].both)
        head = [0] * count
        longest = 0
        for index in range(count):
            for producer, _ in self.sure_to[index]:
                head[index] = max(head[index], head[producer] + self.least[producer].forward)
            if inner[index] >= 0:
                last = self.least[index].last - self.least[index].both
                longest = max(longest, head[index] + inner[index] + last)
        return longest

    def window_ns(self) -> int:
        """Return the most of head + work / devices + tail, over the operators with such heads and tails at least."""
        graph, devices = self.graph, self.problem.device_count
        head, tail = ([0] * len(graph.operators) for _ in range(2))
        for index in range(len(graph.operators)):
            for producer, gradient in self.any_to[index]:
                head[index] = max(head[index], head[producer] + self.least[producer].part_forward)
                if gradient and graph.has_backward(graph.operators[producer]):
                    tail[index] = max(tail[index], tail[producer] + self.least[producer].part_backward)
        # (head, tail, work) of all that devices do: operators, and updates, which nothing follows.
        done = [
            (head[index], tail[index], max(self.least[index].work, undivided_ns))
            for index, undivided_ns in enumerate(self._undivided_ns())
        ]
        done += [
            (min(head[reader] for reader in readers), 0, update_ns) for readers, update_ns in self._updates()
        ]
        # By falling tail, for every head: the work so far is that of the window.
        done.sort(key=lambda job: -job[1])
        head_N, tail_N, work_N = np.array(done, np.int64).reshape(-1, 3).T
        longest = 0
        for start_ns in sorted(set(head)):
            work = np.cumsum(np.where(head_N >= start_ns, work_N, 0))
            longest = max(longest, start_ns + int((work // devices + np.where(work > 0, tail_N, 0)).max()))
        return longest

    def _undivided_ns(self) -> list[int]:
        """Return the least work of each operator, of all its tasks, however it is split: see (6)."""
        undivided_ns_of: dict[tuple[int, bool], int] = {}
        times = []
        for index, operator in enumerate(self.graph.operators):
            like = self.like[index], self.surely_active[index]
            if like not in undivided_ns_of:
                undivided_ns_of[like] = self.problem.least_together_ns(
                    operator, self.kinds, backward=self.surely_active[index]
                )
            times.append(undivided_ns_of[like])
        return times

    def _updates(self) -> list[tuple[list[int], int]]:
        """Return, for each weight that has a gradient, its readers and the least time of its update."""
        graph, optimizer, costs = self.graph, self.problem.training.optimizer, self.problem.costs
        updates = []
        for value in graph.weights:
            readers = [
                (reader, slot)
                for reader, slot in graph.readers[value.name]
                if self.surely_active[reader] and graph.gradient_inputs(graph.operators[reader])[slot]
            ]
            if not readers:
                continue
            elements = max(read_elements(graph.operators[reader].space, slot) for reader, slot in readers)
            seconds = min(
                costs.update_cost(optimizer, graph.weight_dtype, kind).seconds for kind in self.kinds
            )
            # Each device's is rounded.
            update_ns = max(0, int(elements * seconds * 1e9) - self.problem.device_count - 1)
            updates.append(([reader for reader, _ in graph.readers[value.name]], update_ns))
        return updates


def sizes_degrees(operator: Operator, most: int) -> list[Degrees]:
    """Return degrees with at most `most` tasks that make every possible first part, each once; no replicas."""
    combinations: list[Degrees] = [()]
    for axis in operator.space.axes[:-1]:
        smallest: dict[int, int] = {}
        for degree in range(1, min(axis.size, most) + 1):
            smallest.setdefault(ceil(axis.size / degree), degree)
        combinations = [
            (*degrees, degree)
            for degrees in combinations
            for degree in smallest.values()
            if prod(degrees) * degree <= most
        ]
    return [(*degrees, 1) for degrees in combinations]


def _sharing(operand: OperandMap, degrees: Degrees) -> int:
    """Return how many tasks read the same part of an operand, each on its own device; 1 where parts overlap."""
    factors = [factor for dim in operand for factor in dim]
    if not all(factor.axis is None or factor.is_identity for factor in factors):
        return 1
    followed = {factor.axis for factor in factors}
    return prod(degree for axis, degree in enumerate(degrees) if axis not in followed)


def _edges(graph: OperatorGraph) -> list[tuple[int, int, int, int, bool]]:
    """Return (reader, slot, producer, output, whether a gradient flows back) of all edges."""
    edges = []
    for reader, operator in enumerate(graph.operators):
        gradients = graph.gradient_inputs(operator)
        for slot, name in enumerate(operator.inputs):
            if name in graph.producer:
                producer, output = graph.producer[name]
                flows = gradients[slot] and graph.has_backward(operator)
                edges.append((reader, slot, producer, output, flows))
    return edges


def _needs_something(reader: Operator, slot: int) -> bool:
    """Return whether every part of a reader needs something of an operand: not so where it may be all padding."""
    return all(
        factor.axis is None
        or factor.is_identity
        or all(
            factor.touched((point, point + 1))
            for point in range(min(reader.space.axes[factor.axis].size, 1 << 16))
        )
        for dim in reader.space.inputs[slot]
        for factor in dim
    )


def _is_sure(producer: Operator, output: int, reader: Operator, slot: int) -> bool:
    """Return whether the first point of a reader needs something of what the first point of a producer makes."""
    made = operand_region(producer.space.outputs[output], [(0, 1)] * len(producer.space.axes))
    read = operand_region(reader.space.inputs[slot], [(0, 1)] * len(reader.space.axes))
    return intersect_regions(made, read) is not None
