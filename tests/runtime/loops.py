"""What the ranks of tests/runtime/test_loops.py do: the loops of a user of DistributedDataParallel, by `parallelize`.

Each loop is written twice: over a trainer, and over the plain module, from which the first must not differ. Results are
numpy arrays and numbers, since they travel between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import runtime
from graph.axes import AxisKind
from graph.errors import RuntimeFailure
from graph.importer import import_module
from graph.importing.outputs import named_tensors
from graph.operators import OperatorGraph
from graph.strategy import Strategy
from graph.zoo import Built
from search.space.baselines import fsdp
from tests.runtime import models
from tests.runtime.strategies import by_kind, groups_of, in_turn, random_strategy

SEED = 5
SIZE = 2
MAX_NORM = 0.5
STRATEGIES: dict[str, Callable[[OperatorGraph], Strategy]] = {
    "data parallel": lambda graph: by_kind(graph, [AxisKind.SAMPLE], [0, 1]),
    "fsdp": lambda graph: fsdp(graph, SIZE),
    "split weights": lambda graph: by_kind(graph, [AxisKind.PARAMETER], [0, 1]),
    "random": lambda graph: random_strategy(graph, SIZE, 4),
    "made again": lambda graph: replace(random_strategy(graph, SIZE, 7), recomputation=groups_of(graph, 3)),
    "one of two ranks": lambda graph: in_turn(graph, [0]),
}
Loop = Callable[[str], dict[str, Any]]


def built(make: Callable[..., Built], **keywords: int) -> Built:
    """Return a module, inputs and keywords from the seed of all loops."""
    torch.manual_seed(SEED)
    return make(**keywords)


def wide_perceptron() -> Built:
    """Return the perceptron in float64."""
    module, args, kwargs = built(models.perceptron)
    return module.double(), tuple(one.double() if one.is_floating_point() else one for one in args), kwargs


@lru_cache(maxsize=8)
def graph_of(make: Callable[[], Built]) -> OperatorGraph:
    return import_module(*make(), name=make.__name__)


def trainer_of(make: Callable[[], Built], strategy: str, **options: Any) -> runtime.Trainer:
    """Return a trainer by stochastic gradient descent with momentum."""
    return runtime.parallelize(
        make()[0], STRATEGIES[strategy](graph_of(make)), *make()[1:], optimizer=sgd, **options
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def portable(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().numpy() for name, tensor in state.items()}


# ---- a divided loss

ACCUMULATED = 3


def perceptron_batches(count: int, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    """Return batches in float64."""
    torch.manual_seed(SEED + 1)
    return [(torch.randn(size, 6, dtype=torch.float64), torch.randint(0, 5, (size,))) for _ in range(count)]


def accumulate(strategy: str) -> dict[str, Any]:
    """Two steps, of which each is the mean of several batches."""
    trainer = trainer_of(wide_perceptron, strategy)
    losses, norms = [], []
    for number, batch in enumerate(perceptron_batches(2 * ACCUMULATED)):
        losses.append(float(trainer.backward(*batch, scale=1 / ACCUMULATED)))
        if (number + 1) % ACCUMULATED == 0:
            norms.append(float(trainer.clip_grad_norm(MAX_NORM)))
            trainer.apply()
    return {"losses": losses, "norms": norms, "state": portable(trainer.state_dict())}


def accumulate_plainly() -> dict[str, Any]:
    module, _, _ = wide_perceptron()
    optimizer = sgd(module.parameters())
    losses, norms = [], []
    for number, batch in enumerate(perceptron_batches(2 * ACCUMULATED)):
        loss = module(*batch)
        (loss / ACCUMULATED).backward()
        losses.append(float(loss.detach()))
        if (number + 1) % ACCUMULATED == 0:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": portable(module.state_dict())}


# ---- a GradScaler


class Halved(nn.Module):
    """Rows whose gradients pass through float16: a large target makes the gradient of its own row overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(6, 4)

    def forward(self, points: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(self.rows(points).half().float(), targets)


def halved() -> Built:
    torch.manual_seed(SEED)
    return Halved(), (torch.randn(8, 6), torch.randn(8, 4)), {}


def halved_batches() -> list[tuple[Tensor, Tensor]]:
    """Return six batches, of which the third overflows in the last row alone."""
    torch.manual_seed(SEED + 2)
    result = [(torch.randn(8, 6), torch.randn(8, 4)) for _ in range(6)]
    result[2][1][:, 3] = 1e4
    return result


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


def scale_losses(strategy: str) -> dict[str, Any]:
    """Six steps by a scaler, every second one clipped; returns whether this rank's gradients were finite, too."""
    trainer = trainer_of(halved, strategy)
    scaler = make_scaler()
    losses, norms, scales, finite = [], [], [], []
    for number, batch in enumerate(halved_batches()):
        if number % 2:
            losses.append(float(trainer.step(*batch, scaler=scaler)))
        else:
            losses.append(float(trainer.backward(*batch, scaler=scaler)))
            gradients = [one.grad for one in trainer.optimizer.param_groups[0]["params"]]
            finite.append(all(bool(one.isfinite().all()) for one in gradients if one is not None))
            scaler.unscale_(trainer.optimizer)
            norms.append(float(trainer.clip_grad_norm(MAX_NORM)))
            trainer.apply(scaler)
        scaler.update()
        scales.append(scaler.get_scale())
    trainer.backward(*halved_batches()[0], scaler=scaler)
    try:
        trainer.apply()
    except RuntimeFailure as error:
        message = str(error)
    return {
        "losses": losses,
        "norms": norms,
        "scales": scales,
        "finite": finite,
        "without the scaler": message,
        "state": portable(trainer.state_dict()),
    }


def scale_losses_plainly() -> dict[str, Any]:
    module, _, _ = halved()
    optimizer, scaler = sgd(module.parameters()), make_scaler()
    losses, norms, scales = [], [], []
    for number, batch in enumerate(halved_batches()):
        optimizer.zero_grad()
        loss = module(*batch)
        losses.append(float(loss.detach()))
        torch.autograd.backward(scaler.scale(loss))
        if number % 2 == 0:
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"losses": losses, "norms": norms, "scales": scales, "state": portable(module.state_dict())}


# ---- a DistributedSampler


class Masked(nn.Module):
    """Two layers, of whose logits a mask for the whole batch forbids some; samples stand along the second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 5)

    def forward(self, columns: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        logits = self.second(torch.tanh(self.first(columns.t())))
        return functional.cross_entropy(logits.masked_fill(mask, -10.0), targets)


MASK = torch.tensor([False, True, False, False, False])


def masked() -> Built:
    torch.manual_seed(SEED)
    inputs = (torch.randn(6, 8).double(), torch.randint(0, 5, (8,)), MASK)
    return Masked().double(), inputs, {}


def masked_loader(rank: int) -> DataLoader[Any]:
    """Return one rank's loader of a data set whose last batch is a whole one."""
    torch.manual_seed(SEED + 3)
    points, targets = torch.randn(32, 6, dtype=torch.float64), torch.randint(0, 5, (32,))
    samples = TensorDataset(points, targets)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, SIZE, rank, shuffle=True, seed=SEED)
    sampler.set_epoch(1)
    return DataLoader(samples, 8 // SIZE, sampler=sampler)


def sample(strategy: str) -> dict[str, Any]:
    """Four steps on batches of which each rank loads its own samples; returns what is refused, too."""
    trainer = trainer_of(masked, strategy, batches="sharded")
    rank = dist.get_rank()
    first = next(iter(masked_loader(rank)))
    columns, targets = first[0].t(), first[1]
    attempts: dict[str, Callable[[], Any]] = {
        "no shards": lambda: trainer.step(*masked()[1]),
        "whole on rank 1": lambda: trainer.step(columns, *masked()[1][1:] if rank else (targets, MASK)),
        "another mask on rank 1": lambda: trainer.step(columns, targets, ~MASK if rank else MASK),
        "fewer on rank 1": lambda: trainer.step(columns[:, rank:], targets[rank:], MASK),
    }
    # Before the first batch and after it: where a batch is compared whole, and where by its checksum.
    messages: dict[tuple[str, int], str] = {}
    losses: list[float] = []
    for batch in masked_loader(rank):
        for name, attempt in attempts.items() if len(losses) < 2 else ():
            try:
                attempt()
            except RuntimeFailure as error:
                messages[name, len(losses)] = str(error)
        losses.append(float(trainer.step(batch[0].t(), batch[1], MASK)))
    return {"losses": losses, "state": portable(trainer.state_dict()), "messages": messages}


def sample_plainly() -> dict[str, Any]:
    module, _, _ = masked()
    optimizer = sgd(module.parameters())
    losses = []
    for shards in zip(*(masked_loader(rank) for rank in range(SIZE)), strict=True):
        points, targets = (torch.cat(parts) for parts in zip(*shards, strict=True))
        optimizer.zero_grad()
        loss = module(points.t(), targets, MASK)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "state": portable(module.state_dict())}


# ---- outputs beside the loss


class Telling(nn.Module):
    """Returns a dict: its loss, what the loss depends on, and metrics that follow from that and from inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 9, bias=False)
        self.third = nn.Linear(9, 5)

    def forward(self, points: Tensor, targets: Tensor) -> dict[str, Any]:
        first = torch.relu(self.first(points))
        hidden = (first, torch.tanh(self.second(first)))
        logits = self.third(hidden[1])
        right = logits.argmax(-1) == targets
        accuracy = right.float().mean()
        loss = functional.cross_entropy(logits.float(), targets).double()
        return {
            "loss": loss,
            "logits": logits,
            "hidden": hidden,
            "detached": logits.detach(),
            "right": right,
            "accuracy": accuracy,
            "targets": targets,
            "above": torch.tensor([0.0, 0.5], dtype=torch.float64) < accuracy,
        }


OUTPUTS = ("loss", "logits", "hidden", "detached", "right", "accuracy", "targets", "above")


def telling() -> Built:
    torch.manual_seed(SEED)
    return Telling().double(), (torch.randn(8, 6).double(), torch.randint(0, 5, (8,))), {}


def telling_batches() -> list[tuple[Tensor, Tensor]]:
    """Return three batches, of which the second is not full."""
    first, (points, targets), last = perceptron_batches(3, 8)
    return [first, (points[:4], targets[:4]), last]


def tell(strategy: str) -> dict[str, Any]:
    """Three steps; returns the outputs of each."""
    in_shards = strategy == "data parallel"
    options = {"batches": "sharded"} if in_shards else {}
    trainer = trainer_of(telling, strategy, outputs=OUTPUTS, **options)
    outputs = []
    for points, targets in telling_batches():
        own = slice(None)
        if in_shards:
            half = len(points) // SIZE
            own = slice(half * dist.get_rank(), half * (dist.get_rank() + 1))
        trainer.step(points[own], targets[own])
        outputs.append(portable(trainer.outputs()))
    return {"outputs": outputs, "state": portable(trainer.state_dict())}


def tell_plainly() -> dict[str, Any]:
    module, _, _ = telling()
    optimizer = sgd(module.parameters())
    outputs = []
    for batch in telling_batches():
        optimizer.zero_grad()
        result = module(*batch)
        result["loss"].backward()
        optimizer.step()
        outputs.append(portable(named_tensors(result)))
    return {"outputs": outputs, "state": portable(module.state_dict())}


# ---- a smaller last batch


def convolutions() -> Built:
    """Return convolutions with a batch norm."""
    return built(models.convolutions, batch_size=6)


def dropped() -> Built:
    return built(models.dropped, batch_size=6)


def cut(make: Callable[[], Built]) -> list[tuple[Tensor, ...]]:
    """Return batches of six samples and of four, which comes first and last, made of the example's."""
    _, inputs, _ = make()
    sizes = (4, 6, 6, 4)
    return [tuple(one.roll(step, 0)[:size].clone() for one in inputs) for step, size in enumerate(sizes)]


def finish(strategy: str, make: Callable[[], Built] = convolutions) -> dict[str, Any]:
    """Two epochs' steps, of which the first and the last have a batch that is not full."""
    sharded = {"batches": "sharded"} if strategy == "data parallel" else {}
    trainer = trainer_of(make, strategy, **sharded)
    losses, norms = [], []
    messages: dict[str, str] = {}
    for inputs in cut(make):
        half = len(inputs[0]) // 2
        own = slice(half * dist.get_rank(), half * dist.get_rank() + half) if sharded else slice(None)
        losses.append(float(trainer.backward(*(one[own] for one in inputs))))
        norms.append(float(trainer.clip_grad_norm(MAX_NORM)))
        trainer.apply()
        fewer = own.start or 0, (own.stop or len(inputs[0])) - 1
        wrong = tuple(one[slice(*fewer)] if dist.get_rank() else one[own] for one in inputs)
        try:
            trainer.backward(*wrong)
        except RuntimeFailure as error:
            messages[str(len(losses))] = str(error)
    if strategy == "fsdp":
        try:
            trainer.backward(*(one[:1] for one in inputs))
        except RuntimeFailure as error:
            messages["one sample"] = str(error)
    return {
        "losses": losses,
        "norms": norms,
        "state": portable(trainer.state_dict()),
        "messages": messages,
    }


def finish_plainly() -> dict[str, Any]:
    module, _, _ = convolutions()
    optimizer = sgd(module.parameters())
    losses, norms = [], []
    for inputs in cut(convolutions):
        optimizer.zero_grad()
        loss = module(*inputs)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "state": portable(module.state_dict())}


def drop(strategy: str) -> dict[str, Any]:
    """The same, with dropout."""
    return finish(strategy, dropped)


# ---- all of them

LOOPS: dict[str, tuple[Loop, tuple[str, ...]]] = {
    "accumulate": (accumulate, ("data parallel", "fsdp", "random")),
    "sample": (sample, ("data parallel", "random")),
    "tell": (tell, ("data parallel", "made again")),
    "finish": (finish, ("data parallel", "fsdp")),
    "drop": (drop, ("data parallel", "one of two ranks")),
    "scale losses": (scale_losses, ("fsdp", "random", "one of two ranks")),
}


def every_loop() -> dict[tuple[str, str], dict[str, Any]]:
    """Return what every loop returns on this rank, by its name and its strategy's."""
    torch.set_num_threads(1)
    with trainer_of(wide_perceptron, "one of two ranks"):
        return {
            (name, strategy): loop(strategy)
            for name, (loop, strategies) in LOOPS.items()
            for strategy in strategies
        }
