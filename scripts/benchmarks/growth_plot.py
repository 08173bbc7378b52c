"""Lines over logarithmic axes as an SVG document, panel beside panel; no plotting library needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 40
# Of Okabe and Ito, told apart also by who does not see all colours; dashes differ too.
_STYLES = (("#0072b2", ""), ("#56b4e9", "6 3"), ("#d55e00", ""), ("#e69f00", "6 3"))


@dataclass(frozen=True, slots=True)
class Line:
    """A named line through (x, y); both are above 0. `style` is its place among the styles."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: int


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one axis."""

    title: str
    across: str
    lines: tuple[Line, ...]


def growth_plot(title: str, unit: str, panels: Sequence[Panel]) -> str:
    """Return panels side by side, with the same vertical axis, as an SVG document."""
    values = [y for panel in panels for line in panel.lines for _, y in line.points]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({index * WIDTH} 0)">')
        parts += _panel(panel, f"{title}, {unit}", low, max(high, low + 1))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, title: str, low: int, high: int) -> list[str]:
    ticks = sorted({x for line in panel.lines for x, _ in line.points})
    first, last = log10(ticks[0]), log10(ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (log10(x) - first) / ((last - first) or 1.0)
        up = (log10(y) - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<text x="{LEFT}" y="{TOP - 16}" font-weight="600" fill="#222">{escape(f"{title}: {panel.title}")}</text>'
    ]
    for power in range(low, high + 1):
        _, y = at(ticks[0], 10.0**power)
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{10**power:,}</text>',
        ]
    for tick in ticks:
        x, _ = at(tick, 10.0**low)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle" fill="#555">{tick:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle:g}" y="{HEIGHT - 6}" text-anchor="middle" fill="#555">{escape(panel.across)}</text>'
    )
    for number, line in enumerate(panel.lines):
        colour, dashes = _STYLES[line.style % len(_STYLES)]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        placed = [at(*point) for point in line.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.8"{dashed}/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        # Of each line by its name, from the upper left on down.
        y = TOP + 4 + 14 * number
        parts += [
            f'<line x1="{LEFT + 6}" x2="{LEFT + 30}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="1.8"{dashed}/>',
            f'<text x="{LEFT + 36}" y="{y + 4}" fill="#222">{escape(line.name)}</text>',
        ]
    return parts
