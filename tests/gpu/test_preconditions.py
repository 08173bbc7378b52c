"""What CUDA's kernels demand: of the calls of the zoo, and of the network of the link probe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from app.services.costs.exchange_overhead import network
from app.services.models.models import import_graph, known_models, requested_model
from graph.calls import LocalCall
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.rules.registry import rules
from profiler.call_inputs import CallInputs
from profiler.devices import available_devices
from profiler.operators import batch_norm
from search.cost.calls_to_profile import calls_to_profile
from tests.gpu.conftest import seeing_gpus
from tests.gpu.native_functions import has_cuda_kernel
from tests.gpu.preconditions import CudaPreconditions
from tests.gpu.virtual_device import Virtual


def _kinds_of_calls(graph: OperatorGraph) -> Iterable[LocalCall]:
    """Return the least call of each kind that a graph's parts on two devices have: kinds differ in more than sizes."""
    kinds: dict[object, LocalCall] = {}
    for call in calls_to_profile(graph, 2):
        operands = tuple((spec.dtype, len(spec.shape), 1 in spec.shape[2:]) for spec in call.inputs)
        absent = tuple(name for name, value in call.arguments if value is None)
        kind = (call.target, operands, absent, call.gradients)
        kinds[kind] = min(kinds.get(kind, call), call, key=_elements)
    return kinds.values()


def _elements(call: LocalCall) -> int:
    return sum(spec.elements for spec in (*call.inputs, *call.outputs))


def _execute(call: LocalCall) -> None:
    subject = CallInputs(call, available_devices("cuda")[0], seed=0)
    done = subject.forward()
    if call.has_backward:
        subject.draw_gradients(done)
        subject.backward(done)


def _graph(name: str) -> OperatorGraph:
    if name == "probe":
        module, args, kwargs = network()
        return import_module(module, args, kwargs, name="exchanges")
    return import_graph(requested_model(name, "small", None, "float32"), batch_norm="synchronized").graph


def test_every_operator_that_a_rule_knows_has_a_kernel_for_gpus() -> None:
    names = [target.removeprefix("aten.") for target in rules() if target.startswith("aten.")]
    assert len(names) > 300
    assert [name for name in names if not has_cuda_kernel(name.removesuffix(".default"))] == []


def test_an_operator_without_a_kernel_for_gpus_is_refused_on_one() -> None:
    with seeing_gpus():
        images = torch.zeros(1, 1, 4, 4, device="cuda:0")
        with pytest.raises(
            NotImplementedError, match="'aten::mkldnn_max_pool2d' with arguments from the 'CUDA'"
        ):
            torch.ops.aten.mkldnn_max_pool2d(images, [2, 2])


# Inception is profiled as a whole (`test_commands`).
@pytest.mark.parametrize("name", [*(name for name in known_models() if name != "inception"), "probe"])
def test_every_kind_of_call_of_a_network_is_taken_by_a_gpu(name: str) -> None:
    graph = _graph(name)
    with seeing_gpus():
        for call in _kinds_of_calls(graph):
            _execute(call)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("differentiated", [True, False])
def test_a_batch_norm_in_parts_is_taken_by_a_gpu(
    gpus: Virtual, dtype: torch.dtype, *, affine: bool, differentiated: bool
) -> None:
    values = torch.rand(4, 3, 2, 2, device="cuda:0").to(dtype).requires_grad_(differentiated)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.ones(3, device="cuda:0", dtype=kept, requires_grad=True) if affine else None
    needed = [tensor for tensor in (values, weight) if tensor is not None and tensor.requires_grad]
    made = batch_norm.batch_norm_apply(values, batch_norm.moments(values), weight, None, 16, 1e-5)
    if needed:
        torch.autograd.grad(made.sum(), needed)


# Operands of a batch norm's backward, by place, as they once were; and what CUDA says of them.
WEIGHT, SAVED_MEAN, SAVED_INVSTD = 2, 5, 6
PLANTED = {
    "save_mean should always be defined": (SAVED_MEAN, SAVED_INVSTD),
    "save_invstd should always be defined": (SAVED_INVSTD,),
    "the gradient of a missing weight was asked for": (WEIGHT,),
}


def _plant(monkeypatch: pytest.MonkeyPatch, missing: Sequence[int]) -> None:
    """Let a batch norm's backward go without some of its operands."""
    native = batch_norm._native_backward

    def planted(*operands: Any, **others: Any) -> Any:
        given = (None if place in missing else operand for place, operand in enumerate(operands))
        return native(*given, **others)

    monkeypatch.setattr(batch_norm, "_native_backward", planted)


def _gradients_on_a_cpu() -> tuple[torch.Tensor, ...]:
    values = torch.linspace(0, 1, 48).view(4, 3, 2, 2).requires_grad_()
    weight = torch.ones(3, requires_grad=True)
    made = batch_norm.batch_norm_apply(values, batch_norm.moments(values), weight, None, 16, 1e-5)
    return torch.autograd.grad(made.square().sum(), (values, weight))


@pytest.mark.parametrize("said", PLANTED)
def test_planted_lacks_of_a_batch_norm_s_backward_are_found_by_the_spy_alone(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    with CudaPreconditions():
        expected = _gradients_on_a_cpu()
    _plant(monkeypatch, PLANTED[said])
    # A CPU needs none of them.
    torch.testing.assert_close(_gradients_on_a_cpu(), expected)
    with CudaPreconditions(), pytest.raises(RuntimeError, match=said):
        _gradients_on_a_cpu()


def test_a_planted_batch_norm_without_statistics_is_refused_by_gpus_in_the_probe_s_network(
    gpus: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [call for call in _kinds_of_calls(_graph("probe")) if call.target == "soapstone.batch_norm_apply"]
    assert calls
    _plant(monkeypatch, (SAVED_MEAN, SAVED_INVSTD))
    for call in calls:
        with pytest.raises(RuntimeError, match="save_mean should always be defined"):
            _execute(call)
