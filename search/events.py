"""The cost of a proposal in fifo order and by priority, simulated from event to event without a task graph.

What every resource has to do, which tasks have a backward, and memory are brought from the current strategy to the
proposal as in program order (`search.delta`). The simulation goes by the memo units: whoever ends lets those know that
wait for it, by way of the pieces and assemblies of what it makes. It is given up as soon as some resource, with what it
still has to do, is sure to exceed the bound. Exactly what a simulation of the task graph gives.

Strategies in which something of a weight is shared, or groups are made again, go by their task graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graph.strategy import Configuration
from search import kernels
from search.arrays import csr
from search.delta import POOL_WORDS, new_versions
from search.evaluation import Outcome, outcome
from search.kernels import Flow, Followers, GraphArrays, Units
from search.layout import Layout, Undo, buckets_for, more_buckets, new_buckets, new_gathers
from search.policies import positions
from search.simulator import Order

# Kinds of blocks of tasks: forward, collectives and transfers of what an operator makes or renews; the same of its
# backward, by what it reads; sums.
BLOCKS_AN_OPERATOR, BLOCKS_A_VALUE, BLOCKS_A_READING, BLOCKS_A_BUCKET = 2, 2, 2, 1


def can_simulate(layout: Layout, order: Order) -> bool:
    """Return whether strategies of a layout can be simulated so in an order."""
    makes_again = bool((layout.groups.of_O >= 0).any())
    return order in ("fifo", "priority") and not layout.is_shared and not makes_again


class Events:
    """Fifo order, or by priority, without a task graph and up to the bound."""

    def __init__(self, layout: Layout, order: Order) -> None:
        self.layout = layout
        self.order = order
        builder = layout.builder
        self._wiring = wiring = builder.store.wiring
        self._followers = _followers(wiring)
        self._positions = positions(wiring)
        operators = len(layout.configurations)
        devices = len(builder.topology.devices)
        resources = devices + len(builder.topology.links)
        self._nothing_O = np.zeros(operators, np.int64)
        self._keeps_ends = np.zeros(operators, np.bool_)
        self._versions = [new_versions(layout, resources) for _ in range(2)]
        self._pool = np.zeros(POOL_WORDS, np.int64)
        self._end = self._proposed_end = 0
        self._buckets = new_buckets(64, 256, 0)
        self._gathers = new_gathers(layout, 1)
        self._old_units = Units(*(array.copy() for array in layout.units))
        self._generation = -1
        self._machines = builder.machines
        self._left_ns_R = np.zeros(resources, np.int64)
        self._update_ns_D = np.zeros(devices, np.int64)
        self._sync_ns_B = np.zeros(64, np.int64)
        self._flow = _new_flow(wiring, devices, 256, 64, 16, 64, 256)
        self._current: Outcome | None = None
        self._proposed: Outcome | None = None
        self._undo: Undo = ([], [])

    @property
    def configurations(self) -> list[Configuration]:
        """Those of the layout."""
        return self.layout.configurations

    def current(self) -> Outcome:
        """Return what the layout's strategy costs."""
        if self._current is None:
            self._current = outcome(self.layout, self.order)
        return self._current

    def propose(self, changed: Mapping[int, Configuration], bound_ns: int) -> Outcome | None:
        """Change some operators; return what that costs, or None where the makespan exceeds the bound.

        Raises:
            CostError: a local call has no cost.
        """
        self._renew()
        self._undo = self.layout.replace(changed)
        excess_bytes = self._prepare(everything=0)
        return self._simulate(excess_bytes, bound_ns)

    def accept(self) -> None:
        """Keep the proposal."""
        self._current = self._proposed
        self._keep()

    def reject(self) -> None:
        """Take the proposal back."""
        self.layout.undo(self._undo)

    def _keep(self) -> None:
        self._versions.reverse()
        for old, units in zip(self._old_units, self.layout.units, strict=True):
            old[:] = units
        self._end = self._proposed_end

    def _renew(self) -> None:
        """Derive all of the current strategy where the units of the store are others now, or the pool is half full."""
        store = self.layout.builder.store
        store.make_room()
        if store.generation == self._generation and 2 * self._end <= len(self._pool):
            return
        self.layout.refresh()
        self._end = 0
        self._prepare(everything=1)
        self._keep()
        self._generation = store.generation
        while len(self._pool) < 8 * self._end:
            self._pool = np.concatenate([self._pool, np.zeros_like(self._pool)])

    def _prepare(self, *, everything: int) -> int:
        """Make the proposed versions those of the layout; return the bytes beyond the devices' memories."""
        builder, layout = self.layout.builder, self.layout
        holds = builder.store.holds.arrays()
        self._buckets = buckets_for(holds, self._buckets)
        old, new = self._versions
        while True:
            if len(self._sync_ns_B) < len(self._buckets.hold):
                self._sync_ns_B = np.zeros(len(self._buckets.hold), np.int64)
            end, excess_bytes = kernels.prepare_events(
                self._wiring, self._old_units, layout.units, builder.store.arena, holds, self._pool,
                0 if everything else self._end, old, new, self._buckets, layout.groups, self._gathers, self._machines,
                self._nothing_O, self._keeps_ends, builder.bucket_bytes, builder.state_tensors, everything,
                self._left_ns_R, self._update_ns_D, self._sync_ns_B,
            )  # fmt: skip
            if end == -2:
                self._pool = np.concatenate([self._pool, np.zeros_like(self._pool)])
            elif end == -3:
                self._buckets = more_buckets(self._buckets)
            else:
                break
        self._proposed_end = end
        return int(excess_bytes)

    def _simulate(self, excess_bytes: int, bound_ns: int) -> Outcome | None:
        builder, layout = self.layout.builder, self.layout
        while True:
            makespan_ns = kernels.run_events(
                self._wiring, self._followers, layout.units, builder.store.arena, builder.store.holds.arrays(),
                self._pool, self._versions[1], self._buckets, builder.contention_ppm_D, self._left_ns_R,
                self._update_ns_D, self._sync_ns_B, self._flow, self._positions, int(self.order == "priority"),
                bound_ns,
            )  # fmt: skip
            if makespan_ns != -2:
                break
            self._make_room()
        if makespan_ns == -3:
            # In steps of minutes a time and a number do not fit into one word.
            makespan_ns, _ = layout.run(self.order, bound_ns)
        if not 0 <= makespan_ns <= bound_ns:
            return None
        self._proposed = Outcome(excess_bytes, makespan_ns)
        return self._proposed

    def _make_room(self) -> None:
        counts = self._flow.counts
        self._flow = _new_flow(
            self._wiring,
            len(self._update_ns_D),
            2 * int(counts[kernels.NODES]),
            2 * int(counts[kernels.SOURCES]),
            max(64, 2 * (int(counts[kernels.NUMBER]) >> kernels.CELL_BITS)),
            len(self._buckets.hold),
            len(self._buckets.entry_weight),
        )


def _followers(wiring: GraphArrays) -> Followers:
    operators, values = len(wiring.order), wiring.value_count
    renewed: list[list[int]] = [[] for _ in range(operators)]
    for value in range(values, values + wiring.buffer_count):
        renewed[wiring.producer[value]].append(value)
    weights: list[list[int]] = [[] for _ in range(operators)]
    for weight in range(wiring.weight_count):
        for user in wiring.weight_user[wiring.weight_ptr[weight] : wiring.weight_ptr[weight + 1]].tolist():
            weights[user].append(weight)
    slots_O = [
        int((wiring.slot_value[first:last] >= 0).sum())
        for first, last in zip(wiring.slot_ptr[:-1], wiring.slot_ptr[1:], strict=True)
    ]
    return Followers(np.array(slots_O, np.int64), *csr(renewed), *csr(weights))


def _new_flow(
    wiring: GraphArrays, devices: int, nodes: int, sources: int, cells: int, buckets: int, entries: int
) -> Flow:
    operators, values = len(wiring.order), wiring.value_count + wiring.buffer_count
    readings = len(wiring.read_value)
    blocks = (
        BLOCKS_AN_OPERATOR * operators
        + BLOCKS_A_VALUE * values
        + BLOCKS_A_READING * readings
        + BLOCKS_A_BUCKET * buckets
        + 1
    )
    return Flow(
        counts=np.zeros(kernels.SOURCES + 1, np.int64),
        node=np.zeros(2 * nodes, np.int64),
        heap=np.zeros(nodes + sources, np.int64),
        cursor=np.zeros(sources, np.int64),
        operator_node=np.zeros(operators, np.int64),
        value_node=np.zeros(values, np.int64),
        collective_node=np.zeros(values, np.int64),
        cursor_at=np.zeros(values, np.int64),
        cell=np.zeros(cells, np.int64),
        block_4=np.zeros((blocks, 4), np.int64),
        is_linked=np.zeros((cells << kernels.CELL_BITS) + 1, np.uint8),
        first_2O=np.zeros((2, operators), np.int64),
        first_2V=np.zeros((2, values), np.int64),
        back_2E=np.zeros((2, readings), np.int64),
        sync_number_B=np.zeros(buckets, np.int64),
        sync_priority_B=np.zeros(buckets, np.int64),
        entry_W=np.zeros(wiring.weight_count, np.int64),
        entry_next=np.zeros(entries, np.int64),
        entry_position=np.zeros(entries, np.int64),
        is_member_BD=np.zeros((buckets, devices), np.bool_),
    )
