"""Fragments of a task graph: records in one int64 arena, for each operator, value and static tensor.

A fragment is addressed by the word where it starts. It is a header, and behind it, one after the other:

    operator    its tasks
    value       assemblies, and one more as a sentinel; readers; of every reading its first reader; of every reader its
                assembly; of every source task its device; bytes of pieces; the source tasks of pieces;
                collectives, and one more as a sentinel; the assemblies that they serve; their source tasks; times;
                loads
    static      holders; cells

A source task is a task of the operator that makes the value. A sum over devices has a piece for each pair of a source
task and a device that reads it: assemblies of one region share the bytes of their pieces, and, where no part has
replicas, the list of their source tasks.

Functions that end in `_of` return one of these arrays, for kernels alone; elsewhere `arena[start:end].view(TASK)` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import config, njit, types
from numba.extending import intrinsic
from numba.np import arrayobj

from search.kernels.records import Array

Function = TypeVar("Function", bound=Callable[..., object])
# Their stubs lack what is used here.
_njit: Any = njit
_config: Any = config
_populate_array: Any = arrayobj.populate_array


def _accessor(function: Function) -> Function:
    """Put a function into the text of its callers: by itself, without counts of references, it may return no array."""
    compiled: Function = _njit(inline="always")(function)
    return compiled


class _Record(np.record):  # type: ignore[misc]  # its stubs call it final
    """A record whose fields hide attributes of numpy's scalars, which have a `device` since version 2."""

    def __getattribute__(self, name: str) -> Any:
        if name in (np.void.__getattribute__(self, "dtype").names or ()):
            return self[name]
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _record(*fields: str, numbers: tuple[str, ...] = ()) -> np.dtype[Any]:
    """Return a record of int64 fields, then of int32 ones: numbers of devices, tasks and the like, places in lists."""
    wide, narrow = [(field, np.int64) for field in fields], [(field, np.int32) for field in numbers]
    # Kernels that are compiled know no class of ours.
    kind = _Record if _config.DISABLE_JIT else np.record
    return np.dtype((kind, np.dtype([*wide, *narrow], align=True)))


OPERATOR = _record("tasks", "replicas")
# kept_bytes: for the backward. recomputed_bytes: there only from when the operator is recomputed to its backward.
# forward_launch_ns, backward_launch_ns: in which the host issues it.
TASK = _record(
    "device", "forward_ns", "backward_ns", "kept_bytes", "origin", "recomputed_bytes", "forward_launch_ns",
    "backward_launch_ns",
)  # fmt: skip
# remote_pieces: those that travel. transfers: those of them that no collective serves. reads: collectives and pieces
# that readers wait for; piece_reads: pieces, were there no collectives. listed: the number of source tasks of pieces,
# sizes: that of their bytes, of which assemblies share both. times_at: where times and loads begin.
VALUE = _record(
    "assemblies", "pieces", "listed", "readers", "sources", "sizes", "remote_pieces", "readings",
    "collectives_at", "collectives", "transfers", "reads", "piece_reads", "times_at", "loads",
)  # fmt: skip
# What a device needs of a value. first_piece, first_size: where source tasks and bytes of its pieces begin.
# collective: that serves it, or -1. locals: how many pieces are on the device already. first_transfer: the number,
# among the value's, of its first transfer.
ASSEMBLY = _record(
    "copied_bytes",
    numbers=(
        "device", "pieces", "first_piece", "first_size", "first_reader", "collective", "locals", "first_transfer",
    ),
)  # fmt: skip
# Of a transfer, and of its gradient.
TRANSFER_TIME = _record("run_ns", "back_ns")
READER = _record(numbers=("reading", "task"))
# root: a device or -1. priced_bytes: those that its price is for.
COLLECTIVE = _record(
    "kind", "root", "size_bytes", "priced_bytes", "first_assembly", "first_source", "resource_set", "run_ns",
    "back_resource_set", "back_ns",
)  # fmt: skip
# What all transfers of a value together take of a link, forward, and that of their gradients.
LOAD = _record("link", "forward_ns", "back_ns")
# sharing: a code of `graph.strategy.Sharding`.
STATIC = _record("holders", "cells", "sharing")
# Elements that a device keeps, that it updates, and that its tasks read.
HOLDER = _record("device", "kept", "updated", "held")
# Part of a weight that several devices hold. gather_resource_set: that of the gather of its shares, or -1.
CELL = _record("resource_set", "size_bytes", "gather_resource_set")
_INT, _NUMBER = np.dtype(np.int64), np.dtype(np.int32)


def words_in(record: np.dtype[Any]) -> int:
    """Return the words of a record."""
    return record.itemsize // 8


def word_of(record: np.dtype[Any], field: str) -> int:
    """Return which word of a record a field is."""
    assert record.names is not None
    return record.names.index(field)


OPERATOR_WORDS, TASK_WORDS = words_in(OPERATOR), words_in(TASK)
VALUE_WORDS, ASSEMBLY_WORDS, READER_WORDS = words_in(VALUE), words_in(ASSEMBLY), words_in(READER)
COLLECTIVE_WORDS, TRANSFER_TIME_WORDS, LOAD_WORDS = (
    words_in(COLLECTIVE),
    words_in(TRANSFER_TIME),
    words_in(LOAD),
)
STATIC_WORDS, HOLDER_WORDS, CELL_WORDS = words_in(STATIC), words_in(HOLDER), words_in(CELL)


def _view(arena: Array, at: int, count: int, dtype: np.dtype[Any]) -> Array:
    return arena[at : at + (count * dtype.itemsize + 7) // 8].view(dtype)[:count]


def _typed_view(_context: Any, arena: Any, _at: Any, _count: Any, dtype: Any) -> Any:
    """Type and compile `_view`, without checks and without counts of references: the caller has the arena."""
    viewed: Any = types.Array(dtype.dtype, 1, "C")

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = context.make_array(signature.args[0])(context, builder, arguments[0])
        array = context.make_array(viewed)(context, builder)
        start = builder.bitcast(builder.gep(words.data, [arguments[1]]), array.data.type)
        size = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(dtype.dtype)))
        _populate_array(array, data=start, shape=[arguments[2]], strides=[size], itemsize=size, meminfo=None)
        return array._getvalue()

    return viewed(arena, types.intp, types.intp, dtype), code


# Under NUMBA_DISABLE_JIT kernels are functions.
_records: Callable[..., Array] = _view if _config.DISABLE_JIT else intrinsic(_typed_view)


@_accessor
def operator_header(arena: Array, at: int) -> Any:
    """Return the header of an operator fragment."""
    return _records(arena, at, 1, OPERATOR)[0]


@_accessor
def tasks_of(arena: Array, at: int) -> Array:
    """Return the tasks of an operator."""
    return _records(arena, at + OPERATOR_WORDS, operator_header(arena, at).tasks, TASK)


@_accessor
def value_header(arena: Array, at: int) -> Any:
    """Return the header of a value fragment."""
    return _records(arena, at, 1, VALUE)[0]


@_accessor
def assemblies_of(arena: Array, at: int) -> Array:
    """Return the assemblies of a value, and the sentinel."""
    return _records(arena, at + VALUE_WORDS, value_header(arena, at).assemblies + 1, ASSEMBLY)


@_accessor
def readers_at(arena: Array, at: int) -> int:
    """Return where the readers of a value start."""
    return int(at + VALUE_WORDS + ASSEMBLY_WORDS * (value_header(arena, at).assemblies + 1))


@_accessor
def readers_of(arena: Array, at: int) -> Array:
    """Return the tasks that read a value, assembly by assembly."""
    return _records(arena, readers_at(arena, at), value_header(arena, at).readers, READER)


@_accessor
def first_readers_of(arena: Array, at: int) -> Array:
    """Return, for each reading, the position of its first task in `read_assemblies_of`."""
    value = value_header(arena, at)
    return _records(arena, readers_at(arena, at) + READER_WORDS * value.readers, value.readings, _INT)


@_accessor
def read_assemblies_of(arena: Array, at: int) -> Array:
    """Return the assembly that each task of each reading takes."""
    value = value_header(arena, at)
    return _records(
        arena, readers_at(arena, at) + READER_WORDS * value.readers + value.readings, value.readers, _INT
    )


@_accessor
def source_devices_of(arena: Array, at: int) -> Array:
    """Return the devices of the source tasks of a value."""
    value = value_header(arena, at)
    start = readers_at(arena, at) + (READER_WORDS + 1) * value.readers + value.readings
    return _records(arena, start, value.sources, _INT)


@_accessor
def sizes_of(arena: Array, at: int) -> Array:
    """Return the bytes of a value's pieces; those of one assembly follow each other, and others may share them."""
    value = value_header(arena, at)
    start = readers_at(arena, at) + (READER_WORDS + 1) * value.readers + value.readings + value.sources
    return _records(arena, start, value.sizes, _INT)


@_accessor
def listed_words(listed: int) -> int:
    """Return the words that source tasks of pieces take."""
    return (listed + 1) // 2


@_accessor
def piece_sources_of(arena: Array, at: int) -> Array:
    """Return the source tasks of a value's pieces; those of one assembly follow each other, others may share them."""
    value = value_header(arena, at)
    return _records(arena, at + value.collectives_at - listed_words(value.listed), value.listed, _NUMBER)


@_accessor
def collectives_of(arena: Array, at: int) -> Array:
    """Return the collectives of a value, and the sentinel, which is there where there is any."""
    value = value_header(arena, at)
    return _records(arena, at + value.collectives_at, value.collectives + 1, COLLECTIVE)


@_accessor
def served_assemblies_of(arena: Array, at: int) -> Array:
    """Return the assemblies that the collectives of a value serve; there must be a collective."""
    value = value_header(arena, at)
    served = collectives_of(arena, at)[value.collectives].first_assembly
    return _records(
        arena, at + value.collectives_at + COLLECTIVE_WORDS * (value.collectives + 1), served, _INT
    )


@_accessor
def served_sources_of(arena: Array, at: int) -> Array:
    """Return the source tasks of the collectives of a value; there must be a collective."""
    value, last = value_header(arena, at), collectives_of(arena, at)[value_header(arena, at).collectives]
    start = at + value.collectives_at + COLLECTIVE_WORDS * (value.collectives + 1) + last.first_assembly
    return _records(arena, start, last.first_source, _INT)


@_accessor
def transfer_times_of(arena: Array, at: int) -> Array:
    """Return the times of a value's transfers and of their gradients, by their numbers."""
    value = value_header(arena, at)
    return _records(arena, at + value.times_at, value.transfers, TRANSFER_TIME)


@_accessor
def loads_of(arena: Array, at: int) -> Array:
    """Return what the transfers of a value take of links, of those alone that they take any time of."""
    value = value_header(arena, at)
    return _records(arena, at + value.times_at + TRANSFER_TIME_WORDS * value.transfers, value.loads, LOAD)


@_accessor
def static_header(arena: Array, at: int) -> Any:
    """Return the header of a static fragment."""
    return _records(arena, at, 1, STATIC)[0]


@_accessor
def holders_of(arena: Array, at: int) -> Array:
    """Return the devices that hold a static tensor."""
    return _records(arena, at + STATIC_WORDS, static_header(arena, at).holders, HOLDER)


@_accessor
def cells_of(arena: Array, at: int) -> Array:
    """Return the parts of a weight that several devices hold."""
    static = static_header(arena, at)
    return _records(arena, at + STATIC_WORDS + HOLDER_WORDS * static.holders, static.cells, CELL)
