"""Start strategies that share weights, recompute, or fit the devices' memories where the usual ones do not.

Chains begin at data parallelism, at the expert's strategy and on a single device. Of a network of billions of weights
none of these may fit, and few proposals lead from there to a strategy that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.db.records import StrategyRecord, StrategySource, TaskOrder
from app.db.store import Store
from app.services.predict.predict import Setting
from app.services.predict.problem import problem_of
from app.services.search.micro_batches import in_micro_batches
from app.services.search.start_strategies import StartStrategy
from graph.operators import OperatorGraph
from graph.strategy import Strategy, strategy_text
from search.algorithms.activation_checkpointing import recompute
from search.algorithms.best_tracker import simulated
from search.space import baselines

# Of every weight at most: itself, its gradient, the gradient's place in a flat tensor, and two tensors of a state.
_COPIES = 5
MOST_SIMULATIONS = 400
"""For a start that fits by recomputation."""


def fitting_starts(store: Store, setting: Setting, order: TaskOrder) -> list[StartStrategy]:
    """Return baselines that fit, stored, where data parallelism does not; none where it does.

    It is the Megatron strategy of the least tensor-parallel degree that fits; where none does, data parallelism that
    shares optimizer state (ZeRO) or also weights (FSDP), as far as these fit.
    """
    graph, count = setting.model.graph, len(setting.topology.devices)
    plain = setting.in_micro_batches(baselines.data_parallel(graph, count))
    if _surely_fits(setting) or _fits(setting, plain, order):
        return []
    starts = []
    sharded = _sharded(graph, count) if count > 1 else ()
    for source, name, baseline in (*_megatrons(graph, count), *sharded):
        strategy = in_micro_batches(setting, baseline)
        if strategy is not None and _fits(setting, strategy, order):
            starts.append(_stored(store, setting, strategy, source, f"baseline {name}"))
            if source == "megatron":
                break
    return starts


def sharded_starts(store: Store, setting: Setting, starts: Sequence[StartStrategy]) -> list[StartStrategy]:
    """Return the baselines that share weights, stored, but for those among the starts."""
    strategies = {start.strategy for start in starts}
    return [
        _stored(store, setting, strategy, source, f"baseline {name}")
        for source, name, baseline in _sharded(setting.model.graph, len(setting.topology.devices))
        if (strategy := in_micro_batches(setting, baseline)) is not None
        and strategy.sharding
        and strategy not in strategies
    ]


def recomputed_starts(
    store: Store, setting: Setting, order: TaskOrder, starts: Sequence[StartStrategy]
) -> list[StartStrategy]:
    """Return the best strategy that fits by recomputation, stored, where it is better than the starts that fit."""
    strategies = tuple(start.strategy for start in starts)
    best = recompute(problem_of(setting), strategies, most=MOST_SIMULATIONS, order=order)
    if best.outcome.excess_bytes or not best.strategy.recomputation or best.strategy in strategies:
        return []
    return [_stored(store, setting, best.strategy, "search", "activations that are made again")]


def _stored(
    store: Store, setting: Setting, strategy: Strategy, source: StrategySource, found_for: str
) -> StartStrategy:
    graph, count = setting.model.graph, len(setting.topology.devices)
    document = strategy_text(strategy, graph)
    store.put_strategy(StrategyRecord(strategy.digest, setting.graph_id, count, document, source))
    return StartStrategy(strategy.digest, strategy, found_for)


def _megatrons(graph: OperatorGraph, count: int) -> Iterator[tuple[StrategySource, str, Strategy]]:
    for degree in range(2, count + 1):
        if count % degree == 0:
            yield "megatron", f"megatron-{degree}", baselines.megatron(graph, degree, count // degree)


def _sharded(graph: OperatorGraph, count: int) -> Iterator[tuple[StrategySource, str, Strategy]]:
    yield "zero", "zero", baselines.zero(graph, count)
    yield "fsdp", "fsdp", baselines.fsdp(graph, count)


def _surely_fits(setting: Setting) -> bool:
    """Return whether data parallelism fits even if all activations and gradients of a step are there at once."""
    graph, topology, in_flight = setting.model.graph, setting.topology, setting.model.request.micro_batches
    weight_bytes = sum(weight.spec.size_bytes for weight in graph.weights)
    activation_bytes = sum(
        graph.value_by_name[name].spec.size_bytes for operator in graph.operators for name in operator.outputs
    )
    least_bytes = min(kind.memory_bytes for kind in topology.kinds)
    # Parts of the batch differ by one sample at most; twice as much where there is less than a sample a device.
    return _COPIES * weight_bytes + 4 * in_flight * activation_bytes / len(topology.devices) < least_bytes


def _fits(setting: Setting, strategy: Strategy, order: TaskOrder) -> bool:
    return not simulated(problem_of(setting), strategy, order).excess_bytes
