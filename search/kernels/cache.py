"""Decorators of compiled kernels, how numba compiles their parts, and where it keeps on disk what it compiled.

numba keeps a kernel for as long as its own file stays the same, and does not see that a kernel which it calls has
changed in another. Here a kernel is kept for as long as all files of its folder stay the same.

numba also optimizes and translates each kernel by itself, and again within every kernel that calls it, over all levels
of calls. Here a kernel that kernels alone call is optimized and translated within those that Python calls, once each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import njit
from numba.core import caching, codegen, compiler

Function = TypeVar("Function", bound=Callable[..., object])
# Its stubs lack some of the options below.
_njit: Any = njit
_caching: Any = caching
_codegen: Any = codegen
_compiler: Any = compiler


@cache
def _folder_digest(folder: Path) -> str:
    """Return a digest of all sources of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _stamped(locator: Any) -> Any:
    """Return a locator of numba's whose stamp is that of the whole folder."""
    return type(
        locator.__name__,
        (locator,),
        {"get_source_stamp": lambda self: _folder_digest(Path(self._py_file).parent)},
    )


class _FolderImpl(_caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = tuple(
        _stamped(locator)
        for locator in (
            _caching.UserProvidedCacheLocator,
            _caching.InTreeCacheLocator,
            _caching.UserWideCacheLocator,
        )
    )


class _FolderCache(_caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _FolderImpl

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        # numba reads an index before it looks at the stamp: that of other sources may name tuples that are gone.
        self._cache_file._version += f" {self._impl.locator.get_source_stamp()}"


class _NoEnvironments:
    """Stands for the machine's code, in which a part of kernels has no place of its own."""

    def set_env(self, name: str, environment: object) -> None:
        """Write no environment: it has the Python objects of a function, and kernels have none."""


class _Part(_codegen.JITCodeLibrary):  # type: ignore[misc]
    """The intermediate code of a kernel that kernels alone call, simplified function by function, and no more."""

    @property
    def codegen(self) -> _NoEnvironments:
        """numba's name for what holds the machine's code."""
        return _NoEnvironments()

    def _optimize_final_module(self) -> None:
        """Leave it to the kernel that this becomes a part of."""

    def _finalize_final_module(self) -> None:
        """Make no machine code."""
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:  # noqa: ARG002  # numba's name
        """Return 0, as numba does of functions that are not there."""
        self._ensure_finalized()
        return 0


class _PartCompiler(_compiler.Compiler):  # type: ignore[misc]
    """numba's compiler, for parts of kernels."""

    def compile_extra(self, func: Callable[..., object]) -> Any:
        """Compile a function into a `_Part`."""
        self.state.library = _Part(self.state.targetctx.codegen(), func.__qualname__)
        return super().compile_extra(func)


def _part(function: Function, **options: bool) -> Function:
    """Compile a kernel that kernels alone call: a part of them, for which Python has no way in."""
    compiled: Function = _njit(
        nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_PartCompiler, **options
    )(function)
    return compiled


def _kept(function: Function, **options: bool) -> Function:
    """Compile a kernel that Python calls; what is compiled is kept on disk, where a folder can be written."""
    compiled: Any = _njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
    if compiled is not function:  # as under NUMBA_DISABLE_JIT
        with suppress(RuntimeError):  # numba finds no folder
            compiled._cache = _FolderCache(function)
    kept: Function = compiled
    return kept


def entry(function: Function) -> Function:
    """Compile a kernel that Python calls."""
    return _kept(function)


def quick_entry(function: Function) -> Function:
    """Compile a kernel that Python calls, without counts of references to arrays.

    In a loop the counts cost ten times what the loop does. A kernel that makes an array, or gets a held tuple, needs
    them, and the compiler insists on them.
    """
    return _kept(function, _nrt=False)


def inner(function: Function) -> Function:
    """Compile a kernel that kernels alone call, without counts of references."""
    return _part(function, _nrt=False)


def hot(function: Function) -> Function:
    """Compile as `inner` does, into every kernel that calls it: a call hands over each array as seven words."""
    return _part(function, _nrt=False, forceinline=True)


def section(function: Function) -> Function:
    """Make a kernel that one kernel calls, once, a piece of its text: by itself it would be compiled twice."""
    compiled: Function = _njit(inline="always")(function)
    return compiled


def inner_with_arrays(function: Function) -> Function:
    """Compile a kernel that kernels alone call and that makes arrays."""
    return _part(function)
