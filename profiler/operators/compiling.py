"""Compiles a local call to a function: targets and arguments are resolved once for all steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.hub import tqdm  # type: ignore[attr-defined]

from graph.calls import LocalCall
from graph.compiled_calls import COMPILED, parts_of
from graph.errors import CostError
from graph.operators import Argument, Slot
from profiler.operators import custom_operators
from profiler.operators.dtypes import torch_dtype

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class ExecutionContext:
    """The context of a call besides its inputs: the run's seed, the step, and the device of factories.

    The step is a tensor while torch.compile traces. loss_count: what the loss is divided by over all micro-batches of a
    step, a scalar; None: each divides by its own.
    """

    seed: int = 0
    step: int | torch.Tensor = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    loss_count: torch.Tensor | None = None


Compiled = Callable[[Sequence[torch.Tensor], ExecutionContext], Tensors]

_numbers = itertools.count()


def _histogram(values: torch.Tensor, bins: int, low: float, high: float) -> torch.Tensor:
    """Count integers on CPU too, where torch counts floats alone."""
    if values.is_floating_point() or values.device.type != "cpu":
        return torch.histc(values, bins, low, high)
    return torch.histc(values.double(), bins, low, high).to(values.dtype)


# Reshaping works on any memory layout, as assembled local tensors may differ from the exported ones in it.
_REPLACED: dict[str, Callable[..., Any]] = {
    "aten.view.default": torch.reshape,
    "aten.histc.default": _histogram,
    "aten.conv1d.default": torch.conv1d,
    "aten.conv2d.default": torch.conv2d,
    "aten.conv3d.default": torch.conv3d,
    "aten.linear.default": torch.nn.functional.linear,
    "aten.relu.default": torch.relu,
}


def compile_call(call: LocalCall) -> Compiled:
    """Return the function of a call.

    Its inputs are dense tensors of `call.inputs`' shapes, its outputs follow `call.outputs`. Autograd records it; an
    input that no argument names is unused, and its gradient None.

    Raises:
        CostError: the installed torch has no such operator.
    """
    if call.target == COMPILED:
        return _compiled(call)
    if call.target.startswith("soapstone."):
        return _with_context(custom_operators.resolve(call), call)
    function, positional, keyword = _aten(call)
    if not call.inputs:
        return _factory(function, positional, keyword)
    return _bound(function, positional, keyword)


def _with_context(function: Callable[..., Any], call: LocalCall) -> Compiled:
    slots = [(name, _template(value)) for name, value in call.arguments]
    constants = {name: value for name, value in slots if not _has_slot(value)}
    tensors = [(name, value) for name, value in slots if _has_slot(value)]
    if call.target in custom_operators.NEED_CONTEXT:

        def run_bound(inputs: Sequence[torch.Tensor], context: ExecutionContext) -> Tensors:
            given = {name: _fill(value, inputs) for name, value in tensors}
            return _as_tuple(function(**given, **constants, context=context))

        return run_bound

    def run(inputs: Sequence[torch.Tensor], _context: ExecutionContext) -> Tensors:
        given = {name: _fill(value, inputs) for name, value in tensors}
        return _as_tuple(function(**given, **constants))

    return run


def _aten(call: LocalCall) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    _, name, overload = call.target.split(".")
    try:
        operator = getattr(getattr(torch.ops.aten, name), overload)
    except AttributeError:
        raise CostError(
            f"{call.target}: torch {torch.__version__} has no such operator, must have it; use the version that "
            "the graph was imported with"
        ) from None
    given = dict(call.arguments)
    positional: list[Any] = []
    keyword: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if argument.name not in given:
            continue
        value = _typed(_template(given[argument.name]), argument.name)
        if argument.kwarg_only or len(positional) < len(keyword):
            keyword[argument.name] = value
        else:
            positional.append(value)
    if call.target in _REPLACED:
        return _REPLACED[call.target], positional, {}
    return operator, positional, keyword


def _typed(value: Any, name: str) -> Any:
    return torch_dtype(value) if name == "dtype" and isinstance(value, str) else value


def _template(value: Argument) -> Any:
    return [_template(item) for item in value] if isinstance(value, tuple) else value


def _has_slot(value: Any) -> bool:
    return isinstance(value, Slot) or (isinstance(value, list) and any(_has_slot(item) for item in value))


def _fill(value: Any, inputs: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Slot):
        return inputs[value.index]
    if isinstance(value, list):
        return [_fill(item, inputs) for item in value]
    return value


def _as_tuple(result: Any) -> Tensors:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _factory(function: Callable[..., Any], positional: list[Any], keyword: dict[str, Any]) -> Compiled:
    def make(_inputs: Sequence[torch.Tensor], context: ExecutionContext) -> Tensors:
        return (function(*positional, **keyword, device=context.device),)

    return make


def _bound(function: Callable[..., Any], positional: list[Any], keyword: dict[str, Any]) -> Compiled:
    filled = [index for index, value in enumerate(positional) if _has_slot(value)]
    filled_keywords = [name for name, value in keyword.items() if _has_slot(value)]
    direct = [(index, value.index) for index in filled if isinstance(value := positional[index], Slot)]
    if len(direct) == len(filled) and not filled_keywords:

        def run_direct(inputs: Sequence[torch.Tensor], _context: ExecutionContext) -> Tensors:
            arguments = positional.copy()
            for index, slot in direct:
                arguments[index] = inputs[slot]
            result = function(*arguments, **keyword)
            return (result,) if isinstance(result, torch.Tensor) else tuple(result)

        return run_direct

    def run(inputs: Sequence[torch.Tensor], _context: ExecutionContext) -> Tensors:
        arguments = positional.copy()
        for index in filled:
            arguments[index] = _fill(positional[index], inputs)
        named = {**keyword, **{name: _fill(keyword[name], inputs) for name in filled_keywords}}
        return _as_tuple(function(*arguments, **named))

    return run


# Of equal calls (the layers of a transformer, or a run and its verification) one is compiled.
@lru_cache(maxsize=1024)
def _compiled(call: LocalCall) -> Compiled:
    """Return the function of several calls by torch.compile, which compiles it at its first execution."""
    if hasattr(tqdm, "set_lock"):
        # torch.fx shows progress by tqdm, whose own lock among processes is a semaphore that a killed worker leaves.
        tqdm.set_lock(threading.RLock())
    compiled = torch.compile(_named(_body(call)), fullgraph=True, dynamic=False)

    def run(inputs: Sequence[torch.Tensor], context: ExecutionContext) -> Tensors:
        # A number would be compiled in.
        step = torch.tensor(context.step)
        return tuple(compiled(step, context.seed, context.device, *inputs))

    return run


def _body(call: LocalCall) -> Callable[..., Tensors]:
    parts = [(_within(part.call), part) for part in parts_of(call)]
    results = call.argument("results")

    def body(step: int | torch.Tensor, seed: int, device: torch.device, *inputs: torch.Tensor) -> Tensors:
        context = ExecutionContext(seed, step, device)
        tensors = list(inputs)
        for execute, part in parts:
            given = [
                tensors[number] if wanted else tensors[number].detach()
                for number, wanted in zip(part.sources, part.call.gradients, strict=True)
            ]
            for position, made in enumerate(execute(given, context)):
                tensors.append(made.detach() if position in part.constants else made)
        return tuple(tensors[number] for number in results)

    return body


def _within(call: LocalCall) -> Compiled:
    """Return the function of a call that is a part of a compiled one."""
    if call.target != COMPILED:
        return compile_call(call)
    body = _body(call)

    def run(inputs: Sequence[torch.Tensor], context: ExecutionContext) -> Tensors:
        return body(context.step, context.seed, context.device, *inputs)

    return run


def _named(body: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Return the function with code of its own: torch keeps what it has compiled by code, a few of each."""
    assert isinstance(body, FunctionType)
    code = body.__code__.replace(co_name=f"stretch_{next(_numbers)}")
    return FunctionType(code, body.__globals__, code.co_name, body.__defaults__, body.__closure__)
