"""Training by `runtime.parallelize` on real processes equals the plain module trained by the same torch optimizer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import runtime
from graph.errors import ImportFailure, RuntimeFailure, StrategyError, UsageError
from graph.importer import import_module
from graph.schedule import MicroBatches
from graph.strategy import Sharding, Strategy, strategy_text
from graph.synchronization import p3
from runtime.launch.torchrun import call_on_ranks
from runtime.training.optimizer_state import make_optimizer
from tests.runtime.models import secretive
from tests.runtime.oracle import graph_of, reference
from tests.runtime.strategies import in_turn, random_strategy
from tests.runtime.training_cases import Case, mistakes, perceptron, sgd, train, train_all, train_plain

ROOT = Path(__file__).parents[2]
TOLERANCE = 2e-4
MODELS = ("perceptron", "convolutions", "recurrent", "branches", "mixed")
OPTIMIZERS = ("momentum", "adam", "adamw")
WAYS = ("plain", "resumed", "accumulated")
EVERY = [(model, optimizer) for model in MODELS for optimizer in OPTIMIZERS]


def cases_of(size: int, pairs: Sequence[tuple[str, str]], seed: int) -> list[Case]:
    """Cases on `size` processes; in some of them the last process has nothing to do."""
    return [
        Case(model, optimizer, 7 * index + seed, size if index % 4 else min(size, 2), WAYS[index % 3])
        for index, (model, optimizer) in enumerate(pairs)
    ]


# Every model and optimizer; all pairs of them only under scripts/test --all.
SHARED = [
    Case("perceptron", "adamw", 1, 3, "resumed", Sharding.OPTIMIZER),
    Case("convolutions", "adam", 2, 2, "accumulated", Sharding.PARAMETERS),
    Case("recurrent", "adamw", 3, 3, "resumed", Sharding.PARAMETERS),
]
MADE_AGAIN = [
    Case("convolutions", "momentum", 5, 3, "accumulated", made_again=True),
    Case("recurrent", "adamw", 6, 3, "resumed", Sharding.PARAMETERS, made_again=True),
]
# Ranks update up to four parts of a weight, each of which they share with other ranks.
IN_PARTS = [
    Case("convolutions", "adam", 24, 3, "disturbed", None),
    Case("recurrent", "adamw", 11, 3, "resumed", None),
    Case("recurrent", "momentum", 27, 3, "accumulated", None),
]
COMPILED = [Case("perceptron", "adamw", 8, 3, "accumulated", Sharding.OPTIMIZER, compiled=True)]
QUICK = {3: [*cases_of(3, EVERY[::2], 3), *SHARED, *MADE_AGAIN, *IN_PARTS, *COMPILED]}
FULL = {size: cases_of(size, EVERY, 100) for size in (2, 3)}


def name_of(case: Case) -> str:
    again = "-made again" if case.made_again else ""
    compiled = "-compiled" if case.compiled else ""
    return f"{case.model}-{case.optimizer}-{case.way}-{case.sharing or 'at random'}{again}{compiled}"


def train_everywhere(cases: dict[int, list[Case]]) -> dict[Case, list[Any]]:
    """Return, for every case, each rank's result; one start of processes a number of them."""
    results: dict[Case, list[Any]] = {}
    for size, of_size in cases.items():
        of_ranks = call_on_ranks(size, train_all, (of_size,))
        results.update(zip(of_size, map(list, zip(*of_ranks, strict=True)), strict=True))
    return results


@pytest.fixture(scope="module")
def trained() -> dict[Case, list[Any]]:
    return train_everywhere(QUICK)


@pytest.fixture(scope="module")
def trained_in_full() -> dict[Case, list[Any]]:
    return train_everywhere(FULL)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert found["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
    assert list(found["state"]) == list(expected["state"])
    assert_close(found["state"], expected["state"])
    assert_close(found["loaded"], expected["state"])
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    states = found["optimizer"]["state"], expected["optimizer"]["state"]
    assert states[0].keys() == states[1].keys()
    for index, entry in states[1].items():
        assert_close(states[0][index], entry)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        largest = max(float(np.abs(value).max()), 1e-3) if np.size(value) else 1.0
        np.testing.assert_allclose(found[name], value, rtol=0, atol=10 * TOLERANCE * largest, err_msg=name)


@pytest.mark.parametrize("case", [case for cases in QUICK.values() for case in cases], ids=name_of)
def test_training_equals_the_plain_modules(case: Case, trained: dict[Case, list[Any]]) -> None:
    expected = train_plain(case)
    for of_rank in trained[case]:
        assert_same(of_rank, expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for cases in FULL.values() for case in cases], ids=name_of)
def test_every_model_with_every_optimizer(case: Case, trained_in_full: dict[Case, list[Any]]) -> None:
    expected = train_plain(case)
    for of_rank in trained_in_full[case]:
        assert_same(of_rank, expected)


@pytest.mark.parametrize("model", [*MODELS, "dropped"])
def test_one_device_needs_no_process_group(model: str) -> None:
    case = Case(model, "adamw", 3, 1)
    found = train(case)
    if model == "dropped":  # the module itself draws otherwise; a resumed run must draw alike
        assert_same(train(Case(model, "adamw", 3, 1, "resumed")), found)
    else:
        assert_same(found, train_plain(case))
    assert not torch.distributed.is_initialized()


def test_mistakes_are_one_line_on_every_rank() -> None:
    first, second = call_on_ranks(2, mistakes, ())
    assert first == second
    expected = {
        "another batch on rank 1": "inputs: input.0 of rank 1 differs from that of rank 0",
        "another shape": r"inputs: input.0 has shape (14, 6), must have (7, 6) as in the example",
        "fewer of one input": "inputs: input.0 has shape (3, 6), for which the strategy does not fit, must have (7, 6)",
        "fewer of one input, later": "inputs: input.0 has shape (3, 6), for which the strategy does not fit, must have",
        "another dtype": "inputs: input.0 has dtype torch.float64, must have torch.float32",
        "another structure": "inputs: are 1 and keywords []",
        "another seed": "rank 1: has seed 1, must have that of rank 0, 0",
        "not element-wise": "optimizer: LBFGS looks at whole weights",
        "an optimizer on rank 1": "rank 1: optimizer: is of type SGD, must be a function",
        "no optimizer on rank 1": "rank 1: optimizer: its factory returned NoneType, must return",
        "a failing factory on rank 1": "rank 1: factory: has no rate",
        "no file on rank 1": "rank 1: strategy file none.json: cannot be read",
        "another batch on rank 1, later": "inputs: input.1 of rank 1 differs from that of rank 0",
        "another shape on rank 1, later": "rank 1: inputs: input.0 has shape (6, 6), must have (7, 6)",
        "another structure, later": "inputs: are 1 and keywords []",
        "frozen on rank 1, later": "rank 1: parameter first.weight: requires_grad is False, must be True",
        "another scale on rank 1, later": "scale: of rank 1 is 2, must be that of rank 0, 1",
        "no scale": "scale: is nan, must be a finite number",
        "a step of the optimizer's own": "optimizer: makes a step by itself, must be called by the trainer; call",
        "missing name": "state dict: first.bias is missing",
        "unknown name": "state dict: fourth.bias is unknown",
        "other sizes": "state dict: first.bias has shape (2,), must have (10,)",
        "no checkpoint": "checkpoint: lacks one of module, optimizer, step_number on rank 0",
        "other groups": "optimizer state: has parameter groups of [] weights, must be of [5]",
        "after close": "process group of ranks (0, 1): is not there, must be",
    }
    assert set(first) == {*expected, "then", "at last", "group"}
    for name, start in expected.items():
        assert first[name].startswith(start)
        assert "\n" not in first[name]
    assert first["group"] == "gone"
    module, _, args, _ = perceptron()
    optimizer = sgd(list(module.parameters()))
    for then in ("then", "at last"):
        loss = module(*args)
        assert first[then] == f"{float(loss.detach()):.4f}"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def written(path: Path, strategy: Strategy) -> Path:
    path.write_text(strategy_text(strategy, graph_of("perceptron")))
    return path


def test_a_strategy_file_is_fitted_to_the_module(tmp_path: Path) -> None:
    module, strategy, args, kwargs = perceptron()
    file = written(tmp_path / "strategy.json", strategy)
    for form in (file, str(file), runtime.load_strategy(file)):
        trainer = runtime.parallelize(module, form, args, kwargs, optimizer=sgd)
        assert trainer.strategy == strategy


def test_a_strategy_for_another_graph_names_what_differs(tmp_path: Path) -> None:
    module, strategy, args, kwargs = perceptron()
    file = written(tmp_path / "strategy.json", strategy)
    smaller = perceptron(batch_size=4)
    with pytest.raises(StrategyError, match=r"same operators at other sizes .*input.0 \[4, 6\] float32"):
        runtime.parallelize(smaller[0], file, *smaller[2:], optimizer=sgd)
    other = reference("branches").build(0)
    with pytest.raises(StrategyError, match=r"lacks \d+ of its operators"):
        runtime.parallelize(other[0], file, *other[1:], optimizer=sgd)
    two = random_strategy(graph_of("perceptron"), 2, 0)
    with pytest.raises(
        StrategyError, match="is for 2 devices, there must be a process for each and is 1; start"
    ):
        runtime.parallelize(module, two, args, kwargs, optimizer=sgd)
    normed = reference("convolutions").build(0)
    with pytest.raises(StrategyError, match='pass batch_norm="synchronized"'):
        runtime.parallelize(
            normed[0], in_turn(graph_of("convolutions"), [0]), *normed[1:], optimizer=sgd, batch_norm="local"
        )


def test_a_strategy_of_several_micro_batches_is_refused_before_its_sizes_are(tmp_path: Path) -> None:
    module, strategy, args, kwargs = perceptron()
    divided = replace(strategy, micro_batches=MicroBatches(2))
    for form in (divided, written(tmp_path / "strategy.json", divided)):
        with pytest.raises(StrategyError, match=r"has 2 micro-batches, .* which app run executes"):
            runtime.parallelize(module, form, args, kwargs, optimizer=sgd)


def test_files_that_are_no_strategies(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="cannot be read"):
        runtime.load_strategy(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(StrategyError, match="is no strategy"):
        runtime.load_strategy(tmp_path / "list.json")


def test_the_modules_own_state_stays(tmp_path: Path) -> None:
    """Training flags and values are the user's; a module in evaluation mode is trained in training mode."""
    module, strategy, args, kwargs = perceptron()
    module.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = runtime.parallelize(module, strategy, args, kwargs, optimizer=sgd)
    trainer.step(*args)
    assert not any(part.training for part in module.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not torch.equal(trainer.state_dict()["first.weight"], before["first.weight"])


@pytest.mark.parametrize("sharing", [Sharding.NONE, Sharding.OPTIMIZER])
def test_late_updates_are_fallen_back_from_with_a_warning(sharing: Sharding) -> None:
    module, strategy, args, kwargs = perceptron()
    strategy = replace(strategy, sharding=(sharing,) * len(dict(module.named_parameters())))
    losses = []
    for synchronization in (strategy.synchronization, p3(1024)):
        chosen = replace(strategy, synchronization=synchronization)
        late = pytest.warns(UserWarning, match=r"^strategy: its policy p3 is executed by app run alone; ")
        with late if chosen != strategy else nullcontext():
            trainer = runtime.parallelize(module, chosen, args, kwargs, optimizer=sgd)
        losses.append([float(trainer.step(*args)) for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_fused_optimizer_is_refused_for_parts_that_it_would_update_wrongly() -> None:
    whole = torch.zeros(4, 6)

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    with pytest.raises(RuntimeFailure, match="optimizer: is fused, must not be where a rank updates columns"):
        make_optimizer(make, [nn.Parameter(whole[:, :3])], parts=True)
    made = make_optimizer(make, [nn.Parameter(whole[:2])], parts=True)
    assert made.param_groups[0]["fused"]


def test_a_module_without_a_loss_is_refused() -> None:
    with pytest.raises(ImportFailure, match="must return a scalar loss"):
        runtime.parallelize(torch.nn.Linear(2, 3), "none.json", (torch.zeros(4, 2),), optimizer=sgd)


def test_a_module_whose_export_would_lose_something_is_refused() -> None:
    module, args, _ = secretive("parameter hook")
    with pytest.raises(ImportFailure, match=r"parameter first\.weight has a hook"):
        runtime.parallelize(module, "none.json", args, optimizer=sgd)


def test_a_keyword_that_backward_takes_for_itself_is_refused() -> None:
    module, strategy, args, _ = perceptron()
    with pytest.raises(UsageError, match="scale is a keyword of the module and an argument of backward"):
        runtime.parallelize(module, strategy, args, {"scale": 2.0}, optimizer=sgd)


def test_one_process_takes_smaller_batches_too() -> None:
    module, strategy, (points, targets), _ = perceptron()
    trainer = runtime.parallelize(module, strategy, (points, targets), optimizer=sgd)
    for size in (7, 3, 7, 1):
        expected = module(points[:size], targets[:size])
        assert float(trainer.backward(points[:size], targets[:size])) == pytest.approx(
            float(expected.detach())
        )


def test_batches_are_whole_or_sharded() -> None:
    with pytest.raises(UsageError, match=r"batches: is 'each', must be \"whole\" or \"sharded\""):
        runtime.parallelize(*perceptron(), optimizer=sgd, batches="each")


def test_a_scaler_and_float16_weights_are_refused_as_torch_refuses_them() -> None:
    module, _, (points, targets), kwargs = perceptron()
    module, args = module.half(), (points.half(), targets)
    strategy = in_turn(import_module(module, args, name="half"), [0])
    trainer = runtime.parallelize(module, strategy, args, kwargs, optimizer=sgd)
    with pytest.raises(RuntimeFailure, match=r"parameter first\.weight is float16, must be float32"):
        trainer.step(*args, scaler=torch.amp.GradScaler("cpu"))


def test_an_incomplete_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="MASTER_ADDR is not, must be; start the processes with torchrun"):
        runtime.parallelize(*perceptron(), optimizer=sgd)


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, runtime; print('torch' in sys.modules, *sorted(runtime.__all__))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False", *sorted(runtime.__all__)]
