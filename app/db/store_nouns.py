"""The store's methods for graphs, topologies, trainings and strategies: documents named by their digest."""

from __future__ import annotations

import sqlalchemy as sa

from app.db import models
from app.db.records import (
    GraphRecord,
    RankedStrategy,
    SearchedSetting,
    SimulationRecord,
    StrategyRecord,
    TaskOrder,
    TopologyRecord,
    TrainingRecord,
)
from app.db.references import Referred
from app.db.sql import StorePart, put_named, read_all, row_of
from graph.errors import UsageError
from graph.texts import shown

_SHORTEST_PREFIX = 6


class NounStore(StorePart):
    """Documents that never change. Writing one again returns its id."""

    def put_graph(self, graph: GraphRecord) -> int:
        """Store a graph under its digest, once; return its id."""
        return self._put(models.graphs, graph)

    def graph(self, graph_id: int) -> GraphRecord | None:
        """Return the graph with that id, or None."""
        return self._first(GraphRecord, id=graph_id)

    def graph_by_digest(self, digest: str) -> GraphRecord | None:
        """Return the graph with that digest, or None."""
        return self._first(GraphRecord, digest=digest)

    def graphs(self) -> list[GraphRecord]:
        """Return all graphs, newest first."""
        return self._all(GraphRecord, "id")[::-1]

    def put_topology(self, topology: TopologyRecord) -> int:
        """Store a topology under its digest, once; return its id."""
        return self._put(models.topologies, topology)

    def topology(self, topology_id: int) -> TopologyRecord | None:
        """Return the topology with that id, or None."""
        return self._first(TopologyRecord, id=topology_id)

    def topologies(self) -> list[TopologyRecord]:
        """Return all topologies, newest first."""
        return self._all(TopologyRecord, "id")[::-1]

    def put_training(self, training: TrainingRecord) -> int:
        """Store a training under its digest, once; return its id."""
        return self._put(models.trainings, training)

    def training(self, training_id: int) -> TrainingRecord | None:
        """Return the training with that id, or None."""
        return self._first(TrainingRecord, id=training_id)

    def put_strategy(self, strategy: StrategyRecord) -> int:
        """Store a strategy under its digest, once; return its id. One found again keeps its first source."""
        return self._put(models.strategies, strategy)

    def strategy(self, reference: int | str) -> StrategyRecord:
        """Return the strategy that a reference means: an id, a digest, or the first letters of one (at least 6).

        A text of digits alone that is the id of a strategy means that strategy.

        Raises:
            UsageError: there is no such strategy, or several digests begin so.
        """
        if isinstance(reference, int) or (reference.isdecimal() and len(reference) < 18):
            record = self._first(StrategyRecord, id=int(reference))
            if record is not None:
                return record
        text = str(reference)
        if not isinstance(reference, int) and len(text) >= _SHORTEST_PREFIX:
            matches = self._beginning_with(text.lower())
            if len(matches) == 1:
                return matches[0]
            if matches:
                names = ", ".join(match.digest[: len(text) + 4] for match in matches[:3])
                raise UsageError(
                    f"strategy {text!r}: means {names}, must mean one; give more letters of its digest"
                )
        raise UsageError(
            f"strategy {shown(text)!r}: is not in database {self.database.name}, must be an id or at least "
            f"{_SHORTEST_PREFIX} letters of a digest; see app strategy list, search first, or import it"
        )

    def strategies(self, *, graph_id: int | None = None, limit: int = 100) -> list[StrategyRecord]:
        """Return the newest strategies, of one graph if asked."""
        return self._newest(StrategyRecord, "created_at", limit, graph_id=graph_id)

    def best_strategy(
        self, graph_id: int, topology_id: int, training_id: int, *, task_order: TaskOrder = "program"
    ) -> RankedStrategy | None:
        """Return the strategy with the lowest predicted step time that fits into memory, or None."""
        ranked = self.best_strategies(graph_id, topology_id, training_id, task_order=task_order, limit=1)
        return ranked[0] if ranked else None

    def best_strategies(
        self,
        graph_id: int,
        topology_id: int,
        training_id: int,
        *,
        task_order: TaskOrder = "program",
        limit: int = 10,
    ) -> list[RankedStrategy]:
        """Return feasible strategies by the step time of their newest simulation, fastest first.

        Of equal times, the smaller digest comes first, so that the order does not depend on who stored what
        first.
        """
        strategies, simulations = models.strategies, models.simulations
        age = sa.func.row_number().over(
            partition_by=simulations.c.strategy_id,
            order_by=(simulations.c.created_at.desc(), simulations.c.id.desc()),
        )
        newest = (
            sa.select(simulations, age.label("age"))
            .join(strategies, simulations.c.strategy_id == strategies.c.id)
            .where(
                strategies.c.graph_id == graph_id,
                simulations.c.topology_id == topology_id,
                simulations.c.training_id == training_id,
                simulations.c.task_order == task_order,
            )
            .subquery()
        )
        query = (
            sa.select(newest)
            .join(strategies, newest.c.strategy_id == strategies.c.id)
            .where(newest.c.age == 1, newest.c.feasible)
            .order_by(newest.c.step_time_s, strategies.c.digest)
            .limit(limit)
        )
        with self.read() as connection:
            ranked = read_all(connection, SimulationRecord, query)
            chosen = sa.select(strategies).where(
                strategies.c.id.in_([record.strategy_id for record in ranked])
            )
            records = read_all(connection, StrategyRecord, chosen)
            strategy_of = Referred("strategies", ((record.id, record) for record in records))
        return [RankedStrategy(strategy_of[record.strategy_id], record) for record in ranked]

    def searched_settings(self, model: str, *, baselines: bool = False) -> list[SearchedSetting]:
        """Return for which topologies, trainings and sizes of a network a strategy was found that fits its devices.

        baselines: whether a baseline is found, too.
        """
        graphs, topologies, trainings = models.graphs, models.topologies, models.trainings
        strategies, simulations = models.strategies, models.simulations
        query = (
            sa.select(
                strategies.c.graph_id,
                simulations.c.topology_id,
                simulations.c.training_id,
                graphs.c.digest.label("graph_digest"),
                topologies.c.digest.label("topology_digest"),
                trainings.c.digest.label("training_digest"),
                topologies.c.name.label("topology"),
                topologies.c.device_count,
                trainings.c.batch_size,
            )
            .distinct()
            .select_from(simulations)
            .join(strategies, simulations.c.strategy_id == strategies.c.id)
            .join(graphs, strategies.c.graph_id == graphs.c.id)
            .join(topologies, simulations.c.topology_id == topologies.c.id)
            .join(trainings, simulations.c.training_id == trainings.c.id)
            .where(
                graphs.c.name == model,
                simulations.c.feasible,
                sa.or_(sa.literal(baselines), strategies.c.source.in_(("search", "import"))),
            )
        )
        with self.read() as connection:
            return read_all(connection, SearchedSetting, query)

    def _beginning_with(self, prefix: str) -> list[StrategyRecord]:
        table = models.strategies
        query = (
            sa.select(table)
            .where(table.c.digest.startswith(prefix, autoescape=True))
            .order_by(table.c.digest)
        )
        with self.read() as connection:
            return read_all(connection, StrategyRecord, query.limit(4))

    def _put(self, table: sa.Table, record: object) -> int:
        with self.write() as connection:
            return put_named(connection, table, row_of(record), "digest")
