"""Packs: measurements as one Parquet file that another database imports (`app db export`, `app db import`).

A row is a measurement with the device kind and the environment that it was made with, so that a pack explains itself to
anybody who reads Parquet. Nothing in a pack is executed, and nothing of it is believed that can be found out: digests,
operations and bytes are computed anew from the calls, and one row that cannot be a measurement refuses the pack.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.db.failures import MALFORMED
from app.db.records import (
    CostKeyRecord,
    DeviceKindRecord,
    EnvironmentRecord,
    LinkCostRecord,
    LinkFitRecord,
    OpCostRecord,
)
from app.db.store import Store
from app.services.files import checked_target, replacing
from graph.canonical import canonical_json
from graph.errors import SoapstoneError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT, DIGEST = b"soapstone.pack", b"soapstone.digest"
VERSION = b"3"
# Columns that packs of earlier versions do not have, by the first version that has them.
SINCE = {
    "launch_s": b"2",
    "clock_hz": b"2",
    "throttle": b"2",
    "residual": b"2",
    "reference_s": b"3",
    "speed": b"3",
}
LARGEST_CLOCK_HZ = 1e12
# Clocks differ; a measurement that is not even made would otherwise never be replaced by a later one.
LARGEST_CLOCK_ERROR = timedelta(days=1)
LONGEST_S = 1e6

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PackGroup:
    """All measurements on one kind of device in one environment."""

    kind: DeviceKindRecord
    environment: EnvironmentRecord
    op_costs: tuple[OpCostRecord, ...]
    link_costs: tuple[LinkCostRecord, ...]
    link_fits: tuple[LinkFitRecord, ...]


@dataclass(frozen=True, slots=True)
class PackCounts:
    """Numbers of rows: operator costs, link costs, and lines fitted to these."""

    op_costs: int
    link_costs: int
    link_fits: int

    @classmethod
    def of(cls, groups: tuple[PackGroup, ...]) -> PackCounts:
        """Return the numbers of rows in some groups."""
        return cls(
            sum(len(group.op_costs) for group in groups),
            sum(len(group.link_costs) for group in groups),
            sum(len(group.link_fits) for group in groups),
        )

    @classmethod
    def stored(cls, store: Store) -> PackCounts:
        """Return the numbers of rows in a database."""
        counts = store.table_counts()
        return cls(counts["op_costs"], counts["link_costs"], counts["link_fits"])


def stored_groups(store: Store, device_kind: str | None = None) -> tuple[PackGroup, ...]:
    """Return a database's measurements on one device kind, or on all, a group for each environment with any.

    Raises:
        UsageError: there is no such device kind.
    """
    kinds = store.device_kinds()
    if device_kind is not None:
        names = ", ".join(kind.name for kind in kinds) or "none"
        kinds = [kind for kind in kinds if kind.name == device_kind]
        if not kinds:
            raise UsageError(
                f"--device-kind: is {device_kind}, must be one that is stored: {names}; choose one of them"
            )
    groups = []
    for kind in kinds:
        for environment in store.environments():
            costs = store.op_costs(kind.id, environment.id)
            group = PackGroup(
                kind,
                environment,
                tuple(costs[key] for key in sorted(costs)),
                tuple(store.link_costs(kind.id, environment.id)),
                tuple(store.link_fits(kind.id, environment.id)),
            )
            if group.op_costs or group.link_costs or group.link_fits:
                groups.append(group)
    return tuple(groups)


def write_pack(store: Store, file: Path, device_kind: str | None = None) -> PackCounts:
    """Write a database's measurements on one device kind, or on all, into a file; return their numbers.

    Raises:
        UsageError: nothing is stored, there is no such device kind, or the file cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    target = checked_target(file, store.database, "pack")
    groups = stored_groups(store, device_kind)
    if not groups:
        raise UsageError(
            f"database {store.database.name}: holds no costs, must hold some; run app profile first"
        )
    table = pa.Table.from_pylist([row for group in groups for row in _rows(group)], _schema())
    described = table.replace_schema_metadata({FORMAT: VERSION, DIGEST: _digest(table.to_pylist())})
    with replacing(target, "pack") as temporary:
        parquet.write_table(described, temporary, compression="zstd")
    return PackCounts.of(groups)


def merge_pack(store: Store, groups: tuple[PackGroup, ...]) -> PackCounts:
    """Store a pack's measurements; return how many are new here.

    Of two measurements of the same, the later stays; a device kind that is known stays as it is. Merging a pack twice
    changes nothing.
    """
    before = PackCounts.stored(store)
    for group in groups:
        stored = store.device_kind(group.kind.name)
        kind_id = store.put_device_kind(group.kind) if stored is None else stored.id
        environment_id = store.put_environment(group.environment)
        store.put_op_costs(kind_id, environment_id, group.op_costs)
        store.put_link_costs(kind_id, environment_id, group.link_costs)
        store.put_link_fits(kind_id, environment_id, group.link_fits)
    after = PackCounts.stored(store)
    return PackCounts(
        after.op_costs - before.op_costs,
        after.link_costs - before.link_costs,
        after.link_fits - before.link_fits,
    )


def shipped_packs() -> tuple[Path, ...]:
    """Return the packs that come with Soapstone, by name: each measured on one kind of device."""
    folder = resources.files("profiler").joinpath("packs")
    return tuple(sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".parquet")))


def read_pack(file: Path) -> tuple[PackGroup, ...]:
    """Return the measurements of a pack.

    Raises:
        UsageError: it cannot be read, is no pack, or a row of it cannot be a measurement.
    """
    import pyarrow as pa
    from pyarrow import parquet

    # A name may be longer than paths can be: there is no such file then.
    if not os.path.isfile(file):
        problem = "is no regular file" if os.path.exists(file) else "is not there"
        raise UsageError(f"pack {file}: {problem}, must be a file that app db export wrote; check the path")
    try:
        with file.open("rb") as opened:  # by its name pyarrow finds none that is no UTF-8
            table = parquet.read_table(opened)
        metadata = table.schema.metadata or {}
        rows = table.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no Parquet file, or was cut short"
        raise UsageError(
            f"pack {file}: cannot be read ({reason}), must be as app db export wrote it; export it again"
        ) from None
    version = metadata.get(FORMAT)
    if version not in (b"1", b"2", VERSION) or not table.schema.equals(_schema(version)):
        shown = metadata.get(FORMAT, b"none").decode(errors="replace")
        raise UsageError(
            f"pack {file}: is of format {shown}, must be {VERSION.decode()} with its columns; export it anew"
        )
    if metadata.get(DIGEST) != _digest(rows):
        raise UsageError(
            f"pack {file}: was changed after it was written, must be as it was; copy or export it again"
        )
    return _grouped(file, [dict.fromkeys(SINCE) | row for row in rows])


def _digest(rows: list[dict[str, Any]]) -> bytes:
    """Return a digest of all rows, since Parquet does not notice a flipped bit."""
    text = json.dumps(rows, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest().encode()


def _schema(version: bytes = VERSION) -> pa.Schema:
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    fields: dict[str, pa.DataType] = {
        "record": text,
        "device_kind": text, "processor": text, "memory_bytes": whole, "kind_description": text,
        "environment": text, "environment_created_at": pa.timestamp("us", "UTC"),
        "key": text, "phase": text, "peak_bytes": whole, "failure": text,
        "pattern": text, "group_size": whole, "size_bytes": whole,
        "minimum_s": real, "p10_s": real, "median_s": real, "samples_s": pa.list_(real),
        "latency_s": real, "bandwidth_bytes_per_s": real, "contention_factor": real,
        "measured_at": pa.timestamp("us", "UTC"),
        "launch_s": real, "clock_hz": real, "throttle": text, "residual": real,
        "reference_s": real, "speed": real,
    }  # fmt: skip
    return pa.schema([(name, kind) for name, kind in fields.items() if SINCE.get(name, b"1") <= version])


def _rows(group: PackGroup) -> Iterator[dict[str, Any]]:
    shared = {
        "device_kind": group.kind.name,
        "processor": group.kind.processor,
        "memory_bytes": group.kind.memory_bytes,
        "kind_description": canonical_json(dict(group.kind.description)),
        "environment": canonical_json(dict(group.environment.facts)),
        "environment_created_at": group.environment.created_at,
    }
    for cost in group.op_costs:
        yield {"record": "op_cost", **shared, "key": cost.cost_key.key, **_fields(cost, OP_COST)}
    for link in group.link_costs:
        yield {"record": "link_cost", **shared, **_fields(link, LINK_COST)}
    for fit in group.link_fits:
        yield {"record": "link_fit", **shared, **_fields(fit, LINK_FIT)}


# Columns of the device kind and environment of a measurement.
WHERE = (
    "device_kind", "processor", "memory_bytes", "kind_description", "environment", "environment_created_at",
)  # fmt: skip
# Columns that are fields of the record of the same name.
OP_COST = (
    "phase", "minimum_s", "p10_s", "median_s", "samples_s", "peak_bytes", "failure", "measured_at",
    "launch_s", "clock_hz", "throttle", "reference_s", "speed",
)  # fmt: skip
LINK_COST = (
    "pattern", "group_size", "size_bytes", "minimum_s", "median_s", "samples_s", "measured_at",
)  # fmt: skip
LINK_FIT = (
    "pattern", "group_size", "latency_s", "bandwidth_bytes_per_s", "contention_factor", "residual", "measured_at",
)  # fmt: skip


def _named(row: Row, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _fields(record: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _grouped(file: Path, rows: list[dict[str, Any]]) -> tuple[PackGroup, ...]:
    kinds: dict[str, DeviceKindRecord] = {}
    places: dict[tuple[object, ...], tuple[DeviceKindRecord, EnvironmentRecord]] = {}
    groups: dict[tuple[str, str], tuple[EnvironmentRecord, dict[str, list[Any]]]] = {}
    for number, row in enumerate(rows, start=1):
        try:
            make = _MAKERS.get(row["record"])
            _must(make is not None, f"record {row['record']!r} is unknown")
            assert make is not None
            where = tuple(row[name] for name in WHERE)
            if where not in places:
                places[where] = (_kind(row), _environment(row))
            kind, environment = places[where]
            record = make(row)
            first = kinds.setdefault(kind.name, kind)
            _must(first == kind, f"device kind {kind.name} is described in two ways")
        except _NoMeasurement as error:
            raise UsageError(
                f"pack {file}: row {number}: {error}, must be as app db export wrote it; export it again"
            ) from None
        _, records = groups.setdefault(
            (kind.name, environment.fingerprint), (environment, {name: [] for name in _MAKERS})
        )
        records[row["record"]].append(record)
    return tuple(
        PackGroup(
            kinds[name],
            environment,
            tuple(records["op_cost"]),
            tuple(records["link_cost"]),
            tuple(records["link_fit"]),
        )
        for (name, _), (environment, records) in groups.items()
    )


class _NoMeasurement(Exception):
    """The reason why a row of a pack cannot be a measurement."""


def _must(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - a condition
    if not holds:
        raise _NoMeasurement(otherwise)


def _mapping(row: Row, name: str) -> dict[str, Any]:
    try:
        document = json.loads(row[name] or "")
        _must(
            isinstance(document, dict) and canonical_json(document) == row[name],
            f"{name} is no canonical JSON",
        )
    except (ValueError, RecursionError):
        raise _NoMeasurement(f"{name} is no JSON") from None
    return dict(document)


def _kind(row: Row) -> DeviceKindRecord:
    for name in ("device_kind", "processor"):
        _must(bool(row[name]) and row[name].isprintable(), f"{name} has no name")
    memory_bytes = row["memory_bytes"]
    _must(memory_bytes is not None and memory_bytes > 0, f"memory_bytes is {memory_bytes}")
    description = _mapping(row, "kind_description")
    return DeviceKindRecord(row["device_kind"], row["processor"], memory_bytes, description)


def _environment(row: Row) -> EnvironmentRecord:
    return EnvironmentRecord(_mapping(row, "environment"), created_at=_moment(row, "environment_created_at"))


def _moment(row: Row, name: str) -> datetime:
    moment = row[name]
    _must(moment is not None, f"{name} is missing")
    _must(moment <= datetime.now(UTC) + LARGEST_CLOCK_ERROR, f"{name} is {moment:%Y-%m-%d}, in the future")
    return moment.astimezone(UTC)  # type: ignore[no-any-return]


def _seconds(row: Row, name: str, *, least: float = 0.0) -> float:
    value = row[name]
    _must(value is not None and isfinite(value) and least <= value <= LONGEST_S, f"{name} is {value}")
    return float(value)


def _samples(row: Row) -> tuple[float, ...]:
    samples = row["samples_s"]
    _must(
        bool(samples)
        and all(sample is not None and isfinite(sample) and 0 <= sample <= LONGEST_S for sample in samples),
        "samples_s are no times",
    )
    return tuple(samples)


def _cost_key(row: Row) -> CostKeyRecord:
    from app.services.costs.operator_costs import cost_key_record
    from graph.calls import call_from_json

    document = _mapping(row, "key")
    try:
        call = call_from_json(document)
        _must(call.key == row["key"], "key is no call's")
        return cost_key_record(call)
    except (*MALFORMED, SoapstoneError):
        raise _NoMeasurement("key is no call's") from None


def _op_cost(row: Row) -> OpCostRecord:
    _must(row["phase"] in ("forward", "backward", "update"), f"phase is {row['phase']!r}")
    cost_key, measured_at = _cost_key(row), _moment(row, "measured_at")
    if row["failure"] is not None:
        times = [row[name] for name in ("minimum_s", "p10_s", "median_s")]
        _must(times == [None] * 3 and not row["samples_s"], "there are a failure and times")
        return OpCostRecord(
            cost_key, row["phase"], None, None, None, failure=row["failure"], measured_at=measured_at
        )
    p10_s = _seconds(row, "p10_s", least=_seconds(row, "minimum_s"))
    _seconds(row, "median_s", least=p10_s)
    peak_bytes, clock_hz = row["peak_bytes"], row["clock_hz"]
    _must(peak_bytes is None or peak_bytes >= 0, f"peak_bytes is {peak_bytes}")
    _must(clock_hz is None or 0 < clock_hz < LARGEST_CLOCK_HZ, f"clock_hz is {clock_hz}")
    if row["launch_s"] is not None:
        _seconds(row, "launch_s")
    for name in ("reference_s", "speed"):
        _must(row[name] is None or 0 < row[name] < math.inf, f"{name} is {row[name]}")
    fields = {**_named(row, OP_COST), "samples_s": _samples(row), "measured_at": measured_at}
    return OpCostRecord(cost_key, **fields)


def _check_pattern(row: Row) -> None:
    _must(bool(row["pattern"]) and row["pattern"].isprintable(), "pattern has no name")
    group_size = row["group_size"]
    _must(group_size is not None and group_size > 1, f"group_size is {group_size}")


def _link_cost(row: Row) -> LinkCostRecord:
    size_bytes, minimum_s = row["size_bytes"], _seconds(row, "minimum_s")
    _must(size_bytes is not None and size_bytes > 0, f"size_bytes is {size_bytes}")
    _check_pattern(row)
    _seconds(row, "median_s", least=minimum_s)
    fields = {"samples_s": _samples(row), "measured_at": _moment(row, "measured_at")}
    return LinkCostRecord(**{**_named(row, LINK_COST), **fields})


def _link_fit(row: Row) -> LinkFitRecord:
    for name in ("latency_s", "contention_factor", "residual"):
        if row[name] is not None:
            _seconds(row, name)
    bandwidth = row["bandwidth_bytes_per_s"]
    _must(bandwidth is None or (isfinite(bandwidth) and bandwidth > 0), f"bandwidth is {bandwidth}")
    _check_pattern(row)
    return LinkFitRecord(**{**_named(row, LINK_FIT), "measured_at": _moment(row, "measured_at")})


_MAKERS: dict[str, Callable[[Row], object]] = {
    "op_cost": _op_cost,
    "link_cost": _link_cost,
    "link_fit": _link_fit,
}
