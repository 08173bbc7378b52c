"""Calls that the importer takes apart: recurrent layers, bags of embeddings, mean likelihoods; against the modules."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graph.calls import call_from_json
from graph.errors import ImportFailure
from graph.importer import import_module
from graph.operators import OperatorGraph
from graph.rules import whole_call
from profiler.operators import ExecutionContext
from tests.reference.interpreter import interpret
from tests.reference.rules import random_degrees


class _Module(nn.Module):
    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._function(self, *args)
        return result


def _check(function: Any, args: tuple[torch.Tensor, ...], **parts: nn.Module) -> OperatorGraph:
    """Compare loss and gradients with the module's, whole and in random parts; return the graph."""
    torch.manual_seed(1)
    for part in parts.values():
        for parameter in part.parameters():
            nn.init.normal_(parameter)
    module = _Module(function, **parts).double()
    graph = import_module(module, args, name="test")
    loss = module(*args)
    loss.backward()
    generator = random.Random(0)
    for number in range(6):
        degrees = {
            operator.name: random_degrees(operator.space, generator)
            if number
            else (1,) * len(operator.space.axes)
            for operator in graph.operators
        }
        step = interpret(graph, dict(module.named_parameters()), {}, args, ExecutionContext(), degrees)
        torch.testing.assert_close(step.loss, loss.detach(), rtol=1e-9, atol=1e-9)
        for name, parameter in module.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found = step.gradients.get(name, torch.zeros_like(parameter))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    return graph


def _targets(graph: OperatorGraph) -> list[str]:
    return [operator.target for operator in graph.operators]


def _output_and_last_states(module: Any, x: torch.Tensor, *begin: Any) -> torch.Tensor:
    output, state = module.layers(x, *begin)
    last = state[1] if isinstance(state, tuple) else state
    total: torch.Tensor = output.square().sum() + (last * last.cos()).sum()
    return total


RECURRENT = [
    (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {"bidirectional": True}),
    (nn.GRU, {"batch_first": True, "num_layers": 1}),
    (nn.RNN, {"bidirectional": True, "batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("kind", "options"), RECURRENT)
def test_recurrent_layers_are_unrolled_into_cells(kind: Any, options: dict[str, Any]) -> None:
    """One operator a step, layer and direction, whose samples and hidden units split."""
    layers = kind(4, 3, **{"num_layers": 2, **options})
    x = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    graph = _check(_output_and_last_states, (x,), layers=layers)
    cells = [o for o in graph.operators if o.target.endswith("_cell.default")]
    assert len(cells) == x.shape[layers.batch_first] * layers.num_layers * (1 + layers.bidirectional)
    samples = x.shape[not layers.batch_first]
    assert {tuple(axis.size for axis in cell.space.axes[:-1]) for cell in cells} == {(samples, 3)}


@pytest.mark.parametrize(("kind", "options"), [RECURRENT[0], RECURRENT[2], RECURRENT[4]])
def test_recurrent_layers_of_too_many_steps_stay_one_operator_each(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their samples split; the final states of all layers are joined again."""
    monkeypatch.setattr("graph.importing.recurrent.MOST_CELLS", 19)
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layers = kind(4, 3, 2, **options)
    graph = _check(_output_and_last_states, (x,), layers=layers)
    recurrent = [o for o in graph.operators if o.target.endswith(".input")]
    assert [o.space.axes[0].size for o in recurrent] == [x.shape[not layers.batch_first]] * 2


def test_given_initial_states_reach_their_layers() -> None:
    generator = torch.Generator().manual_seed(0)
    x, hidden, cell = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 2, 4), (4, 2, 3), (4, 2, 3))
    )
    layers = nn.LSTM(4, 3, 2, bidirectional=True)
    _check(lambda m, x, h, c: _output_and_last_states(m, x, (h, c)), (x, hidden, cell), layers=layers)


def test_projected_recurrent_layers() -> None:
    x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _check(lambda m, x: m.layers(x)[0].square().mean(), (x,), layers=nn.LSTM(4, 6, 2, proj_size=3))


def test_dropout_between_recurrent_layers_is_ours() -> None:
    x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))
    module = _Module(lambda m, x: m.layers(x)[0].square().mean(), layers=nn.GRU(4, 3, 3, dropout=0.2))
    targets = _targets(import_module(module, (x,), name="test"))
    assert targets.count("soapstone.dropout") == 2 * len(x)
    assert targets.count("aten.gru_cell.default") == 3 * len(x)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_one_length(mode: str, padding: int | None) -> None:
    tokens = torch.randint(0, 7, (5, 3), generator=torch.Generator().manual_seed(0))
    graph = _check(
        lambda m, t: m.bags(t).square().sum(),
        (tokens,),
        bags=nn.EmbeddingBag(7, 4, mode=mode, padding_idx=padding),
    )
    (bags,) = (operator for operator in graph.operators if operator.target == "soapstone.embedding_bag")
    assert {"sample", "channel"} <= {axis.name for axis in bags.space.axes}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_whose_lengths_are_data(mode: str) -> None:
    tokens = torch.randint(0, 7, (9,), generator=torch.Generator().manual_seed(0))
    graph = _check(
        lambda m, t, o: m.bags(t, o).square().sum(),
        (tokens, torch.tensor([0, 2, 2, 7])),
        bags=nn.EmbeddingBag(7, 4, mode=mode),
    )
    assert "soapstone.ragged_embedding_bag" in _targets(graph)


def test_mean_likelihood_is_a_ratio_of_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    target = torch.tensor([0, 4, 2, 1, 1, 3])

    def loss(module: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(functional.log_softmax(module.head(x), 1), target, ignore_index=1)

    targets = _targets(_check(loss, (x, target), head=nn.Linear(4, 5)))
    assert targets[-2:] == ["soapstone.nll_sums", "soapstone.ratio"]


def test_running_statistics_of_instance_norm_are_refused() -> None:
    module = _Module(
        lambda m, x: m.norm(x).sum(), norm=nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    )
    with pytest.raises(ImportFailure, match=r"updates running statistics.*set track_running_stats=False"):
        import_module(module, (torch.randn(2, 3, 4),), name="test")


def test_the_steps_of_a_recurrent_layer_read_weights_that_are_in_the_caches() -> None:
    torch.manual_seed(0)
    module = _Module(
        lambda self, x: self.head(self.layer(x)[0][:, -1]).square().mean(),
        layer=nn.GRU(4, 5, num_layers=2, batch_first=True),
        head=nn.Linear(5, 3),
    )
    graph = import_module(module, (torch.randn(2, 3, 4),), name="test")
    warm = {
        operator.name for operator, again in zip(graph.operators, graph.rereads_weights, strict=True) if again
    }
    cells = {operator.name for operator in graph.operators if "gru_cell" in operator.target}
    assert len(cells) == 6
    assert warm == cells
    for operator in graph.operators:
        call = whole_call(graph, operator)
        assert call.warm == (operator.name in cells)
        assert call_from_json(call.document) == replace(call, bindings=())
        assert ('"warm":true' in call.key) == call.warm
        assert replace(call, warm=not call.warm).digest != call.digest
