"""Which operators give back memory that they were given, by the names of their targets.

A weight that is read through a view is in use until the view's last reader is done, so whoever frees memory asks here.
"""

from __future__ import annotations

# Operators whose output is their input's memory, seen differently.
VIEW_TARGETS = frozenset(
    {
        "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "squeeze", "unsqueeze", "slice",
        "select", "alias", "detach", "flatten", "unflatten", "unbind", "split", "split_with_sizes", "chunk",
    }
)  # fmt: skip
# Operators whose output may alias, as torch's schemas say; some of them copy where they must.
_MAY_ALIAS = VIEW_TARGETS | frozenset(
    """
    _conj _neg_view _reshape_alias _sparse_broadcast_to adjoint as_strided broadcast_to coalesce conj contiguous
    diagonal dsplit expand_as hsplit imag lift_fresh linalg_diagonal mH mT matrix_H moveaxis movedim narrow numpy_T
    positive ravel real reshape_as resolve_conj resolve_neg swapaxes swapdims tensor_split to type_as unfold values
    view_as view_as_complex view_as_real vsplit
    """.split()  # noqa: SIM905 - easier to read
)


def base_name(target: str) -> str:
    """Return the name of an operator without library and overload: "conv2d" of "aten.conv2d.default"."""
    pieces = target.split(".")
    return pieces[1] if len(pieces) > 1 else pieces[0]


def may_alias(target: str) -> bool:
    """Return whether an operator's outputs may share memory with its inputs."""
    return base_name(target) in _MAY_ALIAS
