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
from graph.zoo import build, zoo_entry, zoo_names
from tests.quick import FEW_NETWORKS, few

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
NETWORKS = [name for name in zoo_names() if not zoo_entry(name).extra]


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
            node.meta.get("stack_trace") if node.op == "call_function" else None,
        )
        for node in program.graph.nodes
    ]
    return [nodes, str(program.graph_signature), sorted(program.constants)]


def _results(node: torch.fx.Node) -> list[torch.Tensor]:
    # A call with several results has a node for each that is used.
    result = node.meta.get("val")
    return [result] if isinstance(result, torch.Tensor) else []


def _check(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Compare both ways to a functional program; return whether the first did without a trace."""
    traces: list[object] = []
    seen: list[tuple[bool, list[Any], list[Any]]] = []
    decompose: Callable[..., ExportedProgram] = ExportedProgram.run_decompositions

    def counted(program: ExportedProgram, *given: Any) -> ExportedProgram:
        traces.append(program)
        return decompose(program, *given)

    def compared(program: ExportedProgram) -> FunctionalProgram:
        ours = functional_program(program)
        seen.append((not traces, _described(ours), _described(decompose(program, {}))))
        return ours

    with monkeypatch.context() as patch:
        patch.setattr(ExportedProgram, "run_decompositions", counted)
        patch.setattr(exporting, "functional_program", compared)
        export(module, args, kwargs, "test")
    ((without_trace, rewritten, traced),) = seen
    assert rewritten == traced
    return without_trace


# Its bags are taken apart by a trace, as any operator that no rewriting knows.
TRACED = frozenset({"xdl"})


@pytest.mark.parametrize("name", few((*FEW_NETWORKS, "xdl"), NETWORKS))
def test_zoo_networks_are_rewritten_to_what_their_trace_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def _unused(self: _Module, values: torch.Tensor) -> torch.Tensor:
    norm, drop = self.parts
    drop(torch.stack([values, values * 2]).unbind()[0])
    drop(values.reshape(-1, 3))
    return functional.mse_loss(drop(norm(values)), values)


def test_what_nobody_uses_counts_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _Module(_unused, nn.BatchNorm1d(6), nn.Dropout(0.25))
    assert _check(monkeypatch, module, (torch.zeros(4, 6, 6),), {})


_PLAIN: dict[str, Callable[[_Module, torch.Tensor], torch.Tensor]] = {
    "abs": lambda _, x: x.abs().sum(),
    "arange": lambda _, x: (x + torch.arange(6) + torch.arange(0, 12, 2)).sum(),
    "conv1d": lambda self, x: functional.conv1d(x, self.weight.expand(2, 6, 6)).mean(),
    "conv_transpose2d": lambda self, x: functional.conv_transpose2d(
        x.unsqueeze(1), self.weight.expand(1, 2, 6, 6)
    ).mean(),
    "cos": lambda _, x: x.cos().mean(),
    "exp": lambda _, x: x.exp().mean(),
    "log": lambda _, x: x.log().mean(),
    "log_softmax": lambda _, x: functional.log_softmax(x, dim=1).mean(),
    "maximum": lambda _, x: torch.maximum(x, -x).mean(),
    "mean": lambda _, x: x.mean(1, keepdim=True).mean(),
    "nll_loss": lambda _, x: functional.nll_loss(x, torch.zeros(4, 6, dtype=torch.int64)),
    "pow": lambda _, x: x.pow(3).mean(),
    "rand": lambda _, x: (x * torch.rand(6)).mean(),
    "rsqrt": lambda _, x: x.rsqrt().mean(),
    "silu": lambda _, x: functional.silu(x).mean(),
    "sin": lambda _, x: x.sin().mean(),
    "softplus": lambda _, x: functional.softplus(x).mean(),
    "sqrt": lambda _, x: x.sqrt().mean(),
    "square": lambda _, x: x.square().mean(),
    "sum": lambda _, x: x.sum((0, 1), keepdim=True).sum(),
    "where": lambda _, x: torch.where(torch.zeros(6, dtype=torch.bool), x, -x).mean(),
}


@pytest.mark.parametrize("name", _PLAIN)
def test_operators_that_stay_as_they_are_need_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(self: _Module, values: torch.Tensor) -> torch.Tensor:
        return _PLAIN[name](self, values * self.weight)

    assert _check(monkeypatch, _Module(function), (torch.ones(4, 6, 6),), {})


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers_need_no_trace(
    kind: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(self: _Module, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.parts[0](values)[0].mean()
        return result

    layer = kind(6, 5, num_layers=2, bidirectional=True, batch_first=True)
    assert _check(monkeypatch, _Module(function, layer), (torch.ones(4, 6, 6),), {})


def _twice(self: _Module, values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = self.parts[0](self.parts[0](values)).sum()
    return result


def _count(self: _Module, values: torch.Tensor) -> torch.Tensor:
    self.count.add_(1)
    return (values * self.count * self.weight).sum()


def _in_place(self: _Module, values: torch.Tensor) -> torch.Tensor:
    return (values * self.weight).relu_().sum()


def _columns(self: _Module, values: torch.Tensor) -> torch.Tensor:
    # Of every second row there is a view, though it is not contiguous.
    return functional.mse_loss((values * self.weight)[:, ::2].flatten(0, 1), values.new_zeros(12, 6))


def _nothing(self: _Module, values: torch.Tensor) -> torch.Tensor:
    hidden = functional.dropout(values * self.weight, 0.0).flatten(2, 2)
    return functional.mse_loss(hidden, values)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (_twice, [nn.BatchNorm1d(6)]),
        (_twice, [nn.BatchNorm1d(6, track_running_stats=False)]),
        (_count, []),
        (_in_place, []),
        (_columns, []),
        (_nothing, []),
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
