"""The pool of workers: real processes, real deaths."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from graph.calls import LocalCall
from graph.compiled_calls import COMPILED, PartCall, compiled_call
from graph.errors import RuntimeFailure, UsageError
from graph.texts import describe_exit
from profiler import processes, workers
from profiler.devices import PhysicalDevice, available_devices, cpu_devices
from profiler.measure import FailedMeasurement, Measurement, MeasureOptions
from profiler.pinning import can_pin, usable_cores
from profiler.updates import update_call
from profiler.workers import CallResult, WorkerPool
from tests.profiler.examples import impossible_matrix_product, long_matrix_product, matrix_product

QUICK = MeasureOptions(repetitions=3, budget_s=0.0)
PATIENCE_S = 60.0
ROOT = Path(__file__).parents[2]


def _until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def _is_gone(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _short_calls(count: int) -> list[LocalCall]:
    return [update_call("sgd", 100 + index) for index in range(count)]


def _reasons(result: CallResult) -> list[str]:
    return [outcome.reason for outcome in result.outcomes if isinstance(outcome, FailedMeasurement)]


def test_every_call_is_measured_once_on_some_device() -> None:
    calls = [*_short_calls(7), matrix_product(32, 32, 32), impossible_matrix_product()]
    with WorkerPool(cpu_devices(2), QUICK) as pool:
        results = list(pool.measure(calls))
        again = list(pool.measure(calls[:2]))
    assert sorted(result.call.digest for result in results) == sorted(call.digest for call in calls)
    assert {result.device.label for result in results} <= {"cpu:0", "cpu:1"}
    failures = [result for result in results if _reasons(result)]
    assert [result.call for result in failures] == [impossible_matrix_product()]
    assert len(again) == 2
    for result in again:
        assert isinstance(result.outcomes[0], Measurement)


@pytest.mark.skipif(not can_pin(), reason="this system cannot pin")
def test_workers_are_pinned_to_their_cores() -> None:
    devices = cpu_devices(2)
    with WorkerPool(devices, QUICK) as pool:
        list(pool.measure(_short_calls(4)))
        for device, process_id in zip(devices, pool.process_ids, strict=True):
            assert psutil.Process(process_id).cpu_affinity() == [device.core]
            assert psutil.Process(process_id).environ()["PYTHONSAFEPATH"] == "1"
    assert len(usable_cores()) >= 1


def test_killed_worker_costs_one_call() -> None:
    fatal, others = long_matrix_product(), _short_calls(3)
    with WorkerPool(cpu_devices(1), QUICK) as pool:

        def kill() -> None:
            _until(lambda: pool.running.get("cpu:0") == fatal)
            process_id = pool.process_ids[0]
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        results = list(pool.measure([others[0], fatal, *others[1:]]))
        killer.join()
    assert [result.call for result in results] == [others[0], fatal, *others[1:]]
    assert [len(_reasons(result)) for result in results] == [0, 2, 0, 0]
    assert "ended by signal SIGKILL (perhaps out of memory)" in _reasons(results[1])[0]


def test_hanging_call_ends_at_its_limit_and_the_others_are_measured() -> None:
    hanging, others = [long_matrix_product(seed) for seed in range(2)], _short_calls(4)
    with WorkerPool(cpu_devices(2), QUICK, call_limit_s=2.0) as pool:
        results = list(pool.measure([hanging[0], *others, hanging[1]]))
        assert pool.running == {}
    assert len(results) == 6
    for result in results:
        if result.call in hanging:
            assert _reasons(result) == ["took longer than its limit of 2 s, so its worker was ended"] * 2
        else:
            assert _reasons(result) == []


def test_compiled_call_has_more_time_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PART_LIMIT_S", 0.5)
    hanging = long_matrix_product()
    part = PartCall(hanging, tuple(range(len(hanging.inputs))))
    compiled = compiled_call(hanging.inputs, [part, part], [len(hanging.inputs)])
    with WorkerPool(cpu_devices(1), QUICK, call_limit_s=1.0) as pool:
        results = list(pool.measure([compiled, hanging]))
    limits = {result.call.target: set(_reasons(result)) for result in results}
    assert limits == {
        COMPILED: {"took longer than its limit of 2 s, so its worker was ended"},
        hanging.target: {"took longer than its limit of 1 s, so its worker was ended"},
    }


def test_worker_that_dies_idle_costs_nothing() -> None:
    with WorkerPool(cpu_devices(1), QUICK) as pool:
        list(pool.measure(_short_calls(1)))
        process_id = pool.process_ids[0]
        assert process_id is not None
        os.kill(process_id, signal.SIGKILL)
        _until(lambda: process_id not in [child.pid for child in multiprocessing.active_children()])
        results = list(pool.measure(_short_calls(2)))
    assert [_reasons(result) for result in results] == [[], []]


def test_results_come_one_by_one_and_leaving_early_ends_the_busy() -> None:
    calls = [*_short_calls(1), long_matrix_product()]
    with WorkerPool(cpu_devices(1), QUICK) as pool:
        stream = pool.measure(calls)
        assert next(stream).call == calls[0]
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        assert pool.running == {}
        assert not _reasons(next(pool.measure(_short_calls(1))))


def test_result_that_came_in_time_counts_however_slow_the_caller() -> None:
    with WorkerPool(cpu_devices(2), QUICK, call_limit_s=4.0) as pool:
        stream = pool.measure(_short_calls(3))
        results = [next(stream)]
        time.sleep(4.5)  # a caller that stores slowly; the other worker has long answered
        results.extend(stream)
    assert [_reasons(result) for result in results] == [[], [], []]


def test_worker_that_never_starts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # Started afresh, it takes seconds.
    monkeypatch.setattr(processes, "HAS_SERVER", False)
    with (
        WorkerPool(cpu_devices(1), QUICK, start_limit_s=0.01) as pool,
        pytest.raises(RuntimeFailure, match=r"worker on cpu:0: did not start 3 times \(took longer"),
    ):
        list(pool.measure(_short_calls(1)))


def test_devices_must_differ() -> None:
    with pytest.raises(UsageError, match=r"devices are \[\], must be at least one"):
        WorkerPool([])
    with pytest.raises(UsageError, match=r"devices are \[cpu:0, cpu:0\]"):
        WorkerPool(cpu_devices(1) * 2)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_is_left_when_the_run_ends(how: signal.Signals) -> None:
    script = """
import sys
from profiler.devices import cpu_devices
from profiler.workers import WorkerPool
from tests.profiler.examples import long_matrix_product
from profiler.updates import update_call
with WorkerPool(cpu_devices(1)) as pool:
    for result in pool.measure([update_call("sgd", 100), long_matrix_product()]):
        print(*pool.process_ids, flush=True)
"""
    command = [sys.executable, "-c", script]
    pipe = subprocess.PIPE
    # Said outright, since the script imports from the tests.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, cwd=ROOT, env=environment
    ) as run:
        try:
            assert run.stdout is not None
            assert run.stderr is not None
            first = run.stdout.readline()
            assert first, run.stderr.read()
            worker = int(first)
            time.sleep(0.5)  # so that it is inside the long call
            if how is signal.SIGINT:
                os.killpg(run.pid, how)  # as a terminal does
            else:
                run.kill()
            _, messages = run.communicate(timeout=PATIENCE_S)
        finally:
            run.kill()
    if how is signal.SIGINT:
        assert messages.strip().endswith("KeyboardInterrupt")
    assert run.returncode != 0
    _until(lambda: _is_gone(worker))


def test_exits_are_described() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-signal.SIGSEGV) == "was ended by signal SIGSEGV"
    assert describe_exit(-99) == "was ended by signal 99"


@pytest.mark.cuda
def test_gpus_measure_in_workers() -> None:
    with WorkerPool(available_devices("cuda")[:2], QUICK) as pool:
        results = list(pool.measure([matrix_product(256, 256, 256 + index) for index in range(6)]))
    assert [_reasons(result) for result in results] == [[]] * 6


def test_workers_start_afresh_where_the_server_has_no_room_for_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
from profiler import processes
from profiler.devices import cpu_devices
from profiler.updates import update_call
from profiler.workers import WorkerPool
assert not processes.start_server()
with WorkerPool(cpu_devices(1)) as pool:
    print(*(type(outcome).__name__ for done in pool.measure([update_call("sgd", 100)]) for outcome in done.outcomes))
"""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "Measurement\n")


def _tell_parent(connection: Connection, _device: PhysicalDevice, _nothing: None) -> None:
    connection.send(os.getppid())


@pytest.mark.skipif(not processes.HAS_SERVER, reason="processes are started afresh elsewhere")
def test_device_processes_are_forked_from_one_server_that_has_torch_already() -> None:
    started = [processes.DeviceProcess(_tell_parent, device, None) for device in cpu_devices(2)]
    parent, other = (process.connection.recv() for process in started)
    for process in started:
        process.kill()
    assert parent == other
    server = psutil.Process(parent)
    assert server.ppid() == os.getpid()
    assert any("libtorch" in library.path for library in server.memory_maps())
