"""`app strategy show --pcg`: a stored strategy as a parallel computation graph. Nothing is simulated for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.db.records import StrategyRecord
from app.db.references import required
from app.db.store import Store
from app.services.progress import Progress
from app.services.stored import strategy_of
from app.services.timeline.simulated_step import imported_graph
from graph.operators import OperatorGraph
from graph.parallel_graph import ParallelGraph, parallel_graph


@dataclass(frozen=True, slots=True)
class ShownParallelGraph:
    """A stored strategy, its operator graph, and its parallel computation graph."""

    record: StrategyRecord
    graph: OperatorGraph
    parallel: ParallelGraph

    def to_json(self) -> dict[str, Any]:
        """Return the strategy's rows and its graph as a JSON document."""
        return {
            "id": self.record.id,
            "digest": self.record.digest,
            "model": self.graph.name,
            "devices": self.record.device_count,
            "source": self.record.source,
            "micro_batches": self.parallel.micro_batches.count,
            "pcg": self.parallel.to_json(self.graph),
        }


def show_parallel_graph(database: str | None, reference: str, progress: Progress) -> ShownParallelGraph:
    """Return a stored strategy as a parallel computation graph.

    Raises:
        UsageError: there is no such strategy.
        StrategyError: it has no parallel computation graph.
        ImportFailure: its model cannot be imported any more.
    """
    with Store.open(database, to_read=True) as store:
        record = store.strategy(reference)
        with progress.stage("importing the model"):
            graph = imported_graph(required(store.graph(record.graph_id), "graphs", record.graph_id))
        return ShownParallelGraph(record, graph, parallel_graph(graph, strategy_of(record, graph)))
