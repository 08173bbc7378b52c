"""The cost of a proposal from what it changes, in program order; exactly what a full simulation gives.

Of the current strategy is kept what its operators and values contribute. A proposal is derived where it differs,
simulated without writing a task graph, and given up as soon as some resource, with what it still has to do, is sure to
exceed the bound. Most of what is far too slow is given up before it is derived (`search.evaluate.optimistic_bound`).

Source: FlexFlow (arXiv:1807.05358) section 5.3 for the idea; bounds and derivations by what differs are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from graph.strategy import Configuration
from search.evaluate.optimistic_bound import OptimisticBound
from search.kernels.held import LatestHeld
from search.kernels.incremental import compact, evaluate_program_order, hold_proposal
from search.kernels.records import Array, Fragments, ProposalArrays, Step, StepTimes, Workload
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

POOL_WORDS = 1 << 12


@dataclass(frozen=True, slots=True)
class Mechanisms:
    """Mechanisms that save time; results are the same without. Turned off to measure the worth of each.

    bound: where it is sure to be exceeded, the simulation stops. optimistic_bound: part of a proposal is tried first.
    folding: what all devices do alike is served together.
    """

    bound: bool = True
    optimistic_bound: bool = True
    folding: bool = True


class IncrementalEvaluation:
    """Program order, derived where something changes, and simulated up to the bound."""

    def __init__(self, layout: Layout, mechanisms: Mechanisms = Mechanisms()) -> None:
        self.layout = layout
        self._mechanisms = mechanisms
        builder = layout.builder
        self._optimistic_bound = OptimisticBound(layout)
        # Of the current strategy, and of the proposal.
        self._workloads = [new_workload(layout, np.zeros(0, np.int64)) for _ in range(2)]
        self._times = new_times(layout, 0, 64)
        self._buckets = new_buckets(64, 256, 0)
        self._gathers = new_gathers(layout, 64)
        self._old_fragments = Fragments(*(array.copy() for array in layout.fragments))
        self._generation = -1
        self._machines = builder.machines
        self._arrays = LatestHeld(hold_proposal)
        self._current = self._proposed = Outcome(0, 0)
        self._undo: Undo | None = None

    @property
    def configurations(self) -> list[Configuration]:
        """The configurations of the layout."""
        return self.layout.configurations

    def current(self) -> Outcome:
        """Return the cost of the layout's strategy."""
        self._renew()
        return self._current

    def propose(self, changed: Mapping[int, Configuration], bound_ns: int) -> Outcome | None:
        """Change some operators; return the cost of that, or None where the makespan exceeds the bound.

        Raises:
            CostError: a local call has no cost.
        """
        self._renew()
        tries = bound_ns < NEVER_NS and self._mechanisms.optimistic_bound
        part = self._optimistic_bound.replace(changed) if tries else None
        if part is not None:
            self._undo = part
            exceeds = self._evaluate(bound_ns) is None
            self._optimistic_bound.decided(exceeds=exceeds)
            if exceeds:
                return None
            self.layout.undo(part)
        self._undo = self.layout.replace(changed)
        return self._evaluate(bound_ns)

    def commit(self) -> None:
        """Keep the proposal: the strategy is that from now on."""
        self._current = self._proposed
        self._workloads.reverse()
        for old, fragments in zip(self._old_fragments, self.layout.fragments, strict=True):
            old[:] = fragments
        derivation = self._workloads[0].derivation
        if 2 * derivation.counts[1] > len(derivation.pool):
            self._compact()

    def roll_back(self) -> None:
        """Take the proposal back."""
        if self._undo is not None:
            self.layout.undo(self._undo)

    def _renew(self) -> None:
        """Derive all of the current strategy where the fragments of the store are others now."""
        store = self.layout.builder.store
        store.make_room()
        if store.generation == self._generation:
            return
        self.layout.refresh()
        # All of it differs from nothing.
        pool = self._workloads[0].derivation.pool
        self._workloads = [new_workload(self.layout, pool) for _ in range(2)]
        for old in self._old_fragments:
            old[:] = -1
        self._evaluate(NEVER_NS)
        self.commit()
        self._generation = store.generation

    def _evaluate(self, bound_ns: int) -> Outcome | None:
        builder, layout = self.layout.builder, self.layout
        store = builder.store
        folds = self._mechanisms.folding and not builder.has_hosts
        resource_sets = store.resource_sets.arrays()
        self._buckets = buckets_for(resource_sets, self._buckets)
        while True:
            step = Step(
                store.wiring,
                layout.fragments,
                store.arena,
                store.exchange_links,
                resource_sets,
                layout.groups,
                self._buckets,
                self._gathers,
            )
            old, new = self._workloads
            arrays = ProposalArrays(self._old_fragments, step, old, new, self._machines, self._times)
            makespan_ns, excess_bytes = evaluate_program_order(
                self._arrays.of(arrays), int(folds), bound_ns if self._mechanisms.bound else NEVER_NS
            )
            if makespan_ns == -2:
                self._grow()
            elif makespan_ns == -3:
                self._buckets = more_buckets(self._buckets)
                close_B = np.zeros(len(self._buckets.resource_set), np.int64)
                self._times = self._times._replace(close_B=close_B)
            elif makespan_ns == -4:
                self._gathers = new_gathers(layout, 2 * len(self._gathers.resource_set))
            else:
                break
        if not 0 <= makespan_ns <= bound_ns:
            return None
        self._proposed = Outcome(excess_bytes, makespan_ns)
        return self._proposed

    def _grow(self) -> None:
        """Make the pool twice as long."""
        pool = self._workloads[0].derivation.pool
        self._use(np.concatenate([pool, np.zeros(max(len(pool), POOL_WORDS), np.int64)]))

    def _use(self, pool: Array) -> None:
        self._workloads = [
            work._replace(derivation=work.derivation._replace(pool=pool)) for work in self._workloads
        ]
        if len(self._times.forward_ns) != len(pool):
            self._times = new_times(self.layout, len(pool), len(self._buckets.resource_set))

    def _compact(self) -> None:
        """Leave in the pool what the current strategy has there."""
        derivation, store = self._workloads[0].derivation, self.layout.builder.store
        target = np.zeros_like(derivation.pool)
        compact(store.wiring, self._old_fragments, store.arena, derivation, target)
        self._use(target)
        while len(self._workloads[0].derivation.pool) < 8 * derivation.counts[1]:
            self._grow()


def new_workload(layout: Layout, pool: Array) -> Workload:
    """Return room for the workload of a strategy; it is that of nothing."""
    operators, topology = len(layout.configurations), layout.builder.topology
    return Workload(
        derivation=new_derivation(layout, pool),
        load_ns_R=np.zeros(len(topology.devices) + len(topology.links), np.int64),
        uniform_ns_2O=np.zeros((2, operators), np.int64),
        exchange_2O=np.zeros((2, operators), np.int64),
    )


def new_times(layout: Layout, words: int, buckets: int) -> StepTimes:
    """Return room for the times of a step, beside a pool of so many words, with so many buckets."""
    operators, devices = len(layout.configurations), len(layout.builder.topology.devices)
    return StepTimes(
        forward_ns=np.zeros(words, np.int64),
        backward_ns=np.zeros(words, np.int64),
        sync_end_D=np.zeros(devices, np.int64),
        member_D=np.zeros(devices, np.int64),
        gradients_ns_O=np.zeros(operators, np.int64),
        gradient_ns_V=np.zeros(layout.builder.store.wiring.value_count, np.int64),
        end_ns_O=np.zeros(operators, np.int64),
        is_awaited_O=np.zeros(operators, np.int64),
        close_B=np.zeros(buckets, np.int64),
    )
