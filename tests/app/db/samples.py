"""Rows for tests: small, distinct by number, and consistent with each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from app.db.records import (
    CostKeyRecord,
    DeviceKindRecord,
    EnvironmentRecord,
    ExecutionRecord,
    GraphRecord,
    OpCostRecord,
    SearchRecord,
    SimulationRecord,
    StrategyRecord,
    StrategySource,
    TopologyRecord,
    TrainingRecord,
)
from app.db.store import Store
from graph.calls import CostPhase
from graph.canonical import canonical_json, digest
from graph.training import Training

EPOCH = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def moment(seconds: int) -> datetime:
    """Return a fixed moment plus seconds."""
    return EPOCH + timedelta(seconds=seconds)


def cost_key(number: int) -> CostKeyRecord:
    """Return the cost key of a square matrix product of size `number`."""
    key = {"target": "aten.mm", "shapes": [[number, number]] * 2, "dtype": "float32"}
    return CostKeyRecord(
        digest=digest(key),
        target="aten.mm",
        key=canonical_json(key),
        flops=2 * number**3,
        bytes=12 * number**2,
    )


def op_cost(number: int, *, phase: CostPhase = "forward", time_s: float = 0.5, at: int = 0) -> OpCostRecord:
    """Return a measured cost of `cost_key(number)`."""
    return OpCostRecord(
        cost_key=cost_key(number),
        phase=phase,
        minimum_s=time_s,
        p10_s=time_s * 1.1,
        median_s=time_s * 1.5,
        samples_s=(time_s, time_s * 1.5, time_s * 2),
        peak_bytes=1000 + number,
        measured_at=moment(at),
    )


def device_kind(name: str = "cpu") -> DeviceKindRecord:
    """Return a device kind."""
    return DeviceKindRecord(name, "Some processor", 2**40, {"cores": 1, "ranges": [1, 2]})


def environment(number: int = 0) -> EnvironmentRecord:
    """Return an environment."""
    return EnvironmentRecord({"torch": "2.13.0", "threads": 1, "number": number}, created_at=moment(number))


def graph(number: int = 0, *, name: str = "inception") -> GraphRecord:
    """Return a graph."""
    document = {"name": name, "number": number}
    model = {"model": name, "preset": "paper", "batch_size": 8}
    return GraphRecord(digest(document), name, model, 121, 27_000_000, 2**40, canonical_json(document))


def topology(number: int = 0, *, name: str = "local") -> TopologyRecord:
    """Return a topology."""
    document = {"contention": [], "devices": [number], "name": name, "routes": []}
    unnamed = {key: value for key, value in document.items() if key != "name"}
    return TopologyRecord(digest(unnamed), name, 2, canonical_json(document))


def training(batch_size: int = 8, precision: str = "float32") -> TrainingRecord:
    """Return a training."""
    described = Training(batch_size, precision)
    return TrainingRecord(described.digest, batch_size, canonical_json(described.to_json()))


def strategy(graph_id: int, number: int, source: StrategySource = "search") -> StrategyRecord:
    """Return a strategy."""
    document = canonical_json({"graph": graph_id, "operators": {}, "strategy": number})
    return StrategyRecord(digest(document), graph_id, 2, document, source, created_at=moment(number))


@dataclass(frozen=True, slots=True)
class Scene:
    """The ids of a graph, a topology and a training in a store."""

    graph_id: int
    topology_id: int
    training_id: int
    environment_id: int

    @classmethod
    def stored(
        cls,
        store: Store,
        number: int = 0,
        *,
        model: str = "inception",
        batch_size: int = 8,
        precision: str = "float32",
    ) -> Scene:
        """Store one of each."""
        return cls(
            store.put_graph(graph(number, name=model)),
            store.put_topology(topology()),
            store.put_training(training(batch_size, precision)),
            store.put_environment(environment()),
        )

    def search(self) -> SearchRecord:
        """Return a search that begins."""
        return SearchRecord(
            self.graph_id, self.topology_id, self.training_id, "mcmc", 2**62, {"chains": 2}, started_at=EPOCH
        )

    def simulation(
        self,
        strategy_id: int,
        step_time_s: float,
        *,
        at: int = 0,
        costs: str = "a",
        search_id: int | None = None,
    ) -> SimulationRecord:
        """Return a simulation in program order, three quarters of it measured."""
        return SimulationRecord(
            strategy_id=strategy_id,
            topology_id=self.topology_id,
            training_id=self.training_id,
            task_order="program",
            cost_digest=digest(costs),
            step_time_s=step_time_s,
            measured_share=0.75,
            estimated_share=0.25,
            datasheet_share=0.0,
            compute_s=2 * step_time_s,
            communication_bytes=2**34,
            peak_bytes=(2**33, 5),
            search_id=search_id,
            scheduling_efficiency=0.9,
            speedup_potential=0.5,
            created_at=moment(at),
        )

    def execution(self, strategy_id: int, *, at: int = 0) -> ExecutionRecord:
        """Return an execution that begins."""
        return ExecutionRecord(
            strategy_id, self.topology_id, self.training_id, self.environment_id, 3, created_at=moment(at)
        )
