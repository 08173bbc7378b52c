"""Strategies that need no search: what others do by default, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from graph.aliasing import base_name
from graph.axes import AxisKind, Degrees, coordinates
from graph.operators import Operator, OperatorGraph, ValueKind
from graph.strategy import Configuration, Sharding, Strategy, never_in_shares, stays_whole
from search.space.configurations import random_configuration
from search.space.groups import NO_AXIS, Group, find_groups, follow, following, shared_axes

FULLY_CONNECTED = frozenset({"linear", "addmm", "mm"})
EMBEDDINGS = frozenset({"embedding", "embedding_bag", "ragged_embedding_bag"})
# Losses of logits or log-probabilities, whose targets are classes.
CLASS_LOSSES = frozenset(
    {
        "cross_entropy_loss", "cross_entropy_sums", "nll_loss_nd", "nll_loss", "nll_loss2d", "nll_sums",
        "softmax_nll_sums",
    }
)  # fmt: skip
ATTENTIONS = frozenset({"attention", "scaled_dot_product_attention"})


def first_axis(operator: Operator, kind: AxisKind) -> int | None:
    """Return the first axis of a kind, or None."""
    for index, axis in enumerate(operator.space.axes):
        if axis.kind is kind:
            return index
    return None


def split(operator: Operator, axis: int, degree: int) -> Configuration:
    """Return a configuration that splits one axis over the first devices, as far as its size allows."""
    size = operator.space.axes[axis].size
    parts = min(degree, size)
    degrees = tuple(parts if index == axis else 1 for index in range(len(operator.space.axes)))
    return Configuration(degrees, tuple(range(parts)))


def whole(operator: Operator, device: int = 0) -> Configuration:
    """Return the configuration of one task on one device."""
    return Configuration(ones(operator), (device,))


def ones(operator: Operator) -> Degrees:
    """Return the degrees of a single task."""
    return (1,) * len(operator.space.axes)


def single_device(graph: OperatorGraph, device: int = 0) -> Strategy:
    """Return the strategy that runs everything on one device."""
    return Strategy(graph.digest, tuple(whole(operator, device) for operator in graph.operators))


def data_parallel(graph: OperatorGraph, device_count: int) -> Strategy:
    """Return data parallelism, as DistributedDataParallel does it.

    Every operator is split by its sample axis, as far as its size allows. Of those without one, scalars (the
    division of a loss by its count) are computed on device 0, the others (running statistics, functions of
    weights) by every device that has samples.
    """
    return Strategy(graph.digest, tuple(_data_parallel(graph, device_count)))


def shared(graph: OperatorGraph, strategy: Strategy, level: Sharding) -> Strategy:
    """Return a strategy whose weights are all shared by those that hold the same elements.

    Weights that something reads after the backward are never kept in shares, nor are those that several stages of a
    step in micro-batches read: of them the optimizer is shared.
    """
    whole = stays_whole(graph) | (
        never_in_shares(graph, strategy) if level is Sharding.PARAMETERS else frozenset()
    )
    levels = (
        Sharding.OPTIMIZER if level is Sharding.PARAMETERS and weight.name in whole else level
        for weight in graph.weights
    )
    return replace(strategy, sharding=tuple(levels))


def zero(graph: OperatorGraph, device_count: int) -> Strategy:
    """Return data parallelism that shares gradients, optimizer state and the update.

    Source: ZeRO (arXiv:1910.02054), stage 2.
    """
    return shared(graph, data_parallel(graph, device_count), Sharding.OPTIMIZER)


def fsdp(graph: OperatorGraph, device_count: int) -> Strategy:
    """Return data parallelism that shares the weights as well, and gathers them where they are read.

    Sources: ZeRO (arXiv:1910.02054), stage 3; PyTorch FSDP (arXiv:2304.11277).
    """
    return shared(graph, data_parallel(graph, device_count), Sharding.PARAMETERS)


def _data_parallel(graph: OperatorGraph, device_count: int) -> list[Configuration]:
    sample_axes = [first_axis(operator, AxisKind.SAMPLE) for operator in graph.operators]
    sizes = [
        operator.space.axes[axis].size
        for operator, axis in zip(graph.operators, sample_axes, strict=True)
        if axis is not None
    ]
    width = min(device_count, max(sizes, default=1))
    configurations = []
    for operator, axis in zip(graph.operators, sample_axes, strict=True):
        if axis is not None:
            configurations.append(split(operator, axis, width))
        elif all(spec.shape == () for spec in graph.output_specs(operator)):
            configurations.append(whole(operator))
        else:
            configurations.append(Configuration((*ones(operator)[:-1], width), tuple(range(width))))
    return configurations


def expert(graph: OperatorGraph, device_count: int) -> Strategy:
    """Return the experts' strategy: fully connected layers by output channel, all else data parallel.

    Source: "One weird trick for parallelizing convolutional neural networks" (arXiv:1404.5997).
    """
    chosen = []
    for group in find_groups(graph):
        head = graph.operators[group.head]
        channel = first_axis(head, AxisKind.PARAMETER)
        if base_name(head.target) in FULLY_CONNECTED and channel is not None:
            chosen.append((group, split(head, channel, device_count)))
    return following(graph, chosen, _data_parallel(graph, device_count))


def random_strategy(graph: OperatorGraph, device_count: int, rng: np.random.Generator) -> Strategy:
    """Return a strategy with a random legal configuration of every head, which the other operators follow."""
    return following(
        graph,
        (
            (group, random_configuration(graph.operators[group.head], device_count, rng))
            for group in find_groups(graph)
        ),
    )


def megatron(graph: OperatorGraph, tensor_degree: int, data_degree: int = 1) -> Strategy:
    """Return Megatron's strategy on `data_degree` x `tensor_degree` devices, tensor parallel ranks side by side.

    A linear layer whose input arrives split along what it contracts is split by rows (a partial sum, all-reduced in
    place), any other by columns; attention is split by heads, and so is what projects to them; embeddings are split
    by the vocabulary; all else, and what the degree does not divide, is computed by every rank of its samples.

    Source: Megatron-LM (arXiv:1909.08053) section 3.
    """
    groups = find_groups(graph)
    follows = {member.operator: (group.head, member.axes) for group in groups for member in group.members}
    configurations: list[tuple[Group, Configuration]] = []
    chosen: dict[int, int | None] = {}
    wanted = _wanted_columns(graph, follows)
    for group in sorted(groups, key=lambda group: group.head):
        operator = graph.operators[group.head]
        axis = wanted.get(group.head)
        if axis is None:
            axis = _megatron_axis(graph, group.head, follows, chosen)
        if axis is not None and operator.space.axes[axis].size % tensor_degree:
            axis = None
        chosen[group.head] = axis
        configurations.append((group, _on_two_dims(operator, axis, tensor_degree, data_degree)))
    return following(graph, configurations)


# For an operator that follows a head: that head, and for each of its axes the head's (or NO_AXIS).
Follows = dict[int, tuple[int, tuple[int, ...]]]


def _head_axis(graph: OperatorGraph, reader: int, slot: int, axis: int, follows: Follows) -> tuple[int, int]:
    """Return the head that an input comes from and its axis that equals `axis` of the reader; NO_AXIS for none."""
    value = graph.operators[reader].inputs[slot]
    if value not in graph.producer:
        return NO_AXIS, NO_AXIS
    producer = graph.producer[value][0]
    theirs = shared_axes(graph, value, graph.operators[reader], slot)[axis]
    head, axes = follows.get(producer, (producer, ()))
    return head, axes[theirs] if axes and theirs != NO_AXIS else theirs


def _wanted_columns(graph: OperatorGraph, follows: Follows) -> dict[int, int]:
    """Return the axis of every projection that makes the heads of an attention."""
    wanted = {}
    for index, operator in enumerate(graph.operators):
        axis = _heads_axis(operator)
        if axis is not None:
            for slot in range(3):
                head, theirs = _head_axis(graph, index, slot, axis, follows)
                if theirs != NO_AXIS:
                    wanted[head] = theirs
    return wanted


def _heads_axis(operator: Operator) -> int | None:
    """Return an attention's axis of heads, with grouped queries that of the groups; None for another operator."""
    if base_name(operator.target) not in ATTENTIONS:
        return None
    return next(
        (axis for axis, named in enumerate(operator.space.axes) if named.name.partition(".")[0] == "heads"),
        None,
    )


def _megatron_axis(
    graph: OperatorGraph, index: int, follows: Follows, chosen: dict[int, int | None]
) -> int | None:
    operator = graph.operators[index]
    name = base_name(operator.target)
    if name in ATTENTIONS:
        return _heads_axis(operator)
    if name == "embedding":
        return first_axis(operator, AxisKind.REDUCTION)
    if name == "cat":
        return _arriving_axis(graph, index, AxisKind.ATTRIBUTE, follows, chosen)
    if name != "linear":
        return None
    rows = _arriving_axis(graph, index, AxisKind.REDUCTION, follows, chosen)
    return first_axis(operator, AxisKind.PARAMETER) if rows is None else rows


def _arriving_axis(
    graph: OperatorGraph, index: int, kind: AxisKind, follows: Follows, chosen: dict[int, int | None]
) -> int | None:
    """Return the axis of a kind along which an operator's first input arrives split; None for none."""
    for axis, named in enumerate(graph.operators[index].space.axes):
        if named.kind is kind:
            head, theirs = _head_axis(graph, index, 0, axis, follows)
            if theirs != NO_AXIS and chosen.get(head) == theirs:
                return axis
    return None


def _on_two_dims(operator: Operator, axis: int | None, tensor_degree: int, data_degree: int) -> Configuration:
    """Return a split of samples over the outer dim of a grid of devices, and of `axis` over the inner one."""
    axes = operator.space.axes
    replica = len(axes) - 1
    sample = first_axis(operator, AxisKind.SAMPLE)
    sample = replica if sample is None or axes[sample].size < data_degree else sample
    inner = replica if axis is None else axis
    degrees = [1] * len(axes)
    degrees[sample] *= data_degree
    degrees[inner] *= tensor_degree
    return _on_grid(tuple(degrees), sample, inner, tensor_degree)


@lru_cache(maxsize=1 << 10)
def _on_grid(degrees: Degrees, sample: int, inner: int, tensor_degree: int) -> Configuration:
    """Return the split of two axes over a grid of devices; many operators have the same."""
    devices = []
    for point in coordinates(degrees):
        if sample == inner:
            devices.append(point[sample])
        else:
            devices.append(point[sample] * tensor_degree + point[inner])
    return Configuration(degrees, tuple(devices))


def operator_placement(graph: OperatorGraph, device_count: int) -> Strategy:
    """Return model parallelism without splitting: consecutive groups on one device after the other.

    Every device gets about the same number of multiply-adds, counted as points of the iteration spaces.
    """
    groups = sorted(find_groups(graph), key=lambda group: group.head)
    work = [sum(points_of(graph.operators[index]) for index in group.operators) for group in groups]
    placed = [
        whole(graph.operators[group.head], device)
        for group, device in zip(groups, devices_by_work(work, device_count), strict=True)
    ]
    return following(graph, zip(groups, placed, strict=True))


def devices_by_work(work: Sequence[int], device_count: int) -> list[int]:
    """Return a device for each of some parts in a row, so that devices in a row have about as much work."""
    total, before, devices = sum(work), 0, []
    for own in work:
        # By the middle of what a part does, so that a large one does not go to the device after its own.
        devices.append(min(device_count - 1, device_count * (2 * before + own) // (2 * total)))
        before += own
    return devices


def points_of(operator: Operator) -> int:
    """Return the points of an operator's iteration space without replicas."""
    return prod(axis.size for axis in operator.space.axes if axis.kind is not AxisKind.REPLICA)


# Of Stanza's devices, one in so many is for fully connected layers.
STANZA_SHARE = 8


def stanza(graph: OperatorGraph, device_count: int) -> Strategy | None:
    """Return Stanza's strategy: fully connected layers on a few devices, all else data parallel on the others.

    Both parts are data parallel; activations go from one to the other, in place of the large layers' gradients.
    None where there are no such layers, or nothing else, or a single device.

    Source: Stanza (arXiv:1812.10624).
    """
    few = max(1, device_count // STANZA_SHARE)
    groups = find_groups(graph)
    connected = [base_name(graph.operators[group.head].target) in FULLY_CONNECTED for group in groups]
    if device_count < 2 or not any(connected) or all(connected):
        return None
    chosen = []
    for group, is_connected in zip(groups, connected, strict=True):
        head = graph.operators[group.head]
        sample = first_axis(head, AxisKind.SAMPLE)
        if is_connected and sample is not None:
            there = split(head, sample, few)
            moved = tuple(device_count - few + device for device in there.devices)
            chosen.append((group, Configuration(there.degrees, moved)))
    return following(graph, chosen, _data_parallel(graph, device_count - few))


def hugectr(graph: OperatorGraph, device_count: int, *, distributed: bool) -> Strategy | None:
    """Return HugeCTR's strategy: embedding tables are model parallel, all else is data parallel.

    Vectors that are looked up, and their gradients, go between a table's devices and those of the samples
    (all-to-all, or reduce-scatter and all-gather), in place of the gradients of tables.

    Args:
        graph: in which a table is a weight that lookups alone read.
        device_count: devices in all.
        distributed: each table's rows are split over all devices (columns, where a part of the rows cannot be looked
            up by itself), a distributed slot; else each table is on one device, a localized slot: the largest one
            first, on the device with the fewest bytes so far.

    Returns:
        None where there are no tables, or a single device.

    Source: HugeCTR (arXiv:2210.08803); rows are split by ranges here, by hash there.
    """
    tables: dict[str, list[Group]] = {}
    for group in find_groups(graph):
        table = _table_of(graph, group.head)
        if table is not None:
            tables.setdefault(table, []).append(group)
    if device_count < 2 or not tables:
        return None
    sizes = {table: graph.value_by_name[table].spec.size_bytes for table in tables}
    held_bytes = [0] * device_count
    chosen = []
    for table in sorted(tables, key=lambda table: -sizes[table]):
        device = held_bytes.index(min(held_bytes))
        held_bytes[device] += sizes[table]
        for group in tables[table]:
            head = graph.operators[group.head]
            axis = first_axis(head, AxisKind.REDUCTION)
            axis = first_axis(head, AxisKind.PARAMETER) if axis is None else axis
            if not distributed or axis is None:
                chosen.append((group, whole(head, device)))
            else:
                chosen.append((group, split(head, axis, device_count)))
    configurations = _data_parallel(graph, device_count)
    for group, configuration in chosen:
        for index, followed in follow(group, configuration).items():
            # What makes indices is beside the table, what reads the vectors is of the dense part.
            if index <= group.head:
                configurations[index] = followed
    return Strategy(graph.digest, tuple(configurations))


def _table_of(graph: OperatorGraph, index: int) -> str | None:
    """Return the weight that a lookup reads, and nothing but lookups; None for other operators and weights."""
    operator = graph.operators[index]
    if base_name(operator.target) not in EMBEDDINGS:
        return None
    weight = operator.inputs[0]
    readers = [graph.operators[reader] for reader, _ in graph.readers.get(weight, ())]
    alone = all(base_name(reader.target) in EMBEDDINGS for reader in readers)
    return weight if graph.value_by_name[weight].kind is ValueKind.WEIGHT and alone else None


def insightface(graph: OperatorGraph, device_count: int) -> Strategy | None:
    """Return InsightFace's strategy: classifiers are split by classes, all else is data parallel.

    A classifier is a fully connected layer that a loss over classes follows. All devices have its input for all
    samples (all-gather; its gradient is summed back), and their classes' share of the weight. Operators that keep the
    classes apart (a margin, a scale) are split with it, and so is a softmax that the graph has in two operators
    (`graph.substitutions.splitting`); those that need all classes of a sample are data parallel.

    Returns:
        None where there is no classifier, or a single device.

    Source: Partial FC (arXiv:2010.05222), without its sampling of classes.
    """
    if device_count < 2:
        return None
    configurations = _data_parallel(graph, device_count)
    classifiers = 0
    for group in find_groups(graph):
        head = graph.operators[group.head]
        classes = first_axis(head, AxisKind.PARAMETER)
        targets = {base_name(graph.operators[index].target) for index in group.operators}
        if classes is None or base_name(head.target) not in FULLY_CONNECTED or not targets & CLASS_LOSSES:
            continue
        classifiers += 1
        followed = follow(group, split(head, classes, device_count))
        configurations[group.head] = followed[group.head]
        for member in group.members:
            if classes in member.axes:
                configurations[member.operator] = followed[member.operator]
    return Strategy(graph.digest, tuple(configurations)) if classifiers else None


def global_map(graph: OperatorGraph, kind: AxisKind, model_degree: int, data_degree: int = 1) -> Strategy:
    """Return a map in the manner of Mesh-TensorFlow: one mesh, and one map of dims to its axes for all operators.

    The mesh has `data_degree` rows and `model_degree` columns. Every operator splits its samples over the rows, and
    its first axis of `kind` over the columns; what a column count does not divide is computed by all columns. No
    tensor has two dims on one axis of the mesh.

    Source: Mesh-TensorFlow (arXiv:1811.02084) section 3.
    """
    configurations = []
    for operator in graph.operators:
        axis = first_axis(operator, kind)
        if axis is not None and operator.space.axes[axis].size % model_degree:
            axis = None
        configurations.append(_on_two_dims(operator, axis, model_degree, data_degree))
    return Strategy(graph.digest, tuple(configurations))


@dataclass(frozen=True, slots=True)
class Baseline:
    """A strategy that others use, by the name that `--strategy` knows."""

    name: str
    strategy: Strategy


# Up to so many devices the walk begins, and proposes, as the ablation on few devices found best.
FEW_DEVICES = 64
# More devices than this side by side are in several nodes of every topology that comes with Soapstone.
LONGEST_ROW = 16


def row_lengths(device_count: int) -> tuple[int, ...]:
    """Return the degrees of tensor parallelism that are usual on so many devices, from 2 on: they divide them."""
    return tuple(
        length for length in range(2, min(LONGEST_ROW, device_count) + 1) if device_count % length == 0
    )


def starting_baselines(graph: OperatorGraph, device_count: int) -> tuple[Baseline, ...]:
    """Return the baselines that chains start from, each strategy once.

    On many devices these are data parallelism and Megatron's strategies of few devices side by side: one device, or a
    layer's channels over all, take hundreds of times as long there, and much of a search to be simulated.
    """
    if device_count <= FEW_DEVICES:
        return usual_baselines(graph, device_count)
    name_of = {data_parallel(graph, device_count): "data-parallel"}
    for row in row_lengths(device_count):
        name_of.setdefault(megatron(graph, row, device_count // row), f"megatron-{row}")
    return tuple(Baseline(name, strategy) for strategy, name in name_of.items())


def usual_baselines(graph: OperatorGraph, device_count: int) -> tuple[Baseline, ...]:
    """Return the baselines that every network has, and that chains start from on few devices."""
    return (
        Baseline("data-parallel", data_parallel(graph, device_count)),
        Baseline("expert", expert(graph, device_count)),
        Baseline("single-device", single_device(graph)),
    )


def all_baselines(graph: OperatorGraph, device_count: int) -> tuple[Baseline, ...]:
    """Return the baselines of a network on so many devices; of equal ones, the first."""
    first: dict[Strategy, Baseline] = {}
    for baseline in named_baselines(graph, device_count):
        first.setdefault(baseline.strategy, baseline)
    return tuple(first.values())


def named_baselines(graph: OperatorGraph, device_count: int) -> list[Baseline]:
    """Return the baselines of a network on so many devices, by all their names."""
    baselines = [
        *usual_baselines(graph, device_count),
        Baseline("operator-placement", operator_placement(graph, device_count)),
    ]
    if device_count > 1:
        baselines += [
            Baseline("zero", zero(graph, device_count)),
            Baseline("fsdp", fsdp(graph, device_count)),
        ]
    layered = stanza(graph, device_count)
    if layered is not None:
        baselines.append(Baseline("stanza", layered))
    by_layer = {
        "hugectr-localized": hugectr(graph, device_count, distributed=False),
        "hugectr-distributed": hugectr(graph, device_count, distributed=True),
        "insightface": insightface(graph, device_count),
    }
    baselines += [Baseline(name, strategy) for name, strategy in by_layer.items() if strategy is not None]
    degrees = [degree for degree in range(2, device_count + 1) if device_count % degree == 0]
    for degree in degrees:
        baselines.append(Baseline(f"megatron-{degree}", megatron(graph, degree, device_count // degree)))
    for kind in (AxisKind.PARAMETER, AxisKind.ATTRIBUTE, AxisKind.REDUCTION):
        for degree in degrees:
            rows = device_count // degree
            strategy = global_map(graph, kind, degree, rows)
            baselines.append(Baseline(f"mesh-{rows}x{degree}-{kind.value}", strategy))
    return baselines
