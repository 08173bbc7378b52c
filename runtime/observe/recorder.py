"""Records the timeline of a rank's step: spans of its instructions and, within the backward, of its operators.

The clock is the profiler's (CUDA events on a GPU), set to zero behind a barrier of all ranks, as for a measured step.
A mark is recorded wherever the rank begins something else, so that the spans fill the step. The world marks waits
within instructions; hooks on the autograd nodes of an operator's forward mark its backward within that of a segment.
Marks cost time of their own, so a recorded step is somewhat longer than others. So does taking down when messages and
collectives are done (`runtime.observe.communication_clock`), which is for those alone who ask for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from graph.collective_algorithms import BY_LIBRARY, algorithm_for
from graph.collectives import CollectiveKind
from graph.plan import Plan
from graph.strategy import Sharding
from profiler.process_groups import Message
from profiler.timers import synchronize, timer_for
from runtime.communication import KIND_OF, LIBRARY_ONLY, World
from runtime.execution.executor import Executor
from runtime.instructions.base import Instruction, Slots, WrappedInstruction
from runtime.instructions.collectives import StartCollective, StartGradientCollective
from runtime.instructions.compute import (
    Assemble,
    Call,
    Differentiate,
    DifferentiateWeights,
    Loss,
    Recompute,
    Renew,
    Seed,
    Unrecorded,
)
from runtime.instructions.gradient_synchronization import (
    FillBucket,
    FinishAllReduce,
    StartAllReduce,
    UpdateFirst,
)
from runtime.instructions.messages import Exchange, Receive, ReceiveGradients, SendGradients
from runtime.instructions.sharded_weights import (
    AllocateWeights,
    AwaitGathers,
    FillWeights,
    FinishAllGather,
    FinishReduceScatter,
    Reshard,
    StartAllGather,
    StartReduceScatter,
)
from runtime.instructions.shared_slices import AwaitPulls, PackGradients, PullSlice, StartPush
from runtime.instructions.state import StepState
from runtime.lowering.program import Program
from runtime.lowering.tensor_slots import TensorSlots
from runtime.observe.communication_clock import CommunicationClock
from runtime.observe.spans import (
    LATE_MESSAGES,
    MESSAGE,
    WEIGHT_GRADIENTS,
    WEIGHTS,
    Label,
    RecordedStep,
    Span,
)

_PREPARE = Label("runtime", "start of the step", "start of the step")
_RELEASE = Label("runtime", "releases", "release tensors")
_AUTOGRAD = Label("runtime", "autograd", "autograd between operators")
_RECORDING = Label("runtime", "recording", "recording")
_LOSS = Label("runtime", "loss", "loss")
_END = Label("runtime", "end of the step", "end of the step")
_SUMS = Label("wait", WEIGHT_GRADIENTS, "wait for a shared sum of gradients")
_GATHERS = Label("wait", WEIGHTS, "wait for weights")


def record_step(
    executor: Executor,
    plan: Plan,
    world: World,
    device: torch.device,
    number: int,
    *,
    communications: CommunicationClock | None = None,
    sleep_cycles: int = 0,
) -> RecordedStep:
    """Execute step `number` and return this rank's spans; all ranks must call it.

    communications: takes them down, too. Who gives it closes it.
    sleep_cycles: for which the device, a GPU, sleeps while the step is issued; spans have their hosts' times then
    (`runtime.jobs.job.Job`).
    """
    clock = _Clock(device, with_hosts=sleep_cycles > 0)
    names = _Names(plan, world.rank, executor.program)
    observed = tuple(
        _Observed(instruction, *names.labels(instruction), _outputs(instruction), clock)
        for instruction in executor.program.instructions
    )
    listening = _ListeningWorld(world, clock, communications)
    world.barrier(device)
    if sleep_cycles:
        torch.cuda._sleep(sleep_cycles)
        # Devices wake up one after the other, and meet.
        world.sum(torch.zeros(1, device=device))
    clock.start(_PREPARE)
    with executor.running((*observed, _Tail(clock)), listening):
        executor.differentiate(number)
    clock.begin(Label("update", WEIGHTS, f"update device {world.rank}"))
    # What a step leaves to the next one is done here.
    clock.waits_for = _GATHERS if plan.pulls else _waiting(WEIGHT_GRADIENTS)
    with executor.running((), listening):
        executor.update_own()
    if executor.program.after_update:
        clock.begin(_GATHERS)
        clock.waits_for = _GATHERS
    with executor.running((), listening):
        executor.make_weights_whole()
    is_ahead = not (sleep_cycles and clock.origin.query())
    if not sleep_cycles:  # else the last span would have the host's wait
        synchronize(device)
    spans = tuple(clock.stop())
    return RecordedStep(spans, () if communications is None else communications.since(clock.origin), is_ahead)


class _Clock:
    """Records marks with labels: of the span that begins at the mark."""

    def __init__(self, device: torch.device, *, with_hosts: bool) -> None:
        self._timer, self._with_hosts = timer_for(device), with_hosts
        self._moments: list[tuple[Any, Label]] = []
        # When the host came to each moment, and when it went on: a mark takes it time, too.
        self._issued_ns: list[tuple[int, int]] = []
        self._hooked: set[Any] = set()
        self.waits_for = _END

    def start(self, label: Label) -> None:
        """Begin the step."""
        self._moments, self._issued_ns = [], []
        self.begin(label)

    def begin(self, label: Label) -> None:
        """Begin another span."""
        self._moments.append((self._mark(), label))

    def _mark(self) -> Any:
        if not self._with_hosts:
            return self._timer.mark()
        came_ns = time.perf_counter_ns()
        mark = self._timer.mark()
        self._issued_ns.append((came_ns, time.perf_counter_ns()))
        return mark

    @property
    def now(self) -> Label:
        """The label of the present span."""
        return self._moments[-1][1]

    @property
    def origin(self) -> Any:
        """The mark at which the step began."""
        return self._moments[0][0]

    def hook(self, outputs: Sequence[object], label: Label) -> None:
        """Mark when autograd differentiates the nodes of `outputs`, but those that an earlier operator has hooked."""
        begin = self.begin

        def before(_gradients: object) -> None:
            begin(label)

        def after(_inputs: object, _outputs: object) -> None:
            begin(_AUTOGRAD)

        nodes = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor)]
        while nodes:
            node = nodes.pop()
            # Leaves outlive the step: a hook on their accumulation would stay.
            if node is None or node in self._hooked or node.name().endswith("AccumulateGrad"):
                continue
            self._hooked.add(node)
            node.register_prehook(before)
            node.register_hook(after)
            nodes.extend(following for following, _ in node.next_functions)

    def stop(self) -> list[Span]:
        """End the step; return its spans, neighbours of one label as one."""
        end = self._mark()
        self._hooked.clear()
        origin = self.origin
        moments = [round(self._timer.elapsed_s(origin, mark) * 1e9) for mark, _ in self._moments]
        moments.append(round(self._timer.elapsed_s(origin, end) * 1e9))
        hosts_ns = [came_ns - went_on_ns for (_, went_on_ns), (came_ns, _) in pairwise(self._issued_ns)]
        spans: list[Span] = []
        for (_, label), (start_ns, end_ns), host_ns in zip(
            self._moments, pairwise(moments), hosts_ns or [0] * len(self._moments), strict=True
        ):
            if end_ns <= start_ns and not host_ns:
                continue
            if spans and spans[-1].label == label and spans[-1].end_ns == start_ns:
                spans[-1] = Span(label, spans[-1].start_ns, end_ns, spans[-1].host_ns + host_ns)
            else:
                spans.append(Span(label, start_ns, end_ns, host_ns))
        return spans


class _ListeningWorld(World):
    """A world that marks the waits of the rank and, where there is a clock for them, its communications."""

    def __init__(self, world: World, clock: _Clock, communications: CommunicationClock | None) -> None:
        self.__dict__.update(world.__dict__)
        self._clock = clock
        self._communications = communications

    def wait(self, work: Any) -> None:
        """Wait for a work in a span of its own."""
        before = self._clock.now
        self._clock.begin(self._clock.waits_for)
        super().wait(work)
        self._clock.begin(before)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        """Start all messages of one event, and take them down."""
        clock = self._communications
        if clock is None:
            return super().exchange(sends, receives)
        start, subject = clock.mark(), self._clock.now.subject
        sent, received = super().exchange(sends, receives)
        for message in sends:
            clock.send((self.rank, message.peer), subject, start)
        return sent, [
            clock.watch(work, MESSAGE, (message.peer, self.rank), subject, start)
            for message, work in zip(receives, received, strict=True)
        ]

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start a sum, and take it down also where it is not by the library's own algorithm."""
        start = None if self._communications is None else self._communications.mark()
        work = super().all_reduce(tensor, ranks)
        by_library = algorithm_for(self._all_reduces.get(ranks, LIBRARY_ONLY), tensor.nbytes) == BY_LIBRARY
        if self._communications is None or by_library:
            return work
        subject = self._clock.now.subject
        return self._communications.watch(work, CollectiveKind.ALL_REDUCE, ranks, subject, start)

    def _start(self, operation: Callable[..., Any], ranks: tuple[int, ...], *arguments: Any) -> Any:
        start = None if self._communications is None else self._communications.mark()
        work = super()._start(operation, ranks, *arguments)
        if self._communications is None:
            return work
        return self._communications.watch(work, KIND_OF[operation], ranks, self._clock.now.subject, start)


@dataclass(frozen=True, slots=True)
class _Observed(WrappedInstruction):
    """An instruction with the labels of its own span, its waits, and the backward of its `outputs`."""

    label: Label
    waits_for: Label
    backward: Label | None
    outputs: Slots
    clock: _Clock

    def run(self, state: StepState) -> None:
        self.clock.waits_for = self.waits_for
        self.clock.begin(self.label)
        self.inner.run(state)
        if self.backward is not None:
            self.clock.begin(_RECORDING)
            self.clock.hook([state.values[slot] for slot in self.outputs], self.backward)


@dataclass(frozen=True, slots=True)
class _Tail(Instruction):
    """The span after the last instruction: waits for messages still under way."""

    clock: _Clock

    def run(self, state: StepState) -> None:  # noqa: ARG002 - no value is needed
        self.clock.waits_for = _waiting(LATE_MESSAGES)
        self.clock.begin(_END)


def _waiting(subject: str) -> Label:
    return Label("wait", subject, f"wait for {subject}")


class _Names:
    """The labels of a rank's instructions, by the slots that the plan gives its tensors."""

    def __init__(self, plan: Plan, rank: int, program: Program) -> None:
        graph = plan.graph
        self._rank = rank
        slots = TensorSlots(plan, rank)
        self._operators = [operator.name for operator in graph.operators]
        self._task_of: dict[int, tuple[int, int]] = {}
        self._value_of: dict[int, str] = {}
        for (operator, task, position), slot in slots.outputs.items():
            self._task_of[slot] = (operator, task)
            self._value_of[slot] = graph.operators[operator].outputs[position]
        for group in slots.assemblies.values():
            self._value_of.update({local.slot: local.value for local in group})
        self._name_arrivals(program, {read.slot: read.value for read in slots.reads.values()})
        self._bucket_of = _bucket_numbers(plan, rank)

    def _name_arrivals(self, program: Program, reads: dict[int, str]) -> None:
        """Name received tensors after the tensor that they are assembled into or are part of."""
        values = self._value_of
        plain = [item.inner if isinstance(item, Unrecorded) else item for item in program.instructions]
        for item in plain:
            if isinstance(item, Renew) and item.source not in values:
                values[item.source] = f"new {reads[item.read]}"
        for item in plain:
            if isinstance(item, Receive):
                values.update(dict.fromkeys(item.arrivals, values[item.target]))
            elif isinstance(item, ReceiveGradients):
                values.update({arrival: f"gradient of {values[source]}" for arrival, source, _ in item.parts})

    def labels(self, instruction: Instruction) -> tuple[Label, Label, Label | None]:
        """Return the labels of an instruction's span, of its waits, and of its backward (None: it has none)."""
        if isinstance(instruction, Recompute):
            label, waits_for, backward = self.labels(instruction.inner)
            recompute = Label("recompute", label.subject, f"recompute {label.name.removeprefix('forward ')}")
            return recompute if label.kind == "forward" else label, waits_for, backward
        recorded = not isinstance(instruction, Unrecorded)
        inner = instruction.inner if isinstance(instruction, Unrecorded) else instruction
        match inner:
            case Call():
                operator, task = self._task_of[inner.outputs[0]]
                name = self._operators[operator]
                forward = Label("forward", name, f"forward {name}[{task}]")
                backward = Label("backward", name, f"backward {name}[{task}]")
                return forward, _END, backward if recorded else None
            case Assemble():
                value = self._value_of[inner.target]
                back = Label("copy", f"gradient of {value}", f"take gradient of {value} apart")
                return _copying(value, "assemble"), _END, back if recorded else None
            case Receive():
                value = self._value_of[inner.target]
                return _copying(value, "assemble"), _waiting(value), None
            case Exchange():
                slot = inner.touches[0]
                return _copying(self._value_of.get(slot, "messages"), "exchange"), _END, None
            case StartCollective():
                slots = inner.touches
                value = next((self._value_of[slot] for slot in slots if slot in self._value_of), "a value")
                return _copying(value, inner.call.kind.value), _END, None
            case StartGradientCollective():
                return _copying(self._gradient(inner), inner.call.kind.value), _END, None
            case SendGradients():
                slots = (*(assembly.slot for assembly, _ in inner.assemblies), *inner.touches)
                value = self._value_of.get(slots[0], "values").removeprefix("gradient of ")
                return _copying(f"gradient of {value}", "exchange"), _END, None
            case ReceiveGradients():
                value = self._value_of[inner.parts[0][1]]
                return _copying(f"gradient of {value}", "add"), _waiting(f"gradient of {value}"), None
            case FillBucket() | StartAllReduce():
                name = f"pack gradients of bucket {self._bucket_of[inner.bucket.number]}"
                return Label("copy", WEIGHT_GRADIENTS, name), _END, None
            case FinishAllReduce():
                bucket = self._bucket_of[inner.bucket.number]
                name = f"hand out gradients of bucket {bucket}"
                waiting = Label("wait", WEIGHT_GRADIENTS, f"wait for all-reduce bucket {bucket}")
                return Label("copy", WEIGHT_GRADIENTS, name), waiting, None
            case UpdateFirst():
                return (
                    Label("update", WEIGHTS, f"update device {self._rank}"),
                    _waiting(WEIGHT_GRADIENTS),
                    None,
                )
            case StartReduceScatter() | PackGradients() | StartPush():
                return Label("copy", WEIGHT_GRADIENTS, "pack gradients to share"), _SUMS, None
            case FinishReduceScatter():
                return Label("copy", WEIGHT_GRADIENTS, "end of a shared sum"), _SUMS, None
            case StartAllGather():
                return Label("copy", WEIGHTS, "pack shares of weights"), _END, None
            case PullSlice():
                return Label("update", WEIGHTS, f"update and pack shares of device {self._rank}"), _SUMS, None
            case FinishAllGather() | AwaitGathers() | AwaitPulls() | AllocateWeights() | FillWeights():
                return Label("copy", WEIGHTS, "write gathered weights"), _GATHERS, None
            case Reshard():
                return Label("copy", WEIGHTS, "drop gathered weights"), _END, None
            case Differentiate() | DifferentiateWeights():
                return _AUTOGRAD, _END, None
            case Loss() | Seed():
                return _LOSS, _END, None
            case _:
                return _RELEASE, _END, None

    def _gradient(self, instruction: StartGradientCollective) -> str:
        slots = [item.slot for item in instruction.call.arrivals]
        if instruction.assembly is not None:
            slots.insert(0, instruction.assembly.slot)
        value = next((self._value_of[slot] for slot in slots if slot in self._value_of), "a value")
        return f"gradient of {value.removeprefix('gradient of ')}"


def _outputs(instruction: Instruction) -> Slots:
    """Return the slots of the tensors that an instruction records in autograd."""
    if isinstance(instruction, Recompute):
        return _outputs(instruction.inner)
    if isinstance(instruction, Call):
        return instruction.outputs
    return (instruction.target,) if isinstance(instruction, Assemble) else ()


def _copying(subject: str, verb: str) -> Label:
    return Label("copy", subject, f"{verb} {subject}")


def _bucket_numbers(plan: Plan, rank: int) -> list[int]:
    """Return, for each reduction that the rank starts, its bucket: one a dtype, in the order of the backward."""
    numbers = [
        number
        for number, bucket in enumerate(plan.buckets)
        if rank in bucket.devices and bucket.sharding is Sharding.NONE
    ]
    numbers.sort(key=lambda number: (-plan.buckets[number].after, number))
    dtypes = {
        number: {plan.graph.value_by_name[entry.weight].spec.dtype for entry in plan.buckets[number].entries}
        for number in numbers
    }
    return [number for number in numbers for _ in dtypes[number]]
