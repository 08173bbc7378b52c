"""Lines over logarithmic axes as an SVG document, panel beside panel; no plotting library needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT, LEGEND, KEY_WIDTH = 300, 220, 34, 180
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 28, 34
COLUMNS = 3
# Colours of Okabe and Ito, told apart also by who does not see all of them, and dashes.
STYLES = (("#0072b2", ""), ("#d55e00", "6 3"), ("#009e73", "2 3"), ("#cc79a7", "8 3 2 3"))


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one axis: the points (x, y) of each by its name, x above 0; the first line is drawn on top."""

    title: str
    across: str
    lines: dict[str, list[tuple[float, float]]]


def line_plot(title: str, unit: str, panels: Sequence[Panel], *, logarithmic: bool) -> str:
    """Return panels side by side as an SVG document, with one legend.

    logarithmic: the vertical axis, which all panels share then; else each has its own from 0.
    """
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    columns = min(COLUMNS, len(panels))
    width = max(columns * WIDTH, LEFT + KEY_WIDTH * len(names))
    height = LEGEND + -(-len(panels) // COLUMNS) * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img">',
        f"<title>{escape(f'{title}, {unit}')}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, name in enumerate(names):
        x, stroke = LEFT + number * KEY_WIDTH, _stroke(number)
        parts.append(f'<line x1="{x}" x2="{x + 30}" y1="18" y2="18" {stroke}/>')
        parts.append(_text(x + 36, 22, name, "start"))
    everything = [y for panel in panels for points in panel.lines.values() for _, y in points]
    for index, panel in enumerate(panels):
        own = [y for points in panel.lines.values() for _, y in points] or [1.0]
        ticks = decades(everything) if logarithmic else round_ticks(max(own))
        at = f"{index % COLUMNS * WIDTH} {LEGEND + index // COLUMNS * HEIGHT}"
        parts += [f'<g transform="translate({at})">', *_panel(panel, ticks, names, logarithmic), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, ticks: list[float], names: list[str], logarithmic: bool) -> list[str]:  # noqa: FBT001 - private
    counts = sorted({x for points in panel.lines.values() for x, _ in points}) or [1.0]

    def share(value: float, low: float, high: float, *, log: bool) -> float:
        if log:
            value, low, high = log10(value), log10(low), log10(high)
        return (value - low) / (high - low) if high > low else 0.5

    def at(x: float, y: float) -> tuple[float, float]:
        across = share(x, counts[0], counts[-1], log=True)
        up = share(y, ticks[0], ticks[-1], log=logarithmic)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="{TOP - 10}" font-weight="600" fill="#222">{escape(panel.title)}</text>']
    for tick in ticks:
        _, y = at(counts[0], tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick:,.10g}", "end"))
    parts += [
        _text(at(count, ticks[-1])[0], HEIGHT - BOTTOM + 15, f"{count:g}", "middle") for count in counts
    ]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, panel.across, "middle"))
    for name, points in reversed(panel.lines.items()):
        number = names.index(name)
        placed = [at(*point) for point in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{joined}" {_stroke(number)}/>')
        colour, _ = STYLES[number % len(STYLES)]
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#555">{escape(text)}</text>'


def _stroke(number: int) -> str:
    colour, dashes = STYLES[number % len(STYLES)]
    return f'fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes or "none"}"'


def decades(values: Sequence[float]) -> list[float]:
    """Return the powers of ten around some values."""
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return [10.0**power for power in range(low, max(high, low + 1) + 1)]


def round_ticks(top: float) -> list[float]:
    """Return ticks from 0 to above `top`."""
    step = nice_step(top)
    return [step * number for number in range(floor(top / step) + 2)]


def nice_step(top: float) -> float:
    """Return the distance of ticks, 1, 2 or 5 times a power of ten, for three to seven of them up to `top`."""
    most = top / 3 * (1 + 1e-9)  # 0.3 / 3 is less than 0.1
    power = 10.0 ** floor(log10(most))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= most)
