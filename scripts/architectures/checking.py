"""The check of one architecture: its import, its splittable share, and its equality under several strategies."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graph.errors import SoapstoneError

if TYPE_CHECKING:
    from types import TracebackType

    from app.services.models.models import ImportedModel
    from graph.operators import OperatorGraph
    from graph.strategy import Strategy
    from tests.runtime.pool import LocalPool

PROCESSES = 2
RANDOM_STRATEGIES = 5
SEED = 7
# Of a process of a pool that answers nothing.
SILENT_S = 60.0
RANDOM = "random"


@dataclass(frozen=True, slots=True)
class ArchitectureResult:
    """The result of one architecture.

    operators, splittable: of the graph; None where it is not imported. refused: why it is not, in one line.
    equal: by strategy, None where loss and all gradients are equal, else why not.
    """

    name: str
    operators: int | None = None
    splittable: float | None = None
    refused: str | None = None
    equal: dict[str, str | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True where everything is equal."""
        return self.refused is None and bool(self.equal) and not any(self.equal.values())

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Return (where, why in one line) of all that failed."""
        if self.refused is not None:
            return [("import", self.refused)]
        return [(title, reason) for title, reason in self.equal.items() if reason is not None]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON document."""
        return asdict(self)


def model_name(name: str) -> str:
    """Return the name of an architecture on a command line."""
    return f"scripts.architectures.catalog:{name}"


def strategies(graph: OperatorGraph, name: str) -> Iterator[tuple[str, Strategy]]:
    """Yield the strategies to execute, with their titles."""
    from search.space.baselines import data_parallel, fsdp
    from tests.runtime.strategies import random_strategy

    yield "data-parallel", data_parallel(graph, PROCESSES)
    yield "fsdp", fsdp(graph, PROCESSES)
    for number in range(RANDOM_STRATEGIES):
        seed = zlib.crc32(f"{name} random {number}".encode())
        yield f"{RANDOM} {number}", random_strategy(graph, PROCESSES, seed)


class Checking:
    """Checks architectures one after another, on the processes of one pool as long as none fails. A context manager."""

    def __init__(self, pool: LocalPool | None = None) -> None:
        self._pool = pool

    def __enter__(self) -> Checking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.close()

    def check(self, name: str) -> ArchitectureResult:
        """Import an architecture as `app` does, and verify it under all strategies on two CPU processes."""
        from app.services.models.models import ModelRequest, import_graph
        from app.services.models.summary import described

        request = ModelRequest(model_name(name), folder=str(Path.cwd()))
        try:
            model = import_graph(request, batch_norm="synchronized")
        except SoapstoneError as error:
            return ArchitectureResult(name, refused=_line(error))
        equal = {title: self._reason(model, strategy) for title, strategy in strategies(model.graph, name)}
        return ArchitectureResult(
            name, len(model.graph.operators), described(model).splittable_share, equal=equal
        )

    def _reason(self, model: ImportedModel, strategy: Strategy) -> str | None:
        """Return why a strategy is not equal to the module, None where it is."""
        from graph.training import Training
        from runtime.jobs.job import Job
        from runtime.jobs.models import ModelReference
        from tests.runtime.pool import LocalPool

        job = Job(
            graph=model.graph,
            strategy=strategy,
            node_of=(0,) * PROCESSES,
            training=Training(model.batch_size),
            model=ModelReference("app.services.models.models:build_model", model.request.factory_keywords),
            seed=SEED,
            iterations=1,
            warmup=0,
            verify=True,
        )
        if self._pool is None:
            self._pool = LocalPool(PROCESSES, timeout_s=SILENT_S)
        try:
            verification = self._pool.run(job).verification
        except SoapstoneError as error:
            # A failure breaks a pool.
            self._pool = None
            return _line(error)
        return None if verification is None else verification.failure


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
