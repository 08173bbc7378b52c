"""Operator graphs of the zoo's networks for tests that take them as they are."""

from __future__ import annotations

from functools import lru_cache

from graph.operators import OperatorGraph


@lru_cache(maxsize=32)
def small_graph(name: str, batch_size: int | None = None) -> OperatorGraph:
    """Return the graph of a network in its small size."""
    import torch

    from graph.importer import import_module
    from graph.zoo import build

    with torch.device("meta"):
        module, arguments, keywords = build(name, "small", batch_size)
    return import_module(module, arguments, keywords, name=name)
