"""How weights that several devices hold are synchronized: in which pieces, in which order, and until when.

    fifo      buckets of DistributedDataParallel's kind, in the order in which the backward fills them; all weights are
              updated when all sums are there, and gathered where their update was shared
    p3        P3: slices. Those of the weights that the next forward reads first go first, and each weight is updated
              just before the first operator that reads it, so that sums last into the next forward. Where updates are
              shared, gradients are reduce-scattered in slices (push), each device updates its share of a slice, and
              the slice is gathered (pull); an operator waits for the pulls of the weights that it reads
    tic, tac  TicTac, for weights whose update is shared: sums as with fifo, but the gathers of updated weights last
              into the next forward, in which an operator waits for the weights that it reads. They go in the order of
              the timing-independent policy TIC, or of the timing-aware TAC

All devices start sums and gathers in one static order (`Plan.slice_order`, `Plan.gather_order`, `Plan.pulls`), never by
a queue of their own.

Sources: P3, priority-based parameter propagation (SysML 2019): slices of at most 50,000 parameters, priority by the
position of the layer in the forward. TicTac (SysML 2019): the order of parameter transfers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from graph.errors import StrategyError, UsageError
from graph.texts import shown

# As in DistributedDataParallel (PyTorch's default of 25 MiB): large enough to amortize a collective's latency,
# small enough to start before backward ends.
BUCKET_BYTES = 25 * 1024 * 1024
# 50,000 parameters of float32, the paper's.
SLICE_BYTES = 200_000
LEAST_BYTES, MOST_BYTES = 1024, 2**40


class Policy(StrEnum):
    """In which order sums go, see above."""

    FIFO = "fifo"
    P3 = "p3"
    TIC = "tic"
    TAC = "tac"

    @property
    def size_key(self) -> str:
        """The key of its size in documents."""
        return "slice_bytes" if self is Policy.P3 else "bucket_bytes"

    @property
    def usual_bytes(self) -> int:
        """Its size where none is given."""
        return SLICE_BYTES if self is Policy.P3 else BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Synchronization:
    """The policy of sums and gathers; a bucket is full, and a slice complete, with `size_bytes`."""

    policy: Policy = Policy.FIFO
    size_bytes: int = BUCKET_BYTES

    @property
    def text(self) -> str:
        """The policy and its size, for reports."""
        what = "slices" if self.policy is Policy.P3 else "buckets"
        return f"{self.policy.value}, {what} of {self.size_bytes:,} bytes"

    def slice_count(self, bucket_bytes: int) -> int:
        """Return in how many slices a bucket is summed."""
        return max(1, -(-bucket_bytes // self.size_bytes)) if self.policy is Policy.P3 else 1

    @property
    def orders_gathers(self) -> bool:
        """Whether gathers of updated weights last into the next step's forward."""
        return self.policy in (Policy.TIC, Policy.TAC)


BY_DEFAULT = Synchronization()


def p3(slice_bytes: int = SLICE_BYTES) -> Synchronization:
    """Return the policy p3 with slices of a size."""
    return Synchronization(Policy.P3, slice_bytes)


def read_synchronization(text: str, option: str) -> Synchronization:
    """Return the policy that a user names, alone or with a size in bytes, as in p3:200000.

    Raises:
        UsageError: it is none; the message begins with the `option`.
    """
    name, _, size = text.partition(":")
    if name in tuple(Policy) and (":" not in text or size.isdecimal()):
        policy = Policy(name)
        size_bytes = int(size) if size else policy.usual_bytes
        if LEAST_BYTES <= size_bytes <= MOST_BYTES:
            return Synchronization(policy, size_bytes)
    raise UsageError(
        f"{option}: is {shown(text)}, must be {', '.join(Policy)}, or one of them with {LEAST_BYTES:,} bytes or more "
        f"of a bucket or slice, as in p3:{SLICE_BYTES}; choose one"
    )


def slice_bounds(length: int, count: int) -> list[tuple[int, int]]:
    """Return the first and one beyond the last element of each of `count` slices, as equal as they can be."""
    return [slice_bound(length, count, number) for number in range(count)]


def slice_bound(length: int, count: int, number: int) -> tuple[int, int]:
    """Return the first and one beyond the last element of one of `count` slices."""
    return length * number // count, length * (number + 1) // count


# ---- as a part of strategies


def synchronization_to_json(synchronization: Synchronization) -> dict[str, Any]:
    """Return a policy and its size as a document, which is empty for the default."""
    if synchronization == BY_DEFAULT:
        return {}
    policy = synchronization.policy
    return {"policy": policy.value, policy.size_key: synchronization.size_bytes}


def synchronization_from_json(document: object) -> Synchronization:
    """Return the policy of a document that `synchronization_to_json` (or a person) wrote.

    Raises:
        StrategyError: it is malformed, or the policy is unknown.
    """
    if document == {}:
        return BY_DEFAULT
    if not isinstance(document, Mapping) or document.get("policy") not in tuple(Policy):
        of = document.get("policy") if isinstance(document, Mapping) else document
        raise StrategyError(
            f"synchronization: policy is {shown(of)}, must be one of {', '.join(Policy)}; correct the strategy"
        )
    policy = Policy(document["policy"])
    key = policy.size_key
    unknown = sorted(str(name) for name in document if name not in ("policy", key))
    if unknown:
        raise StrategyError(
            f"synchronization: key {shown(unknown[0])} is unknown, must be policy or, of {policy}, {key}; correct the "
            "strategy"
        )
    size = document.get(key, policy.usual_bytes)
    if type(size) is not int or not LEAST_BYTES <= size <= MOST_BYTES:
        raise StrategyError(
            f"synchronization: {key} is {shown(size)}, must be a whole number from {LEAST_BYTES:,} to {MOST_BYTES:,}; "
            "correct the strategy"
        )
    return Synchronization(policy, size)
