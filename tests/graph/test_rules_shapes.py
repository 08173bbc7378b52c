"""Rules of views, slices, joins, pointwise operators, reductions and losses against the whole operators."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from graph import rules
from graph.rules.pointwise_targets import POINTWISE, TAGGED
from graph.rules.registry import rule_for
from graph.rules.views import common_factors, segments
from tests.reference.randoms import floats, indexes
from tests.reference.rules import Case, check_case, one_operator

SEEDS = range(12)


def _shape(generator: random.Random, rank: int, most: int = 5) -> list[int]:
    return [generator.randint(1, most) for _ in range(rank)]


def _factorization(generator: random.Random, total: int) -> list[int]:
    """Return a random shape of `total` elements, with ones here and there."""
    shape = []
    while total > 1:
        size = generator.choice([divisor for divisor in range(2, total + 1) if total % divisor == 0])
        shape.append(size)
        total //= size
        if generator.random() < 0.2:
            shape.append(1)
    return shape


@pytest.mark.parametrize("seed", range(60))
def test_view(seed: int) -> None:
    generator = random.Random(seed)
    total = generator.choice([12, 24, 36, 60, 64])
    shape, result = _factorization(generator, total), _factorization(generator, total)
    x = floats(*shape, seed=seed)
    case = Case("aten.view.default", {"self": x, "size": tuple(result)}, (x,), lambda x: x.reshape(result))
    for _ in range(2):
        check_case(case, generator)


def test_view_joins_and_splits_dims_as_products() -> None:
    assert segments([4, 6], [2, 12]) == [(range(2), range(2))]
    assert common_factors([4, 6], [2, 12]) == [2, 2, 6]
    assert common_factors([4, 6], [6, 4]) is None
    x = floats(4, 6, 5, seed=0)
    case = Case("aten.view.default", {"self": x, "size": (6, 4, 5)}, (x,), lambda x: x.reshape(6, 4, 5))
    graph = one_operator(case, (x.reshape(6, 4, 5),), None)
    assert [axis.size for axis in graph.operators[0].space.axes[:-1]] == [5]
    reason = rule_for("aten.view.default").unsplit_reason(rules.signature(graph, graph.operators[0]))
    assert reason is not None
    assert "[4, 6] and [6, 4]" in reason


@pytest.mark.parametrize("seed", SEEDS)
def test_permute(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 4), seed=seed)
    order = list(range(4))
    generator.shuffle(order)
    check_case(
        Case("aten.permute.default", {"self": x, "dims": tuple(order)}, (x,), lambda x: x.permute(order)),
        generator,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_expand(seed: int) -> None:
    generator = random.Random(seed)
    size = _shape(generator, 3)
    x = floats(*[generator.choice([1, length]) for length in size[generator.randint(0, 2) :]], seed=seed)
    arguments = {"self": x, "size": tuple(size), "implicit": False}
    check_case(Case("aten.expand.default", arguments, (x,), lambda x: x.expand(size)), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_select(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 3), seed=seed)
    dim = generator.randint(-3, 2)
    index = generator.randint(-x.shape[dim], x.shape[dim] - 1)
    check_case(
        Case(
            "aten.select.int", {"self": x, "dim": dim, "index": index}, (x,), lambda x: x.select(dim, index)
        ),
        generator,
    )


@pytest.mark.parametrize("seed", range(24))
def test_slice(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 3, most=8), seed=seed)
    dim = generator.randint(0, 2)
    start = generator.choice(
        [None, 0, generator.randint(0, x.shape[dim] - 1), -generator.randint(1, x.shape[dim])]
    )
    end = generator.choice([2**63 - 1, x.shape[dim], -1 if x.shape[dim] > 1 else 1])
    step = generator.randint(1, 3)
    taken = range(x.shape[dim])[start:end:step]
    if not taken:
        end, taken = 2**63 - 1, range(x.shape[dim])[start::step]
    arguments = {"self": x, "dim": dim, "start": start, "end": end, "step": step}
    check_case(
        Case("aten.slice.Tensor", arguments, (x,), lambda x: x.index_select(dim, torch.tensor(list(taken)))),
        generator,
    )


@pytest.mark.parametrize("seed", range(24))
def test_split(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.randint(1, 4)] * generator.randint(1, 4)
    if generator.random() < 0.4:
        sizes.append(generator.randint(1, 4))
    shape = _shape(generator, 3)
    dim = generator.randint(0, 2)
    shape[dim] = sum(sizes)
    x = floats(*shape, seed=seed)
    arguments = {"self": x, "split_sizes": tuple(sizes), "dim": dim}
    check_case(
        Case("aten.split_with_sizes.default", arguments, (x,), lambda x: torch.split(x, sizes, dim)),
        generator,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_unbind_and_stack(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 3), seed=seed)
    dim = generator.randint(0, 2)
    check_case(Case("aten.unbind.int", {"self": x, "dim": dim}, (x,), lambda x: x.unbind(dim)), generator)
    tensors = tuple(floats(2, 3, seed=seed + index) for index in range(generator.randint(2, 3)))
    case = Case(
        "aten.stack.default", {"tensors": tensors, "dim": dim}, tensors, lambda *t: torch.stack(t, dim)
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", range(24))
def test_cat(seed: int) -> None:
    generator = random.Random(seed)
    shape = _shape(generator, 3)
    dim = generator.randint(-3, 2)
    tensors = []
    for index in range(generator.randint(2, 4)):
        shape[dim] = generator.randint(1, 5)
        tensors.append(floats(*shape, seed=seed + index))
    case = Case(
        "aten.cat.default", {"tensors": tensors, "dim": dim}, tuple(tensors), lambda *t: torch.cat(t, dim)
    )
    for _ in range(2):
        check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_lookups(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 3), seed=seed)
    dim = generator.randint(0, 2)
    index = indexes(x.shape[dim], generator.randint(1, 6), seed=seed)
    arguments = {"self": x, "dim": dim, "index": index}
    check_case(
        Case("aten.index_select.default", arguments, (x, index), lambda x, i: x.index_select(dim, i)),
        generator,
    )
    indices = (*([None] * dim), index)
    case = Case(
        "aten.index.Tensor", {"self": x, "indices": indices}, (x, index), lambda x, i: x.index_select(dim, i)
    )
    check_case(case, generator)


def test_pointwise_targets_are_those_of_torch() -> None:
    tagged = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten":
            continue
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        unwanted = {torch.Tag.nondeterministic_seeded, torch.Tag.out}
        if (
            torch.Tag.pointwise in operator.tags
            and not unwanted & set(operator.tags)
            and not operator._schema.is_mutable
        ):
            tagged.add(name)
    assert tagged - {"equal"} == set(TAGGED)  # equal returns one bool
    assert len(POINTWISE) > len(TAGGED)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("aten.add.Tensor", torch.add),
        ("aten.mul.Tensor", torch.mul),
        ("aten.maximum.default", torch.maximum),
        ("aten.pow.Tensor_Tensor", lambda x, y: torch.pow(x, y.round())),
    ],
)
def test_binary_pointwise(seed: int, target: str, function: Callable[..., torch.Tensor]) -> None:
    generator = random.Random(seed)
    shape = _shape(generator, 4)
    x = floats(*shape, seed=seed)
    y = floats(*[generator.choice([1, size]) for size in shape[generator.randint(0, 4) :]], seed=seed + 1)
    if "pow" in target:
        y = y.detach().round()
    names = ("self", "exponent" if "pow" in target else "other")
    arguments: dict[str, Any] = dict(zip(names, (x, y), strict=True))
    check_case(Case(target, arguments, (x, y), function), generator)


@pytest.mark.parametrize(
    ("target", "function", "settings"),
    [
        ("aten.relu.default", torch.relu, {}),
        ("aten.gelu.default", functional.gelu, {"approximate": "tanh"}),
        ("aten.tanh.default", torch.tanh, {}),
        ("aten.sigmoid.default", torch.sigmoid, {}),
        ("aten._to_copy.default", lambda x, **_: x.float(), {"dtype": "float32"}),
        ("aten.div.Scalar", lambda x, other: x / other, {"other": 3}),
        ("aten.clamp.default", torch.clamp, {"min": -0.5, "max": 0.5}),
    ],
)
def test_unary_pointwise(
    target: str, function: Callable[..., torch.Tensor], settings: dict[str, Any]
) -> None:
    for seed in SEEDS:
        generator = random.Random(seed)
        x = floats(*_shape(generator, 3), seed=seed)
        check_case(Case(target, {"self": x, **settings}, (x,), partial(function, **settings)), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_masked_fill(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 3), seed=seed)
    mask = floats(*x.shape, seed=seed + 1, gradient=False) > 0
    arguments = {"self": x, "mask": mask, "value": 2.5}
    case = Case("aten.masked_fill.Scalar", arguments, (x, mask), lambda x, m: x.masked_fill(m, 2.5))
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_where(seed: int) -> None:
    generator = random.Random(seed)
    x, y = floats(3, 4, seed=seed), floats(4, seed=seed + 1)
    condition = floats(3, 1, seed=seed + 2, gradient=False) > 0
    arguments = {"condition": condition, "self": x, "other": y}
    check_case(Case("aten.where.self", arguments, (condition, x, y), torch.where), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_softmax_and_other_operators_along_dims(seed: int) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 4), seed=seed)
    dim = generator.randint(-4, 3)
    along = {"self": x, "dim": dim, "dtype": None}
    check_case(Case("aten.softmax.int", along, (x,), lambda x: x.softmax(dim)), generator)
    check_case(Case("aten.log_softmax.int", along, (x,), lambda x: x.log_softmax(dim)), generator)
    check_case(Case("aten.cumsum.default", along, (x,), lambda x: x.cumsum(dim)), generator)
    check_case(Case("aten.tril.default", {"self": x, "diagonal": 1}, (x,), lambda x: x.tril(1)), generator)
    for keep in (False, True):
        several = {"self": x, "dim": (dim,), "keepdim": keep}
        check_case(Case("aten.amax.default", several, (x,), lambda x: x.amax(dim, keepdim=keep)), generator)  # noqa: B023
        check_case(
            Case("aten.logsumexp.default", several, (x,), lambda x: x.logsumexp(dim, keepdim=keep)),  # noqa: B023
            generator,
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sums_and_means(seed: int, name: str) -> None:
    generator = random.Random(seed)
    x = floats(*_shape(generator, 3), seed=seed)
    dims = tuple(generator.sample(range(-3, 0), generator.randint(1, 3)))
    keep = generator.random() < 0.5
    overload = "dim_IntList" if name == "sum" else "dim"
    arguments = {"self": x, "dim": dims, "keepdim": keep, "dtype": None}
    method = getattr(torch.Tensor, name)
    for _ in range(2):
        check_case(
            Case(f"aten.{name}.{overload}", arguments, (x,), lambda x: method(x, dims, keep)), generator
        )
        check_case(Case(f"aten.{name}.default", {"self": x, "dtype": None}, (x,), method), generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_elementwise_losses(seed: int, reduction: str) -> None:
    generator = random.Random(seed)
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    shape = _shape(generator, 3)
    x, y = floats(*shape, seed=seed), floats(*shape, seed=seed + 1)
    both = {"self": x, "target": y, "reduction": number}
    check_case(
        Case(
            "aten.mse_loss.default", both, (x, y), lambda x, y: functional.mse_loss(x, y, reduction=reduction)
        ),
        generator,
    )
    check_case(
        Case(
            "aten.smooth_l1_loss.default",
            {**both, "beta": 0.7},
            (x, y),
            lambda x, y: functional.smooth_l1_loss(x, y, reduction=reduction, beta=0.7),
        ),
        generator,
    )
    weight = floats(shape[-1], seed=seed + 2, gradient=False).abs()
    arguments = {"self": x, "target": y, "weight": weight, "pos_weight": None, "reduction": number}
    check_case(
        Case(
            "aten.binary_cross_entropy_with_logits.default",
            arguments,
            (x, y, weight),
            lambda x, y, w: functional.binary_cross_entropy_with_logits(x, y, w, reduction=reduction),
        ),
        generator,
    )


def _class_losses(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float]:
    generator = random.Random(seed)
    positions = _shape(generator, generator.randint(0, 2), most=3)
    logits = floats(generator.randint(1, 5), 4, *positions, seed=seed)
    target = indexes(4, logits.shape[0], *positions, seed=seed)
    if generator.random() < 0.5:
        target = torch.where(indexes(3, *target.shape, seed=seed + 1) == 0, -100, target)
    weight = floats(4, seed=seed + 2, gradient=False).abs() if generator.random() < 0.5 else None
    return logits, target, weight, generator.choice([0.0, 0.1])


@pytest.mark.parametrize("seed", range(24))
def test_cross_entropy_sums(seed: int) -> None:
    generator = random.Random(seed)
    logits, target, weight, smoothing = _class_losses(seed)
    arguments = {
        "self": logits,
        "target": target,
        "weight": weight,
        "ignore_index": -100,
        "label_smoothing": smoothing,
    }

    def reference(
        logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        total = functional.cross_entropy(logits, target, weight, reduction="sum", label_smoothing=smoothing)
        counted = torch.ones(4, dtype=torch.float64) if weight is None else weight
        return torch.stack((total, counted[target[target != -100]].sum()))

    tensors = (logits, target) if weight is None else (logits, target, weight)
    check_case(Case("soapstone.cross_entropy_sums", arguments, tensors, reference), generator)
    kept = (target != -100).any()
    sums = reference(*tensors)
    mean = functional.cross_entropy(logits, target, weight, label_smoothing=smoothing)
    assert math.isclose((sums[0] / sums[1]).item(), mean.item()) if kept else bool(mean.isnan())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_cross_entropy_without_mean(seed: int, reduction: str) -> None:
    generator = random.Random(seed)
    logits, target, weight, smoothing = _class_losses(seed)
    arguments = {
        "self": logits,
        "target": target,
        "weight": weight,
        "reduction": {"none": 0, "sum": 2}[reduction],
        "ignore_index": -100,
        "label_smoothing": smoothing,
    }
    case = Case(
        "aten.cross_entropy_loss.default",
        arguments,
        (logits, target) if weight is None else (logits, target, weight),
        lambda x, t, w=None: functional.cross_entropy(
            x, t, w, reduction=reduction, label_smoothing=smoothing
        ),
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_cross_entropy_of_probabilities(seed: int) -> None:
    generator = random.Random(seed)
    logits, target = floats(3, 4, 2, seed=seed), floats(3, 4, 2, seed=seed + 1, gradient=False).softmax(1)
    arguments = {
        "self": logits,
        "target": target,
        "weight": None,
        "ignore_index": -100,
        "label_smoothing": 0.0,
    }
    case = Case(
        "soapstone.cross_entropy_sums",
        arguments,
        (logits, target),
        lambda x, t: torch.stack(
            (functional.cross_entropy(x, t, reduction="sum"), torch.tensor(6.0).double())
        ),
    )
    check_case(case, generator)
    assert torch.allclose(functional.cross_entropy(logits, target), case.reference(logits, target)[0] / 6)


@pytest.mark.parametrize("seed", SEEDS)
def test_factories(seed: int) -> None:
    generator = random.Random(seed)
    size = tuple(_shape(generator, 2))
    full = {"size": size, "fill_value": 2.5, "dtype": "float64"}
    check_case(
        Case("aten.full.default", full, (), lambda: torch.full(size, 2.5, dtype=torch.float64)), generator
    )
    arange = {"start": 1, "end": 7, "step": 2, "dtype": "int64"}
    check_case(Case("aten.arange.start_step", arange, (), lambda: torch.arange(1, 7, 2)), generator)


def test_unknown_operators_run_whole() -> None:
    x = floats(3, 4, seed=0)
    case = Case(
        "aten.renorm.default",
        {"self": x, "p": 2, "dim": 0, "maxnorm": 1.0},
        (x,),
        lambda x: x.renorm(2, 0, 1.0),
    )
    graph = one_operator(case, (x.renorm(2, 0, 1.0),), None)
    assert len(graph.operators[0].space.axes) == 1
    check_case(case, random.Random(0), degrees=(3,))
