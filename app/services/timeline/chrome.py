"""Timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Source: "Trace Event Format", Google: complete events ("X"), times in microseconds, names of processes and threads as
metadata ("M"). A device is a process with a thread for each of its timelines; the links are one process more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from app.services.timeline.timeline import Slice, StepTimeline

LINKS = "links"


def chrome_trace(timelines: Mapping[str, StepTimeline], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trace document of timelines of one strategy, side by side.

    Args:
        timelines: by name, such as "simulated"; all have as many devices.
        facts: about the whole trace, JSON values.
    """
    events: list[dict[str, Any]] = []
    count = max(len(timeline.devices) for timeline in timelines.values())
    for device in range(count):
        process = device + 1
        events += _process(process, f"device {device}")
        for thread, (name, timeline) in enumerate(timelines.items(), start=1):
            if device < len(timeline.devices):
                events += _thread(process, thread, name)
                events += _slices(process, thread, timeline.devices[device])
    process = count + 1
    links = [
        (f"{link} ({name})" if len(timelines) > 1 else link, slices)
        for name, timeline in timelines.items()
        for link, slices in timeline.links.items()
        if slices
    ]
    if links:
        events += _process(process, LINKS)
    for thread, (link, slices) in enumerate(links, start=1):
        events += _thread(process, thread, link)
        events += _slices(process, thread, slices)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(facts)}


def write_trace(document: Mapping[str, Any], file: Path) -> None:
    """Write a trace document."""
    with file.open("w", encoding="utf-8") as stream:
        json.dump(document, stream, separators=(",", ":"), allow_nan=False)
        stream.write("\n")


def _process(process: int, name: str) -> list[dict[str, Any]]:
    return [
        _metadata("process_name", process, 0, {"name": name}),
        _metadata("process_sort_index", process, 0, {"sort_index": process}),
    ]


def _thread(process: int, thread: int, name: str) -> list[dict[str, Any]]:
    return [
        _metadata("thread_name", process, thread, {"name": name}),
        _metadata("thread_sort_index", process, thread, {"sort_index": thread}),
    ]


def _metadata(name: str, process: int, thread: int, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": dict(values)}


def _slices(process: int, thread: int, slices: Iterable[Slice]) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "pid": process,
            "tid": thread,
            "ts": span.start_ns / 1000,
            "dur": span.duration_ns / 1000,
            "args": {"about": span.subject, **span.details},
        }
        for span in slices
    ]
