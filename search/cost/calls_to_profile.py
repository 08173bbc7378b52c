"""The local calls whose costs a search wants: what to profile first.

A walk meets more than these; what it meets for the first time is resolved then (`search.cost.cost_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from graph.axes import Degrees
from graph.calls import LocalCall
from graph.operators import Operator, OperatorGraph
from search.space.baselines import data_parallel, expert, single_device
from search.space.configurations import enumerate_degrees
from search.space.groups import carried, find_groups

LocalCalls = Callable[[OperatorGraph, Operator, Degrees], tuple[LocalCall, ...]]


def rule_calls() -> LocalCalls:
    """Return the local calls that the operators' rules make."""
    from graph.rules import local_calls

    return local_calls


def calls_to_profile(
    graph: OperatorGraph, device_count: int, local_calls: LocalCalls | None = None
) -> list[LocalCall]:
    """Return the distinct local calls of the baselines and of all splits of one or two axes of every head.

    In the order in which they are first met: operator by operator, baselines first.
    """
    from graph.rules import operator_class

    calls_of = local_calls if local_calls is not None else rule_calls()
    call_of: dict[str, LocalCall] = {}
    met: set[tuple[int, Degrees]] = set()
    for operator, degrees in _degrees(graph, device_count):
        # Equal layers have equal calls: of a transformer's 24 one is listed.
        if (operator_class(graph, operator), degrees) in met:
            continue
        met.add((operator_class(graph, operator), degrees))
        for call in calls_of(graph, operator, degrees):
            call_of.setdefault(call.digest, call)
    return list(call_of.values())


def _degrees(graph: OperatorGraph, device_count: int) -> Iterable[tuple[Operator, Degrees]]:
    wanted: dict[tuple[int, Degrees], None] = {}
    for strategy in (
        single_device(graph),
        data_parallel(graph, device_count),
        expert(graph, device_count),
    ):
        for index, configuration in enumerate(strategy.configurations):
            wanted[index, configuration.degrees] = None
    for group in find_groups(graph):
        for degrees in enumerate_degrees(graph.operators[group.head], device_count):
            wanted[group.head, degrees] = None
            for member in group.members:
                wanted[member.operator, carried(member.axes, degrees)[0]] = None
    for index, degrees in wanted:
        yield graph.operators[index], degrees
