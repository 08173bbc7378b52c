"""A strategy drawn on its operator graph.

Operators stand in columns by their depth, the longest way from an input; within a column in the order of the operators
that they read from. Colour is the configuration, size the time that the operator takes in the simulated step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

from app.services.report.figures import Figure, drawing, plain, scatter
from app.services.timeline.simulated_step import SimulatedStep
from app.services.timeline.timeline import StepTimeline

CONFIGURATIONS_SHOWN = 12
ALONE_IN_A_ROW = 20
_OTHERS = "other configurations"


def strategy_on_graph(step: SimulatedStep, simulated: StepTimeline) -> Figure:
    """Return the operator graph of a simulated step, each operator with its degrees, devices and simulated time."""
    graph, strategy = step.graph, step.strategy
    places = places_of(
        [
            [graph.producer[name][0] for name in operator.inputs if name in graph.producer]
            for operator in graph.operators
        ]
    )
    times_ns = _operator_times_ns(simulated)
    longest = max(times_ns.values(), default=1) or 1
    groups: dict[str, list[int]] = defaultdict(list)
    for index, operator in enumerate(graph.operators):
        groups[configuration_text(operator.space.axes, strategy.configurations[index])].append(index)
    common = sorted(groups, key=lambda name: (-len(groups[name]), name))
    shown = common if len(common) <= CONFIGURATIONS_SHOWN else common[: CONFIGURATIONS_SHOWN - 1]
    drawn = {name: groups[name] for name in shown}
    if len(shown) < len(common):
        drawn[_OTHERS] = sorted(index for name in common if name not in shown for index in groups[name])
    pairs = (
        (producer, consumer)
        for name, (producer, _) in graph.producer.items()
        for consumer, _ in graph.consumers.get(name, ())
    )
    data = [edges_of(pairs, places)]
    for name, indexes in drawn.items():
        operators = [graph.operators[index] for index in indexes]
        sizes = [6 + 18 * sqrt(times_ns.get(operator.name, 0) / longest) for operator in operators]
        data.append(
            scatter(
                "markers",
                f"{plain(name)} ({len(indexes)})",
                x=[places[index][0] for index in indexes],
                y=[places[index][1] for index in indexes],
                marker={"size": sizes, "line": {"width": 0.5, "color": "#fff"}},
                text=[
                    f"{plain(operator.name)}<br>{plain(operator.target)}<br>"
                    f"{plain(configuration_text(operator.space.axes, strategy.configurations[index]))}<br>"
                    f"{times_ns.get(operator.name, 0) / 1e6:.3f} ms over all devices"
                    for index, operator in zip(indexes, operators, strict=True)
                ],
                hoverinfo="text",
            )
        )
    return graph_drawing(data, places)


def graph_drawing(data: Sequence[Mapping[str, Any]], places: Sequence[tuple[float, float]]) -> Figure:
    """Return a figure of a graph whose nodes are at the given places."""
    hidden = {"showgrid": False, "zeroline": False}
    rows = max((abs(y) for _, y in places), default=0.0)
    return drawing(
        data,
        360 + 24 * int(min(rows, 30)),
        "depth in the graph",
        "",
        xaxis=hidden,
        yaxis={**hidden, "showticklabels": False},
        showlegend=True,
        legend={"orientation": "h", "y": -0.2},
    )


def edges_of(pairs: Iterable[tuple[int, int]], places: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return lines between pairs of nodes."""
    edges: dict[str, list[float | None]] = {"x": [], "y": []}
    for first, last in pairs:
        for axis in (0, 1):
            edges["xy"[axis]] += [places[first][axis], places[last][axis], None]
    return scatter("lines", "tensors", line={"width": 0.8, "color": "#c3c9cf"}, hoverinfo="skip", **edges)


def places_of(read: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return (column, row) of every node of a graph, given the nodes that each reads, in topological order."""
    readers: list[set[int]] = [set() for _ in read]
    for index, sources in enumerate(read):
        for source in sources:
            readers[source].add(index)
    columns = _columns(read, readers)
    rows = [0.0] * len(read)
    for column in sorted(columns):
        wished = {
            index: sum(rows[source] for source in read[index]) / max(len(read[index]), 1)
            for index in columns[column]
        }
        members = sorted(columns[column], key=lambda index: (wished[index], index))
        for position, index in enumerate(members):
            rows[index] = position - (len(members) - 1) / 2
    places = {index: (float(column), rows[index]) for column, members in columns.items() for index in members}
    # Operators without readers and inputs (counters of steps) stand below, in as many columns as the others take.
    alone = [index for index in range(len(read)) if index not in places]
    width, lowest = len(columns) or ALONE_IN_A_ROW, min((row for _, row in places.values()), default=0.0)
    for number, index in enumerate(alone):
        places[index] = (float(number % width), lowest - 2 - number // width)
    return [places[index] for index in range(len(read))]


def _columns(read: Sequence[Sequence[int]], readers: Sequence[set[int]]) -> dict[int, list[int]]:
    """Return the connected operators by column; an operator that reads no other stands just before its first reader."""
    depth = [0] * len(read)
    for index, sources in enumerate(read):  # operators are in topological order
        depth[index] = 1 + max((depth[source] for source in sources), default=-1)
    columns: dict[int, list[int]] = defaultdict(list)
    for index, sources in enumerate(read):
        if sources:
            columns[depth[index]].append(index)
        elif readers[index]:
            columns[min(depth[reader] for reader in readers[index]) - 1].append(index)
    return columns


def configuration_text(axes: Any, configuration: Any) -> str:
    """Return degrees and devices of an operator."""
    degrees = [
        f"{axis.name} {degree}"
        for axis, degree in zip(axes, configuration.degrees, strict=True)
        if degree > 1
    ]
    devices = sorted(set(configuration.devices))
    shown = (
        ", ".join(map(str, devices))
        if len(devices) <= 8
        else f"{devices[0]} ... {devices[-1]} ({len(devices)})"
    )
    return f"{' x '.join(degrees) or 'whole'} on device{'s' if len(devices) > 1 else ''} {shown}"


def _operator_times_ns(simulated: StepTimeline) -> dict[str, int]:
    times: dict[str, int] = defaultdict(int)
    for slices in simulated.devices:
        for span in slices:
            if span.kind in ("forward", "backward", "recompute"):
                times[span.subject] += span.duration_ns
    return times
