"""Rules of lookups, scatters, repetitions, bags and likelihoods against the whole operators."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from profiler.operators.likelihoods import exp_sums, softmax_nll_sums
from tests.reference.randoms import floats, indexes
from tests.reference.rules import Case, check_case

SEEDS = range(12)


def _shapes(generator: random.Random, dim: int) -> tuple[list[int], list[int]]:
    """Return shapes of a tensor and of an index of it along `dim`; now and then the index is smaller elsewhere."""
    shape = [generator.randint(1, 5) for _ in range(3)]
    index = [
        generator.randint(1, 6)
        if d == dim
        else (size if generator.random() < 0.8 else generator.randint(1, size))
        for d, size in enumerate(shape)
    ]
    return shape, index


@pytest.mark.parametrize("seed", SEEDS)
def test_gather(seed: int) -> None:
    generator = random.Random(seed)
    dim = generator.randrange(3)
    shape, sizes = _shapes(generator, dim)
    x, index = floats(*shape, seed=seed), indexes(shape[dim], *sizes, seed=seed + 1)
    arguments = {
        "self": x,
        "dim": generator.choice((dim, dim - 3)),
        "index": index,
        "sparse_grad": False,
    }
    check_case(Case("aten.gather.default", arguments, (x, index), lambda x, i: x.gather(dim, i)), generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["src", "value", "add", "amax", "mean"])
def test_scatter(seed: int, kind: str) -> None:
    generator = random.Random(seed)
    dim = generator.randrange(3)
    shape, sizes = _shapes(generator, dim)
    if kind in ("src", "value"):
        # torch leaves open which of several elements for one place stays: there is one each.
        sizes[dim] = generator.randint(1, shape[dim])
        index = torch.rand(
            *sizes[:dim], shape[dim], *sizes[dim + 1 :], generator=torch.Generator().manual_seed(seed)
        )
        index = index.argsort(dim).narrow(dim, 0, sizes[dim])
    else:
        index = indexes(shape[dim], *sizes, seed=seed + 1)
    x, source = floats(*shape, seed=seed), floats(*sizes, seed=seed + 2)
    arguments: dict[str, Any] = {"self": x, "dim": dim - 3, "index": index, "src": source}
    tensors = (x, index, source)
    if kind == "value":
        arguments = {"self": x, "dim": dim, "index": index, "value": 2.5}
        case = Case("aten.scatter.value", arguments, (x, index), lambda x, i: x.scatter(dim, i, 2.5))
    elif kind == "src":
        case = Case("aten.scatter.src", arguments, tensors, lambda x, i, s: x.scatter(dim, i, s))
    elif kind == "add":
        case = Case("aten.scatter_add.default", arguments, tensors, lambda x, i, s: x.scatter_add(dim, i, s))
    else:
        included = bool(seed % 2)
        arguments |= {"reduce": kind, "include_self": included}
        case = Case(
            "aten.scatter_reduce.two",
            arguments,
            tensors,
            lambda x, i, s: x.scatter_reduce(dim, i, s, kind, include_self=included),
        )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", ["repeat", "tile"])
def test_repetition(seed: int, target: str) -> None:
    generator = random.Random(seed)
    x = floats(*(generator.randint(1, 6) for _ in range(generator.randint(1, 3))), seed=seed)
    more = generator.randint(0, 1)
    times = tuple(generator.randint(1, 3) for _ in range(x.dim() + more))
    if target == "tile" and seed % 3 == 0:
        times = times[-1:]
    name = "repeats" if target == "repeat" else "dims"
    case = Case(
        f"aten.{target}.default", {"self": x, name: times}, (x,), lambda x: getattr(x, target)(*times)
    )
    check_case(case, generator)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padded", [False, True])
def test_embedding_bag(seed: int, mode: str, padded: bool) -> None:  # noqa: FBT001 - pytest's
    generator = random.Random(seed)
    rows, bag = generator.randint(2, 7), generator.randint(1, 4)
    weight = floats(rows, generator.randint(1, 5), seed=seed)
    indices = indexes(rows, generator.randint(1, 5), bag, seed=seed + 1)
    shares = floats(*indices.shape, seed=seed + 2) if mode == "sum" and seed % 2 else None
    padding = generator.randrange(rows) if padded else -1
    arguments = {
        "weight": weight,
        "indices": indices,
        "per_sample_weights": shares,
        "mode": mode,
        "padding_idx": padding,
        "vocabulary": rows,
        "bag": bag,
    }

    def whole(
        weight: torch.Tensor, indices: torch.Tensor, shares: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.embedding_bag(
            indices, weight, mode=mode, per_sample_weights=shares, padding_idx=padding if padded else None
        )

    tensors = (weight, indices) if shares is None else (weight, indices, shares)
    check_case(Case("soapstone.embedding_bag", arguments, tensors, whole), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_bags_of_different_lengths(seed: int) -> None:
    """Offsets are data: the channels split alone."""
    weight, indices = floats(7, 5, seed=seed), indexes(7, 9, seed=seed + 1)
    offsets, shares = torch.tensor([0, 2, 2, 6]), floats(9, seed=seed + 2)
    arguments = {
        "weight": weight,
        "indices": indices,
        "per_sample_weights": shares,
        "mode": "sum",
        "padding_idx": seed % 3 - 1,
        "offsets": offsets,
        "scale_grad_by_freq": False,
        "include_last_offset": False,
    }
    padding = None if seed % 3 == 0 else seed % 3 - 1
    case = Case(
        "soapstone.ragged_embedding_bag",
        arguments,
        (weight, indices, shares, offsets),
        lambda w, i, s, o: functional.embedding_bag(
            i, w, o, mode="sum", per_sample_weights=s, padding_idx=padding
        ),
    )
    check_case(case, random.Random(seed))


def _likelihood(seed: int) -> tuple[random.Random, torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    generator = random.Random(seed)
    classes = generator.randint(2, 7)
    rest = [generator.randint(1, 4) for _ in range(generator.randint(0, 2))]
    batch = generator.randint(1, 5)
    values = floats(batch, classes, *rest, seed=seed)
    target = indexes(classes, batch, *rest, seed=seed + 1)
    weight = floats(classes, seed=seed + 2, gradient=False).abs() if seed % 2 else None
    ignored = generator.choice((-100, 0, classes - 1))
    if ignored == -100:
        target[torch.rand(target.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -100
    return generator, values, target, weight, ignored


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_likelihood(seed: int, reduction: str) -> None:
    generator, values, target, weight, ignored = _likelihood(seed)
    arguments = {
        "self": values,
        "target": target,
        "weight": weight,
        "reduction": {"none": 0, "sum": 2}[reduction],
        "ignore_index": ignored,
    }
    tensors = (values, target) if weight is None else (values, target, weight)
    case = Case(
        "aten.nll_loss_nd.default",
        arguments,
        tensors,
        lambda x, t, w=None: functional.nll_loss(x, t, w, ignore_index=ignored, reduction=reduction),
    )
    check_case(case, generator)


def _of_sums(
    values: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int
) -> dict[str, Any]:
    """Return the arguments of sums of likelihoods."""
    return {
        "self": values,
        "target": target,
        "weight": weight,
        "ignore_index": ignored,
        "classes": values.shape[1],
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_a_mean_likelihood(seed: int) -> None:
    """Their ratio is torch's mean."""
    generator, values, target, weight, ignored = _likelihood(seed)
    arguments = _of_sums(values, target, weight, ignored)
    tensors = (values, target) if weight is None else (values, target, weight)

    def sums(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        shares = torch.ones(x.shape[1], dtype=x.dtype) if w is None else w
        kept = t != ignored
        count = (shares[torch.where(kept, t, 0)] * kept).sum()
        return torch.stack((functional.nll_loss(x, t, w, ignore_index=ignored, reduction="sum"), count))

    check_case(Case("soapstone.nll_sums", arguments, tensors, sums), generator)
    if bool((target != ignored).any()):
        total, count = sums(*tensors)
        expected = functional.nll_loss(values, target, weight, ignore_index=ignored)
        assert torch.allclose(total / count, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_of_exponentials(seed: int) -> None:
    generator, values, *_ = _likelihood(seed)
    scaled = 50 * values.detach()
    check_case(Case("soapstone.exp_sums", {"self": scaled}, (scaled,), lambda x: x.exp().sum(1)), generator)


@pytest.mark.parametrize("seed", SEEDS)
def test_likelihoods_behind_a_softmax_of_split_classes(seed: int) -> None:
    """Losses and gradients are those of torch's cross entropy: the sums of exponentials are of the logits."""
    generator, values, target, weight, ignored = _likelihood(seed)
    denominators = values.detach().exp().sum(1)
    arguments = _of_sums(values, target, weight, ignored) | {"exp_sums": denominators}
    weights = () if weight is None else (weight,)

    def sums(x: torch.Tensor, t: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        shares = others[0] if weights else torch.ones(x.shape[1], dtype=x.dtype)
        total = functional.cross_entropy(x, t, shares, ignore_index=ignored, reduction="sum")
        kept = t != ignored
        return torch.stack((total, (shares[torch.where(kept, t, 0)] * kept).sum()))

    case = Case("soapstone.softmax_nll_sums", arguments, (values, target, *weights, denominators), sums)
    check_case(case, generator)


def test_classes_that_are_masked_in_a_whole_part_add_nothing() -> None:
    """The padding of a vocabulary: the sums of the other parts, their logarithms and all gradients are torch's."""
    logits = torch.randn(4, 6, dtype=torch.float64)
    logits[:, 3:] = float("-inf")
    logits.requires_grad_()
    target = torch.tensor([0, 2, -100, 1])
    expected = functional.cross_entropy(logits, target, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, logits)
    parts = [logits[:, :3], logits[:, 3:]]
    denominators = sum(exp_sums(part) for part in parts)
    assert isinstance(denominators, torch.Tensor)
    sums = sum(
        softmax_nll_sums(part, target, None, -100, 6, denominators, start)
        for part, start in zip(parts, (0, 3), strict=True)
    )
    assert isinstance(sums, torch.Tensor)
    torch.testing.assert_close(sums, torch.stack((expected, torch.tensor(3.0, dtype=torch.float64))))
    torch.testing.assert_close(torch.autograd.grad(sums[0], logits)[0], gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 100.0, -300.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sure", [False, True])
def test_a_softmax_in_two_operators_is_about_as_exact_as_torchs(
    dtype: torch.dtype, offset: float, *, weighted: bool, sure: bool
) -> None:
    """Of logits 40 around an offset, of targets that are any or the likeliest, by far or not, against float64."""
    generator = torch.Generator().manual_seed(3)
    logits = 80 * torch.rand(64, 1000, generator=generator) - 40
    target = torch.randint(1000, (64,), generator=generator)
    if sure:
        logits[torch.arange(64), target] = 40.0 + 20 * torch.rand(64, generator=generator)
    logits = (logits + offset).to(dtype).requires_grad_()
    weight = (torch.rand(1000, generator=generator) + 0.5).to(dtype) if weighted else None
    exact = logits.detach().double().requires_grad_()
    expected = functional.cross_entropy(exact, target, None if weight is None else weight.double())
    sums = softmax_nll_sums(logits, target, weight, -100, 1000, exp_sums(logits))
    ours, torchs = sums[0] / sums[1], functional.cross_entropy(logits, target, weight)
    (of_exact,) = torch.autograd.grad(expected, exact)
    for mine, theirs, true, least in (
        (ours, torchs, expected, 1e-6 * expected.detach()),
        (*(torch.autograd.grad(loss, logits)[0] for loss in (ours, torchs)), of_exact, torch.tensor(0.0)),
    ):
        off, allowed = ((one.detach().double() - true).abs().max() for one in (mine, theirs))
        assert off <= 1.5 * allowed + least


def test_logits_that_have_no_exponential_do_no_harm_where_their_sample_is_ignored() -> None:
    logits = torch.tensor([[800.0, 1.0, 2.0], [-690.0, -691.0, -692.0]], requires_grad=True)
    target = torch.tensor([-100, 1])
    sums = softmax_nll_sums(logits, target, None, -100, 3, exp_sums(logits))
    (gradient,) = torch.autograd.grad(sums[0], logits)
    expected = functional.cross_entropy(logits, target, reduction="sum")
    torch.testing.assert_close(sums[0], expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
