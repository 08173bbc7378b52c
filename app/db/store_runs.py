"""The store's methods for searches, traces, simulations and executions."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from app.db import models, owners
from app.db.engine import Database
from app.db.records import (
    ExecutionRecord,
    RunSpeed,
    SearchOutcome,
    SearchRecord,
    SearchStatus,
    SimulationRecord,
    TraceKind,
    TraceRecord,
    TrainingRecord,
    utc_now,
)
from app.db.sql import (
    StorePart,
    insert_ignoring,
    insert_row,
    put_named,
    read_one,
    row_of,
    update_by_id,
    upsert_newer,
)
from graph.canonical import canonical_json
from graph.errors import DatabaseError, UsageError

_SIMULATION_KEY = ("strategy_id", "topology_id", "training_id", "task_order", "cost_digest")


class RunStore(StorePart):
    """Searches, their traces, simulations and executions."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._running: set[tuple[str, int]] = set()
        self._heartbeat = owners.Heartbeat(self._beat)

    def close(self) -> None:
        """Close all connections; the store connects again if it is used again."""
        self._heartbeat.stop()
        self.database.dispose()

    def start_search(self, search: SearchRecord) -> int:
        """Store a search that this process begins; return its id."""
        return self._start(models.searches, row_of(search))

    def finish_search(self, search_id: int, status: SearchStatus, outcome: SearchOutcome) -> None:
        """Store how a search ended, now."""
        self._change_search(search_id, {**row_of(outcome), "status": status, "finished_at": utc_now()})
        self._end(models.searches, search_id)

    def halt_search(self, search_id: int, status: SearchStatus) -> None:
        """Store that a search ended, now, without a result: how far it came stays as it was stored last."""
        self._change_search(search_id, {"status": status, "finished_at": utc_now()})
        self._end(models.searches, search_id)

    def resume_search(self, search_id: int) -> SearchRecord:
        """Mark a search as running again, in this process; return its record before.

        Raises:
            UsageError: there is no such search, it is finished, or a process still runs it.
        """
        table = models.searches
        before = self.search(search_id)
        changes = {
            "status": "running",
            "finished_at": None,
            "owner": owners.this_process(),
            "alive_at": utc_now(),
        }
        changed = 0
        if before.status in ("interrupted", "failed"):
            # Two processes may try at once: one of them finds it running.
            stopped = sa.and_(table.c.id == search_id, table.c.status == before.status)
            with self.write() as connection:
                changed = connection.execute(table.update().where(stopped).values(changes)).rowcount
        if not changed:
            status = self.search(search_id).status
            advice = "start a new one" if status == "finished" else "wait for it, or stop it first"
            raise UsageError(
                f"search {search_id}: is {status}, must be interrupted or failed to be resumed; {advice}"
            )
        self._watch(table, search_id)
        return before

    def end_orphans(self, mend: Callable[[int], None] | None = None) -> list[int]:
        """Mark searches and executions that run in no process any more as interrupted; return the ids of the searches.

        mend: called with each of these searches while it is still running, in this process: until it returns,
            nobody else can go on with the search.
        """
        now = utc_now()
        dead: dict[str, list[sa.RowMapping]] = {}
        with self.read() as connection:
            for table in (models.searches, models.executions):
                query = sa.select(table.c.id, table.c.owner, table.c.alive_at).where(
                    table.c.status == "running"
                )
                rows = connection.execute(query).mappings()
                dead[table.name] = [row for row in rows if owners.is_dead(row["owner"], row["alive_at"], now)]
        for row in dead["executions"]:
            ended_at = row["alive_at"] or now
            self._change_owned(models.executions, row["id"], row["owner"], _interrupted(ended_at))
        ended: list[int] = []
        this_process = owners.this_process()
        for row in dead["searches"]:
            # Others may find it at the same moment: one of them takes it.
            taken = {"owner": this_process, "alive_at": now}
            if not self._change_owned(models.searches, row["id"], row["owner"], taken):
                continue
            try:
                if mend is not None:
                    mend(row["id"])
            finally:
                last = {"owner": row["owner"], "alive_at": row["alive_at"]}
                ended_at = row["alive_at"] or now
                self._change_owned(
                    models.searches, row["id"], this_process, {**last, **_interrupted(ended_at)}
                )
            ended.append(row["id"])
        return ended

    def search(self, search_id: int) -> SearchRecord:
        """Return the search with that id.

        Raises:
            UsageError: there is no such search.
        """
        record = self._first(SearchRecord, id=search_id)
        if record is None:
            raise UsageError(
                f"search {search_id}: is not in database {self.database.name}, must be; list them by: "
                'app query "FROM searches"'
            )
        return record

    def searches(self, *, graph_id: int | None = None, limit: int = 100) -> list[SearchRecord]:
        """Return the newest searches, of one graph if asked."""
        return self._newest(SearchRecord, "started_at", limit, graph_id=graph_id)

    def record_traces(
        self, search_id: int, traces: Sequence[TraceRecord], outcome: SearchOutcome | None = None
    ) -> None:
        """Register Parquet chunks of a search, and store how far the search has come, in one transaction.

        Their folder becomes the search's `trace_path`. Registering a chunk again changes nothing.
        """
        row = {} if outcome is None else row_of(outcome)
        if outcome is not None and outcome.best_strategy_id is None:
            del row["best_strategy_id"]  # what it found before it was resumed
        if traces:
            row["trace_path"] = traces[0].path.rpartition("/")[0]
        if not row:
            return
        with self.write() as connection:
            insert_ignoring(connection, models.traces, [row_of(trace) for trace in traces], "path")
            connection.execute(update_by_id(models.searches, tuple(row)), {"this_id": search_id, **row})

    def replace_traces(
        self, search_id: int, kind: TraceKind, old: Sequence[str], path: str, rows: int
    ) -> None:
        """Register a chunk in place of the chunks that it was merged from, in one transaction."""
        table = models.traces
        trace = TraceRecord(search_id=search_id, kind=kind, path=path, rows=rows)
        with self.write() as connection:
            put_named(connection, table, row_of(trace), "path")
            connection.execute(table.delete().where(table.c.path.in_(list(old))))

    def traces(self, *, search_id: int | None = None) -> list[TraceRecord]:
        """Return the registered chunks in the order of their paths, of one search if asked."""
        return self._all(TraceRecord, "path", search_id=search_id)

    def unmerged_searches(self) -> list[int]:
        """Return the ids of the searches that are not running and have several chunks of one kind."""
        searches, traces = models.searches, models.traces
        query = (
            sa.select(searches.c.id)
            .distinct()
            .join(traces, traces.c.search_id == searches.c.id)
            .where(searches.c.status != "running")
            .group_by(searches.c.id, traces.c.kind)
            .having(sa.func.count() > 1)
            .order_by(searches.c.id)
        )
        with self.read() as connection:
            return list(connection.execute(query).scalars())

    def put_simulation(self, simulation: SimulationRecord) -> int:
        """Store a prediction, once a strategy, topology, training, order and costs; return its id.

        One that is stored again becomes the newest, and stays with the search that stored it first.
        """
        table = models.simulations
        row = row_of(simulation)
        name = sa.and_(*(table.c[column] == row[column] for column in _SIMULATION_KEY))
        with self.write() as connection:
            upsert_newer(connection, table, [row], _SIMULATION_KEY, "created_at", keep=("search_id",))
            return int(connection.execute(sa.select(table.c.id).where(name)).scalar_one())

    def simulations(
        self, *, strategy_id: int | None = None, search_id: int | None = None, limit: int = 100
    ) -> list[SimulationRecord]:
        """Return the newest simulations, of one strategy or search if asked."""
        equal = {"strategy_id": strategy_id, "search_id": search_id}
        return self._newest(SimulationRecord, "created_at", limit, **equal)

    def start_execution(self, execution: ExecutionRecord) -> int:
        """Store a run that this process begins; return its id."""
        return self._start(models.executions, row_of(execution))

    def finish_execution(
        self,
        execution_id: int,
        step_times_s: Sequence[float],
        *,
        largest_deviation: float | None = None,
        peak_bytes: Sequence[int] | None = None,
        process_bytes: Sequence[int] | None = None,
        lost_s: Sequence[float] | None = None,
        undisturbed_s: float | None = None,
        speed: RunSpeed | None = None,
    ) -> ExecutionRecord:
        """Store the times of a run's steps and their statistics; return the finished row.

        Throughput is the training's batch size over the median. The other arguments are as in `ExecutionRecord`.

        Raises:
            DatabaseError: there are no step times, or no such execution.
        """
        if not step_times_s:
            raise DatabaseError(
                f"execution {execution_id}: has no step times, must have one; run at least one step"
            )
        executions, trainings = models.executions, models.trainings
        its_training = (
            sa.select(trainings)
            .join(executions, executions.c.training_id == trainings.c.id)
            .where(executions.c.id == execution_id)
        )
        median_s = statistics.median(step_times_s)
        row = {
            "status": "finished",
            "step_times_s": canonical_json([float(time_s) for time_s in step_times_s]),
            "minimum_s": min(step_times_s),
            "median_s": median_s,
            "mean_s": statistics.fmean(step_times_s),
            "largest_deviation": largest_deviation,
            "peak_bytes": _list_text(peak_bytes),
            "process_bytes": _list_text(process_bytes),
            "lost_s": _list_text(lost_s),
            "undisturbed_s": undisturbed_s,
            "speed": None if speed is None else speed.speed,
            "slowdown": None if speed is None else speed.slowdown,
            "finished_at": utc_now(),
        }
        with self.write() as connection:
            training = read_one(connection, TrainingRecord, its_training)
            if training is not None and median_s > 0:
                row["throughput_samples_per_s"] = training.batch_size / median_s
            connection.execute(executions.update().where(executions.c.id == execution_id).values(row))
        self._end(executions, execution_id)
        return self.execution(execution_id)

    def fail_execution(self, execution_id: int, failure: str | None) -> None:
        """Store that a run has ended now, and why it failed; None: it was interrupted.

        Raises:
            DatabaseError: there is no such execution.
        """
        table = models.executions
        row = _interrupted(utc_now())
        if failure is not None:
            row |= {"status": "failed", "failure": failure}
        with self.write() as connection:
            connection.execute(table.update().where(table.c.id == execution_id).values(row))
        self._end(table, execution_id)
        self.execution(execution_id)  # says so if there is none

    def execution(self, execution_id: int) -> ExecutionRecord:
        """Return the execution with that id.

        Raises:
            DatabaseError: there is no such execution.
        """
        record = self._first(ExecutionRecord, id=execution_id)
        if record is None:
            raise DatabaseError(
                f"execution {execution_id}: is not in database {self.database.name}, must be; list them by: "
                'app query "FROM executions"'
            )
        return record

    def executions(self, *, strategy_id: int | None = None, limit: int = 100) -> list[ExecutionRecord]:
        """Return the newest executions, of one strategy if asked."""
        return self._newest(ExecutionRecord, "created_at", limit, strategy_id=strategy_id)

    def _start(self, table: sa.Table, row: dict[str, Any]) -> int:
        owned = {**row, "owner": owners.this_process(), "alive_at": utc_now()}
        with self.write() as connection:
            number = insert_row(connection, table, owned)
        self._watch(table, number)
        return number

    def _watch(self, table: sa.Table, number: int) -> None:
        self._running.add((table.name, number))
        self._heartbeat.start()

    def _end(self, table: sa.Table, number: int) -> None:
        self._running.discard((table.name, number))
        if not self._running:
            self._heartbeat.stop()

    def _beat(self) -> None:
        # Whoever is busy writing for a minute is no reason to end; the next beat comes.
        with contextlib.suppress(DatabaseError), self.write() as connection:
            for name, number in tuple(self._running):
                table = models.metadata.tables[name]
                connection.execute(table.update().where(table.c.id == number).values(alive_at=utc_now()))

    def _change_owned(self, table: sa.Table, number: int, owner: str | None, row: dict[str, Any]) -> bool:
        """Change a running row if its owner is still this one; return whether it was."""
        owned = sa.and_(
            table.c.id == number, table.c.status == "running", table.c.owner.is_not_distinct_from(owner)
        )
        with self.write() as connection:
            return connection.execute(table.update().where(owned).values(row)).rowcount == 1

    def _change_search(self, search_id: int, row: dict[str, Any]) -> None:
        table = models.searches
        with self.write() as connection:
            changed = connection.execute(table.update().where(table.c.id == search_id).values(row))
        if changed.rowcount == 0:
            self.search(search_id)  # says that there is none


def _list_text(numbers: Sequence[float] | None) -> str | None:
    return None if numbers is None else canonical_json(list(numbers))


def _interrupted(moment: datetime) -> dict[str, Any]:
    return {"status": "interrupted", "finished_at": moment}
