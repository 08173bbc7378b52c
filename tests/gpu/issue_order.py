"""The orders in which ranks issue their messages and collectives, and whether GPUs can execute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graph.plan import Plan
from graph.training import Training
from profiler.operators.counter_rng import forget_positions
from profiler.process_groups import Message
from runtime.execution.executor import Executor
from runtime.observe.memory_trace import SilentWorld, _initial_tensors


@dataclass(frozen=True)
class Issue:
    """A batch of messages (peer and bytes of each, in order) or a collective of `members`, as one rank issues it."""

    kind: str
    members: tuple[int, ...] = ()
    size_bytes: int = 0
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()

    @property
    def partners(self) -> frozenset[int]:
        """The other ranks that take part, and for a collective this one."""
        return frozenset((*self.members, *(peer for peer, _ in (*self.sends, *self.receives))))


class _RecordingWorld(SilentWorld):
    """A world in which nothing is sent, and all is noted."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self.issued: list[Issue] = []

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Any], list[Any]]:
        if sends or receives:
            sizes = [tuple((m.peer, m.tensor.nbytes) for m in messages) for messages in (sends, receives)]
            self.issued.append(Issue("messages", sends=sizes[0], receives=sizes[1]))
        return super().exchange(sends, receives)

    def _start(self, operation: Any, ranks: tuple[int, ...], *arguments: Any) -> Any:
        kind = getattr(operation, "__name__", str(operation))
        sizes = [item.nbytes for item in arguments if isinstance(item, torch.Tensor)]
        # Of an all-to-all each rank has its own.
        self.issued.append(Issue(kind, ranks, 0 if kind == "all_to_all_single" else max(sizes)))
        return super()._start(operation, ranks, *arguments)


def issue_orders(plan: Plan, training: Training) -> list[list[Issue]]:
    """Return what each rank issues in a step and the update after it, by executing its program without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    orders = []
    for rank in range(plan.strategy.device_count):
        forget_positions()
        with FakeTensorMode(allow_fallback_kernels=False):
            world = _RecordingWorld(plan.strategy.device_count, rank)
            tensors = _initial_tensors(plan)
            device = torch.device("cpu")
            executor = Executor(plan, world, tensors, training, seed=0, learning_rate=0.0, device=device)
            world.issued.clear()
            executor.step(0)
            executor.loss_tensor()
        orders.append(world.issued)
    forget_positions()
    return orders


def deadlock(orders: Sequence[Sequence[Issue]]) -> str | None:
    """Return who waits for whom where the ranks come to no end; None where they do.

    Each GPU executes one at a time, in its host's order: what ends so ends with any number at once. A collective ends
    when all members are at it, a batch of messages when each of them has met its other end.
    """
    places = [0] * len(orders)
    left = [list(_messages(order[0])) if order else [] for order in orders]

    def head(rank: int) -> Issue | None:
        return orders[rank][places[rank]] if places[rank] < len(orders[rank]) else None

    def advance(rank: int) -> None:
        places[rank] += 1
        following = head(rank)
        left[rank] = [] if following is None else list(_messages(following))

    moved = True
    while moved:
        moved = False
        for rank in range(len(orders)):
            issue = head(rank)
            if issue is None:
                continue
            if issue.members:
                if all(head(member) == issue for member in issue.members):
                    for member in issue.members:
                        advance(member)
                    moved = True
                continue
            for message in tuple(left[rank]):
                way, peer, size = message
                other_end = ("receive" if way == "send" else "send", rank, size)
                if other_end in left[peer]:
                    left[rank].remove(message)
                    left[peer].remove(other_end)
                    moved = True
                    if not left[peer]:
                        advance(peer)
            if not left[rank]:
                advance(rank)
    stuck = [
        f"rank {rank} at {place}: {head(rank)}" for rank, place in enumerate(places) if head(rank) is not None
    ]
    return "\n".join(stuck) or None


def _messages(issue: Issue) -> list[tuple[str, int, int]]:
    return [("send", *message) for message in issue.sends] + [
        ("receive", *message) for message in issue.receives
    ]
