"""Writing of the fragments that are missing, where all that they are derived from is known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from search.kernels.cache import entry, inner, inner_with_arrays
from search.kernels.collective_list import CollectiveList, list_collectives
from search.kernels.fragment_table import WHOLE, FragmentKeys, FragmentLookup, FragmentSubjects
from search.kernels.fragments import OPERATOR_WORDS, TASK_WORDS, operator_header, tasks_of
from search.kernels.held import HeldTuple, hold
from search.kernels.records import Array, ExchangeLinks
from search.kernels.regions import write_value
from search.kernels.static_writing import write_static

# What is known of the costs of a call: as in a task's record, but for the device. Of every task, replicas apart, it
# stands there how far from there on the costs of its call are.
COST_WORDS = TASK_WORDS - 1
# Before the devices of a configuration stand their number and the replicas of each part.
DEVICES_BEHIND = 2
# How this writes a static tensor: not at all; who holds it alone; also the sums of its gradients.
ELSEWHERE, HOLDERS, SUMS = range(3)


class FragmentSources(NamedTuple):
    """What fragments are derived from, in words (`search.kernels.regions`) that are addressed by where they start."""

    words: Array
    common_K3: Array
    port: Array  # beside the ports of subjects: the number of an operand, from the first value on
    operands: int  # how many there are; the classes of operators are numbered behind them
    item_bytes: Array  # beside subjects, from the first value on
    form: (
        Array  # likewise: whether a value may be summed; of a static tensor `ELSEWHERE`, `HOLDERS` or `SUMS`
    )
    degrees_C: Array  # a configuration: the number of its degrees
    devices_at_C: Array
    # An operand, under given degrees: where its side is. A class of operators: where the costs of its tasks are, if
    # they are the same on all devices (`one_kind`) and without recomputation. Else -1.
    at_PD: Array
    one_kind: int
    links: ExchangeLinks
    # What is to be found out of `at_PD`: row, column, and an operator whose fragment goes by it. Of the table -2 stands
    # for what is listed here.
    unknown_N3: Array


class ValueSources(NamedTuple):
    """What fragments of one value are derived from, beside configurations; see `FragmentSources`."""

    words: Array
    common_K3: Array
    links: ExchangeLinks
    item_bytes: int
    summable: int


class FragmentWriting(NamedTuple):
    """The lookup with its missing fragments, the sources that they are derived from, and the arena for them."""

    lookup: FragmentLookup
    sources: FragmentSources
    arena: Array
    listed: CollectiveList  # the collectives of what is written, without their resource sets and durations
    state: (
        Array  # where the arena's fragments end; how many things are unknown; whether the arena is too short
    )


@entry
def hold_writing(writing: FragmentWriting) -> HeldTuple[FragmentWriting]:
    """Return a writing held."""
    return hold(writing)


@entry
def write_fragments(held: HeldTuple[FragmentWriting], count: int) -> int:
    """Write the missing fragments of which all is known; return how many are left, at the front.

    count: how many rows of `missing_N2` there are.
    """
    lookup, sources, arena, listed, state = held.value
    subjects, table, keys, missing = lookup
    left = 0
    for index in range(count):
        subject, number = missing[index, 0], missing[index, 1]
        at = table.at[number]
        if at < 0 and is_known(subjects, keys, sources, subject, state):
            at = state[0]
            words = write_fragment(arena, at, subjects, keys, sources, listed, subject)
            if words > 0:
                table.at[number] = at
                state[0] += words
            else:
                at = -1
                state[2] |= words < 0
        if at < 0:
            missing[left, 0], missing[left, 1] = subject, number
            left += 1
        else:
            keys.at_S[subject] = at
    return left


@entry
def write_values(
    arena: Array,
    sources: ValueSources,
    ports_NP: Array,
    listed: CollectiveList,
    at_N: Array,
    state: Array,
) -> None:
    """Write fragments of a value, each under other configurations, until the arena is too short or the list full.

    ports_NP: as `write_value` has them, of each. at_N: where each starts.
    state: where the arena's fragments end; how many stand, those before included; words that the arena must have, 0
    where the list is full or all stand.
    """
    state[2] = 0
    while state[1] < len(ports_NP):
        ports, at = ports_NP[state[1]], state[0]
        size = write_value(
            arena,
            at,
            sources.words,
            sources.common_K3,
            ports,
            sources.links,
            sources.item_bytes,
            sources.summable,
        )
        if size < 0:
            state[2] = at - size
            return
        if not list_collectives(arena, at, sources.words, ports[1], listed):
            return
        at_N[state[1]] = at
        state[0] = at + size
        state[1] += 1


@inner_with_arrays
def write_fragment(
    arena: Array,
    at: int,
    subjects: FragmentSubjects,
    keys: FragmentKeys,
    sources: FragmentSources,
    listed: CollectiveList,
    subject: int,
) -> int:
    """Write a fragment at `at`; return its words.

    Returns minus the words needed where the arena is too short, 0 where the list is full or it is written elsewhere.
    """
    if subject < subjects.values_at:
        return write_operator(arena, at, keys, sources, subjects, subject)
    ports, behind = ports_of(subjects, keys, sources, subject), subject - subjects.values_at
    item_bytes, form = sources.item_bytes[behind], sources.form[behind]
    if subject >= subjects.statics_at:
        return write_static(
            arena, at, sources.words, ports[0], ports[1], item_bytes, int(form == SUMS), listed
        )
    words = write_value(arena, at, sources.words, sources.common_K3, ports, sources.links, item_bytes, form)
    if words > 0 and not list_collectives(arena, at, sources.words, ports[1], listed):
        return 0
    return words


@inner
def is_known(
    subjects: FragmentSubjects, keys: FragmentKeys, sources: FragmentSources, subject: int, state: Array
) -> bool:
    """Return whether all is known that the fragment of a subject is derived from; list what is not and can be."""
    if subject >= subjects.statics_at and (
        keys.variant_S[subject] != 0 or sources.form[subject - subjects.values_at] == ELSEWHERE
    ):
        return False
    if subject < subjects.values_at:
        if keys.code_O[subject] != WHOLE:
            return True
        if keys.variant_S[subject] != 0 or sources.one_kind == 0:
            return False
        row = sources.operands + subjects.class_S[subject]
        return is_in_table(sources, row, sources.degrees_C[keys.configuration_O[subject]], subject, state)
    all_known = True
    for index in range(subjects.port_ptr[subject], subjects.port_ptr[subject + 1]):
        operator = subjects.port[index]
        row, degrees = (
            sources.port[index - subjects.values_at],
            sources.degrees_C[keys.configuration_O[operator]],
        )
        all_known = is_in_table(sources, row, degrees, operator, state) and all_known
    return all_known


@inner
def is_in_table(sources: FragmentSources, row: int, degrees: int, operator: int, state: Array) -> bool:
    """Return whether something of `FragmentSources.at_PD` is known; list it where it is not."""
    at_PD, unknown_N3 = sources.at_PD, sources.unknown_N3
    if at_PD[row, degrees] == -1:
        at_PD[row, degrees] = -2
        unknown_N3[state[1], 0], unknown_N3[state[1], 1], unknown_N3[state[1], 2] = row, degrees, operator
        state[1] += 1
    return bool(at_PD[row, degrees] >= 0)


@inner
def costs_at(subjects: FragmentSubjects, keys: FragmentKeys, sources: FragmentSources, operator: int) -> int:
    """Return where the costs of an operator's tasks are, or -1."""
    row = sources.operands + subjects.class_S[operator]
    return int(sources.at_PD[row, sources.degrees_C[keys.configuration_O[operator]]])


@inner
def write_operator(
    arena: Array,
    at: int,
    keys: FragmentKeys,
    sources: FragmentSources,
    subjects: FragmentSubjects,
    operator: int,
) -> int:
    """Write an operator fragment at `at`; return its words, or minus the words needed where the arena is too short.

    Tasks that take no time have the code of their operator for the origin of their costs.
    """
    words, devices_at = sources.words, sources.devices_at_C[keys.configuration_O[operator]]
    count, replicas = words[devices_at - DEVICES_BEHIND], words[devices_at - DEVICES_BEHIND + 1]
    size = OPERATOR_WORDS + TASK_WORDS * count
    if at + size > len(arena):
        return -int(size)
    code, costs = keys.code_O[operator], costs_at(subjects, keys, sources, operator)
    header = operator_header(arena, at)
    header.tasks, header.replicas = count, replicas
    tasks = tasks_of(arena, at)
    for number in range(count):
        task = tasks[number]
        task.device = words[devices_at + number]
        if code == WHOLE:
            row = costs + words[costs + number // replicas]
            task.forward_ns, task.backward_ns, task.kept_bytes = words[row], words[row + 1], words[row + 2]
            task.origin, task.recomputed_bytes = words[row + 3], words[row + 4]
            task.forward_launch_ns, task.backward_launch_ns = words[row + 5], words[row + 6]
        else:
            task.forward_ns = task.backward_ns = task.kept_bytes = task.recomputed_bytes = 0
            task.forward_launch_ns = task.backward_launch_ns = 0
            task.origin = code
    return int(size)


@inner_with_arrays
def ports_of(subjects: FragmentSubjects, keys: FragmentKeys, sources: FragmentSources, subject: int) -> Array:
    """Return, of a value's producer and of every reading, where its side and the devices of its tasks are."""
    first, last = subjects.port_ptr[subject], subjects.port_ptr[subject + 1]
    ports = np.empty(2 * (last - first), np.int64)
    for index in range(first, last):
        configuration = keys.configuration_O[subjects.port[index]]
        operand = sources.port[index - subjects.values_at]
        ports[2 * (index - first)] = sources.at_PD[operand, sources.degrees_C[configuration]]
        ports[2 * (index - first) + 1] = sources.devices_at_C[configuration]
    return ports
