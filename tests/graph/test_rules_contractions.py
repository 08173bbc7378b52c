"""Rules of contractions, transposed convolutions, normalizations, recurrent layers and gates against the wholes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from graph import rules
from graph.rules.registry import rule_for
from tests.reference.randoms import floats
from tests.reference.rules import Case, check_case, one_operator

SEEDS = range(12)
EQUATIONS = (
    "bij,bjk->bik",
    "bij,kj->bik",
    "bhqd,bhkd->bhqk",
    "ij,jk",
    "bi,bj,ij->b",
    "bij->bji",
    "bij->",
    "...ij,...jk->...ik",
    "...i,i->...",
    "i,j->ij",
    "bij,bij->b",
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(equation: str, seed: int) -> None:
    generator = random.Random(f"{seed} {equation}")
    sizes = {label: generator.randint(1, 6) for label in "bhijkqd"}
    tensors = []
    for position, term in enumerate(equation.split("->")[0].split(",")):
        # An ellipsis may broadcast.
        free = [1 if position and generator.random() < 0.5 else sizes["b"], 2] if "..." in term else []
        shape = [*free, *(sizes[label] for label in term.replace("...", ""))]
        tensors.append(floats(*shape, seed=seed + position))
    case = Case(
        "aten.einsum.default",
        {"equation": equation, "tensors": tuple(tensors), "path": None},
        tuple(tensors),
        lambda *given: torch.einsum(equation, *given),
    )
    check_case(case, generator)


def test_a_diagonal_runs_whole() -> None:
    x = floats(4, 4, seed=0)
    case = Case(
        "aten.einsum.default",
        {"equation": "ii->i", "tensors": (x,), "path": None},
        (x,),
        lambda x: torch.einsum("ii->i", x),
    )
    graph = one_operator(case, (torch.einsum("ii->i", x),), None)
    assert [axis.name for axis in graph.operators[0].space.axes] == ["replica"]
    reason = rule_for("aten.einsum.default").unsplit_reason(rules.signature(graph, graph.operators[0]))
    assert reason == "runs whole: it takes a diagonal"
    check_case(case, random.Random(0))


@pytest.mark.parametrize("seed", SEEDS)
def test_tensordot(seed: int) -> None:
    generator = random.Random(seed)
    x, y = floats(3, 4, 5, seed=seed), floats(5, 2, 4, seed=seed + 1)
    case = Case(
        "aten.tensordot.default",
        {"self": x, "other": y, "dims_self": (1, -1), "dims_other": (2, 0)},
        (x, y),
        lambda x, y: torch.tensordot(x, y, ([1, 2], [2, 0])),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", ["outer", "mv", "dot"])
def test_products_of_vectors(target: str, seed: int) -> None:
    generator = random.Random(seed)
    size = generator.randint(2, 7)
    second = floats(size, seed=seed + 1)
    first = floats(generator.randint(1, 5), size, seed=seed) if target == "mv" else floats(size, seed=seed)
    name = {"outer": "vec2", "mv": "vec", "dot": "tensor"}[target]
    function = getattr(torch, target)
    check_case(
        Case(f"aten.{target}.default", {"self": first, name: second}, (first, second), function), generator
    )


@pytest.mark.parametrize("seed", range(40))
def test_transposed_convolution_along_all_axes(seed: int) -> None:
    """Spatial blocks, groups, output channels, and sums over input channels."""
    generator = random.Random(seed)
    spatial = generator.randint(1, 3)
    groups = generator.choice((1, 1, 2, 3))
    channels, out = groups * generator.randint(1, 3), generator.randint(1, 3)
    stride = tuple(generator.randint(1, 3) for _ in range(spatial))
    kernel = tuple(generator.randint(1, 4) for _ in range(spatial))
    dilation = tuple(generator.randint(1, 2) for _ in range(spatial))
    extra = tuple(generator.randrange(max(pair)) for pair in zip(stride, dilation, strict=True))
    sizes = tuple(generator.randint(3, 5) for _ in range(spatial))
    padding = []
    for size, length, step, reach, more in zip(sizes, kernel, stride, dilation, extra, strict=True):
        wanted = generator.randint(0, (length - 1) * reach + (seed % 5 == 0))
        # So much that one element is left, at most.
        padding.append(min(wanted, ((size - 1) * step + (length - 1) * reach + more) // 2))
    x = floats(generator.randint(1, 3), channels, *sizes, seed=seed)
    weight = floats(channels, out, *kernel, seed=seed + 1)
    bias = floats(groups * out, seed=seed + 2) if seed % 3 else None
    function = getattr(functional, f"conv_transpose{spatial}d")

    def whole(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = function(x, w, b, stride, padding, extra, groups, dilation)
        return result

    tensors = (x, weight) if bias is None else (x, weight, bias)
    arguments = {
        "input": x,
        "weight": weight,
        "bias": bias,
        "stride": stride,
        "padding": padding,
        "output_padding": extra,
        "groups": groups,
        "dilation": dilation,
    }
    target = f"aten.conv_transpose{spatial}d.{'default' if spatial == 1 else 'input'}"
    for _ in range(3):
        check_case(Case(target, arguments, tensors, whole), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_norm(seed: int) -> None:
    generator = random.Random(seed)
    groups, size = generator.randint(1, 6), generator.randint(1, 3)
    rest = [generator.randint(2, 4) for _ in range(generator.randint(1, 2))]
    x = floats(generator.randint(1, 4), groups * size, *rest, seed=seed)
    vectors = (floats(groups * size, seed=seed + 1), floats(groups * size, seed=seed + 2)) if seed % 3 else ()
    weight, bias = vectors or (None, None)
    arguments = {
        "input": x,
        "num_groups": groups,
        "weight": weight,
        "bias": bias,
        "eps": 1e-5,
        "cudnn_enabled": True,
    }
    case = Case(
        "aten.group_norm.default",
        arguments,
        (x, *vectors),
        lambda x, *v: functional.group_norm(x, groups, *v),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_instance_norm(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(generator.randint(1, 4), generator.randint(1, 5), 3, 4, seed=seed)
    vectors = (floats(x.shape[1], seed=seed + 1), floats(x.shape[1], seed=seed + 2)) if seed % 3 else ()
    weight, bias = vectors or (None, None)
    arguments = {
        "input": x,
        "weight": weight,
        "bias": bias,
        "running_mean": None,
        "running_var": None,
        "use_input_stats": True,
        "momentum": 0.1,
        "eps": 1e-5,
        "cudnn_enabled": True,
    }
    case = Case(
        "aten.instance_norm.default",
        arguments,
        (x, *vectors),
        lambda x, *v: functional.instance_norm(x, None, None, *v),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layer(kind: str, batch_first: bool, seed: int) -> None:  # noqa: FBT001 - pytest's
    generator = random.Random(seed)
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    samples, steps, width, hidden = (generator.randint(1, 5) for _ in range(4))
    both = seed % 2
    shape = (samples, steps) if batch_first else (steps, samples)
    x = floats(*shape, width, seed=seed)
    states = tuple(
        floats(1 + both, samples, hidden, seed=seed + 1 + position)
        for position in range(1 + (kind == "lstm"))
    )
    sizes = ((gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
    weights = tuple(
        floats(*size, seed=seed + 10 + position) for position, size in enumerate(sizes * (1 + both))
    )
    settings: dict[str, Any] = {
        "has_biases": True,
        "num_layers": 1,
        "dropout": 0.0,
        "train": True,
        "bidirectional": bool(both),
        "batch_first": batch_first,
    }
    function = getattr(torch, kind)

    def whole(x: torch.Tensor, *rest: torch.Tensor) -> list[torch.Tensor]:
        begin = list(rest[: len(states)]) if kind == "lstm" else rest[0]
        return list(function(x, begin, list(rest[len(states) :]), *settings.values()))

    arguments = {"input": x, "hx": states if kind == "lstm" else states[0], "params": weights, **settings}
    check_case(Case(f"aten.{kind}.input", arguments, (x, *states, *weights), whole), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_trained_slopes(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(generator.randint(1, 4), generator.randint(1, 5), *((3,) * generator.randint(0, 2)), seed=seed)
    weight = floats(generator.choice((1, x.shape[1])), seed=seed + 1)
    case = Case("aten.prelu.default", {"self": x, "weight": weight}, (x, weight), functional.prelu)
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_gates(seed: int) -> None:
    generator = random.Random(seed)
    dim = generator.randrange(3)
    shape = [generator.randint(1, 5) for _ in range(3)]
    shape[dim] *= 2
    x = floats(*shape, seed=seed)
    case = Case("aten.glu.default", {"self": x, "dim": dim - 3}, (x,), lambda x: functional.glu(x, dim))
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_divergence(seed: int, reduction: str) -> None:
    generator = random.Random(seed)
    x, y = floats(4, 5, seed=seed), floats(4, 5, seed=seed + 1)
    arguments = {"self": x, "target": y, "reduction": {"mean": 1, "sum": 2}[reduction], "log_target": True}

    def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pointwise = y.exp() * (y - x)
        return pointwise.mean() if reduction == "mean" else pointwise.sum()

    check_case(Case("aten.kl_div.default", arguments, (x, y), whole), generator)
