"""Sharded batches: each rank is given its own samples, and receives the samples of others that its tasks read.

The ranks' shards, in the order of the ranks, are the whole batch. Under data parallelism a rank reads its own samples,
and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graph.errors import RuntimeFailure
from graph.intervals import Region, full_region, intersect_regions, shape, volume
from graph.plan import Plan, weight_placement
from profiler.process_groups import Message
from runtime.communication import World
from runtime.execution.step import Held, moved
from runtime.instructions.selections import Selection, selection_of
from runtime.training.batches import Batch


@dataclass(frozen=True, slots=True)
class _ShardedInput:
    """The messages of one input on a rank: by peer, the part of its shard to send, and the part of its read to receive.

    shard: the rank's own. read: the region that its tasks read; None if they read nothing. own: the part of its shard
    that is read, and that part of the read.
    """

    shard: Region
    read: Region | None
    sends: tuple[tuple[int, Selection], ...]
    receives: tuple[tuple[int, Selection], ...]
    own: tuple[Selection, Selection] | None
    dtype: torch.dtype


class BatchShards:
    """The exchange of a sharded batch: from the ranks' shards to the regions that their tasks read."""

    def __init__(self, plan: Plan, world: World, dims: Mapping[str, int], device: torch.device) -> None:
        """Prepare the messages.

        Args:
            plan: for the readers of each input.
            world: the ranks, each of which has a shard.
            dims: for each sharded input, the dim along which it is cut.
            device: of this rank.
        """
        self._world = world
        self._device = device
        self._dims = dict(dims)
        self._inputs = {name: self._prepared(plan, name, dim) for name, dim in dims.items()}

    def require_like(self, batch: Batch) -> None:
        """Refuse a batch whose inputs are other shards than those of the first one.

        Raises:
            RuntimeFailure: one is.
        """
        for name in batch.inputs:
            if batch.shard_dims.get(name) != self._dims.get(name):
                raise RuntimeFailure(
                    f"inputs: {name} is {_described(batch.shard_dims.get(name))}, must be "
                    f"{_described(self._dims.get(name))} as in the first batch; deal all batches out alike"
                )

    def _prepared(self, plan: Plan, name: str, dim: int) -> _ShardedInput:
        spec = plan.graph.value_by_name[name].spec
        length = spec.shape[dim] // self._world.size
        whole = full_region(spec.shape)
        shards = [
            (*whole[:dim], ((rank * length, (rank + 1) * length),), *whole[dim + 1 :])
            for rank in range(self._world.size)
        ]
        reads = weight_placement(plan.graph, plan.strategy, name)
        rank, shard = self._world.rank, shards[self._world.rank]
        read = reads.get(rank)
        sends = [
            (peer, Selection(common, shard, self._device))
            for peer, region in reads.items()
            if peer != rank and (common := _common(region, shard)) is not None
        ]
        receives = [
            (peer, Selection(common, read, self._device))
            for peer, other in enumerate(shards)
            if read is not None and peer != rank and (common := _common(read, other)) is not None
        ]
        kept = None if read is None else _common(read, shard)
        own = (
            None
            if read is None or kept is None
            else (Selection(kept, shard, self._device), Selection(kept, read, self._device))
        )
        return _ShardedInput(shard, read, tuple(sends), tuple(receives), own, getattr(torch, spec.dtype))

    def whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return an input that is made of all ranks' shards. All ranks must call it."""
        prepared = self._inputs[name]
        sizes = list(shard.shape)
        sizes[self._dims[name]] *= self._world.size
        whole = torch.zeros(sizes, dtype=prepared.dtype, device=self._device)
        selection_of(prepared.shard, tuple(sizes), self._device).put(whole, moved(shard, self._device))
        if prepared.dtype is torch.bool:
            return self._world.sum(whole.to(torch.uint8)).to(torch.bool)
        return self._world.sum(whole)

    def parts(self, shards: Mapping[str, torch.Tensor]) -> dict[str, Held]:
        """Return, for each sharded input of which this rank reads something, the region that it reads.

        All ranks must call it. One whose shards do not fit gives none: zeros stand in for them.
        """
        sends: list[Message] = []
        receives: list[tuple[Message, torch.Tensor, Selection]] = []
        result: dict[str, Held] = {}
        for name, prepared in self._inputs.items():
            shard = shards.get(name)
            if shard is None:
                shard = torch.zeros(shape(prepared.shard), dtype=prepared.dtype)
            shard = moved(shard.detach(), self._device)
            sends += [Message(peer, cut.take(shard).contiguous()) for peer, cut in prepared.sends]
            if prepared.read is None:
                continue
            if prepared.own is not None and not prepared.receives:
                result[name] = (prepared.read, prepared.own[0].take(shard))
                continue
            part = torch.empty(shape(prepared.read), dtype=prepared.dtype, device=self._device)
            if prepared.own is not None:
                prepared.own[1].put(part, prepared.own[0].take(shard))
            for peer, selection in prepared.receives:
                arriving = torch.empty(selection.shape, dtype=prepared.dtype, device=self._device)
                receives.append((Message(peer, arriving), part, selection))
            result[name] = (prepared.read, part)
        sent, received = self._world.exchange(sends, [message for message, _, _ in receives])
        for work, (message, part, selection) in zip(received, receives, strict=True):
            self._world.wait(work)
            selection.put(part, message.tensor)
        for work in sent:
            self._world.wait(work)
        return result


def _described(dim: int | None) -> str:
    return "whole" if dim is None else f"a shard along dim {dim}"


def _common(left: Region, right: Region) -> Region | None:
    common = intersect_regions(left, right)
    return None if common is None or not volume(common) else common
