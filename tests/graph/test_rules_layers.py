"""Rules of products, recurrent cells, lookups, attention and normalization against the whole operators."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from graph import rules
from tests.reference.cells import recurrent_cell
from tests.reference.randoms import floats, indexes
from tests.reference.rules import Case, check_case, one_operator

SEEDS = range(12)


@pytest.mark.parametrize("seed", range(24))
def test_linear(seed: int) -> None:
    generator = random.Random(seed)
    leading = [generator.randint(1, 4) for _ in range(generator.randint(0, 3))]
    features, channels = generator.randint(1, 6), generator.randint(1, 6)
    x, weight = floats(*leading, features, seed=seed), floats(channels, features, seed=seed + 1)
    bias = floats(channels, seed=seed + 2) if generator.random() < 0.7 else None
    tensors = (x, weight) if bias is None else (x, weight, bias)
    case = Case(
        "aten.linear.default", {"input": x, "weight": weight, "bias": bias}, tensors, functional.linear
    )
    for _ in range(2):
        check_case(case, generator)


def test_bias_is_added_by_one_part_of_a_split_reduction() -> None:
    x, weight, bias = floats(2, 4, seed=0), floats(3, 4, seed=1), floats(3, seed=2)
    case = Case(
        "aten.linear.default",
        {"input": x, "weight": weight, "bias": bias},
        (x, weight, bias),
        functional.linear,
    )
    graph = one_operator(case, (functional.linear(x, weight, bias),), None)
    calls = rules.local_calls(graph, graph.operators[0], (1, 1, 2, 1))
    assert [call.argument("bias") is None for call in calls] == [False, True]
    assert [call.gradients for call in calls] == [(True, True, True), (True, True, False)]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("name", ["mm", "bmm", "matmul"])
def test_products(seed: int, name: str) -> None:
    generator = random.Random(seed)
    rows, inner, columns, batch = (generator.randint(1, 5) for _ in range(4))
    left: list[int] = [rows, inner]
    right: list[int] = [inner, columns]
    if name == "bmm":
        left, right = [batch, *left], [batch, *right]
    elif name == "matmul":
        left = [generator.choice([1, batch]) for _ in range(generator.randint(0, 2))] + left
        right = [batch for _ in range(generator.randint(0, 2))] + right
        if generator.random() < 0.3:
            right = [inner]
        elif generator.random() < 0.3:
            left = [inner]
    x, y = floats(*left, seed=seed), floats(*right, seed=seed + 1)
    second = "other" if name == "matmul" else "mat2"
    case = Case(f"aten.{name}.default", {"self": x, second: y}, (x, y), torch.matmul)
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", range(24))
def test_added_products(seed: int) -> None:
    generator = random.Random(seed)
    rows, inner, columns, batch = (generator.randint(1, 5) for _ in range(4))
    beta, alpha = generator.choice([1, 2]), generator.choice([1, 1, 3])
    if generator.random() < 0.5:
        left, right = floats(rows, inner, seed=seed), floats(inner, columns, seed=seed + 1)
        added = floats(*generator.choice([[columns], [rows, columns], [1, columns]]), seed=seed + 2)
        arguments: dict[str, Any] = {"self": added, "mat1": left, "mat2": right, "beta": beta, "alpha": alpha}
        target = "aten.addmm.default"
    else:
        left, right = floats(batch, rows, inner, seed=seed), floats(batch, inner, columns, seed=seed + 1)
        added = floats(*generator.choice([[columns], [batch, rows, columns], [1, 1, columns]]), seed=seed + 2)
        arguments = {"self": added, "batch1": left, "batch2": right, "beta": beta, "alpha": alpha}
        target = "aten.baddbmm.default"
    case = Case(target, arguments, (added, left, right), lambda s, a, b: beta * s + alpha * (a @ b))
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
def test_recurrent_cells(seed: int, name: str) -> None:
    generator = random.Random(seed)
    case = recurrent_cell(generator, seed, name)
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("padding", [-1, 0, 4])
def test_embedding(seed: int, padding: int) -> None:
    generator = random.Random(seed)
    table = floats(generator.randint(5, 9), generator.randint(1, 5), seed=seed)
    ids = indexes(
        table.shape[0], *[generator.randint(1, 4) for _ in range(generator.randint(0, 2))], seed=seed
    )
    arguments = {
        "weight": table,
        "indices": ids,
        "padding_idx": padding,
        "scale_grad_by_freq": False,
        "sparse": False,
    }
    case = Case(
        "aten.embedding.default",
        arguments,
        (table, ids),
        lambda w, i: functional.embedding(i, w, None if padding < 0 else padding),
    )
    for _ in range(2):
        check_case(case, generator)


def _attention(generator: random.Random, seed: int, *, causal: bool, grouped: bool) -> Case:
    batch, groups, heads = generator.randint(1, 3), generator.randint(1, 2), generator.randint(1, 3)
    rows, size = generator.randint(1, 6), generator.randint(1, 4)
    keys = rows if causal else generator.randint(1, 6)
    query_heads = heads * groups if grouped else heads
    query = floats(batch, query_heads, rows, size, seed=seed)
    key, value = (
        floats(batch, heads, keys, size, seed=seed + 1),
        floats(batch, heads, keys, size, seed=seed + 2),
    )
    mask = None
    if not causal and generator.random() < 0.5:
        shape = generator.choice([[rows, keys], [batch, 1, 1, keys], [batch, query_heads, rows, keys]])
        mask = floats(*shape, seed=seed + 3, gradient=False)
    scale = generator.choice([None, 0.3])
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "dropout_p": 0.0,
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": grouped,
    }
    return Case(
        "aten.scaled_dot_product_attention.default",
        arguments,
        (query, key, value) if mask is None else (query, key, value, mask),
        lambda q, k, v, m=None: functional.scaled_dot_product_attention(
            q, k, v, m, 0.0, causal, scale=scale, enable_gqa=grouped
        ),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention(seed: int, *, causal: bool, grouped: bool) -> None:
    generator = random.Random(seed)
    case = _attention(generator, seed, causal=causal, grouped=grouped)
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_layer_norm(seed: int) -> None:
    generator = random.Random(seed)
    shape = [generator.randint(1, 4) for _ in range(generator.randint(1, 2))]
    normalized = [generator.randint(2, 4) for _ in range(generator.randint(1, 2))]
    x = floats(*shape, *normalized, seed=seed)
    weight, bias = floats(*normalized, seed=seed + 1), floats(*normalized, seed=seed + 2)
    arguments = {
        "input": x,
        "normalized_shape": tuple(normalized),
        "weight": weight,
        "bias": bias,
        "eps": 1e-5,
        "cudnn_enable": False,
    }
    case = Case(
        "aten.layer_norm.default",
        arguments,
        (x, weight, bias),
        lambda x, w, b: functional.layer_norm(x, normalized, w, b),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_group_norm(seed: int) -> None:
    generator = random.Random(seed)
    x, weight, bias = floats(3, 6, 2, 2, seed=seed), floats(6, seed=seed + 1), floats(6, seed=seed + 2)
    groups = generator.choice([1, 2, 3])
    arguments = {
        "input": x,
        "num_groups": groups,
        "weight": weight,
        "bias": bias,
        "eps": 1e-5,
        "cudnn_enabled": False,
    }
    case = Case(
        "aten.group_norm.default",
        arguments,
        (x, weight, bias),
        lambda x, w, b: functional.group_norm(x, groups, w, b),
    )
    check_case(case, generator)
