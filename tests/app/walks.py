"""Searches on a made-up graph with made-up costs, traced into a real database: quick, and exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from app.db import chunks
from app.db.records import SearchRecord
from app.db.store import Store
from app.db.trace import ProposalTrace
from app.services.progress import Progress
from app.services.trace.recorder import TraceRecorder, groups_text
from app.services.trace.replay import TraceReader, resumed_chains
from graph.operators import OperatorGraph
from graph.strategy import Configuration, Strategy
from graph.training import Training
from search.algorithms import mcmc
from search.algorithms.chain import Chain, SearchOptions
from search.cost.cost_table import CostTable
from search.problem import Problem
from search.space.groups import find_groups
from tests.app.db.samples import Scene
from tests.search.builders import MadeUpCosts, devices, local_calls

Key = tuple[int, int]


@dataclass
class Walked:
    """What the chains did, seen from inside: the strategy after every proposal, by chain and step."""

    visited: dict[Key, tuple[Configuration, ...]] = field(default_factory=dict)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Walked:
    """Looks on while chains walk."""
    found = Walked()
    step = Chain.step

    def step_and_tell(chain: Chain, *arguments: Any) -> None:
        found.visited.setdefault((chain.number, chain.proposals), tuple(chain.evaluation.configurations))
        step(chain, *arguments)
        found.visited[chain.number, chain.proposals] = tuple(chain.evaluation.configurations)

    monkeypatch.setattr(Chain, "step", step_and_tell)
    return found


def begin(store: Store, options: SearchOptions) -> int:
    """Store a search that begins."""
    scene = Scene.stored(store)
    return store.start_search(
        SearchRecord(scene.graph_id, scene.topology_id, scene.training_id, "mcmc", options.seed)
    )


def walk(
    store: Store,
    search_id: int,
    graph: OperatorGraph,
    device_count: int,
    options: SearchOptions,
    *,
    known: Sequence[Strategy] = (),
    resumed: bool = False,
    interrupt: Callable[[int], None] | None = None,
    workers: int = 1,
    told: Callable[[int], None] | None = None,
) -> mcmc.SearchResult:
    """Search with a trace, as the service does.

    `interrupt` is called with the number of proposals so far, before each; `told` with that which is shown.
    """
    groups = find_groups(graph)
    reader = TraceReader(store, search_id)
    chains = resumed_chains(reader, graph.digest, known) if resumed and reader.has_starts else []
    with ProposalTrace(store, search_id, groups_text(groups)) as trace:
        steps = {one.snapshot.number: one.snapshot.proposals for one in chains}
        recorder = Telling(
            trace,
            groups,
            device_count,
            Progress(),
            "test",
            resumed={chain: reader.codes(chain, step) for chain, step in steps.items()},
            recorded=reader.recorded_after(steps),
            first_code=reader.next_code(),
        )
        recorder.told = told
        with pytest.MonkeyPatch.context() as patch:
            if interrupt is not None:
                bound_ns, count = Chain.bound_ns, 0

                def bound_or_interrupt(chain: Chain) -> int:
                    nonlocal count
                    count += 1
                    interrupt(count)
                    return bound_ns(chain)

                patch.setattr(Chain, "bound_ns", bound_or_interrupt)
            return mcmc.search(
                Problem(
                    graph,
                    devices(device_count, contention=0.3),
                    CostTable(MadeUpCosts()),
                    Training(4),
                    local_calls=local_calls,
                ),
                options,
                known=known,
                resumed=chains,
                observer=recorder,
                workers=workers,
            )


class Telling(TraceRecorder):
    """A recorder that tells a test how far the search is."""

    told: Callable[[int], None] | None = None

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Tell."""
        super().progress(proposals, accepted, best_s)
        if self.told is not None:
            self.told(proposals)


def rows(store: Store, search_id: int) -> dict[Key, tuple[Any, ...]]:
    """Return all proposals by chain and step.

    Of each: operator, the configuration itself, time, bound, acceptance, and further operators with theirs.
    """
    reader = TraceReader(store, search_id)
    table = read(store, search_id, "proposals").to_pydict()
    further = [codes for codes in table["other_configurations"] if codes is not None]
    meaning = reader.decode({*table["configuration"], *(code for codes in further for code in codes)})
    found: dict[Key, tuple[Any, ...]] = {}
    for place, key in enumerate(zip(table["chain"], table["step"], strict=True)):
        assert key not in found, "a proposal is there twice"
        found[key] = (
            table["operator"][place],
            meaning[table["configuration"][place]],
            table["simulated_ns"][place],
            table["bound_ns"][place],
            table["accepted"][place],
            tuple(
                (operator, meaning[code])
                for operator, code in zip(
                    table["other_operators"][place] or (),
                    table["other_configurations"][place] or (),
                    strict=True,
                )
            ),
        )
    return found


def read(store: Store, search_id: int, kind: Any) -> pa.Table:
    """Return all registered rows of one kind."""
    folder = chunks.trace_folder(store, search_id)
    tables = [parquet.read_table(folder / one.name) for one in chunks.registered(store, search_id, kind)]
    plain = [table.replace_schema_metadata() for table in tables]
    return pa.concat_tables(plain, promote_options="default")
