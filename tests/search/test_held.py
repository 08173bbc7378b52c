"""Tuples that kernels get by a pointer: the same arrays as Python's, held anew where any of them is another one."""

import gc

import numpy as np

from search.cost.cost_table import CostTable
from search.kernels.fragment_table import FragmentKeys, FragmentLookup, find_touched, hold_lookup
from search.kernels.held import HeldTuple, LatestHeld, hold
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import data_parallel
from tests.search.builders import MadeUpCosts, cluster, local_calls, unrolled
from tests.search.test_delta import TRAINING


def lookup_of_a_graph() -> FragmentLookup:
    graph = unrolled()
    builder = TaskGraphBuilder(graph, cluster(), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls)
    layout = builder.layout(data_parallel(graph, 8))
    layout.refresh()
    return builder.store._lookup(layout._chosen)


def test_a_tuple_is_held_anew_where_an_array_in_it_is_another_one() -> None:
    held: list[FragmentLookup] = []

    def holding(lookup: FragmentLookup) -> HeldTuple[FragmentLookup]:
        held.append(lookup)
        return hold(lookup)

    latest, lookup = LatestHeld(holding), lookup_of_a_graph()
    first = latest.of(lookup)
    assert first.value is lookup
    # Other tuples of the same arrays.
    assert latest.of(lookup._replace(keys=FragmentKeys(*lookup.keys))) is first
    lookup.keys.at_S[0] += 1
    assert latest.of(lookup) is first
    for other in (
        lookup._replace(missing_N2=lookup.missing_N2.copy()),
        lookup._replace(keys=lookup.keys._replace(at_S=lookup.keys.at_S.copy())),
        lookup,
    ):
        assert latest.of(other).value is other
    assert [one is lookup for one in held] == [True, False, False, True]


def test_a_kernel_reads_and_writes_the_arrays_that_python_has() -> None:
    lookup = lookup_of_a_graph()
    held, subjects, keys = hold_lookup(lookup), lookup.subjects, lookup.keys
    limit = len(keys.at_S)
    for operators in ([0], [1, 3], list(range(len(subjects.touched_ptr) - 1))):
        expected = sorted(
            {
                int(subject)
                for operator in operators
                for subject in subjects.touched[
                    subjects.touched_ptr[operator] : subjects.touched_ptr[operator + 1]
                ]
            }
        )
        for below in (limit, subjects.statics_at):
            count = find_touched(held, np.array(operators), below)
            assert keys.touched_S[:count].tolist() == [subject for subject in expected if subject < below]
            assert not keys.is_touched_S.any()
    # Python's change of an array is the kernel's as well.
    subjects.touched[: subjects.touched_ptr[1]] = 0
    assert find_touched(held, np.array([0]), limit) == 1


def test_held_arrays_live_as_long_as_the_held_tuple() -> None:
    lookup = lookup_of_a_graph()
    keys, touched = lookup.keys, lookup.subjects.touched.copy()
    held = hold_lookup(lookup._replace(subjects=lookup.subjects._replace(touched=touched.copy())))
    limit, first = len(keys.at_S), touched[: lookup.subjects.touched_ptr[1]].tolist()
    del lookup
    gc.collect()
    # What lay there, if it was freed, would be this.
    others = [np.zeros_like(touched) for _ in range(50)]
    assert keys.touched_S[: find_touched(held, np.array([0]), limit)].tolist() == first
    assert len(others) == 50
