"""Random small networks of real torch operations, by seed: branches, reconvergence, uneven sizes, shared weights.

A network is drawn as the source of its forward, statement by statement; shapes come from executing each statement on
meta tensors. So any process builds the same network from the same seed, and a failure can print what it ran.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built

MOST_ELEMENTS = 500
MOST_DIMS = 5
# Sizes of dims: small ones, primes, and ones that factor.
SIZES = (1, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8)
NAMES = {"torch": torch, "functional": functional}


@dataclass(frozen=True)
class Input:
    """An input of the network: floats, or indexes below `bound`, a few of which are `ignored`."""

    shape: tuple[int, ...]
    bound: int | None = None
    ignored: int | None = None

    def tensor(self) -> Tensor:
        """Return random values; never are all of them ignored."""
        if self.bound is None:
            return torch.randn(self.shape)
        values = torch.randint(0, self.bound, self.shape)
        if self.ignored is not None:
            values[torch.rand(self.shape) < 0.3] = self.ignored
            values.view(-1)[0] = 0 if self.ignored != 0 else 1
        return values


@dataclass
class Draft:
    """A network under construction. `values` are on the meta device; `exact` is cleared by what draws numbers."""

    generator: random.Random
    inputs: dict[str, Input] = field(default_factory=dict)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    members: SimpleNamespace = field(default_factory=SimpleNamespace)
    exact: bool = True

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.generator.random() < probability

    def choose(self, items: Sequence[Any]) -> Any:
        """Return one of some items."""
        return self.generator.choice(items)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value."""
        return tuple(self.values[name].shape)

    def floats(self) -> list[str]:
        """Return the names of all floating-point values, in order."""
        return [name for name, value in self.values.items() if value.is_floating_point()]

    def pick(self) -> str:
        """Return a floating-point value: mostly one that nothing reads yet, else any."""
        unread = [name for name in self.floats() if name not in self.read]
        name: str = self.choose(unread if unread and self.chance(0.7) else self.floats())
        return name

    def input(self, shape: Sequence[int], bound: int | None = None, ignored: int | None = None) -> str:
        """Add an input and return its name."""
        name = f"x{len(self.inputs)}"
        self.inputs[name] = Input(tuple(shape), bound, ignored)
        dtype = torch.float32 if bound is None else torch.int64
        self.values[name] = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return name

    def weight(self, *shape: int) -> str:
        """Return a weight of a shape: a new one, or now and then one that is there already."""
        known = [name for name, sizes in self.weights.items() if sizes == shape]
        if known and self.chance(0.5):
            return f"self.{self.choose(known)}"
        name = f"w{len(self.weights)}"
        self.weights[name] = shape
        setattr(self.members, name, torch.empty(shape, device="meta", requires_grad=True))
        return f"self.{name}"

    def maybe_weight(self, *shape: int) -> str:
        """Return a weight or None."""
        return self.weight(*shape) if self.chance(0.7) else "None"

    def buffer(self, shape: tuple[int, ...], fill: float) -> str:
        """Add a buffer and return its name."""
        name = f"b{len(self.buffers)}"
        self.buffers[name] = (shape, fill)
        setattr(self.members, name, torch.empty(shape, device="meta"))
        return f"self.{name}"

    def emit(self, expression: str, *sources: str) -> list[str]:
        """Add a statement and return the names of its results; none where they would be too large or empty."""
        space = {**NAMES, **self.values, "self": self.members}
        made = eval(expression, space)
        results = [made] if isinstance(made, Tensor) else list(made)
        for result in results:
            if not 0 < result.numel() <= MOST_ELEMENTS or result.dim() > MOST_DIMS:
                return []
        names = [f"v{len(self.values) + position}" for position in range(len(results))]
        self.values.update(zip(names, results, strict=True))
        left = ", ".join(names) if isinstance(made, Tensor) else f"({', '.join(names)},)"
        self.lines.append(f"{left} = {expression}")
        self.read.update(sources)
        return names


class RandomNetwork(nn.Module):
    """A drawn network; `source` is its forward, `exact` tells that the plain module gives the same in every run."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        for name, shape in draft.weights.items():
            fan = prod(shape[1:]) if len(shape) > 1 else 4
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / max(fan, 1) ** 0.5))
        for name, (shape, fill) in draft.buffers.items():
            self.register_buffer(name, torch.rand(shape) + fill)
        self.exact = draft.exact
        lines = [*draft.lines, f"return {draft.lines[-1].split(' = ')[0]}"]
        self.source = f"def forward(self, {', '.join(draft.inputs)}):\n    " + "\n    ".join(lines)
        space: dict[str, Any] = dict(NAMES)
        exec(self.source, space)
        self._forward: Callable[..., Tensor] = space["forward"]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss."""
        return self._forward(self, *inputs)


def random_network(network: int, dtype: str = "float64") -> Built:
    """Build the network of a seed; weights and inputs come from torch's generator."""
    from tests.runtime.random_families import FAMILIES, finish, start

    draft = Draft(random.Random(network))
    start(draft)
    wanted = draft.generator.randint(3, 12)
    for _ in range(200):
        if wanted == 0:
            break
        family = draft.choose(FAMILIES)
        wanted -= any(family(draft, draft.pick()) for _ in range(4))
    finish(draft)
    kind = getattr(torch, dtype)
    module = RandomNetwork(draft).to(kind)
    inputs = [given.tensor() for given in draft.inputs.values()]
    return module, tuple(x.to(kind) if x.is_floating_point() else x for x in inputs), {}
