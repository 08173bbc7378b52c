"""Look-up of fragments: where in the arena those of a strategy start, by integers.

A fragment is what an operator, a value, or a weight, buffer or input contributes to a task graph. It goes by its class,
a variant (what is kept of an operator's outputs, what is shared of a weight) and the numbers of the configurations of
some operators. Subjects are operators, then values, then static tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from search.kernels.cache import entry, inner, quick_entry
from search.kernels.held import HeldTuple, hold
from search.kernels.records import Array

# Instead of a code of `records`, of an operator that takes its time.
WHOLE = 1
# Instead of a class, of operators that take no time; their variant is their code.
NO_TIME = -1
# Instead of a variant, of a static tensor that nobody holds.
LEFT_OUT = -1


class FragmentSubjects(NamedTuple):
    """What a graph has fragments of."""

    class_S: Array
    port_ptr: Array  # S + 1, into port
    port: Array  # operators by whose configurations the fragment goes; of a value its producer first
    touched_ptr: Array  # O + 1, into touched
    touched: Array  # subjects whose fragments an operator's configuration changes, ascending
    values_at: int  # the first value
    statics_at: int  # the first static tensor


class FragmentTable(NamedTuple):
    """Where fragments start, by their keys: a hash table with linear probing."""

    slot: Array  # an entry or -1; a power of two, at least twice as many as entries
    key_ptr: Array  # an entry + 1, into key
    key: Array
    at: Array  # an entry: where its fragment starts, -1 until it is derived
    counts: Array  # 0 entries


class FragmentKeys(NamedTuple):
    """What the fragments of one strategy go by, and where they start."""

    configuration_O: Array  # an operator: the number of its configuration
    variant_S: Array
    code_O: Array  # an operator: `WHOLE`, or which of its tasks have a backward where it takes no time
    at_S: Array
    # Scratch of `list_touched`: zeros between its calls, and what it found.
    is_touched_S: Array
    touched_S: Array


class FragmentLookup(NamedTuple):
    """The table in which the fragments of a strategy are looked up, their keys, and subjects that have none yet."""

    subjects: FragmentSubjects
    table: FragmentTable
    keys: FragmentKeys
    missing_N2: Array  # a subject without a fragment, and its entry in the table; of equal ones each


@entry
def hold_lookup(lookup: FragmentLookup) -> HeldTuple[FragmentLookup]:
    """Return a lookup held."""
    return hold(lookup)


@entry
def find_touched(held: HeldTuple[FragmentLookup], operators: Array, limit: int) -> int:
    """Do `list_touched` in a held lookup, which takes counts of references: the loops there must not have them."""
    return list_touched(held.value, operators, limit)


@inner
def list_touched(lookup: FragmentLookup, operators: Array, limit: int) -> int:
    """Write the subjects below `limit` that some operators' configurations change, ascending; return how many."""
    subjects, _, keys, _ = lookup
    is_touched, touched = keys.is_touched_S, keys.touched_S
    first, last = limit, 0
    for operator in operators:
        for position in range(subjects.touched_ptr[operator], subjects.touched_ptr[operator + 1]):
            subject = subjects.touched[position]
            if subject < limit:
                is_touched[subject] = 1
                first, last = min(first, subject), max(last, subject + 1)
    count = 0
    for subject in range(first, last):
        if is_touched[subject]:
            is_touched[subject] = 0
            touched[count] = subject
            count += 1
    return count


@entry
def find_fragments(
    held: HeldTuple[FragmentLookup], chosen: Array, no_value_at: int, no_static_at: int
) -> int:
    """Do `look_up` in a held lookup, which takes counts of references: the loops there must not have them."""
    return look_up(held.value, chosen, no_value_at, no_static_at)


@inner
def look_up(lookup: FragmentLookup, chosen: Array, no_value_at: int, no_static_at: int) -> int:
    """Write where the fragments of chosen subjects start; return how many are still to be derived.

    no_value_at, no_static_at: the fragment of a value that goes nowhere, and of a static tensor that nobody holds.
    """
    subjects, table, keys, missing = lookup
    count = 0
    for subject in chosen:
        if subject >= subjects.values_at:
            producer = subjects.port[subjects.port_ptr[subject]] if subject < subjects.statics_at else -1
            if producer >= 0 and keys.code_O[producer] != WHOLE:
                keys.at_S[subject] = no_value_at
                continue
            if keys.variant_S[subject] == LEFT_OUT:
                keys.at_S[subject] = no_static_at
                continue
        slot = find_entry(table, write_key(subjects, table, keys, subject))
        keys.at_S[subject] = table.at[slot]
        if table.at[slot] < 0:
            missing[count, 0], missing[count, 1] = subject, slot
            count += 1
    return count


@inner
def write_key(subjects: FragmentSubjects, table: FragmentTable, keys: FragmentKeys, subject: int) -> int:
    """Write the key of a subject's fragment beyond those of the table; return its end."""
    end = table.key_ptr[table.counts[0]]
    table.key[end] = subjects.class_S[subject]
    table.key[end + 1] = keys.variant_S[subject]
    if subject < subjects.values_at and keys.code_O[subject] != WHOLE:
        table.key[end] = NO_TIME
        table.key[end + 1] = keys.code_O[subject]
    end += 2
    for position in range(subjects.port_ptr[subject], subjects.port_ptr[subject + 1]):
        table.key[end] = keys.configuration_O[subjects.port[position]]
        end += 1
    return int(end)


@inner
def find_entry(table: FragmentTable, end: int) -> int:
    """Return the entry of the key that was written beyond those of the table, a new one where there is none."""
    entries = table.counts[0]
    begin = table.key_ptr[entries]
    slot = first_slot(table, begin, end)
    while table.slot[slot] >= 0:
        entry = table.slot[slot]
        start = table.key_ptr[entry]
        same = table.key_ptr[entry + 1] - start == end - begin
        word = 0
        while same and word < end - begin:
            same = table.key[start + word] == table.key[begin + word]
            word += 1
        if same:
            return int(entry)
        slot = (slot + 1) % len(table.slot)
    table.slot[slot] = entries
    table.at[entries] = -1
    table.key_ptr[entries + 1] = end
    table.counts[0] = entries + 1
    return int(entries)


@inner
def first_slot(table: FragmentTable, begin: int, end: int) -> int:
    """Return the slot at which a key is looked for first."""
    code = 0
    for word in range(begin, end):
        # Below 2^51, so that it overflows without a compiler neither.
        code = (code * 1_000_003 + table.key[word] + 2) % 2_147_483_647
    return int(code % len(table.slot))


@quick_entry
def fill_slots(table: FragmentTable) -> None:
    """Write all entries into slots, of which there are others now."""
    table.slot[:] = -1
    for number in range(table.counts[0]):
        slot = first_slot(table, table.key_ptr[number], table.key_ptr[number + 1])
        while table.slot[slot] >= 0:
            slot = (slot + 1) % len(table.slot)
        table.slot[slot] = number
