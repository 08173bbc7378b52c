"""Launches of a training step: operators that run a kernel, counted as PyTorch dispatches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

# Memory without a kernel.
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_COMMUNICATION = ("c10d", "_c10d_functional")


class Launches(NamedTuple):
    """Operators of a step that run a kernel, and collectives and messages."""

    kernels: int
    communication: int


class CountedOperators(TorchDispatchMode):
    """Counts the operators that are dispatched, by name; views and allocations run no kernel and are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self.communication: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        namespace, _, name = schema.name.partition("::")
        is_view = any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
        if namespace in _COMMUNICATION:
            self.communication[name] += 1
        elif not is_view and name not in _ALLOCATIONS and namespace != "profiler":
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def launches(self) -> Launches:
        """The sums."""
        return Launches(self.kernels.total(), self.communication.total())


def count_launches(step: Callable[[], object]) -> Launches:
    """Return the launches of one step, which is executed."""
    counted = CountedOperators()
    with counted:
        step()
    return counted.launches
