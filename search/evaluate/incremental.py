"""The cost of a proposal from what it changes, in program order; exactly what a full simulation gives.

Of the current strategy is kept what its operators and values contribute, and the state of all resources at
checkpoints. A proposal is derived where it differs, simulated from the last checkpoint before that, without writing a
task graph, and given up as soon as some resource, with what it still has to do, is sure to exceed the bound. Most of
what is far too slow is given up before it is derived (`search.evaluate.optimistic_bound`).

Source: FlexFlow (arXiv:1807.05358) section 5.3 for the idea; restart, bounds and versions are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graph.strategy import Configuration
from search.evaluate.optimistic_bound import Relaxation
from search.kernels.incremental import compact, evaluate_program_order
from search.kernels.records import Array, Checkpoints, Units, Versions
from search.outcome import NEVER_NS, Outcome
from search.simulate.strategy_state import (
    Layout,
    Undo,
    buckets_for,
    more_buckets,
    new_buckets,
    new_derivation,
    new_gathers,
)

# About as many checkpoints; each holds the state of every device and link.
CHECKPOINTS = 32
POOL_WORDS = 1 << 12


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """What saves time; results are the same without. Turned off to measure what each is worth.

    restart: from a checkpoint. bound: where it is sure to be exceeded, the simulation stops. relaxation: part of a
    proposal is tried first. folding: what all devices do alike is served together.
    """

    restart: bool = True
    bound: bool = True
    relaxation: bool = True
    folding: bool = True


class Delta:
    """Program order, simulated from the first change on and up to the bound."""

    def __init__(self, layout: Layout, mechanisms: Mechanisms = Mechanisms()) -> None:
        self.layout = layout
        self._mechanisms = mechanisms
        builder = layout.builder
        self._wiring = wiring = builder.store.wiring
        operators = len(layout.configurations)
        devices = len(builder.topology.devices)
        resources = devices + len(builder.topology.links)
        self._place_of = np.empty(operators, np.int64)
        self._place_of[wiring.order] = np.arange(operators)
        self._keeps_ends = np.zeros(operators, np.bool_)
        self._keeps_ends[wiring.producer[wiring.value_count :]] = True
        stride = max(1, -(-wiring.loss_operators // (CHECKPOINTS if mechanisms.restart else 1)))
        count = wiring.loss_operators // stride + 1
        row = np.zeros((count, 2, 2 * resources + devices + 1), np.int64)
        self._checkpoints = Checkpoints(row, np.zeros(count, np.int64), stride)
        self._relaxation = Relaxation(layout)
        self._resources = resources
        # Of the current strategy, and of the proposal.
        self._versions = [new_versions(layout, resources, np.zeros(0, np.int64)) for _ in range(2)]
        self._spare = np.zeros(0, np.int64)
        self._number = 0
        self._buckets = new_buckets(64, 256, 0)
        self._gathers = new_gathers(layout, 64)
        self._old_units = Units(*(array.copy() for array in layout.units))
        self._generation = -1
        self._machines = builder.machines
        self._current = self._proposed = Outcome(0, 0)
        self._undo: Undo = ([], [])

    @property
    def configurations(self) -> list[Configuration]:
        """Those of the layout."""
        return self.layout.configurations

    def current(self) -> Outcome:
        """Return what the layout's strategy costs."""
        self._renew()
        return self._current

    def propose(self, changed: Mapping[int, Configuration], bound_ns: int) -> Outcome | None:
        """Change some operators; return what that costs, or None where the makespan exceeds the bound.

        Raises:
            CostError: a local call has no cost.
        """
        self._renew()
        tries = bound_ns < NEVER_NS and self._mechanisms.relaxation
        part = self._relaxation.replace(changed) if tries else None
        if part is not None:
            self._undo = part
            exceeds = self._evaluate(bound_ns, is_part=True) is None
            self._relaxation.decided(exceeds=exceeds)
            if exceeds:
                return None
            self.layout.undo(part)
        self._undo = self.layout.replace(changed)
        return self._evaluate(bound_ns)

    def accept(self) -> None:
        """Keep the proposal."""
        self._current = self._proposed
        self._versions.reverse()
        self._checkpoints.side[self._number + 1 :] ^= 1
        for old, units in zip(self._old_units, self.layout.units, strict=True):
            old[:] = units
        derivation = self._versions[0].derivation
        if 2 * derivation.counts[1] > len(derivation.pool):
            self._compact()

    def reject(self) -> None:
        """Take the proposal back."""
        self.layout.undo(self._undo)

    def _renew(self) -> None:
        """Derive all of the current strategy where the units of the store are others now."""
        store = self.layout.builder.store
        store.make_room()
        if store.generation == self._generation:
            return
        self.layout.refresh()
        self._checkpoints.row[0] = 0
        # All of it differs from nothing.
        pool = self._versions[0].derivation.pool
        self._versions = [new_versions(self.layout, self._resources, pool) for _ in range(2)]
        for old in self._old_units:
            old[:] = -1
        self._evaluate(NEVER_NS)
        self.accept()
        self._generation = store.generation

    def _evaluate(self, bound_ns: int, *, is_part: bool = False) -> Outcome | None:
        builder, layout = self.layout.builder, self.layout
        arena, units, wiring = builder.store.arena, layout.units, self._wiring
        holds = builder.store.holds.arrays()
        self._buckets = buckets_for(holds, self._buckets)
        while True:
            old, new = self._versions
            makespan_ns, self._number, excess_bytes = evaluate_program_order(
                wiring, self._old_units, units, arena, holds, old, new, self._buckets,
                layout.groups, self._gathers, self._machines, self._place_of, self._keeps_ends,
                self._checkpoints, builder.bucket_bytes, builder.state_tensors,
                int(self._mechanisms.folding), int(not is_part), bound_ns if self._mechanisms.bound else NEVER_NS,
            )  # fmt: skip
            if makespan_ns == -2:
                self._grow()
            elif makespan_ns == -3:
                self._buckets = more_buckets(self._buckets)
            elif makespan_ns == -4:
                self._gathers = new_gathers(layout, 2 * len(self._gathers.hold))
            else:
                break
        if not 0 <= makespan_ns <= bound_ns:
            return None
        self._proposed = Outcome(excess_bytes, makespan_ns)
        return self._proposed

    def _grow(self) -> None:
        """Make the pool twice as long."""
        pool = self._versions[0].derivation.pool
        self._use(np.concatenate([pool, np.zeros(max(len(pool), POOL_WORDS), np.int64)]))

    def _use(self, pool: Array) -> None:
        self._versions = [
            versions._replace(derivation=versions.derivation._replace(pool=pool))
            for versions in self._versions
        ]

    def _compact(self) -> None:
        current = self._versions[0]
        pool = current.derivation.pool
        if len(self._spare) != len(pool):
            self._spare = np.zeros_like(pool)
        compact(
            self._wiring,
            self._old_units,
            self.layout.builder.store.arena,
            self._keeps_ends,
            current,
            self._spare,
        )
        self._use(self._spare)
        self._spare = pool
        while len(self._versions[0].derivation.pool) < 8 * current.derivation.counts[1]:
            self._grow()


def new_versions(layout: Layout, resources: int, pool: Array) -> Versions:
    """Return room for what the walk knows of one strategy; it is that of nothing."""
    operators, values = len(layout.configurations), len(layout.builder.store.value_classes)
    return Versions(
        derivation=new_derivation(layout, pool),
        ready_at=np.zeros(values, np.int64),
        ends_at=np.zeros(operators, np.int64),
        load_ns_R=np.zeros(resources, np.int64),
        alike_ns_2O=np.zeros((2, operators), np.int64),
        meets_2O=np.zeros((2, operators), np.int64),
    )
