"""A pair of linear layers, columns then rows, on two processes: our runtime against DTensor's `parallelize_module`.

Both sides do the same step of stochastic gradient descent: the first layer split by outputs, the second by inputs, one
all-reduce of its partial sums forward, none backward (the input needs no gradient), and an update of every rank's own
parts. Layers and inputs are equal, and so must be the losses of the first steps.

Source: Megatron-LM (arXiv:1909.08053) section 3.
"""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.pairs import TIMEOUT_S, StepPair, time_pair

if TYPE_CHECKING:
    import torch
    from torch import nn

PROCESSES = 2
LEARNING_RATE = 1e-2
WIDTHS = (1024, 4096, 1024)
BATCH_SIZES = (64, 256)
# Of the two sides' losses, in float32.
ALLOWED = 1e-4
COMPARED_STEPS = 3


def measure(*, quick: bool) -> dict[str, Any]:
    """Time both sides in turn, for each batch size (`quick`: the smaller one alone, in fewer turns).

    Returns `ratio`, the median over all turns of all batch sizes of ours / theirs, and `batch_sizes`: for each, its own
    `ratio` and the fastest step of each side, `ours_s` and `theirs_s`.

    Raises:
        RuntimeError: a process failed, or the two sides' losses differ.
    """
    blocks, steps = (3, 3) if quick else (15, 5)
    ratios: list[float] = []
    by_size: dict[int, dict[str, float]] = {}
    for batch_size in BATCH_SIZES[:1] if quick else BATCH_SIZES:
        timing = time_pair(
            column_row_pair, PROCESSES, blocks=blocks, steps=steps, warmup=3, batch_size=batch_size
        )
        ratios.extend(ours / theirs for ours, theirs in zip(timing.ours_s, timing.theirs_s, strict=True))
        by_size[batch_size] = {
            "ratio": timing.ratio,
            "ours_s": min(timing.ours_s),
            "theirs_s": min(timing.theirs_s),
        }
    return {"ratio": statistics.median(ratios), "batch_sizes": by_size}


def column_row_pair(device: str, batch_size: int) -> StepPair:
    """Prepare the pair of layers on all processes, by us and by DTensor; `time_pair` calls it in each.

    Raises:
        RuntimeError: the losses of the first steps differ.
    """
    import torch

    ours = _OurSide(device, batch_size)
    theirs = _TheirSide(device, batch_size)
    for number in range(COMPARED_STEPS):
        ours.step()
        theirs.step()
        loss, expected = ours.loss(), theirs.loss()
        if not torch.isclose(torch.tensor(loss), torch.tensor(expected), rtol=ALLOWED):
            raise RuntimeError(f"step {number}: our loss is {loss}, must be DTensor's, {expected}")
    return StepPair(ours.step, theirs.step)


def layers_and_input(batch_size: int) -> tuple[nn.Module, tuple[torch.Tensor], dict[str, Any]]:
    """Return both layers with their loss, the mean square of their output, and an input, equal on every process."""
    import torch
    from torch import Tensor, nn

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTHS[0], WIDTHS[1])
            self.second = nn.Linear(WIDTHS[1], WIDTHS[2])

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x))
            return result.square().mean()

    torch.manual_seed(0)
    module = Layers()
    return module, (torch.randn(batch_size, WIDTHS[0]),), {}


class _OurSide:
    """The pair under our runtime."""

    def __init__(self, device: str, batch_size: int) -> None:
        import torch

        from graph.importer import import_module
        from graph.plan import build_plan
        from graph.training import Training
        from runtime.communication import World, make_groups
        from runtime.execution.executor import Executor
        from runtime.jobs.models import tensors_of
        from search.space.baselines import megatron

        built = layers_and_input(batch_size)
        graph = import_module(*built, name="column row pair")
        plan = build_plan(graph, megatron(graph, PROCESSES), (0,) * PROCESSES)
        make_groups(plan.device_groups, TIMEOUT_S)
        self._executor = Executor(
            plan,
            World(PROCESSES),
            tensors_of(graph, built),
            Training(batch_size=batch_size),
            seed=0,
            learning_rate=LEARNING_RATE,
            device=torch.device(device),
        )
        self._numbers = itertools.count()

    def step(self) -> None:
        """Do one training step."""
        self._executor.step(next(self._numbers))

    def loss(self) -> float:
        """Return the last step's loss."""
        return self._executor.loss()


class _TheirSide:
    """The pair under `parallelize_module`."""

    def __init__(self, device: str, batch_size: int) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        module, (self._input,), _ = layers_and_input(batch_size)
        mesh = init_device_mesh(device, (PROCESSES,))
        self._module = parallelize_module(
            module.to(device), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()}
        )
        self._input = self._input.to(device)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=LEARNING_RATE)
        self._loss = torch.zeros(())

    def step(self) -> None:
        """Do one training step."""
        self._optimizer.zero_grad()
        loss = self._module(self._input)
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()

    def loss(self) -> float:
        """Return the last step's loss."""
        return float(self._loss)
