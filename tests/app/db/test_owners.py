"""Whether the process of a running search or execution lives."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa

from app.db import models, owners
from app.db.owners import LEASE_S, Heartbeat, is_dead, this_process
from app.db.records import SearchOutcome
from app.db.store import Store
from graph.canonical import canonical_json
from graph.errors import UsageError
from tests.app.db import samples
from tests.app.db.samples import Scene

NOW = samples.moment(0)
PRINT = "from app.db.owners import this_process; print(this_process(), flush=True); input()"


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process, and the owner that its rows name."""
    with subprocess.Popen(
        [sys.executable, "-c", PRINT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def changed(**facts: object) -> str:
    return canonical_json({**json.loads(this_process()), **facts})


def test_a_process_is_dead_when_it_was_killed(other: tuple[subprocess.Popen[str], str]) -> None:
    process, owner = other
    assert not is_dead(owner, None, NOW)
    process.kill()
    # Also while its parent has not asked how it ended.
    while not is_dead(owner, None, NOW):
        pass
    process.wait()
    assert is_dead(owner, NOW, NOW)


def test_a_number_that_is_used_again_is_another_process() -> None:
    assert not is_dead(this_process(), None, NOW)
    assert is_dead(changed(started="1"), NOW, NOW)


@pytest.mark.parametrize("fact", ["host", "boot", "processes"])
def test_elsewhere_the_lease_decides(fact: str) -> None:
    """On another machine, before this one's last start, in another container."""
    elsewhere = changed(**{fact: "another"})
    assert not is_dead(elsewhere, NOW - timedelta(seconds=LEASE_S - 1), NOW)
    assert is_dead(elsewhere, NOW - timedelta(seconds=LEASE_S + 1), NOW)
    assert is_dead(elsewhere, None, NOW)


@pytest.mark.parametrize("owner", [None, "", "[]", "{}", "no JSON", '{"pid":"x"}'])
def test_what_belongs_to_nobody_is_dead(owner: str | None) -> None:
    assert is_dead(owner, NOW, NOW)


def test_a_heart_beats_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "HEARTBEAT_S", 0.001)
    beats = threading.Semaphore(0)
    heart = Heartbeat(lambda: beats.release())
    for _ in range(2):
        heart.start()
        heart.start()
        assert beats.acquire(timeout=60)
        heart.stop()
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_running_rows_say_that_they_live(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "HEARTBEAT_S", 0.01)
    scene = Scene.stored(store)
    search = store.start_search(scene.search())
    execution = store.start_execution(
        scene.execution(store.put_strategy(samples.strategy(scene.graph_id, 0)))
    )
    first = store.search(search).alive_at, store.execution(execution).alive_at
    while (store.search(search).alive_at, store.execution(execution).alive_at) == first:
        pass
    store.finish_execution(execution, [1.0])
    store.halt_search(search, "interrupted")
    last = store.search(search).alive_at
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    assert store.search(search).alive_at == last


def test_orphans_are_interrupted_and_others_left_alone(store: Store) -> None:
    scene = Scene.stored(store)
    strategy = store.put_strategy(samples.strategy(scene.graph_id, 0))
    living, orphan, ended = (store.start_search(scene.search()) for _ in range(3))
    store.finish_search(ended, "finished", SearchOutcome(9, 3, 2.0, 1.0))
    running, lost = (store.start_execution(scene.execution(strategy)) for _ in range(2))
    assert store.end_orphans() == []
    with store.write() as connection:
        for table, number in ((models.searches, orphan), (models.searches, ended), (models.executions, lost)):
            connection.execute(
                sa.update(table).where(table.c.id == number).values(owner=changed(started="1"))
            )
    assert store.end_orphans() == [orphan]
    assert [store.search(number).status for number in (living, orphan, ended)] == [
        "running",
        "interrupted",
        "finished",
    ]
    assert [store.execution(number).status for number in (running, lost)] == ["running", "interrupted"]
    assert store.execution(lost).finished_at is not None


def test_only_what_was_stopped_is_resumed(store: Store) -> None:
    scene = Scene.stored(store)
    search = store.start_search(scene.search())
    with pytest.raises(UsageError, match=r"is running, must be interrupted or failed to be resumed; wait"):
        store.resume_search(search)
    store.halt_search(search, "interrupted")
    assert store.resume_search(search).status == "interrupted"
    with pytest.raises(UsageError, match="is running"):
        store.resume_search(search)
    store.finish_search(search, "finished", SearchOutcome(9, 3, 2.0, 1.0))
    with pytest.raises(UsageError, match=r"is finished, .*; start a new one"):
        store.resume_search(search)
