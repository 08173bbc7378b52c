"""Kinds of devices for tests."""

from graph.topology import DeviceKind
from profiler.kinds import datasheet_kinds


def datasheet_kind(name: str) -> DeviceKind:
    """Return the CUDA device kind with a data sheet that is called `name`."""
    return {kind.name: kind for kind in datasheet_kinds()}[name]
