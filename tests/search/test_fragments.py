"""Fragments are looked up by all that they depend on: equal keys have one fragment, other keys another one."""

import numpy as np
import pytest

from graph.strategy import Configuration
from search.cost.cost_table import CostTable
from search.simulate.task_graph import TaskGraphBuilder
from search.space.baselines import data_parallel
from tests.search.builders import MadeUpCosts, cluster, local_calls, random_anywhere, random_mesh, unrolled
from tests.search.test_delta import GRAPHS, TRAINING


@pytest.mark.parametrize("name", GRAPHS)
def test_equal_keys_have_one_fragment_and_other_keys_another_one(name: str) -> None:
    graph, rng = GRAPHS[name], np.random.default_rng(4)
    builder = TaskGraphBuilder(graph, cluster(), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls)
    layout, subjects = builder.layout(data_parallel(graph, 8)), builder.store.subjects
    starts: dict[tuple[object, ...], int] = {}
    for turn in range(60):
        drawn = (random_mesh if turn % 2 else random_anywhere)(graph, 8, rng).configurations
        changed: dict[int, Configuration] = {
            index: drawn[index] for index in rng.choice(len(drawn), 2).tolist()
        }
        undo = layout.change(changed)
        at_S = np.concatenate(layout.fragments)
        for subject, at in enumerate(at_S.tolist()):
            ports = subjects.port[subjects.port_ptr[subject] : subjects.port_ptr[subject + 1]].tolist()
            key = (int(subjects.class_S[subject]), *(layout.configurations[port] for port in ports))
            # Weights that are read differently may be held alike.
            key = key if subject < subjects.statics_at else ("static", at)
            assert starts.setdefault(key, at) == at
        if turn % 3 == 0:
            layout.undo(undo)
    assert len(set(starts.values())) == len(starts)
    assert builder.store.generation == 1


def test_what_an_undone_change_replaced_is_there_again() -> None:
    graph, rng = unrolled(), np.random.default_rng(5)
    builder = TaskGraphBuilder(graph, cluster(), CostTable(MadeUpCosts()), TRAINING, local_calls=local_calls)
    layout = builder.layout(data_parallel(graph, 8))
    layout.refresh()
    before, configurations = np.concatenate(layout.fragments), [*layout.configurations]
    undo = layout.change(dict(enumerate(random_anywhere(graph, 8, rng).configurations)))
    assert not np.array_equal(np.concatenate(layout.fragments), before)
    layout.undo(undo)
    assert np.array_equal(np.concatenate(layout.fragments), before)
    assert layout.configurations == configurations
