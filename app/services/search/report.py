"""The result of a search: its best strategy and the baselines, as predicted, and how it was found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from app.services.predict.recomputation_report import RecomputationReport
from app.services.search.start_strategies import StartStrategy

if TYPE_CHECKING:
    from app.services.search.confirmation import Confirmation
    from search.bounds.lower_bound import Bound

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class AlgorithmReport:
    """The result of one algorithm of a search. `step_time_s`: None where no strategy fits the memory."""

    name: str
    step_time_s: float | None
    proposals: int
    seconds: float
    proven: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """One strategy's predicted step. Efficiency and potential are those of `search.simulate.simulator.Simulation`.

    launch_s: the most seconds that the host of a device takes to issue a step; 0 where a CPU computes.
    """

    name: str
    strategy_id: int
    digest: str
    step_time_s: float
    throughput: float
    shares: dict[str, float]
    bytes_moved: int
    scheduling_efficiency: float
    speedup_potential: float
    launch_s: float
    peak_memory_bytes: tuple[int, ...]
    feasible: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """The key by which strategies are compared: one that fits the memory is before one that does not."""
        return not self.feasible, self.step_time_s

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as a JSON document."""
        return {
            "name": self.name,
            "strategy": self.strategy_id,
            "digest": self.digest,
            "predicted_step_time_s": self.step_time_s,
            "predicted_throughput_samples_per_s": self.throughput,
            "shares": self.shares,
            "bytes_moved": self.bytes_moved,
            "scheduling_efficiency": self.scheduling_efficiency,
            "speedup_potential": self.speedup_potential,
            "launch_s": self.launch_s,
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "feasible": self.feasible,
        }


@dataclass(frozen=True, slots=True)
class SearchReport:
    """The result of a search. `predictions` holds the best strategy first, then the baselines.

    confirmations: of this search and those that it goes on from, in their order. searched_s: the best step by the
    costs of the search, where they were measured again since, part of it is compiled, or gradients are summed otherwise
    than by default, as `synchronization` says. unconfirmed: confirming was
    interrupted. compiled: the first and the last operator of each stretch of the best strategy that is compiled.
    micro_batches: those of the best strategy (`micro_batch_report`), where there are several. resumable: whether the
    search could go on, were it interrupted.
    """

    search_id: int
    model: str
    topology: str
    devices: int
    batch_size: int
    proposals: int
    accepted: int
    interrupted: bool
    seconds: float
    predictions: tuple[Prediction, ...]
    unsplit: tuple[tuple[str, str], ...] = ()
    starts: tuple[StartStrategy, ...] = ()
    resumed_at: int | None = None
    algorithms: tuple[AlgorithmReport, ...] = ()
    bound: Bound | None = None
    estimate_errors: tuple[float, ...] = ()
    cost_environments: tuple[Mapping[str, Any], ...] = ()
    recomputation: RecomputationReport | None = None
    confirmations: tuple[Confirmation, ...] = ()
    searched_s: float | None = None
    unconfirmed: bool = False
    compiled: tuple[tuple[str, str], ...] = ()
    synchronization: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: Mapping[str, Any] = field(default_factory=dict)
    resumable: bool = True

    @property
    def estimate_error(self) -> float | None:
        """The median error of the costs that were estimated, by leaving measurements out; None without any."""
        return statistics.median(self.estimate_errors) if self.estimate_errors else None

    @property
    def searched_step_time_s(self) -> float:
        """The best strategy's step by the costs of the search, which the lower bound rests on."""
        return self.best.step_time_s if self.searched_s is None else self.searched_s

    @property
    def gap(self) -> float | None:
        """The largest share by which the best strategy may be above the optimum; None without a lower bound."""
        if self.bound is None or not self.bound.time_ns:
            return None
        return self.bound.gap(self.searched_step_time_s)

    @property
    def best_baseline(self) -> Prediction:
        """The fastest baseline that was simulated, one that fits if there is one."""
        return min(self.predictions[1:], key=lambda baseline: baseline.rank)

    @property
    def best(self) -> Prediction:
        """The strategy that was found."""
        return self.predictions[0]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "search": self.search_id,
            "model": self.model,
            "topology": self.topology,
            "devices": self.devices,
            "batch_size": self.batch_size,
            "proposals": self.proposals,
            "accepted": self.accepted,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "predictions": [prediction.to_json() for prediction in self.predictions],
            "unsplit": dict(self.unsplit),
            "known": [start.to_json() for start in self.starts],
            "resumed_at": self.resumed_at,
            "algorithms": [asdict(algorithm) for algorithm in self.algorithms],
            "lower_bound_s": self.bound.seconds if self.bound is not None else None,
            "lower_bound_by": self.bound.kind if self.bound is not None else None,
            "gap": self.gap,
            "searched_step_time_s": self.searched_step_time_s,
            "estimated_costs": len(self.estimate_errors),
            "estimate_error": self.estimate_error,
            "cost_environments": [dict(environment) for environment in self.cost_environments],
            "best_baseline": self.best_baseline.name,
            "recomputation": None if self.recomputation is None else asdict(self.recomputation),
            "confirmations": [confirmation.to_json() for confirmation in self.confirmations],
            "compiled": [list(pair) for pair in self.compiled],
            "synchronization": dict(self.synchronization),
            "micro_batches": dict(self.micro_batches),
            "gain_over_best_baseline": self.best_baseline.step_time_s / self.best.step_time_s,
        }


@dataclass(frozen=True, slots=True)
class RelatedSearches(Generic[Choice]):
    """Searches for one network, in their order, each with the choice that it was made for.

    ended: whether Ctrl-C came between two of them.
    """

    reports: tuple[tuple[Choice, SearchReport], ...]
    ended: bool = field(default=False, kw_only=True)

    @property
    def best(self) -> SearchReport:
        """The report of the search that found the fastest strategy; of equals, the first."""
        return min((report for _, report in self.reports), key=lambda report: report.best.rank)

    @property
    def interrupted(self) -> bool:
        """Whether the last search was interrupted, or confirming it was, or Ctrl-C came before the next."""
        last = self.reports[-1][1]
        return self.ended or last.interrupted or last.unconfirmed
