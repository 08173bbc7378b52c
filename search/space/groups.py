"""Groups of operators that share one configuration, so that a transformer of a thousand nodes stays searchable.

A head is searched. Its members (pointwise operators, views, reductions, the halves of a batch norm) follow it:
an axis of a member follows the axis of its producer where, in the tensor between them, both are the same identity
factor of the same dim. Degrees are carried over along such axes. Whatever else splits the head (a reduction, say)
makes replicas of the member on the same devices, so that partial sums are all-reduced in place.

Source: Megatron-LM (arXiv:1909.08053) section 3 for the all-reduce in place; groups are ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from graph.aliasing import VIEW_TARGETS, base_name
from graph.axes import AxisKind, Degrees, OperandMap
from graph.compiled_calls import parts_in
from graph.operators import Operator, OperatorGraph
from graph.rules.fused import FUSED
from graph.strategy import Configuration, Strategy

# Operators that are heads whatever their size: their best split is not their producer's. All that iterate over
# more points than any of their tensors has elements (products of matrices, convolutions) are heads as well.
HEAD_TARGETS = frozenset(
    {
        "conv1d", "conv2d", "conv3d", "convolution", "linear", "mm", "bmm", "addmm", "baddbmm", "matmul",
        "scaled_dot_product_attention", "attention", "embedding", "embedding_bag", "lstm_cell",
        "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "cat", "stack", "max_pool1d", "max_pool2d", "max_pool3d",
        "max_pool2d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    }
)  # fmt: skip

NO_AXIS = -1


@dataclass(frozen=True, slots=True)
class Member:
    """An operator that follows a head: for each of its axes (replica left out) the head's axis, or NO_AXIS."""

    operator: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A head (an operator's index) and the operators that follow it, in topological order; some stand before it."""

    head: int
    members: tuple[Member, ...]

    @property
    def operators(self) -> tuple[int, ...]:
        """Indexes of all operators of the group, the head first."""
        return (self.head, *(member.operator for member in self.members))


def is_view(operator: Operator) -> bool:
    """Return whether an operator's output takes no memory of its own."""
    return base_name(operator.target) in VIEW_TARGETS


def is_heavy(graph: OperatorGraph, operator: Operator) -> bool:
    """Return whether an operator is searched by itself: a product, a pooling, a cat, or one without a rule."""
    targets = [operator.target]
    if operator.target == FUSED:
        targets = [part.call.target for part in parts_in(operator.arguments)]
    if any(base_name(target) in HEAD_TARGETS for target in targets) or not operator.splittable:
        return True
    specs = (*graph.input_specs(operator), *graph.output_specs(operator))
    points = prod(axis.size for axis in operator.space.axes if axis.kind is not AxisKind.REPLICA)
    return points > max(spec.elements for spec in specs)


# The graph that was asked for last, and its groups: every baseline of a graph asks.
_latest: tuple[weakref.ref[OperatorGraph], tuple[Group, ...]] | None = None


def find_groups(graph: OperatorGraph) -> tuple[Group, ...]:
    """Return the groups in topological order of their heads; every operator is in exactly one.

    A light operator follows the producer with which it shares most axes, the first of equals. One that no heavy
    operator comes before (constants, views of weights) follows its first reader instead; one that nobody reads
    (a counter among the buffers) runs whole beside the head before it.
    """
    global _latest
    if _latest is None or _latest[0]() is not graph:
        _latest = weakref.ref(graph), _groups_of(graph)
    return _latest[1]


def _groups_of(graph: OperatorGraph) -> tuple[Group, ...]:
    heads = [index for index, operator in enumerate(graph.operators) if is_heavy(graph, operator)]
    heads = heads if heads else [0]
    placed = {index: (index, _own_axes(graph, index)) for index in heads}
    for index, operator in enumerate(graph.operators):
        if index not in placed:
            _keep(placed, index, _best_producer(graph, operator, placed))
    for index in range(len(graph.operators) - 1, -1, -1):
        if index not in placed:
            _keep(placed, index, _first_reader(graph, index, placed))
    for index in range(len(graph.operators)):
        if index not in placed:
            before = max((head for head in heads if head < index), default=heads[0])
            placed[index] = (before, (NO_AXIS,) * (len(graph.operators[index].space.axes) - 1))
    members: dict[int, list[Member]] = {head: [] for head in heads}
    for index in range(len(graph.operators)):
        head, axes = placed[index]
        if index != head:
            members[head].append(Member(index, axes))
    return tuple(Group(head, tuple(followers)) for head, followers in members.items())


# For an operator: the head that it follows, and for each of its axes the head's.
Placed = tuple[int, tuple[int, ...]]


def _own_axes(graph: OperatorGraph, index: int) -> tuple[int, ...]:
    return tuple(range(len(graph.operators[index].space.axes) - 1))


def _keep(placed: dict[int, Placed], index: int, head_and_axes: Placed | None) -> None:
    if head_and_axes is not None:
        placed[index] = head_and_axes


def _best_producer(graph: OperatorGraph, operator: Operator, placed: Mapping[int, Placed]) -> Placed | None:
    best: Placed | None = None
    shared = -1
    for slot, name in enumerate(operator.inputs):
        if name not in graph.producer or graph.producer[name][0] not in placed:
            continue
        head, followed = placed[graph.producer[name][0]]
        axes = through(shared_axes(graph, name, operator, slot), followed)
        count = sum(axis != NO_AXIS for axis in axes)
        if count > shared:
            best, shared = (head, axes), count
    return best


def _first_reader(graph: OperatorGraph, index: int, placed: Mapping[int, Placed]) -> Placed | None:
    own = len(graph.operators[index].space.axes) - 1
    for name in graph.operators[index].outputs:
        for reader, slot in graph.consumers[name]:
            if reader in placed:
                head, followed = placed[reader]
                theirs = shared_axes(graph, name, graph.operators[reader], slot)
                return head, through(inverted(theirs, own), followed)
    return None


def inverted(axes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return, for each of `count` axes, the position in `axes` where it stands, or NO_AXIS."""
    return tuple(axes.index(axis) if axis in axes else NO_AXIS for axis in range(count))


def shared_axes(graph: OperatorGraph, value: str, reader: Operator, slot: int) -> tuple[int, ...]:
    """Return, for each axis of a reader (replica left out), the axis of the value's producer that it equals."""
    index, output = graph.producer[value]
    producer = graph.operators[index]
    pairs = match_axes(producer.space.outputs[output], reader.space.inputs[slot])
    result = [NO_AXIS] * (len(reader.space.axes) - 1)
    for theirs, mine in pairs:
        same_size = producer.space.axes[theirs].size == reader.space.axes[mine].size
        if same_size and result[mine] == NO_AXIS and theirs not in result:
            result[mine] = theirs
    return tuple(result)


def match_axes(written: OperandMap, read: OperandMap) -> list[tuple[int, int]]:
    """Return the pairs of (producer axis, reader axis) that are the same identity factor of the same dim."""
    pairs = []
    for theirs, mine in zip(written, read, strict=True):
        if [factor.size for factor in theirs] != [factor.size for factor in mine]:
            continue
        for left, right in zip(theirs, mine, strict=True):
            if left.is_identity and right.is_identity and left.axis is not None and right.axis is not None:
                pairs.append((left.axis, right.axis))
    return pairs


def through(axes: Sequence[int], followed: Sequence[int]) -> tuple[int, ...]:
    """Return `axes`, which name a producer's axes, as axes of the head that the producer follows."""
    return tuple(followed[axis] if axis != NO_AXIS else NO_AXIS for axis in axes)


@lru_cache(maxsize=1 << 16)
def carried(axes: tuple[int, ...], degrees: Degrees) -> tuple[Degrees, tuple[int, ...]]:
    """Return a follower's degrees (replica last) and, for each of its tasks, the head's task of its device.

    An operator that shares no axis at all runs whole beside the head's first task: replicas would only exchange
    the same numbers.
    """
    if all(axis == NO_AXIS for axis in axes):
        return (1,) * (len(axes) + 1), (0,)
    strides = [prod(degrees[axis + 1 :]) for axis in range(len(degrees))]
    rest = [axis for axis in range(len(degrees)) if axis not in axes]
    mine = tuple(degrees[axis] if axis != NO_AXIS else 1 for axis in axes)
    sources = [0]
    for axis in (*(axis for axis in axes if axis != NO_AXIS), *rest):
        sources = [task + part * strides[axis] for task in sources for part in range(degrees[axis])]
    return (*mine, prod(degrees[axis] for axis in rest)), tuple(sources)


def follow(group: Group, configuration: Configuration) -> dict[int, Configuration]:
    """Return the configurations of all operators of a group, the head's included, by operator index."""
    result = {group.head: configuration}
    # Members that are given the same are given one object, which is soon recognized.
    of_axes: dict[tuple[int, ...], Configuration] = {}
    made: dict[tuple[Degrees, tuple[int, ...]], Configuration] = {}
    for member in group.members:
        mine = of_axes.get(member.axes)
        if mine is None:
            degrees, sources = carried(member.axes, configuration.degrees)
            mine = made.get((degrees, sources))
            if mine is None:
                mine = Configuration(degrees, tuple(map(configuration.devices.__getitem__, sources)))
                if mine == configuration:
                    mine = configuration
                made[degrees, sources] = mine
            of_axes[member.axes] = mine
        result[member.operator] = mine
    return result


def following(
    graph: OperatorGraph,
    chosen: Iterable[tuple[Group, Configuration]],
    others: Sequence[Configuration] = (),
) -> Strategy:
    """Return the strategy whose groups' heads have chosen configurations, and the rest those of `others`."""
    configurations = dict(enumerate(others))
    for group, configuration in chosen:
        configurations |= follow(group, configuration)
    return Strategy(graph.digest, tuple(configurations[index] for index in range(len(graph.operators))))
