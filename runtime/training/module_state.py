"""The state dict of a user's module from the parts of its tensors that the ranks hold, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from graph.errors import RuntimeFailure
from graph.operators import ValueKind
from graph.plan import Plan, weight_placement
from runtime.communication import World
from runtime.execution.full_state import broadcast_full, full_buffers, full_weights, scatter_parts
from runtime.execution.step import StepRunner
from runtime.ranks.ranks import from_rank_0


class ModuleState:
    """Values of a module's parameters and buffers, of which each rank has parts."""

    def __init__(self, module: nn.Module, plan: Plan, world: World, runner: StepRunner) -> None:
        """Give every rank its parts of the values that the module has on rank 0. All ranks must call it."""
        self._module = module
        self._plan = plan
        self._world = world
        self._runner = runner
        self._tensors = _named_tensors(module)
        self._buffer_placements = {
            value.name: weight_placement(plan.graph, plan.strategy, value.name)
            for value in plan.graph.values
            if value.kind is ValueKind.BUFFER
        }
        self._renewed = tuple(buffer for buffer, _ in plan.graph.buffer_updates)
        # Values that no step changes: the module's own until others are loaded. Rank 0's count.
        self._loaded: dict[str, torch.Tensor] = {}
        self._distribute(self._tensors, self._tensors)

    def collect(self, *, rank_0_only: bool) -> OrderedDict[str, Any]:
        """Return the plain module's own state dict, as `Trainer.state_dict` does."""
        weights = full_weights(
            self._plan,
            self._world,
            self._runner.weights(),
            {weight.name: self._tensors[weight.name] for weight in self._plan.graph.weights},
            self._runner.device,
        )
        buffers = full_buffers(
            self._world,
            {name: parts for name, parts in self._runner.buffers().items() if name in self._renewed},
            {name: self._tensors[name] for name in self._renewed} if self._world.rank == 0 else {},
        )
        unchanged = {**self._tensors, **self._loaded}
        changed = {**weights, **buffers}
        result: OrderedDict[str, Any] = OrderedDict()
        shared: dict[str, torch.Tensor] = {}
        for key, item, name in self._entries():
            if name is None:
                result[key] = item
                continue
            if name not in shared:
                whole = None
                if self._world.rank == 0:
                    whole = changed.get(name)
                    # A copy, as of the others: the state must not share the module's own memory.
                    whole = unchanged[name].detach().to("cpu", copy=True) if whole is None else whole
                if not rank_0_only:
                    whole = broadcast_full(self._world, whole, item, self._runner.device)
                if whole is not None:
                    shared[name] = whole
            if name in shared:
                result[key] = shared[name]
        return OrderedDict() if rank_0_only and self._world.rank != 0 else result

    def load(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take over the values of a state dict on rank 0, as `Trainer.load_state_dict` does.

        Raises:
            RuntimeFailure: a name is missing, unknown, or has another shape.
        """
        tensors: dict[str, torch.Tensor] = {}
        problem = None
        if self._world.rank == 0:
            problem = self._misfit(state_dict)
            if problem is None and state_dict is not None:
                tensors = {
                    name: state_dict[key].detach() for key, _, name in self._entries() if name is not None
                }
        problem = from_rank_0(problem)
        if problem is not None:
            raise RuntimeFailure(problem)
        # Buffers that are not persistent are in no state dict, and stay.
        self._distribute({name for _, _, name in self._entries() if name is not None}, tensors)
        executed = {*self._plan.held, *self._renewed}
        for name, tensor in tensors.items():
            if name not in executed:
                self._loaded[name] = tensor.to("cpu", copy=True)

    def _entries(self) -> list[tuple[str, Any, str | None]]:
        """The module's state dict: (key, item, first name of its tensor; None where it is none of the module's)."""
        names = {id(tensor): name for name, tensor in _named_tensors(self._module).items()}
        return [
            (key, item, names.get(id(item))) for key, item in self._module.state_dict(keep_vars=True).items()
        ]

    def _distribute(self, names: Collection[str], wholes: Mapping[str, torch.Tensor]) -> None:
        """Give every rank its parts of the weights and buffers in `names`; `wholes` are rank 0's."""
        dtypes = {
            name: getattr(torch, self._plan.graph.value_by_name[name].spec.dtype)
            for name in (*self._plan.held, *self._buffer_placements)
        }
        for placements, load in (
            (self._plan.held, self._runner.load_weights),
            (self._buffer_placements, self._runner.load_buffers),
        ):
            chosen = {name: regions for name, regions in placements.items() if name in names}
            load(scatter_parts(self._world, chosen, wholes, dtypes, self._runner.device))

    def _misfit(self, state_dict: Mapping[str, Any] | None) -> str | None:
        """Return why a state dict is not the module's, or None."""
        if not isinstance(state_dict, Mapping):
            return f"state dict: is {type(state_dict).__name__} on rank 0, must map names to tensors; pass the module's"
        own = self._module.state_dict(keep_vars=True)
        for key in own:
            if key not in state_dict:
                return f"state dict: {key} is missing, must be there; pass the state dict of the same module"
        for key in state_dict:
            if key not in own:
                return (
                    f"state dict: {key} is unknown, must be one of the module's; pass that of the same module"
                )
        for key, item in own.items():
            if isinstance(item, torch.Tensor) and tuple(state_dict[key].shape) != tuple(item.shape):
                return (
                    f"state dict: {key} has shape {tuple(state_dict[key].shape)}, must have {tuple(item.shape)}; "
                    "pass the state dict of the same module"
                )
        return None


def _named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their first names."""
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}
