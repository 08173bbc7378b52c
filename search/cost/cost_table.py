"""Costs of local calls and optimizer updates, in integer nanoseconds, asked for once each.

The table is dense over the calls met so far. A call that the walk meets for the first time is resolved by a
`CostSource` (a database, a measurement, an estimate); which of them it was stays with the cost as its origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from graph.calls import LocalCall
from graph.errors import CostError

if TYPE_CHECKING:
    from graph.rules.least import LeastWork, WorkPhase


class Origin(StrEnum):
    """What a cost rests on."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    DATASHEET = "datasheet"


# Codes of origins in arrays: positions in this tuple.
ORIGINS: tuple[Origin, ...] = (Origin.MEASURED, Origin.ESTIMATED, Origin.DATASHEET)
ORIGIN_CODE: dict[Origin, int] = {origin: code for code, origin in enumerate(ORIGINS)}


def nanoseconds(seconds: float) -> int:
    """Return `seconds` in whole nanoseconds, halves rounded up: the one rounding of times outside kernels."""
    return int(seconds * 1e9 + 0.5)


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Seconds of one local call, forward and backward (zero where it has none).

    `forward_launch_s`, `backward_launch_s`: in which the host issues it, where the device computes apart from the host.
    """

    forward_s: float
    backward_s: float
    origin: Origin
    forward_launch_s: float = 0.0
    backward_launch_s: float = 0.0


class UpdateCost(NamedTuple):
    """The cost of an optimizer's updates: seconds for each element of the weights, and their origin.

    `launch_s`: seconds in which the host issues an update of any size, where the device computes apart from the host.
    """

    seconds: float
    origin: Origin
    launch_s: float = 0.0


class CostSource(Protocol):
    """Where costs come from: a database, a measurement, an estimate."""

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> Sequence[OperatorCost | None]:
        """Return the cost of each call on a device kind, in order; None where there is none."""
        ...

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the cost of `optimizer`'s updates of weights of a dtype."""
        ...


@runtime_checkable
class BoundedSource(Protocol):
    """What a source may be beside: one that knows how little its costs can be."""

    def least_s(self, call: LocalCall, phase: WorkPhase, work: LeastWork, kind_name: str) -> float:
        """Return seconds that no calls into which a call may be cut take together, in one phase.

        Args:
            call: the whole operator's.
            phase: that is asked for.
            work: what all of them together do, at least.
            kind_name: of the device that executes them.
        """
        ...


@dataclass(frozen=True, slots=True)
class CallCost:
    """A resolved cost as kernels take it: nanoseconds, and the code of its origin."""

    forward_ns: int
    backward_ns: int
    origin: int
    forward_launch_ns: int = 0
    backward_launch_ns: int = 0


class ResolvedCosts(Protocol):
    """A table of costs that another one asks: that of the process which started this one."""

    def costs(self, calls: Sequence[LocalCall], kind_name: str) -> list[CallCost]:
        """Return the cost of each call on a device kind."""
        ...

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the cost of `optimizer`'s updates of weights of a dtype."""
        ...


@runtime_checkable
class CopiedSource(Protocol):
    """What a source may be beside: one that gives the same costs in copies of this process."""

    def copies(self) -> bool:
        """Get ready to be copied with this process; return whether copies may be asked: they must measure nothing."""
        ...

    def given(self) -> Any:
        """Return what this source keeps of the costs that it has given out since `copies`. It is pickled."""
        ...

    def take(self, given: Any) -> None:
        """Keep what a copy's `given` returned."""
        ...


@dataclass(frozen=True, slots=True)
class Met:
    """What a copy of a table has met since it was copied."""

    calls: dict[tuple[str, str], CallCost]
    updates: dict[tuple[str, str, str], UpdateCost]
    given: Any


class CostTable:
    """Costs met so far, by (call digest, device kind); the rest is resolved in batches when first asked for."""

    def __init__(self, source: CostSource) -> None:
        self._source = source
        self._elsewhere: ResolvedCosts | None = None
        # How many were known when this process was copied: the first of the entries, which never change places.
        self._copied = 0, 0
        self._calls: dict[tuple[str, str], CallCost] = {}
        self._updates: dict[tuple[str, str, str], UpdateCost] = {}

    def with_source(self, source: CostSource) -> CostTable:
        """Return a table that knows what this one knows now, and asks another source for the rest."""
        table = CostTable(source)
        table._calls.update(self._calls)
        table._updates.update(self._updates)
        return table

    def ask(self, elsewhere: ResolvedCosts) -> None:
        """From now on ask another table, and not the source, for what this one does not know."""
        self._elsewhere = elsewhere

    def copies(self) -> bool:
        """Get ready to be copied with this process; return whether the copies find out costs by themselves.

        If not they must ask this table: what is measured is measured once, and where nobody else computes.
        """
        self._copied = len(self._calls), len(self._updates)
        return isinstance(self._source, CopiedSource) and self._source.copies()

    def met(self) -> Met:
        """Return, in a copy, what this table has met since it was copied."""
        calls, updates = self._copied
        given = self._source.given() if isinstance(self._source, CopiedSource) else None
        return Met(
            dict(islice(self._calls.items(), calls, None)),
            dict(islice(self._updates.items(), updates, None)),
            given,
        )

    def take(self, met: Met) -> None:
        """Know what a copy has met."""
        self._calls.update(met.calls)
        self._updates.update(met.updates)
        if isinstance(self._source, CopiedSource):
            self._source.take(met.given)

    def costs(self, calls: Sequence[LocalCall], kind_name: str) -> list[CallCost]:
        """Return the cost of each call on a device kind.

        Raises:
            CostError: the source has no cost for a call, or a cost that is no time.
        """
        missing: dict[str, LocalCall] = {}
        for call in calls:
            if (call.digest, kind_name) not in self._calls:
                missing.setdefault(call.digest, call)
        if missing:
            resolved = self._resolved(list(missing.values()), kind_name)
            for call, cost in zip(missing.values(), resolved, strict=True):
                self._calls[call.digest, kind_name] = cost
        return [self._calls[call.digest, kind_name] for call in calls]

    def _resolved(self, calls: Sequence[LocalCall], kind_name: str) -> list[CallCost]:
        if self._elsewhere is not None:
            return self._elsewhere.costs(calls, kind_name)
        costs = self._source.resolve(calls, kind_name)
        return [_checked(call, cost, kind_name) for call, cost in zip(calls, costs, strict=True)]

    def least_s(self, call: LocalCall, phase: WorkPhase, work: LeastWork, kind_name: str) -> float:
        """Return seconds that no calls into which a call may be cut take together: 0 where the source knows none.

        See `BoundedSource`.
        """
        if not isinstance(self._source, BoundedSource):
            return 0.0
        return self._source.least_s(call, phase, work, kind_name)

    def backward_ns(self, cost: CallCost, call: LocalCall, summed: Sequence[int], kind_name: str) -> int:
        """Return what a call's backward takes, and adding its gradients of the slots `summed` to other readers' ones.

        A sum of gradients reads two tensors and writes one, as an update by plain SGD does, whose time it takes.
        """
        return cost.backward_ns + sum(
            self.update_ns(call.inputs[slot].elements, "sgd", call.inputs[slot].dtype, kind_name)[0]
            for slot in summed
            if call.gradients[slot]
        )

    def backward_launch_ns(
        self, cost: CallCost, call: LocalCall, summed: Sequence[int], kind_name: str
    ) -> int:
        """Return the nanoseconds in which the host issues a call's backward, with sums as in `backward_ns`."""
        return cost.backward_launch_ns + sum(
            nanoseconds(self.update_cost("sgd", call.inputs[slot].dtype, kind_name).launch_s)
            for slot in summed
            if call.gradients[slot]
        )

    def update_ns(self, elements: int, optimizer: str, dtype: str, kind_name: str) -> tuple[int, int]:
        """Return the nanoseconds in which `optimizer` updates `elements` weights, and the code of the origin."""
        cost = self.update_cost(optimizer, dtype, kind_name)
        return nanoseconds(elements * cost.seconds), ORIGIN_CODE[cost.origin]

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the cost of `optimizer`'s updates of weights of a dtype."""
        key = (optimizer, dtype, kind_name)
        cost = self._updates.get(key)
        if cost is None:
            if self._elsewhere is not None:
                cost = self._elsewhere.update_cost(optimizer, dtype, kind_name)
            else:
                cost = self._source.update_cost(optimizer, dtype, kind_name)
            self._updates[key] = cost
        return cost


def describe(call: LocalCall) -> str:
    """Return a call as a person names it: its target and the shapes of its inputs."""
    shapes = ", ".join("x".join(str(size) for size in spec.shape) or "scalar" for spec in call.inputs)
    return f"{call.target} ({shapes})"


def _checked(call: LocalCall, cost: OperatorCost | None, kind_name: str) -> CallCost:
    if cost is None:
        raise CostError(
            f"cost of {describe(call)}: not measured on {kind_name}, must be; run `app profile` for this model "
            "there or allow estimates"
        )
    for seconds in (cost.forward_s, cost.backward_s, cost.forward_launch_s, cost.backward_launch_s):
        if not 0 <= seconds < 1e6:
            raise CostError(
                f"cost of {describe(call)} on {kind_name}: is {seconds:g} s, must be a time of at least 0; "
                "measure it again"
            )
    return CallCost(
        nanoseconds(cost.forward_s),
        nanoseconds(cost.backward_s),
        ORIGIN_CODE[cost.origin],
        nanoseconds(cost.forward_launch_s),
        nanoseconds(cost.backward_launch_s),
    )
