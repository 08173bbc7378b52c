"""The log of every proposal, in batches, and the observer of a running search."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np

from graph.strategy import Configuration, Strategy
from search.algorithms.moves import Part
from search.parallel.fork import ENDING_SIGNALS
from search.space.placements import ProposalOrigin

BATCH = 1024
# A killed search loses no more proposals than those of this time, and of the time that writing the rest takes.
BATCH_S = 0.6


class Proposal(NamedTuple):
    """A proposal of a chain; fields as in `ProposalBatch`."""

    chain: int
    step: int
    operator: int
    configuration: Configuration
    origin: ProposalOrigin
    simulated_ns: int
    bound_ns: int
    accepted: bool
    others: tuple[Part, ...] = ()


def forget(proposal: Proposal) -> None:
    """Record nothing of a proposal."""


@dataclass(frozen=True, slots=True, eq=False)
class ProposalBatch:
    """Proposals in the order in which they were made, as columns.

    chain, step: which proposal it is; steps count from 1 in each chain.
    operator: index of the head whose group changed. configurations: the head's.
    origin: what it was drawn or copied from. simulated_ns: -1 where a device's memory is exceeded, -2 where the
    simulation was stopped at the bound. bound_ns: the makespan up to which it was accepted (of two strategies
    that exceed memory differently, that which exceeds less is).
    others: what proposals that changed more than one group gave to the further ones, by place in the batch.
    snapshots: the chains after the last of these proposals, None in the last batch of an interrupted search.
    """

    chain: np.ndarray[Any, np.dtype[np.int32]]
    step: np.ndarray[Any, np.dtype[np.int64]]
    operator: np.ndarray[Any, np.dtype[np.int32]]
    configurations: list[Configuration]
    origin: list[ProposalOrigin]
    simulated_ns: np.ndarray[Any, np.dtype[np.int64]]
    bound_ns: np.ndarray[Any, np.dtype[np.int64]]
    accepted: np.ndarray[Any, np.dtype[np.bool_]]
    snapshots: tuple[ChainSnapshot, ...] | None = None
    others: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, proposals: Sequence[Proposal], snapshots: tuple[ChainSnapshot, ...] | None) -> ProposalBatch:
        """Return proposals as columns."""
        chain, step, operator, configurations, origin, simulated_ns, bound_ns, accepted, others = zip(
            *proposals, strict=True
        )
        return cls(
            np.array(chain, np.int32),
            np.array(step, np.int64),
            np.array(operator, np.int32),
            list(configurations),
            list(origin),
            np.array(simulated_ns, np.int64),
            np.array(bound_ns, np.int64),
            np.array(accepted, np.bool_),
            snapshots,
            {index: parts for index, parts in enumerate(others) if parts},
        )

    def __len__(self) -> int:
        return len(self.configurations)


@dataclass(frozen=True, slots=True)
class ChainSnapshot:
    """All of a chain but its strategies: these are its current and best one after so many proposals.

    initial, current, best: bytes beyond the devices' memories, and nanoseconds of the step. generator: the state of
    its random numbers, as numpy names it.
    """

    number: int
    start: str
    proposals: int
    accepted: int
    best_at: int
    initial: tuple[int, int]
    current: tuple[int, int]
    best: tuple[int, int]
    generator: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResumedChain:
    """A chain to go on with: its snapshot, and its current and best strategies then."""

    snapshot: ChainSnapshot
    current: Strategy
    best: Strategy


class Observer(Protocol):
    """Hears of starts, proposals and progress of a running search."""

    def on_start(
        self, chain: int, name: str, strategy: Strategy, heads: Mapping[int, ProposalOrigin] | None
    ) -> None:
        """Take the start of a chain, and where it was drawn at random, what the heads' configurations come from."""
        ...

    def on_proposals(self, batch: ProposalBatch) -> None:
        """Take the next proposals; every one is in exactly one batch."""
        ...

    def progress(self, proposals: int, accepted: int, best_s: float) -> None:
        """Take the numbers of proposals made and accepted so far, and the best step time in seconds."""
        ...


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let interrupts (Ctrl-C, SIGTERM, SIGHUP) wait until the block is done, then take effect."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    # Those that do nothing, or end the process at once, are left as they are.
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda came, frame: waiting.append((came, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in waiting:
            # Not sent once more: whoever counts signals would see a second one.
            handlers[number](number, frame)


@dataclass
class Recorder:
    """Collects proposals and hands them to an observer in batches."""

    observer: Observer | None
    snapshots: Callable[[], tuple[ChainSnapshot, ...]] | None = None
    proposals: int = 0
    accepted: int = 0
    _waiting: list[Proposal] = field(default_factory=list)
    _flushed_at: float = field(default_factory=time.monotonic)

    def add(self, proposal: Proposal) -> None:
        """Record one proposal; to be called when all of it is done, since snapshots may be made here."""
        self.proposals += 1
        self.accepted += proposal.accepted
        self.extend((proposal,))

    def extend(self, proposals: Sequence[Proposal]) -> None:
        """Record proposals that are counted already; to be called when all of the last is done."""
        if self.observer is None:
            return
        self._waiting += proposals
        if len(self._waiting) >= BATCH or time.monotonic() - self._flushed_at >= BATCH_S:
            self.flush_whole()

    def flush(self) -> None:
        """Hand over the proposals since the last batch, without snapshots: a proposal may be half done."""
        self._flush(None)

    def flush_whole(self) -> None:
        """Hand over the proposals since the last batch; to be called between two proposals."""
        self._flush(self.snapshots() if self.snapshots is not None else None)

    def _flush(self, snapshots: tuple[ChainSnapshot, ...] | None) -> None:
        if self.observer is None or not self._waiting:
            return
        # An interrupt may come anywhere: half a batch would leave a hole in the record.
        with undisturbed():
            proposals, self._waiting = self._waiting, []
            self._flushed_at = time.monotonic()
            self.observer.on_proposals(ProposalBatch.of(proposals, snapshots))

    def progress(self, best_s: float) -> None:
        """Tell how far the search is."""
        if self.observer is not None:
            self.observer.progress(self.proposals, self.accepted, best_s)
