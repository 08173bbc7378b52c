"""Chains of linear layers whose computations take whole units, so that their timelines can be counted by hand."""

from collections.abc import Callable, Sequence

from graph.calls import LocalCall
from graph.operators import OperatorGraph, ValueKind
from search.cost.cost_table import OperatorCost, Origin, UpdateCost
from tests.search.builders import GraphBuilder

UNIT_S, UNIT_NS = 1e-3, 1_000_000


class LayerCosts:
    """A linear layer computes as many units forward and backward as it is said to; nothing else takes time."""

    def __init__(self, units: Callable[[LocalCall], tuple[int, int]]) -> None:
        self.units = units

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost | None]:  # noqa: ARG002
        costs: list[OperatorCost | None] = []
        for call in calls:
            forward, backward = self.units(call) if call.target == "aten.linear.default" else (0, 0)
            costs.append(OperatorCost(forward * UNIT_S, backward * UNIT_S, Origin.MEASURED))
        return costs

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:  # noqa: ARG002
        return UpdateCost(0.0, Origin.MEASURED)


def chain(widths: Sequence[int], samples: int = 2) -> OperatorGraph:
    """Return linear layers between values of some widths."""
    builder = GraphBuilder()
    x = builder.value("input.0", (samples, widths[0]), ValueKind.INPUT)
    for number, width in enumerate(widths[1:]):
        x = builder.linear(f"layer{number}", x, width)
    builder.loss(x)
    return builder.finish()
