"""Each kind of collective on real processes, forward and backward: loss and every gradient equal the plain module's."""

from __future__ import annotations

import random

import pytest
import torch

from graph.axes import AxisKind, tasks
from graph.collectives import BACKWARD, CollectiveKind
from graph.intervals import Region, normalize
from graph.operators import OperatorGraph
from graph.plan import Plan, build_plan
from graph.strategy import Configuration, Strategy
from runtime.communication import _plain
from runtime.instructions.collectives import StartCollective, StartGradientCollective, _packed
from runtime.instructions.messages import Exchange, SendGradients
from runtime.lowering.program import compile_program
from runtime.lowering.transfers import _stacked
from tests.runtime.oracle import check, graph_of, reference
from tests.runtime.pool import LocalPool
from tests.runtime.strategies import by_kind

CPU = torch.device("cpu")
# How the operator that makes a value is split and how the one that reads it: an axis by name, or the device that it
# runs on. Twelve samples divide evenly by 3 and 4; of nine channels four parts differ.
PATTERNS: dict[str, tuple[str | int, str | int, CollectiveKind]] = {
    "partial sums for all": ("in", "replica", CollectiveKind.ALL_REDUCE),
    "partial sums by sample": ("in", "sample", CollectiveKind.REDUCE_SCATTER),
    "samples for all": ("sample", "replica", CollectiveKind.ALL_GATHER),
    "samples to channels": ("sample", "channel", CollectiveKind.ALL_TO_ALL),
    "channels for all, unevenly": ("channel", "replica", CollectiveKind.ALL_TO_ALL),
    "one device's for all": (0, "replica", CollectiveKind.BROADCAST),
    "another device's for all": (1, "replica", CollectiveKind.BROADCAST),
    "partial sums for the first": ("in", 0, CollectiveKind.REDUCE),
    "partial sums for the last": ("in", -1, CollectiveKind.REDUCE),
}


def configuration(graph: OperatorGraph, name: str, how: str | int, processes: int) -> Configuration:
    axes = graph.operator_by_name[name].space.axes
    if isinstance(how, int):
        return Configuration((1,) * len(axes), (how % processes,))
    degrees = tuple(min(processes, axis.size) if axis.name == how else 1 for axis in axes)
    return Configuration(degrees, tuple(range(tasks(degrees))))


def strategy_of(graph: OperatorGraph, chosen: dict[str, str | int], processes: int) -> Strategy:
    """Split the chosen operators as they say, all others by sample over all devices."""
    others = by_kind(graph, [AxisKind.SAMPLE], range(processes))
    configurations = [
        configuration(graph, operator.name, chosen[operator.name], processes)
        if operator.name in chosen
        else other
        for operator, other in zip(graph.operators, others.configurations, strict=True)
    ]
    strategy = Strategy(graph.digest, tuple(configurations))
    strategy.validate(graph, processes)
    return strategy


def plan_of(graph: OperatorGraph, strategy: Strategy) -> Plan:
    return build_plan(graph, strategy, (0,) * strategy.device_count)


def gradients_back(plan: Plan, value: str) -> list[CollectiveKind]:
    """The collectives in which the gradients of a value go back."""
    return [
        BACKWARD[plan.collectives[value][back.number].kind]
        for found in plan.gradient_collectives.values()
        for back in found
        if back.value == value
    ]


@pytest.mark.parametrize("processes", [3, 4])
@pytest.mark.parametrize("name", PATTERNS)
def test_each_kind_there_and_back(pool: LocalPool, name: str, processes: int) -> None:
    made, read, kind = PATTERNS[name]
    model = reference("perceptron", batch_size=12)
    graph = graph_of("perceptron", batch_size=12)
    strategy = strategy_of(graph, {"linear_1": made, "tanh": read}, processes)
    plan = plan_of(graph, strategy)
    expected = kind
    if name == "channels for all, unevenly" and processes == 3:
        expected = CollectiveKind.ALL_GATHER
    assert [found.kind for found in plan.collectives["linear_1"]] == [expected]
    assert gradients_back(plan, "linear_1") == [BACKWARD[expected]]
    check(pool, graph, strategy, model)


def test_some_devices_collect_while_another_does_not_take_part(pool: LocalPool) -> None:
    """The fourth device only computes a part of the first operator."""
    graph = graph_of("perceptron", batch_size=12)
    strategy = strategy_of(graph, {"linear_1": "in", "tanh": "sample"}, 3)
    configurations = list(strategy.configurations)
    first = graph.index_by_name["linear"]
    configurations[first] = Configuration(configurations[first].degrees, (3, 1, 2))
    moved = Strategy(graph.digest, tuple(configurations))
    plan = plan_of(graph, moved)
    assert {found.devices for found in plan.collectives["linear_1"]} == {(0, 1, 2)}
    check(pool, graph, moved, reference("perceptron", batch_size=12))


def test_replicas_that_nobody_reads_have_no_collective_backward(pool: LocalPool) -> None:
    """Three copies of tanh, of which the next operator reads one: the gradient goes back message by message."""
    graph = graph_of("perceptron", batch_size=12)
    strategy = strategy_of(graph, {"linear_1": "sample", "tanh": "replica", "linear_2": 0}, 3)
    plan = plan_of(graph, strategy)
    assert [found.kind for found in plan.collectives["linear_1"]] == [CollectiveKind.ALL_GATHER]
    assert gradients_back(plan, "linear_1") == []
    check(pool, graph, strategy, reference("perceptron", batch_size=12))


@pytest.mark.parametrize("processes", [3, 4])
def test_buffers_and_masks_travel_in_collectives(pool: LocalPool, processes: int) -> None:
    """A buffer is renewed by broadcast, booleans are gathered."""
    graph = graph_of("accumulating")
    strategy = strategy_of(graph, {"masked_fill": "replica", "mul": 0, "add_1": 0}, processes)
    plan = plan_of(graph, strategy)
    assert [found.kind for found in plan.buffer_collectives["offset"]] == [CollectiveKind.BROADCAST]
    assert [found.kind for found in plan.collectives["gt"]] == [CollectiveKind.ALL_GATHER]
    assert graph.value_by_name["gt"].spec.dtype == "bool"
    check(pool, graph, strategy, reference("accumulating"))


def test_synchronized_batch_norm_has_one_collective_an_exchange() -> None:
    """Data parallel on four devices: what would be twelve messages is one all-reduce, forward and backward."""
    graph = graph_of("convolutions")
    strategy = by_kind(graph, [AxisKind.SAMPLE], range(4))
    plan = plan_of(graph, strategy)
    exchanged = [name for name, found in plan.exchanges.items() if any(one.remote_pieces for one in found)]
    moments = plan.exchanges["batch_norm.moments"]
    assert sum(len(assembly.remote_pieces) for assembly in moments) == 12
    for rank in range(4):
        instructions = compile_program(plan, rank, CPU).instructions
        starts = [one for one in instructions if isinstance(one, StartCollective)]
        back = [one for one in instructions if isinstance(one, StartGradientCollective)]
        assert len(starts) == len(exchanged)
        assert starts[0].call.kind is CollectiveKind.ALL_REDUCE
        assert back[-1].call.kind is CollectiveKind.ALL_REDUCE
        assert not [one for one in instructions if isinstance(one, (Exchange, SendGradients))]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32])
def test_what_libraries_do_not_know_travels_as_bytes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1], dtype=dtype)
    plain = _plain(tensor)
    assert plain.dtype in (torch.uint8, torch.float32)
    assert plain.data_ptr() == tensor.data_ptr()
    assert torch.equal(plain.view(dtype), tensor)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_that_stand_one_after_the_other_are_not_copied(dim: int) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    parts = tensor.split([2, 1, tensor.shape[dim] - 3], dim)
    packed = _packed(parts)
    assert torch.equal(packed, torch.cat([part.reshape(-1) for part in parts]))
    assert (packed.data_ptr() == tensor.data_ptr()) == (dim == 0)


def test_parts_of_other_tensors_are_copied() -> None:
    tensor = torch.arange(24.0).view(6, 4)
    for parts in ([tensor[:2], tensor[3:]], [tensor[2:], tensor[:2]], [tensor[:3], tensor[3:].clone()]):
        packed = _packed(parts)
        assert torch.equal(packed, torch.cat([part.reshape(-1) for part in parts]))
        assert packed.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("seed", range(30))
def test_stacked_parts_are_the_region(seed: int) -> None:
    """Where parts count as stacked, their tensors one after the other are the region's."""
    generator = random.Random(seed)
    rows = sorted(generator.sample(range(9), 6))
    region: Region = (normalize([(row, row + 1) for row in rows]), ((0, 3),))
    cut = generator.randint(1, 5)
    groups = [rows[:cut], rows[cut:]] if generator.random() < 0.5 else [rows[::2], rows[1::2]]
    if generator.random() < 0.3:
        groups.reverse()
    parts: list[Region] = [(normalize([(row, row + 1) for row in group]), ((0, 3),)) for group in groups]
    in_order = [row for group in groups for row in group] == rows
    assert _stacked(region, parts) == in_order
    assert _stacked(region, [region])
    assert not _stacked(region, parts[:1])
    assert not _stacked(region, [(region[0], ((0, 1),)), (region[0], ((1, 3),))])
