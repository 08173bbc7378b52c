"""Export a module with torch.export and normalize what it returns to the scalar loss."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.export import ExportedProgram, _trace
from torch.export.graph_signature import InputKind
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves, tree_map

from graph.errors import ImportFailure, NeedsDataError
from graph.importing import locations
from graph.importing.functional import FunctionalProgram, functional_program
from graph.importing.untraced import Untraced, changed, gradient_hook, noticing

_PREFIX = "module."
# Takes from a module's result the tensors to be returned beside the loss.
Keep = Callable[[Any], Sequence[torch.Tensor]]


class _LossModule(nn.Module):
    """Returns the loss alone, wherever the module's result holds it; `keep` takes what is wanted beside it."""

    def __init__(self, module: nn.Module, noticed: Untraced, keep: Keep | None) -> None:
        super().__init__()
        self.module = module
        self._noticed = noticed
        self._keep = keep
        self.training = module.training  # not train(): parts may be in evaluation mode on purpose

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        with noticing(self.module, self._noticed):
            result = self.module(*args, **kwargs)
            loss = loss_of(result)
            return loss if self._keep is None else (loss, *self._keep(result))


class NoLossError(Exception):
    """The module returned no scalar loss; holds what it returned."""


def loss_of(result: Any) -> torch.Tensor:
    """Return the scalar loss that a module's result is, or holds: as `.loss`, under "loss", or first of a tuple.

    Raises:
        NoLossError: it is none.
    """
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss", getattr(result, "loss", None))
    elif isinstance(result, (tuple, list)) and not hasattr(result, "loss"):
        loss = result[0] if result else None
    elif not isinstance(result, torch.Tensor):
        loss = getattr(result, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise NoLossError(type(result).__name__)
    if loss.numel() != 1:
        raise NoLossError(f"a tensor of shape {list(loss.shape)}")
    return loss.reshape(())


@contextmanager
def _quiet() -> Iterator[None]:
    """Hush the exporter: its warnings are about its own internals."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.export", "torch._export", "torch.fx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    # Where it fails it also prints the graph so far, which nothing switches off.
    unsaid = mock.patch.object(_trace, "print", lambda *_, **__: None, create=True)  # noqa: PT008  # keeps no arguments
    try:
        with warnings.catch_warnings(), unsaid:
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, keep: Keep | None = None
) -> FunctionalProgram:
    """Export `module` in training mode as a functional ATen graph whose first result is the scalar loss.

    `keep` takes further results; without it there are none.

    Raises:
        ImportFailure: the module cannot be exported, returns no scalar loss, or does what no export keeps.
    """
    if not module.training:
        module.train()
    hooked = gradient_hook(module)
    if hooked is not None:
        raise ImportFailure(
            f"model {name}: {hooked} has a hook that runs in the backward, must have none, as export leaves it out; "
            "remove it"
        )
    noticed = Untraced()
    try:
        with (
            _quiet(),
            _unchecked_values(),
            _hooks_put_back(module),
            without_data(module, args, kwargs) as given,
        ):
            program = torch.export.export(_LossModule(module, noticed, keep), *given, strict=False)
            if noticed.changed:
                # A first forward may settle what later ones leave alone: theirs counts.
                later = Untraced()
                with changed(module, noticed):
                    program = torch.export.export(_LossModule(module, later, keep), *given, strict=False)
                noticed.changed = later.changed
            _refuse_lost_tensors(program, name)
            _keep_gradients_stopped(program.graph_module)
            functional = functional_program(program)
    except NoLossError as error:
        raise ImportFailure(
            f"model {name}: returns {error}, must return a scalar loss, or have one as .loss, under "
            "'loss' or first in a tuple; compute the loss in its forward"
        ) from None
    except ImportFailure:
        raise
    except (
        Exception
    ) as error:  # whatever the module or the exporter raises is the user's to know, in one line
        raise _failure(name, error) from None
    problem = noticed.problem()
    if problem is not None:
        raise ImportFailure(f"model {name}: {problem}")
    return functional


def _refuse_lost_tensors(program: ExportedProgram, name: str) -> None:
    """Refuse a tensor that the exporter took for a constant although it is one of the module's; torch would crash.

    Raises:
        ImportFailure: there is one.
    """
    for spec in program.graph_signature.input_specs:
        constant = program.constants.get(str(spec.target)) if spec.kind is InputKind.CONSTANT_TENSOR else None
        if isinstance(constant, FakeTensor):
            node = next(node for node in program.graph.nodes if node.name == spec.arg.name)
            node_locations = filter(None, map(locations.of_node, (node, *node.users)))
            at = next((f" at {location}" for location in node_locations), "")
            raise ImportFailure(
                f"model {name}: torch.export loses a tensor{at}, as where a forward uses .data, must see all; use the "
                "tensor itself there, under torch.no_grad()"
            )


@contextmanager
def _hooks_put_back(module: nn.Module) -> Iterator[None]:
    """Take away the forward hooks that a forward registers once: an export takes back the attribute that says so.

    transformers' models capture hidden states so; each export would add them once more.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    before = [
        (registered, dict(registered))
        for part in module.modules()
        for registered in (getattr(part, kind) for kind in kinds)
    ]
    try:
        yield
    finally:
        for registered, own in before:
            if registered != own:
                registered.clear()
                registered.update(own)


@contextmanager
def without_data(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Put tensors without data on the CPU in place of all on meta into `module`, and yield those of its inputs.

    On meta the tensors that a forward makes itself (a mask, zeros) would lie on the CPU, and meet those on meta.
    The module has its own tensors again afterwards. Where nothing is on meta, nothing changes.
    """
    given = (tuple(args), dict(kwargs))
    slots: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (tensors, name, tensor)
        for part in module.modules()
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None and tensor.is_meta
    ]
    if not slots and not _any_meta(given):
        yield given
        return
    made: dict[int, torch.Tensor] = {}  # a tied tensor has one stand-in

    def stand_in(item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or not item.is_meta:
            return item
        if id(item) not in made:
            made[id(item)] = _on_cpu(item)
        return made[id(item)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            for tensors, name, tensor in slots:
                tensors[name] = stand_in(tensor)
            yield tree_map(stand_in, given)
        finally:
            for tensors, name, tensor in slots:
                tensors[name] = tensor


def _any_meta(given: Any) -> bool:
    leaves = tree_leaves(given)
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor on the CPU; within a fake mode it takes no memory."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(result, requires_grad=tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)


def _failure(name: str, error: Exception) -> ImportFailure:
    """Return the line that says what failed, where in the user's source, and what to change."""
    location = locations.of_error(error)
    at = f" at {location}" if location else ""
    text = _first_line(error)
    if locations.passed_through(error, "nn/utils/rnn.py") or (
        "FakeTensor" in text and locations.passed_through(error, "nn/modules/rnn.py")
    ):
        return ImportFailure(
            f"model {name}: torch.export fails{at}: packed sequences have lengths that depend on data, must be padded "
            "tensors; call the recurrent layer on the padded batch and leave the padding out of the loss"
        )
    if type(error).__name__ in _READS_DATA:
        return ImportFailure(
            f"model {name}: torch.export fails{at}: a Python value is read out of a tensor ({text}), must not depend "
            "on data; replace if, bool(), int(), item() and tolist() there by torch.where or a constant"
        )
    message = f"model {name}: torch.export fails{at} ({text}), must succeed; "
    if "meta" in str(error).lower():
        return NeedsDataError(
            f"{message}make the tensor in forward, on the device of an input, or register it as a buffer"
        )
    return ImportFailure(f"{message}check that the module runs on the example inputs, and change that line")


# What the exporter raises where a Python value would be read out of a tensor.
_READS_DATA = frozenset(
    {
        "GuardOnDataDependentSymNode",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UserError",
    }
)


@contextmanager
def _unchecked_values() -> Iterator[None]:
    """Skip checks of values on which no result depends.

    A causal mask is told by its values to run a faster kernel, with the same result; distributions check their
    parameters.
    """
    distribution, detect = Distribution._validate_args, transformer._detect_is_causal_mask

    def hinted(_mask: torch.Tensor | None, is_causal: bool | None = None, _size: int | None = None) -> bool:  # noqa: FBT001 - torch's signature
        return is_causal is True

    Distribution.set_default_validate_args(value=False)
    setattr(transformer, "_detect_is_causal_mask", hinted)  # noqa: B010 - mypy refuses to assign a function
    try:
        yield
    finally:
        Distribution.set_default_validate_args(value=distribution)
        transformer._detect_is_causal_mask = detect


def _keep_gradients_stopped(module: fx.GraphModule) -> None:
    """Detach what leaves a `torch.no_grad` region: inlining would forget the region."""
    graph = module.graph
    region = torch.ops.higher_order.wrap_with_set_grad_enabled
    stopped = [node for node in graph.nodes if node.target is region and node.args[0] is False]
    if not stopped:
        return
    for node in stopped:
        for result in list(node.users):
            value = result.meta.get("val")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(detached, delete_user_cb=partial(_is_other, detached))
    module.recompile()


def _is_other(node: fx.Node, user: fx.Node) -> bool:
    return user is not node


def _first_line(error: Exception) -> str:
    """Return an error's type and first line, without the exporter's suggestions, links and symbols."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = _NOISE.sub("", lines[0]).strip() if lines else ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


_NOISE = re.compile(
    r"\s*(\(unhinted: .*|\(Size-like symbols.*|For more information.*|https?://\S+|"
    r"The following call raised this error.*|To fix the error.*)"
)


def qualified_name(name: str) -> str:
    """Return a state-dict name of the user's module from one of the exported wrapper."""
    return name.removeprefix(_PREFIX)
