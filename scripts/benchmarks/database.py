"""The database under load: proposals stored and counted, costs looked up, and many processes that write at once.

Proposals are drawn as a search draws them (`search.algorithms.moves`) and recorded by what records them then
(`app.services.trace.recorder`); their times are made up, spread as simulated ones are. The overhead is that of real
searches (`scripts.benchmarks.recording`).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.recording import overheads, trace_recorder
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement

if TYPE_CHECKING:
    from app.db.store import Store
    from app.services.models.models import ImportedModel
    from search.algorithms.proposal_log import ProposalBatch

BYTES_PER_PROPOSAL = 20
GROUP_BY_S = 1.0
OVERHEAD_DEVICES = 16
# Seconds of a search: pairs of them.
SEARCHES = {5.0: 12, 30.0: 4}
LOOKUP_S = 0.05
WRITERS = 8
BATCH = 1024
CHAINS = 4
ACCEPTED = 0.05
COSTS_A_ROUND = 50
GROUP_BY = """
SELECT operator, accepted, count(*), min(simulated_ns), avg(simulated_ns) FROM proposals GROUP BY operator, accepted
"""


def run(*, quick: bool) -> BenchmarkResult:
    """Measure on temporary databases; on PostgreSQL where a server's programs are found.

    Raises:
        RuntimeError: rows were lost, or a process failed.
    """
    os.environ.pop("SOAPSTONE_DATABASE_URL", None)
    model = _imported(quick=quick)
    sizes = {8: 20_000 if quick else 500_000, 1024: 4_000 if quick else 100_000}
    total = (100_000 if quick else 10_000_000) // BATCH * BATCH
    rows: list[MeasuredValue] = []
    for devices, count in sizes.items():
        rows.append(_bytes_per_proposal(model, devices, count))
    rows += _ingestion(model, total, pool=sizes[8] // 4)
    with temporary_store() as store:
        begin = partial(begun, store, model, OVERHEAD_DEVICES)
        rows += overheads(store, begin, model, OVERHEAD_DEVICES, {2.0: 2} if quick else SEARCHES)
    rows += _lookup(model, repetitions=5 if quick else 21)
    rows += _writers(rounds=4 if quick else 40)
    return BenchmarkResult(
        benchmark="database",
        conditions={
            "network": model.graph.name,
            "proposals": total,
            **{f"proposals at {devices} devices": count for devices, count in sizes.items()},
            "devices of the searches": OVERHEAD_DEVICES,
            "writers": WRITERS,
        },
        measurements=rows,
    )


def _imported(*, quick: bool) -> ImportedModel:
    from app.services.models.models import import_graph, requested_model

    return import_graph(
        requested_model("inception", "small" if quick else "paper", None), batch_norm="synchronized"
    )


@contextmanager
def temporary_store() -> Iterator[Store]:
    """Open a new database that is removed at the end."""
    from app.db.store import Store

    with (
        tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder,
        Store.open(Path(folder, "x.sqlite")) as store,
    ):
        yield store


def begun(store: Store, model: ImportedModel, devices: int) -> int:
    """Store a search that begins."""
    from app.db.records import SearchRecord, TopologyRecord, TrainingRecord
    from app.services.predict.predict import graph_record

    return store.start_search(
        SearchRecord(
            store.put_graph(graph_record(model)),
            store.put_topology(TopologyRecord(f"{devices}", f"{devices} devices", devices, "{}")),
            store.put_training(TrainingRecord("x", model.batch_size, "{}")),
            "mcmc",
            0,
        )
    )


def _walked(model: ImportedModel, devices: int, count: int) -> Iterator[ProposalBatch]:
    """Yield proposals of chains that walk as those of a search, accepting now and then, at no simulation's cost."""
    import numpy as np

    from search.algorithms.moves import Moves, shares_for
    from search.algorithms.proposal_log import ProposalBatch
    from search.space.baselines import data_parallel

    moves = Moves(model.graph, devices, shares_for(devices))
    rng = np.random.default_rng(0)
    walking = [list(data_parallel(model.graph, devices).configurations) for _ in range(CHAINS)]
    for first in range(0, count, BATCH):
        size = min(BATCH, count - first)
        # Chains take turns of 32.
        chain = (first + np.arange(size)) // 32 % CHAINS
        accepted = rng.random(size) < ACCEPTED
        drawn = []
        for number, taken in zip(chain.tolist(), accepted.tolist(), strict=True):
            move = moves.propose(walking[number], rng)
            drawn.append(move)
            if taken:
                for index, configuration in move.changed.items():
                    walking[number][index] = configuration
        simulated = (2e7 * np.exp(0.2 * rng.standard_normal(size))).astype(np.int64)
        yield ProposalBatch(
            chain=chain.astype(np.int32),
            step=first + np.arange(1, size + 1),
            operator=np.array([move.head for move in drawn], np.int32),
            configurations=[move.configuration for move in drawn],
            origin=[move.origin for move in drawn],
            # Some are cut at their bound.
            simulated_ns=np.where(rng.random(size) < 0.3, -2, simulated),
            bound_ns=simulated,
            accepted=accepted,
            others={number: move.others for number, move in enumerate(drawn) if move.others},
        )


@contextmanager
def _recording(
    store: Store, search_id: int, model: ImportedModel, devices: int
) -> Iterator[Callable[[ProposalBatch], None]]:
    """Yield the function that records a search's batches; all of them are written at the end."""
    from search.space.baselines import data_parallel

    with trace_recorder(store, search_id, model, devices) as recorder:
        for chain in range(CHAINS):
            recorder.on_start(chain, "data_parallel", data_parallel(model.graph, devices), None)
        yield recorder.on_proposals


def _size(store: Store, search_id: int) -> int:
    from app.db.chunks import trace_folder

    return sum(path.stat().st_size for path in trace_folder(store, search_id).iterdir())


def _bytes_per_proposal(model: ImportedModel, devices: int, count: int) -> MeasuredValue:
    with temporary_store() as store:
        search_id = begun(store, model, devices)
        with _recording(store, search_id, model, devices) as record:
            for batch in _walked(model, devices, count):
                record(batch)
        size = _size(store, search_id)
    return measurement(
        f"a proposal on disk at {devices} devices", size / count, "bytes", at_most=BYTES_PER_PROPOSAL
    )


def _ingestion(model: ImportedModel, total: int, pool: int) -> list[MeasuredValue]:
    """Record many proposals, as fast as they are taken, then group all of them."""
    import numpy as np

    from app.analytics.duck import connect

    batches = list(_walked(model, 8, pool // BATCH * BATCH))
    with temporary_store() as store:
        search_id = begun(store, model, 8)
        began = time.perf_counter()
        with _recording(store, search_id, model, 8) as record:
            for number, done in enumerate(range(0, total, BATCH)):
                batch = _drawn_anew(batches[number % len(batches)], number // len(batches))
                record(replace(batch, step=done + np.arange(1, BATCH + 1)))
            taken_s = time.perf_counter() - began
        written_s = time.perf_counter() - began
        size = _size(store, search_id)
        with connect(store.database) as connection:
            totals = connection.execute("SELECT count(*), sum(step) FROM proposals").fetchone()
            if totals != (total, total * (total + 1) // 2):
                raise RuntimeError(f"database: {totals} are count and sum of the steps of {total} proposals")
            group_by_s = _fastest(lambda: connection.execute(GROUP_BY).fetchall(), 5)
    return [
        measurement("proposals taken", total / taken_s, "/s"),
        measurement("proposals written, chunks merged", total / written_s, "/s"),
        measurement("a proposal of these on disk", size / total, "bytes", at_most=BYTES_PER_PROPOSAL),
        measurement(f"group-by over {total:.0e} in DuckDB", group_by_s, "s", at_most=GROUP_BY_S),
    ]


def _drawn_anew(batch: ProposalBatch, round_: int) -> ProposalBatch:
    """Return a batch with other permutations, so that as many configurations are new as in a search."""
    from search.space.placements import Drawn, Permuted

    return replace(
        batch,
        origin=[
            Drawn(origin.degrees, Permuted((origin.placement.seed + round_) % 2**32))
            if isinstance(origin, Drawn) and isinstance(origin.placement, Permuted)
            else origin
            for origin in batch.origin
        ],
    )


def _fastest(action: Callable[[], Any], repetitions: int) -> float:
    times_s = []
    for _ in range(repetitions):
        began = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - began)
    return min(times_s)


def _lookup(model: ImportedModel, repetitions: int) -> list[MeasuredValue]:
    """Look up the costs of all calls that a network is profiled for, among those of another ten thousand."""
    from app.db.records import DeviceKindRecord, EnvironmentRecord
    from app.services.costs.operator_costs import cost_key_record
    from search.cost.calls_to_profile import calls_to_profile

    calls = calls_to_profile(model.graph, 2)
    others = [_made_up(0, number) for number in range(10_000)]
    with temporary_store() as store:
        kind = store.put_device_kind(DeviceKindRecord("cpu", "made up", 1))
        environment = store.put_environment(EnvironmentRecord({}))
        own = [replace(others[0], cost_key=cost_key_record(call)) for call in calls]
        costs = [replace(cost, phase=phase) for cost in own for phase in ("forward", "backward")]
        store.put_op_costs(kind, environment, [*costs, *others])
        digests = [call.digest for call in calls]
        medians = store.op_cost_medians(kind, environment, digests)
        if len(medians) != len(costs):
            raise RuntimeError(f"database: {len(medians)} of {len(costs)} costs were found")
        lookup_s = _fastest(lambda: store.op_cost_medians(kind, environment, digests), repetitions)
    return [
        measurement(f"{len(costs)} costs of the network looked up", lookup_s, "s", at_most=LOOKUP_S),
    ]


def _made_up(writer: int, number: int) -> Any:
    """Return a cost of this writer alone, as large as a measured one."""
    from app.db.records import CostKeyRecord, OpCostRecord
    from graph.canonical import canonical_json, digest

    key = canonical_json({"target": "aten.mm", "writer": writer, "number": number, "padding": "x" * 300})
    cost_key = CostKeyRecord(digest(key), "aten.mm", key, 2**40, 2**30)
    samples_s = tuple(1e-3 + 1e-6 * sample for sample in range(20))
    return OpCostRecord(cost_key, "forward", 1e-3, 1.1e-3, 1.2e-3, samples_s)


def _writers(rounds: int) -> list[MeasuredValue]:
    """Let processes write costs and chunks at once, on every kind of database that there is."""
    rows = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="soapstone-bench-"))
        # The traces beside a PostgreSQL database lie in the user's data folder.
        os.environ["XDG_DATA_HOME"] = folder
        urls = {"SQLite": f"sqlite:///{folder}/x.sqlite"}
        if (server := _postgresql(stack)) is not None:
            urls["PostgreSQL"] = server
        for name, url in urls.items():
            wall_s = _write_at_once(url, rounds)
            count = WRITERS * rounds * (COSTS_A_ROUND + 1)
            rows.append(
                measurement(f"{name}, {WRITERS} processes at once, nothing lost", count / wall_s, "rows/s")
            )
    return rows


def _postgresql(stack: ExitStack) -> str | None:
    """Start a server; return the URL of an empty database, or None where there is no server or no driver."""
    import importlib.util

    import sqlalchemy as sa

    from tests.app.db import postgres

    programs = postgres.programs()
    if programs is None or importlib.util.find_spec("psycopg") is None:
        return None
    try:
        host = stack.enter_context(postgres.server(programs))
    except PermissionError:
        return None
    engine = sa.create_engine(
        f"postgresql+psycopg://soapstone@/postgres?host={host}", isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.execute(sa.text("CREATE DATABASE bench"))
    engine.dispose()
    return f"postgresql://soapstone@/bench?host={host}"


def _write_at_once(url: str, rounds: int) -> float:
    """Return the seconds from the moment when all begin to that when the last one has ended.

    Raises:
        RuntimeError: a process failed, or a row is not there.
    """
    from app.db.store import Store

    with Store.open(url):
        pass  # makes the tables
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(WRITERS + 1)
    processes = [
        context.Process(target=write, args=(url, start, number, rounds)) for number in range(WRITERS)
    ]
    for process in processes:
        process.start()
    start.wait()
    began = time.perf_counter()
    for process in processes:
        process.join()
    wall_s = time.perf_counter() - began
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise RuntimeError(f"database: writers ended with {codes}")
    with Store.open(url) as store:
        counts = store.table_counts()
    expected = {"op_costs": WRITERS * rounds * COSTS_A_ROUND, "traces": WRITERS * rounds, "searches": WRITERS}
    stored = {name: counts[name] for name in expected}
    if stored != expected:
        raise RuntimeError(f"database: has {stored} rows, must have {expected}")
    return wall_s


def write(url: str, start: Barrier, writer: int, rounds: int) -> None:
    """Write costs and register chunks, round by round; one of the processes that do so at once."""
    from app.db.records import (
        DeviceKindRecord,
        EnvironmentRecord,
        GraphRecord,
        SearchRecord,
        TopologyRecord,
        TraceRecord,
        TrainingRecord,
    )
    from app.db.store import Store

    costs: list[Sequence[Any]] = [
        [_made_up(writer, COSTS_A_ROUND * number + index) for index in range(COSTS_A_ROUND)]
        for number in range(rounds)
    ]
    with Store.open(url) as store:
        start.wait()
        kind = store.put_device_kind(DeviceKindRecord("cpu", "made up", 1))
        environment = store.put_environment(EnvironmentRecord({}))
        search_id = store.start_search(
            SearchRecord(
                store.put_graph(GraphRecord("g", "made-up", {}, 1, 1, 1, "{}")),
                store.put_topology(TopologyRecord("t", "made-up", 8, "{}")),
                store.put_training(TrainingRecord("r", 8, "{}")),
                "mcmc",
                writer,
            )
        )
        for number, some in enumerate(costs):
            store.put_op_costs(kind, environment, some)
            path = f"x.traces/search-{search_id}/chunk-{number:06d}"
            store.record_traces(search_id, [TraceRecord(search_id, "proposals", path, 1024)])
        store.halt_search(search_id, "finished")
