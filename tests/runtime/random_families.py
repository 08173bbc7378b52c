"""How random networks begin and end, and the families of operations that they are drawn from."""

from __future__ import annotations

from collections.abc import Callable

from tests.runtime import random_layers as layers
from tests.runtime import random_tensors as tensors
from tests.runtime.random_graphs import SIZES, Draft

Family = Callable[[Draft, str], list[str]]

FAMILIES: tuple[Family, ...] = (
    layers.linear,
    layers.linear,
    layers.tied,
    layers.convolution,
    layers.convolution,
    layers.pooling,
    layers.batch_norm,
    layers.normalization,
    layers.softmax,
    layers.attention,
    layers.attention,
    layers.product,
    layers.product,
    tensors.view,
    tensors.view,
    tensors.seen,
    tensors.slicing,
    tensors.slicing,
    tensors.joining,
    tensors.reduction,
    tensors.scan,
    tensors.unary,
    tensors.unary,
    tensors.binary,
    tensors.binary,
    layers.prelu,
    layers.recurrent,
    layers.stacked,
    layers.gates,
    layers.dropout,
    tensors.lookup,
    tensors.lookup,
)


def start(draft: Draft) -> None:
    """Add the first values: images, sequences, vectors or embedded tokens of one batch."""
    batch = draft.choose((2, 3, 4, 5, 7))
    for _ in range(draft.generator.randint(1, 3)):
        kind = draft.choose(("vector", "sequence", "image", "tokens"))
        if kind == "vector":
            draft.input((batch, draft.choose(SIZES)))
        elif kind == "sequence":
            draft.input((batch, draft.choose((2, 3, 4, 5, 6)), draft.choose((2, 4, 6, 8))))
        elif kind == "image":
            draft.input(
                (batch, draft.choose((1, 2, 3, 4, 6)), draft.choose((3, 4, 5)), draft.choose((3, 5, 6)))
            )
        else:
            tensors.embed(draft, (batch, draft.choose((2, 3, 5, 6))))


def finish(draft: Draft) -> None:
    """Make a loss of every value that nothing reads, and add them up."""
    terms = [term for x in draft.floats() if x not in draft.read for term in _loss(draft, x)]
    if not any(draft.values[term].requires_grad for term in terms):
        x = draft.floats()[-1]
        terms += draft.emit(f"({x} * {draft.weight(1)}).mean()", x)
    draft.emit(" + ".join(f"{draft.choose((0.5, 1.0, 2.0))} * {term}" for term in terms), *terms)


def _loss(draft: Draft, x: str) -> list[str]:
    shape = draft.shape(x)
    classes = shape[1] if len(shape) > 1 else 0
    kind = draft.choose(("cross_entropy", "cross_entropy", "nll", "elements", "binary", "mean", "sum"))
    if kind == "cross_entropy" and classes > 1:
        return _cross_entropy(draft, x)
    if kind == "nll" and classes > 1:
        target = draft.input((shape[0], *shape[2:]), classes, draft.choose((None, 1)))
        weight = f", {draft.weight(classes)}.detach().abs() + 0.1" if draft.chance(0.3) else ""
        ignored = draft.inputs[target].ignored
        given = f"{weight}, ignore_index={-100 if ignored is None else ignored}"
        return draft.emit(f"functional.nll_loss(functional.log_softmax({x}, 1), {target}{given})", x)
    if kind == "elements" and draft.chance(0.2):
        target = f"torch.log_softmax({draft.input(shape)}, -1)" if shape else "None"
        call = f"functional.kl_div({x}, {target}, reduction='{draft.choose(('batchmean', 'sum'))}', log_target=True)"
        return draft.emit(call, x) if shape else draft.emit(f"{x}.square()", x)
    if kind == "elements":
        name = draft.choose(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
        reduction = draft.choose(("mean", "mean", "sum"))
        return draft.emit(f"functional.{name}({x}, {draft.input(shape)}, reduction='{reduction}')", x)
    if kind == "binary":
        target = f"torch.sigmoid({draft.input(shape)})"
        return draft.emit(f"functional.binary_cross_entropy_with_logits({x}, {target})", x)
    return draft.emit(f"{x}.{draft.choose(('square', 'sin'))}().{'sum' if kind == 'sum' else 'mean'}()", x)


def _cross_entropy(draft: Draft, x: str) -> list[str]:
    shape = draft.shape(x)
    classes = shape[1]
    if draft.chance(0.15):
        target = f"torch.softmax({draft.input(shape)}, 1)"
        return draft.emit(f"functional.cross_entropy({x}, {target})", x)
    ignored = draft.choose((None, None, -100, 1))
    target = draft.input((shape[0], *shape[2:]), classes, ignored)
    settings = [] if ignored in (None, -100) else [f"ignore_index={ignored}"]
    if draft.chance(0.3):
        settings.append(f"weight={draft.weight(classes)}.detach().abs() + 0.1")
    if draft.chance(0.3):
        settings.append("label_smoothing=0.1")
    if draft.chance(0.2):
        settings.append("reduction='sum'")
    return draft.emit(f"functional.cross_entropy({', '.join((x, target, *settings))})", x)
