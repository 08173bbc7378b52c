"""The state of a rank's optimizer in the layout of the plain module's, and back.

The optimizer of a rank updates the parts of weights that it holds. Its state tensors are such parts too: they are
collected and cut as the weights are. Everything else (step counts, parameter groups) is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graph.errors import RuntimeFailure, UsageError
from graph.intervals import Region
from graph.plan import Plan
from runtime.communication import World
from runtime.execution.full_state import broadcast_full, full_weights, scatter_parts
from runtime.instructions.sharded_weights import joined, parts_of_weight, split_joined
from runtime.ranks.ranks import everywhere, from_rank_0, gather_everywhere

# The mark of a state tensor of the weight's shape, which is sent apart from the rest of the state.
PART = "part"
# Optimizers whose update of an element depends on others: parts of a weight would be updated otherwise than the whole.
NOT_ELEMENT_WISE = frozenset({"Adafactor", "LBFGS", "Muon"})


class OptimizerParts:
    """A rank's optimizer over parameters that are parts of weights, and the weight of each parameter."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, nn.Parameter]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Note the optimizer's order of parameters.

        Args:
            optimizer: made from the parameters in `named`.
            named: the rank's parameters with the names of their weights.
            shapes: of the whole weights.

        Raises:
            RuntimeFailure: the optimizer has a parameter that is none of `named`.
        """
        names = {id(parameter): name for name, parameter in named}
        self.optimizer = optimizer
        self._shapes = shapes
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in self._parameters:
            if id(parameter) not in names:
                raise RuntimeFailure(
                    f"optimizer: has a parameter of shape {tuple(parameter.shape)} that it was not given, must have "
                    "those alone that its factory is called with; make it from the factory's argument"
                )
        self._names = [names[id(parameter)] for parameter in self._parameters]

    def collect(self, plan: Plan, world: World, device: torch.device, *, rank_0_only: bool) -> dict[str, Any]:
        """Return the state as the plain module's optimizer would have it: whole tensors, on the CPU.

        All ranks must call it. With `rank_0_only`, the others return an empty dict.

        Raises:
            RuntimeFailure: a state tensor has neither the weight's shape nor one element.
        """
        local = self.optimizer.state_dict()
        kinds: dict[int, dict[str, Any]] = {}
        own_kinds = everywhere(
            lambda: {index: self._kinds(index, entry) for index, entry in local["state"].items()}
        )
        for kinds_of_rank in gather_everywhere(own_kinds):
            for index, entry in kinds_of_rank.items():
                kinds.setdefault(index, entry)
        state: dict[int, dict[str, Any]] = {}
        for index in sorted(kinds):
            name = self._names[index]
            state[index] = {}
            for key, (kind, value) in kinds[index].items():
                if kind != PART:
                    state[index][key] = value
                    continue
                start = torch.zeros(
                    self._shapes[name], dtype=value, device="cpu" if world.rank == 0 else "meta"
                )
                own = parts_of_weight(plan, name, world.rank)
                tensors = split_joined(own, local["state"][index][key]) if own else ()
                parts = [(part.region, tensor) for part, tensor in zip(own, tensors, strict=True)]
                whole = full_weights(plan, world, {name: parts}, {name: start}, device).get(name)
                if not rank_0_only:
                    whole = broadcast_full(world, whole, start, device)
                if whole is not None:
                    state[index][key] = whole
        if rank_0_only and world.rank != 0:
            return {}
        return {"state": state, "param_groups": local["param_groups"]}

    def _kinds(self, index: int, entry: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        """Return, for each key of one weight's state, (PART, its dtype) or ("same", its value)."""
        sizes = tuple(self._parameters[index].shape)
        result: dict[str, tuple[str, Any]] = {}
        for key, value in entry.items():
            kind = _kind(value, sizes)
            if kind is None:
                raise RuntimeFailure(
                    f"optimizer state {key} of {self._names[index]}: has shape {tuple(value.shape)}, must have the "
                    f"weight's part's ({sizes}) or one element; use an optimizer that treats elements alike"
                )
            result[key] = kind
        return result

    def load(
        self, plan: Plan, world: World, state_dict: Mapping[str, Any] | None, device: torch.device
    ) -> None:
        """Take over a state in the plain module's layout; rank 0's counts. All ranks must call it.

        Raises:
            RuntimeFailure: it is not of these weights.
        """
        document: Any = None
        wholes: dict[tuple[int, str], Any] = {}
        if world.rank == 0:
            document, wholes = self._split_state(state_dict)
        document = from_rank_0(document)
        if isinstance(document, str):
            raise RuntimeFailure(document)
        local: dict[int, dict[str, Any]] = {}
        for index, entry in document["state"].items():
            name = self._names[index]
            placements = _placements(plan, world.size, name)
            own = parts_of_weight(plan, name, world.rank)
            for key, (kind, value) in entry.items():
                if kind == PART:
                    tensors = {name: wholes[index, key]} if world.rank == 0 else {}
                    scattered = [
                        scatter_parts(world, {name: regions}, tensors, {name: value}, device)
                        for regions in placements
                    ]
                    if own:
                        parts = [received[name][1] for received in scattered if name in received]
                        local.setdefault(index, {})[key] = joined(own, parts)
                elif own:
                    local.setdefault(index, {})[key] = value
        self.optimizer.load_state_dict({"state": local, "param_groups": document["param_groups"]})

    def _split_state(self, state_dict: Mapping[str, Any] | None) -> tuple[Any, dict[tuple[int, str], Any]]:
        """Return the state without its whole tensors, and these; of a state that does not fit, the reason instead."""
        advice = "load the state of the same optimizer over the same module"
        if (
            not isinstance(state_dict, Mapping)
            or "state" not in state_dict
            or "param_groups" not in state_dict
        ):
            return f"optimizer state: has no state and param_groups on rank 0, must have them; {advice}", {}
        own = [len(group["params"]) for group in self.optimizer.param_groups]
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != own:
            return f"optimizer state: has parameter groups of {sizes} weights, must be of {own}; {advice}", {}
        # A saved state may number the weights in its own way; the order of the groups is what counts.
        order = {
            number: index
            for index, number in enumerate(n for group in state_dict["param_groups"] for n in group["params"])
        }
        wholes: dict[tuple[int, str], Any] = {}
        state: dict[int, dict[str, Any]] = {}
        for number, entry in state_dict["state"].items():
            index = order[number]
            name = self._names[index]
            state[index] = {}
            for key, value in entry.items():
                kind = _kind(value, self._shapes[name])
                if kind is None:
                    return (
                        f"optimizer state {key} of {name}: has shape {tuple(value.shape)}, must have "
                        f"{self._shapes[name]} or one element; {advice}"
                    ), {}
                state[index][key] = kind
                if kind[0] == PART:
                    wholes[index, key] = value
        groups = [
            {**group, "params": [order[number] for number in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        return {"state": state, "param_groups": groups}, wholes


def _kind(value: Any, sizes: tuple[int, ...]) -> tuple[str, Any] | None:
    """Return (PART, its dtype) of a state tensor of these sizes, ("same", its value) of one number; else None."""
    if not isinstance(value, torch.Tensor):
        return "same", value
    if tuple(value.shape) == sizes:
        return PART, value.dtype
    return ("same", value.detach().cpu()) if value.numel() == 1 else None


def _placements(plan: Plan, size: int, name: str) -> list[dict[int, Region]]:
    """Return the regions of a weight that the ranks update: by rank the first part, then the second, and so on."""
    result: list[dict[int, Region]] = []
    for rank in range(size):
        for index, part in enumerate(parts_of_weight(plan, name, rank)):
            result += [{}] if index == len(result) else []
            result[index][rank] = part.region
    return result


def make_optimizer(make: Any, parameters: Sequence[nn.Parameter], *, parts: bool) -> torch.optim.Optimizer:
    """Return the optimizer that a user's factory makes of a rank's parameters; `parts`: some are parts of weights.

    Raises:
        RuntimeFailure: the factory makes none, one that looks at whole weights, or a fused one of parts that it would
            update wrongly.
    """
    made = make(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise RuntimeFailure(
            f"optimizer: its factory returned {type(made).__name__}, must return a torch.optim.Optimizer; pass "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), or another one"
        )
    require_element_wise(made, parts=parts)
    # Torch's fused kernels take elements in the order of memory, whatever the strides.
    for group in made.param_groups:
        if group.get("fused") and not all(part.is_contiguous() for part in group["params"]):
            raise RuntimeFailure(
                "optimizer: is fused, must not be where a rank updates columns of a weight that it holds more of; "
                "pass fused=False"
            )
    return made


def require_factory(optimizer: object) -> None:
    """Refuse an object that is no factory of an optimizer.

    Raises:
        UsageError: it is an optimizer already, which has other parameters, or cannot be called.
    """
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        name = type(optimizer).__name__
        raise UsageError(
            f"optimizer: is of type {name}, must be a function that makes an optimizer of this rank's parameters; pass "
            "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), or another one"
        )


def require_element_wise(optimizer: torch.optim.Optimizer, *, parts: bool) -> None:
    """Refuse an optimizer that is known to look at whole weights, where some rank holds a part of one.

    Raises:
        RuntimeFailure: it is one.
    """
    name = type(optimizer).__name__
    if parts and name in NOT_ELEMENT_WISE:
        raise RuntimeFailure(
            f"optimizer: {name} looks at whole weights and the strategy splits some, must treat elements alike; use "
            "SGD, Adam, AdamW or another element-wise one, or a strategy that splits no weight"
        )
