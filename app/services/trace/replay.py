"""Trace replay: the strategy of any chain after any step of a search, exactly.

A head has the configuration of the last accepted proposal that changed it, else that of the chain's start; all other
operators follow their heads. Nothing is simulated or drawn again, so a strategy depends neither on costs nor on random
numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from app.db import chunks
from app.db.chunk_files import CHECKPOINT, GROUPS, read_table, read_text
from app.db.columns import numbers, view
from app.db.failures import as_written, damaged_chunk, row_name
from app.db.reading import reading
from app.db.records import GraphRecord, SearchRecord, StrategyRecord, TraceKind
from app.db.references import required
from app.db.store import Store
from app.services.trace.recorder import RecordedProposals, groups_of, snapshots_of
from graph.axes import tasks
from graph.canonical import canonical_json
from graph.errors import UsageError
from graph.operator_ranges import ranges_from_json, ranges_to_json
from graph.operators import ValueKind
from graph.strategy import FORMAT, Configuration, Sharding, Strategy
from search.algorithms.moves import copied
from search.algorithms.proposal_log import ChainSnapshot, ResumedChain
from search.space.groups import Group, follow
from search.space.placements import Permuted, Strided, place

if TYPE_CHECKING:
    import pyarrow as pa

Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Visited:
    """The stored strategy of a chain after `step` proposals."""

    search_id: int
    chain: int
    step: int
    record: StrategyRecord
    simulated_ns: int | None


def _interpreting(
    method: Callable[Concatenate[TraceReader, Given], Result],
) -> Callable[Concatenate[TraceReader, Given], Result]:
    """Return a method of the reader that raises `DamagedDataError` for whatever the trace cannot hold."""

    @wraps(method)
    def interpreted(reader: TraceReader, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with as_written(f"trace folder {reader.folder}"):
            return method(reader, *args, **kwargs)

    return interpreted


class TraceReader:
    """Reader of one search's trace as of now; beside a process that writes it, to be used within `app.db.reading`.

    Raises (all methods):
        UsageError: there is no such chain or step.
        DamagedDataError: a chunk is missing, cannot be read, or holds what no search wrote.
    """

    def __init__(self, store: Store, search_id: int) -> None:
        self.folder = chunks.trace_folder(store, search_id)
        self._search_id = search_id
        # Of one moment: proposals that are registered later may have configurations that are, too.
        traces = store.traces(search_id=search_id)
        self._paths = {
            kind: chunks.whole_run(self.folder, sorted(chunks.chunks_of(traces, kind)))
            for kind in chunks.STEMS
        }
        self._entries: dict[int, dict[str, Any]] = {}

    @property
    def has_starts(self) -> bool:
        """Whether any chain began."""
        return bool(self._paths["starts"])

    @_interpreting
    def groups(self) -> list[Group]:
        """Return the groups that the search's proposals changed."""
        for path in reversed(self._paths["starts"]):
            text = read_text(path, GROUPS)
            if text is not None:
                return groups_of(text)
        raise UsageError(
            f"search {self._search_id}: its trace has no starts, must have them to rebuild a strategy; choose another"
        )

    @_interpreting
    def snapshots(self) -> list[ChainSnapshot]:
        """Return the chains as they were written last; none if nothing was written yet."""
        for path in reversed(self._paths["proposals"]):
            text = read_text(path, CHECKPOINT)
            if text is not None:
                return snapshots_of(text)
        return []

    @_interpreting
    def next_code(self) -> int:
        """Return a code above those of all configurations; where several processes gave them, some have none."""
        codes = view(self._table("configurations", ["configuration"])["configuration"])
        return int(codes.max()) + 1 if len(codes) else 0

    @_interpreting
    def starts(self, chain: int) -> dict[int, int]:
        """Return the codes of a chain's start by operator: of all heads, and of operators that do not follow theirs."""
        if not self.has_starts:
            raise UsageError(
                f"search {self._search_id}: was ended before a chain began, must have begun one; continue it by "
                f"app search --resume {self._search_id}"
            )
        table = self._table("starts", ["operator", "configuration"], [("chain", "=", chain)]).to_pydict()
        if not table["operator"]:
            raise UsageError(
                f"search {self._search_id}: has no chain {chain}, must have it; see view proposals by app query"
            )
        return dict(zip(table["operator"], table["configuration"], strict=True))

    @_interpreting
    def codes(self, chain: int, step: int) -> dict[int, int]:
        """Return a chain's codes after `step` proposals: of heads, and of operators that do not follow theirs yet."""
        current = self.starts(chain)
        groups = {group.head: group for group in self.groups()}
        for head, code in self._accepted(chain, step).items():
            for member in groups[head].members:
                current.pop(member.operator, None)
            current[head] = code
        return current

    @_interpreting
    def configurations(self, chain: int, step: int) -> tuple[Configuration, ...]:
        """Return the configurations of all operators after `step` proposals of a chain."""
        codes = self.codes(chain, step)
        meaning = self.decode(codes.values())
        result: dict[int, Configuration] = {}
        for group in self.groups():
            result |= follow(group, meaning[codes[group.head]])
        result |= {operator: meaning[code] for operator, code in codes.items()}
        return tuple(result[index] for index in range(len(result)))

    @_interpreting
    def last_step(self, chain: int) -> int:
        """Return the number of a chain's proposals in the trace."""
        import pyarrow.compute as pc

        table = self._table("proposals", ["step"], [("chain", "=", chain)])
        return int(pc.max(table["step"]).as_py() or 0)

    @_interpreting
    def best(self) -> tuple[int, int]:
        """Return chain and step of the fastest strategy that fits, the first of equals; step 0: a chain's start."""
        columns = ["chain", "step", "simulated_ns"]
        table = self._table("proposals", columns, [("accepted", "=", True)])
        # Of the starts, too, which are no proposals.
        best = min(
            (
                (chain.best[1], chain.number, chain.best_at)
                for chain in self.snapshots()
                if chain.best[0] == 0
            ),
            default=None,
        )
        for row in table.to_batches():
            named = row.to_pydict()
            for time_ns, chain, step in zip(
                named["simulated_ns"], named["chain"], named["step"], strict=True
            ):
                if time_ns is not None and (best is None or (time_ns, chain, step) < best):
                    best = time_ns, chain, step
        return (best[1], best[2]) if best is not None else (0, 0)

    @_interpreting
    def simulated_ns(self, chain: int, step: int) -> int | None:
        """Return the simulated nanoseconds of a chain's strategy after a step, or None where the trace has none."""
        wanted = [("chain", "=", chain), ("step", "<=", step), ("accepted", "=", True)]
        table = self._table("proposals", ["step", "simulated_ns"], wanted).to_pydict()
        if not table["step"]:
            starts = {snapshot.number: snapshot.initial for snapshot in self.snapshots()}
            excess_bytes, time_ns = starts.get(chain, (1, 0))
            return None if excess_bytes else time_ns
        last = max(range(len(table["step"])), key=lambda index: table["step"][index])
        simulated_ns: int | None = table["simulated_ns"][last]
        return simulated_ns

    @_interpreting
    def recorded_after(self, steps: Mapping[int, int]) -> RecordedProposals:
        """Return the proposals of all chains after given steps."""
        columns = ["chain", "step", "operator", "simulated_ns", "accepted"]
        rows: dict[tuple[int, int], tuple[int, int, bool]] = {}
        # What is after the last snapshots is in the last chunks.
        for path in reversed(self._paths["proposals"]):
            table = read_table(path, "proposals", columns).to_pydict()
            before = len(rows)
            for chain, step, operator, time_ns, accepted in zip(
                *(table[name] for name in columns), strict=True
            ):
                if step > steps.get(chain, 0):
                    rows[chain, step] = (operator, -1 if time_ns is None else time_ns, accepted)
            if len(rows) == before:
                break
        return RecordedProposals(rows)

    @_interpreting
    def decode(self, codes: Iterable[int]) -> dict[int, Configuration]:
        """Return the configurations of codes."""
        self._load(set(codes))
        done: dict[int, Configuration] = {}
        return {code: self._decoded(code, done) for code in codes}

    def _decoded(self, code: int, done: dict[int, Configuration]) -> Configuration:
        if code not in done:
            entry = self._entries[code]
            degrees = tuple(entry["degrees"])
            if entry["family"] == "copied":
                done[code] = copied(tuple(entry["axes"]), self._decoded(entry["base"], done))
            elif entry["family"] == "listed":
                done[code] = Configuration(degrees, tuple(entry["devices"]))
            else:
                placement = (
                    Permuted(entry["seed"])
                    if entry["family"] == "permuted"
                    else Strided(entry["start"], entry["stride"])
                )
                done[code] = Configuration(degrees, place(placement, tasks(degrees), entry["device_count"]))
        return done[code]

    def _load(self, wanted: set[int]) -> None:
        """Read the entries of codes, and of all codes that they were copied from."""
        missing = wanted - self._entries.keys()
        while missing:
            table = self._table("configurations", None, [("configuration", "in", sorted(missing))])
            for row in table.to_pylist():
                self._entries[row["configuration"]] = row
            if lost := sorted(missing - self._entries.keys()):
                raise damaged_chunk(self.folder, f"has no configuration {lost[0]}, which proposals name")
            bases = {self._entries[code]["base"] for code in missing} - {None}
            missing = bases - self._entries.keys()

    def _accepted(self, chain: int, step: int) -> dict[int, int]:
        """Return the last accepted code of every head up to a step."""
        if step < 0 or step > self.last_step(chain):
            raise UsageError(
                f"search {self._search_id}: chain {chain} has no step {step}, must be between 0 and "
                f"{self.last_step(chain)}; choose another"
            )
        wanted = [("chain", "=", chain), ("step", "<=", step), ("accepted", "=", True)]
        columns = ["step", "operator", "configuration", "other_operators", "other_configurations"]
        ordered = self._table("proposals", columns, wanted).sort_by("step").to_pydict()
        last_codes: dict[int, int] = {}
        for head, code, heads, codes in zip(*(ordered[name] for name in columns[1:]), strict=True):
            last_codes[head] = code
            # Searches of older Soapstones changed one head at a time.
            if heads is not None:
                last_codes |= zip(heads, codes, strict=True)
        return last_codes

    def _table(
        self,
        kind: TraceKind,
        columns: list[str] | None,
        filters: Any = None,
    ) -> pa.Table:
        import pyarrow as pa

        tables = [read_table(path, kind, columns, filters) for path in self._paths[kind]]
        if not tables:
            return pa.table({name: numbers(np.empty(0), pa.int64()) for name in columns or []})
        table = pa.concat_tables(tables, promote_options="default")
        for name in columns or []:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(table.num_rows))
        return table


def resumed_chains(
    reader: TraceReader, graph_digest: str, known: Sequence[Strategy] = ()
) -> list[ResumedChain]:
    """Return the chains of a stopped search as they were written last; none if nothing was written.

    known: the strategies that the search was begun with. Chains share of the weights, and make again, what their starts
        do.
    """
    result: list[ResumedChain] = []
    for was in reader.snapshots():
        index = known_place(was.start)
        like = known[index] if index is not None and index < len(known) else Strategy(graph_digest, ())
        current, best = (
            like.with_configurations(reader.configurations(was.number, step))
            for step in (was.proposals, was.best_at)
        )
        result.append(ResumedChain(was, current, best))
    return result


def known_place(start: str) -> int | None:
    """Return the index of the known strategy that a chain of this start began with; None for another start."""
    kind, _, number = start.partition(" ")
    return int(number) if kind == "known" and number.isdecimal() else None


def rebuild(store: Store, search_id: int, chain: int | None = None, step: int | None = None) -> Visited:
    """Store and return the strategy of a chain after a step; without chain and step, the fastest strategy visited.

    Raises:
        UsageError: there is no such search, chain or step, or its proposals are not recorded.
    """
    search = store.search(search_id)
    if "mcmc" not in search.algorithm.split(","):
        best = search.best_strategy_id
        raise UsageError(
            f"search {search_id}: is of algorithm {search.algorithm}, whose proposals are not recorded, must be of "
            "mcmc to rebuild a strategy; "
            + ("choose another" if best is None else f"its best one is stored, see app strategy show {best}")
        )
    graph = required(store.graph(search.graph_id), "graphs", search.graph_id)
    with reading(store):
        reader = TraceReader(store, search_id)
        if chain is None and step is None:
            chain, step = reader.best()
        chain = chain or 0
        step = reader.last_step(chain) if step is None else step
        start = _start_document(store, search, reader, chain)
        shared: dict[str, str] = start.get("sharding", {})
        sharding = tuple(Sharding(shared.get(name, Sharding.NONE)) for name in _weight_names(graph))
        operator_index = {name: index for index, name in enumerate(_operator_names(graph))}
        recomputation = ranges_from_json(start.get("recomputation", []), operator_index, "recomputation")
        strategy = Strategy(graph.digest, reader.configurations(chain, step), sharding, recomputation)
        record = _record(store, search, graph, strategy)
        return Visited(search_id, chain, step, record, reader.simulated_ns(chain, step))


def _start_document(store: Store, search: SearchRecord, reader: TraceReader, chain: int) -> dict[str, Any]:
    """Return the document of the known strategy that a chain began with, whose sharding and recomputation it keeps."""
    starts = {snapshot.number: snapshot.start for snapshot in reader.snapshots()}
    with as_written(row_name(store.database.name, "searches", search.id, "options")):
        starts_known = search.options.get("known", [])
        # A search that was stopped at once has no snapshots: chains from known starts come after all others.
        index = known_place(starts.get(chain, "")) if starts else chain - search.options["chains"]
        if index is None or not 0 <= index < len(starts_known):
            return {}
        digest = starts_known[index]["digest"]
    document: dict[str, Any] = json.loads(store.strategy(digest).document)
    return document


def _weight_names(graph: GraphRecord) -> list[str]:
    """Return the names of a stored graph's weights, in their order (`OperatorGraph.to_json`)."""
    values = json.loads(graph.document)["values"]
    return [name for name, _, kind, _ in values if kind == ValueKind.WEIGHT]


def _operator_names(graph: GraphRecord) -> list[str]:
    """Return the names of a stored graph's operators, in their order."""
    return [operator["name"] for operator in json.loads(graph.document)["operators"]]


def _record(store: Store, search: SearchRecord, graph: GraphRecord, strategy: Strategy) -> StrategyRecord:
    """Store a strategy; its operators and axes have the names of the stored graph."""
    operators = json.loads(graph.document)["operators"]
    shared = {
        name: level.value
        for name, level in zip(_weight_names(graph), strategy.sharding, strict=False)
        if level is not Sharding.NONE
    }
    recomputation = ranges_to_json([operator["name"] for operator in operators], strategy.recomputation)
    document = {
        **({"sharding": shared} if shared else {}),
        **({"recomputation": recomputation} if recomputation else {}),
        "format": FORMAT,
        "graph": graph.digest,
        "operators": {
            operator["name"]: {
                "degrees": {
                    axis[0]: degree
                    for axis, degree in zip(operator["axes"], configuration.degrees, strict=True)
                    if degree != 1
                },
                "devices": list(configuration.devices),
            }
            for operator, configuration in zip(operators, strategy.configurations, strict=True)
        },
    }
    topology = store.topology(search.topology_id)
    number = store.put_strategy(
        StrategyRecord(
            digest=strategy.digest,
            graph_id=search.graph_id,
            device_count=topology.device_count if topology is not None else strategy.device_count,
            document=canonical_json(document),
            source="search",
        )
    )
    return store.strategy(number)
