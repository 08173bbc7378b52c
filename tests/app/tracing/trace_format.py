"""What a Chrome trace must be: the rules of the Trace Event Format, as far as complete events and metadata go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

# What Perfetto takes as the names and the order of processes and threads.
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
Track = tuple[int, int]


def check_trace(document: Mapping[str, Any]) -> dict[str, list[tuple[str, int, int]]]:
    """Return (name, start, end) in ns of each event by "process / thread", having checked every rule."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    names: dict[Track | int, str] = {}
    found: dict[Track, list[tuple[str, int, int]]] = defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            assert set(event["args"]) == {key}
            assert isinstance(event["args"][key], kind)
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["cat"], str)
        start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        assert 0 <= start <= end
        found[event["pid"], event["tid"]].append((event["name"], start, end))
    result = {}
    for (process, thread), events in found.items():
        for (before, _, end), (after, start, _) in pairwise(events):
            assert end <= start, f"{before} and {after} overlap"
        result[f"{names[process]} / {names[process, thread]}"] = events
    assert len(result) == len(found), "two tracks have one name"
    return result
