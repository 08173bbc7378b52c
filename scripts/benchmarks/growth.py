"""How the time of a proposal grows: with the number of devices, and with the number of operators.

A chain from data parallelism, moves of one group, program order, one core, costs by data sheets; a row is timed after
as long a warm-up. Beside it: how long the chain's start takes (task graph and first simulation), and what one
simulation from scratch takes. Without --quick, the plot is written to growth.svg in the current folder.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.benchmarks.growth_plot import Line, Panel, growth_plot
from scripts.benchmarks.result import BenchmarkResult, MeasuredValue, measurement
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


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """A network on so many devices."""

    network: str
    devices: int
    operators: int
    tasks: int
    start_s: float
    full_us: float
    median_us: float
    p95_us: float
    mean_us: float
    peak_bytes: int


def run(*, quick: bool) -> BenchmarkResult:
    """Measure every row; in quick mode three small ones."""
    rows = _over_devices(quick) + _over_layers(quick)
    if not quick:
        Path(PLOT).write_text(_plot(rows))
    return BenchmarkResult(
        benchmark="growth",
        conditions={"topology": "p100-cluster", "start": "data parallel", "moves": "of one group"},
        measurements=[_measurement(row) for row in rows],
        table=[_cells(row) for row in rows],
    )


def _over_devices(quick: bool) -> list[GrowthRow]:  # noqa: FBT001 - private
    rows = []
    for name, batch_size in (("mlp", 64),) if quick else NETWORKS:
        graph = zoo_graph(name, "paper", batch_size)
        rows += [_measured(name, graph, count) for count in ((4, 16) if quick else DEVICES)]
    return rows


def _over_layers(quick: bool) -> list[GrowthRow]:  # noqa: FBT001 - private
    rows = []
    for layers in (1,) if quick else LAYERS:
        sizes = {"layers": layers, **({"hidden": 64, "heads": 4, "sequence": 64} if quick else {})}
        rows.append(
            _measured(_layers_name(layers), zoo_graph("gpt2", "paper", 64, **sizes), DEVICES_OF_LAYERS)
        )
    return rows


def _layers_name(layers: int) -> str:
    return f"gpt2, {layers} layer{'s' if layers > 1 else ''}"


def _measured(name: str, graph: OperatorGraph, device_count: int) -> GrowthRow:
    from runtime.observe.peak_memory import process_peak_bytes
    from scripts.benchmarks.simulator import builder_of, chain_of, started, stepping, timed
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
    row = GrowthRow(
        network=name,
        devices=device_count,
        operators=len(graph.operators),
        tasks=layout.task_count,
        start_s=start_s,
        full_us=full_s * 1e6,
        median_us=statistics.median(times_s) * 1e6,
        p95_us=sorted(times_s)[int(0.95 * len(times_s))] * 1e6,
        mean_us=statistics.fmean(times_s) * 1e6,
        peak_bytes=process_peak_bytes(),
    )
    # The largest take minutes: whoever stops the benchmark keeps what it has.
    print(", ".join(f"{key} {value}" for key, value in _cells(row).items()), file=sys.stderr, flush=True)
    return row


def _plot(rows: list[GrowthRow]) -> str:
    over_devices = Panel(
        "over devices",
        "devices",
        tuple(
            line
            for style, (name, _) in enumerate(NETWORKS)
            for line in _lines([row for row in rows if row.network == name], name, "devices", style)
        ),
    )
    of_layers = [row for row in rows if row.network.startswith("gpt2, ")]
    over_operators = Panel(
        f"GPT-2 of 1 to 24 layers on {DEVICES_OF_LAYERS} devices",
        "operators",
        _lines(of_layers, "gpt2", "operators", 1),
    )
    return growth_plot("Time of a proposal", "us", (over_devices, over_operators))


def _lines(rows: list[GrowthRow], name: str, across: str, style: int) -> tuple[Line, ...]:
    return (
        Line(f"{name}: a proposal", tuple((getattr(row, across), row.mean_us) for row in rows), 2 * style),
        Line(
            f"{name}: from scratch", tuple((getattr(row, across), row.full_us) for row in rows), 2 * style + 1
        ),
    )


def _measurement(row: GrowthRow) -> MeasuredValue:
    return measurement(f"{row.network}, {row.devices} devices: a proposal, mean", row.mean_us, "us")


def _cells(row: GrowthRow) -> dict[str, str]:
    return {
        "network": row.network,
        "devices": str(row.devices),
        "operators": str(row.operators),
        "tasks": f"{row.tasks:,}",
        "start s": f"{row.start_s:.2f}",
        "from scratch us": f"{row.full_us:,.0f}",
        "median us": f"{row.median_us:,.0f}",
        "p95 us": f"{row.p95_us:,.0f}",
        "mean us": f"{row.mean_us:,.0f}",
        "process GB": f"{row.peak_bytes / 1e9:.2f}",
    }
