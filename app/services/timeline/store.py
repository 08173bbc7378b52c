"""Recorded steps of executions, as Parquet files beside the database.

A row is a span of a rank, or a message or collective as a rank saw it, which has an operation and ranks; spans have ""
there. Files of earlier versions lack both columns, and have spans alone.

A file is named after its execution's number and its strategy, so nothing needs to be looked up to find it, and one
that another database left behind is not taken for this one's. It is written whole under another name, then renamed.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.db.chunk_files import readable, write_whole
from app.db.chunks import check_no_link
from app.db.failures import unwritable
from app.db.recordings import FOLDER, SCHEDULING, recording_name
from app.db.records import ExecutionRecord
from app.db.store import Store
from app.services.timeline.recorded_scheduling import step_schedulings
from app.services.timeline.timeline import Slice, StepTimeline
from graph.collectives import CollectiveKind
from graph.errors import UsageError
from graph.topology import Topology
from runtime.observe.spans import MESSAGE, TimedCommunication

if TYPE_CHECKING:
    import pyarrow as pa

    from runtime.observe.spans import Communications, RecordedSteps

# Columns that earlier versions did not write.
_ADDED = ("operation", "ranks")
_COLLECTIVES = frozenset(kind.value for kind in CollectiveKind)


@dataclass(frozen=True)
class Recording:
    """The recorded steps of an execution."""

    execution_id: int
    steps: tuple[StepTimeline, ...]

    @cached_property
    def typical(self) -> StepTimeline:
        """The step of median length (of an even number, the lower one)."""
        median = statistics.median_low([step.step_ns for step in self.steps])
        return next(step for step in self.steps if step.step_ns == median)


def write_recording(
    store: Store,
    execution: ExecutionRecord,
    recorded: RecordedSteps,
    communications: Communications = (),
    topology: Topology | None = None,
) -> Path:
    """Store the recorded steps of an execution; return the file.

    communications: those of the steps. topology: where they ran; then efficiency and potential are in the file, too,
    for queries.

    Raises:
        DatabaseError: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    path = recording_path(store, execution)
    rows: dict[str, list[Any]] = {name: [] for name in _schema().names}
    for values in chain(_span_rows(recorded), _communication_rows(communications)):
        for column, value in zip(rows.values(), values, strict=True):
            column.append(value)
    table = pa.table(rows, schema=_schema())
    if topology is not None:
        steps = [step.to_json() for step in step_schedulings(_timelines(rows), topology)]
        table = table.replace_schema_metadata({SCHEDULING: json.dumps(steps)})
    check_no_link(store.database, path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path.parent, error) from None
    content = pa.BufferOutputStream()
    parquet.write_table(table, content, compression="zstd", write_page_checksum=True)
    write_whole(path, content)
    return path


def _span_rows(recorded: RecordedSteps) -> Iterator[tuple[Any, ...]]:
    for step, ranks in enumerate(recorded):
        for rank, spans in enumerate(ranks):
            for span in spans:
                label = span.label
                yield step, rank, label.kind, label.subject, label.name, span.start_ns, span.end_ns, "", ""


def _communication_rows(communications: Communications) -> Iterator[tuple[Any, ...]]:
    for step, ranks in enumerate(communications):
        for rank, items in enumerate(ranks):
            for item in items:
                kind = "transfer" if item.operation == MESSAGE else "collective"
                members = ",".join(str(member) for member in item.ranks)
                yield (
                    step, rank, kind, item.subject, f"{item.operation} {item.subject}", item.start_ns, item.end_ns,
                    item.operation, members,
                )  # fmt: skip


def read_recording(store: Store, execution: ExecutionRecord) -> Recording:
    """Return the recorded steps of an execution.

    Raises:
        UsageError: it recorded none.
        DamagedDataError: the file cannot be read.
    """
    path = recording_path(store, execution)
    if not path.is_file():
        raise UsageError(
            f"execution {execution.id}: has no recorded step, must have one; run it again with --profile"
        )
    return Recording(execution.id, read_file(path))


def find_recording(store: Store, strategy_id: int, topology_id: int, training_id: int) -> Recording | None:
    """Return the newest recording of a strategy on a topology under a training, or None."""
    for execution in store.executions(strategy_id=strategy_id, limit=1000):
        alike = (execution.topology_id, execution.training_id) == (topology_id, training_id)
        if alike and recording_path(store, execution).is_file():
            return read_recording(store, execution)
    return None


def recording_path(store: Store, execution: ExecutionRecord) -> Path:
    """Return the path of the recorded steps of an execution, which need not exist."""
    digest = store.strategy(execution.strategy_id).digest
    return store.database.trace_folder / FOLDER / recording_name(execution.id, digest)


def _schema() -> pa.Schema:
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field("step", pa.int16(), nullable=False),
            pa.field("rank", pa.int16(), nullable=False),
            pa.field("kind", text, nullable=False),
            pa.field("subject", text, nullable=False),
            pa.field("name", text, nullable=False),
            pa.field("start_ns", pa.int64(), nullable=False),
            pa.field("end_ns", pa.int64(), nullable=False),
            pa.field("operation", text, nullable=False),
            pa.field("ranks", text, nullable=False),
        ]
    )


def read_file(path: Path) -> tuple[StepTimeline, ...]:
    """Return the recorded steps of a file.

    Raises:
        DamagedDataError: it cannot be read.
    """
    import pyarrow as pa
    from pyarrow import parquet

    with readable(path):
        stored = parquet.read_schema(path).names
        schema = pa.schema([field for field in _schema() if field.name in stored or field.name not in _ADDED])
        table = parquet.read_table(path, schema=schema, page_checksum_verification=True)
        table.validate()
        if any(column.null_count for column in table.columns):
            raise ValueError("a value is missing")
        columns = table.to_pydict()
        if not columns["rank"] or min(columns["rank"]) < 0:
            raise ValueError("it has no step, or a rank below 0")
        return _timelines(columns)


def _timelines(columns: Mapping[str, Sequence[Any]]) -> tuple[StepTimeline, ...]:
    steps: dict[int, dict[int, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    communications: dict[tuple[int, int], list[TimedCommunication]] = defaultdict(list)
    has_communications = set(_ADDED) <= set(columns)
    nothing, last_rank = [""] * len(columns["rank"]), max(columns["rank"])
    values = (columns.get(name, nothing) for name in _schema().names)
    for step, rank, kind, subject, name, start_ns, end_ns, operation, members in zip(*values, strict=True):
        if operation:
            ranks = tuple(int(member) for member in members.split(","))
            if min(ranks) < 0 or max(ranks) > last_rank:
                raise ValueError("it has a message or collective of a rank that has no step")
            if len(ranks) != 2 if operation == MESSAGE else operation not in _COLLECTIVES:
                raise ValueError(f"it has an operation {operation!r} of {len(ranks)} ranks")
            communications[step, rank].append(TimedCommunication(operation, ranks, subject, start_ns, end_ns))
        else:
            steps[step][rank].append(Slice(kind, subject, name, start_ns, end_ns))
    return tuple(
        StepTimeline(
            max(slices[-1].end_ns for slices in ranks.values()),
            # A rank that had nothing to do has no row.
            tuple(tuple(ranks.get(rank, ())) for rank in range(max(ranks) + 1)),
            communications=tuple(tuple(communications[step, rank]) for rank in range(max(ranks) + 1))
            if has_communications
            else None,
        )
        for step, ranks in sorted(steps.items())
    )
