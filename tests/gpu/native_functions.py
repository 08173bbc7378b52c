"""Which of torch's operators have a kernel for CUDA: a list in torch's own package says so, on any machine."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def _listed() -> dict[str, dict[str, Any]]:
    """Return the entries of native_functions.yaml by operator; an overload follows a dot."""
    file = files("torchgen") / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {entry["func"].partition("(")[0].strip(): entry for entry in entries}


@cache
def _generated() -> frozenset[str]:
    """Return the variants of listed operators that torch generates, which run the listed ones' kernels."""
    return frozenset(
        name.strip() for entry in _listed().values() for name in entry.get("autogen", "").split(",")
    )


@cache
def has_cuda_kernel(name: str) -> bool:
    """Return whether "add.Tensor", an operator of namespace aten, has a kernel for CUDA, or is composed of others."""
    entry = _listed().get(name)
    if entry is None:
        return name in _generated()
    if "structured_delegate" in entry:
        return has_cuda_kernel(entry["structured_delegate"])
    # A loop over elements is compiled for both; without a kernel of its own, an operator is composed of others.
    if "ufunc_inner_loop" in entry or "dispatch" not in entry:
        return True
    keys = {key.strip() for keys in entry["dispatch"] for key in keys.split(",")}
    return any(key == "CUDA" or key.startswith("Composite") for key in keys)
