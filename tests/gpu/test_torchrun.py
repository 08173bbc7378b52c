"""`app run` under torchrun on two hosts of virtual GPUs; torchrun's agents on this machine stand for the hosts."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest

from tests.app.conftest import database  # noqa: F401 - fixture
from tests.app.rank_hosts import ROOT, on_forked_hosts
from tests.gpu.virtual_device import VARIABLE, Speeds

RUN = ("run", "--model", "mlp", "--preset", "small", "--strategy", "data-parallel", "--on-miss", "estimate")
FEW = ("--iterations", "2", "--warmup", "1", "--verify", "--json")


def seeing_gpus(folder: Path) -> dict[str, str]:
    """The variables of processes that see virtual GPUs and NCCL."""
    speeds = folder / "speeds.json"
    # Kernels are long enough to be measured in one round; large messages take their time alone.
    Speeds(kernel_s=2e-3, message_s=2e-3, most_computed=2**16).write(speeds)
    start = Path(__file__).parent / "start"
    return {VARIABLE: str(speeds), "PYTHONPATH": os.pathsep.join((str(start), str(ROOT)))}


@pytest.mark.usefixtures("speeds")
def test_two_hosts_of_a_gpu_execute_a_strategy_together(tmp_path: Path, database: Path) -> None:  # noqa: F811
    first, second = on_forked_hosts(
        tmp_path, 2, 1, *RUN, "--gpus", "0", *FEW, variables=seeing_gpus(tmp_path)
    )
    assert (first.code, second.code, second.output) == (0, 0, ""), (first, second)
    report = json.loads(first.output)
    assert (report["devices"], report["verified"]) == (2, True)
    with sqlite3.connect(database) as connection:
        ((document,),) = connection.execute("SELECT document FROM topologies").fetchall()
    topology = json.loads(document)
    assert [device["node"] for device in topology["devices"]] == [0, 1]
    assert {kind["processor"] for kind in topology["kinds"]} == {"cuda"}
