"""The zoo: trainable at its small sizes, of the published size at its paper sizes, exportable at both."""

import math
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.graph_signature import InputKind

from graph.errors import UsageError
from graph.zoo import build, zoo_entry, zoo_names
from graph.zoo.dlrm import Dlrm
from graph.zoo.nmt import Attention
from graph.zoo.recurrent import UnrolledLstm, mean_cross_entropy
from tests.quick import FEW_NETWORKS, few

# Millions of parameters: the papers, and for the image classifiers torchvision's documentation.
PUBLISHED_MILLIONS = {
    "alexnet": 61.1,
    "inception": 23.8,
    "resnet101": 44.5,
    "vgg16": 138.4,
    "densenet121": 7.98,
    "bert-large": 335.0,
    "gpt2": 124.4,
    "resnext50": 25.03,
}
RECURRENT = ("rnntc", "rnnlm", "nmt")

# Raised inside torch's own copy of an exported program; nothing of ours calls it.
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")


def build_on_meta(
    name: str, preset: str, **overrides: Any
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    with torch.device("meta"):
        return build(name, preset, **overrides)


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def export(name: str, preset: str) -> torch.export.ExportedProgram:
    module, args, kwargs = build_on_meta(name, preset)
    program = torch.export.export(module, args, kwargs, strict=False)
    decomposed: torch.export.ExportedProgram = program.run_decompositions({})
    return decomposed


def check_export(program: torch.export.ExportedProgram, module: nn.Module) -> None:
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    used = [node for node in program.graph.nodes if node.op == "placeholder" and node.users]
    # A tied weight is listed under each of its names, and used under one.
    assert sum(specs[node.name].kind is InputKind.PARAMETER for node in used) == len(
        list(module.parameters())
    )
    assert [
        name for name in program.graph_signature.user_inputs if name not in {node.name for node in used}
    ] == []
    (loss_name,) = program.graph_signature.user_outputs
    (loss,) = (node for node in program.graph.nodes if node.name == loss_name)
    assert loss.meta["val"].shape == ()
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    in_place = [
        node.target
        for node in calls
        if getattr(node.target, "_schema", None) and node.target._schema.is_mutable
    ]
    assert in_place == []
    # In training mode: a network with dropout draws it.
    has_dropout = any(isinstance(part, nn.Dropout) for part in module.modules())
    assert has_dropout == any("native_dropout" in str(node.target) for node in calls)


@pytest.mark.parametrize("name", zoo_names())
def test_small_network_has_a_finite_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    module, args, kwargs = build(name, "small")
    loss = module(*args, **kwargs)
    assert module.training
    assert loss.shape == ()
    assert math.isfinite(loss.item())
    loss.backward()
    for parameter_name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, parameter_name
        assert torch.isfinite(gradient).all(), parameter_name
        # A key's bias adds the same to all scores of a query: softmax does not see it, the exact gradient is 0.
        if not parameter_name.endswith("key.bias"):
            assert gradient.abs().max() > 0, parameter_name


@pytest.mark.parametrize("name", zoo_names())
def test_same_seed_gives_same_network_and_batch(name: str) -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        module, args, kwargs = build(name, "small", batch_size=3)
        losses.append(module(*args, **kwargs).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("name", "millions"), PUBLISHED_MILLIONS.items())
def test_paper_sizes_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    module, _, _ = build_on_meta(name, "paper")
    assert parameter_count(module) / 1e6 == pytest.approx(millions, rel=0.005)


def test_published_code_has_exactly_as_many_parameters() -> None:
    """ResNeXt-50 as torchvision's documentation lists resnext50_32x4d; XDL as its tables and products add up."""
    counts = {name: parameter_count(build_on_meta(name, "paper")[0]) for name in ("resnext50", "xdl")}
    assert counts == {"resnext50": 25_028_904, "xdl": 4 * 1_000_000 * 64 + 256 * 256 * 2 + 256 * 2}


def test_auxiliary_classifier_adds_its_parameters_and_loss() -> None:
    module, _, _ = build_on_meta("inception", "paper", aux=True)
    assert parameter_count(module) / 1e6 == pytest.approx(27.16, rel=0.005)
    # The auxiliary classifier pools 5 x 5 by 3 and convolves 5 x 5, so it needs the full grid of 17 x 17.
    module, args, kwargs = build("inception", "small", batch_size=2, aux=True, image_size=299)
    assert math.isfinite(module(*args, **kwargs).item())


@pytest.mark.parametrize("name", few(FEW_NETWORKS, zoo_names()))
def test_small_network_exports(name: str) -> None:
    check_export(export(name, "small"), build_on_meta(name, "small")[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo_names())
def test_paper_network_exports(name: str) -> None:
    program = export(name, "paper")
    module, args, _ = build_on_meta(name, "paper")
    check_export(program, module)
    assert args[0].shape[0] == zoo_entry(name).batch_size


@pytest.mark.parametrize("name", RECURRENT)
def test_unrolled_steps_share_their_weights(name: str) -> None:
    few, _, _ = build_on_meta(name, "small", steps=2)
    many, _, _ = build_on_meta(name, "small", steps=9)
    assert list(few.state_dict()) == list(many.state_dict())
    assert parameter_count(few) == parameter_count(many)


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_networks_unroll_forty_steps_by_cell(name: str) -> None:
    _, args, _ = build_on_meta(name, "paper")
    assert args[0].shape == (64, 40)
    cells = Counter(str(node.target) for node in export(name, "small").graph.nodes)["aten.lstm_cell.default"]
    assert cells == 3 * 2  # steps x layers of the small preset; nmt: one encoder and one decoder layer


@pytest.mark.parametrize(("name", "output"), [("bert-large", "decoder"), ("gpt2", "output")])
def test_output_layer_is_the_token_embedding(name: str, output: str) -> None:
    module, _, _ = build_on_meta(name, "small")
    assert module.get_submodule(output).weight is module.get_submodule("token_embedding").weight


def test_unrolled_lstm_equals_torch_lstm() -> None:
    torch.manual_seed(1)
    unrolled = UnrolledLstm(layers=2, hidden=5).double()
    reference = nn.LSTM(5, 5, num_layers=2, batch_first=True).double()
    for layer, cell in enumerate(unrolled.cells):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(reference, f"{kind}_l{layer}").data.copy_(cell.get_parameter(kind).data)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    outputs, states = unrolled(list(x.unbind(1)), unrolled.zero_states(3, x))
    expected, (hidden, cells) = reference(x)
    torch.testing.assert_close(torch.stack(outputs, 1), expected)
    torch.testing.assert_close(torch.stack([state[0] for state in states]), hidden)
    torch.testing.assert_close(torch.stack([state[1] for state in states]), cells)


def test_attention_weighs_encoder_states_by_their_dot_products() -> None:
    torch.manual_seed(2)
    attention = Attention(6).double()
    decoder, encoder = torch.randn(2, 6, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    for sample in range(2):
        weights = torch.tensor(
            [math.exp(float(decoder[sample] @ encoder[sample, step])) for step in range(4)]
        )
        context = sum(weights[step] / weights.sum() * encoder[sample, step] for step in range(4))
        assert isinstance(context, torch.Tensor)
        expected = torch.tanh(attention.combine.weight @ torch.cat([context, decoder[sample]]))
        torch.testing.assert_close(attention(decoder, encoder)[sample], expected, rtol=1e-5, atol=1e-6)


def test_mean_cross_entropy_averages_over_batch_and_steps() -> None:
    torch.manual_seed(3)
    logits, targets = torch.randn(4, 3, 7), torch.randint(0, 7, (4, 3))
    expected = nn.functional.cross_entropy(logits.reshape(12, 7), targets.reshape(12))
    torch.testing.assert_close(mean_cross_entropy(list(logits.unbind(1)), targets), expected)


def test_dlrm_multiplies_every_pair_of_vectors_once() -> None:
    module = Dlrm(tables=3, rows=5, dense_features=4, bottom=(6,), top=(8,))
    pairs = [divmod(int(index), 4) for index in module.get_buffer("pairs")]
    assert pairs == [(i, j) for i in range(4) for j in range(i)]


def test_bert_predicts_about_fifteen_percent_of_the_tokens() -> None:
    _, (_, _, targets), _ = build("bert-large", "small", batch_size=5, sequence=128, positions=128)
    share = (targets != -100).float().mean().item()
    assert share == pytest.approx(0.15, abs=0.02)


def test_reading_the_list_imports_no_torch() -> None:
    code = "import sys, graph.zoo; graph.zoo.zoo_names(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_batch_size_and_sizes_override_the_preset() -> None:
    module, args, _ = build_on_meta("mlp", "paper", batch_size=7, widths=(3, 5, 2))
    assert args[0].shape == (7, 3)
    assert parameter_count(module) == 3 * 5 + 5 + 5 * 2 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "lenet"},
            r"model lenet: is unknown, must be alexnet, inception, .*package\.module:factory",
        ),
        ({"name": "mlp", "preset": "large"}, "preset large is unknown, must be paper, small"),
        (
            {"name": "rnnlm", "preset": "small", "layer": 3},
            "size layer is unknown, known are steps, layers, hidden",
        ),
        ({"name": "mlp", "batch_size": 0}, "batch size is 0, must be at least 1"),
    ],
)
def test_what_does_not_exist_is_named_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build(**arguments)
    assert "\n" not in str(caught.value)
