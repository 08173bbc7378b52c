"""What CUDA's kernels demand: of the calls of the zoo, and of the network of the link probe."""

from __future__ import annotations

from collections.abc import Iterable

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
from search.cost.calls_to_profile import calls_to_profile
from tests.gpu.conftest import seeing_gpus
from tests.gpu.native_functions import has_cuda_kernel
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
    from profiler.operators.batch_norm import batch_norm_apply, moments

    values = torch.rand(4, 3, 2, 2, device="cuda:0").to(dtype).requires_grad_(differentiated)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.ones(3, device="cuda:0", dtype=kept, requires_grad=True) if affine else None
    needed = [tensor for tensor in (values, weight) if tensor is not None and tensor.requires_grad]
    made = batch_norm_apply(values, moments(values), weight, None, 16, 1e-5)
    if needed:
        torch.autograd.grad(made.sum(), needed)
