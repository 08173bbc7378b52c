"""What goes wrong while costs are measured: each fault costs what it must and no more, and the next run goes on.

Real processes, real deaths, a real full disk. See also `test_killed` (a run killed at any moment),
`db.test_concurrency` (many writers) and `tests.profiler.test_workers` (deaths of workers).
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.db.records import OpCostRecord
from app.db.store import Store
from app.services.costs.machine import describe
from app.services.costs.operator_costs import cost_key_record
from app.services.costs.profile import Measurer, missing_calls
from app.services.progress import Progress
from profiler.devices import cpu_devices
from profiler.measure import phases
from profiler.updates import update_call
from tests.app.conftest import Command
from tests.app.db.backends import database_url, postgres_host
from tests.profiler.examples import long_matrix_product, matrix_product

__all__ = ["database_url", "postgres_host"]

WAIT_S = 200.0
PROFILE = ("profile", "--model", "mlp", "--preset", "small", "--device", "cpu")
# Larger: there is time to do something to it.
LONGER = ("profile", "--model", "inception", "--preset", "small", "--device", "cpu", "--devices", "1")


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start `app` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "app", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_whole(database: Path) -> None:
    """Fail unless SQLite finds nothing wrong."""
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()


def count(database: Path, condition: str = "1") -> int:
    """Return how many operator costs are stored."""
    with sqlite3.connect(database) as connection:
        found: int = connection.execute(f"SELECT count(*) FROM op_costs WHERE {condition}").fetchone()[0]
    connection.close()
    return found


def wait_for_costs(database: Path, least: int, run: subprocess.Popen[str]) -> None:
    """Wait until a run has stored some costs."""
    deadline = time.monotonic() + WAIT_S
    while count(database) < least:
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- calls that hang or want too much


def test_a_call_that_hangs_or_wants_too_much_memory_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "faults.sqlite"
    hanging, huge = long_matrix_product(), matrix_product(2**24, 8, 2**24)
    others = [update_call("sgd", size) for size in (100, 200, 300)]
    calls = [others[0], hanging, others[1], huge, others[2]]
    with Store.open(path) as store:
        (group,) = describe(store, cpu_devices(1)).groups
        with Measurer(store, group, Progress(), call_limit_s=3.0) as measurer:
            measured = measurer.measure(calls)
        assert measured.succeeded == len(others)
        reasons = [reason for _, reason in measured.failures]
        assert reasons[0] == "took longer than its limit of 3 s, so its worker was ended"
        assert reasons[1].startswith("inputs and outputs take 1,048,577 GiB, the machine has ")
        stored = store.op_costs(group.kind_id, group.environment_id)
        assert {cost.failure for cost in stored.values()} == {None, *reasons}
        # The next run goes on where this one was, and tries again what failed where that is wanted.
        assert missing_calls(store, group, calls) == []
        assert missing_calls(store, group, calls, retry_failed=True) == [hanging, huge]
        with Measurer(store, group, Progress(), retry_failed=True) as measurer:
            again = measurer.measure([huge, *others])
        assert (again.succeeded, [reason for _, reason in again.failures]) == (0, reasons[1:])
    check_whole(path)


def test_measuring_again_replaces_costs_and_takes_none_away(tmp_path: Path) -> None:
    hanging, *others = [long_matrix_product(), update_call("sgd", 100), matrix_product(256, 256, 256)]
    with Store.open(tmp_path / "again.sqlite") as store:
        (group,) = describe(store, cpu_devices(1)).groups
        planted = [
            OpCostRecord(cost_key_record(call), phase, 1e6, 1e6, 1e6, samples_s=(1e6,) * 5)
            for call in (hanging, *others)
            for phase in phases(call)
        ]
        store.put_op_costs(group.kind_id, group.environment_id, planted)
        with Measurer(store, group, Progress(), call_limit_s=3.0) as measurer:
            measured = measurer.measure_again([hanging, *others])
        assert (measured.succeeded, len(measured.failures)) == (2, 1)
        for (name, _), cost in store.op_costs(group.kind_id, group.environment_id).items():
            if name == hanging.digest:
                assert cost.samples_s == (1e6,) * 5
            else:
                assert cost.failure is None
                assert max(cost.samples_s) < 1e6


# ---- a full disk


def _can_mount() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


# Each prints nothing of its own, ends as the run does, and leaves the database in the folder $1; $2 is the one to start
# from, and the command follows. The first lets files grow to 100 KiB, the second fills a small file system up to that.
FULL = {
    "limit": 'folder=$1; cp "$2" "$folder/full.sqlite"; shift 2; ulimit -f 100; exec "$@"',
    "tmpfs": """folder=$1; from=$2; shift 2
        mkdir "$folder/small" && mount -t tmpfs -o size=2m none "$folder/small" || exit 99
        cp "$from" "$folder/small/full.sqlite"
        room=$(( $(df --output=avail -k "$folder/small" | tail -n 1) - 100 ))
        head -c "${room}k" /dev/zero > "$folder/small/filling"
        "$@"
        code=$?
        cp "$folder"/small/full.sqlite* "$folder"
        exit $code""",
}


@pytest.mark.parametrize("how", ["limit", pytest.param("tmpfs", marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_loses_nothing_that_was_stored(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    empty = tmp_path / "empty.sqlite"
    Store.open(empty).close()
    wrapper = ["bash", "-c", FULL[how], "full"]
    place = tmp_path
    if how == "tmpfs":
        if not _can_mount():
            pytest.skip("this system lets nobody mount a file system of his own")
        wrapper = ["unshare", "--user", "--map-root-user", "--mount", *wrapper]
        place = tmp_path / "small"
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{place}/full.sqlite")
    ended = subprocess.run(
        [
            *wrapper,
            str(tmp_path),
            str(empty),
            sys.executable,
            "-m",
            "app",
            *PROFILE,
            "--devices",
            "1",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, ""), ended
    assert ended.stderr.startswith(f"error: database {place}/full.sqlite: the disk or a quota is full ")
    assert ended.stderr.count("\n") == 1
    database = tmp_path / "full.sqlite"
    check_whole(database)
    kept = count(database)
    assert kept > 0
    # There is room again.
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{database}")
    done = command(*PROFILE, "--devices", "1", "--json").document
    assert done["known"] + done["measured"] == done["needed"]
    assert done["known"] >= kept // 2 > 0
    check_whole(database)


# ---- deaths


@pytest.mark.slow
def test_a_killed_worker_of_a_run_costs_one_call_at_most(command: Command, database: Path) -> None:
    assert command("db", "upgrade").code == 0
    run = start(*LONGER, "--json")
    wait_for_costs(database, 20, run)
    (worker,) = [one for one in psutil.Process(run.pid).children() if "spawn_main" in " ".join(one.cmdline())]
    worker.kill()
    output, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 0, errors
    document = json.loads(output)
    assert document["failed"] <= 1
    assert document["measured"] + document["failed"] == document["needed"]
    failures = [one["reason"] for one in document["kinds"][0]["failures"]]
    assert all("ended by signal SIGKILL (perhaps out of memory)" in reason for reason in failures)
    assert (count(database, "failure IS NOT NULL") > 0) == (document["failed"] == 1)
    check_whole(database)
    again = command(*LONGER, "--retry-failed", "--json").document
    assert (again["measured"], again["failed"]) == (document["failed"], 0)
    assert count(database, "failure IS NOT NULL") == 0


@pytest.mark.slow
def test_a_killed_run_is_continued_where_it_was(command: Command, database: Path) -> None:
    assert command("db", "upgrade").code == 0
    run = start(*LONGER)
    wait_for_costs(database, 30, run)
    run.kill()
    run.communicate()
    check_whole(database)
    kept = count(database)
    done = command(*LONGER, "--json").document
    # A call has two costs at most.
    assert kept // 2 <= done["known"] < done["needed"]
    assert done["measured"] == done["needed"] - done["known"]
    check_whole(database)


# ---- runs at once


def profile_at_once(runs: int) -> Sequence[Any]:
    """Run `app profile` several times at once on the default database; return what each reports."""
    started = [start(*PROFILE, "--devices", "1", "--json") for _ in range(runs)]
    try:
        ended = [run.communicate(timeout=WAIT_S) for run in started]
    finally:
        for run in started:
            run.kill()
    assert [run.returncode for run in started] == [0] * runs, ended
    return [json.loads(output) for output, _ in ended]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [2, 4])
def test_profile_runs_at_once_lose_nothing_and_duplicate_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", database_url)
    documents = profile_at_once(runs)
    needed = documents[0]["needed"]
    for document in documents:
        assert (document["needed"], document["failed"]) == (needed, 0)
        assert document["measured"] + document["known"] == needed
    # Each call was measured by somebody.
    assert sum(document["measured"] for document in documents) >= needed
    with Store.open(database_url) as store:
        (group,) = describe(store, cpu_devices(1)).groups
        stored = store.op_costs(group.kind_id, group.environment_id)
        counts = store.table_counts()
    assert len({name for name, _ in stored}) == needed == counts["op_signatures"]
    assert len(stored) == counts["op_costs"]
    assert counts["device_kinds"] == counts["environments"] == 1
    if database_url.startswith("sqlite"):
        check_whole(Path(database_url.removeprefix("sqlite:///")))
