"""The inputs of measured calls, as cold as in a training step.

Between two executions of an operator a training step touches all its other tensors, so its inputs have left the caches.
A loop over one call would find them there. Measurements therefore rotate over so many copies of the inputs that
together they exceed the largest cache, up to `MOST_SETS`; a call that moves little is then at least out of a core's own
caches. Results are held for as many executions, so that the allocator does not return a block that is still cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from graph.calls import LocalCall
from graph.operators import TensorSpec
from profiler.devices import PhysicalDevice
from profiler.processors import processor_facts
from profiler.updates import UpdateState, apply_update, is_update, update_optimizer

if TYPE_CHECKING:
    import torch

MOST_SETS = 16
# Random values are drawn for so many elements and repeated: drawing 10^8 takes longer than most operators.
DRAWN_ELEMENTS = 2**16
LEARNING_RATE = 1e-3
# Of queries, keys, values and results with heads: [..., heads, rows, elements].
ATTENTIONS = frozenset({"soapstone.attention", "aten.scaled_dot_product_attention.default"})
HEADED_DIMS = 4


@dataclass(slots=True)
class ForwardPass:
    """One forward execution: its inputs and outputs, and the gradients for its backward."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class InputSet:
    """Inputs of a call, and random gradients for those of its outputs that are differentiated."""

    inputs: list[torch.Tensor]
    gradients: list[torch.Tensor]

    def copy(self) -> InputSet:
        """Return a copy in memory of its own, with the same inputs asking for gradients."""
        return InputSet(
            [value.detach().clone().requires_grad_(value.requires_grad) for value in self.inputs],
            [value.clone() for value in self.gradients],
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(storage_sizes([*self.inputs, *self.gradients]).values())


class CallInputs:
    """A local call on one device with its rotating input sets."""

    def __init__(self, call: LocalCall, device: PhysicalDevice, seed: int) -> None:
        self.call, self.device = call, device
        self._execute = _executor(call, device)
        inputs = _inputs(call, device, seed)
        # Query, key and value; a mask has no heads of its own.
        self._sets = [InputSet([*map(self._laid_out, inputs[:3]), *inputs[3:]], [])]
        self._next = 0
        self._seed = seed
        self._held: deque[list[torch.Tensor]] = deque(maxlen=0)

    def forward(self) -> ForwardPass:
        """Execute the call on the next input set, recorded by autograd."""
        chosen = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        return ForwardPass(chosen.inputs, self._execute(chosen.inputs), chosen.gradients)

    def backward(self, done: ForwardPass) -> list[torch.Tensor | None]:
        """Return the gradients of those inputs that need one; a pass can be differentiated once."""
        import torch

        return list(
            torch.autograd.grad(
                differentiated(done.outputs),
                [value for value in done.inputs if value.requires_grad],
                done.gradients,
                allow_unused=True,
            )
        )

    def draw_gradients(self, done: ForwardPass) -> None:
        """Give the pass, and the sets from now on, random gradients of its outputs."""
        drawn = [
            self._laid_out(random_tensor(_spec(value), self.device, self._seed))
            for value in differentiated(done.outputs)
        ]
        done.gradients = drawn
        self._sets = [InputSet(entry.inputs, drawn) for entry in self._sets]

    def _laid_out(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it lies in memory in a step: heads of an attention are split off rows, not before them."""
        if self.call.target not in ATTENTIONS or value.dim() < HEADED_DIMS:
            return value
        rows_first = value.detach().transpose(-3, -2).contiguous().transpose(-3, -2)
        return rows_first.requires_grad_(value.requires_grad)

    def rotate(self, made_bytes: Sequence[int] = ()) -> None:
        """Copy the input set until the copies exceed the device's largest cache.

        `made_bytes`: of each block of memory that an execution allocates and that is held; as many are touched.
        """
        import torch

        first = self._sets[0]
        wanted = 1 + ceil(cache_bytes(self.device) / max(1, first.size_bytes))
        self._sets = [first, *(first.copy() for _ in range(min(wanted, MOST_SETS) - 1))]
        self._held = deque(maxlen=len(self._sets) - 1)
        for _ in self._sets[1:]:
            # Not `zeros`, which leaves fresh memory untouched, since it is zero already.
            self.hold(
                torch.empty(size, dtype=torch.uint8, device=self.device.torch_name).zero_()
                for size in made_bytes
            )

    def stay(self) -> None:
        """Use one input set from now on, which stays in the caches if it fits, and hold no results."""
        self._sets, self._next = self._sets[:1], 0
        self._held = deque(maxlen=0)

    @property
    def sets(self) -> int:
        """How many executions have inputs of their own."""
        return len(self._sets)

    def hold(self, results: Iterable[torch.Tensor | None]) -> None:
        """Keep the memory of an execution's results from the allocator until the input sets come round."""
        self._held.append([value.detach() for value in results if value is not None])


def differentiated(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs that a backward can start from."""
    return [value for value in outputs if value.requires_grad]


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the distinct memory blocks behind `tensors`, by address."""
    blocks = [value.untyped_storage() for value in tensors]
    return {block.data_ptr(): block.nbytes() for block in blocks if block.nbytes()}


def _spec(value: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def cache_bytes(device: PhysicalDevice) -> int:
    """Return the size of the largest cache that the device reads through."""
    if device.processor == "cpu":
        return processor_facts().cache_bytes
    import torch

    return int(getattr(torch.cuda.get_device_properties(device.index), "L2_cache_size", 0)) or 64 * 2**20


def random_tensor(spec: TensorSpec, device: PhysicalDevice, seed: int) -> torch.Tensor:
    """Return a floating-point tensor of random values in [0, 1), the same for the same seed."""
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator, name = torch.Generator(device=device.torch_name).manual_seed(seed), device.torch_name
    drawn = torch.rand(min(spec.elements, DRAWN_ELEMENTS), generator=generator, device=name).to(dtype)
    if spec.elements > DRAWN_ELEMENTS:
        drawn = drawn.repeat(ceil(spec.elements / DRAWN_ELEMENTS))[: spec.elements]
    return drawn.reshape(spec.shape).contiguous()


def _executor(
    call: LocalCall, device: PhysicalDevice
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    if is_update(call):
        return _update_executor(update_optimizer(call))
    import torch

    from profiler.operators import ExecutionContext, compile_call

    execute, context = compile_call(call), ExecutionContext(device=torch.device(device.torch_name))
    return lambda inputs: list(execute(list(inputs), context))


def _update_executor(optimizer: str) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    # One state for all input sets, since only its step count is kept from one execution to the next.
    state = UpdateState(0, ())

    def update(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weight, gradient, *slots = inputs
        state.slots = tuple([slot] for slot in slots)
        apply_update(optimizer, [weight], [gradient], state, LEARNING_RATE)
        return []

    return update


def _inputs(call: LocalCall, device: PhysicalDevice, seed: int) -> list[torch.Tensor]:
    if is_update(call):
        return [random_tensor(spec, device, seed + index) for index, spec in enumerate(call.inputs)]
    from profiler.operators import random_inputs

    return list(random_inputs(call, device.torch_name, seed))
