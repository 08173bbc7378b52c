"""File locks between processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from graph import locks

WAIT_S = 60.0
pytest.importorskip("fcntl")


def hold(lock: Callable[[Path], AbstractContextManager[None]], path: Path, connection: Connection) -> None:
    """Hold a lock until told to release it."""
    with lock(path):
        connection.send("held")
        connection.recv()


@contextmanager
def held(
    lock: Callable[[Path], AbstractContextManager[None]], path: Path
) -> Iterator[multiprocessing.process.BaseProcess]:
    """Have another process hold a lock."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(lock, path, there))
    process.start()
    assert here.poll(WAIT_S)
    assert here.recv() == "held"
    yield process
    here.send("release")
    process.join(WAIT_S)


def is_free(path: Path) -> bool:
    try:
        with locks.exclusive(path, timeout_s=0):
            return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("lock", [locks.exclusive, locks.shared])
def test_nobody_else_has_an_exclusive_lock(
    lock: Callable[[Path], AbstractContextManager[None]], tmp_path: Path
) -> None:
    path = tmp_path / "lock"
    with held(lock, path):
        assert not is_free(path)
    assert is_free(path)
    with held(lock, path) as process:
        process.kill()
        process.join(WAIT_S)
        assert is_free(path)


def test_a_lock_is_shared_by_several_and_each_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locks.shared(path):
        with held(locks.shared, path):
            pass
        assert not is_free(path)
    assert is_free(path)


@pytest.mark.parametrize("lock", [locks.exclusive, locks.shared])
def test_a_link_is_not_followed_and_a_file_stays_as_it_is(
    lock: Callable[[Path], AbstractContextManager[None]], tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), lock(tmp_path / "link"):
        pass
    with lock(precious):
        pass
    assert precious.read_text() == "precious"
