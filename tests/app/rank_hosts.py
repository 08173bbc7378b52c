"""`app` under torchrun's launcher, on agents of this machine that stand for hosts."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from profiler.pinning import begin_child, child_variables
from profiler.processes import HAS_SERVER, starting_processes
from tests.app.conftest import brief_measurements

ROOT = Path(__file__).parents[2]
# For an agent and its ranks, all told.
LIMIT_S = 600.0


@dataclass(frozen=True)
class Agent:
    """An agent of torchrun that has ended: its exit code, standard output, and the commands' errors and warnings."""

    code: int
    output: str
    errors: tuple[str, ...]


def on_hosts(
    folder: Path, hosts: int, processes: int, *arguments: str, variables: Mapping[str, str] | None = None
) -> list[Agent]:
    """Run a command under one `torchrun` a host, all on this machine; `variables`: of its environment, besides ours."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={hosts}",
        f"--nproc-per-node={processes}",
    ]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={host}", "-m", "tests.app.brief_app", *arguments],
            cwd=folder,
            env={**os.environ, **child_variables(), "PYTHONPATH": str(ROOT), **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(hosts)
    ]
    results = []
    try:
        for agent in agents:
            output, errors = agent.communicate(timeout=LIMIT_S)
            # torch's libraries shout.
            results.append(Agent(agent.returncode, output, _said(errors, "ERROR:")))
    finally:
        for agent in agents:
            agent.kill()
    return results


def on_forked_hosts(
    folder: Path, hosts: int, processes: int, *arguments: str, variables: Mapping[str, str] | None = None
) -> list[Agent]:
    """As `on_hosts`, where agents and ranks need not be commands: forked from a process that has imported torch.

    Its import takes most of the time of a process that does little, and each host has a process more than ranks.
    """
    if not HAS_SERVER:
        return on_hosts(folder, hosts, processes, *arguments, variables=variables)
    environment = {**os.environ, **child_variables(), **(variables or {})}
    port, started = free_port(), []
    try:
        for host in range(hosts):
            with starting_processes() as context:
                started.append(
                    context.Process(
                        target=_be_agent,
                        args=(folder, environment, (host, hosts, processes, port), arguments),
                        daemon=False,  # it has children of its own
                    )
                )
                started[-1].start()
        results = []
        for host, agent in enumerate(started):
            agent.join(LIMIT_S)
            assert agent.exitcode is not None, f"host {host}: has not ended within {LIMIT_S:g} s"
            output, errors = (file.read_text() for file in _streams(folder, host))
            results.append(Agent(agent.exitcode, output, _said(errors)))
    finally:
        for agent in started:
            agent.kill()
    return results


def _streams(folder: Path, host: int) -> tuple[Path, Path]:
    return folder / f"stdout-{host}", folder / f"stderr-{host}"


def _be_agent(
    folder: Path, environment: dict[str, str], place: tuple[int, int, int, int], arguments: tuple[str, ...]
) -> None:
    """Be torchrun's agent of a host, whose ranks are forked from this process."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    begin_child()
    host, hosts, processes, port = place
    for number, file in enumerate(_streams(folder, host), 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.update(environment)
    config = LaunchConfig(
        min_nodes=hosts,
        max_nodes=hosts,
        nproc_per_node=processes,
        run_id="forked",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": host, "timeout": LIMIT_S},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, _be_rank)(arguments)


def _be_rank(arguments: tuple[str, ...]) -> None:
    """Run a command as one rank; the agent takes a return for success."""
    from app.cli.main import let_rank_0_speak, main

    sys.argv = ["app", *arguments]
    sys.path.insert(0, os.getcwd())
    with brief_measurements():
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                let_rank_0_speak(int(ended.code))
                raise


def _said(errors: str, *others: str) -> tuple[str, ...]:
    return tuple(line for line in errors.splitlines() if line.startswith(("error:", "warning:", *others)))


def free_port() -> int:
    """Return a free port, of the ports that Linux assigns to no other process before the ranks listen there."""
    for port in random.sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
