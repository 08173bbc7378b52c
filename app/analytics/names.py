"""Names of topologies and graphs for tables and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from graph.texts import counted


def topology_names(topologies: Iterable[tuple[int, str, int]]) -> dict[int, str]:
    """Return the names of topologies by id; of several of one name with their devices and, of as many, their ids.

    Args:
        topologies: of each its id, name and number of devices; one may come several times.
    """
    alike: dict[str, dict[int, int]] = {}
    for number, name, devices in topologies:
        alike.setdefault(name, {})[number] = devices
    names = {}
    for name, of_name in alike.items():
        of_count = Counter(of_name.values())
        for number, count in of_name.items():
            names[number] = name
            if len(of_name) > 1:
                one = f"topology {number}, " if of_count[count] > 1 else ""
                names[number] = f"{name} ({one}{counted(count, 'device')})"
    return names


def graph_names(graphs: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Return the names of graphs by id; of several of one network with their ids.

    A network has several graphs by the size of its micro-batches, substitutions, and versions of its module.

    Args:
        graphs: of each its id and its network's name; one may come several times.
    """
    names = dict(graphs)
    count = Counter(names.values())
    return {number: f"{name} (graph {number})" if count[name] > 1 else name for number, name in names.items()}
