"""The problem that an algorithm is given: a graph, devices, costs, and how the network is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graph.axes import Degrees
from graph.calls import LocalCall
from graph.operators import Operator, OperatorGraph
from graph.schedule import GradientSums, Schedule
from graph.strategy import Strategy, with_whole_weights
from graph.topology import Topology
from graph.training import Training
from search.cost.calls_to_profile import LocalCalls, rule_calls
from search.cost.cost_table import CostTable
from search.cost.link_costs import LinkCosts

if TYPE_CHECKING:
    from graph.rules.least import LeastWork, WorkPhase
    from search.simulate.task_graph import TaskGraphBuilder

FirstCall = Callable[[OperatorGraph, Operator, Degrees], LocalCall]
LeastWorkOf = Callable[[OperatorGraph, Operator], "tuple[LeastWork, LeastWork]"]


@dataclass(frozen=True, eq=False)
class Problem:
    """What an algorithm is to find a strategy for."""

    graph: OperatorGraph
    topology: Topology
    costs: CostTable
    training: Training
    links: LinkCosts = field(default_factory=LinkCosts)
    local_calls: LocalCalls = field(default_factory=rule_calls)
    # Makes the call of a first task without the others'; by default it is taken from all of them.
    first_call: FirstCall | None = None
    # What all tasks of an operator do together at least, forward and backward, where that is known.
    least_work: LeastWorkOf | None = None
    # Makes its task graphs, where others have made some already; by default a new one does.
    builder: TaskGraphBuilder | None = None
    # In how many parts a step goes through its batch, of one of which the graph is; the schedule, and when gradients
    # are summed over replicas; None: any.
    micro_batches: int = 1
    schedule: Schedule | None = None
    gradients: GradientSums | None = None
    # Whether `pipeline` may share weights themselves, beside gradients and optimizer state.
    shares_weights: bool = False

    def call_of_first(self, operator: Operator, degrees: Degrees) -> LocalCall:
        """Return the call of the first task of a configuration."""
        if self.first_call is not None:
            return self.first_call(self.graph, operator, degrees)
        return self.local_calls(self.graph, operator, degrees)[0]

    def least_together_ns(self, operator: Operator, kinds: Collection[str], *, backward: bool) -> int:
        """Return nanoseconds that all tasks of an operator take together at least, under any configuration.

        kinds: of devices that may run them. backward: whether those of the backward count, where there is one.

        Raises:
            CostError: the operator's call as a whole has no cost.
        """
        if self.least_work is None:
            return 0
        call = self.call_of_first(operator, (1,) * len(operator.space.axes))
        of_forward, of_backward = self.least_work(self.graph, operator)
        works: list[tuple[WorkPhase, LeastWork]] = [("forward", of_forward)]
        if backward and call.has_backward:
            works.append(("backward", of_backward))
        total_s = sum(
            min(self.costs.least_s(call, phase, work, kind) for kind in kinds) for phase, work in works
        )
        # Each task's times are rounded, by at most half a nanosecond.
        return max(0, int(total_s * 1e9) - self.device_count - 1)

    def in_micro_batches(self, strategy: Strategy) -> Strategy:
        """Return a strategy with the problem's micro-batches; weights that these cannot keep in shares are whole.

        Raises:
            StrategyError: the schedule is interleaved, and groups of devices do not take turns.
        """
        divided = strategy.in_micro_batches(self.micro_batches, self.schedule, self.gradients)
        return with_whole_weights(self.graph, divided)

    @property
    def device_count(self) -> int:
        """Number of devices."""
        return len(self.topology.devices)
