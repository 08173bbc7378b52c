"""Random factories in a forward: torch's distributions, and the same numbers on any split."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from graph.errors import ImportFailure
from graph.importer import import_module
from profiler.operators import ExecutionContext
from profiler.operators.counter_rng import random_numbers
from tests.reference.interpreter import interpret
from tests.reference.rules import Case, check_case, random_degrees

ROWS, COLUMNS = 60, 100
Factory = Callable[[torch.Tensor], torch.Tensor]
FACTORIES: dict[str, Factory] = {
    "rand": lambda x: torch.rand(x.shape[0], x.shape[1], dtype=x.dtype),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "normal": lambda x: torch.normal(-2.0, 0.5, (ROWS, COLUMNS), dtype=x.dtype),
    "normal of means": lambda x: torch.normal(torch.full_like(x, 3.0), 0.1),
    "normal of deviations": lambda x: torch.normal(3.0, torch.full_like(x, 0.1)),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "randint": lambda x: torch.randint(-2, 5, (ROWS, COLUMNS)).to(x.dtype),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randperm": lambda x: torch.randperm(ROWS * COLUMNS).view(ROWS, COLUMNS).to(x.dtype),
    "stochastic depth": lambda x: torch.ones_like(x) * (0.8 + torch.rand(ROWS, 1, dtype=x.dtype)).floor_(),
    "rrelu": lambda x: functional.rrelu(x - 1, training=True),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "torch.distributions": lambda x: torch.distributions.Normal(x, torch.ones_like(x)).rsample(),
    "gumbel softmax": lambda x: functional.gumbel_softmax(torch.zeros_like(x), tau=0.5),
}


class _Drawing(nn.Module):
    """A module whose gradient is what it draws."""

    def __init__(self, factory: Factory) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, COLUMNS))
        self._factory = factory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = (self.weight * self._factory(x)).sum()
        return total


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference of two samples' distribution functions (Kolmogorov and Smirnov)."""
    points = torch.cat([left, right]).unique()
    shares = [
        torch.searchsorted(sample.sort().values, points, right=True) / sample.numel()
        for sample in (left, right)
    ]
    return float((shares[0] - shares[1]).abs().max())


@pytest.mark.parametrize("name", FACTORIES)
def test_draws_are_the_same_on_any_split_and_distributed_as_torchs(name: str) -> None:
    module = _Drawing(FACTORIES[name])
    x = torch.zeros(ROWS, COLUMNS)
    graph = import_module(module, [x], name="drawing")
    assert not graph.unsplit
    draws = {o.name for o in graph.operators if o.target == "soapstone.random"}
    generator, context = random.Random(name), ExecutionContext(seed=5, step=2)
    weights = dict(module.named_parameters())
    whole = interpret(graph, weights, {}, [x], context).gradients["weight"]
    for _ in range(2):
        degrees = {o.name: random_degrees(o.space, generator) for o in graph.operators}
        # Replicated results are added up; what a draw is split into is what counts here.
        degrees = {n: (*d[:-1], 1) if n in draws else (1,) * len(d) for n, d in degrees.items()}
        assert torch.equal(interpret(graph, weights, {}, [x], context, degrees).gradients["weight"], whole)
    other = interpret(graph, weights, {}, [x], ExecutionContext(seed=5, step=3)).gradients["weight"]
    assert not torch.equal(other, whole)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        theirs = FACTORIES[name](x)
    # One row draws once in stochastic depth; the probability of such a distance by chance is below 1e-6.
    independent = ROWS if name == "stochastic depth" else ROWS * COLUMNS
    assert _distance(whole.reshape(-1), theirs.reshape(-1)) < 2.7 * (2 / independent) ** 0.5


@pytest.mark.parametrize("distribution", ["uniform", "normal", "exponential", "integers"])
@pytest.mark.parametrize("seed", range(6))
def test_random_numbers_on_parts(distribution: str, seed: int) -> None:
    generator = random.Random(seed)
    shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(0, 4)))
    dtype = torch.int64 if distribution == "integers" else torch.float64
    context = ExecutionContext(seed=7, step=3)
    full = tuple(((0, size),) for size in shape)
    case = Case(
        "soapstone.random",
        {"distribution": distribution, "size": shape, "dtype": str(dtype).removeprefix("torch.")},
        (),
        lambda: random_numbers(distribution, full, shape, (7, 3, 0), (dtype, torch.device("cpu"))),
    )
    check_case(case, generator, context=context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_of_fewer_bits_are_those_of_float64_rounded(dtype: torch.dtype) -> None:
    """So that a step in another precision draws the same; a uniform number stays below 1, an exponential above 0."""
    shape = (100, 300)
    region, key = tuple(((0, size),) for size in shape), (1, 2, 3)
    for distribution in ("uniform", "normal", "exponential"):
        exact, rounded = (
            random_numbers(distribution, region, shape, key, (kind, torch.device("cpu"))).double()
            for kind in (torch.float64, dtype)
        )
        eps = torch.finfo(dtype).eps
        tiny = torch.finfo(dtype).tiny
        assert bool(((rounded - exact).abs() <= eps * exact.abs().clamp(min=1.0) + tiny).all())
        assert distribution != "uniform" or float(rounded.max()) < 1
        assert distribution != "exponential" or float(rounded.min()) > 0


def test_neighbouring_draws_are_unrelated() -> None:
    shape = (150, 200)
    region = tuple(((0, size),) for size in shape)
    result = (torch.float64, torch.device("cpu"))
    numbers = [random_numbers("normal", region, shape, (s, t, 0), result) for s in (0, 1) for t in (0, 1)]
    pairs = [(numbers[0], other) for other in numbers[1:]]
    pairs += [(numbers[0][1:], numbers[0][:-1]), (numbers[0][:, 1:], numbers[0][:, :-1])]
    for left, right in pairs:
        correlation = torch.corrcoef(torch.stack([left.reshape(-1), right.reshape(-1)]))[0, 1]
        assert abs(float(correlation)) < 5 / 29_000**0.5


def test_distribution_parameters_get_no_gradient_and_reparameterized_draws_do() -> None:
    """As in torch: `torch.normal` of a mean has none; `mean + deviation * randn_like` has."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(6, 5))
            self.deviation = nn.Parameter(torch.ones(6, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sample = self.mean + self.deviation * torch.randn_like(self.mean)
            return (x * sample).sum() + torch.normal(self.mean, 1.0).square().sum()

    module, x = Encoder().double(), torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    graph = import_module(module, [x], name="encoder")
    gradients = interpret(graph, dict(module.named_parameters()), {}, [x], ExecutionContext()).gradients
    number = graph.draw_numbers["randn_like.draw"]
    region = ((0, 6),), ((0, 5),)
    noise = random_numbers("normal", region, (6, 5), (0, 0, number), (torch.float64, torch.device("cpu")))
    torch.testing.assert_close(gradients["mean"], x)
    torch.testing.assert_close(gradients["deviation"], x * noise)


def test_other_draws_are_refused_in_one_line() -> None:
    module = _Drawing(lambda x: torch.multinomial(x + 1, COLUMNS).to(x.dtype))
    with pytest.raises(ImportFailure, match=r"multinomial.* draws random numbers") as caught:
        import_module(module, [torch.zeros(ROWS, COLUMNS)], name="drawing")
    assert "\n" not in str(caught.value)
