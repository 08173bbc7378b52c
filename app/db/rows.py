"""The rows of a trace, and the Arrow tables of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from app.db.columns import Mask, booleans, lists, numbers, sparse_lists, texts
from app.db.records import SearchOutcome, TraceKind

if TYPE_CHECKING:
    import pyarrow as pa

TRACE_COLUMNS: dict[TraceKind, dict[str, str]] = {
    "proposals": {
        "search": "INTEGER",
        "chain": "SMALLINT",
        "step": "BIGINT",
        "operator": "INTEGER",
        "configuration": "BIGINT",
        "simulated_ns": "BIGINT",
        "bound_ns": "BIGINT",
        "accepted": "BOOLEAN",
        "other_operators": "INTEGER[]",
        "other_configurations": "BIGINT[]",
    },
    "configurations": {
        "search": "INTEGER",
        "configuration": "BIGINT",
        "family": "VARCHAR",
        "device_count": "INTEGER",
        "degrees": "INTEGER[]",
        "start": "INTEGER",
        "stride": "INTEGER",
        "seed": "UINTEGER",
        "base": "BIGINT",
        "axes": "INTEGER[]",
        "devices": "INTEGER[]",
    },
    "starts": {
        "search": "INTEGER",
        "chain": "SMALLINT",
        "start": "VARCHAR",
        "operator": "INTEGER",
        "configuration": "BIGINT",
    },
}
"""The columns of a chunk by kind, with the types that DuckDB reads them as."""

_NULLABLE: dict[TraceKind, frozenset[str]] = {
    "proposals": frozenset({"simulated_ns", "bound_ns", "other_operators", "other_configurations"}),
    "configurations": frozenset({"start", "stride", "seed", "base", "axes", "devices"}),
    "starts": frozenset(),
}

ADDED_COLUMNS: dict[str, tuple[str, ...]] = {"proposals": ("other_operators", "other_configurations")}
"""Columns that chunks of older searches do not have, by kind."""

PlacementFamily = Literal["strided", "permuted", "copied", "listed"]


class Others(NamedTuple):
    """The further heads that proposals change, in any order: each one's proposal by place, the head, and its code."""

    place: npt.NDArray[np.int64]
    operator: npt.NDArray[np.int64]
    configuration: npt.NDArray[np.int64]


NO_OTHERS = Others(*(np.empty(0, np.int64),) * 3)


@dataclass(frozen=True, slots=True)
class ProposalRows:
    """Proposals of one search in the order in which they were made; arrays of one length.

    `step` counts the proposals of a chain from 1. `operator` is an index into the graph's operators, the head of the
    group that changes, `configuration` the code of what was proposed for it (`ConfigurationEntry`). `simulated_ns`
    is the simulated step time, `bound_ns` the bound at which the simulation was stopped because that sufficed to
    reject; a negative number in either means that there is none, and one in both that a memory is exceeded.

    `checkpoint` gives a text that says what the search was after these proposals, and `outcome` how far it came.
    Of the batches that are written together only the last checkpoint is asked for its text.

    `others` holds what proposals that change more than one head give to the further ones.
    """

    chain: npt.NDArray[np.integer[Any]]
    step: npt.NDArray[np.integer[Any]]
    operator: npt.NDArray[np.integer[Any]]
    configuration: npt.NDArray[np.integer[Any]]
    simulated_ns: npt.NDArray[np.integer[Any]]
    bound_ns: npt.NDArray[np.integer[Any]]
    accepted: npt.NDArray[np.bool_]
    checkpoint: Callable[[], str] | None = None
    outcome: SearchOutcome | None = None
    others: Others = NO_OTHERS

    def __len__(self) -> int:
        return len(self.step)


class ConfigurationEntry(NamedTuple):
    """The configuration of a code: the degrees, and how to list the devices of the tasks.

    strided: `start`, `stride` (`search.space.placements.Strided`); permuted: `seed`; listed: `devices`; copied: from
    the configuration with the code `base`, along `axes` (`search.algorithms.moves.copied`). Two codes may mean the
    same.
    """

    configuration: int
    family: PlacementFamily
    device_count: int
    degrees: Sequence[int]
    start: int | None = None
    stride: int | None = None
    seed: int | None = None
    base: int | None = None
    axes: Sequence[int] | None = None
    devices: Sequence[int] | None = None


EntryRow = tuple[Any, ...]
"""A `ConfigurationEntry`, or a plain tuple of its fields: every second proposal has one, and a plain one is made in no
time."""


@dataclass(frozen=True, slots=True)
class StartEntry:
    """One operator's configuration at the start of a chain: a head's, or of an operator that does not follow it."""

    chain: int
    start: str
    operator: int
    configuration: int


def schema_of(kind: TraceKind) -> pa.Schema:
    """Return the columns of a chunk of a kind."""
    import pyarrow as pa

    types: dict[str, pa.DataType] = {
        "BOOLEAN": pa.bool_(),
        "SMALLINT": pa.int16(),
        "INTEGER": pa.int32(),
        "UINTEGER": pa.uint32(),
        "BIGINT": pa.int64(),
        "VARCHAR": pa.string(),
    }
    types |= {f"{name}[]": pa.list_(type_) for name, type_ in types.items()}
    nullable = _NULLABLE[kind]
    return pa.schema(
        [
            pa.field(name, types[type_], nullable=name in nullable)
            for name, type_ in TRACE_COLUMNS[kind].items()
        ]
    )


def proposal_table(search_id: int, batches: Sequence[ProposalRows]) -> pa.Table:
    """Return proposals, sorted by chain and step."""

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(batch, name) for batch in batches])

    chain, step = column("chain"), column("step")
    order = np.lexsort((step, chain))
    times = {name: column(name)[order] for name in ("simulated_ns", "bound_ns")}
    operators, configurations = _others(batches, order)
    return _table(
        schema_of("proposals"),
        search_id,
        {
            "chain": chain[order],
            "step": step[order],
            "operator": column("operator")[order],
            "configuration": column("configuration")[order],
            **times,
            "accepted": booleans(column("accepted")[order]),
            "other_operators": operators,
            "other_configurations": configurations,
        },
        {name: values >= 0 for name, values in times.items()},
    )


def _others(
    batches: Sequence[ProposalRows], order: npt.NDArray[np.intp]
) -> tuple[pa.Array[Any], pa.Array[Any]]:
    """Return the columns of the batches' `others` for the sorted rows; of each row in the operators' order."""
    import pyarrow as pa

    moved_to = np.empty(len(order), np.int64)
    moved_to[order] = np.arange(len(order))
    firsts = np.cumsum([0, *(len(batch) for batch in batches[:-1])])
    row = moved_to[
        np.concatenate([batch.others.place + first for batch, first in zip(batches, firsts, strict=True)])
    ]
    operator = np.concatenate([batch.others.operator for batch in batches])
    configuration = np.concatenate([batch.others.configuration for batch in batches])
    lengths = np.bincount(row, minlength=len(order))
    ordered = np.lexsort((operator, row))
    return (
        sparse_lists(lengths, operator[ordered], pa.int32()),
        sparse_lists(lengths, configuration[ordered], pa.int64()),
    )


def configuration_table(search_id: int, entries: Sequence[EntryRow]) -> pa.Table:
    """Return a table of entries, NULL in the columns of other families."""
    code, family, device_count, degrees, start, stride, seed, base, axes, devices = zip(*entries, strict=True)
    number = {name: index for index, name in enumerate(get_args(PlacementFamily))}
    which = np.fromiter(map(number.__getitem__, family), np.int8, len(family))
    of = {name: which == index for name, index in number.items()}

    def some(values: Sequence[int | None], valid: Mask) -> npt.NDArray[np.int64]:
        result = np.zeros(len(values), np.int64)
        result[valid] = [value for value in values if value is not None]
        return result

    columns = {
        "configuration": np.array(code),
        "family": texts(family),
        "device_count": np.array(device_count),
        "degrees": lists(degrees),
        "start": some(start, of["strided"]),
        "stride": some(stride, of["strided"]),
        "seed": some(seed, of["permuted"]),
        "base": some(base, of["copied"]),
        "axes": lists(axes, of["copied"]),
        "devices": lists(devices, of["listed"]),
    }
    valid = {"start": of["strided"], "stride": of["strided"], "seed": of["permuted"], "base": of["copied"]}
    return _table(schema_of("configurations"), search_id, columns, valid)


def start_table(search_id: int, starts: Sequence[StartEntry]) -> pa.Table:
    """Return starts."""
    return _table(
        schema_of("starts"),
        search_id,
        {
            "chain": np.array([start.chain for start in starts]),
            "start": texts([start.start for start in starts]),
            "operator": np.array([start.operator for start in starts]),
            "configuration": np.array([start.configuration for start in starts]),
        },
        {},
    )


def _table(
    schema: pa.Schema, search_id: int, columns: Mapping[str, Any], valid: Mapping[str, Mask]
) -> pa.Table:
    """Return a table of a search's rows; arrays of numpy become columns, NULL where they are not valid."""
    import pyarrow as pa

    rows = len(next(iter(columns.values())))
    columns = {"search": np.full(rows, search_id), **columns}
    made = [
        numbers(values, field.type, valid.get(field.name)) if isinstance(values, np.ndarray) else values
        for field in schema
        for values in [columns[field.name]]
    ]
    return pa.Table.from_arrays(made, schema=schema)
