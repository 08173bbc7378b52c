"""The memory that a training step takes on each device, found by walking the rank's own program without its data.

A rank's program is compiled as it is for a run and executed once on tensors that have shapes and no elements (torch's
fake tensors), autograd and optimizer included; nothing is sent, and no peer answers. Counted is the memory of every
tensor, from when it is made until its last reference is gone. So what autograd keeps for the backward, what the
runtime releases when, how long a message's buffer lives, are not modelled: they happen.

What the kernels of a backend take for themselves while they run (packed copies of operands, workspaces of a GPU's
libraries) belongs to no tensor and is not counted, but for what grows with the batch and is known (`_COPIES`). The
walk takes the CPU's code paths for every device.

Source: torch.distributed's memory tracker follows storages in the same way.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graph.errors import RuntimeFailure
from graph.operators import OperatorGraph, ValueKind
from graph.plan import Plan
from graph.training import Training
from profiler.operators.counter_rng import forget_positions
from profiler.operators.dtypes import HALVES
from runtime.communication import Message, World
from runtime.execution.executor import Executor, InitialTensors
from runtime.instructions import base as steps
from runtime.instructions.collectives import StartCollective, StartGradientCollective
from runtime.instructions.gradient_synchronization import FinishReduction, StartReduction
from runtime.instructions.sharded_weights import (
    Allocate,
    FinishGather,
    FinishSharedSum,
    Free,
    StartGather,
    StartSharedSum,
)
from runtime.instructions.state import StepState

PARTS = ("weights", "optimizer", "inputs", "activations", "gradients", "communication", "update")
"""What memory is taken by.

weights: those that the rank holds, and copies of them in other shapes. optimizer: its state. inputs: inputs and
buffers. activations: what the forward makes, also to be kept for the backward. gradients: what the backward makes, of
activations and of weights, with its temporaries. communication: what is packed, sent and received, and the flat tensors
in which gradients are summed. update: the optimizer's temporaries.
"""

# Allocators give whole multiples of it: torch's on CUDA, c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize).
_BLOCK_BYTES = {"cuda": 512}
_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PredictedPeak:
    """The memory of one device at the moment of a step at which most is taken; `parts` are bytes by `PARTS`."""

    peak_bytes: int
    parts: tuple[tuple[str, int], ...]


UNUSED = PredictedPeak(0, tuple((part, 0) for part in PARTS))
"""That of a device which has nothing to do."""


def trace_memory(plan: Plan, training: Training, rank: int, processor: str = "cpu") -> PredictedPeak:
    """Return the memory that a step takes on the device `rank` of a plan.

    Args:
        plan: what to execute.
        training: its optimizer updates the weights.
        rank: the device.
        processor: "cpu" or "cuda", for the size of an allocator's blocks.

    Raises:
        RuntimeFailure: an operator needs data, so that it cannot be walked without.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    ledger = _Ledger(_BLOCK_BYTES.get(processor, 1), _COPIES if processor == "cpu" else {})
    forget_positions()
    try:
        # Without fallbacks: they would run the real kernel on zeros of the real size.
        with FakeTensorMode(allow_fallback_kernels=False):
            tensors = _initial_tensors(plan.graph)
            with ledger:
                world = SilentWorld(plan.strategy.device_count, rank, processor)
                executor = Executor(plan, world, tensors, training, seed=0, learning_rate=0.0, device=_DEVICE)
                del tensors
                _name_parts(executor, ledger)
                return _walk(executor, world, ledger)
    except RuntimeError as error:
        # What torch raises of tensors without data, in several classes; networks of users hold any operator.
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise RuntimeFailure(
            f"memory of device {rank}: cannot be found without data ({reason}), must follow from shapes; take the "
            "simulator's sum"
        ) from error
    finally:
        # What was drawn in here has no elements either.
        forget_positions()


def _initial_tensors(graph: OperatorGraph) -> InitialTensors:
    def made(kind: ValueKind) -> dict[str, torch.Tensor]:
        return {
            value.name: torch.empty(value.spec.shape, dtype=getattr(torch, value.spec.dtype))
            for value in graph.values
            if value.kind is kind
        }

    return InitialTensors(made(ValueKind.WEIGHT), made(ValueKind.BUFFER), made(ValueKind.INPUT))


def _name_parts(executor: Executor, ledger: _Ledger) -> None:
    """Tell the ledger what is there before the first step."""
    ledger.remeasure()
    ledger.rename("inputs", None)
    ledger.rename("weights", executor.weight_tensors)
    ledger.rename("optimizer", executor.optimizer_tensors)
    flats = [one.reduction.flat for one in executor.program.instructions if isinstance(one, StartReduction)]
    ledger.rename("communication", flats)


def _walk(executor: Executor, world: World, ledger: _Ledger) -> PredictedPeak:
    labelled = tuple(_Labelled(one, _part_of(one), ledger) for one in executor.program.instructions)
    ledger.begin()
    # First of all, copies of parts of weights are made.
    ledger.part = "weights"
    with executor.running(labelled, world):
        executor.differentiate(0)
    ledger.part = "update"
    executor.update()
    return ledger.at_peak()


_COMMUNICATION = (
    steps.Exchange,
    steps.Receive,
    steps.SendGradients,
    steps.ReceiveGradients,
    StartCollective,
    StartGradientCollective,
    StartReduction,
    FinishReduction,
    StartSharedSum,
    FinishSharedSum,
    StartGather,
    FinishGather,
)


def _part_of(instruction: steps.Instruction) -> str:
    """Return what the tensors that an instruction makes belong to."""
    if isinstance(instruction, _COMMUNICATION):
        return "communication"
    return "gradients" if isinstance(instruction, steps.Differentiate | steps.Seed) else "activations"


@dataclass(frozen=True, slots=True)
class _Labelled:
    """An instruction of which the ledger knows what its tensors belong to."""

    inner: steps.Instruction
    part: str
    ledger: _Ledger

    @property
    def touches(self) -> steps.Slots:
        """Those of the instruction."""
        return self.inner.touches

    def run(self, state: StepState) -> None:
        """Run the instruction."""
        self.ledger.part = self.part
        self.inner.run(state)
        if isinstance(self.inner, Allocate | Free):
            self.ledger.remeasure()


def _statistics(values: torch.Tensor, *_running: object) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.float32 if values.dtype in HALVES else values.dtype
    return values.new_empty(values.shape[1], dtype=kind), values.new_empty(values.shape[1], dtype=kind)


# What torch cannot do without data, though the shapes are known.
_SHAPES: dict[Any, Callable[..., tuple[torch.Tensor, ...]]] = {
    torch.ops.aten.batch_norm_update_stats.default: _statistics
}


def _gradient_of_attention(gradient: torch.Tensor, *_others: object) -> torch.Tensor:
    # aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: heads inside of positions, without gaps.
    return gradient.transpose(1, 2).contiguous()


def _mask_of_dropout(gradient: torch.Tensor, mask: torch.Tensor, *_scale: object) -> torch.Tensor:
    # Operands of different dtypes are converted whole on a CPU.
    return mask.to(gradient.dtype)


# What kernels of the CPU copy for themselves, in torch's memory, where it is not as they want it.
_COPIES: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _gradient_of_attention,
    torch.ops.aten.native_dropout_backward.default: _mask_of_dropout,
}


def _sums_gradients() -> bool:
    """Return whether autograd's engine itself calls, to add up what comes to a node from several others.

    It does so in place, unless the first one is a view; of tensors of a class of their own, such as those without data,
    never.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in _OF_DISPATCH:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


# Frames between the engine and the ledger.
_OF_DISPATCH = frozenset({"__torch_dispatch__", "_fn", "inner"})


class _Ledger(TorchDispatchMode):
    """Counts the bytes of every storage that calls return until it is gone, by parts."""

    def __init__(self, block_bytes: int, copies: Mapping[Any, Callable[..., torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = "inputs"
        self._block_bytes = block_bytes
        self._copies = copies
        # By address: a reference that tells when the storage is gone, its bytes, and its part.
        self._alive: dict[int, tuple[Any, int, str]] = {}
        self._changes: list[tuple[str, int]] = []
        # So many of them are what was there at the beginning.
        self._first = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the call, and note the storages that it returns."""
        if func is torch.ops.aten.add.Tensor and not args[0]._is_view() and _sums_gradients():
            return args[0]
        shapes = _SHAPES.get(func)
        result = func(*args, **(kwargs or {})) if shapes is None else shapes(*args)
        if isinstance(result, torch.Tensor):
            self._note(result)
        elif isinstance(result, tuple | list):
            for one in result:
                if isinstance(one, torch.Tensor):
                    self._note(one)
        if func in self._copies:
            # Beside the results, and gone with this call; a tensor that is laid out so already is there already.
            self._note(self._copies[func](*args))
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        size = self._rounded(storage.nbytes())

        def gone(_reference: object) -> None:
            _, size, part = self._alive.pop(address)
            self._changes.append((part, -size))

        self._alive[address] = (weakref.ref(storage, gone), size, self.part)
        self._changes.append((self.part, size))

    def rename(self, part: str, tensors: Sequence[torch.Tensor] | None) -> None:
        """Count the storages of some tensors, or all that are there, to another part."""
        given = None if tensors is None else {one.untyped_storage()._cdata for one in tensors}
        for address, (reference, size, _) in list(self._alive.items()):
            if given is None or address in given:
                self._alive[address] = (reference, size, part)

    def remeasure(self) -> None:
        """Note what storages have been given or have lost, as no call does it."""
        for address, (reference, before, part) in list(self._alive.items()):
            storage = reference()
            size = before if storage is None else self._rounded(storage.nbytes())
            if size != before:
                self._alive[address] = (reference, size, part)
                self._changes.append((part, size - before))

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    def begin(self) -> None:
        """Forget how what is there came to be."""
        self._changes = [(part, size) for _, size, part in self._alive.values()]
        self._first = len(self._changes)

    def at_peak(self) -> PredictedPeak:
        """Return what was there when most was there, since `begin`."""
        totals = list(accumulate(size for _, size in self._changes))
        first = max(self._first - 1, 0)
        place = max(range(first, len(totals)), key=totals.__getitem__, default=-1)
        parts = dict.fromkeys(PARTS, 0)
        for part, size in self._changes[: place + 1]:
            parts[part] += size
        return PredictedPeak(totals[place] if totals else 0, tuple(parts.items()))


class _Done:
    """The work of a message that nobody sends."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(slots=True)
class _Gathered:
    """The work of an all-gather: until it is done, there is what the library gathers in."""

    own: torch.Tensor | None

    def wait(self) -> None:
        """Drop it."""
        self.own = None


class SilentWorld(World):
    """A world of which this process is any one rank, and in which nothing is sent.

    Gloo, between CPUs, gathers in memory of torch's that it takes for itself, as much as the result: it is taken here,
    too. Its reduce-scatter would do the like, but is not used (`World.sum_in_shares`).
    """

    def __init__(self, size: int, rank: int, processor: str = "cpu") -> None:
        self.size = size
        self.rank = rank
        self._ranks = tuple(range(size))
        self._gloo = processor == "cpu"

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        """Start nothing."""
        return [_Done() for _ in sends], [_Done() for _ in receives]

    def all_gather(self, result: torch.Tensor, part: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start nothing, but have the memory of the result twice until it is waited for."""
        if not self._gloo:
            return super().all_gather(result, part, ranks)
        return _Gathered(torch.empty_like(result))

    def _collect(self, operation: Any, ranks: tuple[int, ...], *arguments: Any) -> Any:  # noqa: ARG002 - nothing is sent
        return _Done()
