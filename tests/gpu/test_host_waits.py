"""A training step is issued while the GPU computes: the host waits for it nowhere but where it reads a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from app.services.models.models import import_graph, known_models, requested_model
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.plan import build_plan
from graph.training import Training
from profiler.operators.custom_operators import _grouped_product
from runtime.communication import World, make_groups
from runtime.execution.executor import Executor, InitialTensors
from runtime.execution.step import whole_parts
from runtime.jobs.models import ModelReference, tensors_of
from runtime.launch.processes import join_group
from runtime.training.parallelize import parallelize
from search.space.baselines import data_parallel, single_device
from tests.gpu.conftest import seeing_gpus
from tests.gpu.ranks import run_ranks
from tests.gpu.virtual_device import Speeds, Virtual, virtual
from tests.quick import few

GPU = torch.device("cuda", 0)


def _executor(graph: OperatorGraph, tensors: InitialTensors) -> Executor:
    plan = build_plan(graph, single_device(graph), (0,))
    training = Training(batch_size=2, optimizer="adam")
    return Executor(plan, World(1), tensors, training, seed=0, learning_rate=1e-3, device=GPU)


def _waits_of_a_step(gpus: Virtual, executor: Executor) -> Counter[str]:
    executor.step(0)
    gpus.host_waits.clear()
    executor.step(1)
    return gpus.host_waits


# Other networks have all operators of the largest.
@pytest.mark.parametrize("name", few(set(known_models()) - {"inception"}, known_models()))
def test_a_step_is_issued_without_waiting_for_the_device(gpus: Virtual, name: str) -> None:
    request = requested_model(name, "small", None, "float32")
    graph = import_graph(request, batch_norm="synchronized").graph
    model = ModelReference("app.services.models.models:build_model", request.factory_keywords)
    assert not _waits_of_a_step(gpus, _executor(graph, tensors_of(graph, model.build(0))))


class _Constants(nn.Module):
    """A network that makes a tensor of numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([0.5, 2.0, 1.0], device=x.device)
        result: torch.Tensor = (self.linear(x) * weights).square().mean()
        return result


def _built(batch_size: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    return _Constants(), (torch.rand(batch_size, 3),), {}


def test_constants_are_copied_to_the_device_once(gpus: Virtual) -> None:
    module, args, kwargs = _built()
    graph = import_module(module, args, kwargs, name="constants")
    assert any(operator.target == "soapstone.constant" for operator in graph.operators)
    assert not _waits_of_a_step(gpus, _executor(graph, tensors_of(graph, (module, args, kwargs))))


@pytest.mark.parametrize("pinned", [False, True])
def test_inputs_are_copied_while_the_device_computes(gpus: Virtual, pinned: bool) -> None:  # noqa: FBT001
    module, args, kwargs = _built()
    graph = import_module(module, args, kwargs, name="constants")
    executor = _executor(graph, tensors_of(graph, (module, args, kwargs)))
    inputs = torch.full((4, 3), 2.0)
    executor.step(0)
    gpus.host_waits.clear()
    executor.set_inputs(whole_parts({"input.0": inputs.pin_memory() if pinned else inputs}))
    executor.step(1)
    assert not gpus.host_waits
    (values,) = [value for value in executor._state.values if value is not None and value.shape == (4, 3)][:1]
    assert values.cpu().tolist() == inputs.tolist()


def _descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def test_a_trainer_s_step_is_issued_without_waiting_for_the_device(gpus: Virtual) -> None:
    module, args, kwargs = _built()
    strategy = single_device(import_module(module, args, kwargs, name="constants"))
    trainer = parallelize(module, strategy, args, optimizer=_descent, device=GPU)
    trainer.step(*args)
    gpus.host_waits.clear()
    trainer.step(torch.rand(4, 3))
    assert not gpus.host_waits


@pytest.mark.parametrize(("row", "expert"), [(0, 0), (3, 1), (6, 2)])
def test_grouped_products_leave_the_ends_of_groups_on_the_device(row: int, expert: int) -> None:
    rows = torch.rand(8, 8).bfloat16()
    weights, ends = torch.rand(2, 8, 16).bfloat16(), torch.tensor([2, 5, 9, 12])
    expected = _product_and_gradients(rows, weights, ends, row, expert)
    with seeing_gpus() as gpus:
        moved = rows.to(GPU), weights.to(GPU), ends.to(GPU)
        gpus.host_waits.clear()
        results = _product_and_gradients(*moved, row, expert)
        assert not gpus.host_waits
        results = tuple(tensor.cpu() for tensor in results)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)


def _product_and_gradients(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, row: int, expert: int
) -> tuple[torch.Tensor, ...]:
    rows, weights = (tensor.detach().requires_grad_() for tensor in (rows, weights))
    product = _grouped_product(rows, weights, ends, row, expert)
    return (product, *torch.autograd.grad(product.float().sum(), (rows, weights)))


def _step_of_ranks(rank: int, count: int, meeting: str) -> dict[str, int]:
    import torch.distributed as dist

    from runtime.ranks.ranks import prepare_groups

    store = dist.FileStore(meeting, count)  # type: ignore[attr-defined]
    join_group(f"cuda:{rank}", 30.0, store=store, rank=rank, size=count)
    make_groups([tuple(range(count))], 30.0)
    request = requested_model("inception", "small", None, "float32")
    graph = import_graph(request, batch_norm="synchronized").graph
    model = ModelReference("app.services.models.models:build_model", request.factory_keywords)
    plan = build_plan(graph, data_parallel(graph, count), (0,) * count)
    prepare_groups(plan, count, 30.0)
    training = Training(batch_size=2)
    device = torch.device("cuda", rank)
    executor = Executor(
        plan,
        World(count),
        tensors_of(graph, model.build(0)),
        training,
        seed=0,
        learning_rate=1e-3,
        device=device,
    )
    executor.step(0)
    virtual.host_waits.clear()
    executor.step(1)
    return dict(virtual.host_waits)


def test_ranks_issue_a_step_with_its_messages_without_waiting(speeds: Callable[[Speeds], None]) -> None:
    assert run_ranks(_step_of_ranks) == [{}, {}]
