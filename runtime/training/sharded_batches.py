"""A batch of which each rank has its own samples: what its tasks read of the others' is sent to it.

The ranks' shards, in the order of the ranks, are the whole batch. Under data parallelism a rank reads its own samples,
and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graph.errors import RuntimeFailure
from graph.intervals import Region, full_region, intersect_regions, shape, volume
from graph.plan import Plan, weight_holdings
from runtime.communication import Message, World
from runtime.execution.step import Held
from runtime.instructions.selections import Selection, selection_of
from runtime.training.batches import Batch


@dataclass(frozen=True, slots=True)
class _Input:
    """What becomes of one input on a rank: by peer, what is cut from its shard, and where what arrives is put.

    shard: the rank's own. read: the region that its tasks read; None if they read nothing. own: of its own shard, what
    is read, and where it stands in that region.
    """

    shard: Region
    read: Region | None
    sends: tuple[tuple[int, Selection], ...]
    receives: tuple[tuple[int, Selection], ...]
    own: tuple[Selection, Selection] | None
    dtype: torch.dtype


class Shards:
    """Gives a rank what its tasks read of a sharded batch."""

    def __init__(self, plan: Plan, world: World, dims: Mapping[str, int], device: torch.device) -> None:
        """Prepare the messages.

        Args:
            plan: says who reads what.
            world: the ranks, each of which has a shard.
            dims: for each sharded input, the dim along which it is cut.
            device: where this rank computes.
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

    def _prepared(self, plan: Plan, name: str, dim: int) -> _Input:
        spec = plan.graph.value_by_name[name].spec
        length = spec.shape[dim] // self._world.size
        whole = full_region(spec.shape)
        shards = [
            (*whole[:dim], ((rank * length, (rank + 1) * length),), *whole[dim + 1 :])
            for rank in range(self._world.size)
        ]
        reads = weight_holdings(plan.graph, plan.strategy, name)
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
        return _Input(shard, read, tuple(sends), tuple(receives), own, getattr(torch, spec.dtype))

    def whole(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Return an input that is made of all ranks' shards. All ranks must call it."""
        one = self._inputs[name]
        sizes = list(shard.shape)
        sizes[self._dims[name]] *= self._world.size
        whole = torch.zeros(sizes, dtype=one.dtype, device=self._device)
        selection_of(one.shard, tuple(sizes), self._device).put(whole, shard.to(self._device))
        if one.dtype is torch.bool:
            return self._world.sum(whole.to(torch.uint8)).to(torch.bool)
        return self._world.sum(whole)

    def parts(self, shards: Mapping[str, torch.Tensor]) -> dict[str, Held]:
        """Return, for each sharded input of which this rank reads something, the region that it reads.

        All ranks must call it. One whose shards do not fit gives none: zeros stand in for them.
        """
        sends: list[Message] = []
        receives: list[tuple[Message, torch.Tensor, Selection]] = []
        result: dict[str, Held] = {}
        for name, one in self._inputs.items():
            shard = shards.get(name)
            if shard is None:
                shard = torch.zeros(shape(one.shard), dtype=one.dtype)
            shard = shard.detach().to(self._device)
            sends += [Message(peer, cut.take(shard).contiguous()) for peer, cut in one.sends]
            if one.read is None:
                continue
            if one.own is not None and not one.receives:
                result[name] = (one.read, one.own[0].take(shard))
                continue
            part = torch.empty(shape(one.read), dtype=one.dtype, device=self._device)
            if one.own is not None:
                one.own[1].put(part, one.own[0].take(shard))
            for peer, place in one.receives:
                arriving = torch.empty(place.shape, dtype=one.dtype, device=self._device)
                receives.append((Message(peer, arriving), part, place))
            result[name] = (one.read, part)
        sent, received = self._world.exchange(sends, [message for message, _, _ in receives])
        for work, (message, part, place) in zip(received, receives, strict=True):
            self._world.wait(work)
            place.put(part, message.tensor)
        for work in sent:
            self._world.wait(work)
        return result


def _described(dim: int | None) -> str:
    return "whole" if dim is None else f"a shard along dim {dim}"


def _common(left: Region, right: Region) -> Region | None:
    found = intersect_regions(left, right)
    return None if found is None or not volume(found) else found
