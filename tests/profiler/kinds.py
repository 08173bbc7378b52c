"""Kinds of devices, and links of probes, for tests."""

from graph.topology import DeviceKind
from profiler.kinds import datasheet_kinds
from profiler.links import LinkMeasurement, LinkProbe


def datasheet_kind(name: str) -> DeviceKind:
    """Return the CUDA device kind with a data sheet that is called `name`."""
    return {kind.name: kind for kind in datasheet_kinds()}[name]


def slowest_link(probe: LinkProbe, pattern: str) -> LinkMeasurement:
    """Return the measurement of a pattern over the most devices; among equals, the slowest."""
    links = [link for link in probe.links if link.pattern == pattern]
    return max(links, key=lambda link: (link.group_size, -link.bandwidth_bytes_per_s))
