"""Throughput over devices: one panel a network, one line a strategy.

Samples a second and device over devices on a logarithmic axis, as FlexFlow (arXiv:1807.05358) plots them: a level line
scales perfectly.
"""

from __future__ import annotations

from collections.abc import Sequence

from scripts.benchmarks.line_plot import Panel, line_plot
from scripts.studies.cells import PAPER_NETWORKS
from scripts.studies.results import FOUND, StudyResult

LINES = {"found": FOUND, "data parallel": "data-parallel", "expert": "expert", "OptCNN": "optcnn"}


def throughput_plot(results: Sequence[StudyResult], title: str) -> str:
    """Return the plot of the cells of one cluster as an SVG document."""
    panels = []
    for network in PAPER_NETWORKS:
        own = [result for result in results if result.cell.network == network]
        own.sort(key=lambda result: result.cell.devices)
        if own:
            lines = {name: _points(line, own) for name, line in LINES.items()}
            panels.append(Panel(network, "devices", lines))
    return line_plot(title, "samples a second and device", panels, logarithmic=False)


def _points(line: str, results: Sequence[StudyResult]) -> list[tuple[float, float]]:
    """Return (devices, samples a second and device) where the strategy is known and fits."""
    points = []
    for result in results:
        rate = result.throughput(result.expert if line == "expert" else line)
        if rate is not None:
            points.append((float(result.cell.devices), rate / result.cell.devices))
    return points
