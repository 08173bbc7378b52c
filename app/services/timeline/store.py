"""Recorded steps of executions, as Parquet files beside the database.

A file is named after its execution's number and its strategy, so nothing needs to be looked up to find it, and one
that another database left behind is not taken for this one's. It is written whole under another name, then renamed.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.db.chunk_files import readable
from app.db.chunks import check_no_link
from app.db.failures import unwritable
from app.db.records import ExecutionRecord
from app.db.store import Store
from app.services.timeline.timeline import Slice, StepTimeline
from graph.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from runtime.observe.spans import Recorded

FOLDER = "executions"
_DIGITS = 12


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


def write_recording(store: Store, execution: ExecutionRecord, recorded: Recorded) -> Path:
    """Store the recorded steps of an execution; return the file.

    Raises:
        DatabaseError: it cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    path = recording_path(store, execution)
    rows: dict[str, list[Any]] = {name: [] for name in _schema().names}
    for step, ranks in enumerate(recorded):
        for rank, spans in enumerate(ranks):
            for span in spans:
                label = span.label
                values = (step, rank, label.kind, label.subject, label.name, span.start_ns, span.end_ns)
                for column, value in zip(rows.values(), values, strict=True):
                    column.append(value)
    check_no_link(store.database, path.parent)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            parquet.write_table(
                pa.table(rows, schema=_schema()), file, compression="zstd", write_page_checksum=True
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path.parent, error) from None
    return path


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


def recording_name(execution_id: int, strategy_digest: str) -> str:
    """Return the name of the file with the recorded steps of an execution."""
    return f"execution-{execution_id:06d}-{strategy_digest[:_DIGITS]}.parquet"


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
        ]
    )


def read_file(path: Path) -> tuple[StepTimeline, ...]:
    """Return the recorded steps of a file.

    Raises:
        DamagedDataError: it cannot be read.
    """
    from pyarrow import parquet

    with readable(path):
        table = parquet.read_table(path, schema=_schema(), page_checksum_verification=True)
        table.validate()
        if any(column.null_count for column in table.columns):
            raise ValueError("a value is missing")
        columns = table.to_pydict()
        if not columns["rank"] or min(columns["rank"]) < 0:
            raise ValueError("it has no step, or a rank below 0")
        return _timelines(columns)


def _timelines(columns: Mapping[str, Sequence[Any]]) -> tuple[StepTimeline, ...]:
    steps: dict[int, dict[int, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    for step, rank, *values in zip(*(columns[name] for name in _schema().names), strict=True):
        steps[step][rank].append(Slice(*values))
    return tuple(
        StepTimeline(
            max(slices[-1].end_ns for slices in ranks.values()),
            # A rank that had nothing to do has no row.
            tuple(tuple(ranks.get(rank, ())) for rank in range(max(ranks) + 1)),
        )
        for _, ranks in sorted(steps.items())
    )
