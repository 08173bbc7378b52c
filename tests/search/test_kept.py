"""What operators keep for their backward: the table against what autograd saves, and what lasts in a graph."""

from __future__ import annotations

import pytest
import torch

from graph.operators import FLOATING, Operator, OperatorGraph, TensorSpec, ValueKind
from graph.rules import local_calls
from graph.substitutions.rewriting import WITH_COMPILER, WITHOUT_COMPILER, every_substitution, rewritten
from profiler.operators import ExecutionContext, compile_call
from search.simulate.saved_tensors import extra_bytes, keeps_output, kept_inputs, kept_outputs
from search.space.groups import is_view
from tests.graphs import small_graph
from tests.search.builders import branches, two_layers

QUICK = ("alexnet", "rnnlm", "bert-large", "bert-large merged", "bert-large fused")
NETWORKS = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "mlp",
            "vgg16",
            "inception",
            "inception merged",
            "resnet101 fused",
            "hf-llama fused",
            "resnet101",
            "densenet121",
            "nmt",
            "gpt2",
            "dlrm",
            "candle-uno",
            "resnext50",
            "xdl",
        )
    ),
]


def graph_of(name: str) -> OperatorGraph:
    """Return a small network of the zoo; one that is called merged or fused, with all substitutions of that kind."""
    network, _, kind = name.partition(" ")
    graph = small_graph(network, 4)
    rules = {"": (), "merged": WITHOUT_COMPILER, "fused": WITH_COMPILER}[kind]
    return rewritten(graph, every_substitution(graph, rules))


def made(spec: TensorSpec, *, wanted: bool) -> torch.Tensor:
    """Return a tensor of a spec; indexes are zero."""
    dtype = getattr(torch, spec.dtype)
    if spec.dtype in FLOATING:
        return torch.rand(spec.shape, dtype=dtype).requires_grad_(wanted)
    return torch.zeros(spec.shape, dtype=dtype)


def claimed_and_saved(graph: OperatorGraph, operator: Operator) -> tuple[int, int]:
    """Return the bytes that the table says and those that autograd saves, of a whole operator.

    Weights last anyway, and so do indexes, which are inputs of the network.
    """
    call = local_calls(graph, operator, (1,) * len(operator.space.axes))[0]
    wanted = graph.gradient_inputs(operator)
    inputs = [made(spec, wanted=one) for spec, one in zip(call.inputs, wanted, strict=True)]
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # What is compiled keeps less than its parts do.
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        outputs = compile_call(call)(inputs, ExecutionContext())
    lasting = [
        graph.value_by_name[name].kind is ValueKind.WEIGHT or spec.dtype not in FLOATING
        for name, spec in zip(operator.inputs, call.inputs, strict=True)
    ]
    claimed = extra_bytes(call)
    for slot, tensor in enumerate(inputs):
        if lasting[slot]:
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        elif slot in kept_inputs(operator, wanted):
            claimed += call.inputs[slot].size_bytes
    if keeps_output(operator):
        claimed += sum(spec.size_bytes for spec in call.outputs)
    del outputs
    return claimed, sum(saved.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_the_table_says_what_autograd_saves(name: str) -> None:
    """Of every operator not less, and of all together not much more."""
    graph = graph_of(name)
    claimed_bytes = saved_bytes = 0
    known = set()
    for operator in graph.operators:
        alike = (
            operator.target,
            operator.arguments,
            graph.input_specs(operator),
            graph.gradient_inputs(operator),
        )
        if not graph.has_backward(operator) or is_view(operator) or repr(alike) in known:
            continue
        known.add(repr(alike))
        claimed, saved = claimed_and_saved(graph, operator)
        assert claimed >= 0.95 * saved - 1024, operator.target
        claimed_bytes += claimed
        saved_bytes += saved
    assert claimed_bytes <= 1.1 * saved_bytes + 1024


def test_what_nobody_keeps_does_not_last() -> None:
    """A relu keeps its own output, so that the layer before it need not last; the loss keeps a softmax."""
    graph = two_layers()
    lasting = {
        operator.name: any(flags)
        for operator, flags in zip(graph.operators, kept_outputs(graph), strict=True)
    }
    assert lasting == {"first": False, "relu": True, "second": False, "loss.sum": True, "loss": False}


def test_a_view_keeps_its_base_and_takes_nothing() -> None:
    graph = branches()
    lasting = {
        operator.name: any(flags)
        for operator, flags in zip(graph.operators, kept_outputs(graph), strict=True)
    }
    assert lasting["wide"]
    assert not lasting["heads"]
