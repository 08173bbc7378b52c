"""A network imported in a process beside the command's, which loads meanwhile what it needs afterwards.

The import takes longest of a first search, and most of it is torch, which the search itself never needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection

from app.services.models import graph_cache
from app.services.models.models import ImportedModel, ModelRequest, import_graph
from graph.errors import UsageError
from profiler.pinning import usable_cores
from search.parallel.fork import ForkedProcess, can_fork, fork


@contextmanager
def importing(
    request: ModelRequest, *, batch_norm: str, processes: int | None
) -> Iterator[Callable[[], ImportedModel]]:
    """Yield a function that returns the imported network, as `import_graph` does.

    A network of the zoo whose graph is not cached is imported in a process beside this one, which is gone at the end of
    the context.

    Args:
        request: the network.
        batch_norm: as for `import_graph`.
        processes: how many processes the command may have; None: as many as it has cores.

    Raises:
        UsageError: there is no such network.
    """
    key = graph_cache.key_of(request, batch_norm)
    cached = None if key is None else graph_cache.load(key)
    if cached is not None:
        model = ImportedModel(request, *cached)
        yield lambda: model
        return
    beside: ForkedProcess | None = None
    # A copy of a process with torch would lack its threads.
    fits = can_fork() and "torch" not in sys.modules and (processes or len(usable_cores())) > 1
    if fits and key is not None:
        with suppress(UsageError):  # no process can be had
            beside = fork(partial(_send, request, batch_norm))

    def imported() -> ImportedModel:
        if beside is not None:
            with suppress(EOFError):
                answer = beside.connection.recv()
                if isinstance(answer, ImportedModel):
                    return answer
        # What failed beside fails here again, and is said.
        return import_graph(request, batch_norm=batch_norm)

    try:
        yield imported
    finally:
        if beside is not None:
            beside.end()


def _send(request: ModelRequest, batch_norm: str, connection: Connection) -> None:
    connection.send(import_graph(request, batch_norm=batch_norm))
