"""Executes a strategy on real devices through `torch.distributed`, times it, and trains under it.

import runtime

trainer = runtime.parallelize(module, "strategy.json", args, kwargs, optimizer=make_optimizer)
loss = trainer.step(*batch)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.training.parallelize import StrategyFile, load_strategy, parallelize
    from runtime.training.trainer import Parameters, Trainer

__all__ = ["Parameters", "StrategyFile", "Trainer", "load_strategy", "parallelize"]

# Loaded when first asked for, so that `import runtime` costs nothing.
_MODULES = {
    "Parameters": "runtime.training.trainer",
    "StrategyFile": "runtime.training.parallelize",
    "Trainer": "runtime.training.trainer",
    "load_strategy": "runtime.training.parallelize",
    "parallelize": "runtime.training.parallelize",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module runtime has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
