"""The lower bound is the same wherever it is found, and nobody is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from app.db.store import Store
from app.services.models.models import ModelRequest, import_graph
from app.services.predict.predict import Setting, find_target, prepare
from app.services.progress import Progress
from app.services.search.lower_bound import LowerBoundTask
from graph.training import Training
from search.parallel import fork

pytestmark = pytest.mark.skipif(not fork.can_fork(), reason="processes are copied on Linux alone")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Setting]]:
    model = import_graph(ModelRequest(name="mlp", preset="small"), batch_norm="local")
    training = Training(model.batch_size, "float32", "sgd")
    with Store.open(tmp_path_factory.mktemp("bounding") / "x.sqlite") as store:
        target = find_target(store, "hgx-h100", Progress(), devices=4)
        with prepare(store, model, target, training, "estimate", Progress()) as setting:
            yield store, setting


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("shared", [False, True])
def test_a_process_beside_finds_the_same(opened: tuple[Store, Setting], shared: bool) -> None:  # noqa: FBT001
    before = children()
    here = LowerBoundTask(*opened).bound((), Progress(), shared=shared)
    with closing(LowerBoundTask(*opened)) as beside:
        beside.begin(shared=False)
        assert beside.bound((), Progress(), shared=shared) == here
    assert here.time_ns > 0
    assert children() == before


def test_a_process_that_somebody_ends_is_not_needed(opened: tuple[Store, Setting]) -> None:
    before = children()
    with closing(LowerBoundTask(*opened)) as beside:
        beside.begin(shared=False)
        (child,) = children() - before
        os.kill(child, signal.SIGKILL)
        found = beside.bound((), Progress(), shared=False)
    assert found == LowerBoundTask(*opened).bound((), Progress(), shared=False)


def test_an_end_before_the_bound_leaves_nobody_behind(opened: tuple[Store, Setting]) -> None:
    before = children()
    with closing(LowerBoundTask(*opened)) as beside:
        beside.begin(shared=False)
        assert len(children() - before) == 1
    assert children() == before
