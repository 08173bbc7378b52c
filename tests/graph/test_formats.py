"""Networks in other number formats: what is converted, and what follows of it in the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from graph.errors import GraphError, ImportFailure, TrainingError
from graph.importer import import_module
from graph.importing.formats import converted, require_dtype
from graph.operators import OperatorGraph, ValueKind
from graph.rules import whole_call
from graph.training import OPTIMIZERS, PRECISIONS, Training


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(self.embedding(tokens) * scale))
        return functional.cross_entropy(hidden, targets)


INPUTS = (torch.arange(6) % 11, torch.rand(6, 1), torch.arange(6) % 16)


def graph_in(dtype: str) -> OperatorGraph:
    return import_module(*converted(Network(), INPUTS, {}, dtype), name="network")


def test_floating_point_tensors_are_converted_and_no_others() -> None:
    module, (tokens, scale), kwargs = converted(Network(), INPUTS[:2], {"targets": INPUTS[2]}, "bfloat16")
    assert (tokens.dtype, scale.dtype, kwargs["targets"].dtype) == (torch.int64, torch.bfloat16, torch.int64)
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}
    buffers = {name: buffer.dtype for name, buffer in module.named_buffers()}
    assert buffers == {
        "norm.running_mean": torch.bfloat16,
        "norm.running_var": torch.bfloat16,
        "norm.num_batches_tracked": torch.int64,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_graph_in_16_bits_has_half_the_bytes_and_other_keys(dtype: str) -> None:
    single, half = graph_in("float32"), graph_in(dtype)
    assert [operator.name for operator in half.operators] == [one.name for one in single.operators]
    assert half.digest != single.digest
    # But for sums over the batch, which are in float32 and float64 whatever the format.
    wide = {"batch_norm.moments", "cross_entropy_loss.sums"}
    for mine, theirs in zip(half.values, single.values, strict=True):
        assert mine.name == theirs.name
        if theirs.spec.dtype == "float32" and not any(mine.name.endswith(name) for name in wide):
            assert (mine.spec.dtype, 2 * mine.spec.size_bytes) == (dtype, theirs.spec.size_bytes)
        else:
            assert mine.spec == theirs.spec
    floating = [
        one for one in single.operators if not one.name.startswith("add")
    ]  # batches are counted in int64
    assert len(floating) == len(single.operators) - 1
    for operator in floating:
        call = whole_call(half, half.operator_by_name[operator.name])
        assert call.digest != whole_call(single, operator).digest
    assert {value.spec.dtype for value in half.values if value.kind is ValueKind.WEIGHT} == {dtype}
    assert half.weight_dtype == dtype


def test_weights_of_several_dtypes_have_no_update_to_price() -> None:
    module = Network()
    module.norm.double()
    assert import_module(Network(), INPUTS, name="network").weight_dtype == "float32"
    with pytest.raises(ImportFailure, match=r"model net: weight norm\.weight is float64, must be float32"):
        require_dtype(module, "float32", "net")
    with pytest.raises(ImportFailure, match=r"weight embedding\.weight is bfloat16.*--precision bfloat16"):
        require_dtype(Network().to(torch.bfloat16), "float32", "net")

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.second(self.first(x).double()).sum()
            return result

    mixed = import_module(Mixed(), (torch.rand(2, 4),), name="mixed")
    with pytest.raises(GraphError, match="graph mixed: its weights are float32 and float64, must be of one"):
        _ = mixed.weight_dtype


def test_every_precision_trains_by_every_optimizer_but_adam_in_float16() -> None:
    for precision in PRECISIONS:
        for optimizer in OPTIMIZERS:
            if (precision, optimizer) == ("float16", "adam"):
                with pytest.raises(TrainingError, match="adam with precision float16"):
                    Training(4, precision, optimizer)
            else:
                assert Training(4, precision, optimizer).dtype == precision.replace("tf32", "float32")
