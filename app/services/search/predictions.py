"""Predictions of a search: of its baselines, of the best strategy, and of the recomputation in that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from app.db.records import StrategySource
from app.db.store import Store
from app.services.predict.named_strategies import source_of
from app.services.predict.predict import MemoryWalk, Setting, predict
from app.services.predict.problem import problem_of
from app.services.predict.recomputation_report import RecomputationReport, recomputation_report
from app.services.progress import Progress
from app.services.search.memory_repair import SearchAgain, repair_memory
from app.services.search.micro_batches import in_micro_batches
from app.services.search.report import Prediction
from app.services.search.run_algorithms import SearchPlan
from app.services.search.start_strategies import start_of
from graph.strategy import Strategy
from search.algorithms.activation_checkpointing import recompute
from search.algorithms.chain import SearchOptions
from search.algorithms.staging import pipeline_baselines
from search.algorithms.trials import TrialResult
from search.algorithms.weight_sharding import share_weights
from search.cost.cost_table import Origin
from search.problem import Problem
from search.space.baselines import Baseline, all_baselines, starting_baselines


class SearchPredictions:
    """Predicts strategies of a search, and stores each with its prediction. `strategies`: the baselines, by name."""

    def __init__(self, store: Store, setting: Setting, plan: SearchPlan) -> None:
        self._store, self._setting, self._plan = store, setting, plan
        self.strategies = {
            baseline.name: strategy
            for baseline in _baselines(setting, everything=plan.compare_baselines)
            if (strategy := in_micro_batches(setting, baseline.strategy)) is not None
        }

    def baselines(self, progress: Progress) -> list[Prediction]:
        """Predict the baselines that chains start from; all baselines where the plan compares them.

        Without a comparison their memory is the search's own sum: most are slower than the best strategy, and to walk
        their programs would take longer than many a search.
        """
        walk: MemoryWalk = "nearly full" if self._plan.compare_baselines else "never"
        predictions = []
        for name, strategy in self.strategies.items():
            predictions.append(self.predict(strategy, name, source_of(name), walk))
            progress.advance(text=f"simulating the baselines: {name}")
        return predictions

    def best(
        self,
        strategy: Strategy,
        baseline_predictions: list[Prediction],
        progress: Progress,
        *,
        again: bool = True,
    ) -> Prediction:
        """Predict the algorithms' best strategy; return the prediction, or a baseline's that beats it.

        The memory of a baseline that would beat it is walked first, and its prediction corrected in place. Where the
        search's own sum of memory was too low, and the strategy does not fit, the algorithms run again with less
        memory (`again`), at most `memory_repair.ROUNDS` times; where that does not help, a known start that fits is
        taken.
        """
        best = self.predict(strategy)
        names, options = self._plan.names, self._plan.options
        more_of_it = [change for name, change in _MORE_OF_IT.items() if name in names]
        changes: list[Callable[[Problem, Strategy], Strategy]] = [
            *(partial(_changed, change, options) for change in more_of_it),
            *([SearchAgain(self._setting, self._plan, progress)] if again else []),
        ]
        for change in changes:
            if not best.feasible:
                strategy = repair_memory(
                    self._setting,
                    strategy,
                    change,
                    lambda changed: self.predict(changed).peak_memory_bytes,
                    lambda changed: self.predict(changed, walk="never").peak_memory_bytes,
                )
                best = self.predict(strategy)
        if not best.feasible:
            starts = dict.fromkeys(
                start.strategy for start in self._plan.starts if start.strategy != strategy
            )
            best = min(
                [best, *(self.predict(start) for start in starts)], key=lambda prediction: prediction.rank
            )
        for index, baseline in enumerate(baseline_predictions):
            if baseline.feasible and baseline.rank < best.rank:
                name = baseline.name
                baseline_predictions[index] = self.predict(self.strategies[name], name, source_of(name))
        best = min([best, *baseline_predictions], key=lambda prediction: prediction.rank)
        return replace(best, name="found")

    def recomputation(self, best: Prediction) -> RecomputationReport | None:
        """Return the recomputation of the best strategy, with its time and memory; None where it has none."""
        from search.simulate.simulator import simulate_tasks

        strategy = start_of(self._setting, self._store.strategy(best.digest)).strategy
        if not strategy.recomputation:
            return None
        recomputed, kept = (
            simulate_tasks(self._setting.builder.build(simulated), self._plan.options.order)
            for simulated in (strategy, replace(strategy, recomputation=()))
        )
        return recomputation_report(self._setting.model.graph, strategy, recomputed, kept)

    def predict(
        self,
        strategy: Strategy,
        name: str = "found",
        source: StrategySource = "search",
        walk: MemoryWalk = "nearly full",
    ) -> Prediction:
        """Predict a strategy, and store it with that."""
        strategy_id, simulation = predict(
            self._store,
            self._setting,
            strategy,
            source,
            order=self._plan.options.order,
            search_id=self._plan.search_id,
            walk=walk,
        )
        return Prediction(
            name=name,
            strategy_id=strategy_id,
            digest=strategy.digest,
            step_time_s=simulation.step_time_s,
            throughput=self._setting.training.batch_size / simulation.step_time_s,
            shares={origin.value: simulation.shares[origin] for origin in Origin},
            bytes_moved=simulation.bytes_moved,
            scheduling_efficiency=simulation.efficiency,
            speedup_potential=simulation.speedup_potential,
            launch_s=max(simulation.launch_s),
            peak_memory_bytes=simulation.peak_memory_bytes,
            feasible=simulation.feasible,
        )


_MORE_OF_IT = {"sharding": share_weights, "recomputation": recompute}


def _changed(
    change: Callable[..., TrialResult], options: SearchOptions, problem: Problem, strategy: Strategy
) -> Strategy:
    return change(problem, (strategy,), most=max(1, options.proposals), order=options.order).strategy


def _baselines(setting: Setting, *, everything: bool) -> tuple[Baseline, ...]:
    """Return the baselines that chains start from, or all that the network has: of micro-batches 3-D parallelism, too.

    Raises:
        CostError: a local call has no cost.
    """
    graph, count = setting.model.graph, len(setting.topology.devices)
    if not everything:
        return starting_baselines(graph, count)
    usual = all_baselines(graph, count)
    if setting.model.request.micro_batches == 1:
        return usual
    known = {setting.in_micro_batches(baseline.strategy) for baseline in usual}
    return (
        *usual,
        *(other for other in pipeline_baselines(problem_of(setting)) if other.strategy not in known),
    )
