"""Importing: small modules, and every network of the zoo, against the modules themselves."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from graph.axes import AxisKind
from graph.calls import call_from_json
from graph.errors import ImportFailure
from graph.importer import import_module
from graph.intervals import full_region
from graph.operators import OperatorGraph, ValueKind
from graph.rules import backward_flops, bytes_moved, flops, local_calls
from graph.zoo import build, zoo_names
from profiler.operators import ExecutionContext, compile_call, random_inputs
from profiler.operators.counter_rng import random_numbers
from tests.quick import FEW_NETWORKS, few
from tests.reference.interpreter import interpret
from tests.reference.rules import random_degrees


class _Module(nn.Module):
    """A module whose forward is a function of itself."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._function = function

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        return self._function(self, *args, **kwargs)


def _no_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "dropout_probability"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def check_against_module(
    module: nn.Module, args: Sequence[torch.Tensor], tolerance: float, kwargs: dict[str, Any] | None = None
) -> OperatorGraph:
    """Import and interpret; compare loss, gradients and buffers with one step of the module."""
    graph = import_module(module, args, kwargs, name="test")
    tensors = [*args, *(kwargs or {}).values()]
    weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    step = interpret(graph, weights, {**weights, **buffers}, tensors, ExecutionContext())
    result = module(*args, **(kwargs or {}))
    loss = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    torch.testing.assert_close(step.loss, loss.detach().reshape(()), rtol=tolerance, atol=tolerance)
    for name, weight in module.named_parameters():
        if weight.grad is None:
            assert not step.gradients.get(name, weight.new_zeros(())).any()
            continue
        torch.testing.assert_close(step.gradients[name], weight.grad, rtol=tolerance, atol=tolerance)
    for name, buffer in module.named_buffers():
        expected = step.buffers.get(name, buffers[name])
        torch.testing.assert_close(expected, buffer, rtol=tolerance, atol=tolerance)
    return graph


@pytest.mark.parametrize("name", zoo_names())
def test_zoo_network_is_its_module(name: str) -> None:
    torch.manual_seed(0)
    module, args, kwargs = build(name, "small")
    _no_dropout(module)
    graph = check_against_module(module.double(), [_double(a) for a in args], 1e-7, kwargs)
    irregular = {"adaptive_avg_pool2d"} if name == "alexnet" else set()  # 3 pixels are pooled to 2
    assert {operator for operator, _ in graph.unsplit} == irregular
    assert all(operator.splittable for operator in graph)


def check_random_parts(
    module: nn.Module, graph: OperatorGraph, args: Sequence[torch.Tensor], seed: int
) -> None:
    """Run every operator in a random configuration of its own: loss, gradients and buffers stay."""
    generator = random.Random(seed)
    degrees = {operator.name: random_degrees(operator.space, generator) for operator in graph}
    weights, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    context = ExecutionContext(seed=11, step=4)
    whole = interpret(graph, weights, buffers, args, context)
    split = interpret(graph, weights, buffers, args, context, degrees)
    torch.testing.assert_close(split.loss, whole.loss, rtol=1e-8, atol=1e-8)
    for weight in graph.weights:
        torch.testing.assert_close(
            split.gradients[weight.name], whole.gradients[weight.name], rtol=1e-7, atol=1e-7
        )
    for buffer, _ in graph.buffer_updates:
        torch.testing.assert_close(split.buffers[buffer], whole.buffers[buffer], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", few(FEW_NETWORKS, zoo_names()))
def test_zoo_network_in_random_parts_is_itself_whole(name: str) -> None:
    module, args, graph = _imported(name)
    check_random_parts(module, graph, args, seed=5)


@functools.cache
def _imported(name: str) -> tuple[nn.Module, list[torch.Tensor], OperatorGraph]:
    """Return a small network in float64, its inputs and its graph; several tests look at it."""
    torch.manual_seed(1)
    module, args, kwargs = build(name, "small")
    assert not kwargs
    module.double()
    inputs = [_double(tensor) for tensor in args]
    return module, inputs, import_module(module, inputs, name=name)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def test_import_on_meta_equals_import_on_real_tensors() -> None:
    graph = import_module(*build("gpt2", "small"), name="gpt2")
    with torch.device("meta"):
        built = build("gpt2", "small")
    assert import_module(*built, name="gpt2").digest == graph.digest


class Output(NamedTuple):
    """A result with a loss, as libraries of transformers return it."""

    loss: torch.Tensor
    logits: torch.Tensor


def test_loss_inside_a_result_and_keyword_inputs() -> None:
    module = _Module(
        lambda self, x, labels: Output(functional.cross_entropy(self.head(x), labels), self.head(x)),
        head=nn.Linear(4, 3).double(),
    )
    x, labels = torch.randn(5, 4, dtype=torch.float64), torch.randint(0, 3, (5,))
    graph = check_against_module(module, [x], 1e-9, {"labels": labels})
    assert [graph.value_by_name[name].spec.dtype for name in graph.inputs] == ["float64", "int64"]
    assert [operator.target for operator in graph] == [
        "aten.linear.default",
        "soapstone.cross_entropy_sums",
        "soapstone.ratio",
    ]


def test_tied_weights_are_one_value() -> None:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    module = _Module(
        lambda self, ids: functional.cross_entropy(self.head(self.table(ids)), ids), table=table, head=head
    ).double()
    graph = check_against_module(module, [torch.randint(0, 7, (5,))], 1e-9)
    assert [value.name for value in graph.weights] == ["table.weight"]
    assert graph.aliases == (("head.weight", "table.weight"),)
    assert [slot for _, slot in graph.consumers["table.weight"]] == [0, 1]


def test_frozen_parameters_are_buffers() -> None:
    first = nn.Linear(3, 3)
    for weight in first.parameters():
        weight.requires_grad = False
    module = _Module(
        lambda self, x: self.second(self.first(x)).sum(), first=first, second=nn.Linear(3, 2)
    ).double()
    graph = check_against_module(module, [torch.randn(2, 3, dtype=torch.float64)], 1e-9)
    assert [value.name for value in graph.weights] == ["second.weight", "second.bias"]
    assert graph.value_by_name["first.weight"].kind is ValueKind.BUFFER
    assert not graph.has_backward(graph.operators[0])


def test_dead_code_and_unused_weights_are_left_out() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        loss: torch.Tensor = self.used(x).sum()
        return loss

    module = _Module(forward, used=nn.Linear(3, 2), unused=nn.Linear(3, 2)).double()
    graph = check_against_module(module, [torch.randn(2, 3, dtype=torch.float64)], 1e-9)
    assert [value.name for value in graph.weights] == ["used.weight", "used.bias"]
    assert len(graph.operators) == 2


def test_detach_stops_gradients() -> None:
    module = _Module(
        lambda self, x: (self.first(x).detach() * self.second(x)).sum(),
        first=nn.Linear(3, 2),
        second=nn.Linear(3, 2),
    ).double()
    graph = check_against_module(module, [torch.randn(2, 3, dtype=torch.float64)], 1e-9)
    assert graph.gradient_inputs(graph.operator_by_name["mul"]) == (False, True)


def test_constants_are_in_the_graph() -> None:
    module = _Module(
        lambda self, x: (self.head(x) * torch.tensor([1.5, -2.0], dtype=x.dtype)).sum(), head=nn.Linear(3, 2)
    ).double()
    graph = check_against_module(module, [torch.randn(2, 3, dtype=torch.float64)], 1e-9)
    assert any(operator.target == "soapstone.constant" for operator in graph)


def test_many_operators_together() -> None:
    """Views, splits, a gated unit, a causal mask built by hand, in-place writes, several dtypes."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        hidden = functional.silu(gate) * value
        rows = torch.arange(x.shape[1])
        mask = rows[:, None] >= rows[None, :]
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        mixed = torch.einsum("bst,btc->bsc", scores.softmax(-1), hidden)
        mixed[:, 0] += 1
        pieces = torch.stack([mixed[:, ::2].mean(1), mixed.amax(1)], 1).flatten(1).float().double()
        joined = torch.cat([pieces, pieces.new_zeros(x.shape[0], 1)], 1)
        error = functional.mse_loss(joined.squeeze(), torch.ones_like(joined))
        loss: torch.Tensor = error + torch.linalg.vector_norm(joined)
        return loss

    module = _Module(forward, up=nn.Linear(4, 6)).double()
    check_against_module(module, [torch.randn(3, 5, 4, dtype=torch.float64)], 1e-6)


def test_gates_cut_from_one_projection_refine_it() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        enter, forget, new, leave = self.gates(x).chunk(4, 1)
        loss: torch.Tensor = (enter.sigmoid() * new.tanh() * forget.sigmoid() * leave).sum()
        return loss

    module = _Module(forward, gates=nn.Linear(5, 12)).double()
    x = torch.randn(2, 5, dtype=torch.float64)
    graph = check_against_module(module, [x], 1e-9)
    axes = [(axis.name, axis.size) for axis in graph.operators[0].space.axes[:-1]]
    assert axes == [("sample", 2), ("channel.0", 4), ("channel.1", 3), ("in", 5)]
    for seed in range(10):
        check_random_parts(module, graph, [x], seed)


def test_cuts_that_do_not_fit_together_are_reported() -> None:
    """Twelve channels seen as 3 x 4 and as 2 x 6: the first view in program order is refined."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        loss: torch.Tensor = (y.view(2, 3, 4).sum(1).prod(1) + y.view(2, 2, 6).prod(1).sum(1)).sum()
        return loss

    module = _Module(forward, up=nn.Linear(5, 12)).double()
    x = torch.randn(2, 5, dtype=torch.float64)
    graph = check_against_module(module, [x], 1e-9)
    assert [axis.size for axis in graph.operators[0].space.axes[1:3]] == [3, 4]
    assert graph.unsplit == (
        ("view_1", "dim 1 of linear is already a product with strides [4], a further one of 6 does not fit"),
    )
    for seed in range(10):
        check_random_parts(module, graph, [x], seed)


def test_attention_heads_are_refined_from_projection_to_output() -> None:
    graph = import_module(*build("gpt2", "small"), name="gpt2")
    operators = graph.operator_by_name
    assert [axis.size for axis in operators["linear"].space.axes[:-1]] == [4, 10, 3, 4, 4, 16]
    assert [(axis.name, axis.size) for axis in operators["linear_1"].space.axes[-3:-1]] == [
        ("in.0", 4),
        ("in.1", 4),
    ]
    attention = operators["scaled_dot_product_attention"].space
    assert [axis.size for axis in attention.axes[:-1]] == [4, 4, 10, 4]


@pytest.mark.parametrize("name", zoo_names())
def test_the_batch_is_found_after_views(name: str) -> None:
    _, _, graph = _imported(name)
    for operator in graph:
        batch = [axis.size for axis in operator.space.axes if axis.kind is AxisKind.SAMPLE]
        names = [axis.name for axis in operator.space.axes]
        assert len(set(names)) == len(names)
        assert batch in ([], [4])
        if operator.target == "aten.linear.default":
            assert batch == [4]


def test_an_operator_without_rule_is_named() -> None:
    module = _Module(
        lambda self, x: self.head(torch.renorm(x, p=2, dim=0, maxnorm=1.0)).sum(), head=nn.Linear(3, 2)
    ).double()
    graph = check_against_module(module, [torch.randn(2, 3, dtype=torch.float64)], 1e-9)
    assert graph.unsplit == (("renorm", "runs whole: aten.renorm.default has no rule"),)
    assert not graph.operator_by_name["renorm"].splittable


def test_batch_norm_modes() -> None:
    module = _Module(lambda self, x: self.norm(x).square().sum(), norm=nn.BatchNorm2d(3)).double()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    targets = {
        mode: [operator.target for operator in import_module(module, [x], name="norm", batch_norm=mode)]
        for mode in ("synchronized", "local")
    }
    assert "soapstone.moments" in targets["synchronized"]
    assert "soapstone.batch_norm" in targets["local"]
    with pytest.raises(ImportFailure, match=r"batch norm mode none is unknown"):
        import_module(module, [x], name="norm", batch_norm="none")


def test_batch_norm_in_evaluation_mode_uses_its_running_statistics() -> None:
    norm = nn.BatchNorm2d(3)
    norm.running_mean = torch.randn(3)
    norm.running_var = torch.rand(3) + 0.5
    module = _Module(
        lambda self, x: self.norm(self.conv(x)).square().sum(), conv=nn.Conv2d(3, 3, 1), norm=norm
    )
    norm.eval()
    graph = check_against_module(module.double(), [torch.randn(2, 3, 4, 4, dtype=torch.float64)], 1e-9)
    assert graph.buffer_updates == ()
    assert graph.unsplit == ()


def test_what_leaves_a_region_without_gradients_is_detached() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.scale(x).relu()
        loss: torch.Tensor = (self.head(x) * scale).sum()
        return loss

    module = _Module(forward, head=nn.Linear(3, 2), scale=nn.Linear(3, 2)).double()
    graph = check_against_module(module, [torch.randn(2, 3, dtype=torch.float64)], 1e-9)
    assert not graph.value_by_name["scale.weight"].requires_gradient


def test_dropped_channels_are_draws_of_ours() -> None:
    conv = nn.Conv2d(3, 4, 3)
    module = _Module(lambda self, x: functional.dropout2d(self.conv(x), 0.4).sum(), conv=conv).double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    graph = import_module(module, [x], name="dropout2d")
    step = interpret(graph, dict(module.named_parameters()), {}, [x], ExecutionContext(seed=2))
    shape = (2, 4, 1, 1)
    key = (2, 0, graph.draw_numbers["bernoulli.draw"])
    kind = (torch.float64, torch.device("cpu"))
    keep = random_numbers("uniform", full_region(shape), shape, key, kind) < 0.6
    expected = (conv(x) * keep / 0.6).sum()
    torch.testing.assert_close(step.loss, expected.detach())


def test_local_batch_norm_whole_is_the_module() -> None:
    module = _Module(lambda self, x: self.norm(x).square().mul(x).sum(), norm=nn.BatchNorm2d(3)).double()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    graph = import_module(module, [x], name="norm", batch_norm="local")
    weights = dict(module.named_parameters())
    step = interpret(graph, weights, dict(module.named_buffers()), [x], ExecutionContext())
    loss = module(x)
    loss.backward()
    torch.testing.assert_close(step.loss, loss.detach())
    for name, weight in module.named_parameters():
        torch.testing.assert_close(step.gradients[name], weight.grad)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(step.buffers[name], buffer)


# Where the functions below stand, in a message, and what is said where a Python value decides.
HERE = r"\S*test_importer\.py:\d+"
READ = rf"torch\.export fails at {HERE}: a Python value is read out of a tensor .* replace if, bool\(\)"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda self, x: self.head(x), r"returns a tensor of shape \[2, 2\], must return a scalar loss"),
        (lambda self, x: {"cost": self.head(x).sum()}, r"returns dict, must return a scalar loss"),
        (lambda self, x: self.head(x).sum() if x.sum() > 0 else x.sum(), READ),
        (
            lambda self, x: self.head(x)[x.sum(1) > 0].sum(),
            r"size that depends on data.* \(at .*test_importer",
        ),
        (lambda self, x: (self.head(x) / x.sum().item()).sum(), rf"number that depends on data|{READ}"),
        (lambda _, x: x.sum(), r"depends on no trainable weight"),
        (
            lambda self, x: self.head(x).sum() + self.again.sum(),
            "again and head.weight are two tensors in the same memory|head.weight and again are two",
        ),
        (
            lambda self, x: torch.no_grad()(self.gru.bias_ih_l0.clamp_)(-1, 1).sum() + self.head(x).sum(),
            "its forward writes into parameter gru.bias_ih_l0",
        ),
        (
            lambda self, x: torch.sparse.mm(x.to_sparse(), self.head.weight.T).sum(),
            "is sparse, must be dense",
        ),
        (
            lambda self, x: self.missing(x),
            rf"torch\.export fails at {HERE} \(AttributeError.* change that line$",
        ),
        (
            lambda self, x: self.gru(nn.utils.rnn.pack_padded_sequence(self.head(x[None]), x[0, :1].long()))[
                1
            ].sum(),
            rf"torch\.export fails at {HERE}: packed sequences .* must be padded tensors; call the recurrent layer",
        ),
    ],
)
def test_failures_are_one_line(function: Any, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    head = nn.Linear(3, 2)
    # As somebody does who wants to tie a weight.
    again = nn.Parameter(head.weight)
    module = _Module(function, head=head, gru=nn.GRU(2, 2), again=again)
    with pytest.raises(ImportFailure, match=message) as caught:
        import_module(module, [torch.randn(2, 3)], name="broken")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("model broken: ")
    # Nothing of the exporter's is chained to it, and printed below it in the user's own script.
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert capfd.readouterr() == ("", "")


class _MakesTensors(nn.Module):
    """Makes tensors in its forward, and knows a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.tied = nn.Linear(8, 8)
        self.tied_too = self.tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        padding = torch.zeros(x.shape[:2])
        y = self.encoder(x, mask=causal, src_key_padding_mask=padding)
        loss: torch.Tensor = (self.tied_too(self.tied(y)) * torch.tensor([1.0, 2.0])[0]).square().mean()
        return loss


def test_a_forward_that_makes_tensors_is_imported_on_meta_as_with_data(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The module keeps its own tensors, and nothing is printed."""
    graphs = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            module, x = _MakesTensors(), torch.zeros(2, 3, 8)
        own = {name: id(tensor) for name, tensor in module.named_parameters()}
        graphs.append(import_module(module, [x], name="makes"))
        assert {name: id(tensor) for name, tensor in module.named_parameters()} == own
    assert graphs[0].digest == graphs[1].digest
    assert graphs[0].aliases == (("tied_too.weight", "tied.weight"), ("tied_too.bias", "tied.bias"))
    assert capfd.readouterr() == ("", "")


def test_an_encoder_with_masks_is_the_module() -> None:
    module = _MakesTensors().double()
    for part in module.modules():
        if isinstance(part, (nn.Dropout, nn.MultiheadAttention)):
            part.p = part.dropout = 0.0
    check_against_module(module, [torch.randn(2, 3, 8, dtype=torch.float64)], 1e-9)


@pytest.mark.parametrize("name", zoo_names())
def test_calls_read_back_from_their_keys_execute_on_random_inputs(name: str) -> None:
    """What a profiling worker does: the key alone, random inputs, forward and backward, all finite."""
    _, _, graph = _imported(name)
    generator = random.Random(3)
    calls = {
        call.digest: call
        for operator in graph
        for call in local_calls(graph, operator, random_degrees(operator.space, generator))
    }
    for call in calls.values():
        read = call_from_json(json.loads(call.key))
        assert read.digest == call.digest
        inputs = random_inputs(read, "cpu", seed=1)
        outputs = compile_call(read)(inputs, ExecutionContext())
        assert [list(output.shape) for output in outputs] == [list(spec.shape) for spec in call.outputs]
        chosen = [output for output in outputs if output.requires_grad]
        assert bool(chosen) == call.has_backward
        if chosen:
            needed = [tensor for tensor in inputs if tensor.requires_grad]
            gradients = torch.autograd.grad(chosen, needed, [torch.ones_like(o) for o in chosen])
            assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert all(bool(output.isfinite().all()) for output in outputs if output.numel())
        assert flops(call) >= 0
        assert backward_flops(call) >= 0
        assert bytes_moved(call) >= 0


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_spectral_norm_follows_the_module_over_steps(norm: Any) -> None:
    """Each forward refines the singular vectors in place: they are buffers that a step renews."""
    torch.manual_seed(3)
    head = norm(nn.Linear(5, 4, dtype=torch.float64))
    module = _Module(lambda self, x: self.head(x).square().mean(), head=head)
    x = torch.randn(3, 5, dtype=torch.float64)
    graph = import_module(copy.deepcopy(module), [x], name="spectral")
    assert len(graph.buffer_updates) == 2
    assert not graph.unsplit
    weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        step = interpret(graph, weights, buffers, [x], ExecutionContext())
        loss = module(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step.loss, loss.detach())
        weights = {name: weight - 0.5 * step.gradients[name] for name, weight in weights.items()}
        buffers |= step.buffers
        for name, weight in module.named_parameters():
            torch.testing.assert_close(weights[name], weight.detach())
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(buffers[name], buffer)
