"""Throughput over devices as an SVG file: one panel a network, one line a strategy; no plotting library needed.

Samples a second and device over devices on a logarithmic axis, as FlexFlow (arXiv:1807.05358) plots them: a level line
scales perfectly. Colours are of Okabe and Ito, told apart also by who does not see all of them; marks differ in shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log2, log10

from scripts.studies.cells import PAPER_NETWORKS
from scripts.studies.results import FOUND, StudyResult

WIDTH, HEIGHT = 300, 220
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 28, 34
COLUMNS = 3
LEGEND = 34
# Name in the legend, colour, mark, dashes.
LINES = {
    FOUND: ("found", "#0072b2", "circle", ""),
    "data-parallel": ("data parallel", "#d55e00", "square", "6 3"),
    "expert": ("expert", "#009e73", "triangle", "2 3"),
    "optcnn": ("OptCNN", "#cc79a7", "diamond", "8 3 2 3"),
}

Point = tuple[float, float]


def throughput_plot(results: Sequence[StudyResult], title: str) -> str:
    """Return the plot of the cells of one cluster as an SVG document."""
    networks = [name for name in PAPER_NETWORKS if any(result.cell.network == name for result in results)]
    rows = -(-len(networks) // COLUMNS)
    width, height = COLUMNS * WIDTH, LEGEND + rows * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(),
    ]
    for index, name in enumerate(networks):
        x, y = index % COLUMNS * WIDTH, LEGEND + index // COLUMNS * HEIGHT
        own = sorted(
            (result for result in results if result.cell.network == name),
            key=lambda result: result.cell.devices,
        )
        parts.append(f'<g transform="translate({x} {y})">')
        parts += _panel(name, own)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, results: Sequence[StudyResult]) -> list[str]:
    lines = {line: _points(line, results) for line in LINES}
    counts = [result.cell.devices for result in results]
    top = max((rate for points in lines.values() for _, rate in points), default=1.0)
    step = nice_step(top)
    ceiling = step * (floor(top / step) + 1)

    def at(point: Point) -> Point:
        span = log2(counts[-1] / counts[0]) or 1.0
        across = log2(point[0] / counts[0]) / span if counts[-1] > counts[0] else 0.5
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - point[1] / ceiling * (HEIGHT - TOP - BOTTOM),
        )

    parts = [f'<text x="{LEFT}" y="{TOP - 10}" font-weight="600" fill="#222">{escape(name)}</text>']
    tick = 0.0
    while tick < ceiling * 1.0001:
        _, y = at((counts[0], tick))
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick:,.10g}</text>',
        ]
        tick += step
    for count in counts:
        x, _ = at((count, 0.0))
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle" fill="#555">{count}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{HEIGHT - 5}" text-anchor="middle" fill="#555">devices</text>')
    # What was found is drawn last, on top.
    for line, points in reversed(lines.items()):
        _, colour, mark, dashes = LINES[line]
        placed = [at(point) for point in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.8"'
            + (f' stroke-dasharray="{dashes}"' if dashes else "")
            + "/>"
        )
        parts += [_mark(mark, colour, x, y) for x, y in placed]
    return parts


def _points(line: str, results: Sequence[StudyResult]) -> list[Point]:
    """Return (devices, samples a second and device) where the strategy is known and fits."""
    points = []
    for result in results:
        rate = result.throughput(result.expert if line == "expert" else line)
        if rate is not None:
            points.append((float(result.cell.devices), rate / result.cell.devices))
    return points


def nice_step(top: float) -> float:
    """Return the distance of ticks, 1, 2 or 5 times a power of ten, for three to seven of them up to `top`."""
    most = top / 3 * (1 + 1e-9)  # 0.3 / 3 is less than 0.1
    power = 10.0 ** floor(log10(most))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= most)


def _legend() -> list[str]:
    parts, x = [], LEFT
    for name, colour, mark, dashes in LINES.values():
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts += [
            f'<line x1="{x}" x2="{x + 30}" y1="18" y2="18" stroke="{colour}" stroke-width="1.8"{dashed}/>',
            _mark(mark, colour, x + 15, 18),
            f'<text x="{x + 36}" y="22" fill="#222">{escape(name)}</text>',
        ]
        x += 130
    parts.append(f'<text x="{x}" y="22" fill="#555">samples a second and device</text>')
    return parts


def _mark(shape: str, colour: str, x: float, y: float) -> str:
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}"/>'
    if shape == "square":
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{colour}"/>'
    corners = {
        "triangle": ((0, -4), (4, 3), (-4, 3)),
        "diamond": ((0, -4.4), (4.4, 0), (0, 4.4), (-4.4, 0)),
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{colour}"/>'
