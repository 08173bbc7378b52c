"""Executes a rank's program, forward and backward, on its parts of weights, buffers and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from graph.errors import RuntimeFailure
from graph.intervals import Region, full_region, shape
from graph.operators import ValueKind
from graph.plan import Plan
from profiler.operators import ExecutionContext
from profiler.pinning import give_way
from runtime.communication import World
from runtime.execution.acting import acting
from runtime.instructions.base import Instruction
from runtime.instructions.selections import Selection
from runtime.instructions.sharded_weights import WeightPart, is_copied, joined, joined_shape, split_joined
from runtime.instructions.state import StepState
from runtime.lowering.loss_count import loss_count
from runtime.lowering.program import Program, compile_program
from runtime.lowering.tensor_slots import RegionRead

# A region of a tensor, and the dense tensor of that region.
Held = tuple[Region, torch.Tensor]
Parts = Mapping[str, Held]


def whole_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Held]:
    """Return whole tensors with their whole regions."""
    return {name: (full_region(tuple(tensor.shape)), tensor) for name, tensor in tensors.items()}


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on `device`; to a GPU from pinned memory, so that the host does not wait for the GPU.

    A tensor that is pinned already must not be overwritten before the GPU has copied it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    pinned = tensor if tensor.is_pinned() and tensor.is_contiguous() else tensor.contiguous().pin_memory()
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CopiedRead:
    """A read of a part of a weight that is no view of it: its slot, the rank's tensor of the weight, and the part."""

    weight: str
    slot: int
    held: torch.Tensor
    part: Selection
    differentiable: bool


class StepRunner:
    """One rank of a plan: from its parts of weights, buffers and inputs, a step's loss and gradients.

    Every rank of `world` must make one, of the same plan, and call `differentiate` equally often. Weights, buffers and
    inputs must be loaded before.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        *,
        seed: int,
        device: torch.device,
        kept: frozenset[str] = frozenset(),
        weights_of: StepRunner | None = None,
        in_succession: bool = False,
    ) -> None:
        """Compile the rank's program and make room for its parts of the weights.

        Args:
            plan: what to execute.
            world: the ranks; this rank executes the plan's device of its number.
            seed: of dropout.
            device: where this rank computes.
            kept: values of the graph that stay after a step (`whole_value`).
            weights_of: has the same parts of the weights, which this one is to use as well, at other times.
            in_succession: steps leave to the next one what the plan leaves to it (`compile_program`).
        """
        self._plan = plan
        self._seed = seed
        self._device = device
        self._world = world
        self._program = compile_program(plan, world.rank, device, kept, in_succession=in_succession)
        self._micro_batches = plan.strategy.micro_batches.count
        self._loss_count: torch.Tensor | None = None
        self._state = StepState(
            world,
            self._program.shapes,
            self._micro_batches,
            [slot for slot, _ in self._program.held.values()],
        )
        for slot, home in self._program.gradient_homes.items():
            self._state.gradients.stand_in(slot, home)
        self._held: dict[str, torch.Tensor] = {}
        # The parts of each weight that the rank updates, in one tensor.
        self._own: dict[str, torch.Tensor] = {}
        for name, (slot, region) in self._program.held.items():
            dtype = getattr(torch, plan.graph.value_by_name[name].spec.dtype)
            if weights_of is None:
                self._held[name] = torch.empty(shape(region), dtype=dtype, device=device)
            else:
                self._held[name] = held = weights_of._held[name]
                # Views are made of it, for which it must be there.
                held.untyped_storage().resize_(held.numel() * held.element_size())
            self._state.weights[slot] = self._held[name]
            self._make_parts(name, None if weights_of is None else weights_of._own.get(name))
        self._refreshed: list[CopiedRead] = []
        self._input_selections: dict[tuple[int, torch.device], Selection] = {}
        for read in self._program.reads:
            value = plan.graph.value_by_name[read.value]
            if value.kind is ValueKind.WEIGHT:
                self._place_weight(read, differentiable=value.requires_gradient)
        for slot, sizes, dtype in self._program.empty:
            self._state.place(slot, torch.empty(sizes, dtype=dtype, device=device))
        for name in self._program.sharded:
            self._held[name].untyped_storage().resize_(0)

    def _make_parts(self, name: str, own: torch.Tensor | None) -> None:
        """Make the tensor of a weight's parts that the rank updates.

        It is a view of the weight where it is one part that no other rank has a share of, else memory of its own.
        `own`: the tensor of another runner to use instead.
        """
        held, (_, within) = self._held[name], self._program.held[name]
        parts = self._program.parts[name]
        if not parts:
            return
        if own is None:
            selection = Selection(parts[0].region, within, self._device)
            if name in self._program.sharded or is_copied(parts, selection):
                own = torch.empty(joined_shape(parts), dtype=held.dtype, device=self._device)
            else:
                own = selection.take(held)
                if not (parts[0].alone or own.is_contiguous()) and self._program.late:
                    # It is updated in ranges of its elements.
                    own = torch.empty(own.shape, dtype=held.dtype, device=self._device)
        self._own[name] = own
        for part, tensor in zip(parts, split_joined(parts, own), strict=True):
            self._state.parts[part.number] = tensor

    def _place_weight(self, read: RegionRead, *, differentiable: bool) -> None:
        """Make the leaf of a read of a weight: a view of the held weight where the region allows it."""
        weight = self._held[read.value]
        selection = Selection(read.region, self._program.held[read.value][1], self._device)
        if selection.is_view:
            self._state.place(read.slot, selection.take(weight).detach().requires_grad_(differentiable))
        elif read.value not in self._program.sharded:
            self._refreshed.append(CopiedRead(read.value, read.slot, weight, selection, differentiable))

    def load_weights(self, parts: Parts) -> None:
        """Copy values into the rank's weights; each part must cover the region that the rank holds."""
        for name, (_, region) in self._program.held.items():
            if name not in parts:
                continue
            within, tensor = parts[name]
            if name not in self._program.sharded:
                self._held[name].copy_(Selection(region, within, tensor.device).take(tensor.detach()))
            for part in self._program.parts[name]:
                selection = Selection(part.region, within, tensor.device)
                self._state.parts[part.number].copy_(selection.take(tensor.detach()))

    def load_buffers(self, parts: Parts) -> None:
        """Use other values of buffers; each part must cover what the rank reads."""
        for read in self._reads(ValueKind.BUFFER):
            if read.value in parts:
                within, tensor = parts[read.value]
                part = Selection(read.region, within, tensor.device).take(tensor.detach())
                self._state.place(read.slot, part.to(self._device, copy=True))

    def count_loss(
        self, buffers: Mapping[str, torch.Tensor], micro_batches: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        """Average the loss over the targets of all micro-batches from now on, where these follow from whole inputs."""
        self._loss_count = loss_count(self._plan.graph, buffers, micro_batches)

    @property
    def _loss_share(self) -> float:
        """The share of a micro-batch's loss in that of the step."""
        return 1.0 if self._loss_count is not None else 1.0 / self._micro_batches

    def set_inputs(self, parts: Parts, micro_batch: int = 0) -> None:
        """Use other inputs from the next step on; each part must cover what the rank reads, and be the same region."""
        for read in self._reads(ValueKind.INPUT):
            within, tensor = parts[read.value]
            key = (read.slot, tensor.device)
            selection = self._input_selections.get(key)
            if selection is None:
                selection = Selection(read.region, within, tensor.device)
                self._input_selections[key] = selection
            part = moved(selection.take(tensor.detach()), self._device)
            self._state.micro_batches[micro_batch].values[read.slot] = part.contiguous()

    def _reads(self, kind: ValueKind) -> list[RegionRead]:
        values = self._plan.graph.value_by_name
        return [read for read in self._program.reads if values[read.value].kind is kind]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._device

    @property
    def program(self) -> Program:
        """The instructions of a step, and the tensors that they need."""
        return self._program

    @contextmanager
    def running(self, instructions: tuple[Instruction, ...], world: World) -> Iterator[None]:
        """Execute other instructions over another world, instead of the program's own, while the context lasts."""
        program, own = self._program, self._state.world
        self._program, self._state.world = replace(program, instructions=instructions), world
        try:
            yield
        finally:
            self._program, self._state.world = program, own

    def differentiate(self, number: int, *, loss_scale: float = 1.0) -> None:
        """Execute forward, backward and gradient synchronization of one step; buffers are renewed.

        Args:
            number: of the step; it seeds dropout. Of M micro-batches each one draws as a step of its own.
            loss_scale: gradients are those of the loss times this; the loss stays as it is.
        """
        state, count = self._state, self._micro_batches
        state.loss, state.loss_scale = None, loss_scale * self._loss_share
        first = number * count
        state.use_context(
            [
                ExecutionContext(
                    seed=self._seed,
                    step=first + micro_batch,
                    device=self._device,
                    loss_count=self._loss_count,
                )
                for micro_batch in range(count)
            ]
        )
        self._begin_step()
        on_cpu = self._device.type == "cpu"
        for instruction in self._issued():
            instruction.run(state)
            if on_cpu:
                give_way()
        state.wait_for_all()
        state.renew()

    def _issued(self) -> Iterator[Instruction]:
        """Yield the instructions of a step in the order in which they are to be run, each when the one before was."""
        program, state = self._program, self._state
        if program.actors is None or not state.world.takes_time:
            yield from program.instructions
            return
        yield from acting(program.actors, program.instructions, state, self._device)
        # What observes a step may have put something behind its program.
        yield from program.instructions[program.actors.rest.stop :]

    def _begin_step(self) -> None:
        """Forget the last step's gradients, and copy the parts of weights that are read as copies."""
        self._forget_gradients()
        self._copy_reads(self._refreshed)

    def _copy_reads(self, reads: Sequence[CopiedRead]) -> None:
        for read in reads:
            part = read.part.take(read.held).detach()
            self._state.place(read.slot, part.requires_grad_(read.differentiable))

    def forget_step(self) -> None:
        """Drop the tensors of the last step that the next one replaces: gradients, and copies of parts of weights."""
        self._forget_gradients()
        for read in self._refreshed:
            self._state.place(read.slot, None)

    def _forget_gradients(self) -> None:
        for slot, _ in self._program.held.values():
            self._state.gradients.pop(slot)
        self._state.shard_gradients.clear()

    def make_weights_whole(self) -> None:
        """All-gather, after an update, the shares of weights that other ranks have updated. All ranks must call it."""
        for instruction in self._program.after_update:
            instruction.run(self._state)

    def own_loss(self) -> torch.Tensor:
        """Return this rank's part of the last step's loss, a float64 scalar on its device; the parts add up to it."""
        loss = self._state.loss
        if loss is None:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return loss.to(torch.float64).reshape(()) * self._loss_share

    def loss_tensor(self) -> torch.Tensor:
        """Return the last step's loss, a float64 scalar on the rank's device. All ranks must call it: it is a sum."""
        loss, _ = self.loss_and_marks(None)
        return loss

    def loss_and_marks(self, mark: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last step's loss, and every rank's `mark`, a float64 scalar, by rank, in the same sum."""
        values = torch.zeros(
            1 if mark is None else 1 + self._world.size, dtype=torch.float64, device=self._device
        )
        values[0] = self.own_loss()
        if mark is not None:
            values[1 + self._world.rank] = mark
        values = self._world.sum(values)
        return values[0], values[1:]

    def loss(self) -> float:
        """Return the last step's loss as a number. All ranks must call it."""
        loss = self.loss_tensor()
        self._world.wait_for_device(self._device)
        return float(loss)

    def all_parts(self) -> dict[str, list[Held]]:
        """Return the regions of each held weight that the rank would update, with their values."""
        state = self._state
        return {
            name: [(part.region, state.parts[part.number]) for part in own]
            for name, own in self._program.parts.items()
        }

    @property
    def updated(self) -> tuple[str, ...]:
        """The rank's weights that get a gradient."""
        return self._program.updated

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return, for each weight, the parts that the rank would update in one tensor (`joined`)."""
        return dict(self._own)

    def own_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return, for each weight that is updated, the last gradient of the tensor in `own_tensors`, if it has one."""
        return {
            name: joined(self._program.parts[name], [gradient for _, gradient in own]) if own else None
            for name, own in self.gradients().items()
        }

    def buffer_values(self) -> dict[int, torch.Tensor]:
        """Return the present values of buffers, by slot; no step writes into them."""
        return {read.slot: self._state.values[read.slot] for read in self._reads(ValueKind.BUFFER)}

    def restore_buffers(self, values: Mapping[int, torch.Tensor]) -> None:
        """Restore earlier values of buffers (`buffer_values`)."""
        for slot, tensor in values.items():
            self._state.place(slot, tensor)

    def whole_value(self, name: str) -> torch.Tensor:
        """Return a kept value of the last step, whole, on the rank's device. All ranks must call it: it is a sum."""
        spec = self._plan.graph.value_by_name[name].spec
        dtype = getattr(torch, spec.dtype)
        # Communication libraries add up no booleans.
        whole = torch.zeros(
            spec.shape, dtype=torch.uint8 if dtype is torch.bool else dtype, device=self._device
        )
        for region, slot in self._program.kept[name]:
            part = self._state.values[slot].detach().to(whole.dtype)
            Selection(region, full_region(spec.shape), self._device).add(whole, part)
        return self._world.sum(whole).to(dtype)

    @property
    def has_inputs(self) -> bool:
        """Whether inputs were set."""
        return all(self._state.values[read.slot] is not None for read in self._reads(ValueKind.INPUT))

    def take_buffers(self, other: StepRunner) -> None:
        """Use the present values of another runner's buffers, of which this rank reads the same regions.

        Raises:
            RuntimeFailure: it reads another region.
        """
        theirs = {
            (read.value, read.region): other._state.values[read.slot]
            for read in other._reads(ValueKind.BUFFER)
        }
        for read in self._reads(ValueKind.BUFFER):
            if (read.value, read.region) not in theirs:
                raise RuntimeFailure(
                    f"buffer {read.value}: other parts of it are read at this batch size, must be the same; drop "
                    "a batch that is not full (drop_last=True), or pad it"
                )
            self._state.place(read.slot, theirs[read.value, read.region])

    def parts(self) -> dict[str, list[Held]]:
        """Return the regions of each trained weight that this rank updates, with their values."""
        parts = self.all_parts()
        return {name: parts[name] for name in self._program.updated}

    def gradients(self) -> dict[str, list[Held]]:
        """Return the regions of each trained weight that this rank updates, with their last gradients."""
        return {
            name: [(part.region, self._gradient(part)) for part in self._program.parts[name]]
            for name in self._program.updated
        }

    def _gradient(self, part: WeightPart) -> torch.Tensor:
        state = self._state
        if not part.alone:
            gradient = state.shard_gradients.get(part.number)
            return torch.zeros_like(state.parts[part.number]) if gradient is None else gradient
        slot, within = self._program.held[part.weight]
        gradient = state.gradients.get(slot)
        if gradient is None:
            return torch.zeros_like(state.parts[part.number])
        return Selection(part.region, within, self._device).take(gradient)

    def weights(self) -> dict[str, list[Held]]:
        """Return the regions of each weight that the rank holds between steps, and their values."""
        state = self._state
        return {
            name: [(part.region, state.parts[part.number]) for part in self._program.parts[name]]
            if name in self._program.sharded
            else [(region, self._held[name])]
            for name, (_, region) in self._program.held.items()
        }

    def buffers(self) -> dict[str, list[Held]]:
        """Return the regions of each buffer that the rank reads, with their values."""
        result: dict[str, list[Held]] = {}
        for read in self._reads(ValueKind.BUFFER):
            held = (read.region, self._state.values[read.slot])
            result.setdefault(read.value, []).append(held)
        return result
