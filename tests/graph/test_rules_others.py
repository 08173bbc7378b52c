"""Rules of less common operators against the whole operators, and the costs of local calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from graph import rules
from tests.reference.randoms import floats, indexes
from tests.reference.rules import Case, check_case, one_operator

SEEDS = range(8)
ONE: dict[str, tuple[str, dict[str, Any], Callable[..., Any]]] = {
    "roll": (
        "aten.roll.default",
        {"shifts": (1, 2), "dims": (1, -1)},
        lambda x: x.roll((1, 2), (1, -1)),
    ),
    "flip": ("aten.flip.default", {"dims": (0, 2)}, lambda x: x.flip((0, 2))),
    "pad": (
        "aten.pad.default",
        {"pad": (1, 2, 0, 1), "mode": "constant", "value": 0.5},
        lambda x: functional.pad(x, (1, 2, 0, 1), value=0.5),
    ),
    "constant_pad": (
        "aten.constant_pad_nd.default",
        {"pad": (0, 0, 2, 1, 0, 1), "value": 0},
        lambda x: functional.pad(x, (0, 0, 2, 1, 0, 1)),
    ),
    "maximum": ("aten.max.dim", {"dim": 1, "keepdim": False}, lambda x: list(x.max(1))),
    "minimum": ("aten.min.dim", {"dim": -1, "keepdim": True}, lambda x: list(x.min(-1, keepdim=True))),
    "product": (
        "aten.prod.dim_int",
        {"dim": 2, "keepdim": False, "dtype": None},
        lambda x: x.prod(2),
    ),
    "norm": (
        "aten.linalg_vector_norm.default",
        {"ord": 2, "dim": (1, 3), "keepdim": False, "dtype": None},
        lambda x: torch.linalg.vector_norm(x, 2, (1, 3)),
    ),
    "variance": (
        "aten.var.correction",
        {"dim": (1,), "correction": 1, "keepdim": True},
        lambda x: x.var(1, keepdim=True),
    ),
    "argmax": ("aten.argmax.default", {"dim": 1, "keepdim": False}, lambda x: x.argmax(1)),
    "upsample": (
        "aten.upsample_bilinear2d.vec",
        {"output_size": None, "align_corners": False, "scale_factors": (2.0, 2.0)},
        lambda x: functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
    ),
    "pixel_shuffle": (
        "aten.pixel_shuffle.default",
        {"upscale_factor": 2},
        lambda x: functional.pixel_shuffle(x, 2),
    ),
    "adaptive_max_pool": (
        "aten.adaptive_max_pool2d.default",
        {"output_size": (2, 2)},
        lambda x: list(functional.adaptive_max_pool2d(x, 2, return_indices=True)),
    ),
}


@pytest.mark.parametrize("name", ONE)
def test_operators_of_one_tensor(name: str) -> None:
    target, settings, function = ONE[name]
    first = "input" if name == "upsample" else "self"
    for seed in SEEDS:
        generator = random.Random(seed)
        channels = 4 * generator.randint(1, 2) if name == "pixel_shuffle" else generator.randint(2, 5)
        x = floats(
            generator.randint(2, 4), channels, generator.randint(2, 4), generator.randint(3, 4), seed=seed
        )
        check_case(Case(target, {first: x, **settings}, (x,), function), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_transposed_convolution(seed: int) -> None:
    generator = random.Random(seed)
    x, weight = floats(generator.randint(1, 4), 4, 5, 5, seed=seed), floats(4, 2, 3, 3, seed=seed + 1)
    bias = floats(4, seed=seed + 2)
    arguments = {
        "input": x,
        "weight": weight,
        "bias": bias,
        "stride": (2, 2),
        "padding": (1, 1),
        "output_padding": (1, 1),
        "groups": 2,
        "dilation": (1, 1),
    }
    case = Case(
        "aten.conv_transpose2d.input",
        arguments,
        (x, weight, bias),
        lambda x, w, b: functional.conv_transpose2d(x, w, b, 2, 1, 1, 2),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_rms_norm(seed: int) -> None:
    x, weight = floats(3, 4, 5, seed=seed), floats(5, seed=seed + 1)
    arguments = {"input": x, "normalized_shape": (5,), "weight": weight, "eps": 1e-5}
    case = Case(
        "aten.rms_norm.default", arguments, (x, weight), lambda x, w: functional.rms_norm(x, (5,), w, 1e-5)
    )
    check_case(case, random.Random(seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "settings", "function"),
    [
        ("l1_loss", {}, functional.l1_loss),
        ("huber_loss", {"delta": 0.5}, lambda x, y: functional.huber_loss(x, y, delta=0.5)),
        ("soft_margin_loss", {}, functional.soft_margin_loss),
    ],
)
def test_mean_losses(
    seed: int, name: str, settings: dict[str, Any], function: Callable[..., torch.Tensor]
) -> None:
    generator = random.Random(seed)
    x, y = floats(4, 3, seed=seed), floats(4, 3, seed=seed + 1, gradient=False)
    arguments = {"self": x, "target": y, "reduction": 1, **settings}
    check_case(Case(f"aten.{name}.default", arguments, (x, y), function), generator)


def test_binary_cross_entropy_of_probabilities() -> None:
    for seed in SEEDS:
        x = floats(4, 3, seed=seed).detach().sigmoid().requires_grad_()
        y = indexes(2, 4, 3, seed=seed).double()
        arguments = {"self": x, "target": y, "weight": None, "reduction": 1}
        case = Case("aten.binary_cross_entropy.default", arguments, (x, y), functional.binary_cross_entropy)
        check_case(case, random.Random(seed))


def test_ratio_and_constant() -> None:
    sums = floats(2, seed=0)
    case = Case("soapstone.ratio", {"self": sums, "dtype": "float64"}, (sums,), lambda s: s[0] / s[1])
    check_case(case, random.Random(0), degrees=(2,))
    given = {"data": (1.0, 2.0, 3.0, 4.0), "size": (2, 2), "dtype": "float64"}
    constant = Case("soapstone.constant", given, (), lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double())
    check_case(constant, random.Random(0), degrees=(3,))


def _cost_cases() -> dict[str, Case]:
    image, weight, grouped = (
        floats(2, 4, 7, 7, seed=0),
        floats(6, 4, 3, 3, seed=1),
        floats(6, 2, 3, 3, seed=2),
    )
    settings = {"bias": None, "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1)}
    query, key = floats(2, 3, 5, 4, seed=3), floats(2, 3, 6, 4, seed=4)
    left, right = floats(2, 3, 4, seed=5), floats(2, 4, 5, seed=6)
    return {
        "conv2d": Case(
            "aten.conv2d.default",
            {"input": image, "weight": weight, **settings, "groups": 1},
            (image, weight),
            lambda x, w: functional.conv2d(x, w, None, 2, 1),
        ),
        "grouped conv2d": Case(
            "aten.conv2d.default",
            {"input": image, "weight": grouped, **settings, "groups": 2},
            (image, grouped),
            lambda x, w: functional.conv2d(x, w, None, 2, 1, 1, 2),
        ),
        "bmm": Case("aten.bmm.default", {"self": left, "mat2": right}, (left, right), torch.bmm),
        "linear": Case(
            "aten.linear.default",
            {"input": left, "weight": floats(7, 4, seed=7), "bias": None},
            (left, floats(7, 4, seed=7)),
            functional.linear,
        ),
        "attention": Case(
            "aten.scaled_dot_product_attention.default",
            {
                "query": query,
                "key": key,
                "value": key,
                "attn_mask": None,
                "dropout_p": 0.0,
                "is_causal": False,
                "scale": None,
                "enable_gqa": False,
            },
            (query, key, key),
            lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v,
        ),
    }


@pytest.mark.parametrize("name", ["conv2d", "grouped conv2d", "bmm", "attention"])
def test_forward_flops_are_those_that_torch_counts(name: str) -> None:
    """Apart from the softmax, which torch's counter leaves out."""
    case = _cost_cases()[name]
    with FlopCounterMode(display=False) as counter:
        output = case.reference(*case.tensors)
    assert isinstance(output, torch.Tensor)
    graph = one_operator(case, (output,), None)
    call = rules.whole_call(graph, graph.operators[0])
    softmax = 5 * 2 * 3 * 5 * 6 if name == "attention" else 0
    assert rules.flops(call) == counter.get_total_flops() + softmax
    if name != "attention":
        assert rules.backward_flops(call) == 2 * rules.flops(call)


def test_parts_share_the_flops_of_the_whole() -> None:
    case = _cost_cases()["conv2d"]
    output = case.reference(*case.tensors)
    assert isinstance(output, torch.Tensor)
    graph = one_operator(case, (output,), None)
    operator = graph.operators[0]
    whole = rules.flops(rules.whole_call(graph, operator))
    for degrees in ((2, 1, 1, 1, 1, 1), (1, 3, 2, 2, 4, 1), (1, 1, 1, 1, 3, 1)):
        assert sum(rules.flops(call) for call in rules.local_calls(graph, operator, degrees)) == whole


def test_views_move_no_bytes_and_lookups_only_their_rows() -> None:
    x = floats(4, 6, seed=0)
    view = Case("aten.view.default", {"self": x, "size": (24,)}, (x,), lambda x: x.reshape(24))
    graph = one_operator(view, (x.reshape(24),), None)
    assert rules.bytes_moved(rules.whole_call(graph, graph.operators[0])) == 0
    table, ids = floats(1000, 8, seed=1), indexes(1000, 5, seed=2)
    arguments = {
        "weight": table,
        "indices": ids,
        "padding_idx": -1,
        "scale_grad_by_freq": False,
        "sparse": False,
    }
    lookup = Case("aten.embedding.default", arguments, (table, ids), lambda w, i: functional.embedding(i, w))
    graph = one_operator(lookup, (functional.embedding(ids, table),), None)
    assert rules.bytes_moved(rules.whole_call(graph, graph.operators[0])) == 5 * 8 + 2 * 5 * 8 * 8


def test_like_tasks_share_one_call() -> None:
    case = _cost_cases()["bmm"]
    output = case.reference(*case.tensors)
    assert isinstance(output, torch.Tensor)
    graph = one_operator(case, (output,), None)
    calls = rules.local_calls(graph, graph.operators[0], (2, 1, 2, 1, 2))
    assert len(calls) == 8
    assert len({id(call) for call in calls}) == 1
    assert rules.local_calls(graph, graph.operators[0], (2, 1, 2, 1, 2)) is calls
