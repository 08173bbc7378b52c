"""The compiled parts of `search.simulate.priorities`, for graphs of any size.

A task waits for tasks before it alone. Shape letters: T tasks, E dependencies, C communications.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from search.kernels.cache import entry, inner
from search.kernels.records import Array

NEVER = np.iinfo(np.int64).max


class Wiring(NamedTuple):
    """The predecessors of every task (`pred_ptr` into `pred`), and which tasks are communications."""

    pred_ptr: Array
    pred: Array
    is_communication_T: Array


class Waits(NamedTuple):
    """Of the communications that are left and that a task waits for: how many, their time, the sum of their numbers."""

    count_T: Array
    sum_ns_T: Array
    number_T: Array


@inner
def bits_in(word: int) -> int:
    """Return how many bits of a word are set."""
    count = 0
    while word != 0:
        word &= word - 1
        count += 1
    return count


@entry
def count_communications(wiring: Wiring) -> Array:
    """Return how many communications each task waits for, all in all. A pass for every 62 of them."""
    count = len(wiring.is_communication_T)
    count_T, bits_T = np.zeros(count, np.int64), np.zeros(count, np.int64)
    first = 0
    while first < count:
        bit = 0
        after = first
        bits_T[:] = 0
        for task in range(first, count):
            word = 0
            for index in range(wiring.pred_ptr[task], wiring.pred_ptr[task + 1]):
                word |= bits_T[wiring.pred[index]]
            count_T[task] += bits_in(word)
            if wiring.is_communication_T[task] and bit < 62:
                word |= 1 << bit
                bit += 1
                after = task + 1
            bits_T[task] = word
        if bit < 62:
            break
        first = after
    return count_T


@entry
def least_together(wiring: Wiring, count_T: Array, time_ns_T: Array) -> Array:
    """Return M+ of every communication: the least `time_ns_T` of computations after it that wait for several."""
    least_T = np.full(len(count_T), NEVER, np.int64)
    for task in range(len(count_T) - 1, -1, -1):
        least = least_T[task]
        if not wiring.is_communication_T[task] and count_T[task] > 1:
            least = min(least, time_ns_T[task])
        for index in range(wiring.pred_ptr[task], wiring.pred_ptr[task + 1]):
            least_T[wiring.pred[index]] = min(least_T[wiring.pred[index]], least)
    return least_T


@inner
def add_to_waits(
    communication: int, sign: int, wiring: Wiring, run_ns_T: Array, mark_T: Array, waits: Waits
) -> None:
    """Add a communication (sign 1) to the waits of all tasks after it, or take it away (-1)."""
    mark_T[communication] = communication
    for task in range(communication + 1, len(mark_T)):
        for index in range(wiring.pred_ptr[task], wiring.pred_ptr[task + 1]):
            if mark_T[wiring.pred[index]] == communication:
                mark_T[task] = communication
                waits.count_T[task] += sign
                waits.sum_ns_T[task] += sign * run_ns_T[communication]
                waits.number_T[task] += sign * communication
                break


@inner
def comes_before(
    communication: int,
    other: int,
    run_ns_T: Array,
    alone_ns_T: Array,
    together_ns_T: Array,
    consumer_T: Array,
) -> bool:
    """Return whether TAC sends a communication before another: by Johnson's rule, then M+, consumer, time, number."""
    late, other_late = (
        run_ns_T[communication] > alone_ns_T[communication],
        run_ns_T[other] > alone_ns_T[other],
    )
    if late != other_late:
        return bool(other_late)
    by_rule = (
        alone_ns_T[other] - alone_ns_T[communication] if late else run_ns_T[communication] - run_ns_T[other]
    )
    if by_rule != 0:
        return bool(by_rule < 0)
    if together_ns_T[communication] != together_ns_T[other]:
        return bool(together_ns_T[communication] < together_ns_T[other])
    if consumer_T[communication] != consumer_T[other]:
        return bool(consumer_T[communication] < consumer_T[other])
    if run_ns_T[communication] != run_ns_T[other]:
        return bool(run_ns_T[communication] < run_ns_T[other])
    return communication < other


@entry
def number_by_time(wiring: Wiring, run_ns_T: Array, consumer_T: Array) -> Array:
    """Return the place of every communication in the order of TAC; 0 of computations.

    A few passes over all dependencies for each communication.
    """
    count = len(run_ns_T)
    number_T = np.zeros(count, np.int64)
    left_C: Array = np.flatnonzero(wiring.is_communication_T)
    mark_T = np.full(count, -1, np.int64)
    waits = Waits(np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64))
    for communication in left_C:
        add_to_waits(communication, 1, wiring, run_ns_T, mark_T, waits)
    mark_T[:] = -1
    alone_ns_T = np.zeros(count, np.int64)
    for number in range(len(left_C)):
        together_ns_T = least_together(wiring, waits.count_T, waits.sum_ns_T)
        alone_ns_T[:] = 0
        for task in range(count):
            if not wiring.is_communication_T[task] and waits.count_T[task] == 1:
                alone_ns_T[waits.number_T[task]] += run_ns_T[task]
        best = number
        for index in range(number + 1, len(left_C)):
            if comes_before(left_C[index], left_C[best], run_ns_T, alone_ns_T, together_ns_T, consumer_T):
                best = index
        communication = left_C[best]
        left_C[best] = left_C[number]
        number_T[communication] = number
        add_to_waits(communication, -1, wiring, run_ns_T, mark_T, waits)
    return number_T
