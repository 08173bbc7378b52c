"""Kernels are compiled once, by several processes; whatever ends one of them, the others do its part.

Real processes and a real folder of compiled kernels, but small kernels of the test's own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from search.parallel.fork import can_fork

REPOSITORY = Path(__file__).parents[2]
WAIT_S = 120.0

pytestmark = pytest.mark.skipif(not can_fork(), reason="kernels are compiled by two processes on Linux alone")

KERNELS = """
from search.kernels.cache import entry, inner, quick_entry
from search.kernels.records import Array

@inner
def add(numbers: Array, number: int) -> None:
    for place in range(len(numbers)):
        numbers[place] += number

@quick_entry
def one(numbers: Array) -> int:
    add(numbers, 1)
    return int(numbers[0])

@quick_entry
def two(numbers: Array, number: int) -> int:
    add(numbers, number)
    return int(numbers[-1])

@entry
def three(numbers: Array) -> int:
    return len(numbers.copy())

NAMES = ("one", "two", "three")
"""

# Every process of a test, copies too, writes which kernels it compiled.
BEGINNING = """
import os, signal, sys, time
import numpy as np
from numba.core.event import Listener, register
import made
from search.parallel.kernel_warm_up import KernelWarmUp, argument_types, compile_once, kernel_lock

class Written(Listener):
    def on_start(self, event):
        pass
    def on_end(self, event):
        name = event.data["dispatcher"].py_func.__name__
        if name in made.NAMES and event.data["args"] in event.data["dispatcher"].overloads:
            with open(sys.argv[1], "a") as file:
                file.write(f"{name} {os.getpid()}\\n")

register("numba:compile", Written())
ALL = [made.one, made.two, made.three]

def is_here():
    for kernel in ALL:
        assert kernel.signatures == [argument_types(kernel)]
    numbers = np.arange(3)
    assert (made.one(numbers), made.two(numbers, 2), made.three(numbers)) == (1, 5, 3)
    for kernel in ALL:  # the call compiled nothing more
        assert kernel.signatures == [argument_types(kernel)]

def is_locked(kernel):
    with kernel_lock(kernel, 0.0) as is_free:
        return not is_free

def wait_for(what):
    until = time.monotonic() + 100
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)
"""


class Folder:
    """A folder with kernels, what is compiled of them, and the list of who compiled what."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "made.py").write_text(KERNELS)

    def start(self, script: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a process that runs a script."""
        paths = os.pathsep.join([str(self.path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, "-c", BEGINNING + script, str(self.path / "compiled.txt")],
            env={
                **os.environ,
                "NUMBA_CACHE_DIR": str(self.path / "kept"),
                "PYTHONPATH": paths,
                # Bytecode of a file counts as the next one's, of the same length and written in the same second.
                "PYTHONDONTWRITEBYTECODE": "1",
                **(environment or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, environment: Mapping[str, str] | None = None) -> str:
        """Return what a script prints."""
        with self.start(script, environment) as process:
            output, errors = process.communicate(timeout=WAIT_S)
        assert (process.returncode, errors) == (0, "")
        return output.strip()

    @property
    def compiled(self) -> Counter[str]:
        """How often each kernel was compiled."""
        return Counter(line.split()[0] for line in self._lines())

    @property
    def processes(self) -> set[str]:
        """Who compiled."""
        return {line.split()[1] for line in self._lines()}

    def _lines(self) -> list[str]:
        file = self.path / "compiled.txt"
        return file.read_text().splitlines() if file.exists() else []


ONCE = Counter({"one": 1, "two": 1, "three": 1})
BOTH = """
with KernelWarmUp(ALL) as warm_up:
    assert warm_up.remaining == ALL
    warm_up.start_helper()
    assert warm_up.helper is not None
    warm_up.finish()
    assert not warm_up.remaining
    is_here()
assert warm_up.helper is None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_a_kernel_is_compiled_again_where_one_in_another_file_has_changed(folder: Folder) -> None:
    """numba itself would go on with what it compiled before."""
    other = (
        "from search.kernels.cache import hot\n@hot\ndef step(number: int) -> int:\n    return number + {}\n"
    )
    caller = "from other import step\nfrom search.kernels.cache import entry\n@entry\ndef call(number: int) -> int:\n"
    (folder.path / "caller.py").write_text(f"{caller}    return step(number)\n")
    found = []
    for number in (1, 2, 2):
        (folder.path / "other.py").write_text(other.format(number))
        script = "import caller\nprint(caller.call(0), sum(caller.call.stats.cache_hits.values()))"
        found.append(folder.run(script).split())
    assert found == [["1", "0"], ["2", "0"], ["2", "1"]]


def test_a_kernel_is_compiled_again_where_its_tuple_has_another_name(folder: Folder) -> None:
    """numba itself would fail to read what it compiled for the tuple that is gone."""
    for name in ("Pair", "Couple"):
        (folder.path / "tuples.py").write_text(
            f"from typing import NamedTuple\nclass {name}(NamedTuple):\n    first: int\n"
        )
        (folder.path / "caller.py").write_text(
            "from search.kernels.cache import entry\n@entry\ndef first(pair):\n    return pair.first\n"
        )
        assert folder.run(f"import caller, tuples\nprint(caller.first(tuples.{name}(3)))") == "3"


def test_each_kernel_is_compiled_once_and_then_read(folder: Folder) -> None:
    folder.run(BOTH)
    assert folder.compiled == ONCE
    folder.run(
        """
warm_up = KernelWarmUp(ALL)
assert not warm_up.remaining
warm_up.start_helper()
assert warm_up.helper is None
warm_up.finish()
is_here()
"""
    )
    assert folder.compiled == ONCE


def test_a_process_beside_compiles_all_where_this_one_is_busy(folder: Folder) -> None:
    mine = folder.run(
        """
with KernelWarmUp(ALL) as warm_up:
    warm_up.start_helper()
    wait_for(lambda: len(open(sys.argv[1]).read().split()) == 6 if os.path.exists(sys.argv[1]) else False)
    warm_up.finish()
    is_here()
print(os.getpid())
"""
    )
    assert folder.compiled == ONCE
    assert len(folder.processes - {mine}) == 1


def test_two_searches_that_begin_at_once_share_the_work(folder: Folder) -> None:
    # Either may find some compiled already, if the other one began earlier.
    processes = [
        folder.start(
            """
with KernelWarmUp(ALL) as warm_up:
    warm_up.start_helper()
    warm_up.finish()
    assert not warm_up.remaining
    is_here()
"""
        )
        for _ in range(2)
    ]
    ended = [(process.communicate(timeout=WAIT_S)[1], process.returncode) for process in processes]
    assert ended == [("", 0)] * 2
    assert folder.compiled == ONCE


def test_what_a_killed_process_was_at_is_compiled_here(folder: Folder) -> None:
    folder.run(
        """
with KernelWarmUp(ALL) as warm_up:
    warm_up.start_helper()
    wait_for(lambda: is_locked(ALL[0]))
    os.kill(warm_up.helper.number, signal.SIGKILL)
    warm_up.finish()
    is_here()
"""
    )
    assert set(folder.compiled) == set(ONCE)


def test_who_holds_a_lock_for_too_long_is_not_waited_for(folder: Folder) -> None:
    folder.run(
        """
import search.parallel.kernel_warm_up
from search.parallel.fork import fork
search.parallel.kernel_warm_up.PATIENCE_S = 0.5
def hold(connection):
    with kernel_lock(ALL[1], 0.0) as is_held:
        connection.send(is_held)
        time.sleep(100)
holder = fork(hold)
assert holder.connection.recv()
for kernel in ALL:
    compile_once(kernel)
is_here()
holder.end()
"""
    )
    assert folder.compiled == ONCE


def test_an_interrupt_ends_both(folder: Folder) -> None:
    with folder.start(
        """
with KernelWarmUp(ALL) as warm_up:
    warm_up.start_helper()
    print(warm_up.helper.number, flush=True)
    time.sleep(100)
"""
    ) as process:
        assert process.stdout is not None
        beside = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == -signal.SIGINT
    assert errors.strip().endswith("KeyboardInterrupt")
    assert not psutil.pid_exists(beside)


def test_a_killed_search_leaves_no_process(folder: Folder) -> None:
    with folder.start(
        """
with kernel_lock(ALL[0], 0.0), KernelWarmUp(ALL) as warm_up:
    warm_up.start_helper()  # it waits for the lock
    print(warm_up.helper.number, flush=True)
    time.sleep(100)
"""
    ) as process:
        assert process.stdout is not None
        beside = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.communicate(timeout=WAIT_S)
    psutil.wait_procs([beside], timeout=WAIT_S)
    assert not beside.is_running() or beside.status() == psutil.STATUS_ZOMBIE


def test_without_a_folder_that_can_be_written_all_is_compiled_here(folder: Folder) -> None:
    (folder.path / "__pycache__").write_text("a file, so that no folder can be made")
    folder.run(
        """
assert made.one.stats.cache_path is None
with KernelWarmUp(ALL) as warm_up:
    assert warm_up.remaining == ALL
    warm_up.start_helper()
    assert warm_up.helper is None
    warm_up.finish()
    is_here()
""",
        {
            "NUMBA_CACHE_DIR": "/dev/null/kept",
            "XDG_CACHE_HOME": "/dev/null/cache",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    assert folder.compiled == ONCE
    assert len(folder.processes) == 1


def test_kernels_are_called_with_the_arguments_that_are_compiled_beforehand() -> None:
    """In every order: or what was compiled beforehand would be of no use, and each would be compiled again."""
    found = subprocess.run(
        [sys.executable, "-c", EVERY_ORDER], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    called = dict(line.split() for line in found.stdout.splitlines())
    # The last makes room where fragments have become too many.
    assert [name for name, how in called.items() if how != "as-said"] == ["compact"]
    assert called["compact"] == "not-at-all"


EVERY_ORDER = """
from search.parallel.kernel_warm_up import argument_types, needed_kernels
from search.cost.cost_table import CostTable
from search.algorithms.chain import SearchOptions
from search.algorithms.mcmc import search
from search.problem import Problem
from search.simulate.simulator import simulate
from tests.search.builders import MadeUpCosts, branches, devices, local_calls
from tests.search.test_mcmc import TRAINING
graph, topology, table = branches(), devices(4), CostTable(MadeUpCosts())
needed = []
for order in ("program", "fifo", "priority"):
    needed += needed_kernels(order, ["mcmc"])
    options = SearchOptions(proposals=40, chains=2, seed=1, order=order)
    found = search(Problem(graph, topology, table, TRAINING, local_calls=local_calls), options)
    simulate(graph, found.strategy, topology, table, TRAINING, order=order, local_calls=local_calls)
for kernel in needed:
    met = kernel.signatures
    how = "not-at-all" if not met else "as-said" if met == [argument_types(kernel)] else "otherwise"
    print(kernel.py_func.__name__, how)
"""


def test_kernels_are_functions_where_nothing_is_compiled() -> None:
    """For debuggers and for the coverage of their lines; other tests of the simulator pass like that, too."""
    test = "tests/search/test_taskgraph.py::test_task_graph_is_the_plan[two_layers-one node]"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    ended = subprocess.run(
        alone, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
