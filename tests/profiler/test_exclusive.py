"""One measurement at a time uses a device, whichever processes measure."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from graph.errors import UsageError
from profiler.devices import PhysicalDevice, cpu_devices
from profiler.exclusive import held

pytest.importorskip("fcntl")


def use(connection: Connection, devices: list[PhysicalDevice], log: str, times: int) -> None:
    """Write down when the devices are taken and given back, so often."""
    connection.send("ready")
    connection.recv()
    for _ in range(times):
        with held(devices), open(log, "a", encoding="ascii") as file:
            file.write(f"{os.getpid()} takes\n")
            file.flush()
            time.sleep(0.01)
            file.write(f"{os.getpid()} gives\n")


def started(
    devices: list[PhysicalDevice], log: Path, times: int
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=use, args=(there, devices, str(log), times), daemon=True)
    process.start()
    return process, here


def test_processes_take_turns_and_a_killed_one_keeps_nobody_waiting(tmp_path: Path) -> None:
    one, two = cpu_devices(2)
    log = tmp_path / "log"
    log.touch()
    # In opposite orders, in which two that take one lock after the other would wait for each other.
    users = [started([one, two], log, 10), started([two, one], log, 10), started([one], log, 10**6)]
    for _, connection in users:
        assert connection.recv() == "ready"
    for _, connection in users:
        connection.send("go")
    while len(log.read_text().splitlines()) < 12:
        time.sleep(0.01)
    endless = users[2][0]
    assert endless.pid is not None
    os.kill(endless.pid, signal.SIGKILL)
    for process, _ in users[:2]:
        process.join(60)
        assert process.exitcode == 0
    events = [line.split() for line in log.read_text().splitlines()]
    turns: dict[str, int] = {}
    holder: str | None = None
    for process_id, what in events:
        if what == "takes":
            # Nobody holds it but who was killed with it.
            assert holder in (None, str(endless.pid))
            holder = process_id
        else:
            assert holder == process_id
            holder = None
        turns[process_id] = turns.get(process_id, 0) + 1
    assert [turns[str(process.pid)] for process, _ in users[:2]] == [20, 20]


def test_other_devices_are_not_waited_for() -> None:
    one, two = cpu_devices(2)
    if one.core == two.core:
        pytest.skip("one core stands for both")
    with held([one]), held([two]):
        pass


def test_locks_are_never_written_through_what_others_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody may write to the folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / f"soapstone-devices-{os.getuid()}"
    folder.mkdir()
    devices = cpu_devices(1)
    (folder / f"core-{devices[0].core}").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"), held(devices):
        pass
    shutil.rmtree(folder)
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is somebody else's, must be yours"), held(devices):
        pass
    assert precious.read_text() == "precious"
    assert list((tmp_path / "elsewhere").iterdir()) == []
