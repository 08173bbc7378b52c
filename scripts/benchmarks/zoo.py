"""The zoo's networks as benchmarks take them: batch sizes, and graphs without weights.

Sizes are the published ones, batch sizes those for which a step takes 0.1 to 10 s on one core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graph.operators import OperatorGraph

NETWORKS = {
    "mlp": 64, "alexnet": 16, "vgg16": 4, "inception": 4, "resnet101": 2, "densenet121": 2, "rnntc": 8, "rnnlm": 8,
    "nmt": 8, "bert-large": 2, "gpt2": 1, "dlrm": 64, "candle-uno": 64,
}  # fmt: skip
QUICK = {"mlp": 8}


def networks(*, quick: bool) -> tuple[dict[str, int], str]:
    """Return the batch sizes of the networks to measure, and the preset of their sizes."""
    return (QUICK, "small") if quick else (NETWORKS, "paper")


def zoo_graph(name: str, preset: str, batch_size: int, **sizes: int) -> OperatorGraph:
    """Return the graph of a network of the zoo, imported on the meta device."""
    import torch

    from graph.importer import import_module
    from graph.zoo import build

    with torch.device("meta"):
        module, args, kwargs = build(name, preset, batch_size, **sizes)
    return import_module(module, args, kwargs, name=name)
