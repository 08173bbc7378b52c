"""Rules of indexing, sorting, counting, grouped products, padding and ranges against the whole operators."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from graph import rules
from graph.axes import AxisKind
from graph.rules.registry import rule_for
from tests.reference.randoms import floats, indexes
from tests.reference.rules import Case, check_case, one_operator

SEEDS = range(24)


def _shape(generator: random.Random, rank: int, most: int = 5) -> list[int]:
    return [generator.randint(1, most) for _ in range(rank)]


def _index_tensors(
    generator: random.Random, shape: list[int], seed: int
) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the dims that are indexed, index tensors that broadcast to one shape, and the indices argument."""
    dims = sorted(generator.sample(range(len(shape)), generator.randint(1, min(3, len(shape)))))
    common = _shape(generator, generator.randint(1, 2))
    tensors = []
    for position, dim in enumerate(dims):
        own = [generator.choice([1, size]) if position else size for size in common]
        own = own[generator.randint(0, len(own) - 1) :] if position else own
        tensors.append(indexes(shape[dim], *own, seed=seed + position))
    listed: list[torch.Tensor | None] = [None] * (dims[-1] + 1)
    for dim, tensor in zip(dims, tensors, strict=True):
        listed[dim] = tensor
    return dims, tensors, listed


def _full(listed: list[torch.Tensor | None], rank: int) -> tuple[Any, ...]:
    """Return an index for Python's brackets."""
    items = [slice(None) if item is None else item for item in listed]
    return (*items, *[slice(None)] * (rank - len(items)))


@pytest.mark.parametrize("seed", range(60))
def test_index(seed: int) -> None:
    generator = random.Random(seed)
    shape = _shape(generator, generator.randint(1, 4))
    x = floats(*shape, seed=seed)
    _, tensors, listed = _index_tensors(generator, shape, seed)
    case = Case(
        "aten.index.Tensor",
        {"self": x, "indices": tuple(listed)},
        (x, *tensors),
        lambda x, *_: x[_full(listed, len(shape))],
    )
    for _ in range(2):
        check_case(case, generator)


def test_several_indexes_split_like_their_own_dims() -> None:
    x, rows, columns = floats(5, 7, 3, seed=0), indexes(5, 4, 1, seed=1), indexes(7, 6, seed=2)
    case = Case(
        "aten.index.Tensor",
        {"self": x, "indices": (rows, columns)},
        (x, rows, columns),
        lambda x, r, c: x[r, c],
    )
    space = one_operator(case, (x[rows, columns],), None).operators[0].space
    assert [axis.size for axis in space.axes[:-1]] == [4, 6, 3]


def test_index_by_a_mask_runs_whole_and_says_so() -> None:
    x, mask = floats(4, 3, seed=0), torch.tensor([True, False, True, True])
    case = Case("aten.index.Tensor", {"self": x, "indices": (mask,)}, (x, mask), lambda x, m: x[m])
    graph = one_operator(case, (x[mask],), None)
    operator = graph.operators[0]
    assert [axis.kind for axis in operator.space.axes] == [AxisKind.REPLICA]
    assert rule_for(operator.target).unsplit_reason(rules.signature(graph, operator)) == (
        "runs whole: it is indexed by a mask"
    )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_index_put(seed: int, accumulate: bool) -> None:  # noqa: FBT001
    generator = random.Random(seed)
    shape = _shape(generator, generator.randint(1, 3))
    x = floats(*shape, seed=seed)
    _, tensors, listed = _index_tensors(generator, shape, seed)
    if not accumulate:  # which of two values written to one place stays is not defined
        dim = generator.randrange(len(shape))
        permutation = torch.randperm(shape[dim], generator=torch.Generator().manual_seed(seed))
        tensors, listed = [permutation], [None] * dim + [permutation]
    written = x.detach()[_full(listed, len(shape))]
    sizes = [generator.choice([1, size]) for size in written.shape]
    values = floats(*sizes[generator.randint(0, len(sizes)) :], seed=seed + 9)

    def reference(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        result = x.clone()
        if accumulate:
            return torch.ops.aten.index_put.default(x, listed, rest[-1], accumulate)  # type: ignore[no-any-return]
        result[_full(listed, len(shape))] = rest[-1]
        return result

    case = Case(
        "aten.index_put.default",
        {"self": x, "indices": tuple(listed), "values": values, "accumulate": accumulate},
        (x, *tensors, values),
        reference,
    )
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_index_add(seed: int) -> None:
    generator = random.Random(seed)
    shape = _shape(generator, generator.randint(1, 3))
    dim = generator.randrange(len(shape))
    x = floats(*shape, seed=seed)
    index = indexes(shape[dim], generator.randint(1, 7), seed=seed)
    source = floats(*shape[:dim], len(index), *shape[dim + 1 :], seed=seed + 1)
    alpha = generator.choice([1, 2.5])
    case = Case(
        "aten.index_add.default",
        {"self": x, "dim": dim - len(shape), "index": index, "source": source, "alpha": alpha},
        (x, index, source),
        lambda x, i, s: x.index_add(dim, i, s, alpha=alpha),
    )
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_sort(seed: int) -> None:
    generator = random.Random(seed)
    shape = _shape(generator, 3)
    dim, descending = generator.randint(-3, 2), generator.random() < 0.5
    x = floats(*shape, seed=seed)
    arguments = {"self": x, "stable": True, "dim": dim, "descending": descending}
    check_case(
        Case(
            "aten.sort.stable",
            arguments,
            (x,),
            lambda x: torch.sort(x, dim=dim, descending=descending, stable=True),
        ),
        generator,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_topk(seed: int) -> None:
    generator = random.Random(seed)
    shape = _shape(generator, 3)
    dim, largest = generator.randint(-3, 2), generator.random() < 0.5
    x = floats(*shape, seed=seed)
    k = generator.randint(1, shape[dim])
    arguments = {"self": x, "k": k, "dim": dim, "largest": largest, "sorted": True}
    check_case(
        Case("aten.topk.default", arguments, (x,), lambda x: torch.topk(x, k, dim, largest)), generator
    )


@pytest.mark.parametrize("whole_numbers", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_histogram(seed: int, whole_numbers: bool) -> None:  # noqa: FBT001
    generator = random.Random(seed)
    shape = _shape(generator, generator.randint(1, 2), most=9)
    x = indexes(6, *shape, seed=seed) if whole_numbers else floats(*shape, seed=seed, gradient=False)
    low, high, bins = (0, 6, 6) if whole_numbers else (-2, 2, generator.randint(1, 5))
    case = Case(
        "aten.histc.default",
        {"self": x, "bins": bins, "min": low, "max": high},
        (x,),
        lambda x: torch.histc(x.double(), bins, low, high).to(x.dtype),
    )
    check_case(case, generator)


def test_histogram_over_the_inputs_own_range_runs_whole() -> None:
    x = floats(4, seed=0, gradient=False)
    case = Case("aten.histc.default", {"self": x, "bins": 3, "min": 0, "max": 0}, (x,), torch.histc)
    graph = one_operator(case, (torch.histc(x, 3),), None)
    assert len(graph.operators[0].space.axes) == 1


def _grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Every row times the weight of its group, row by row; rows of no group are zero."""
    rows = []
    for row in range(x.shape[0]):
        groups = [group for group, end in enumerate(ends.tolist()) if row < end]
        rows.append(x[row] @ weight[groups[0]] if groups else x.new_zeros(weight.shape[2]))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(60))
def test_grouped_product(seed: int) -> None:
    generator = random.Random(seed)
    rows, experts, contracted, channels = _shape(generator, 4, most=6)
    x, weight = floats(rows, contracted, seed=seed), floats(experts, contracted, channels, seed=seed + 1)
    ends = torch.tensor(sorted(generator.randint(0, rows) for _ in range(experts)), dtype=torch.int32)
    if seed % 2:
        ends[-1] = rows
    case = Case(
        "soapstone.grouped_mm", {"self": x, "mat2": weight, "offs": ends}, (x, weight, ends), _grouped
    )
    for _ in range(3):
        check_case(case, generator)


def test_grouped_product_costs_its_share_of_the_experts() -> None:
    x, weight, ends = floats(8, 3, seed=0), floats(4, 3, 5, seed=1), torch.tensor([2, 4, 6, 8])
    case = Case(
        "soapstone.grouped_mm", {"self": x, "mat2": weight, "offs": ends}, (x, weight, ends), _grouped
    )
    graph = one_operator(case, (_grouped(x, weight, ends),), None)
    operator = graph.operators[0]
    assert [axis.name for axis in operator.space.axes[:-1]] == ["sample", "channel", "in", "expert"]
    assert rules.flops(rules.whole_call(graph, operator)) == 2 * 8 * 3 * 5
    for degrees in ((2, 1, 1, 1, 1), (1, 5, 1, 1, 1), (1, 1, 3, 1, 1), (1, 1, 1, 2, 1)):
        parts = [rules.flops(call) for call in rules.local_calls(graph, operator, degrees)]
        assert sum(parts) == 2 * 8 * 3 * 5


@pytest.mark.parametrize("seed", range(60))
def test_constant_padding(seed: int) -> None:
    generator = random.Random(seed)
    shape = _shape(generator, generator.randint(1, 3), most=6)
    pairs = [
        (generator.randint(-(size // 3), 4), generator.randint(-(size // 3), 4))
        for size in shape[generator.randint(0, len(shape) - 1) :]
    ]
    pad = tuple(width for pair in reversed(pairs) for width in pair)
    x = floats(*shape, seed=seed)
    case = Case(
        "aten.pad.default",
        {"self": x, "pad": pad, "mode": "constant", "value": 1.5},
        (x,),
        lambda x: functional.pad(x, pad, value=1.5),
    )
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_reflecting_padding(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 2), 4, seed=seed)
    pad = (generator.randint(0, 3), generator.randint(0, 3))
    case = Case(
        "aten.pad.default",
        {"self": x, "pad": pad, "mode": "reflect", "value": None},
        (x,),
        lambda x: functional.pad(x, pad, mode="reflect"),
    )
    check_case(case, generator)


@pytest.mark.parametrize("dtype", ["int64", "float32", "float64"])
@pytest.mark.parametrize("seed", SEEDS)
def test_range(seed: int, dtype: str) -> None:
    generator = random.Random(seed)
    whole = dtype == "int64"
    start = generator.randint(-5, 5) if whole else generator.uniform(-5, 5)
    step = generator.choice([-2, 1, 3]) if whole else generator.choice([-0.25, 0.1, 1.0])
    end = start + step * generator.randint(1, 12)
    arguments = {"start": start, "end": end, "step": step, "dtype": dtype}
    case = Case(
        "aten.arange.start_step",
        arguments,
        (),
        lambda: torch.arange(start, end, step, dtype=getattr(torch, dtype)),
    )
    check_case(case, generator, tolerance=1e-6 if dtype == "float32" else 1e-12)
