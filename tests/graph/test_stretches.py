"""Stretches between communications, and the calls that stand for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from graph.calls import LocalCall, call_from_json
from graph.compiled_calls import PartCall, compiled_call, parts_of
from graph.errors import StrategyError
from graph.importer import import_module
from graph.operator_ranges import OperatorRange
from graph.operators import OperatorGraph, Slot, TensorSpec
from graph.plan import Plan, build_plan
from graph.rules import backward_flops, flops
from graph.strategy import Strategy, strategy_from_json
from graph.stretches import check_compiled, members, stretches
from runtime.instructions.base import Communication, Instruction, WrappedInstruction
from runtime.instructions.compute import Assemble, Call, Detach, Differentiate, Loss, Release, Seed
from runtime.instructions.messages import Exchange, Receive
from runtime.lowering.program import compile_program
from runtime.lowering.tensor_slots import TensorSlots
from search.space.baselines import data_parallel
from tests.runtime.oracle import SEED, graph_of, reference
from tests.runtime.strategies import groups_of, random_strategy, randomly_shared

torch = pytest.importorskip("torch")

CPU = torch.device("cpu")
# "normalized": batch normalization by each part's own statistics, which its running ones alone read.
NAMES = ("convolutions", "dropped", "normalized", "perceptron", "recurrent")
# What may stand between two calls of a stretch: nothing that another rank, or a later step, has a part in.
LOCAL = (Call, Detach, Release, Loss, Seed, Differentiate)


def _graph(name: str) -> OperatorGraph:
    if name != "normalized":
        return graph_of(name)
    module, args, _ = reference("convolutions").build(SEED)
    return import_module(module, args, name=name, batch_norm="local")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_communicated_within_a_stretch(name: str, seed: int) -> None:
    """On every rank, a program that compiles nothing shows the instructions between the calls of a stretch.

    Values that only the operators that renew buffers read, after the backward, may be sent in between.
    """
    graph = _graph(name)
    strategy = random_strategy(graph, 2 + 2 * (seed % 2), seed)
    if seed % 3 == 1:
        strategy = randomly_shared(strategy, graph, seed)
    elif seed % 3 == 2:
        strategy = replace(strategy, recomputation=groups_of(graph, 3)[::2])
    plan = build_plan(graph, strategy, (0,) * strategy.device_count)
    for rank in range(strategy.device_count):
        program = compile_program(plan, rank, CPU)
        executed = [
            item.inner if isinstance(item, WrappedInstruction) else item for item in program.instructions
        ]
        slots, late = _outputs(plan, rank), _late(plan, rank, executed)
        for stretch in stretches(plan):
            own = {slot for index in members(plan, stretch) for slot in slots.get(index, ())}
            places = [
                place
                for place, item in enumerate(executed)
                if isinstance(item, Call) and not own.isdisjoint(item.outputs)
            ]
            if places:
                between = executed[places[0] : places[-1] + 1]
                assert all(isinstance(item, LOCAL) or late.issuperset(item.touches) for item in between), (
                    between
                )
                # One backward, which differentiates all of it.
                segments = [item for item in executed if isinstance(item, Differentiate)]
                assert sum(not own.isdisjoint(item.outputs) for item in segments) <= 1


def _late(plan: Plan, rank: int, executed: Sequence[Instruction]) -> set[int]:
    """Return the slots that a rank makes or receives for operators after its backward alone."""
    graph, slots = plan.graph, TensorSlots(plan, rank)
    end = max((place for place, item in enumerate(executed) if isinstance(item, Differentiate)), default=0)
    late = {slot for item in executed[end:] if isinstance(item, Receive) for slot in item.arrivals}
    late -= {slot for item in executed[:end] if isinstance(item, Receive) for slot in item.arrivals}
    for (index, _, position), slot in slots.outputs.items():
        readers = {reader for reader, _ in graph.consumers[graph.operators[index].outputs[position]]}
        if readers and readers.isdisjoint(graph.order.of_loss):
            late.add(slot)
    return late


def _outputs(plan: Plan, rank: int) -> dict[int, list[int]]:
    result: dict[int, list[int]] = {}
    for (index, _, _), slot in TensorSlots(plan, rank).outputs.items():
        result.setdefault(index, []).append(slot)
    return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(8))
def test_a_compiled_program_does_all_that_the_plain_one_does_and_reads_what_is_made(
    name: str, seed: int
) -> None:
    graph = _graph(name)
    plain = random_strategy(graph, 2 + 2 * (seed % 2), seed)
    node_of = (0,) * plain.device_count
    compiled = replace(plain, compiled=stretches(build_plan(graph, plain, node_of)))
    for rank in range(plain.device_count):
        apart, together = (
            [
                item.inner if isinstance(item, WrappedInstruction) else item
                for item in compile_program(build_plan(graph, strategy, node_of), rank, CPU).instructions
            ]
            for strategy in (plain, compiled)
        )
        others = [
            [
                # A part may have no gradient of an input (a bias that another part adds): the plain one asks for it.
                (type(item), item.outputs if isinstance(item, Differentiate) else item.touches)
                for item in program
                if not isinstance(item, Call | Release)
            ]
            for program in (apart, together)
        ]
        late = _late(build_plan(graph, plain, node_of), rank, apart)
        for is_late in (False, True):
            # What is sent of a stretch for operators after the backward is sent behind it, in the same order.
            first, second = (
                [
                    item
                    for item in program
                    if (issubclass(item[0], Exchange) and late.issuperset(item[1])) == is_late
                ]
                for program in others
            )
            assert first == second
        messages = [[item for item in program if issubclass(item[0], Communication)] for program in others]
        assert messages[0] == messages[1]
        makers = [item for item in apart if isinstance(item, Call | Assemble)]
        made = {slot for item in makers for slot in _made(item)}
        there: set[int] = set()
        for item in together:
            read = (
                item.inputs if isinstance(item, Call) else item.sources if isinstance(item, Assemble) else ()
            )
            assert made.intersection(read) <= there
            there.update(_made(item))
        assert sum(isinstance(item, Call) for item in together) <= sum(
            isinstance(item, Call) for item in apart
        )


def _made(item: object) -> tuple[int, ...]:
    if isinstance(item, Call):
        return item.outputs
    return (item.target,) if isinstance(item, Assemble) else ()


def test_what_running_statistics_alone_read_ends_no_stretch_and_is_sent_behind_it() -> None:
    graph = _graph("normalized")
    plain = data_parallel(graph, 2)
    plan = build_plan(graph, plain, (0, 0))
    (whole,) = stretches(plan)
    # The parts of the loss are joined before its last operator.
    assert members(plan, whole) == graph.order.of_loss[:-1]
    assert "soapstone.running_statistics" in {
        graph.operators[index].target for index in graph.order.of_buffers
    }
    program = compile_program(build_plan(graph, replace(plain, compiled=(whole,)), (0, 0)), 0, CPU)
    executed = [item.inner if isinstance(item, WrappedInstruction) else item for item in program.instructions]
    late = _late(plan, 0, executed)
    (exchange,) = (
        place
        for place, item in enumerate(executed)
        if isinstance(item, Exchange) and late.issuperset(item.touches)
    )
    touched = set(executed[exchange].touches)
    (stretch,) = (
        place
        for place, item in enumerate(executed)
        if isinstance(item, Call) and not touched.isdisjoint(item.outputs)
    )
    assert exchange == stretch + 1


def test_one_device_is_one_stretch_and_a_bucket_ends_one() -> None:
    graph = graph_of("perceptron")
    alone = build_plan(graph, data_parallel(graph, 1), (0,))
    (whole,) = stretches(alone)
    assert members(alone, whole) == graph.order.of_loss
    split = build_plan(graph, data_parallel(graph, 2), (0, 0), bucket_bytes=1)
    firsts = {stretch.first for stretch in stretches(split)}
    inside = {index for stretch in stretches(split) for index in range(stretch.first + 1, stretch.last + 1)}
    ends = {bucket.after for bucket in split.buckets}
    assert len(ends) > 1
    assert ends.isdisjoint(inside)
    assert firsts


def test_what_communicates_is_refused_in_one_line() -> None:
    graph = graph_of("perceptron")
    strategy = data_parallel(graph, 2)
    whole = OperatorRange(0, len(graph.operators) - 1)
    plan = build_plan(graph, replace(strategy, compiled=(whole,)), (0, 0), bucket_bytes=1)
    with pytest.raises(StrategyError, match=r"^compiled: operators .* communicate in between .*; leave"):
        check_compiled(plan)
    legal = replace(strategy, compiled=stretches(plan))
    check_compiled(build_plan(graph, legal, (0, 0), bucket_bytes=1))


def test_a_strategy_keeps_what_it_compiles_and_others_keep_their_digest() -> None:
    graph = graph_of("perceptron")
    plain = data_parallel(graph, 1)
    compiled = replace(plain, compiled=(OperatorRange(0, 2),))
    assert compiled.digest != plain.digest
    assert "compiled" not in plain.to_json(graph)
    document = json.loads(json.dumps(compiled.to_json(graph)))
    assert document["compiled"] == [[graph.operators[0].name, graph.operators[2].name]]
    assert strategy_from_json(document, graph, 1) == compiled
    assert compiled.with_configurations(plain.configurations) == plain
    document["compiled"] = [[graph.operators[0].name, "nowhere"]]
    with pytest.raises(StrategyError, match="operator nowhere of compiled is unknown"):
        strategy_from_json(document, graph, 1)
    with pytest.raises(StrategyError, match=r"^compiled: a group goes from operator 2 to 1"):
        Strategy(plain.graph_digest, plain.configurations, compiled=(OperatorRange(2, 1),)).validate(graph, 1)


def test_a_compiled_call_is_read_back_from_its_key_and_does_its_parts_work() -> None:
    matrix, weight = TensorSpec((4, 8), "float32"), TensorSpec((16, 8), "float32")
    made = TensorSpec((4, 16), "float32")
    linear = LocalCall(
        "aten.linear.default",
        (("input", Slot(0)), ("weight", Slot(1))),
        (matrix, weight),
        (made,),
        (False, True),
    )
    relu = LocalCall("aten.relu.default", (("self", Slot(0)),), (made,), (made,), (True,))
    parts = (PartCall(linear, (0, 1)), PartCall(relu, (2,), constants=()))
    call = compiled_call((matrix, weight), parts, (3,))
    assert (call.inputs, call.outputs, call.gradients) == ((matrix, weight), (made,), (False, True))
    assert parts_of(call) == parts
    again = call_from_json(json.loads(call.key))
    assert (again.digest, parts_of(again)) == (call.digest, parts)
    assert flops(call) == flops(linear) + flops(relu)
    assert backward_flops(call) == backward_flops(linear) + backward_flops(relu)
    # Without the relu it is another call.
    assert compiled_call((matrix, weight), parts[:1], (2,)).digest != call.digest
