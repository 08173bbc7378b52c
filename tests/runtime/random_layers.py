"""Layers that random networks are drawn from: products, convolutions, normalizations, attention, recurrence.

Each function adds one or a few statements that read the value `x`, and returns the names of what it made; nothing
where it does not fit the value's shape.
"""

from __future__ import annotations

from math import prod

from tests.runtime.random_graphs import SIZES, Draft


def linear(draft: Draft, x: str) -> list[str]:
    """A linear layer on the last dim."""
    out = draft.choose(SIZES)
    weight = draft.weight(out, draft.shape(x)[-1]) if draft.shape(x) else None
    return (
        draft.emit(f"functional.linear({x}, {weight}, {draft.maybe_weight(out)})", x)
        if weight is not None
        else []
    )


def tied(draft: Draft, x: str) -> list[str]:
    """A product with a weight that is there already, as a language model's head with its embedding."""
    shape = draft.shape(x)
    known = [name for name, sizes in draft.weights.items() if len(sizes) == 2 and shape[-1:] == sizes[1:]]
    return draft.emit(f"functional.linear({x}, self.{draft.choose(known)})", x) if known else []


def convolution(draft: Draft, x: str) -> list[str]:
    """A convolution or a transposed one with any stride, padding, dilation and groups."""
    shape = draft.shape(x)
    if not 3 <= len(shape) <= 5:
        return []
    spatial, channels = len(shape) - 2, shape[1]
    groups = draft.choose([divisor for divisor in range(1, channels + 1) if channels % divisor == 0])
    out = groups * draft.choose((1, 2, 3))
    kernel = [draft.choose((1, 2, 3)) for _ in range(spatial)]
    stride = [draft.choose((1, 1, 2, 3)) for _ in range(spatial)]
    dilation = [draft.choose((1, 1, 2)) for _ in range(spatial)]
    if draft.chance(0.3):
        padding = [
            min(draft.choose((0, 1)), (size - 1) * step) for size, step in zip(kernel, dilation, strict=True)
        ]
        extra = [draft.generator.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)]
        sizes = [
            (size - 1) * step - 2 * pad + reach * (width - 1) + more + 1
            for size, step, pad, reach, width, more in zip(
                shape[2:], stride, padding, dilation, kernel, extra, strict=True
            )
        ]
        if min(sizes) < 1:
            return []
        weight, bias = draft.weight(channels, out // groups, *kernel), draft.maybe_weight(out)
        return draft.emit(
            f"functional.conv_transpose{spatial}d({x}, {weight}, {bias}, {stride}, {padding}, {extra}, {groups}, "
            f"{dilation})",
            x,
        )
    padding = [draft.choose((0, 1, 2)) for _ in range(spatial)]
    fits = all(
        size + 2 * pad >= (width - 1) * step + 1
        for size, pad, width, step in zip(shape[2:], padding, kernel, dilation, strict=True)
    )
    if not fits:
        return []
    # torch warns of an even kernel that is padded to the same size.
    same = set(stride) == {1} and 2 not in kernel and draft.chance(0.4)
    weight, bias = draft.weight(out, channels // groups, *kernel), draft.maybe_weight(out)
    shown = "'same'" if same else padding
    return draft.emit(
        f"functional.conv{spatial}d({x}, {weight}, {bias}, {stride}, {shown}, {dilation}, {groups})", x
    )


def pooling(draft: Draft, x: str) -> list[str]:
    """Maxima or averages over windows."""
    shape = draft.shape(x)
    if not 3 <= len(shape) <= 5:
        return []
    spatial = len(shape) - 2
    kind = draft.choose(("max", "avg", "adaptive"))
    if kind == "adaptive":
        sizes = [draft.generator.randint(1, size) for size in shape[2:]]
        return draft.emit(f"functional.adaptive_avg_pool{spatial}d({x}, {sizes})", x)
    kernel = [draft.choose((1, 2, 3)) for _ in range(spatial)]
    stride = [draft.choose((1, 2, 3)) for _ in range(spatial)]
    padding = [draft.generator.randint(0, size // 2) for size in kernel]
    # torch refuses averages in 3d over windows larger than what is not padded.
    counted = 0 if kind == "avg" and spatial == 3 else 2
    if any(size + counted * pad < width for size, pad, width in zip(shape[2:], padding, kernel, strict=True)):
        return []
    settings = f"{kernel}, {stride}, {padding}, ceil_mode={draft.chance(0.2)}"
    if kind == "avg":
        settings += f", count_include_pad={draft.chance(0.5)}"
    return draft.emit(f"functional.{kind}_pool{spatial}d({x}, {settings})", x)


def batch_norm(draft: Draft, x: str) -> list[str]:
    """Batch norm in training or evaluation mode, with running statistics or without."""
    shape = draft.shape(x)
    # torch's own backward is wrong for images of one column in some memory layouts (profiler.operators.batch_norm).
    if len(shape) < 2 or prod(shape) // shape[1] < 2 or (len(shape) > 3 and 1 in shape[2:]):
        return []
    channels = (shape[1],)
    weight, bias = draft.maybe_weight(shape[1]), draft.maybe_weight(shape[1])
    training = draft.chance(0.75)
    mean = variance = "None"
    if not training or draft.chance(0.7):
        mean, variance = draft.buffer(channels, -0.5), draft.buffer(channels, 0.5)
    return draft.emit(f"functional.batch_norm({x}, {mean}, {variance}, {weight}, {bias}, {training}, 0.2)", x)


def normalization(draft: Draft, x: str) -> list[str]:
    """Layer, root-mean-square, group or instance norm."""
    shape = draft.shape(x)
    kind = draft.choose(("layer", "layer", "rms", "group", "instance"))
    if not shape:
        return []
    if kind in ("layer", "rms"):
        dims = draft.generator.randint(1, min(2, len(shape)))
        sizes = shape[len(shape) - dims :]
        weight = draft.maybe_weight(*sizes)
        if kind == "rms":
            return draft.emit(f"functional.rms_norm({x}, {sizes}, {weight}, 1e-2)", x)
        bias = draft.maybe_weight(*sizes)
        return draft.emit(f"functional.layer_norm({x}, {sizes}, {weight}, {bias}, 1e-2)", x)
    if len(shape) < 3 or prod(shape[2:]) < 2 or (len(shape) > 3 and 1 in shape[2:]):
        return []
    channels = shape[1]
    weight, bias = (draft.weight(channels), draft.weight(channels)) if draft.chance(0.7) else ("None", "None")
    if kind == "group":
        groups = draft.choose([divisor for divisor in range(1, channels + 1) if channels % divisor == 0])
        return draft.emit(f"functional.group_norm({x}, {groups}, {weight}, {bias}, 1e-2)", x)
    return draft.emit(f"functional.instance_norm({x}, None, None, {weight}, {bias}, True, 0.1, 1e-2)", x)


def softmax(draft: Draft, x: str) -> list[str]:
    """Softmax or its logarithm along any dim."""
    if not draft.shape(x):
        return []
    dim = draft.generator.randrange(len(draft.shape(x)))
    return draft.emit(f"torch.{draft.choose(('softmax', 'log_softmax'))}({x}, {dim})", x)


def attention(draft: Draft, x: str) -> list[str]:
    """Attention of a sequence to itself: causal, masked, with grouped heads, or plain; now and then with dropout."""
    shape = draft.shape(x)
    if len(shape) != 3 or shape[1] < 2:
        return []
    batch, length, width = shape
    heads = draft.choose((1, 2, 4))
    shared = draft.choose([divisor for divisor in (1, 2, 4) if heads % divisor == 0])
    size = draft.choose((1, 2, 3))
    query, keys = draft.weight(heads * size, width), draft.weight(2 * shared * size, width)
    names = draft.emit(
        f"functional.linear({x}, {query}).view({batch}, {length}, {heads}, {size}).transpose(1, 2)", x
    )
    pair = draft.emit(
        f"functional.linear({x}, {keys}, {draft.maybe_weight(2 * shared * size)})"
        f".view({batch}, {length}, 2, {shared}, {size}).permute(2, 0, 3, 1, 4)",
        x,
    )
    if not names or not pair:
        return []
    settings = ["is_causal=True"] if draft.chance(0.4) else []
    if not settings and draft.chance(0.4):
        settings = [f"attn_mask={draft.weight(length, length)}"]
    if shared != heads:
        settings.append("enable_gqa=True")
    if draft.chance(0.15):
        settings.append("dropout_p=0.3")
        draft.exact = False
    call = ", ".join((names[0], f"{pair[0]}[0]", f"{pair[0]}[1]", *settings))
    mixed = draft.emit(f"functional.scaled_dot_product_attention({call})", names[0], pair[0])
    if mixed and draft.chance(0.8):
        return draft.emit(f"{mixed[0]}.transpose(1, 2).reshape({batch}, {length}, {heads * size})", mixed[0])
    return mixed


def product(draft: Draft, x: str) -> list[str]:
    """Products with a weight or with another value."""
    shape = draft.shape(x)
    if not shape:
        return []
    others = [name for name in draft.floats() if draft.shape(name)[:-2] == shape[:-2] and len(shape) >= 2]
    fitting = [name for name in others if draft.shape(name)[-1:] == shape[-1:]]
    kind = draft.choose(("weight", "added", "einsum", "values", "outer", "vector", "tensordot"))
    if kind == "tensordot" and len(shape) >= 2:
        weight = draft.weight(shape[-1], draft.choose((2, 3)), shape[0])
        return draft.emit(f"torch.tensordot({x}, {weight}, ([0, {len(shape) - 1}], [2, 0]))", x)
    if kind == "weight":
        return draft.emit(f"{x} @ {draft.weight(shape[-1], draft.choose(SIZES))}", x)
    if kind == "vector":
        return draft.emit(f"torch.matmul({x}, {draft.weight(shape[-1])})", x)
    if kind == "added" and len(shape) == 2:
        out = draft.choose(SIZES)
        settings = draft.choose(("", ", beta=0.5, alpha=2", ", beta=2"))
        return draft.emit(
            f"torch.addmm({draft.weight(out)}, {x}, {draft.weight(shape[1], out)}{settings})", x
        )
    if kind == "einsum" and len(shape) == 3:
        weight = draft.weight(shape[1], draft.choose((2, 3)), shape[2])
        pattern = draft.choose(("bij,ikj->bik", "bij,ikj->bki", "bij,ikj->bk", "bij,ikj->kjb"))
        return draft.emit(f"torch.einsum('{pattern}', {x}, {weight})", x)
    if kind == "values" and fitting:
        y = draft.choose(fitting)
        return draft.emit(f"{x} @ {y}.transpose(-2, -1)", x, y)
    if kind == "outer" and len(shape) == 1:
        return draft.emit(f"torch.outer({x}, {draft.weight(draft.choose(SIZES))})", x)
    return []


def prelu(draft: Draft, x: str) -> list[str]:
    """A rectifier with trained slopes, one or one a channel."""
    shape = draft.shape(x)
    if len(shape) < 2:
        return []
    return draft.emit(f"functional.prelu({x}, {draft.weight(draft.choose((1, shape[1])))})", x)


def recurrent(draft: Draft, x: str) -> list[str]:
    """Two or three steps of a recurrent cell with shared weights."""
    shape = draft.shape(x)
    if len(shape) != 3:
        return []
    batch, length, width = shape
    kind, gates = draft.choose((("lstm", 4), ("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)))
    hidden = draft.choose((2, 3, 5))
    weights = [draft.weight(gates * hidden, width), draft.weight(gates * hidden, hidden)]
    if draft.chance(0.7):
        weights += [draft.weight(gates * hidden), draft.weight(gates * hidden)]
    given = ", ".join(weights)
    state = draft.emit(f"{x}.new_zeros({batch}, {hidden})")
    if kind == "lstm":
        state = [*state, *draft.emit(f"{x}.new_zeros({batch}, {hidden})")]
    for step in range(min(length, 3)):
        now = f"({', '.join(state)})" if kind == "lstm" else state[0]
        state = draft.emit(f"torch.{kind}_cell({x}[:, {step}], {now}, {given})", x, *state)
    return state


def stacked(draft: Draft, x: str) -> list[str]:
    """One or two recurrent layers over all time steps, one way or both."""
    shape = draft.shape(x)
    if len(shape) != 3:
        return []
    kind, gates = draft.choose((("lstm", 4), ("gru", 3), ("rnn_tanh", 1)))
    count, both, first = draft.choose((1, 2)), draft.chance(0.4), draft.chance(0.5)
    hidden, batch, ways = draft.choose((2, 3)), shape[0] if first else shape[1], 2 if both else 1
    weights = []
    for layer in range(count):
        for _ in range(ways):
            weights.append(draft.weight(gates * hidden, shape[2] if layer == 0 else ways * hidden))
            weights.append(draft.weight(gates * hidden, hidden))
            weights += [draft.weight(gates * hidden), draft.weight(gates * hidden)]
    state = draft.emit(f"{x}.new_zeros({count * ways}, {batch}, {hidden})")
    if not state:
        return []
    begin = f"({state[0]}, {state[0]})" if kind == "lstm" else state[0]
    drop = 0.3 if count > 1 and draft.chance(0.2) else 0.0
    draft.exact &= drop == 0
    settings = f"True, {count}, {drop}, True, {both}, {first}"
    return draft.emit(f"torch.{kind}({x}, {begin}, [{', '.join(weights)}], {settings})", x, *state)


def gates(draft: Draft, x: str) -> list[str]:
    """A half of a dim gates the other one."""
    even = [dim for dim, size in enumerate(draft.shape(x)) if size % 2 == 0]
    return draft.emit(f"functional.glu({x}, {draft.choose(even)})", x) if even else []


def dropout(draft: Draft, x: str) -> list[str]:
    """Dropout of elements or of whole channels."""
    if draft.chance(0.6):
        return []
    draft.exact = False
    name = "dropout1d" if len(draft.shape(x)) == 3 and draft.chance(0.3) else "dropout"
    return draft.emit(f"functional.{name}({x}, {draft.choose((0.2, 0.5))})", x)
