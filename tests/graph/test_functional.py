"""Functional programs: what is rewritten node by node is what torch's decompositions give, for the zoo and corners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn import functional

import graph.importing.exporting as exporting
from graph.errors import ImportFailure
from graph.importing.exporting import export
from graph.importing.functional import FunctionalProgram, functional_program
from graph.zoo import build, hugging_face_names, zoo_names
from tests.quick import FEW_NETWORKS, few

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
NETWORKS = (*zoo_names(), *hugging_face_names())
QUICK = (*FEW_NETWORKS, "xdl", "hf-llama", "hf-resnet")


class _Module(nn.Module):
    """A module whose forward is a function of its parts and inputs."""

    def __init__(self, function: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.weight = nn.Parameter(torch.ones(6))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(self, *args)
        return result


def _described(program: FunctionalProgram | ExportedProgram) -> list[Any]:
    nodes = [
        (
            node.op,
            node.name,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            [tuple(result.shape) for result in _results(node) if node.op != "output"],
        )
        for node in program.graph.nodes
        if node.op != "placeholder" and node.target is not torch.ops.aten._assert_tensor_metadata.default
    ]
    inputs = sorted(zip(_inputs(program), map(str, program.graph_signature.input_specs), strict=True))
    return [inputs, nodes, str(program.graph_signature.output_specs), sorted(program.constants)]


def _inputs(program: FunctionalProgram | ExportedProgram) -> list[str]:
    # A trace may put constants before buffers.
    return [node.name for node in program.graph.nodes if node.op == "placeholder"]


def _results(node: torch.fx.Node) -> list[torch.Tensor]:
    # A call with several results has a node for each that is used.
    result = node.meta.get("val")
    return [result] if isinstance(result, torch.Tensor) else []


def _check(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Compare both ways to a functional program; return whether the first did without a trace."""
    traces: list[object] = []
    seen: list[tuple[bool, FunctionalProgram, ExportedProgram]] = []
    decompose: Callable[..., ExportedProgram] = ExportedProgram.run_decompositions

    def counted(program: ExportedProgram, *given: Any) -> ExportedProgram:
        traces.append(program)
        return decompose(program, *given)

    def compared(program: ExportedProgram) -> FunctionalProgram:
        ours = functional_program(program)
        seen.append((not traces, ours, decompose(program, {})))
        return ours

    with monkeypatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", counted)
        patch.setattr(exporting, "functional_program", compared)
        export(module, args, kwargs, "test")
    ((without_trace, rewritten, traced),) = seen
    assert _described(rewritten) == _described(traced)
    places = _places(rewritten)
    # What was traced in a part of a program is of torch's code for that part, there.
    assert all(
        places.get(name, place) == place
        for name, place in _places(traced).items()
        if "<eval_with_key>" not in place
    )
    return without_trace


def _places(program: FunctionalProgram | ExportedProgram) -> dict[str, str]:
    return {node.name: node.meta["stack_trace"] for node in program.graph.nodes if "stack_trace" in node.meta}


# Taken apart by a trace, as any network with an operator that no rewriting knows: bags, experts, masks filled in place.
TRACED = frozenset({"xdl", "hf-mixtral", "hf-t5"})


@pytest.mark.parametrize("name", few(QUICK, NETWORKS))
def test_networks_are_rewritten_to_what_their_trace_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        module, args, kwargs = build(name, "small")
    assert _check(monkeypatch, module, args, kwargs) == (name not in TRACED)


def _blocks(self: _Module, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    norm, drop, linear = self.parts
    hidden = torch.sigmoid(norm(values)) * values
    hidden = drop(linear(hidden.flatten(1).reshape(4, 3, 10)))
    scores = torch.matmul(hidden, hidden.transpose(1, 2).flatten(1).reshape(4, 10, 3))
    return functional.mse_loss(scores - target, target)


@pytest.mark.parametrize(
    ("dtype", "is_rewritten"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)]
)
def test_views_and_copies_are_told_apart(
    dtype: torch.dtype, *, is_rewritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _Module(_blocks, nn.BatchNorm1d(5), nn.Dropout(0.25), nn.Linear(10, 10)).to(dtype)
    inputs = (torch.zeros(4, 5, 6, dtype=dtype), torch.zeros(4, 3, 3, dtype=dtype))
    assert _check(monkeypatch, module, inputs, {}) is is_rewritten


def _columns(self: _Module, values: torch.Tensor) -> torch.Tensor:
    # Of every second row there is a view, though it is not contiguous.
    return functional.mse_loss((values * self.weight)[:, ::2].flatten(0, 1), values.new_zeros(12, 6))


def _nothing(self: _Module, values: torch.Tensor) -> torch.Tensor:
    hidden = functional.dropout(values * self.weight, 0.0).flatten(2, 2).reshape(4, -1, 6)
    return functional.mse_loss(hidden, values)


@pytest.mark.parametrize("function", [_columns, _nothing])
def test_views_of_rows_and_of_all_need_no_trace(
    function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _check(monkeypatch, _Module(function), (torch.zeros(4, 6, 6),), {})


def _unused(self: _Module, values: torch.Tensor) -> torch.Tensor:
    norm, drop = self.parts
    drop(torch.stack([values, values * 2]).unbind()[0])
    drop(values.reshape(-1, 3))
    return functional.mse_loss(drop(norm(values)), values)


def test_what_nobody_uses_counts_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Module(_unused, nn.BatchNorm1d(6), nn.Dropout(0.25))
    assert _check(monkeypatch, module, (torch.zeros(4, 6, 6),), {})


# What each gives is a number.
_PLAIN: tuple[Callable[[_Module, torch.Tensor], torch.Tensor], ...] = (
    lambda _, x: x.abs().sum(),
    lambda _, x: (x + torch.arange(6) + torch.arange(0, 12, 2)).sum(),
    lambda self, x: functional.conv1d(x, self.weight.expand(2, 6, 6)).mean(),
    lambda self, x: functional.conv_transpose2d(x.unsqueeze(1), self.weight.expand(1, 2, 6, 6)).mean(),
    lambda self, x: torch.addmm(self.weight, x[0], x[1]).mean(),
    lambda _, x: x.clone(memory_format=torch.contiguous_format).mean(),
    lambda _, x: x.cos().mean(),
    lambda _, x: (x * x.detach()).mean(),
    lambda _, x: x.exp().mean(),
    lambda _, x: (x * torch.full((6,), 2.0)).mean(),
    lambda _, x: (x * (torch.arange(6) >= 2)).mean(),
    lambda _, x: (x * (torch.arange(6) > 2)).mean(),
    lambda _, x: functional.hardsigmoid(x).mean(),
    lambda _, x: functional.hardswish(x).mean(),
    lambda _, x: functional.hardtanh(x, 0.0, 2.0).mean(),
    lambda _, x: x[torch.arange(3)].mean(),
    lambda _, x: (x * (torch.arange(6) <= torch.arange(6).unsqueeze(1))).mean(),
    lambda _, x: functional.leaky_relu(x).mean(),
    lambda _, x: x.log().mean(),
    lambda _, x: functional.log_softmax(x, dim=1).mean(),
    lambda _, x: x.masked_fill(torch.zeros(6, dtype=torch.bool), 1.0).mean(),
    lambda _, x: torch.maximum(x, -x).mean(),
    lambda _, x: x.mean(1, keepdim=True).mean(),
    lambda _, x: (x + x.new_zeros(6)).mean(),
    lambda _, x: functional.nll_loss(x, torch.zeros(4, 6, dtype=torch.int64)),
    lambda _, x: (x * torch.ones_like(x)).mean(),
    lambda _, x: functional.pad(x, (1, 2)).mean(),
    lambda _, x: x.pow(3).mean(),
    lambda _, x: (x * torch.rand(6)).mean(),
    lambda _, x: x.rsqrt().mean(),
    lambda _, x: functional.silu(x).mean(),
    lambda _, x: x.sin().mean(),
    lambda _, x: (x[:, 1:3] * x[..., ::2].transpose(1, 2).contiguous()[:, :2]).mean(),
    lambda _, x: functional.softplus(x).mean(),
    lambda _, x: (x.split(3, 2)[0] * x[0].split(3)[1].t()).mean(),
    lambda _, x: x.sqrt().mean(),
    lambda _, x: x.square().mean(),
    lambda _, x: x.sum((0, 1), keepdim=True).sum(),
    lambda _, x: x[0].t().mean(),
    lambda _, x: (x * torch.ones(6, 6).triu(1)).mean(),
    lambda _, x: torch.where(torch.zeros(6, dtype=torch.bool), x, -x).mean(),
)


def test_operators_that_stay_as_they_are_need_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(self: _Module, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([plain(self, values * self.weight) for plain in _PLAIN]).sum()

    assert _check(monkeypatch, _Module(function), (torch.ones(4, 6, 6),), {})


def _recurrent(self: _Module, values: torch.Tensor) -> torch.Tensor:
    return torch.stack([layer(values)[0].mean() for layer in self.parts]).sum()


def test_recurrent_layers_need_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Callable[..., nn.Module]] = [nn.RNN, nn.LSTM, nn.GRU]
    layers = [kind(6, 5, num_layers=2, bidirectional=True, batch_first=True) for kind in kinds]
    assert _check(monkeypatch, _Module(_recurrent, *layers), (torch.ones(4, 6, 6),), {})


class _Rotation(nn.Module):
    """What a rotary embedding does: angles without gradients, from a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies: torch.Tensor
        self.register_buffer("frequencies", torch.ones(6), persistent=False)

    @torch.no_grad()
    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(values.shape[1])[:, None].float() * self.frequencies.to(values.dtype)
        return angles.cos(), angles.sin().to(dtype=values.dtype)


def _rotated(self: _Module, values: torch.Tensor) -> torch.Tensor:
    cosine, sine = self.parts[0](values)
    states = values * self.weight
    # An empty cache of keys, as a constant.
    states = torch.cat([torch.tensor([]), states * cosine + states.to(torch.float32) * sine], dim=-2)
    return functional.mse_loss(states.transpose(1, 2).contiguous().contiguous().to(torch.float64), values)


class _Renewed(nn.Module):
    """A norm that is applied without gradients, and of which the new statistics are read outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = self.norm(values).mean()
        result: torch.Tensor = mean * values.transpose(1, 2) + self.norm.running_mean
        return result


def _normed_apart(self: _Module, values: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(self.parts[0](values * self.weight), values)


def test_a_part_without_gradients_that_updates_buffers_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _check(monkeypatch, _Module(_normed_apart, _Renewed()), (torch.zeros(4, 6, 6),), {})


def test_calls_without_gradients_are_calls_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check(monkeypatch, _Module(_rotated, _Rotation()), (torch.ones(4, 6, 6),), {})


def _residual(self: _Module, values: torch.Tensor) -> torch.Tensor:
    norm, convolution = self.parts
    hidden = norm(convolution((values * self.weight).unsqueeze(1))).relu_()
    shortcut = hidden * 2
    return functional.relu(hidden.add_(shortcut).mul_(0.5), inplace=True).mean()


def _after_a_reader(self: _Module, values: torch.Tensor) -> torch.Tensor:
    hidden = values * self.weight
    double = hidden * 2
    written = functional.hardswish(hidden, inplace=True)
    return (double + hidden * written).mean()


def _others_in_place(self: _Module, values: torch.Tensor) -> torch.Tensor:
    hidden = functional.hardtanh(values * self.weight, 0.0, 2.0, inplace=True)
    hidden = functional.silu(hidden, inplace=True) + functional.leaky_relu(hidden, inplace=True)
    return hidden.add_(self.weight, alpha=2).mean()


@pytest.mark.parametrize("function", [_residual, _after_a_reader, _others_in_place])
def test_results_written_in_place_are_new_results(
    function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _Module(function, nn.BatchNorm2d(2), nn.Conv2d(1, 2, 3))
    assert _check(monkeypatch, module, (torch.ones(4, 6, 6),), {})


def _twice(self: _Module, values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.parts[0](self.parts[0](values)).sum()
    return result


def _count(self: _Module, values: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return (values * self.count * self.weight).sum()


def _scales_a_buffer(self: _Module, values: torch.Tensor) -> torch.Tensor:
    self.count.mul_(2)
    return (values * self.weight).sum()


def _writes_a_view(self: _Module, values: torch.Tensor) -> torch.Tensor:
    hidden = values * self.weight
    return hidden.view(-1).relu_().sum() + hidden.sum()


def _views_what_was_written(self: _Module, values: torch.Tensor) -> torch.Tensor:
    return (values * self.weight).relu_().view(4, -1).sum()


def _writes_an_input(self: _Module, values: torch.Tensor) -> torch.Tensor:
    return (values.add_(1) * self.weight).sum()


def _converts_what_is_written(self: _Module, values: torch.Tensor) -> torch.Tensor:
    return (values * self.weight).add_(torch.ones(6, dtype=torch.float64)).sum()


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (_twice, [nn.BatchNorm1d(6)]),
        (_twice, [nn.BatchNorm1d(6, track_running_stats=False)]),
        (_count, []),
        (_scales_a_buffer, []),
        (_writes_a_view, []),
        (_views_what_was_written, []),
        (_writes_an_input, []),
        (_converts_what_is_written, []),
    ],
)
def test_what_is_not_common_is_traced(
    function: Callable[..., torch.Tensor], parts: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not _check(monkeypatch, _Module(function, *parts), (torch.zeros(4, 6, 6),), {})


def _sum_of_norms(self: _Module, values: torch.Tensor) -> torch.Tensor:
    first, second = self.parts
    return functional.mse_loss(second(first(values)), values)


def test_a_norm_in_evaluation_mode_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Module(_sum_of_norms, nn.BatchNorm1d(6), nn.BatchNorm1d(6).eval())
    assert not _check(monkeypatch, module, (torch.zeros(4, 6, 6),), {})


def test_a_buffer_of_two_names_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_program: ExportedProgram, _table: object) -> ExportedProgram:
        raise RuntimeError("is traced")  # as torch does of such a program, in other words

    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    first, second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    second.running_mean = first.running_mean
    with pytest.raises(ImportFailure, match="is traced"):
        export(_Module(_sum_of_norms, first, second), (torch.zeros(4, 6, 6),), {}, "test")
