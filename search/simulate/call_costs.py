"""What tasks of operators take, keep and are priced by: the costs of their local calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graph.axes import Degrees
from graph.calls import LocalCall
from graph.operator_ranges import OperatorRanges
from graph.operators import OperatorGraph
from search.cost.calls_to_profile import LocalCalls
from search.cost.cost_table import CallCost, CostTable
from search.simulate.regions import IntArray
from search.simulate.saved_tensors import Lasting, kept_bytes, kept_outputs, lasting_outputs


class TaskCosts:
    """The costs of all tasks met so far, by operators' classes and degrees.

    `has_launches`: whether a host takes time to issue any of them.
    """

    def __init__(
        self, graph: OperatorGraph, classes: Sequence[int], costs: CostTable, local_calls: LocalCalls
    ) -> None:
        self._graph = graph
        self._classes = classes
        self._costs = costs
        self._local_calls = local_calls
        self._kept = kept_outputs(graph)
        self._of_calls: dict[tuple[int, Degrees, str, int], tuple[list[tuple[int, ...]], list[int]]] = {}
        self._rows: dict[tuple[int, str, str, int], tuple[int, ...]] = {}
        self.has_launches = False
        self._lasting: dict[OperatorRanges, tuple[Lasting | None, ...]] = {}
        self._lasting_number: dict[Lasting | None, int] = {None: 0}

    def lasting(self, recomputation: OperatorRanges) -> tuple[Lasting | None, ...]:
        """Return, for each operator, what lasts of its outputs where groups are made again; None: the same as else."""
        outputs = self._lasting.get(recomputation)
        if outputs is None:
            outputs = tuple(
                None if lasting.again is None and lasting.kept == kept else lasting
                for lasting, kept in zip(lasting_outputs(self._graph, recomputation), self._kept, strict=True)
            )
            self._lasting[recomputation] = outputs
            for lasting in outputs:
                self._lasting_number.setdefault(lasting, len(self._lasting_number))
        return outputs

    def variants(self, lasting: Sequence[Lasting | None]) -> list[int]:
        """Return a number of what lasts of each operator's outputs; 0: the same as without recomputation."""
        return [self._lasting_number[outputs] for outputs in lasting]

    def rows(self, index: int, degrees: Degrees, kind: str, lasting: Lasting | None) -> IntArray:
        """Return what the arena's operator fragment has of every task (rows), but for its device.

        Raises:
            CostError: a local call has no cost on this kind of device.
        """
        of_calls, call_of = self.of_calls(index, (*degrees[:-1], 1), kind, lasting)
        return np.repeat(np.array(of_calls, np.int64)[call_of], degrees[-1], axis=0)

    def of_calls(
        self, index: int, degrees: Degrees, kind: str, lasting: Lasting | None
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return the rows of distinct calls, and the number of the call that each task executes.

        degrees: without replicas.

        Raises:
            CostError: a local call has no cost on this kind of device.
        """
        key = (self._classes[index], degrees, kind, self._lasting_number[lasting])
        of_calls = self._of_calls.get(key)
        if of_calls is None:
            calls = self._local_calls(self._graph, self._graph.operators[index], degrees)
            # Equal calls are one object, as a rule.
            distinct = {id(call): call for call in calls}
            costs = self._costs.costs(list(distinct.values()), kind)
            rows = [
                self._row(index, call, cost, kind, lasting)
                for call, cost in zip(distinct.values(), costs, strict=True)
            ]
            number_of = {call_id: number for number, call_id in enumerate(distinct)}
            of_calls = self._of_calls[key] = rows, [number_of[id(call)] for call in calls]
        return of_calls

    def both_ns(self, index: int, calls: Sequence[LocalCall], kind: str) -> list[int]:
        """Return the nanoseconds of forward and backward of some calls of an operator.

        Raises:
            CostError: a local call has no cost on this kind of device.
        """
        summed = self._graph.summed_slots[index]
        return [
            cost.forward_ns + self._costs.backward_ns(cost, call, summed, kind)
            for call, cost in zip(calls, self._costs.costs(calls, kind), strict=True)
        ]

    def _row(
        self, index: int, call: LocalCall, cost: CallCost, kind: str, lasting: Lasting | None
    ) -> tuple[int, ...]:
        """Return what the arena's operator fragment has of a task that executes a call."""
        key = (self._classes[index], call.digest, kind, self._lasting_number[lasting])
        row = self._rows.get(key)
        if row is None:
            outputs = Lasting(self._kept[index]) if lasting is None else lasting
            kept, again = kept_bytes(outputs, call)
            summed = self._graph.summed_slots[index]
            backward_ns = self._costs.backward_ns(cost, call, summed, kind)
            launches = (
                cost.forward_launch_ns,
                self._costs.backward_launch_ns(cost, call, summed, kind),
            )
            self.has_launches |= any(launches)
            row = self._rows[key] = cost.forward_ns, backward_ns, kept, cost.origin, again, *launches
        return row
