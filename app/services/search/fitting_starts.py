"""Starts that fit the devices' memories, for searches whose usual starts do not.

Chains begin at data parallelism, at the expert's strategy and on a single device. Of a network of billions of weights
none of these may fit, and few proposals do not lead from there to one that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.db.records import StrategyRecord, StrategySource, TaskOrder
from app.db.store import Store
from app.services.predict.predict import Setting
from app.services.search.run_algorithms import problem_of
from app.services.search.start_strategies import KnownStart
from graph.operators import OperatorGraph
from graph.strategy import Strategy, strategy_text
from search.algorithms.activation_checkpointing import recompute
from search.algorithms.registry import simulated
from search.space import baselines

# Of every weight at most: itself, its gradient, the gradient's place in a flat tensor, and two tensors of a state.
_COPIES = 5
MOST_SIMULATIONS = 400
"""To find a start that fits by making activations again."""


def fitting_starts(store: Store, setting: Setting, order: TaskOrder) -> list[KnownStart]:
    """Return strategies that fit, stored, where data parallelism does not; nothing where it does.

    It is the Megatron strategy of the least tensor-parallel degree that fits; where none does, data parallelism that
    shares optimizer state (ZeRO) or also weights (FSDP), as far as these fit.
    """
    graph, count = setting.model.graph, len(setting.topology.devices)
    if _surely_fits(setting) or _fits(setting, baselines.data_parallel(graph, count), order):
        return []
    found = []
    for source, name, strategy in _candidates(graph, count):
        if _fits(setting, strategy, order):
            document = strategy_text(strategy, graph)
            store.put_strategy(StrategyRecord(strategy.digest, setting.graph_id, count, document, source))
            found.append(KnownStart(strategy.digest, strategy, f"baseline {name}"))
            if source == "megatron":
                break
    return found


def recomputed_starts(
    store: Store, setting: Setting, order: TaskOrder, known: Sequence[KnownStart]
) -> list[KnownStart]:
    """Return, stored, the best strategy that fits by making activations again, where that is better than what fits."""
    there = tuple(one.strategy for one in known)
    tried = recompute(problem_of(setting), there, most=MOST_SIMULATIONS, order=order)
    strategy = tried.strategy
    if tried.outcome.excess_bytes or not strategy.recomputation or strategy in there:
        return []
    graph, count = setting.model.graph, len(setting.topology.devices)
    document = strategy_text(strategy, graph)
    store.put_strategy(StrategyRecord(strategy.digest, setting.graph_id, count, document, "search"))
    return [KnownStart(strategy.digest, strategy, "activations that are made again")]


def _candidates(graph: OperatorGraph, count: int) -> Iterator[tuple[StrategySource, str, Strategy]]:
    for degree in range(2, count + 1):
        if count % degree == 0:
            yield "megatron", f"megatron-{degree}", baselines.megatron(graph, degree, count // degree)
    if count > 1:
        yield "zero", "zero", baselines.zero(graph, count)
        yield "fsdp", "fsdp", baselines.fsdp(graph, count)


def _surely_fits(setting: Setting) -> bool:
    """Return whether data parallelism fits even if everything that a step makes is there at once, with gradients."""
    graph, topology = setting.model.graph, setting.topology
    weights = sum(weight.spec.size_bytes for weight in graph.weights)
    made = sum(
        graph.value_by_name[name].spec.size_bytes for operator in graph.operators for name in operator.outputs
    )
    least = min(kind.memory_bytes for kind in topology.kinds)
    # Parts of the batch differ by one sample at most; twice as much where there is less than a sample a device.
    return _COPIES * weights + 4 * made / len(topology.devices) < least


def _fits(setting: Setting, strategy: Strategy, order: TaskOrder) -> bool:
    return not simulated(problem_of(setting), strategy, order).excess_bytes
