"""Communication policies: which number each communication has in the order `priority`; the smallest goes first.

A policy is a function of a task graph, and of an oracle where it asks how long tasks take; it returns a number, 0 or
more, for each task (computations get 0).

`layer`, from P3: the position of the first operator that waits. Forwards of a step are numbered in the order in which
they run, then backwards in theirs, then forwards of what only renews buffers; then follow the forwards of the next
step, for what nothing in this step but an update waits for: sums of gradients, gathers of updated shares and renewed
buffers have the position of the first operator that reads the weights or buffers. So among sums of gradients those of
the first layers go first, as in P3, and what a forward or backward of this step waits for goes before all of them.
The number is a function of who waits for a task, found in one pass over all dependencies.

`tic` and `tac` are defined where receives are the roots of a worker's graph. Here every communication, collectives
and all, is a receive, on whatever link; it may wait for computations, and these for other communications. dep(v) are
all communications that a computation v waits for, directly or by way of other tasks. Nothing else changes: a number
says in which order communications are wanted, and a link chooses among those that are ready.

Sources: TicTac (Hashemi et al., SysML 2019); P3 (Jayarajan et al., SysML 2019).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graph.errors import UsageError

if TYPE_CHECKING:
    from search.kernels.priorities import Wiring
    from search.kernels.records import GraphArrays, Positions, Tasks
    from search.simulate.task_graph import TaskGraph

IntArray = np.ndarray[Any, np.dtype[Any]]

# Communications times dependencies, of which each product takes about 8 ns.
MOST_FOR_TAC = 10**9


def positions(wiring: GraphArrays) -> Positions:
    """Return where the work of each operator stands in a step."""
    from search.kernels.records import Positions

    count, trained = len(wiring.order), wiring.loss_operators
    position_O = np.empty(count, np.int64)
    position_O[wiring.order] = np.arange(count)
    # Backwards stand between the forwards that the loss depends on and those that only renew buffers.
    following = trained + count + position_O
    last = trained + 2 * count
    reads = [
        following[wiring.reading_operator[first:end]]
        for first, end in zip(wiring.reading_ptr[:-1], wiring.reading_ptr[1:], strict=True)
    ]
    return Positions(
        forward_O=np.where(position_O < trained, position_O, trained + position_O),
        backward_O=2 * trained - 1 - position_O,
        next_O=following,
        next_V=np.array([places.min(initial=last) for places in reads], np.int64),
        last=last,
    )


def layer(tasks: TaskGraph) -> IntArray:
    """Return the position of the first operator that waits for each communication.

    Source: P3, priority by the position of the layer in the forward pass; for communications within a step, ours.
    """
    from search.kernels.priority_order import number_by_position
    from search.simulate.arrays import graph_arrays

    priority_T, bucket_T = np.zeros(tasks.task_count, np.int64), np.zeros(tasks.task_count, np.int64)
    devices, in_step = len(tasks.topology.devices), positions(graph_arrays(tasks.graph))
    number_by_position(tasks.task_count, tasks.flat, devices, in_step, priority_T, bucket_T)
    return priority_T


def tic(tasks: TaskGraph) -> IntArray:
    """Return the rank of each communication by the timing-independent policy TIC.

    Every communication counts as 1, computations as nothing. M+ of one is the smallest number of communications that
    a computation after it waits for, of those that wait for more than one; where there is none, it is infinite. Ranks
    ascend with M+, of equals with the first task that waits for the communication itself; equal in both share a rank.

    A pass over all dependencies for every 62 communications.

    Source: TicTac (SysML 2019), TIC.
    """
    return tic_of(tasks.flat, tasks.task_count, len(tasks.topology.devices))


def tac(tasks: TaskGraph, run_ns_T: IntArray | None = None) -> IntArray:
    """Return the place of each communication in the order of the timing-aware policy TAC.

    run_ns_T: the oracle, how long each task takes; the graph's own durations unless others are given. Of the
    communications that are left, P of one is the time of the computations that wait for it alone, M+ the least time of
    all those that a computation waits for together with it. By Johnson's rule go first those whose own time M is not
    above P, the shortest first, then the others, the largest P first; of equals the smaller M+, then the first
    consumer, then the shorter, then the first task. (The comparison that the paper gives is not transitive on ties.)

    A few passes over all dependencies for each communication.

    Raises:
        UsageError: there are so many of both that it would take far more than ten seconds.

    Source: TicTac (SysML 2019), TAC; S. M. Johnson (1954) for the rule.
    """
    flat = tasks.flat if run_ns_T is None else tasks.flat._replace(run_ns=run_ns_T)
    return tac_of(flat, tasks.task_count, len(tasks.topology.devices))


def tic_of(flat: Tasks, count: int, devices: int) -> IntArray:
    """Return what `tic` does of the first `count` tasks of flat arrays."""
    from search.kernels.priorities import count_communications, least_together

    wiring = _wiring(flat, count, devices)
    count_T = count_communications(wiring)
    together_T = least_together(wiring, count_T, count_T)
    keys = np.stack([together_T, _first_consumers(flat, count)])[:, wiring.is_communication_T]
    _, ranks_C = np.unique(keys, axis=1, return_inverse=True)
    rank_T = np.zeros(count, np.int64)
    rank_T[wiring.is_communication_T] = ranks_C.reshape(-1)
    return rank_T


def tac_of(flat: Tasks, count: int, devices: int) -> IntArray:
    """Return what `tac` does of the first `count` tasks of flat arrays.

    Raises:
        UsageError: as `tac`.
    """
    from search.kernels.priorities import number_by_time

    wiring = _wiring(flat, count, devices)
    communications, dependencies = int(wiring.is_communication_T.sum()), int(flat.pred_ptr[count])
    if communications * dependencies > MOST_FOR_TAC:
        raise UsageError(
            f"order priority-tac: is for {communications:,} communications and {dependencies:,} dependencies, their "
            f"product must be at most {MOST_FOR_TAC:,}; choose priority or priority-tic"
        )
    consumers = _first_consumers(flat, count)
    return np.asarray(number_by_time(wiring, flat.run_ns[:count], consumers))


def _wiring(flat: Tasks, count: int, devices: int) -> Wiring:
    from search.kernels.priorities import Wiring

    return Wiring(flat.pred_ptr[: count + 1], flat.pred, np.asarray(flat.resource_set[:count] >= devices))


def _first_consumers(flat: Tasks, count: int) -> IntArray:
    """Return the first task that waits for each task itself, one beyond the last where none does."""
    consumer_T = np.full(count, count, np.int64)
    waiting_E = np.repeat(np.arange(count), np.diff(flat.pred_ptr[: count + 1]))
    np.minimum.at(consumer_T, flat.pred[: len(waiting_E)], waiting_E)
    return consumer_T
