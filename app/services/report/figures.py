"""The report's figures, as documents for plotly.js.

plotly.js takes a little HTML in its texts, so every name from the database goes through `plain`.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from app.services.report.data import Costs, MeasuredStrategy, SearchCurve
from app.services.timeline.timeline import StepTimeline

Figure = dict[str, Any]

LONGEST_NAME = 80
TARGETS_SHOWN = 16
TRACKS_SHOWN = 64
SLICES_SHOWN = 20_000
KIND_COLORS = {
    "forward": "#2f7ed8",
    "backward": "#0d4f8b",
    "recompute": "#76a5e3",
    "update": "#7a5195",
    "wait": "#d9d9d9",
    "transfer": "#f28e2b",
    "collective": "#c44e52",
    "copy": "#e9c46a",
    "runtime": "#8d99a6",
}


def plain(name: str) -> str:
    """Return a name as plotly.js shows it letter by letter, shortened where it is very long."""
    shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    # Between two dollar signs it expects TeX.
    return html.escape(shown, quote=False).replace("$", "&#36;")


def drawing(data: Sequence[Mapping[str, Any]], height: int, x: str, y: str, **more: Any) -> Figure:
    """Return a figure in the layout that all share, with titles of the axes."""
    layout = {
        "height": height,
        "margin": {"l": 80, "r": 20, "t": 30, "b": 60},
        "hovermode": "closest",
        "template": {"layout": {"font": {"family": "system-ui, sans-serif", "size": 13}}},
        "xaxis": {"title": {"text": x}, **more.pop("xaxis", {})},
        "yaxis": {"title": {"text": y}, **more.pop("yaxis", {})},
        **more,
    }
    return {"data": list(data), "layout": layout}


def scatter(mode: str, name: str, **more: Any) -> dict[str, Any]:
    """Return lines or markers of a figure."""
    return {"type": "scatter", "mode": mode, "name": name, **more}


def search_curves(curves: Sequence[SearchCurve]) -> Figure:
    """Return the figure of the best step time over proposals, a line a search; a button shows it over time."""
    data, over_time = [], []
    for curve in curves:
        best = [None if time_s is None else time_s * 1e3 for time_s in curve.best_so_far_s]
        total = curve.made[-1] or 1
        seconds = [count / total * (curve.seconds or 0.0) for count in curve.made]
        over_time.append(seconds)
        data.append(
            scatter(
                "lines",
                plain(f"search {curve.id}: {curve.model} on {curve.topology}, batch {curve.training}"),
                line={"shape": "hv"},
                x=list(curve.made),
                y=best,
                text=[
                    f"{count} proposals, about {at:.1f} s"
                    for count, at in zip(curve.made, seconds, strict=True)
                ],
                hoverinfo="text+y+name",
            )
        )
    menu = _menu({"proposals": [curve["x"] for curve in data], "seconds": over_time})
    legend = {"orientation": "h", "y": -0.2}
    return drawing(
        data, 460, "proposals", "best step so far (ms)", updatemenus=[menu], showlegend=True, legend=legend
    )


def predicted_against_measured(pairs: Sequence[MeasuredStrategy]) -> Figure:
    """Return the figure of predicted and measured step times, a point a strategy; the diagonal is agreement."""
    groups: dict[str, list[MeasuredStrategy]] = defaultdict(list)
    for pair in pairs:
        groups[f"{pair.model} on {pair.topology}"].append(pair)
    ends = [value * 1e3 for pair in pairs for value in (pair.predicted_s, pair.measured_s)]
    low, high = min(ends) * 0.8, max(ends) * 1.25
    line = scatter(
        "lines",
        "predicted = measured",
        x=[low, high],
        y=[low, high],
        line={"color": "#999", "dash": "dot"},
        hoverinfo="skip",
    )
    points = [
        scatter(
            "markers",
            plain(name),
            marker={"size": 9},
            x=[strategy.predicted_s * 1e3 for strategy in group],
            y=[strategy.measured_s * 1e3 for strategy in group],
            text=[
                f"{plain(strategy.source)} {strategy.strategy[:12]}, batch {plain(strategy.training)}<br>predicted "
                f"{strategy.predicted_s * 1e3:.3f} ms, measured {strategy.measured_s * 1e3:.3f} ms<br>"
                f"error {(strategy.predicted_s / strategy.measured_s - 1) * 100:+.1f} %"
                for strategy in group
            ],
            hoverinfo="text+name",
        )
        for name, group in sorted(groups.items())
    ]
    axes = {"xaxis": {"type": "log"}, "yaxis": {"type": "log"}, "showlegend": True}
    return drawing([line, *points], 520, "predicted step (ms)", "measured step, median (ms)", **axes)


def timeline(timelines: Mapping[str, StepTimeline]) -> Figure:
    """Return the figure of the devices' and links' slices as bars, the timelines of a device one below the other."""
    tracks = _tracks(timelines)[:TRACKS_SHOWN]
    by_kind: dict[str, dict[str, list[Any]]] = {}
    slices = [(track, span) for track, (_, spans) in enumerate(tracks) for span in spans]
    if len(slices) > SLICES_SHOWN:
        slices = sorted(slices, key=lambda item: -item[1].duration_ns)[:SLICES_SHOWN]
    for track, span in slices:
        column = by_kind.setdefault(span.kind, {"x": [], "y": [], "text": []})
        start, end = span.start_ns / 1e6, span.end_ns / 1e6
        text = f"{plain(span.name)}<br>{start:.3f} to {end:.3f} ms, {end - start:.3f} ms"
        # A line with a gap after it: one path holds all bars of a kind. Hover finds its points.
        column["x"] += [start, (start + end) / 2, end, None]
        column["y"] += [track, track, track, None]
        column["text"] += [text, text, text, ""]
    data = [
        scatter(
            "lines",
            kind,
            line={"width": 14, "color": color, "simplify": False},
            hoverinfo="text",
            **by_kind[kind],
        )
        for kind, color in KIND_COLORS.items()
        if kind in by_kind
    ]
    ticks = {"tickvals": list(range(len(tracks))), "ticktext": [plain(name) for name, _ in tracks]}
    axis = {**ticks, "range": [len(tracks) - 0.5, -0.5], "automargin": True}
    height = 160 + 28 * max(len(tracks), 4)
    return drawing(data, height, "time in the step (ms)", "", yaxis=axis, showlegend=True)


def _tracks(timelines: Mapping[str, StepTimeline]) -> list[tuple[str, Sequence[Any]]]:
    count = max(len(timeline.devices) for timeline in timelines.values())
    tracks: list[tuple[str, Sequence[Any]]] = [
        (f"device {device}, {name}", timeline.devices[device])
        for device in range(count)
        for name, timeline in timelines.items()
        if device < len(timeline.devices)
    ]
    for name, timeline in timelines.items():
        tracks += [(f"{link}, {name}", slices) for link, slices in timeline.links.items() if slices]
    return tracks


def memory(peaks: Mapping[str, Sequence[int]], capacities: Sequence[int]) -> Figure:
    """Return the figure of the predicted peak memory of every device, a bar a strategy."""
    names = [f"device {device}" for device in range(len(capacities))]
    data = [
        {
            "type": "bar",
            "name": plain(strategy),
            "x": names,
            "y": [size / 2**20 for size in sizes],
            "text": [
                f"{size / 2**20:.1f} MiB, {size / capacity * 100:.1f} % of {capacity / 2**20:.0f} MiB"
                for size, capacity in zip(sizes, capacities, strict=True)
            ],
            "textposition": "none",
            "hoverinfo": "text+name",
        }
        for strategy, sizes in peaks.items()
    ]
    return drawing(data, 400, "", "peak memory (MiB)", barmode="group", showlegend=True)


def cost_curves(costs: Costs) -> Figure:
    """Return the figure of measured operator costs over size, a line a type and phase; buttons choose the size."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for point in costs.points:
        groups[point.target, point.phase].append(point)
    counts: dict[str, int] = defaultdict(int)
    for (target, _), points in groups.items():
        counts[target] += len(points)
    shown = sorted(counts, key=lambda target: (-counts[target], target))[:TARGETS_SHOWN]
    data: list[dict[str, Any]] = []
    by_size: dict[str, list[list[int]]] = {"bytes": [], "flops": []}
    for number, target in enumerate(shown):
        for phase in sorted({phase for name, phase in groups if name == target}):
            points = sorted(groups[target, phase], key=lambda point: (point.bytes, point.flops, point.time_s))
            for size, columns in by_size.items():
                columns.append([getattr(point, size) for point in points])
            data.append(
                scatter(
                    "lines+markers",
                    plain(f"{target} {phase}"),
                    x=[point.bytes for point in points],
                    y=[point.time_s * 1e6 for point in points],
                    marker={"size": 6, "symbol": "circle" if phase == "forward" else "diamond-open"},
                    line={"width": 0.7},
                    visible=True if number < TARGETS_SHOWN // 2 else "legendonly",
                )
            )
    axes = {"xaxis": {"type": "log"}, "yaxis": {"type": "log"}, "updatemenus": [_menu(by_size)]}
    return drawing(data, 560, "bytes", "time, median (us)", showlegend=True, **axes)


def _menu(columns: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return buttons, each of which draws all lines over other columns and calls the axis like itself."""
    return {
        "type": "buttons",
        "direction": "right",
        "buttons": [
            {"label": label, "method": "update", "args": [{"x": chosen}, {"xaxis.title.text": label}]}
            for label, chosen in columns.items()
        ],
        "x": 1,
        "xanchor": "right",
        "y": 1.08,
        "yanchor": "bottom",
    }
