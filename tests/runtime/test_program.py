"""The static programs of all ranks, executed by a model of the ranks' messages: they match, and nothing deadlocks."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from graph.axes import AxisKind
from graph.plan import build_plan
from graph.schedule import GradientSums, MicroBatches, Phase, Schedule
from graph.strategy import Configuration, Sharding, Strategy
from graph.synchronization import Policy, Synchronization, p3
from runtime.communication import World
from runtime.execution.executor import Executor
from runtime.instructions.base import Instruction
from runtime.instructions.collectives import StartCollective, StartGradientCollective
from runtime.instructions.compute import Differentiate, EnterMicroBatch, Release
from runtime.instructions.gradient_synchronization import (
    FillBucket,
    FinishAllReduce,
    StartAllReduce,
    UpdateFirst,
)
from runtime.instructions.messages import Arrival, Exchange, Receive, ReceiveGradients, SendGradients
from runtime.instructions.sharded_weights import (
    AwaitGathers,
    BeginGathers,
    FinishAllGather,
    FinishReduceScatter,
    Reshard,
    StartAllGather,
    StartReduceScatter,
)
from runtime.instructions.shared_slices import AwaitPulls, PullSlice, StartPush
from runtime.jobs.models import tensors_of
from runtime.lowering.program import Program, compile_program
from runtime.lowering.tensor_slots import TensorSlots
from runtime.observe.memory_trace import SilentWorld
from search.space.baselines import shared
from tests.runtime.oracle import SEED, graph_of, make_job, reference
from tests.runtime.strategies import (
    by_kind,
    in_turn,
    random_pulls,
    random_strategy,
    randomly_shared,
    staged,
    without_kept_shares,
)

CPU = torch.device("cpu")


def sent_by(instruction: Instruction) -> list[tuple[int, tuple[int, ...]]]:
    """Return (peer, shape) of the messages that an instruction sends, in order."""
    if isinstance(instruction, Exchange):
        return [(peer, instruction.sends[part][1].shape) for peer, part in instruction.order]
    if isinstance(instruction, SendGradients):
        return [
            (part.peer, part.selection.shape)
            for _, parts in instruction.assemblies
            for part in parts
            if part.peer is not None
        ]
    return []


def arrivals_of(instruction: Instruction) -> tuple[Arrival, ...]:
    return instruction.arrivals if isinstance(instruction, (Exchange, SendGradients)) else ()


def awaited_by(instruction: Instruction) -> tuple[int, ...]:
    """Return the slots of the messages that an instruction waits for."""
    if isinstance(instruction, Receive):
        return instruction.arrivals
    if isinstance(instruction, ReceiveGradients):
        return tuple(slot for slot, _, _ in instruction.parts)
    return ()


class Rank:
    """One rank of the model: where it stands, and which message each awaited slot of each micro-batch is."""

    def __init__(self, number: int, program: Program) -> None:
        self.number = number
        self.instructions = program.instructions
        self.position = 0
        self.micro_batch = 0
        self.expected: dict[tuple[int, int], tuple[int, int]] = {}
        self.collecting: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        # By micro-batch and peer, the number of the last message that was sent.
        self.last_sent: dict[tuple[int, int], int] = {}
        self.started: list[tuple[tuple[int, ...], int]] = []
        # The reduce-scatter that was started last.
        self.scattered: tuple[tuple[int, ...], int] | None = None
        # By slice of a group, its sum and its gather.
        self.pushed: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.pulled: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}


class Model:
    """All ranks; the k-th message from one rank to another is the k-th that the other receives from it.

    The k-th collective of a group on one rank is the k-th on all of them; it ends when all have started it.
    """

    def __init__(self, programs: list[Program]) -> None:
        self.ranks = [Rank(number, program) for number, program in enumerate(programs)]
        self.sent: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
        self.issued: dict[tuple[tuple[int, ...], int], list[tuple[object, ...]]] = defaultdict(list)
        self.number_in_group: dict[tuple[int, int], int] = {}
        self.number_of_group: dict[tuple[int, int], int] = {}

    def run(self) -> bool:
        """Run all ranks until they finish or none can go on; return whether they finished."""
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.position < len(rank.instructions) and self._step(rank):
                    rank.position += 1
                    moved = True
        return all(rank.position == len(rank.instructions) for rank in self.ranks)

    def _step(self, rank: Rank) -> bool:
        instruction: Any = rank.instructions[rank.position]
        if isinstance(instruction, EnterMicroBatch):
            if not all(self._out(rank, number) for number in instruction.sent):
                return False
            rank.micro_batch = instruction.number
        if not all(self._arrived(rank, slot) for slot in awaited_by(instruction)):
            return False
        if isinstance(instruction, AwaitPulls):
            return all(
                self._ended(*rank.pulled[piece.key]) for of_group in instruction.slices for piece in of_group
            )
        if isinstance(instruction, PullSlice):
            piece = instruction.slice
            if not self._ended(*rank.pushed[piece.key]):
                return False
            what = ("pull", piece.first, piece.last, piece.group.dtype)
            rank.pulled[piece.key] = piece.group.ranks, self._issue(rank, piece.group.ranks, what)
        if isinstance(instruction, StartPush):
            piece = instruction.slice
            what = ("push", piece.first, piece.last, piece.group.dtype)
            rank.pushed[piece.key] = piece.group.ranks, self._issue(rank, piece.group.ranks, what)
        if isinstance(instruction, FinishAllReduce):
            bucket = instruction.bucket
            return self._ended(bucket.ranks, self.number_in_group[rank.number, bucket.number])
        if isinstance(instruction, (FinishReduceScatter, FinishAllGather)):
            group = instruction.group
            return self._ended(group.ranks, self.number_of_group[rank.number, group.number])
        if isinstance(instruction, FillBucket) and instruction.bucket.each:
            last = self.number_in_group.get((rank.number, instruction.bucket.number))
            if last is not None and not self._ended(instruction.bucket.ranks, last):
                return False
        if (
            isinstance(instruction, StartReduceScatter)
            and rank.scattered is not None
            and not self._ended(*rank.scattered)
        ):
            return False
        if isinstance(instruction, (StartReduceScatter, StartAllGather)):
            group, kind = instruction.group, type(instruction).__name__
            order = self._issue(rank, group.ranks, (kind, group.length, group.dtype))
            self.number_of_group[rank.number, group.number] = order
            if isinstance(instruction, StartReduceScatter):
                rank.scattered = group.ranks, order
        if isinstance(instruction, StartAllReduce):
            bucket = instruction.bucket
            order = self._issue(rank, bucket.ranks, ("reduction", instruction.first, instruction.last))
            self.number_in_group[rank.number, bucket.number] = order
        if isinstance(instruction, (StartCollective, StartGradientCollective)):
            call = instruction.call
            order = self._issue(rank, call.ranks, (call.kind, call.root, call.dtype))
            rank.collecting.update({(rank.micro_batch, slot): (call.ranks, order) for slot in call.slots})
        for peer, shape in sent_by(instruction):
            rank.last_sent[rank.micro_batch, peer] = len(self.sent[rank.number, peer])
            self.sent[rank.number, peer].append(shape)
        for arrival in arrivals_of(instruction):
            messages = self.received[arrival.peer, rank.number]
            rank.expected[rank.micro_batch, arrival.slot] = (arrival.peer, len(messages))
            messages.append(arrival.shape)
        return True

    def _issue(self, rank: Rank, group: tuple[int, ...], what: tuple[object, ...]) -> int:
        """Note a collective of a rank; return its number among those of the group."""
        self.issued[group, rank.number].append(what)
        rank.started.append((group, len(self.issued[group, rank.number])))
        return len(self.issued[group, rank.number]) - 1

    def _ended(self, group: tuple[int, ...], order: int) -> bool:
        return all(len(self.issued[group, member]) > order for member in group)

    def _out(self, rank: Rank, micro_batch: int) -> bool:
        """Whether peers have begun to receive all that the rank has sent them in a micro-batch."""
        return all(
            len(self.received[rank.number, peer]) > last
            for (number, peer), last in rank.last_sent.items()
            if number == micro_batch
        )

    def _arrived(self, rank: Rank, slot: int) -> bool:
        key = rank.micro_batch, slot
        if key in rank.collecting:
            return self._ended(*rank.collecting[key])
        peer, place = rank.expected[key]
        return len(self.sent[peer, rank.number]) > place

    def started_by(self, rank: int) -> list[tuple[tuple[int, ...], int]]:
        """Return the group and the number in the group of each collective of a rank, in the order of their starts."""
        return self.ranks[rank].started

    def groups_agree(self) -> bool:
        """Whether all members of each group issue the same collectives in the same order."""
        return all(
            self.issued[group, member] == self.issued[group, group[0]]
            for group in {group for group, _ in self.issued}
            for member in group
        )


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "dropped"])
@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_messages_match_and_nothing_deadlocks(name: str, devices: int) -> None:
    graph = graph_of(name)
    for seed in range(8):
        plan = build_plan(graph, random_strategy(graph, devices, seed), (0,) * devices, bucket_bytes=200)
        model = Model([compile_program(plan, rank, CPU) for rank in range(devices)])
        assert model.run(), f"seed {seed}: a rank waits for ever"
        assert model.sent == model.received
        assert model.groups_agree()
        assert {group for group, _ in model.issued} <= set(plan.device_groups)


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "dropped"])
@pytest.mark.parametrize("schedule", Schedule)
def test_messages_of_all_micro_batches_match_and_nothing_deadlocks(name: str, schedule: Schedule) -> None:
    """Of actors the order that uses all their credits, which is a program's; others they find as they go."""
    graph, crossed = graph_of(name, batch_size=3), 0
    for seed in range(8):
        if schedule is Schedule.INTERLEAVED:
            groups = [[[0], [1]], [[0], [1], [2]]][seed % 2]
            strategy = staged(graph, groups, 2, seed, split=False)
            count = 2 * len(groups)
        else:
            groups = [[[0], [1]], [[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0, 1, 2, 3]]][seed % 4]
            strategy = staged(graph, groups, 1, seed)
            count = 2 + seed % 4
        gradients = (GradientSums.LAST, GradientSums.EACH)[seed // 4]
        strategy = replace(strategy, micro_batches=MicroBatches(count, schedule, gradients=gradients))
        strategy = randomly_shared(strategy, graph, seed) if seed % 4 > 1 else strategy
        devices = strategy.device_count
        plan = build_plan(graph, strategy, (0,) * devices, bucket_bytes=200)
        model = Model([compile_program(plan, rank, CPU) for rank in range(devices)])
        assert model.run(), f"seed {seed}: a rank waits for ever"
        assert model.sent == model.received
        assert model.groups_agree()
        crossed += sum(len(messages) for messages in model.sent.values())
    assert crossed


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "blocked"])
def test_a_backward_waits_for_no_gradient_but_that_of_its_last_operator(name: str) -> None:
    """Else a recurrent layer's steps on one device would wait for all those of the next layer on another."""
    graph, devices, waits = graph_of(name), 3, 0
    for seed in range(8):
        plan = build_plan(graph, random_strategy(graph, devices, seed), (0,) * devices)
        for rank in range(devices):
            slots = TensorSlots(plan, rank)
            maker = {slot: operator for (operator, _, _), slot in slots.outputs.items()}
            program = compile_program(plan, rank, CPU)
            instructions = [one for one in program.instructions if not isinstance(one, Release)]
            for waiting, following in pairwise(instructions):
                if not isinstance(waiting, ReceiveGradients):
                    continue
                waits += 1
                awaited = {maker[source] for _, source, _ in waiting.parts}
                assert len(awaited) == 1
                if isinstance(following, Differentiate):
                    assert max(maker.get(slot, -1) for slot in following.outputs) <= max(awaited)
    assert waits


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "dropped"])
def test_slices_in_any_order_match_and_nothing_deadlocks(name: str, *, late: bool) -> None:
    """Where weights are updated late, of two steps: the second one waits for the first one's sums."""
    graph, devices = graph_of(name), 5
    for seed in range(8):
        strategy = replace(random_strategy(graph, devices, seed), synchronization=p3(60))
        order = list(build_plan(graph, strategy, (0,) * devices).slice_order)
        random.Random(seed).shuffle(order)
        plan = build_plan(graph, strategy, (0,) * devices, slice_order=order)
        programs = [compile_program(plan, rank, CPU, in_succession=late) for rank in range(devices)]
        if late:
            programs = [twice(program) for program in programs]
        model = Model(programs)
        assert model.run(), f"seed {seed}: a rank waits for ever"
        assert model.sent == model.received
        assert model.groups_agree()
        for rank, program in enumerate(programs):
            # All weights are of one dtype: a bucket is one flat tensor, and they are numbered alike.
            own = [number for number, bucket in enumerate(plan.buckets) if rank in bucket.devices]
            started = [
                own[item.bucket.number] for item in program.instructions if isinstance(item, StartAllReduce)
            ]
            assert started == (1 + late) * [number for number in order if number in own]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "viewed"])
def test_pushes_and_pulls_in_any_order_match_and_nothing_deadlocks(name: str, *, late: bool) -> None:
    """Of two steps; and ranks start what they share in one order over all groups, as one thread of each needs it.

    Of a step by itself updates are those of whole buckets.
    """
    graph, devices, pulled, early = graph_of(name), 4, 0, 0
    for seed in range(8):
        strategy = randomly_shared(random_strategy(graph, devices, seed), graph, seed)
        strategy = replace(without_kept_shares(strategy), synchronization=p3(60))
        plan = build_plan(graph, strategy, (0,) * devices)
        order = list(plan.slice_order)
        random.Random(seed).shuffle(order)
        pulls = random_pulls(plan, order, seed)
        plan = build_plan(graph, strategy, (0,) * devices, slice_order=order, pulls=pulls)
        programs = [compile_program(plan, rank, CPU, in_succession=late) for rank in range(devices)]
        pulled += len(pulls)
        early += sum(pull.phase is Phase.BACKWARD for pull in pulls)
        model = Model([twice(program) for program in programs])
        assert model.run(), f"seed {seed}: a rank waits for ever"
        assert model.sent == model.received
        assert model.groups_agree()
        assert_common_order(model, devices)
        kinds = {type(item) for program in programs for item in program.instructions}
        assert late or not kinds & {StartPush, PullSlice}
    assert pulled
    assert early or name != "perceptron"


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "viewed"])
def test_late_gathers_in_any_order_match_and_nothing_deadlocks(name: str) -> None:
    """Of two steps; and ranks start what they share in one order over all groups, as one thread of each needs it."""
    graph, devices, late = graph_of(name), 4, 0
    for seed in range(8):
        strategy = randomly_shared(random_strategy(graph, devices, seed), graph, seed)
        strategy = replace(strategy, synchronization=Synchronization(Policy.TIC, 60))
        order = list(build_plan(graph, strategy, (0,) * devices).gather_order)
        random.Random(seed).shuffle(order)
        plan = build_plan(graph, strategy, (0,) * devices, gather_order=order)
        programs = [twice(compile_program(plan, rank, CPU, in_succession=True)) for rank in range(devices)]
        model = Model(programs)
        assert model.run(), f"seed {seed}: a rank waits for ever"
        assert model.sent == model.received
        assert model.groups_agree()
        late += sum(len(program.late) for program in programs)
        assert_common_order(model, devices)
    assert late


def assert_common_order(model: Model, devices: int) -> None:
    """Assert that any two ranks start what both take part in in the same order."""
    started = [model.started_by(rank) for rank in range(devices)]
    for one, other in combinations(started, 2):
        common = set(one) & set(other)
        assert [item for item in one if item in common] == [item for item in other if item in common]


def twice(program: Program) -> Program:
    """Return a program of two steps, of which the first one has no sums and no gathers to wait for."""
    late = {id(item) for item in program.late}
    first = [item for item in program.instructions if id(item) not in late]
    between: list[Instruction] = []
    for item in program.after_update:
        between += map(StartAllGather, item.first) if isinstance(item, BeginGathers) else [item]
    second: list[Instruction] = []
    for item in program.instructions:
        if isinstance(item, UpdateFirst):
            second += item.finishes
        elif isinstance(item, AwaitGathers):
            for awaited, following in item.gathers:
                second += [*map(FinishAllGather, awaited), *map(StartAllGather, following)]
        else:
            second.append(item)
    return replace(program, instructions=(*first, *between, *second))


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "recurrent", "dropped"])
def test_sums_and_gathers_of_shares_match_and_nothing_deadlocks(name: str) -> None:
    """What follows the update is walked as well."""
    graph, devices = graph_of(name), 4
    kinds = set()
    for seed in range(6):
        strategy = randomly_shared(random_strategy(graph, devices, seed), graph, seed)
        plan = build_plan(graph, strategy, (0,) * devices, bucket_bytes=200)
        programs = [compile_program(plan, rank, CPU) for rank in range(devices)]
        programs = [replace(one, instructions=(*one.instructions, *one.after_update)) for one in programs]
        model = Model(programs)
        assert model.run(), f"seed {seed}: a rank waits for ever"
        assert model.sent == model.received
        assert model.groups_agree()
        assert {group for group, _ in model.issued} <= set(plan.device_groups)
        kinds |= {type(one) for program in programs for one in program.instructions}
    assert {StartReduceScatter, StartAllGather, Reshard} <= kinds


def test_a_step_with_gathered_weights_leaves_none_of_them_behind() -> None:
    """On one of two ranks, of which the other one is silent: between steps there are shares alone."""
    graph = graph_of("perceptron")
    strategy = shared(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), Sharding.PARAMETERS)
    model = reference("perceptron")
    executor = Executor(
        build_plan(graph, strategy, (0, 0)),
        SilentWorld(2, 0),
        tensors_of(graph, model.build(SEED)),
        make_job(graph, strategy, model).training,
        seed=0,
        learning_rate=0.0,
        device=CPU,
    )
    held = [executor._held[name] for name in executor.program.sharded]
    assert len(held) == len(graph.weights)
    for number in range(2):
        assert all(one.untyped_storage().nbytes() == 0 for one in held)
        executor.step(number)
    assert all(one.untyped_storage().nbytes() == 0 for one in held)
    assert not executor._state.all_gathers
    assert not executor._state.reduce_scatters
    for weight in graph.weights:
        ((_, share),) = executor.parts()[weight.name]
        assert weight.spec.elements / 2 <= share.numel() < weight.spec.elements


def test_one_device_has_one_segment_and_no_messages() -> None:
    graph = graph_of("convolutions")
    program = compile_program(build_plan(graph, in_turn(graph, [0]), (0,)), 0, CPU)
    kinds = [type(instruction) for instruction in program.instructions]
    assert kinds.count(Differentiate) == 1
    assert not {Exchange, SendGradients, Receive, StartAllReduce} & set(kinds)


def test_a_step_leaves_no_tensor_behind() -> None:
    """Every tensor of a step is released; what stays are weights, gradients, inputs and buffers."""
    graph = graph_of("recurrent")
    model = reference("recurrent")
    job = make_job(graph, in_turn(graph, [0]), model)
    executor = Executor(
        build_plan(graph, job.strategy, (0,)),
        World(1),
        tensors_of(graph, model.build(SEED)),
        job.training,
        seed=0,
        learning_rate=0.1,
        device=CPU,
    )
    executor.step(0)
    kept = {read.slot for read in executor._program.reads}
    assert {slot for slot, value in enumerate(executor._state.values) if value is not None} == kept


def test_buckets_cut_the_backward_into_segments() -> None:
    """Two devices with replicated weights and small buckets: gradients travel while the backward goes on."""
    graph = graph_of("perceptron")
    degrees = [tuple(2 if axis.name == "sample" else 1 for axis in o.space.axes) for o in graph.operators]
    strategy = Strategy(
        graph.digest,
        tuple(Configuration(d, (0, 1) if 2 in d else (0,)) for d in degrees),
    )
    plan = build_plan(graph, strategy, (0, 0), bucket_bytes=100)
    program = compile_program(plan, 1, CPU)
    kinds = [type(i) for i in program.instructions if not isinstance(i, Release)]
    first_reduction = kinds.index(StartAllReduce)
    assert Differentiate in kinds[:first_reduction]
    assert Differentiate in kinds[first_reduction:]
