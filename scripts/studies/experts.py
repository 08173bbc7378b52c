"""The experts' strategy for recurrent networks, which the paper compares with: layers on devices of a node by depth.

Source: Wu et al., "Google's Neural Machine Translation System" (arXiv:1609.08144), as FlexFlow (arXiv:1807.05358)
takes it: data parallel over the nodes; within a node, operators of one depth share a device.
"""

from __future__ import annotations

from graph.aliasing import base_name
from graph.errors import UsageError
from graph.operators import Operator, OperatorGraph, ValueKind
from graph.strategy import Configuration, Strategy
from graph.topology import Topology
from search.space.baselines import data_parallel, devices_by_work, points_of

NAME = "expert-by-depth"
CELLS = frozenset({"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})


def by_depth(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Return the strategy: every node has its samples, and every device of a node some depths.

    Depths follow the recurrent layers in order of their first use: what stands before a layer's cells has the depth of
    what it reads, what reads the last layer has a depth of its own. Devices of a node take depths in order, so that
    each has about the same number of multiply-adds.

    Raises:
        UsageError: the network has no recurrent cells, or the nodes have different numbers of devices.
    """
    nodes = _nodes(topology)
    depths = _depths(graph)
    work = [0] * (max(depths) + 1)
    for operator, depth in zip(graph.operators, depths, strict=True):
        work[depth] += points_of(operator)
    device_of_depth = devices_by_work(work, len(nodes[0]))
    over_nodes = data_parallel(graph, len(nodes)).configurations
    return Strategy(
        graph.digest,
        tuple(
            Configuration(
                configuration.degrees,
                tuple(nodes[node][device_of_depth[depth]] for node in configuration.devices),
            )
            for configuration, depth in zip(over_nodes, depths, strict=True)
        ),
    )


def _nodes(topology: Topology) -> list[list[int]]:
    by_node: dict[int, list[int]] = {}
    for device in topology.devices:
        by_node.setdefault(device.node, []).append(device.index)
    nodes = list(by_node.values())
    if any(len(node) != len(nodes[0]) for node in nodes):
        raise UsageError(
            f"{NAME}: nodes of {topology.name} have different numbers of devices, must have equal ones; choose others"
        )
    return nodes


def _depths(graph: OperatorGraph) -> list[int]:
    """Return the depth of every operator."""
    layers: dict[tuple[str, ...], int] = {}
    for operator in graph.operators:
        if _is_cell(operator):
            layers.setdefault(_weights(graph, operator), len(layers))
    if not layers:
        raise UsageError(
            f"{NAME}: {graph.name} has no recurrent cells, must have some; choose another network"
        )
    depths: list[int] = []
    for operator in graph.operators:
        if _is_cell(operator):
            depths.append(layers[_weights(graph, operator)])
            continue
        read = [graph.producer[name][0] for name in operator.inputs if name in graph.producer]
        depth = max((depths[index] for index in read), default=0)
        leaves = any(_is_cell(graph.operators[index]) for index in read) and depth == len(layers) - 1
        depths.append(len(layers) if leaves else depth)
    return depths


def _is_cell(operator: Operator) -> bool:
    return base_name(operator.target) in CELLS


def _weights(graph: OperatorGraph, operator: Operator) -> tuple[str, ...]:
    return tuple(name for name in operator.inputs if graph.value_by_name[name].kind is ValueKind.WEIGHT)
