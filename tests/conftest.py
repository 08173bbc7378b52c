"""What all tests share: hypothesis profiles, what is loaded once, the skip of CUDA tests where no such device is."""

import atexit
import functools
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from profiler import processes

# Derandomized: the same cases in every run. No deadline: a shared machine's pauses are no failures.
settings.register_profile(
    "default", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.register_profile("full", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile("default")

# A shell's background job ignores SIGINT, and so would the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Graphs, and what models were named, are kept for this run alone; its workers share them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    for kept in ("CACHE", "STATE"):
        folder = tempfile.mkdtemp(prefix=f"soapstone-{kept.lower()}-")
        os.environ[f"SOAPSTONE_{kept}_DIR"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)

# What many processes of tests take, and seldom those of a command: torch imports its compiler to export a module, and
# where one is built without memory; files of tests import pytest.
processes.PRELOADED += (
    "torch.export._trace",
    "torch.distributed.fsdp",
    "numpy.ma",
    "pytest",
    "app.db.store",
    "runtime.training.parallelize",
)


@pytest.fixture(scope="session", autouse=True)
def commands_are_read_once() -> Iterator[None]:
    """Let Typer make the commands once: a process has one command, a test many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


def pytest_collection_finish() -> None:
    """Let the collector pass by all that is loaded now: it would look at it every few seconds, and find nothing."""
    gc.collect()
    gc.freeze()


# Files that take longest: one that came last would run alone.
FIRST = [
    f"tests/{name}.py"
    for name in (
        "app/test_main_job", "runtime/test_training", "app/test_run_ranks", "runtime/test_huggingface",
        "gpu/test_commands", "runtime/test_zoo", "graph/test_importer", "graph/test_huggingface",
        "search/test_taskgraph", "runtime/test_dtensor_run", "app/test_signals", "testbeds/test_testbed",
        "testbeds/test_gone_hosts",
        "gpu/test_torchrun", "packaging/test_environment", "runtime/test_parallel", "app/test_export",
        "studies/test_study", "runtime/test_random_graphs", "app/db/test_reading", "runtime/test_examples",
        "search/test_compiling", "profiler/test_links", "runtime/test_sharding", "gpu/test_host_waits",
        "runtime/test_loops", "runtime/test_compiled", "app/test_compiled",
    )
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first; skip the tests marked `cuda` where torch sees no CUDA device."""
    place = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(FIRST)))
    needing_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if not needing_cuda:
        return
    import torch  # imported only where a test needs the answer

    if not torch.cuda.is_available():
        for item in needing_cuda:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
