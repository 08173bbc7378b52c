"""Collectives of fragments that were just written: their devices, for whom there is no resource set and no price yet.

Resource sets are numbered and priced in Python (`search.simulate.arrays.ResourceSetStore`), all of a list together.
"""

from __future__ import annotations

from typing import NamedTuple

from search.kernels.cache import inner
from search.kernels.fragments import (
    COLLECTIVE,
    COLLECTIVE_WORDS,
    assemblies_of,
    collectives_of,
    served_assemblies_of,
    served_sources_of,
    value_header,
    word_of,
)
from search.kernels.records import Array

RESOURCE_SET_WORD, RUN_NS_WORD = word_of(COLLECTIVE, "resource_set"), word_of(COLLECTIVE, "run_ns")
BACK_RESOURCE_SET_WORD = word_of(COLLECTIVE, "back_resource_set")
BACK_NS_WORD = word_of(COLLECTIVE, "back_ns")
# The columns of `CollectiveList.row_K7`: where in the arena the number of its resource set and its nanoseconds are to
# be written (-1: nowhere), its kind, its root or -1, its first member and one beyond the last, the bytes to price.
NUMBER_AT, RUN_NS_AT, KIND, ROOT, FIRST_MEMBER, LAST_MEMBER, PRICED_BYTES = range(7)


class CollectiveList(NamedTuple):
    """Collectives in the order in which they were listed."""

    row_K7: Array
    member: Array  # the devices of each, ascending
    counts: Array  # 0 collectives, 1 members
    backward_kind: Array  # of a kind, by its code, the code of its backward
    is_member_D: Array  # scratch: zeros before and after


@inner
def append_collective(
    listed: CollectiveList,
    number_at: int,
    run_ns_at: int,
    kind: int,
    root: int,
    first: int,
    priced_bytes: int,
) -> None:
    """Append a collective of the members from `first` on."""
    number = listed.counts[0]
    row_K7 = listed.row_K7
    row_K7[number, NUMBER_AT], row_K7[number, RUN_NS_AT] = number_at, run_ns_at
    row_K7[number, KIND], row_K7[number, ROOT] = kind, root
    row_K7[number, FIRST_MEMBER], row_K7[number, LAST_MEMBER] = first, listed.counts[1]
    row_K7[number, PRICED_BYTES] = priced_bytes
    listed.counts[0] = number + 1


@inner
def append_members(listed: CollectiveList) -> int:
    """Append the devices that are marked as members, and unmark them; return where they begin."""
    first = end = listed.counts[1]
    for device in range(len(listed.is_member_D)):
        if listed.is_member_D[device]:
            listed.is_member_D[device] = 0
            listed.member[end] = device
            end += 1
    listed.counts[1] = end
    return int(first)


@inner
def has_room(listed: CollectiveList, collectives: int, members: int) -> bool:
    """Return whether so many collectives and members may be appended."""
    return bool(
        listed.counts[0] + collectives <= len(listed.row_K7)
        and listed.counts[1] + members <= len(listed.member)
    )


@inner
def list_collectives(arena: Array, at: int, words: Array, devices_at: int, listed: CollectiveList) -> bool:
    """Append the collectives of a value fragment, forward and back; return False, and nothing, where room lacks.

    devices_at: where, among the words, the devices of the tasks that make the value are.
    """
    value = value_header(arena, at)
    if value.collectives == 0:
        return True
    # Within one reading no device is in two of them.
    if not has_room(listed, 2 * value.collectives, value.readings * len(listed.is_member_D)):
        return False
    assemblies, collectives = assemblies_of(arena, at), collectives_of(arena, at)
    served, sources = served_assemblies_of(arena, at), served_sources_of(arena, at)
    for number in range(len(collectives) - 1):
        collective, following = collectives[number], collectives[number + 1]
        for index in range(collective.first_assembly, following.first_assembly):
            listed.is_member_D[assemblies[served[index]].device] = 1
        for index in range(collective.first_source, following.first_source):
            listed.is_member_D[words[devices_at + sources[index]]] = 1
        first = append_members(listed)
        start = at + value.collectives_at + COLLECTIVE_WORDS * number
        kind, root, priced_bytes = collective.kind, collective.root, collective.priced_bytes
        append_collective(
            listed, start + RESOURCE_SET_WORD, start + RUN_NS_WORD, kind, root, first, priced_bytes
        )
        append_collective(
            listed, start + BACK_RESOURCE_SET_WORD, start + BACK_NS_WORD, listed.backward_kind[kind], root,
            first, priced_bytes,
        )  # fmt: skip
    return True
