"""A module's training under a strategy, called by a user's own loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from graph.errors import RuntimeFailure
from graph.importing.outputs import Outputs
from graph.intervals import full_region
from graph.operators import OperatorGraph
from graph.plan import Plan
from graph.strategy import Strategy
from runtime.communication import World
from runtime.execution.step import StepRunner, whole_parts
from runtime.launch.processes import leave_group
from runtime.ranks.ranks import everywhere, from_rank_0
from runtime.training.batch_sizes import SizedRunner, SizedRunners
from runtime.training.batches import SHARDED, Batch, ExampleInputs, checked_scale, refused, require_same
from runtime.training.gradients import GradientClipping, scale_of, step_scaled
from runtime.training.module_state import ModuleState
from runtime.training.optimizer_state import OptimizerParts, make_optimizer
from runtime.training.options import TrainingOptions
from runtime.training.outputs import collect_outputs, kept_values
from runtime.training.sharded_batches import BatchShards


class Parameters(list[nn.Parameter]):
    """The rank's parameters, one for each of the module's, in its order; `named` pairs them with their names.

    A parameter is the part of the weight that this rank holds; several parts, as where a rank shares each with other
    ranks, stand in it one after the other, along the first of as many dims as the weight has. One that the rank holds
    no part of, that is frozen, or that the loss does not depend on, has no element here and never gets a gradient.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        super().__init__(parameter for _, parameter in named)
        self.named = list(named)


MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]


class Trainer:
    """Trains a module under a strategy; `runtime.parallelize` makes it. A context manager.

    Every rank has one, and every rank must call the same methods in the same order.

    Attributes:
        optimizer: the user's, over this rank's parts of the weights; learning-rate schedulers work on it.
        step_number: how many times `backward` was called; it seeds dropout, so that a resumed run draws what the
            uninterrupted one would.
        graph, strategy: what is executed.
        rank: this process's number; the strategy's device of that number.
        device: where this rank computes.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        world: World,
        example: tuple[tuple[Any, ...], dict[str, Any]],
        optimizer: MakeOptimizer,
        options: TrainingOptions,
        outputs: Outputs | None,
        *,
        leaves_group: bool,
    ) -> None:
        """Compile the rank's program, take over rank 0's values, and make the optimizer; see `parallelize`."""
        self.graph: OperatorGraph = plan.graph
        self.strategy: Strategy = plan.strategy
        self.rank = world.rank
        self.device = options.device
        self.step_number = 0
        self._module = module
        self._plan = plan
        self._world = world
        self._leaves_group = leaves_group
        self._inputs = ExampleInputs(plan.graph, example, world.size if options.batches == SHARDED else 1)
        self._inputs_compared = False
        # Whether a GradScaler has scaled the gradients so far.
        self._applies = False
        self._scaled = False
        # The last step, where outputs are asked for.
        self._last: tuple[SizedRunner, Batch] | None = None
        self._runner = StepRunner(
            plan, world, seed=options.seed, device=options.device, kept=kept_values(outputs)
        )
        self._example = SizedRunner(plan, self._runner, outputs)
        self._sizes = SizedRunners(module, self._example, self._inputs, world, options)
        self._module_state = ModuleState(module, plan, world, self._runner)
        self._parameters = self._own_parameters()
        splits = any(
            region != full_region(plan.graph.value_by_name[name].spec.shape)
            for name in plan.held
            for _, region in plan.updated(name)
        )
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}

        def made() -> OptimizerParts:
            own = make_optimizer(optimizer, self._parameters, parts=splits)
            return OptimizerParts(own, self._parameters.named, shapes)

        self._optimizer_parts = everywhere(made)
        self.optimizer = self._optimizer_parts.optimizer
        self.optimizer.register_step_pre_hook(self._refuse_foreign_step)
        # Both the user's own parameters and the rank's parts of them must go on as they were when the graph was made.
        self._trained = [
            (name, parameter.requires_grad, (parameter, own))
            for (name, parameter), own in zip(module.named_parameters(), self._parameters, strict=True)
        ]
        self._clipping = GradientClipping(plan, world, self._by_name, self._runner.updated)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After a failure the other ranks may never come to leave the group.
        if kind is None:
            self.close()

    def close(self) -> None:
        """Leave the process group, where `parallelize` has joined it."""
        if self._leaves_group:
            self._leaves_group = False
            leave_group()

    # ---- steps

    def step(
        self, *args: Any, scale: float = 1.0, scaler: GradScaler | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Do one training step on a batch: forward, backward, synchronization, update.

        Args:
            *args: what the module takes, of the example's shapes or with fewer samples: the same whole batch on every
                rank, of which it reads the parts that its tasks need; with `batches="sharded"` this rank's samples, of
                which the others get what they need, whatever the strategy splits.
            scale: as of `backward`.
            scaler: as of `backward` and `apply`.
            **kwargs: further inputs, as in the example.

        Returns:
            The loss over the whole batch before the update: a float64 scalar on `device`, the same on all ranks.

        Raises:
            RuntimeFailure: an input is larger than the example's, or the strategy does not fit a smaller one; ranks
                were given different things; or another rank is lost.
        """
        loss = self.backward(*args, scale=scale, scaler=scaler, **kwargs)
        self.apply(scaler)
        return loss

    def backward(
        self, *args: Any, scale: float = 1.0, scaler: GradScaler | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Do forward, backward and synchronization; gradients add up until `apply`. Returns the loss as `step` does.

        A batch that does not fit, or is another one on some rank, is refused on all ranks, and changes nothing.

        Args:
            *args: as of `step`.
            scale: the gradients are those of `scale` times the loss; the loss that is returned is not scaled. With
                1 / n, n batches make the step of their mean. The same on every rank.
            scaler: scales the loss as well, as `scaler.scale(loss).backward()` does; give it to `apply`, too.
            **kwargs: as of `step`.
        """
        batch = self._taken(args, kwargs, scale, scaler)
        self._last = None
        settled = not self._inputs_compared or (self._world.size == 1 and batch.problem is not None)
        if settled:
            require_same(batch)
            self._inputs_compared = True
            if batch.shard_dims:
                dims = batch.shard_dims
                self._example.shards = BatchShards(self._plan, self._world, dims, self.device)
        loss = None
        if not (settled and batch.shapes):
            loss = self._differentiated(self._example, batch)
        if loss is None:
            # All ranks have a batch of this other size.
            loss = self._differentiated(self._sizes.of(batch), batch)
        assert loss is not None
        self.step_number += 1
        self._scaled |= scaler is not None and scaler.is_enabled()
        return loss

    def _differentiated(self, sized: SizedRunner, batch: Batch) -> torch.Tensor | None:
        """Do forward, backward and synchronization, and add to the gradients; return the loss.

        With a batch that does not fit, the one before stands in for it, so that the others need not wait for this rank.
        None is returned where that is so because all ranks have a batch of the same other size.
        """
        runner, by_name = sized.runner, self._by_name
        fits = batch.problem is None or sized is not self._example
        updated = {name: by_name[name] for name in runner.updated}
        # The next step overwrites the tensors that these gradients are views of.
        before = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in updated.items()
        }
        if sized is not self._example:
            runner.take_buffers(self._runner)
        buffers = runner.buffer_values()
        usable = fits or runner.has_inputs
        parts = whole_parts(batch.replicated if usable else self._inputs.zeros(self.device))
        if sized.shards is not None:
            parts.update(sized.shards.parts(batch.inputs if fits else {}))
        if fits or not usable:
            runner.set_inputs(parts)
        runner.differentiate(self.step_number, loss_scale=batch.scale)
        mark = None
        if self._world.size > 1:
            mark = batch.mark(self.device) if sized is self._example else batch.fingerprint(self.device)
        loss, marks = runner.loss_and_marks(mark)
        differ = False
        if mark is not None:
            self._world.wait_for_device(self.device)
            differ = len(set(marks.tolist())) > 1
        if differ or not fits:
            runner.restore_buffers(buffers)
            for name, parameter in updated.items():
                parameter.grad = before[name]
            require_same(batch)
            if not fits:
                return None
        if sized is not self._example:
            self._runner.take_buffers(runner)
        addresses: set[int] = set()
        for name, new_gradient in runner.own_gradients().items():
            if new_gradient is None:
                # Others share all there is of it.
                continue
            # Autograd may hand out one tensor as the gradients of two weights; clipping scales them in place.
            gradient = (
                new_gradient.clone() if new_gradient.data_ptr() in addresses else new_gradient.contiguous()
            )
            addresses.add(gradient.data_ptr())
            earlier = before[name]
            updated[name].grad = gradient if earlier is None else earlier.add_(gradient)
        if sized.outputs is not None:
            self._last = sized, batch
        return loss

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the module's results in the last step that `parallelize(outputs=...)` named, whole, by name.

        They are those of the weights before the update, without a gradient, and the same on all ranks. All ranks must
        call it; it costs one sum over the ranks for each value that they follow from.

        Raises:
            RuntimeFailure: none were named, or there was no step.
        """
        sized, batch = self._last or (self._example, None)
        return collect_outputs(sized.outputs, sized.runner, sized.shards, batch)

    def _taken(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], scale: float, scaler: GradScaler | None
    ) -> Batch:
        """Return the batch of this rank for a step, or the reason why it refuses the step."""
        try:
            for name, flag, parameters in self._trained:
                for parameter in parameters:
                    if parameter.requires_grad is not flag:
                        raise RuntimeFailure(
                            f"parameter {name}: requires_grad is {not flag}, must be {flag} as when parallelize was "
                            "called; set it before, or call parallelize again"
                        )
            scale = checked_scale(scale)
            if scaler is not None:
                scale *= scale_of(scaler, self.graph, self.device)
            batch = self._inputs.checked(args, kwargs, scale)
            if self._example.shards is not None:
                self._example.shards.require_like(batch)
            return batch
        except RuntimeFailure as problem:
            return refused(problem)

    def apply(self, scaler: GradScaler | None = None) -> None:
        """Update the weights from the gradients so far, and forget these. All ranks must call it.

        Args:
            scaler: with which `backward` was called: gradients are unscaled where `scaler.unscale_(trainer.optimizer)`
                has not done so, and the update is skipped on all ranks where one of them found an infinite gradient
                or NaN, as `scaler.step(optimizer)` does. `scaler.update()` follows, on every rank.

        Raises:
            RuntimeFailure: gradients are scaled, and there is no scaler.
        """
        if scaler is None and self._scaled:
            raise RuntimeFailure(
                "apply: the gradients were scaled by a GradScaler, must be unscaled; pass it: apply(scaler)"
            )
        self._applies = True
        try:
            if scaler is None:
                self.optimizer.step()
            else:
                step_scaled(scaler, self.optimizer, self._world, self.device)
        finally:
            self._applies = False
        self._runner.make_weights_whole()
        self.zero_grad()

    def _refuse_foreign_step(self, *_: object) -> None:
        """Refuse an update that is not `apply`'s: ranks would neither agree on it nor gather their shares."""
        if not self._applies:
            raise RuntimeFailure(
                "optimizer: makes a step by itself, must be called by the trainer; call trainer.apply(), with a "
                "GradScaler trainer.apply(scaler)"
            )

    def zero_grad(self) -> None:
        """Forget the gradients so far."""
        self._scaled = False
        for parameter in self._parameters:
            parameter.grad = None

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; return the norm before.

        Exact: each element of a weight counts once, though several ranks may hold it. All ranks must call it, between
        `backward` and `apply`.

        Args:
            max_norm: the largest norm allowed.
            norm_type: p of the p-norm; `float("inf")` for the largest element.
        """
        return self._clipping.clip(max_norm, norm_type, self.device)

    # ---- states

    def state_dict(self, *, rank_0_only: bool = False) -> OrderedDict[str, Any]:
        """Return the plain module's own state dict: the same names, whole tensors, on the CPU.

        All ranks must call it. With `rank_0_only`, the others return an empty one, and save memory and time.
        Evaluate by `module.load_state_dict(trainer.state_dict())` and the module itself.
        """
        return self._module_state.collect(rank_0_only=rank_0_only)

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take over the values of a state dict of the plain module. All ranks must call it; rank 0's counts.

        Args:
            state_dict: on rank 0, with every name of the module's own; None elsewhere is enough.

        Raises:
            RuntimeFailure: a name is missing, unknown, or has another shape.
        """
        self._module_state.load(state_dict)

    def optimizer_state_dict(self, *, rank_0_only: bool = False) -> dict[str, Any]:
        """Return the optimizer's state as the plain module's optimizer would have it: whole tensors, on the CPU.

        All ranks must call it. It loads into an optimizer made by the same factory from `module.parameters()`, and
        into a trainer under any other strategy.
        """
        return self._optimizer_parts.collect(self._plan, self._world, self.device, rank_0_only=rank_0_only)

    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take over an optimizer's state in the plain module's layout. All ranks must call it; rank 0's counts."""
        self._optimizer_parts.load(self._plan, self._world, state_dict, self.device)

    def checkpoint(self, *, rank_0_only: bool = False) -> dict[str, Any]:
        """Return all that `resume` needs, under this strategy or another; `torch.save` writes it."""
        return {
            "module": self.state_dict(rank_0_only=rank_0_only),
            "optimizer": self.optimizer_state_dict(rank_0_only=rank_0_only),
            "step_number": self.step_number,
        }

    def resume(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint. All ranks must call it; rank 0's counts, None elsewhere is enough.

        Raises:
            RuntimeFailure: it is no checkpoint, or of another module.
        """
        keys = ("module", "optimizer", "step_number")
        complete = checkpoint is not None and all(key in checkpoint for key in keys)
        if not from_rank_0(complete):
            raise RuntimeFailure(
                f"checkpoint: lacks one of {', '.join(keys)} on rank 0, must have all; pass what checkpoint() returned"
            )
        own: Mapping[str, Any] = checkpoint if checkpoint is not None and complete else dict.fromkeys(keys)
        self.load_state_dict(own["module"])
        self.load_optimizer_state_dict(own["optimizer"])
        self.step_number = from_rank_0(own["step_number"])

    @property
    def _by_name(self) -> dict[str, nn.Parameter]:
        return dict(self._parameters.named)

    def _own_parameters(self) -> Parameters:
        own = self._runner.own_tensors()
        named = []
        for name, parameter in self._module.named_parameters():
            part = own.get(name)
            if part is None:
                part = torch.empty([0] * parameter.ndim, dtype=parameter.dtype, device=self.device)
            named.append((name, nn.Parameter(part, requires_grad=parameter.requires_grad)))
        return Parameters(named)
