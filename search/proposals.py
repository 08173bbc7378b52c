"""The record of every proposal, in batches, and what a search tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from graph.strategy import Configuration

BATCH = 1024
CODE = np.dtype("<u4")


@dataclass(frozen=True, slots=True, eq=False)
class ProposalBatch:
    """Proposals in the order in which they were made, as columns.

    chain, step: which proposal it is; steps count from 1 in each chain.
    operator: index of the head whose group changed. configuration: the head's, see `encode_configuration`.
    simulated_ns: -1 where a device's memory is exceeded. bound_ns: the makespan up to which it was accepted
    (of two strategies that exceed memory differently, that which exceeds less is).
    """

    chain: np.ndarray[Any, np.dtype[np.int32]]
    step: np.ndarray[Any, np.dtype[np.int64]]
    operator: np.ndarray[Any, np.dtype[np.int32]]
    configuration: list[bytes]
    simulated_ns: np.ndarray[Any, np.dtype[np.int64]]
    bound_ns: np.ndarray[Any, np.dtype[np.int64]]
    accepted: np.ndarray[Any, np.dtype[np.bool_]]

    def __len__(self) -> int:
        return len(self.configuration)


def encode_configuration(configuration: Configuration) -> bytes:
    """Return a configuration as bytes: number of degrees, degrees, devices, each four bytes, little-endian."""
    items = (len(configuration.degrees), *configuration.degrees, *configuration.devices)
    return np.array(items, CODE).tobytes()


def decode_configuration(code: bytes) -> Configuration:
    """Return the configuration that `encode_configuration` wrote."""
    items = [int(item) for item in np.frombuffer(code, CODE)]
    return Configuration(tuple(items[1 : 1 + items[0]]), tuple(items[1 + items[0] :]))


class Observer(Protocol):
    """What a search tells while it runs."""

    def on_proposals(self, batch: ProposalBatch) -> None:
        """Take the next proposals; every one is in exactly one batch."""
        ...

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Take the numbers of proposals made and accepted so far, and the best step time in seconds."""
        ...


@dataclass
class Recorder:
    """Collects proposals and hands them to an observer in batches."""

    observer: Observer | None
    proposals: int = 0
    accepted: int = 0
    _rows: list[tuple[int, int, int, bytes, int, int, bool]] = field(default_factory=list)

    def add(
        self,
        chain: int,
        step: int,
        operator: int,
        configuration: Configuration,
        simulated_ns: int,
        bound_ns: int,
        *,
        accepted: bool,
    ) -> None:
        """Record one proposal."""
        self.proposals += 1
        self.accepted += accepted
        if self.observer is None:
            return
        code = encode_configuration(configuration)
        self._rows.append((chain, step, operator, code, simulated_ns, bound_ns, accepted))
        if len(self._rows) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Hand over what was recorded since the last batch."""
        if self.observer is None or not self._rows:
            return
        rows, self._rows = self._rows, []
        chain, step, operator, configuration, simulated_ns, bound_ns, accepted = zip(*rows, strict=True)
        self.observer.on_proposals(
            ProposalBatch(
                np.array(chain, np.int32),
                np.array(step, np.int64),
                np.array(operator, np.int32),
                list(configuration),
                np.array(simulated_ns, np.int64),
                np.array(bound_ns, np.int64),
                np.array(accepted, np.bool_),
            )
        )

    def progress(self, best_s: float) -> None:
        """Tell how far the search is."""
        if self.observer is not None:
            self.observer.progress(self.proposals, self.accepted, best_s)
