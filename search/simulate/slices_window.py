"""The rotated window of the policy p3 (`search.simulate.steady_state`): slices of sums, updates, and pulls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from graph.collective_algorithms import Choices, algorithm_for
from graph.intervals import shape, volume
from graph.plan import Plan
from graph.pulls import SliceStart
from graph.strategy import Sharding
from graph.synchronization import slice_bound
from graph.weight_placement import cells, share_elements
from search.cost.cost_table import nanoseconds
from search.simulate.rotated_window import RotatedWindow
from search.simulate.task_graph import IntArray, TaskGraph, TaskGraphBuilder, TaskKind


class SlicesWindow(RotatedWindow):
    """Of p3: slices of sums, and updates before the first operator that reads a weight; pulls of shared slices.

    places: of the pulls, where these and sums keep to no order; else the plan's. Updates of slices take no time then.
    """

    def __init__(
        self,
        tasks: TaskGraph,
        plan: Plan,
        builder: TaskGraphBuilder,
        places: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        super().__init__(tasks, plan)
        self.builder = builder
        self.in_order = places is None
        self.starts = plan.starts
        if places is not None:
            self.starts = replace(plan, pulls=()).starts
            for (bucket, part), place in places.items():
                self.starts[place].append(SliceStart(bucket, part, is_pull=True))
        # Of each place (`graph.pulls`), how many tasks stand before it.
        self.boundaries: list[int] = []
        self.links = builder.links.choosing(plan.strategy)
        # By devices, the algorithms of their all-reduces.
        self.choices: dict[tuple[int, ...], Choices] = {}
        self.slices: list[list[int]] = [[] for _ in plan.buckets]
        self.pulls: list[list[int]] = [[] for _ in plan.buckets]
        self.shares: dict[int, IntArray] = {}
        # The sum of each bucket in the step; and for each weight, the buckets that its cells are in.
        self.sums = np.flatnonzero(tasks.kind_T == TaskKind.SYNCHRONIZE).tolist()
        self.buckets_of: dict[str, set[int]] = {}
        for number, of_weights in enumerate(plan.buckets):
            for entry in of_weights.entries:
                self.buckets_of.setdefault(entry.weight, set()).add(number)

    def rotated(self) -> TaskGraph:
        """Return the window."""
        for task in range(self.begin, self.updates):
            if self.step[task][0] == TaskKind.SYNCHRONIZE:
                bucket = self.step[task][4]
                for start in self.starts[bucket]:
                    self._start(start, bucket)
                self.boundaries.append(len(self.made.columns))
            else:
                self._move(task)
        self._forward()
        return self._graph()

    def _sum(self, bucket: int, part: int, waits: list[int]) -> None:
        """Add the sum of a slice, which waits for what fills its bucket and for other tasks."""
        whole = self.sums[bucket]
        kind, _, resource_set, origin, _, _, size_bytes, launch_ns = self.step[whole]
        first, last = slice_bound(size_bytes, self.plan.slice_counts[bucket], part)
        run_ns = self._sum_ns(whole, last - first, self.plan.buckets[bucket].sharding)
        column = (kind, run_ns, resource_set, origin, bucket, part, last - first, launch_ns)
        self.slices[bucket].append(self._add(column, [*self._waits(whole), *waits]))

    def _sum_ns(self, task: int, size_bytes: int, sharding: Sharding) -> int:
        """Return how long a slice of a sum takes: one of several behind each other, where that was measured.

        Then it takes no less than its share of the whole sum, which cutting makes no shorter. Measured so are
        all-reduces alone.
        """
        from search.cost.collective_cost import Prices

        run_ns = self._alone_ns(self.step[task][2], size_bytes)
        members = self.tasks.ends(task)
        successive = self.links.successive.get(members) if sharding is Sharding.NONE else None
        if successive is not None:
            if members not in self.choices:
                self.choices[members] = Prices(self.tasks.topology, self.links).choices(members)
            curve = successive.get(algorithm_for(self.choices[members], size_bytes))
            if curve is not None:
                share_s = self.step[task][1] / 1e9 * size_bytes / self.step[task][6]
                return min(run_ns, nanoseconds(max(curve.seconds(size_bytes), share_s)))
        return run_ns

    def _alone_ns(self, resource_set: int, size_bytes: int) -> int:
        """Return how long a collective of so many bytes takes."""
        from search.kernels.collective_formulas import collectives_ns

        run_ns = np.empty(1, np.int64)
        sizes = np.array([size_bytes], np.int64)
        collectives_ns(self.tasks.resource_sets, np.array([resource_set]), sizes, run_ns)
        return int(run_ns[0])

    def _before(self, operator: int) -> None:
        """Add what the step before leaves to be done before an operator, in the order of the plan."""
        for start in self.starts[len(self.boundaries)]:
            self._start(start)
        self.boundaries.append(len(self.made.columns))
        self._update(operator)
        for bucket in self.plan.pulls_awaited.get(operator, ()):
            for device in self.plan.buckets[bucket].devices:
                self.awaited_D[device] += self.pulls[bucket]

    def _start(self, start: SliceStart, full: int | None = None) -> None:
        """Add the sum or the pull of a slice; `full`: where that bucket is full, else before an operator."""
        if start.is_pull:
            self._pull(start.bucket, start.part)
        elif full is not None and self.plan.buckets[full].after == self.plan.buckets[start.bucket].after:
            self._sum(start.bucket, start.part, [])
        else:
            # It starts when its devices have come to this place.
            self._sum(start.bucket, start.part, self._here(start.bucket))

    def _pull(self, bucket: int, part: int) -> None:
        """Add the update of a slice, on each device that has a share of it, and its gather."""
        kind, _, resource_set, origin, _, _, size_bytes, launch_ns = self.step[self.gathers[bucket]]
        first, last = slice_bound(size_bytes, self.plan.slice_counts[bucket], part)
        waits = [self.slices[bucket][part]]
        if self.in_order:
            count, shares_D = self.plan.slice_counts[bucket], self._shares_D(bucket)
            elements_D = shares_D * (part + 1) // count - shares_D * part // count
            self._updates(elements_D, dict.fromkeys(self.plan.buckets[bucket].devices, waits))
        waits = [*waits, *self._here(bucket)]
        run_ns = self._alone_ns(resource_set, last - first)
        column = (kind, run_ns, resource_set, origin, bucket, part, last - first, launch_ns)
        self.pulls[bucket].append(self._add(column, waits))

    def _shares_D(self, bucket: int) -> IntArray:  # noqa: N802 - the shape suffix
        """Return how many elements of a bucket each device has a share of."""
        if bucket not in self.shares:
            elements_D = np.zeros(len(self.latest_D), np.int64)
            devices = self.plan.buckets[bucket].devices
            for entry in self.plan.buckets[bucket].entries:
                elements_D[list(devices)] += share_elements(shape(entry.cell.region), len(devices))
            self.shares[bucket] = elements_D
        return self.shares[bucket]

    def _update(self, operator: int) -> None:
        """Add the updates of the weights that an operator is the first to read, but for slices that are shared."""
        weights = self.plan.updated_before.get(operator, ())
        if not weights:
            return
        elements_D = np.zeros(len(self.latest_D), np.int64)
        for name in weights:
            if self.plan.sharding[name] is Sharding.NONE:
                for device, region in self.plan.held[name].items():
                    elements_D[device] += volume(region)
            else:
                for cell in cells(self.plan.held[name]):
                    elements_D[cell.devices[0]] += volume(cell.region) if len(cell.devices) == 1 else 0
        waits_D: dict[int, list[int]] = {}
        for bucket in sorted({bucket for name in weights for bucket in self.buckets_of.get(name, ())}):
            if self.plan.buckets[bucket].sharding is Sharding.NONE:
                for device in self.plan.buckets[bucket].devices:
                    waits_D.setdefault(device, []).extend(self.slices[bucket])
        self._updates(elements_D, waits_D)

    def _updates(self, elements_D: IntArray, waits_D: Mapping[int, list[int]]) -> None:
        """Add an update of so many elements on each device that has any, and what it waits for."""
        updates = self.builder.updates(elements_D)
        for device in np.flatnonzero(elements_D).tolist():
            column = (
                int(TaskKind.UPDATE), int(updates.run_ns_D[device]), device, int(updates.origin_D[device]), device,
                0, 0, int(updates.launch_ns_D[device]),
            )  # fmt: skip
            self._add(column, waits_D.get(device, []))
