"""Stretches: the operators between one communication and the next, which each device may execute as one function.

A stretch is a range of operators (`graph.operator_ranges`) whose members, the operators of it that the loss depends
on, are executed one after the other on every device, forward and backward, with nothing sent, received, gathered,
assembled or made again in between. Operators of the range that only renew buffers run later, as ever; what they alone
read (statistics of a batch norm) is sent behind the stretch, since nothing waits for it before the backward's end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from graph.errors import StrategyError
from graph.operator_ranges import OperatorRange, OperatorRanges, group_numbers
from graph.plan import Plan

NEVER_COMPILED = frozenset({"soapstone.random", "soapstone.grouped_mm"})
"""Operators that stay apart: numbers drawn in the forward, and products of groups whose ends the host may read."""


def stretches(plan: Plan) -> OperatorRanges:
    """Return the longest stretches of a plan, those of one operator left out."""
    before = _cuts(plan)
    recomputed = group_numbers(plan.graph, plan.strategy.recomputation)
    runs: list[list[int]] = [[]]
    for index in plan.graph.order.of_loss:
        if index in before:
            runs.append([])
        # An operator without a backward on some device, or made again in the backward, stays apart.
        target = plan.graph.operators[index].target
        if all(plan.active[index]) and recomputed[index] < 0 and target not in NEVER_COMPILED:
            runs[-1].append(index)
        else:
            runs.append([])
    return tuple(OperatorRange(run[0], run[-1]) for run in runs if len(run) > 1)


def members(plan: Plan, stretch: OperatorRange) -> tuple[int, ...]:
    """Return the operators of a stretch that are executed as one function, in order."""
    order = plan.graph.order.of_loss
    return order[bisect_left(order, stretch.first) : bisect_right(order, stretch.last)]


def check_compiled(plan: Plan) -> None:
    """Check that what the plan's strategy compiles are stretches or parts of these.

    Raises:
        StrategyError: something is communicated within; one line that names the operators.
    """
    if not plan.strategy.compiled:
        return
    operators = plan.graph.operators
    number_of = group_numbers(plan.graph, stretches(plan))
    for stretch in plan.strategy.compiled:
        whole = {number_of[index] for index in members(plan, stretch)}
        if len(whole) != 1 or -1 in whole:
            raise StrategyError(
                f"compiled: operators {operators[stretch.first].name} to {operators[stretch.last].name} communicate "
                "in between or cannot be compiled, must be between one communication and the next; leave `compiled` "
                "out and pass --compile"
            )


def values_read_outside(plan: Plan, stretch: OperatorRange, kept: frozenset[str]) -> frozenset[str]:
    """Return the values that members of a stretch make and others read, or that stay after the step as `kept` do."""
    graph, inside = plan.graph, frozenset(members(plan, stretch))
    lasting = {graph.loss, *kept, *(value for _, value in graph.buffer_updates)}
    made = [value for index in inside for value in graph.operators[index].outputs]
    return frozenset(
        value
        for value in made
        if value in lasting or any(reader not in inside for reader, _ in graph.consumers[value])
    )


def _cuts(plan: Plan) -> set[int]:
    """Return the operators before which no stretch goes on: something happens between them and the one before."""
    graph = plan.graph
    before: set[int] = set()
    renewing = frozenset(graph.order.of_buffers)
    for name, assemblies in plan.exchanges.items():
        if renewing.issuperset(reader for reader, _ in graph.consumers[name]):
            continue
        producer = graph.producer[name][0]
        if plan.collectives[name] or any(assembly.remote_pieces for assembly in assemblies):
            before.add(producer + 1)
        for assembly in assemblies:
            if not assembly.direct:
                before.update(reader.operator for reader in assembly.readers)
    # What follows an operator's backward lies before the operator.
    before.update(index for index, collectives in plan.gradient_collectives.items() if collectives)
    for index, transfers in plan.gradient_transfers.items():
        if any(plan.exchanges[of.value][of.assembly].remote_pieces for of in transfers):
            before.add(index)
    before.update(bucket.after for bucket in plan.buckets)
    # Weights that are kept in shares are there from their gathers on, until their last reader has read them.
    before.update(plan.forward_gathers)
    before.update(max(graph.weight_readers[weight]) + 1 for weight in _gathered(plan))
    before.update(index + 1 for index in plan.backward_gathers)
    # An operator that the loss does not depend on stands for the next one on which it does.
    order = (*graph.order.of_loss, len(graph.operators))
    return {order[bisect_left(order, cut)] for cut in before}


def _gathered(plan: Plan) -> set[str]:
    return {
        entry.weight
        for gathers in plan.forward_gathers.values()
        for gather in gathers
        for entry in gather.entries
    }
