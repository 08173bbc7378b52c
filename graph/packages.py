"""The packages that Soapstone consists of, by their names at the top level."""

PACKAGES = ("app", "graph", "profiler", "runtime", "search")
