"""Memory trace: the peak memory of a training step on a device, by executing the rank's program without its data.

The program is lowered as for a run and executed once on torch's fake tensors, which have shapes and no elements,
autograd and optimizer included; no message is sent. The memory of every tensor counts from its allocation until its
last reference is gone. So saved tensors, releases and the lifetimes of message buffers are not modelled: they happen.

Temporary memory of kernels (packed copies of operands, workspaces of a GPU's libraries) belongs to no tensor and is not
counted, but for copies that grow with the batch and are known (`_COPIES`). The trace takes the CPU's code paths for
every device.

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
from graph.operators import ValueKind
from graph.plan import Plan
from graph.training import Training
from profiler.operators.counter_rng import forget_positions
from profiler.operators.dtypes import HALVES
from profiler.process_groups import Message
from runtime.communication import DoneWork, World
from runtime.execution.executor import Executor, InitialTensors
from runtime.instructions.base import Communication, Instruction, WrappedInstruction
from runtime.instructions.compute import Differentiate, DifferentiateWeights, Seed
from runtime.instructions.gradient_synchronization import FillBucket
from runtime.instructions.sharded_weights import AllocateWeights, Reshard
from runtime.instructions.state import StepState

PARTS = ("weights", "optimizer", "inputs", "activations", "gradients", "communication", "update")
"""The parts of a step's memory.

weights: those that the rank holds, and copies of them in other shapes. optimizer: its state. inputs: inputs and
buffers. activations: tensors of the forward, saved ones included. gradients: tensors of the backward, of activations
and of weights, with its temporaries. communication: packed, sent and received tensors, and flat gradient buckets.
update: the optimizer's temporaries.
"""

# Allocators give whole multiples of it: torch's on CUDA, c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize).
_BLOCK_BYTES = {"cuda": 512}
_DEVICE = torch.device("cpu")
# oneDNN's blocks with AVX-512; padding to whole ones is not counted.
_BLOCK_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class PredictedPeak:
    """The predicted peak memory of a step on one device, in bytes, and its `parts` at that moment, by `PARTS`."""

    peak_bytes: int
    parts: tuple[tuple[str, int], ...]


UNUSED = PredictedPeak(0, tuple((part, 0) for part in PARTS))
"""The peak of a device without tasks."""


def trace_memory(plan: Plan, training: Training, rank: int, processor: str = "cpu") -> PredictedPeak:
    """Return the peak memory of a step on the device `rank` of a plan.

    Args:
        plan: to execute.
        training: its optimizer updates the weights.
        rank: the device.
        processor: "cpu" or "cuda", for the size of an allocator's blocks.

    Raises:
        RuntimeFailure: an operator needs data, so that it cannot be executed without.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    ledger = _Ledger(_BLOCK_BYTES.get(processor, 1), _COPIES if processor == "cpu" else {})
    forget_positions()
    try:
        # Without fallbacks: they would run the real kernel on zeros of the real size.
        with FakeTensorMode(allow_fallback_kernels=False):
            tensors = _initial_tensors(plan)
            # What is compiled counts as its parts do: torch.compile does not work without data.
            with ledger, torch.compiler.set_stance("force_eager"):
                world = SilentWorld(plan.strategy.device_count, rank)
                executor = Executor(plan, world, tensors, training, seed=0, learning_rate=0.0, device=_DEVICE)
                del tensors
                _name_parts(executor, ledger)
                return _trace(executor, world, ledger)
    except RuntimeError as error:
        # torch raises several classes for tensors without data; networks of users may have any operator.
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise RuntimeFailure(
            f"memory of device {rank}: cannot be found without data ({reason}), must follow from shapes; take the "
            "simulator's sum"
        ) from error
    finally:
        # Cached positions of random numbers have no elements here either.
        forget_positions()


def _initial_tensors(plan: Plan) -> InitialTensors:
    def made(kind: ValueKind) -> dict[str, torch.Tensor]:
        return {
            value.name: torch.empty(value.spec.shape, dtype=getattr(torch, value.spec.dtype))
            for value in plan.graph.values
            if value.kind is kind
        }

    first, *further = (made(ValueKind.INPUT) for _ in range(plan.strategy.micro_batches.count))
    return InitialTensors(made(ValueKind.WEIGHT), made(ValueKind.BUFFER), first, tuple(further))


def _name_parts(executor: Executor, ledger: _Ledger) -> None:
    """Assign the tensors before the first step to their parts."""
    ledger.remeasure()
    ledger.rename("inputs", None)
    ledger.rename("weights", executor.weight_tensors)
    ledger.rename("optimizer", executor.optimizer_tensors)
    fills = [fill for fill in executor.program.instructions if isinstance(fill, FillBucket)]
    flats = [fill.bucket.flat for fill in fills]
    ledger.rename("communication", flats)


def _trace(executor: Executor, world: World, ledger: _Ledger) -> PredictedPeak:
    labelled = tuple(
        _Labelled(instruction, _part_of(instruction), ledger) for instruction in executor.program.instructions
    )
    ledger.begin()
    # A step begins with copies of parts of weights.
    ledger.part = "weights"
    with executor.running(labelled, world):
        executor.differentiate(0)
    ledger.part = "update"
    executor.update()
    return ledger.at_peak()


def _part_of(instruction: Instruction) -> str:
    """Return the part that an instruction's tensors belong to."""
    if isinstance(instruction, Communication):
        return "communication"
    return (
        "gradients" if isinstance(instruction, Differentiate | DifferentiateWeights | Seed) else "activations"
    )


@dataclass(frozen=True, slots=True)
class _Labelled(WrappedInstruction):
    """An instruction whose tensors belong to one part."""

    part: str
    ledger: _Ledger

    def run(self, state: StepState) -> None:
        self.ledger.part = self.part
        self.inner.run(state)
        if isinstance(self.inner, AllocateWeights | Reshard):
            self.ledger.remeasure()


def _statistics(values: torch.Tensor, *_running: object) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.float32 if values.dtype in HALVES else values.dtype
    return values.new_empty(values.shape[1], dtype=kind), values.new_empty(values.shape[1], dtype=kind)


# Operators that torch cannot execute without data, though the shapes are known.
_SHAPES: dict[Any, Callable[..., tuple[torch.Tensor, ...]]] = {
    torch.ops.aten.batch_norm_update_stats.default: _statistics
}


def _gradient_of_attention(_result: object, gradient: torch.Tensor, *_others: object) -> torch.Tensor:
    # aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: heads inside of positions, without gaps.
    return gradient.transpose(1, 2).contiguous()


def _mask_of_dropout(
    _result: object, gradient: torch.Tensor, mask: torch.Tensor, *_scale: object
) -> torch.Tensor:
    # Operands of different dtypes are converted whole on a CPU.
    return mask.to(gradient.dtype)


def _blocks_of_convolution(
    result: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> torch.Tensor | None:
    if not _is_blocked(values, weight, bias, how):
        return None
    # Operands in blocks, with the result in blocks or the plain one; then both results.
    operands = _elements_in_blocks(values) + weight.numel()
    return values.new_empty(max(operands, _elements_in_blocks(result)))


def _blocks_of_convolution_backward(
    _result: object,
    gradient: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    _bias_sizes: object,
    *how: Any,
) -> torch.Tensor | None:
    if not _is_blocked(values, weight, None, how[:-1]):
        return None
    # For the weight's gradient, which is itself in blocks before it is plain.
    return values.new_empty(_elements_in_blocks(gradient) + _elements_in_blocks(values))


def _elements_in_blocks(tensor: torch.Tensor) -> int:
    """Return the elements that are copied of a tensor; what is of few channels has layouts of many kinds, or is not."""
    return tensor.numel() if tensor.shape[1] >= _BLOCK_CHANNELS else 0


def _is_blocked(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: tuple[Any, ...]
) -> bool:
    """Return whether oneDNN convolves, and not in the layout of its operands: it takes blocks of channels.

    Source: what torch 2.13 allocates within a convolution on a CPU, by its profiler; channels-last stays as it is.
    """
    backend: Any = torch._C._select_conv_backend(values, weight, bias, *how, None)
    return bool(backend.name == "Mkldnn" and values.is_contiguous())


# Copies of operands that kernels of the CPU make in torch's memory, where the layout is not theirs; None: no copy. Of
# the operator's result and arguments.
_COPIES: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.ops.aten.convolution.default: _blocks_of_convolution,
    torch.ops.aten.convolution_backward.default: _blocks_of_convolution_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _gradient_of_attention,
    torch.ops.aten.native_dropout_backward.default: _mask_of_dropout,
}


def _sums_gradients() -> bool:
    """Return whether autograd's engine itself calls, to accumulate the gradients that reach a node.

    It does so in place, unless the first gradient is a view; never for subclasses of Tensor, such as fake tensors.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in _OF_DISPATCH:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


# Frames between the engine and the ledger.
_OF_DISPATCH = frozenset({"__torch_dispatch__", "_fn", "inner"})


class _Ledger(TorchDispatchMode):
    """Counts the bytes of every storage that an operator returns, from its allocation until it is freed, by parts."""

    def __init__(self, block_bytes: int, copies: Mapping[Any, Callable[..., torch.Tensor | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = "inputs"
        self._block_bytes = block_bytes
        self._copies = copies
        # By address: a reference whose callback notes that the storage is freed, its bytes, and its part.
        self._alive: dict[int, tuple[Any, int, str]] = {}
        self._changes: list[tuple[str, int]] = []
        # How many of them are of storages from before `begin`.
        self._first = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Execute an operator, and note the storages that it returns."""
        if func is torch.ops.aten.add.Tensor and not args[0]._is_view() and _sums_gradients():
            return args[0]
        shapes = _SHAPES.get(func)
        result = func(*args, **(kwargs or {})) if shapes is None else shapes(*args)
        if isinstance(result, torch.Tensor):
            self._note(result)
        elif isinstance(result, tuple | list):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._note(item)
        if func in self._copies:
            # Beside the results, and freed with this call; a tensor of that layout is not copied.
            copies = self._copies[func](result, *args)
            if copies is not None:
                self._note(copies)
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
        """Assign the storages of some tensors, or all storages alive, to another part."""
        addresses = None if tensors is None else {tensor.untyped_storage()._cdata for tensor in tensors}
        for address, (reference, size, _) in list(self._alive.items()):
            if addresses is None or address in addresses:
                self._alive[address] = (reference, size, part)

    def remeasure(self) -> None:
        """Note the changed sizes of storages, which are resized without an operator."""
        for address, (reference, before, part) in list(self._alive.items()):
            storage = reference()
            size = before if storage is None else self._rounded(storage.nbytes())
            if size != before:
                self._alive[address] = (reference, size, part)
                self._changes.append((part, size - before))

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self._block_bytes) * self._block_bytes

    def begin(self) -> None:
        """Forget the history of the storages alive."""
        self._changes = [(part, size) for _, size, part in self._alive.values()]
        self._first = len(self._changes)

    def at_peak(self) -> PredictedPeak:
        """Return the peak since `begin`."""
        totals = list(accumulate(size for _, size in self._changes))
        first = max(self._first - 1, 0)
        peak = max(range(first, len(totals)), key=totals.__getitem__, default=-1)
        parts = dict.fromkeys(PARTS, 0)
        for part, size in self._changes[: peak + 1]:
            parts[part] += size
        return PredictedPeak(totals[peak] if totals else 0, tuple(parts.items()))


class SilentWorld(World):
    """A world in which this process is any one rank, and no message is sent.

    Nothing is allocated beside: of gloo's collectives those are not used that would (`World.all_gather_in_place`,
    `World.reduce_scatter_in_place`).
    """

    takes_time = False

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank
        self._ranks = tuple(range(size))
        self._all_reduces = {}

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        """Start nothing."""
        return [DoneWork() for _ in sends], [DoneWork() for _ in receives]

    def _start(self, operation: Any, ranks: tuple[int, ...], *arguments: Any) -> Any:  # noqa: ARG002 - nothing is sent
        return DoneWork()
