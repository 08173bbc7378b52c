"""Tuples of arrays that Python hands to kernels as one argument.

At every call numba looks up the type of each array of a tuple and takes the array apart. The evaluation of a proposal
has a hundred arrays and more, nearly always the same ones. A tuple that is held was taken apart once; a kernel gets a
pointer to it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

from numba.core import types
from numba.experimental import structref
from numba.extending import overload

Value = TypeVar("Value", bound=tuple[Any, ...])
# numba annotates few of its functions.
_structref: Any = structref
_types: Any = types
_overload: Any = overload


@_structref.register
class HeldTupleType(_types.StructRef):  # type: ignore[misc]
    """numba's type of a held tuple."""


class HeldTuple(_structref.StructRefProxy, Generic[Value]):  # type: ignore[misc]
    """A held tuple. Kernels read its `value`; Python can only where nothing is compiled."""

    value: Value


_structref.define_boxing(HeldTupleType, HeldTuple)


def hold(value: Value) -> HeldTuple[Value]:
    """Return a tuple held. Kernels call it; where they are not compiled, it is Python's."""
    return cast(HeldTuple[Value], SimpleNamespace(value=value))


@_overload(hold)
def _compiled_hold(value: Any) -> Callable[[Any], Any]:
    held_type = HeldTupleType([("value", value)])

    def holding(value: Any) -> Any:
        held = _structref.new(held_type)
        held.value = value
        return held

    return holding


class LatestHeld(Generic[Value]):
    """Holds the latest tuple that a kernel was called with; its arrays live until another one is held."""

    def __init__(self, hold_kernel: Callable[[Value], HeldTuple[Value]]) -> None:
        self._hold_kernel = hold_kernel
        self._value: Value | None = None
        self._held: HeldTuple[Value] | None = None

    def of(self, value: Value) -> HeldTuple[Value]:
        """Return a tuple held: the latest one, if all that is in both are the same objects."""
        if self._held is None or not _is_same(value, self._value):
            self._value, self._held = value, self._hold_kernel(value)
        return self._held


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two tuples, and tuples in them, have the same objects: a kernel has the addresses of arrays."""
    for one, another in zip(value, other, strict=True):
        if one is not another and not (isinstance(one, tuple) and _is_same(one, another)):
            return False
    return True
