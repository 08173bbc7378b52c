"""A strategy's parallel computation graph, drawn: operators, and the parallelization operators between them."""

from __future__ import annotations

from collections import defaultdict

from app.services.report.figures import Figure, plain, scatter
from app.services.report.graph import edges_of, graph_drawing, places_of
from app.services.timeline.simulated_step import SimulatedStep
from graph.errors import StrategyError
from graph.parallel_graph import ParallelChain, ParallelGraph, named_degrees, parallel_graph
from graph.parallel_tensor import ParallelKind, PlacedTensor

MOST_NODES = 1500
"""A figure of more could not be read: a node would be smaller than its distance to the next."""

COLORS = {
    ParallelKind.PARTITION: "#2f7ed8",
    ParallelKind.COMBINE: "#f28e2b",
    ParallelKind.REPLICATE: "#59a14f",
    ParallelKind.REDUCE: "#c44e52",
    ParallelKind.PIPELINE: "#7a5195",
    ParallelKind.BATCH: "#b8a1c9",
}


def drawn_parallel_graph(step: SimulatedStep) -> tuple[Figure | None, str]:
    """Return the figure of a step's parallel computation graph, and a sentence on it: why there is none, if so."""
    try:
        parallel = parallel_graph(step.graph, step.strategy)
    except StrategyError as error:
        return None, f"It has no parallel computation graph: {error}."
    nodes = len(parallel.operators) + parallel.parallel_operators
    if nodes > MOST_NODES:
        return (
            None,
            f"It has {nodes} nodes, more than the {MOST_NODES} that are drawn: app strategy show --pcg.",
        )
    return _figure(
        step, parallel
    ), f"{nodes} nodes, {parallel.parallel_operators} of parallelization operators."


class _Nodes:
    """The nodes of a parallel computation graph in topological order: what each reads, its text, its kind."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []
        self.texts: list[str] = []
        self.members: dict[str, list[int]] = defaultdict(list)

    def add(self, kind: str, text: str, read: list[int]) -> int:
        self.members[kind].append(len(self.read))
        self.read.append(read)
        self.texts.append(text)
        return len(self.read) - 1

    def add_chain(self, chain: ParallelChain, producer: int | None) -> int | None:
        """Add a chain's operators and return the last one of them, the producer if there is none."""
        last = producer
        for operator, result in zip(chain.operators, chain.results, strict=True):
            text = f"{operator.text}<br>{plain(chain.value)}<br>{_placed(result)}"
            last = self.add(operator.kind, text, [] if last is None else [last])
        return last


def _placed(placed: PlacedTensor) -> str:
    devices = ", ".join(map(str, placed.view.devices[:8])) + (", ..." if placed.view.volume > 8 else "")
    return f"{placed.tensor.text}<br>devices {devices}"


def _figure(step: SimulatedStep, parallel: ParallelGraph) -> Figure:
    graph, nodes = step.graph, _Nodes()
    made: dict[str, int] = {}
    for operator, placed in zip(graph.operators, parallel.operators, strict=True):
        read = [nodes.add_chain(chain, made.get(chain.value)) for chain in placed.inputs]
        degrees = named_degrees(operator, placed.degrees)
        split = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()) or "whole"
        text = "<br>".join(
            [
                plain(operator.name),
                plain(operator.target),
                split,
                f"device {placed.view.text(degrees)}",
                *(tensor.text for tensor in placed.outputs),
            ]
        )
        number = nodes.add("operator", text, [node for node in read if node is not None])
        made.update(dict.fromkeys(operator.outputs, number))
    nodes.add_chain(parallel.loss, made[graph.loss])
    places = places_of(nodes.read)
    edges = ((source, index) for index, sources in enumerate(nodes.read) for source in sources)
    data = [edges_of(edges, places)]
    for kind in ("operator", *COLORS):
        members = nodes.members.get(kind, [])
        if members:
            marker = (
                {"size": 9, "symbol": "square", "color": "#8d99a6"}
                if kind == "operator"
                else {"size": 7, "color": COLORS[ParallelKind(kind)]}
            )
            data.append(
                scatter(
                    "markers",
                    f"{kind} ({len(members)})",
                    x=[places[index][0] for index in members],
                    y=[places[index][1] for index in members],
                    marker=marker,
                    text=[nodes.texts[index] for index in members],
                    hoverinfo="text",
                )
            )
    return graph_drawing(data, places)
