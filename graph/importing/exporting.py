"""Export a module with torch.export and normalize what it returns to the scalar loss."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from graph.errors import ImportFailure

_PREFIX = "module."


class _LossModule(nn.Module):
    """Returns the loss alone, wherever the module's result holds it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # not train(): parts may be in evaluation mode on purpose

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.module(*args, **kwargs)
        loss = result if isinstance(result, torch.Tensor) else getattr(result, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise _NoLossError(type(result).__name__)
        if loss.numel() != 1:
            raise _NoLossError(f"a tensor of shape {list(loss.shape)}")
        return loss.reshape(())


class _NoLossError(Exception):
    """The module returned no scalar loss; holds what it returned."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Hush the exporter: its warnings are about its own internals."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch.export", "torch._export", "torch.fx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> ExportedProgram:
    """Export `module` in training mode as a functional ATen graph whose only result is the scalar loss.

    Raises:
        ImportFailure: the module cannot be exported, or returns no scalar loss.
    """
    if not module.training:
        module.train()
    try:
        with _quiet():
            program = torch.export.export(_LossModule(module), tuple(args), dict(kwargs), strict=False)
            _keep_gradients_stopped(program.graph_module)
            functional: ExportedProgram = program.run_decompositions({})
            return functional
    except _NoLossError as error:
        raise ImportFailure(
            f"model {name}: returns {error}, must return a scalar loss or an object whose .loss is one; "
            "compute the loss in its forward"
        ) from None
    except (
        Exception
    ) as error:  # whatever the module or the exporter raises is the user's to know, in one line
        raise ImportFailure(
            f"model {name}: torch.export fails ({_first_line(error)}), must succeed; "
            "avoid control flow that depends on data, and check the example inputs"
        ) from error


def _keep_gradients_stopped(module: fx.GraphModule) -> None:
    """Detach what leaves a `torch.no_grad` region: inlining would forget the region."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0] is not False:
            continue
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def qualified_name(name: str) -> str:
    """Return a state-dict name of the user's module from one of the exported wrapper."""
    return name.removeprefix(_PREFIX)
