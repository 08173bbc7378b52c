"""What the parts of backwards take and keep, where a schedule has the gradients of weights apart.

Each part is a local call that differentiates fewer inputs (`graph.backward_parts`), whose backward is that part: its
cost is asked for as that of any other call, when a strategy needs it first.

From the input part to the weight part of a micro-batch an operator keeps what its backward reads, all of it, and the
gradients of its outputs. Inputs that several tasks of a device read in the same region are there once.

Shape letters here: T tasks of one micro-batch, O operators, S stages, D devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from graph.axes import Degrees, operand_regions
from graph.backward_parts import BackwardParts, backward_parts, part_of
from graph.calls import LocalCall
from graph.operators import FLOATING, OperatorGraph, ValueKind
from graph.strategy import Configuration
from search.cost.calls_to_profile import LocalCalls
from search.cost.cost_table import CostTable
from search.kernels.records import BACKWARD, SYNCHRONIZE, UPDATE, WEIGHT, Array, Tasks
from search.simulate.saved_tensors import extra_bytes, keeps_output, kept_inputs

KindOf = Callable[[int], str]
"""Returns the kind of a device."""


class PartCosts(NamedTuple):
    """Of backwards in two parts: duration, launch and origin of each; nil where `is_divided_T` is false."""

    is_divided_T: Array
    input_ns_T: Array
    input_launch_ns_T: Array
    input_origin_T: Array
    weight_ns_T: Array
    weight_launch_ns_T: Array
    weight_origin_T: Array


class _KeptBytes(NamedTuple):
    """The bytes that a task alone keeps, and the numbers and bytes of regions that others may keep as well."""

    own: int
    regions: tuple[tuple[int, int], ...]


class WeightParts:
    """The parts of all backwards of a graph; costs of equal operators and degrees are kept."""

    def __init__(
        self, graph: OperatorGraph, classes: Sequence[int], costs: CostTable, local_calls: LocalCalls
    ) -> None:
        """Take a graph, its operators' classes (of equal local calls), and where calls and costs come from."""
        self._graph = graph
        self._classes = classes
        self._costs = costs
        self._local_calls = local_calls
        self._parts = [backward_parts(graph, operator) for operator in graph.operators]
        self.is_divided_O = np.array([parts.has_weights for parts in self._parts], np.bool_)
        self._rows: dict[tuple[int, BackwardParts, Degrees, str], Array] = {}
        # Of an operator and its degrees, by task.
        self._kept: dict[tuple[int, Degrees], list[_KeptBytes]] = {}
        # A number for every region of a value; equal ones, equal regions.
        self._numbers: dict[tuple[str, object], int] = {}

    def costs(self, tasks: Tasks, configurations: Sequence[Configuration], kind_of: KindOf) -> PartCosts:
        """Return the costs of both parts of every backward that has a weight part.

        Raises:
            CostError: a part has no cost.
        """
        is_divided_T = (tasks.kind == BACKWARD) & self.is_divided_O[tasks.subject % len(self.is_divided_O)]
        table_T = np.zeros((6, len(tasks.kind)), np.int64)
        divided = np.flatnonzero(is_divided_T)
        for task, index, part, device in zip(
            divided.tolist(),
            tasks.subject[divided].tolist(),
            tasks.part[divided].tolist(),
            tasks.resource_set[divided].tolist(),
            strict=True,
        ):
            rows = self._rows_of(index, configurations[index].degrees, kind_of(device))
            table_T[:, task] = rows[part // configurations[index].degrees[-1]]
        return PartCosts(is_divided_T, *table_T)

    def _rows_of(self, index: int, degrees: Degrees, kind: str) -> Array:
        """Return what `PartCosts` has of an operator's tasks (rows), without replicas."""
        key = (self._classes[index], self._parts[index], degrees[:-1], kind)
        rows = self._rows.get(key)
        if rows is None:
            calls = self._local_calls(self._graph, self._graph.operators[index], (*degrees[:-1], 1))
            made: dict[str, tuple[int, ...]] = {}
            for call in calls:
                if call.digest not in made:
                    made[call.digest] = tuple(
                        number
                        for slots in self._parts[index]
                        for number in self._cost(index, part_of(call, slots), kind)
                    )
            rows = self._rows[key] = np.array([made[call.digest] for call in calls], np.int64)
        return rows

    def _cost(self, index: int, call: LocalCall, kind: str) -> tuple[int, int, int]:
        """Return duration, launch and origin of the backward of a part; nil where it differentiates nothing."""
        if not call.has_backward:
            return 0, 0, 0
        (cost,) = self._costs.costs([call], kind)
        summed = self._graph.summed_slots[index]
        backward_ns = self._costs.backward_ns(cost, call, summed, kind)
        return backward_ns, self._costs.backward_launch_ns(cost, call, summed, kind), cost.origin

    def kept_SD(  # noqa: N802 - the shape suffix
        self,
        tasks: Tasks,
        configurations: Sequence[Configuration],
        stage_O: Sequence[int],
        shape: tuple[int, int],
    ) -> Array:
        """Return the bytes that each stage keeps on each device from input parts to weight parts of a micro-batch."""
        kept = np.zeros(shape, np.int64)
        seen: set[tuple[int, int]] = set()
        divided = np.flatnonzero(
            (tasks.kind == BACKWARD) & self.is_divided_O[tasks.subject % len(self.is_divided_O)]
        )
        for index, part, device in zip(
            tasks.subject[divided].tolist(),
            tasks.part[divided].tolist(),
            tasks.resource_set[divided].tolist(),
            strict=True,
        ):
            size_bytes, regions = self._kept_of(index, configurations[index].degrees)[part]
            for number, region_bytes in regions:
                if (number, device) not in seen:
                    seen.add((number, device))
                    size_bytes += region_bytes
            kept[stage_O[index], device] += size_bytes
        return kept

    def _kept_of(self, index: int, degrees: Degrees) -> list[_KeptBytes]:
        """Return what each task of an operator keeps."""
        if (index, degrees) in self._kept:
            return self._kept[index, degrees]
        graph, operator = self._graph, self._graph.operators[index]
        space = operator.space
        slots = [
            slot
            for slot in kept_inputs(operator, graph.gradient_inputs(operator))
            if graph.value_by_name[operator.inputs[slot]].kind is ValueKind.OPERATOR
        ]
        regions = [operand_regions(space.axes, space.inputs[slot], degrees) for slot in slots]
        result: list[_KeptBytes] = []
        for part, call in enumerate(self._local_calls(graph, operator, degrees)):
            own = extra_bytes(call) + sum(
                spec.size_bytes * ((spec.dtype in FLOATING) + keeps_output(operator)) for spec in call.outputs
            )
            numbers = (
                self._numbers.setdefault((operator.inputs[slot], of_slot[part]), len(self._numbers))
                for slot, of_slot in zip(slots, regions, strict=True)
            )
            sizes = (call.inputs[slot].size_bytes for slot in slots)
            result.append(_KeptBytes(own, tuple(zip(numbers, sizes, strict=True))))
        return self._kept.setdefault((index, degrees), result)


def with_weight_parts(
    tasks: Tasks, segment_T: Array, parts: PartCosts, place_G: Array, stages: int
) -> tuple[Tasks, Array]:
    """Return tasks and their segments with the weight parts of backwards as tasks of their own.

    A weight part waits for its input part and, as that did, for sums of gradients. What waited for the gradients of
    weights waits for it.

    Args:
        tasks: of one micro-batch, in program order.
        segment_T: the segment of the program that each stands in.
        parts: of backwards.
        place_G: the place of each segment in the program.
        stages: weight parts and sums stand so many segments after the backwards of their stage, in the order of these.
    """
    count, divided = len(tasks.kind), np.flatnonzero(parts.is_divided_T)
    is_sum_T = tasks.kind == SYNCHRONIZE
    weight_T = np.full(count, -1, np.int64)
    weight_T[divided] = count + np.arange(len(divided))
    waiting_E, pred_E = np.repeat(np.arange(count), np.diff(tasks.pred_ptr)), tasks.pred
    wants_weights_E = (is_sum_T | (tasks.kind == UPDATE))[waiting_E] & parts.is_divided_T[pred_E]
    awaits_sum_E = parts.is_divided_T[waiting_E] & is_sum_T[pred_E]
    waiting_E, pred_E = (
        np.concatenate([waiting_E, weight_T[divided], weight_T[waiting_E[awaits_sum_E]]]),
        np.concatenate([np.where(wants_weights_E, weight_T[pred_E], pred_E), divided, pred_E[awaits_sum_E]]),
    )
    # Tasks as before, and then the weight parts.
    source = np.concatenate([np.arange(count), divided])
    segment = np.concatenate([np.where(is_sum_T, segment_T + stages, segment_T), segment_T[divided] + stages])
    order = np.lexsort((source, place_G[segment]))
    place = np.empty(len(source), np.int64)
    place[order] = np.arange(len(source))
    waiting_E, pred_E = place[waiting_E], place[pred_E]
    pred_ptr = np.zeros(len(source) + 1, np.int64)
    np.cumsum(np.bincount(waiting_E, minlength=len(source)), out=pred_ptr[1:])

    def with_parts(whole_T: Array, input_T: Array, weight_T: Array) -> Array:
        return np.concatenate([np.where(parts.is_divided_T, input_T, whole_T), weight_T[divided]])[order]

    divided_tasks = Tasks(
        kind=np.concatenate([tasks.kind, np.full(len(divided), WEIGHT)])[order],
        run_ns=with_parts(tasks.run_ns, parts.input_ns_T, parts.weight_ns_T),
        resource_set=tasks.resource_set[source][order],
        origin=with_parts(tasks.origin, parts.input_origin_T, parts.weight_origin_T),
        subject=tasks.subject[source][order],
        part=tasks.part[source][order],
        size_bytes=tasks.size_bytes[source][order],
        launch_ns=with_parts(tasks.launch_ns, parts.input_launch_ns_T, parts.weight_launch_ns_T),
        pred_ptr=pred_ptr,
        pred=pred_E[np.argsort(waiting_E, kind="stable")],
    )
    return divided_tasks, segment[order]
