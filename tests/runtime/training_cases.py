"""What the ranks of tests/runtime/test_training.py do: train by `runtime.parallelize`, and tell what came of it.

Every case is executed by all ranks; results are numpy arrays and texts, since they travel between processes.
"""

from __future__ import annotations

import importlib
import io
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import runtime
from graph.axes import AxisKind
from graph.errors import RuntimeFailure, SoapstoneError
from graph.plan import build_plan
from graph.strategy import Sharding
from graph.stretches import stretches
from search.space.baselines import shared
from tests.runtime.oracle import graph_of, reference
from tests.runtime.strategies import by_kind, in_turn, random_groups, random_strategy, randomly_shared

SEED = 5
STEPS = 4
MAX_NORM = 0.5


@dataclass(frozen=True)
class Case:
    """A module, an optimizer, the seed of a random strategy over so many devices, and how the steps are done.

    way: "plain"; "resumed" (after half of the steps under another strategy); "accumulated" (two batches a step);
        "disturbed" (before half of the steps, batches that the last rank alone has, or that do not fit there).
    sharing: of a split batch in place of the random strategy, what of the weights is shared; None: of the random
        strategy, at random. made_again: random groups of operators are made again in the backward.
    compiled: all of its stretches are.
    """

    model: str
    optimizer: str
    strategy: int
    devices: int
    way: str = "plain"
    sharing: Sharding | None = Sharding.NONE
    made_again: bool = False
    compiled: bool = False


def make_optimizer(kind: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer; with two parameter groups for AdamW, formed by the number of dims."""
    if kind == "momentum":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def schedule(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    """Return the learning-rate schedule that goes with the optimizer, if one does."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if kind == "adamw" else None


def batches(case: Case) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Yield, for each step, its batches: new ones each time, the same in every process."""
    for step in range(STEPS):
        count = 2 if case.way == "accumulated" else 1
        yield [reference(case.model).build(100 + 10 * step + index)[1:] for index in range(count)]


_imports: dict[str, Any] = {}


@contextmanager
def imported_once(model: str) -> Iterator[None]:
    """Let `parallelize` take the graph of a reference network that it has imported in this process before.

    An import takes most of a case, and every rank of a user's script does it once.
    """
    importing = importlib.import_module("runtime.training.parallelize")
    imported = importing.imported

    def remembered(*arguments: Any) -> Any:
        if model not in _imports:
            _imports[model] = imported(*arguments)
        return _imports[model]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "imported", remembered)
        yield


def train(case: Case) -> dict[str, Any]:
    """Train by `runtime.parallelize`; return losses, norms, the state dict, the optimizer's state."""
    module, args, kwargs = reference(case.model).build(SEED if _rank() == 0 else SEED + 1)
    graph = graph_of(case.model)

    def trainer_under(seed: int) -> runtime.Trainer:
        strategy = random_strategy(graph, case.devices, seed)
        if case.sharing is None:
            strategy = randomly_shared(strategy, graph, seed)
        elif case.sharing is not Sharding.NONE and seed == case.strategy:
            split = by_kind(graph, [AxisKind.SAMPLE], range(case.devices))
            strategy = shared(graph, split, case.sharing)
        if case.made_again:
            strategy = replace(strategy, recomputation=random_groups(graph, seed))
        if case.compiled:
            plan = build_plan(graph, strategy, (0,) * strategy.device_count)
            strategy = replace(strategy, compiled=stretches(plan))
            assert strategy.compiled
        with imported_once(case.model):
            return runtime.parallelize(
                module,
                strategy,
                args,
                kwargs,
                optimizer=lambda parameters: make_optimizer(case.optimizer, parameters),
            )

    trainer = trainer_under(case.strategy)
    scheduler = schedule(case.optimizer, trainer.optimizer)
    losses, norms = [], []
    for step, of_step in enumerate(batches(case)):
        if case.way == "resumed" and step == STEPS // 2:
            file = io.BytesIO()
            torch.save(trainer.checkpoint(), file)
            before = None if scheduler is None else scheduler.state_dict()
            trainer = trainer_under(case.strategy + 1000)
            file.seek(0)
            trainer.resume(torch.load(file) if _rank() == 0 else None)
            scheduler = schedule(case.optimizer, trainer.optimizer)
            if scheduler is not None and before is not None:
                scheduler.load_state_dict(before)
        if case.way == "disturbed" and step == STEPS // 2:
            refused = _refused(trainer, of_step[0])
            assert [text.split(",")[0].split("(")[0] for text in refused] == [
                f"inputs: input.0 of rank {case.devices - 1} differs from that of rank 0",
                f"rank {case.devices - 1}: inputs: input.0 has shape ",
            ]
        loss = sum(float(trainer.backward(*inputs, **keywords)) for inputs, keywords in of_step)
        if case.optimizer == "adamw":
            norms.append(float(trainer.clip_grad_norm(MAX_NORM)))
        trainer.apply()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss)
    state = trainer.state_dict()
    fresh = reference(case.model).build(SEED + 2)[0]
    fresh.load_state_dict(state, strict=True)
    return {
        "losses": losses,
        "norms": norms,
        "state": {name: tensor.numpy() for name, tensor in state.items()},
        "loaded": {name: tensor.numpy() for name, tensor in fresh.state_dict().items()},
        "optimizer": _portable(trainer.optimizer_state_dict()),
    }


def _refused(trainer: runtime.Trainer, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """Return the messages of steps with batches of which the last rank has others: of its own, and one too short."""
    (first, *others), keywords = batch
    is_last = _rank() == torch.distributed.get_world_size() - 1
    changed = first.clone()
    changed.view(-1)[-1] += 1
    messages = []
    for wrong in (changed, first[:-1]):
        with pytest.raises(RuntimeFailure) as caught:
            trainer.backward(wrong if is_last else first, *others, **keywords)
        messages.append(str(caught.value))
    return messages


def train_plain(case: Case) -> dict[str, Any]:
    """Train the module itself; return what `train` returns."""
    module, _, _ = reference(case.model).build(SEED)
    optimizer = make_optimizer(case.optimizer, list(module.parameters()))
    scheduler = schedule(case.optimizer, optimizer)
    losses, norms = [], []
    for of_step in batches(case):
        optimizer.zero_grad()
        total = 0.0
        for inputs, keywords in of_step:
            loss: Tensor = module(*inputs, **keywords)
            loss.backward()
            total += float(loss.detach())
        if case.optimizer == "adamw":
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    state = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    return {"losses": losses, "norms": norms, "state": state, "optimizer": _portable(optimizer.state_dict())}


def _portable(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": {
            index: {
                key: value.numpy() if isinstance(value, Tensor) else value for key, value in entry.items()
            }
            for index, entry in state["state"].items()
        },
        "param_groups": state["param_groups"],
    }


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def train_all(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What every rank does: all cases, one after another, in one process group, which the first trainer joins."""
    torch.set_num_threads(1)
    with runtime.parallelize(*perceptron(), optimizer=sgd):
        return [train(case) for case in cases]


def perceptron(batch_size: int = 7, seed: int = SEED) -> tuple[Any, ...]:
    module, args, kwargs = reference("perceptron", batch_size=batch_size).build(seed)
    graph = graph_of("perceptron")
    return module, in_turn(graph, [0]), args, kwargs


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mistakes() -> dict[str, str]:
    """What every rank of two does with wrong inputs, states and seeds: return the message of each mistake."""
    torch.set_num_threads(1)
    module, strategy, args, kwargs = perceptron()
    trainer = runtime.parallelize(module, strategy, args, kwargs, optimizer=sgd)
    images, targets = args
    group = weakref.ref(torch.distributed.group.WORLD)
    state = trainer.state_dict()
    split = by_kind(graph_of("perceptron"), [AxisKind.PARAMETER], [0, 1])

    def other_seed() -> None:
        runtime.parallelize(module, strategy, args, kwargs, optimizer=sgd, seed=_rank())

    def whole_weights() -> None:
        runtime.parallelize(module, split, args, kwargs, optimizer=lambda p: torch.optim.LBFGS(p))

    def state_of_rank_0(state: dict[str, Tensor]) -> Callable[[], None]:
        return lambda: trainer.load_state_dict(state if _rank() == 0 else None)

    def optimizer_of_rank_1(made: Any) -> Callable[[], None]:
        def attempt() -> None:
            runtime.parallelize(module, strategy, args, kwargs, optimizer=made if _rank() else sgd)

        return attempt

    def failing(_parameters: object) -> torch.optim.Optimizer:
        raise SoapstoneError("factory: has no rate, must have one; give it one")

    def frozen() -> None:
        weight = module.first.weight
        weight.requires_grad = _rank() != 1
        try:
            trainer.step(images, targets)
        finally:
            weight.requires_grad = True

    attempts: dict[str, Callable[[], object]] = {
        "another batch on rank 1": lambda: trainer.step(images + _rank(), targets),
        "another shape": lambda: trainer.step(images.repeat(2, 1), targets.repeat(2)),
        "fewer of one input": lambda: trainer.step(images[:3], targets),
        "another dtype": lambda: trainer.step(images.double(), targets),
        "another structure": lambda: trainer.step(images),
        "no scale": lambda: trainer.step(images, targets, scale=float("nan")),
        "a step of the optimizer's own": lambda: trainer.optimizer.step(),
        "another seed": other_seed,
        "not element-wise": whole_weights,
        "an optimizer on rank 1": optimizer_of_rank_1(torch.optim.SGD(module.parameters(), lr=0.1)),
        "no optimizer on rank 1": optimizer_of_rank_1(lambda _parameters: None),
        "a failing factory on rank 1": optimizer_of_rank_1(failing),
        "no file on rank 1": lambda: runtime.parallelize(
            module, "none.json" if _rank() else strategy, args, kwargs, optimizer=sgd
        ),
        "missing name": state_of_rank_0(
            {name: tensor for name, tensor in state.items() if name != "first.bias"}
        ),
        "unknown name": state_of_rank_0({**state, "fourth.bias": torch.zeros(2)}),
        "other sizes": state_of_rank_0({**state, "first.bias": torch.zeros(2)}),
        "no checkpoint": lambda: trainer.resume({"module": state} if _rank() == 0 else None),
        "other groups": lambda: trainer.load_optimizer_state_dict(
            {"state": {}, "param_groups": []} if _rank() == 0 else None
        ),
    }
    later: dict[str, Callable[[], object]] = {
        "another batch on rank 1, later": lambda: trainer.step(
            images, targets.flip(0) if _rank() else targets
        ),
        "another shape on rank 1, later": lambda: trainer.step(images[: 7 - _rank()], targets),
        "fewer of one input, later": lambda: trainer.step(images[:3], targets),
        "another structure, later": lambda: trainer.step(images),
        "frozen on rank 1, later": frozen,
        "another scale on rank 1, later": lambda: trainer.step(images, targets, scale=1.0 + _rank()),
    }
    found = {}
    # Whatever was refused has changed nothing.
    for then, of_time in (("then", attempts), ("at last", later)):
        for name, attempt in of_time.items():
            try:
                attempt()
            except SoapstoneError as error:
                found[name] = str(error)
        found[then] = f"{float(trainer.step(images, targets)):.4f}"
    trainer.close()
    try:
        trainer.step(images, targets)
    except SoapstoneError as error:
        found["after close"] = str(error)
    # A group that is still there when its process ends can abort it.
    found["group"] = "gone" if group() is None else "held"
    return found
