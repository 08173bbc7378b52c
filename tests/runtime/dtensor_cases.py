"""Networks and strategies for the tests of DTensor plans; torchrun's processes build the networks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.axes import AxisKind, coordinates
from graph.canonical import canonical_json
from graph.importer import import_module
from graph.operators import Operator, OperatorGraph
from graph.strategy import Configuration, Strategy
from graph.zoo import Built
from runtime.dtensor.plan import ParallelPlan, make_plan
from runtime.dtensor.writer import PlanOrigin, source_text
from runtime.jobs.models import ModelReference
from search.space.groups import find_groups, follow

IGNORED = -100


class Block(nn.Module):
    """A feed-forward block after a normalization; ignored targets lie in the first samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.final = nn.LayerNorm(8)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return functional.cross_entropy(self.head(self.final(x)).flatten(0, 1), targets.flatten())


def block(batch_size: int = 4) -> Built:
    targets = torch.randint(0, 6, (batch_size, 6))
    targets[0, :4] = IGNORED
    return Block(), (torch.randn(batch_size, 6, 8),), {"targets": targets}


class Summed(nn.Module):
    """A loss that is a sum over samples, scaled by `scale` where that is not one."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).square().sum()
        return loss if self.scale == 1 else loss * self.scale


def summed(batch_size: int = 4, scale: float = 1.0) -> Built:
    return Summed(scale), (torch.randn(batch_size, 6),), {}


class Likelihood(nn.Module):
    """A mean over log likelihoods; the one ignored target is among the first samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.nll_loss(functional.log_softmax(self.layer(x), -1), targets, ignore_index=3)


def likelihood(batch_size: int = 4) -> Built:
    return Likelihood(), (torch.randn(batch_size, 6), torch.tensor([3, 1, 0, 2] * (batch_size // 4))), {}


class Weighed(nn.Module):
    """A mean that weighs samples by their class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("weights", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.layer(x), targets, weight=self.weights)  # type: ignore[arg-type]


def weighed(batch_size: int = 4) -> Built:
    return Weighed(), (torch.randn(batch_size, 6), torch.randint(0, 4, (batch_size,))), {}


class Normalized(nn.Module):
    """A loss whose parts do not add up: samples are divided by what all of them sum up to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return (x / (1.0 + x.square().mean(0))).mean()


def normalized(batch_size: int = 4) -> Built:
    return Normalized(), (torch.randn(batch_size, 6),), {}


class Nested(nn.Module):
    """Takes its inputs as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        result: Tensor = self.second(torch.relu(self.first(inputs[0] + inputs[1])))
        return result.square().mean()


def nested(batch_size: int = 4) -> Built:
    return Nested(), ([torch.randn(batch_size, 6), torch.randn(batch_size, 6)],), {}


class Various(nn.Module):
    """A convolution, a parameter of its own, a layer that is called twice, and one that two functions read."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.twice = nn.Linear(8, 8)
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.convolution(images))
        x = torch.tanh(self.twice(x))
        x = torch.tanh(self.twice(x))
        return functional.linear(torch.relu(x) + torch.sigmoid(x), self.matrix).square().mean()


def various(batch_size: int = 4) -> Built:
    return Various(), (torch.randn(batch_size, 2, 8, 8),), {}


class Contained(nn.Module):
    """Layers that are containers without a forward of their own, which fully_shard cannot gather."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(6, 12), "down": nn.Linear(12, 6)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))  # type: ignore[index]
        return x.square().mean()


def contained(batch_size: int = 4) -> Built:
    return Contained(), (torch.randn(batch_size, 6),), {}


class Shifted(nn.Module):
    """Words embedded from targets that are shifted in place, positions by index, a norm made of functions.

    The embedding's gradient arrives as a partial sum, the positions are made in the forward, and a parameter is read
    by a function beside a split tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.up = nn.Linear(6, 8, bias=False)
        self.scale = nn.Parameter(torch.randn(8))
        self.down = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 8)

    def forward(self, targets: Tensor) -> Tensor:
        shifted = targets.new_zeros(targets.shape)
        shifted[:, 1:] = targets[:, :-1]
        shifted[:, 0] = 1
        samples = torch.arange(targets.shape[0], device=targets.device)[:, None]
        places = torch.arange(targets.shape[1], device=targets.device).expand(targets.shape)
        x = self.words(shifted) * (1 + places[samples, places])[..., None]
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        x = x + self.down(torch.relu(self.up(x) * self.scale))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def shifted(batch_size: int = 4) -> Built:
    return Shifted(), (torch.randint(0, 8, (batch_size, 5)),), {}


class Placed(nn.Module):
    """Weighs a sample by its place in the batch, or by how many there are."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        x = self.layer(x)
        if self.by == "count":
            return (x * (1.0 / count)).square().mean()
        places = torch.arange(count, device=x.device, dtype=x.dtype)
        return (x * places[:, None]).square().mean()


def placed(batch_size: int = 4, by: str = "place") -> Built:
    return Placed(by), (torch.randn(batch_size, 6),), {}


# torch.export itself fails on double quotes and line ends in names.
HOSTILE = "layer'): exit(7)  # [*]? {0} %s \u2028 \U0001f600"


class Hostile(nn.Module):
    """Has a module whose name would be code, were it written as text."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(6, 8))
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.relu(self.get_submodule(HOSTILE)(x)))
        return result.square().mean()


def hostile(batch_size: int = 4) -> Built:
    return Hostile(), (torch.randn(batch_size, 6),), {}


@dataclass(frozen=True)
class Network:
    """A factory, "package.module:function", and its keywords."""

    factory: str
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Built:
        """Return (module, args, kwargs) on the meta device."""
        with torch.device("meta"):
            return ModelReference(self.factory, self.keywords).build(0)


def zoo(name: str, **sizes: Any) -> Network:
    """Return a small network of the zoo with a batch of eight."""
    return Network("graph.zoo:build", {"name": name, "preset": "small", "batch_size": 8, **sizes})


def own(name: str, **keywords: Any) -> Network:
    """Return a network of this module."""
    return Network(f"tests.runtime.dtensor_cases:{name}", keywords)


_graphs: dict[str, OperatorGraph] = {}


def graph_of(network: Network) -> OperatorGraph:
    """Return a network's graph; imported once a process."""
    key = canonical_json([network.factory, dict(network.keywords)])
    if key not in _graphs:
        module, args, kwargs = network.build()
        _graphs[key] = import_module(module, args, kwargs, name="test")
    return _graphs[key]


def plan_of(network: Network, graph: OperatorGraph, strategy: Strategy) -> ParallelPlan:
    """Return the plan of a strategy."""
    strategy.validate(graph, strategy.device_count)
    return make_plan(graph, strategy, *network.build())


def write_plan(network: Network, strategy: Callable[[OperatorGraph], Strategy], file: Path) -> Path:
    """Write the generated file of a strategy; return its path."""
    graph = graph_of(network)
    chosen = strategy(graph)
    origin = PlanOrigin("test", chosen.digest, graph.digest, network.factory, network.keywords)
    file.write_text(source_text(plan_of(network, graph, chosen), origin))
    return file


# Chooses the axis that the tensor dim splits, by operator; None: every device computes the same.
Chooser = Callable[[OperatorGraph, Operator], int | None]


def first(operator: Operator, kind: AxisKind) -> int | None:
    """Return an operator's first axis of a kind."""
    return next((index for index, axis in enumerate(operator.space.axes) if axis.kind is kind), None)


def named(operator: Operator, name: str) -> int | None:
    """Return an operator's axis of a name."""
    return next((index for index, axis in enumerate(operator.space.axes) if axis.name == name), None)


def grid(
    operator: Operator, axis: int | None, tensor: int, data: int = 1, *, tensor_outside: bool = False
) -> Configuration:
    """Return samples over `data` devices times `axis` over `tensor` ones: (data, tensor) in row-major order."""
    replica = len(operator.space.axes) - 1
    sample = first(operator, AxisKind.SAMPLE) if data > 1 else None
    outer, inner = replica if sample is None else sample, replica if axis is None else axis
    degrees = [1] * (replica + 1)
    degrees[outer] *= data
    degrees[inner] *= tensor
    devices = []
    for point in coordinates(tuple(degrees)):
        i, j = divmod(point[outer], tensor) if outer == inner else (point[outer], point[inner])
        devices.append(j * data + i if tensor_outside else i * tensor + j)
    return Configuration(tuple(degrees), tuple(devices))


def by_operator(
    graph: OperatorGraph, choose: Chooser, tensor: int, data: int = 1, *, tensor_outside: bool = False
) -> Strategy:
    """Return the strategy of a choice for every operator."""
    return Strategy(
        graph.digest,
        tuple(
            grid(operator, choose(graph, operator), tensor, data, tensor_outside=tensor_outside)
            for operator in graph.operators
        ),
    )


def by_head(graph: OperatorGraph, choose: Chooser, tensor: int, data: int = 1) -> Strategy:
    """Return the strategy of a choice for every head of a group, which the others follow."""
    chosen: dict[int, Configuration] = {}
    for group in find_groups(graph):
        head = graph.operators[group.head]
        chosen |= follow(group, grid(head, choose(graph, head), tensor, data))
    return Strategy(graph.digest, tuple(chosen[index] for index in range(len(graph.operators))))


def feed_forward(graph: OperatorGraph, operator: Operator) -> int | None:
    """Choose columns for weights called up, and rows for those called down."""
    if any(name.endswith("up.weight") for name in operator.inputs):
        return first(operator, AxisKind.PARAMETER)
    if any(name.endswith("down.weight") for name in operator.inputs):
        return first(operator, AxisKind.REDUCTION)
    return None


def sequence(graph: OperatorGraph, operator: Operator) -> int | None:
    """Choose columns and rows for the feed-forward of `Block`, and the sequence for what stands around them."""
    if operator.target == "aten.linear.default":
        return feed_forward(graph, operator)
    if operator.target == "aten.gelu.default":
        return named(operator, "channel")
    if operator.target in ("aten.layer_norm.default", "aten.add.Tensor"):
        return named(operator, "length")
    return None
