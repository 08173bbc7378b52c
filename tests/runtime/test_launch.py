"""Execution through torchrun's launcher, and inside a group that torchrun has made."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from graph.axes import AxisKind
from profiler.pinning import begin_child
from profiler.processes import HAS_SERVER
from runtime.launch.torchrun import call_on_ranks, launch
from tests.runtime.oracle import assert_equal, graph_of, make_job, reference, train_plain
from tests.runtime.programs import output_of, outputs_on_ranks
from tests.runtime.strategies import by_kind

ROOT = Path(__file__).parents[2]

UNDER_TORCHRUN = """
import json, os
from graph.axes import AxisKind
from runtime.launch.torchrun import launch
from tests.runtime.oracle import graph_of, make_job, reference
from tests.runtime.strategies import by_kind
graph = graph_of("branches")
job = make_job(graph, by_kind(graph, [AxisKind.PARAMETER], [0, 1]), reference("branches"))
result = launch(job, [None, None], timeout_s=60)
assert (result is None) == (os.environ["RANK"] != "0")
if result is not None:
    print(json.dumps(result.losses))
"""

# Where the system has few ports to give: it gives one for the second time soon.
FEW_PORTS = """
ip link set lo up && echo 40000 40031 > /proc/sys/net/ipv4/ip_local_port_range && exec "$@"
"""

SHARED_STORES = """
from torch.distributed import TCPStore
from runtime.launch.torchrun import launcher_store
seen = set()
while True:
    ours = launcher_store()
    launchers = TCPStore("127.0.0.1", ours.port, is_master=True, wait_for_workers=False, multi_tenant=True)
    ours.set("a key", "a value")
    assert launchers.get("a key") == b"a value"
    if ours.port in seen:
        break
    seen.add(ours.port)
    del ours, launchers
"""


def test_launched_processes_equal_the_module() -> None:
    graph = graph_of("branches")
    job = make_job(graph, by_kind(graph, [AxisKind.SAMPLE], [0, 1]), reference("branches"))
    job = replace(job, iterations=job.steps, warmup=0)
    result = launch(job, [0, None], timeout_s=60)
    assert result is not None
    assert_equal(result, train_plain(reference("branches")))
    assert len(result.step_times_s) == job.iterations
    assert [len(times) for times in result.rank_times_s] == [job.iterations] * 2
    assert all(
        time >= max(of_step)
        for time, of_step in zip(result.step_times_s, zip(*result.rank_times_s, strict=True), strict=True)
    )
    assert result.peaks == ()


def test_under_torchrun_runs_in_place_and_rank_0_alone_has_the_result(tmp_path: Path) -> None:
    """On ranks that torchrun's launcher forks; its command starts those of `tests/app/test_run_ranks.py`."""
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    (code, printed), other = outputs_on_ranks(2, str(script), folder=tmp_path)
    assert (code, other) == (0, (0, ""))
    losses = json.loads(printed)
    assert losses == pytest.approx(train_plain(reference("branches")).losses, rel=1e-4)


def frozen_objects() -> int:
    """Return, as a launched process, how many objects collections pass by."""
    begin_child()
    return gc.get_freeze_count()


def test_collections_in_launched_processes_pass_by_what_their_server_imported() -> None:
    if not HAS_SERVER:
        pytest.skip("no server here")
    # torch alone makes more.
    assert min(call_on_ranks(2, frozen_objects, ())) > 100_000


def test_the_launcher_shares_the_store_on_a_port_that_is_given_for_the_second_time() -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("no unshare or no iproute2")
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces: {made.stderr.strip()}")
    few_ports = ("unshare", "--net", "sh", "-c", FEW_PORTS, "sh")
    assert output_of("-c", SHARED_STORES, folder=ROOT, before=few_ports) == []
