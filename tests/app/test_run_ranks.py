"""`app run` under torchrun: agents on this machine stand for hosts; rank 0 alone speaks, and writes one row."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.app.conftest import USERS_NETWORK, Command
from tests.app.rank_hosts import Agent, on_forked_hosts, on_hosts

NETWORK = f"""{USERS_NETWORK}
def failing():
    if os.environ["RANK"] == "1":
        raise ValueError("no such weights")
    return fine()
def dying():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return fine()
"""
RUN = ("--device", "cpu", "--strategy", "data-parallel", "--on-miss", "estimate", "--iterations", "3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a user's own networks in it."""
    (tmp_path / "networks.py").write_text(NETWORK)
    return tmp_path


def run_hosts(folder: Path, hosts: int, processes: int, *arguments: str) -> list[Agent]:
    """Run `app run` on hosts of this machine."""
    return on_forked_hosts(folder, hosts, processes, "run", *arguments, *RUN)


def executions(database: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute("SELECT status, failure FROM executions").fetchall()


def test_two_hosts_execute_a_strategy_together(folder: Path, database: Path) -> None:
    first, second = on_hosts(folder, 2, 1, "run", "--model", "networks:fine", "--verify", "--json", *RUN)
    assert (first.code, second) == (0, Agent(0, "", ())), first
    report = json.loads(first.output)
    assert (report["devices"], report["verified"]) == (2, True)
    assert len(report["step_times_s"]) == 3
    assert executions(database) == [("finished", None)]
    with sqlite3.connect(database) as connection:
        ((document,),) = connection.execute("SELECT document FROM topologies").fetchall()
    topology = json.loads(document)
    assert [device["node"] for device in topology["devices"]] == [0, 1]
    assert [link["kind"] for link in topology["links"]] == ["nic"] * 4


def test_a_failure_on_another_host_ends_all_and_rank_0_says_why(folder: Path, database: Path) -> None:
    first, second = run_hosts(folder, 2, 1, "--model", "networks:failing", "--json")
    line = NETWORK.splitlines().index('        raise ValueError("no such weights")') + 1
    reason = (
        f"rank 1: model networks:failing: its factory failed at networks.py:{line} (ValueError: no such weights), must "
        "return (module, args, kwargs); correct it; all processes were ended"
    )
    assert (first.code, first.output, first.errors) == (1, "", (f"error: {reason}",))
    assert (second.code, second.output, second.errors) == (1, "", ())
    assert executions(database) == [("failed", reason)]


@pytest.mark.usefixtures("known_links")
def test_a_killed_rank_is_named_though_torchrun_ends_the_others(folder: Path, database: Path) -> None:
    (agent,) = on_hosts(folder, 1, 2, "run", "--model", "networks:dying", "--json", *RUN)
    assert (agent.code, agent.output) == (1, "")
    (line,) = agent.errors
    assert line.startswith("error: rank 1: its process ended without a word")
    assert executions(database) == [("failed", line.removeprefix("error: "))]


def test_a_topology_of_another_size_is_refused_by_rank_0_alone(folder: Path, database: Path) -> None:
    (agent,) = run_hosts(folder, 1, 2, "--model", "networks:fine", "--topology", "dgx1-v100")
    assert (agent.code, agent.output) == (1, "")
    assert agent.errors == (
        "error: topology dgx1-v100: has 8 devices, must have 2, one for each process that torchrun started; start as "
        "many, or pass another topology",
    )
    assert executions(database) == []


def test_a_probe_of_all_ranks_is_stored_and_found_by_its_name(
    folder: Path, database: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    probe = ("topology", "probe", "--device", "cpu", "--json")
    first, second = on_forked_hosts(folder, 2, 2, *probe, "--name", "wire")
    # Others may work here meanwhile, and are then warned of.
    assert [
        line for line in first.errors if not line.startswith("warning: links: other processes took")
    ] == []
    assert (first.code, second) == (0, Agent(0, "", ()))
    topology = json.loads(first.output)
    assert [device["node"] for device in topology["devices"]] == [0, 0, 1, 1]
    patterns = {fit["pattern"] for fit in topology["measured"]}
    assert {"p2p 0,1", "p2p 0,2", "all_reduce 0,1", "all_gather 0-3"} <= patterns
    algorithms = ("halving-doubling", "leaders-2x2")
    assert {f"all_reduce/{algorithm}" for algorithm in algorithms} <= patterns
    assert {f"successive/{algorithm}" for algorithm in ("library", *algorithms)} <= patterns
    _executes_the_algorithm_that_its_strategy_chooses(folder, database, command)
    with sqlite3.connect(database) as connection:
        # The run is on the devices that the probe stored.
        ((document,),) = connection.execute("SELECT document FROM topologies").fetchall()
    assert json.loads(document)["links"] == topology["links"]


def _executes_the_algorithm_that_its_strategy_chooses(folder: Path, database: Path, command: Command) -> None:
    on_wire = ("--model", "networks:fine", "--topology", "wire", "--json")
    searched = command("search", *on_wire, "--proposals", "0", "--on-miss", "estimate")
    assert searched.code == 0, searched
    (digest,) = [
        prediction["digest"]
        for prediction in searched.document["predictions"]
        if prediction["name"] == "data-parallel"
    ]
    file = folder / "chosen.json"
    assert command("strategy", "export", digest, str(file)).code == 0
    chosen = {"devices": [0, 1, 2, 3], "algorithm": "leaders-2x2"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "collective_algorithms": [chosen]}))
    arguments = (*RUN[:3], str(file), *RUN[4:])
    first, second = on_forked_hosts(folder, 2, 2, "run", *on_wire, "--verify", *arguments)
    assert (first.code, second) == (0, Agent(0, "", ())), first
    report = json.loads(first.output)
    assert report["verified"]
    assert report["all_reduces"] == [{**chosen, "from_bytes": 0}]
    assert executions(database) == [("finished", None)]


def test_a_probe_of_ranks_without_a_name_is_refused_by_rank_0_alone(folder: Path, database: Path) -> None:
    (agent,) = on_forked_hosts(folder, 1, 2, "topology", "probe", "--device", "cpu")
    assert agent == Agent(
        1, "", ("error: --name: is missing, must be given under torchrun; name the topology of its ranks",)
    )
    assert not database.exists()
