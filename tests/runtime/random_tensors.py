"""What random networks do to tensors beside layers: views, slices, joins, reductions, pointwise functions, lookups.

Each function adds one or a few statements that read the value `x`, and returns the names of what it made; nothing
where it does not fit the value's shape.
"""

from __future__ import annotations

from math import prod

from tests.runtime.random_graphs import Draft

UNARY = (
    "torch.relu({x})",
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "functional.gelu({x})",
    "functional.silu({x})",
    "functional.softplus({x})",
    "functional.leaky_relu({x}, 0.1)",
    "functional.elu({x})",
    "torch.sin({x})",
    "{x}.clamp(-1.0, 1.5)",
    "1.5 * {x} - 0.5",
    "{x}.square().neg()",
    "({x}.abs() + 1.0).log()",
    "torch.where({x} > 0, {x}, 0.3 * {x})",
    "{x}.masked_fill({x} < -1, 0.5)",
    "{x}.detach() * {x}",
)
BINARY = (
    "{x} + {y}",
    "{x} * torch.tanh({y})",
    "{x} - {y}",
    "torch.maximum({x}, {y})",
    "torch.where({y} > 0, {x}, {y})",
    "{x} / ({y}.abs() + 1.0)",
    "torch.lerp({x}, {y}, 0.3)",
)


def embed(draft: Draft, shape: tuple[int, ...]) -> list[str]:
    """Embed new tokens."""
    rows, width = draft.choose((5, 7, 10)), draft.choose((3, 4, 6, 8))
    tokens = draft.input(shape, rows)
    padding = draft.choose((None, None, 0, 2, -1))
    return draft.emit(f"functional.embedding({tokens}, {draft.weight(rows, width)}, {padding})")


def factored(draft: Draft, total: int, most: int = 4) -> list[int]:
    """Return a random shape of `total` elements."""
    sizes: list[int] = []
    while total > 1 and len(sizes) < most - 1 and draft.chance(0.8):
        size = draft.choose([divisor for divisor in range(1, total + 1) if total % divisor == 0])
        sizes.append(size)
        total //= size
    return [*sizes, total]


def view(draft: Draft, x: str) -> list[str]:
    """Reshaping, exchanging, joining and adding dims."""
    shape = draft.shape(x)
    rank = len(shape)
    kind = draft.choose(("reshape", "unflatten", "flatten", "permute", "unsqueeze", "expand", "squeeze"))
    if kind == "reshape":
        return draft.emit(f"{x}.reshape({factored(draft, prod(shape))})", x)
    if rank == 0:
        return []
    dim = draft.generator.randrange(rank)
    if kind == "unflatten":
        return draft.emit(f"{x}.unflatten({dim}, {factored(draft, shape[dim], 2)})", x)
    if kind == "flatten":
        return draft.emit(f"{x}.flatten({draft.generator.randint(0, dim)}, {dim})", x)
    if kind == "permute":
        return draft.emit(f"{x}.permute({draft.generator.sample(range(rank), rank)})", x)
    if kind == "unsqueeze":
        return draft.emit(f"{x}.unsqueeze({dim})", x)
    if kind == "squeeze":
        return draft.emit(f"{x}.squeeze()", x)
    sizes = [draft.choose((2, 3)), *(draft.choose((2, 3)) if size == 1 else -1 for size in shape)]
    return draft.emit(f"{x}.expand({sizes})", x)


def seen(draft: Draft, _x: str) -> list[str]:
    """A weight as a value of its own, seen in another shape: further views, slices and products follow from it."""
    weight = draft.weight(draft.choose((2, 3, 4, 6, 7)), draft.choose((2, 4, 5, 6, 8)))
    return draft.emit(f"{weight}.{draft.choose(('t()', 'flatten()', 'unsqueeze(1)', 'detach()'))}")


def slicing(draft: Draft, x: str) -> list[str]:
    """Slices, selections, pieces of a dim, and shifts."""
    shape = draft.shape(x)
    if not shape:
        return []
    dim = draft.generator.randrange(len(shape))
    size = shape[dim]
    kind = draft.choose(
        ("slice", "slice", "select", "split", "chunk", "unbind", "flip", "roll", "pad", "uneven")
    )
    if kind == "slice":
        begin, end = draft.generator.randrange(size), draft.generator.randint(1, size)
        step = draft.choose((1, 1, 2, 3))
        if begin >= end:
            return []
        return draft.emit(f"{x}[{':, ' * dim}{begin}:{end}:{step}]", x)
    if kind == "select":
        return draft.emit(f"{x}.select({dim}, {draft.generator.randrange(-size, size)})", x)
    if kind == "split":
        return draft.emit(f"{x}.split({draft.generator.randint(1, size)}, {dim})", x)
    if kind == "uneven" and size > 1:
        first = draft.generator.randint(1, size - 1)
        return draft.emit(f"{x}.split([{first}, {size - first}], {dim})", x)
    if kind == "chunk":
        return draft.emit(f"{x}.chunk({draft.generator.randint(1, 4)}, {dim})", x)
    if kind == "unbind" and size <= 4:
        return draft.emit(f"{x}.unbind({dim})", x)
    if kind == "flip":
        return draft.emit(f"{x}.flip({dim})", x)
    if kind == "roll":
        return draft.emit(f"{x}.roll({draft.choose((-1, 1, 2))}, {dim})", x)
    if kind == "pad":
        before = draft.choose((-1, 0, 1)) if shape[-1] > 1 else 2
        return draft.emit(f"functional.pad({x}, ({before}, 1), value=0.5)", x)
    return []


def joining(draft: Draft, x: str) -> list[str]:
    """Joins with values of like shape, along any dim."""
    shape = draft.shape(x)
    if not shape:
        return []
    dim = draft.generator.randrange(len(shape))
    alike = [
        name
        for name in draft.floats()
        if len(draft.shape(name)) == len(shape)
        and all(
            mine == theirs or d == dim
            for d, (mine, theirs) in enumerate(zip(draft.shape(name), shape, strict=True))
        )
    ]
    parts = [x, *(draft.choose(alike) for _ in range(draft.generator.randint(1, 2)))]
    if draft.chance(0.3):
        same = [part for part in parts if draft.shape(part) == shape]
        return draft.emit(
            f"torch.stack([{', '.join(same)}], {draft.generator.randint(0, len(shape))})", *same
        )
    return draft.emit(f"torch.cat([{', '.join(parts)}], {dim})", *parts)


def reduction(draft: Draft, x: str) -> list[str]:
    """Sums, means and others along one or several dims."""
    shape = draft.shape(x)
    if not shape:
        return []
    dims = sorted(draft.generator.sample(range(len(shape)), draft.generator.randint(1, min(2, len(shape)))))
    keep = draft.chance(0.5)
    kind = draft.choose(
        ("sum", "mean", "sum", "mean", "amax", "amin", "var", "logsumexp", "norm", "prod", "max")
    )
    count = prod(shape[dim] for dim in dims)
    if kind == "var":
        return draft.emit(f"{x}.var({dims}, correction={int(count > 1)}, keepdim={keep})", x)
    if kind == "norm":
        return draft.emit(f"torch.linalg.vector_norm({x} + 3.0, 2, {dims}, {keep})", x)
    if kind == "prod":
        return draft.emit(f"torch.tanh({x}).prod({dims[0]}, {keep})", x)
    if kind == "max":
        return draft.emit(f"{x}.max({dims[0]}, {keep}).values", x)
    return draft.emit(f"{x}.{kind}({dims}, {keep})", x)


def scan(draft: Draft, x: str) -> list[str]:
    """Cumulative sums, and triangles."""
    shape = draft.shape(x)
    if not shape:
        return []
    if len(shape) >= 2 and draft.chance(0.3):
        return draft.emit(f"{x}.{draft.choose(('tril', 'triu'))}({draft.choose((-1, 0, 1))})", x)
    return draft.emit(f"{x}.cumsum({draft.generator.randrange(len(shape))})", x)


def unary(draft: Draft, x: str) -> list[str]:
    """A pointwise function."""
    return draft.emit(draft.choose(UNARY).format(x=x), x)


def binary(draft: Draft, x: str) -> list[str]:
    """A pointwise function of two values, or of a value and a weight, broadcast."""
    shape = draft.shape(x)
    if draft.chance(0.4):
        tail = [size if draft.chance(0.7) else 1 for size in shape][draft.generator.randint(0, len(shape)) :]
        y = draft.weight(*tail)
    else:
        fitting = [name for name in draft.floats() if name != x and _broadcasts(draft.shape(name), shape)]
        if not fitting:
            return []
        y = draft.choose(fitting)
    pair = (x, y) if draft.chance(0.5) else (y, x)
    return draft.emit(draft.choose(BINARY).format(x=pair[0], y=pair[1]), x, y)


def _broadcasts(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(left), reversed(right), strict=False))


def lookup(draft: Draft, x: str) -> list[str]:
    """Reading and adding by index: an embedding, gather, scatter_add, index_select, repeat."""
    shape = draft.shape(x)
    kind = draft.choose(("embedding", "gather", "scatter", "scatter_add", "select", "repeat", "bag"))
    if not shape:
        return []
    dim = draft.generator.randrange(len(shape))
    if kind == "embedding":
        return embed(draft, (shape[0], draft.choose((2, 3))))
    if kind == "bag":
        rows, width = draft.choose((5, 7)), draft.choose((3, 4))
        tokens = draft.input((shape[0], draft.choose((2, 3))), rows)
        mode = draft.choose(("sum", "mean", "max"))
        padding = draft.choose((None, None, 1))
        shares = f", per_sample_weights={draft.weight(*draft.shape(tokens))}" if mode == "sum" else ""
        table = draft.weight(rows, width)
        return draft.emit(
            f"functional.embedding_bag({tokens}, {table}, mode='{mode}', padding_idx={padding}{shares})"
        )
    if kind == "repeat":
        times = [draft.choose((1, 1, 2, 3)) for _ in range(len(shape) + draft.chance(0.3))]
        return draft.emit(f"{x}.{draft.choose(('repeat', 'tile'))}({times})", x)
    if kind == "select":
        index = draft.input((draft.choose((1, 2, 3, 5)),), shape[dim])
        return draft.emit(f"{x}.index_select({dim}, {index})", x)
    sizes = [
        draft.choose((1, 2, 4)) if d == dim else draft.generator.randint(1, size)
        for d, size in enumerate(shape)
    ]
    if kind == "gather":
        return draft.emit(f"{x}.gather({dim}, {draft.input(sizes, shape[dim])})", x)
    source = draft.weight(*sizes)
    if kind == "scatter":
        # Elements of one place must not compete: torch leaves open which of them stays.
        sizes[dim] = 1
        index = draft.input(sizes, shape[dim])
        return draft.emit(f"{x}.scatter({dim}, {index}, {draft.weight(*sizes)})", x)
    return draft.emit(f"{x}.scatter_add({dim}, {draft.input(sizes, shape[dim])}, {source})", x)
