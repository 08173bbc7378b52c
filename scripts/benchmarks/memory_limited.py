"""A network that fits no device, trained in a pipeline that a search finds, on two processes of limited memory.

All as a user does it. A topology file gives this machine's devices less memory than weights, gradients and optimizer
state of the network take; `app search --micro-batches 4 --schedule interleaved` searches on it, by costs that
`app profile` measures, and `app run` executes what it finds. Every process of a run may allocate what a device has and
`BESIDE_MIB`, by `ulimit -d`, which the kernel enforces; data parallelism is run under the same limit, and ends where it
is reached.
SOAPSTONE_DATABASE_URL keeps the database; else it is a temporary one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph.errors import RuntimeFailure
from scripts.benchmarks.on_testbed import app
from scripts.benchmarks.prediction import database
from scripts.benchmarks.result import BenchmarkResult, Row, measurement, number

if TYPE_CHECKING:
    from graph.zoo import Built

DEVICES, MICRO_BATCHES, ITERATIONS = 2, 4, 3
SCHEDULE = "interleaved"
"""Which only pipelines have: of the others a strategy may have one stage."""
BESIDE_MIB = 1372
"""What a process may allocate beside its tensors: interpreter, torch, gloo, and freed memory that it keeps."""
NO_MEMORY = "can't allocate memory"


@dataclass(frozen=True, slots=True)
class Limited:
    """A network with its batch, and the memory of a device: less than all of its weights take with Adam."""

    batch_size: int
    memory_mib: int


NETWORKS = {"gpt2": Limited(8, 1850)}
QUICK = NETWORKS


# As `--model scripts.benchmarks.memory_limited:NAME`.
def gpt2(batch_size: int) -> Built:
    """Return GPT-2 of twelve layers on short sequences: 123.8 million parameters, 1,888 MiB with Adam."""
    from graph.zoo import build

    return build("gpt2", batch_size=batch_size, sequence=128)


def run(*, quick: bool) -> BenchmarkResult:
    """Search and execute; in quick mode one network, by estimated costs.

    Raises:
        SoapstoneError: a command failed.
    """
    table: list[Row] = []
    with database(), tempfile.TemporaryDirectory(prefix="soapstone-bench-") as folder:
        for name, limited in (QUICK if quick else NETWORKS).items():
            table += _rows(name, limited, Path(folder), measures=not quick)
    found = [row for row in table if row["strategy"] == "found"]
    whole = [row for row in table if row["strategy"] != "found"]
    return BenchmarkResult(
        benchmark="memory_limited",
        conditions={"processes": DEVICES, "optimizer": "adam", "MiB beside tensors": BESIDE_MIB},
        measurements=[
            measurement(
                "largest measured peak of a found strategy, of the device's memory",
                100 * max(number(row, "measured MiB") / number(row, "device MiB") for row in found),
                "%",
                at_most=100.0,
            ),
            measurement("fewest stages of a found strategy", min(number(row, "stages") for row in found), "",
                        at_least=2.0),
            measurement("others that are predicted to fit",
                        sum(number(row, "predicted MiB") <= number(row, "device MiB") for row in whole), "",
                        at_most=0.0),
            measurement("others that train within the limit",
                        sum(row["within the limit"] == "trained" for row in whole), "", at_most=0.0),
            measurement("found strategies that do not",
                        sum(row["within the limit"] != "trained" for row in found), "", at_most=0.0),
        ],
        table=table,
        formats=dict.fromkeys(("predicted MiB", "measured MiB", "process MiB", "step ms"), ",.1f"),
    )  # fmt: skip


def _rows(name: str, limited: Limited, folder: Path, *, measures: bool) -> list[Row]:
    """Return what of a network was found and executed, and the same of data parallelism."""
    url = os.environ["SOAPSTONE_DATABASE_URL"]
    model = ("--model", f"{__name__}:{name}", "--batch-size", str(limited.batch_size), "--optimizer", "adam")
    local = ("--device", "cpu", "--devices", str(DEVICES))
    parts = ("--micro-batches", str(MICRO_BATCHES))
    if measures:
        app(url, "profile", *model, *parts, *local)
    topology = folder / f"limited-{limited.memory_mib}.yaml"
    topology.write_text(json.dumps(limited_topology(url, limited.memory_mib)))
    search = app(url, "search", *model, *parts, "--topology", str(topology), "--schedule", SCHEDULE)
    rows = []
    for strategy, count in (
        ("data-parallel", ()),
        ("data-parallel", parts),
        ("single-device", ()),
        ("found", ()),
    ):
        reference = search["predictions"][0]["digest"] if strategy == "found" else strategy
        arguments = ("run", *model, *local, *count, "--strategy", reference, "--on-miss", "estimate",
                     "--iterations", str(ITERATIONS))  # fmt: skip
        free = app(url, *arguments)
        rows.append(_row(name, limited, strategy, free, _within(limited, url, arguments)))
    return rows


def limited_topology(url: str, memory_mib: int) -> dict[str, Any]:
    """Return this machine's devices and links, with less memory, as a topology file has it.

    Raises:
        RuntimeFailure: the links cannot be measured.
    """
    local = app(url, "topology", "show", "local", "--device", "cpu")
    (kind,), link = local["kinds"], local["links"][0]
    return {
        "kinds": {
            kind["name"]: {
                "processor": kind["processor"],
                "peak_flops": {precision: f"{rate} FLOP/s" for precision, rate in kind["peak_flops"]},
                "memory": f"{memory_mib} MiB",
                "memory_bandwidth": f"{kind['memory_bandwidth_bytes_per_s']} B/s",
                "launch_latency": f"{kind['launch_latency_s']} s",
                "contention": dict(local["contention"]).get(kind["name"], 0.0),
            }
        },
        "nodes": {
            "count": 1,
            "devices": {kind["name"]: DEVICES},
            "interconnect": {
                "type": "switch",
                "bandwidth": f"{link['bandwidth_bytes_per_s']} B/s",
                "latency": f"{link['latency_s']} s",
            },
        },
    }


def _within(limited: Limited, url: str, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the report of a run whose processes are limited, None where one of them could not allocate memory.

    Raises:
        RuntimeFailure: it failed for another reason.
    """
    limit_kib = (limited.memory_mib + BESIDE_MIB) * 1024
    try:
        return app(url, *arguments, before=("bash", "-c", f'ulimit -d {limit_kib} && exec "$@"', "limited"))
    except RuntimeFailure as error:
        if NO_MEMORY not in str(error):
            raise
        return None


def _row(
    name: str, limited: Limited, strategy: str, free: dict[str, Any], within: dict[str, Any] | None
) -> Row:
    """Return a row of the table: a run without the limit, or where there is one, the run within it."""
    parts = free["micro_batches"] or {"count": 1, "schedule": None, "stages": 1}
    memory = (within or free)["memory"]
    fullest = max(memory, key=lambda device: device["measured_peak_bytes"])
    return {
        "network": name,
        "strategy": strategy,
        "micro-batches": parts["count"],
        "schedule": parts["schedule"] if parts["stages"] > 1 else None,
        "stages": parts["stages"],
        "device MiB": limited.memory_mib,
        "predicted MiB": fullest["predicted_peak_bytes"] / 2**20,
        "measured MiB": fullest["measured_peak_bytes"] / 2**20,
        "process MiB": max(device["process_bytes"] for device in memory) / 2**20,
        "within the limit": "out of memory" if within is None else "trained",
        "step ms": (within or free)["median_s"] * 1e3,
    }
