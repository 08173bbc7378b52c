"""How the time of a proposal grows: with the number of devices, and with the number of operators.

A chain from data parallelism, moves of one group, program order, one core, costs by data sheets; a row is timed after
as long a warm-up. Beside it: how long the chain's start takes (task graph and first simulation), and what one
simulation from scratch takes. Without --quick, the plot is written to growth.svg in the current folder.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.benchmarks.line_plot import Panel, line_plot
from scripts.benchmarks.result import BenchmarkResult, Row, cell_text, measurement, number
from scripts.benchmarks.zoo import zoo_graph

if TYPE_CHECKING:
    from graph.operators import OperatorGraph

DEVICES = (4, 16, 64, 256, 1024)
LAYERS = (1, 2, 4, 8, 16, 24)
DEVICES_OF_LAYERS = 16
# Zoo name, batch size and preset of each network over devices.
NETWORKS = (("inception", 1024), ("gpt2", 1024))
SECONDS, LEAST_PROPOSALS = 4.0, 5
PLOT = "growth.svg"


FORMATS = {
    "tasks": ",d", "start s": ".2f", "from scratch us": ",.0f", "median us": ",.0f", "p95 us": ",.0f",
    "mean us": ",.0f", "process GB": ".2f",
}  # fmt: skip


def run(*, quick: bool) -> BenchmarkResult:
    """Measure every row; in quick mode three small ones."""
    rows = _over_devices(quick) + _over_layers(quick)
    if not quick:
        Path(PLOT).write_text(_plot(rows))
    return BenchmarkResult(
        benchmark="growth",
        conditions={"topology": "p100-cluster", "start": "data parallel", "moves": "of one group"},
        measurements=[
            measurement(
                f"{row['network']}, {row['devices']} devices: a proposal, mean", number(row, "mean us"), "us"
            )
            for row in rows
        ],
        table=rows,
        formats=FORMATS,
    )


def _over_devices(quick: bool) -> list[Row]:  # noqa: FBT001 - private
    rows = []
    for name, batch_size in (("mlp", 64),) if quick else NETWORKS:
        graph = zoo_graph(name, "paper", batch_size)
        rows += [_measured(name, graph, count) for count in ((4, 16) if quick else DEVICES)]
    return rows


def _over_layers(quick: bool) -> list[Row]:  # noqa: FBT001 - private
    rows = []
    for layers in (1,) if quick else LAYERS:
        sizes = {"layers": layers, **({"hidden": 64, "heads": 4, "sequence": 64} if quick else {})}
        rows.append(
            _measured(_layers_name(layers), zoo_graph("gpt2", "paper", 64, **sizes), DEVICES_OF_LAYERS)
        )
    return rows


def _layers_name(layers: int) -> str:
    return f"gpt2, {layers} layer{'s' if layers > 1 else ''}"


def _measured(name: str, graph: OperatorGraph, device_count: int) -> Row:
    from runtime.observe.measured_peak import process_peak_bytes
    from scripts.benchmarks.simulator import builder_of, chain_of, microseconds, started, stepping, timed
    from search.algorithms.moves import ONE_GROUP, Moves

    strategy = started(graph, device_count, "data parallel")
    began = time.perf_counter()
    chain = chain_of(builder_of(graph, device_count), strategy, "program")
    start_s = time.perf_counter() - began
    step = stepping(chain, Moves(graph, device_count, ONE_GROUP))
    timed(step, SECONDS, LEAST_PROPOSALS)
    times_s = timed(step, SECONDS, LEAST_PROPOSALS)
    layout = builder_of(graph, device_count).layout(strategy)
    layout.run("program")
    full_s = statistics.median(timed(lambda: layout.run("program"), SECONDS / 8, LEAST_PROPOSALS))
    row: Row = {
        "network": name,
        "devices": device_count,
        "operators": len(graph.operators),
        "tasks": layout.task_count,
        "start s": start_s,
        "from scratch us": full_s * 1e6,
        **microseconds(times_s),
        "process GB": process_peak_bytes() / 1e9,
    }
    # The largest take minutes: whoever stops the benchmark keeps what it has.
    cells = (f"{name} {cell_text(value, FORMATS.get(name))}" for name, value in row.items())
    print(", ".join(cells), file=sys.stderr, flush=True)
    return row


def _plot(rows: list[Row]) -> str:
    of_layers = [row for row in rows if str(row["network"]).startswith("gpt2, ")]
    over_devices = [
        _lines([row for row in rows if row["network"] == name], name, "devices") for name, _ in NETWORKS
    ]
    over_operators = f"GPT-2 of 1 to 24 layers on {DEVICES_OF_LAYERS} devices"
    panels = (
        Panel("over devices", "devices", over_devices[0] | over_devices[1]),
        Panel(over_operators, "operators", _lines(of_layers, "gpt2", "operators")),
    )
    return line_plot("Time of a proposal", "us", panels, logarithmic=True)


def _lines(rows: list[Row], name: str, across: str) -> dict[str, list[tuple[float, float]]]:
    columns = {"a proposal": "mean us", "from scratch": "from scratch us"}
    return {
        f"{name}: {what}": [(number(row, across), number(row, column)) for row in rows]
        for what, column in columns.items()
    }
