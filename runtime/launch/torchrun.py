"""Starts one process a device through torchrun's launcher, runs a job in them, and brings back the result."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph.errors import RuntimeFailure
from graph.texts import describe_exit
from profiler.pinning import begin_child
from profiler.processes import starting_processes
from runtime.jobs.job import Job, JobResult
from runtime.launch.processes import error_line, join_group, leave_group, occupy, run_patiently
from runtime.ranks.watchdog import under_watchdog

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

DEFAULT_TIMEOUT_S = 1800.0
# Time from the first failure to the end of all processes.
SHUTDOWN_S = 5
POSIX_SIGNALS = tuple(name for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name))


def launch(
    job: Job, devices: Sequence[int | None], device_type: str = "cpu", timeout_s: float = DEFAULT_TIMEOUT_S
) -> JobResult | None:
    """Execute a job on `devices`, one process each, and return its result.

    Under torchrun (RANK and WORLD_SIZE are set) the job runs in this process, which is one rank of perhaps several
    hosts; then only rank 0 gets a result. `runtime.launch.rank_leader` is what reports failures there.

    Args:
        job: what to execute; its strategy's device r is rank r.
        devices: for each local rank, its core ("cpu"; None: not pinned) or the index of its device ("cuda").
        device_type: "cpu" or "cuda".
        timeout_s: how long a rank waits for another one.

    Raises:
        RuntimeFailure: a rank failed; one line with the rank and the reason. All processes have ended.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _run_here(job, devices, device_type, timeout_s)
    if len(devices) < job.strategy.device_count:
        raise RuntimeFailure(
            f"run: there are {len(devices)} devices, must be {job.strategy.device_count} for this strategy; "
            "name more or search for fewer"
        )
    return _launch(job, tuple(devices[: job.strategy.device_count]), device_type, timeout_s)


def _run_here(
    job: Job, devices: Sequence[int | None], device_type: str, timeout_s: float
) -> JobResult | None:
    import torch.distributed as dist

    device = occupy(devices[int(os.environ.get("LOCAL_RANK", "0"))], device_type)
    joins = not dist.is_initialized()
    if joins:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        join_group(device, timeout_s, store=None, rank=rank, size=size)
    result = run_patiently(job, device, timeout_s)
    if joins:
        leave_group()
    return result


def _work(job: Path, devices: tuple[int | None, ...], device_type: str, timeout_s: float) -> JobResult | None:
    """Execute a job, from its file, as one launched process."""
    begin_child()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = occupy(devices[int(os.environ["LOCAL_RANK"])], device_type)
    with under_watchdog(timeout_s, _end_with):
        join_group(device, timeout_s, store=None, rank=rank, size=size)
        result = run_patiently(_read(job), device, timeout_s)
        leave_group()
    return result


def _read(job: Path) -> Job:
    loaded: Job = pickle.loads(job.read_bytes())  # noqa: S301  # of our own launcher, in a folder that is ours alone
    return loaded


def _end_with(reason: str) -> None:
    """End this process at once; the launcher receives the reason."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(RuntimeFailure(reason))
    sys.stderr.flush()
    os._exit(1)


def _launch(
    job: Job, devices: tuple[int | None, ...], device_type: str, timeout_s: float
) -> JobResult | None:
    with tempfile.TemporaryDirectory(prefix="soapstone-run-") as folder:
        # As a file, not as an argument: to hand over an argument, the launcher waits until the process has started and
        # reads it, so that the processes would start one after another, and a signal meanwhile would cut it short.
        file = Path(folder) / "job"
        file.write_bytes(pickle.dumps(job.without_caches()))
        results = call_on_ranks(len(devices), _work, (file, devices, device_type, timeout_s))
    first: JobResult | None = results[0]
    return first


def call_on_ranks(count: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """Call a function in processes that torchrun's launcher starts on this machine; return their results, by rank.

    Args:
        count: of processes.
        function: begins with `begin_child`; what it prints is not shown.
        arguments: its own, few bytes.

    Raises:
        RuntimeFailure: a rank failed; one line with the rank and the reason. All processes have ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    store = launcher_store()
    with (
        tempfile.TemporaryDirectory(prefix="soapstone-ranks-") as folder,
        _quiet_launcher(),
        _own_handlers(),
        _no_child_left(),
        starting_processes() as context,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            # Not "c10d", by which hosts find each other: it takes a fifth of a second where there is only one.
            rdzv_backend="static",
            rdzv_endpoint=f"127.0.0.1:{store.port}",
            rdzv_configs={"rank": 0, "timeout": 60},
            local_addr="127.0.0.1",
            # A restart would repeat the failure, and has been seen to hang.
            max_restarts=0,
            monitor_interval=0.1,
            start_method=context.get_start_method(),
            shutdown_timeout=SHUTDOWN_S,
            # Not SIGINT: the launcher would pass it on, and processes that are just starting would print where they
            # were. It is a KeyboardInterrupt here, after which the launcher ends them by SIGTERM.
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            # The message of a failing rank is part of its error; nothing is printed to the terminal.
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        try:
            results = elastic_launch(config, function)(*arguments)
        except ChildFailedError as error:
            raise RuntimeFailure(_explain(error)) from error
        except SignalException as error:
            # The launcher has ended all processes; the caller handles the signal.
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            raise SystemExit(128 + error.sigval) from error
    return [results[rank] for rank in range(count)]


def launcher_store() -> TCPStore:
    """Open a store on this machine that the launcher shares: it opens one of the same port.

    torch finds the store to share by its port, but not where a store that has ended had the same, unless the port is
    named. A port of 0 would therefore fail as soon as the system gives one for the second time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=free.detach(),
        )


def _explain(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    return f"rank {rank}: {_reason(rank, failure)}; all processes were ended"


# torch's message for a process without an error record.
_NO_RECORD = "To enable traceback see"


def _reason(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"its process {describe_exit(failure.exitcode)}, must run to the end"
    # Of an exception, torch gives a record that holds its text, else a text.
    message = failure.message
    text = message.get("message", "") if isinstance(message, Mapping) else message
    if _NO_RECORD in str(text):
        return f"its process {describe_exit(failure.exitcode)} before it could say why, must run to the end"
    return error_line(str(text), rank)


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Put the signal handlers back that the launcher replaces for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before |= {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in POSIX_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_child_left() -> Iterator[None]:
    """End the processes that were started meanwhile: the launcher forgets them where a signal comes as they start."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        left = set(multiprocessing.active_children()) - before
        for process in left:
            process.kill()
        for process in left:
            process.join(SHUTDOWN_S)


# Of the loggers of torch's launcher: its ranks, and the processes that they are.
_LAUNCHERS = ("torch.distributed", "torch.multiprocessing")


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the launcher's own log lines from the terminal: failures come back as one line."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_LAUNCHERS)]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
