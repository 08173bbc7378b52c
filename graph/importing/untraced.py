"""What a module does beside the operators of its forward: no trace shows it, so that it is refused.

A module that is trained from its trace would lose, without a word: hooks on gradients, backwards of the user's own that
are not what autograd makes of their forwards, random numbers that are not torch's, and what Python counts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

# Larger calls of a backward of the user's own are compared in as many elements a dim.
_LARGEST_CALL = 1 << 22
_FEW = 8
_TOLERANCE = 1e-9
_NUMBERS = (bool, int, float)


@dataclass(slots=True)
class _FunctionCall:
    """A call of an autograd function: tensors as (shape, dtype, requires_grad), all else as it is."""

    function: type[torch.autograd.Function]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _GivenInput:
    """A tensor among the arguments of a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiated: bool


@dataclass(slots=True)
class Untraced:
    """Side effects of a forward that its trace does not show."""

    hooks: int = 0
    calls: dict[type, _FunctionCall] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def problem(self) -> str | None:
        """Return the first side effect that the graph lacks, in words that follow the model's name, or None."""
        if self.hooks:
            return (
                "its forward puts hooks on tensors, must not, as export leaves them out; compute what they do in the "
                "forward"
            )
        if self.drawn:
            return (
                f"its forward draws from {self.drawn[0]}, must not, as export keeps the numbers of one draw for all "
                "steps; draw by torch, or pass them as an input"
            )
        if self.changed:
            name, (before, after) = next(iter(self.changed.items()))
            return (
                f"its forward changes attribute {name} ({before!r} to {after!r}), must not, as export keeps its value "
                "for all steps; make it a buffer, or change it outside of the forward"
            )
        for call in self.calls.values():
            reason = _lost_backward(call)
            if reason is not None:
                return (
                    f"{call.function.__qualname__} {reason}, must be what autograd makes of its forward, as export "
                    "keeps that alone; write it with torch's operators"
                )
        return None


def gradient_hook(module: nn.Module) -> str | None:
    """Return the name of the module, part or parameter with a hook that runs in the backward; None: none has one."""
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        return "every module"
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            return f"module {name}" if name else "the module"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"parameter {name}"
    return None


@contextmanager
def noticing(module: nn.Module, noticed: Untraced) -> Iterator[None]:
    """Record in `noticed` the side effects of the body's call of `module`."""
    numbers, generators = _numbers(module), _generators()
    with _noticed_hooks(noticed), _noticed_functions(noticed):
        yield
    after = _generators()
    noticed.drawn += [name for name, state in generators.items() if state != after[name]]
    noticed.changed |= {
        name: (numbers.get(name), value)
        for name, value in _numbers(module).items()
        if numbers.get(name) != value
    }


@contextmanager
def changed(module: nn.Module, noticed: Untraced) -> Iterator[None]:
    """Let the body have the module as its forward has left it: an export puts its attributes back."""
    attributes = [(*_split(module, name), before, after) for name, (before, after) in noticed.changed.items()]
    for part, name, _, after in attributes:
        setattr(part, name, after)
    try:
        yield
    finally:
        for part, name, before, _ in attributes:
            if before is None:
                # The forward made it, perhaps over one of the class.
                vars(part).pop(name, None)
            else:
                setattr(part, name, before)


def _split(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return the numbers among the attributes of all parts of a module."""
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) in _NUMBERS
    }


def _generators() -> dict[str, object]:
    """Return the states of the generators that a forward may draw from beside torch's."""
    states: dict[str, object] = {"Python's random": random.getstate()}
    if "numpy" in sys.modules:
        import numpy as np

        states["numpy's random"] = repr(np.random.get_state(legacy=False))
    return states


@contextmanager
def _noticed_hooks(noticed: Untraced) -> Iterator[None]:
    names = ("register_hook", "register_post_accumulate_grad_hook")
    before = {name: getattr(torch.Tensor, name) for name in names}

    def counting(register: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(register)
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            noticed.hooks += 1
            return register(tensor, *args, **kwargs)

        return counted

    for name, register in before.items():
        setattr(torch.Tensor, name, counting(register))
    try:
        yield
    finally:
        for name, register in before.items():
            setattr(torch.Tensor, name, register)


@contextmanager
def _noticed_functions(noticed: Untraced) -> Iterator[None]:
    """Notice the first call of each autograd function that is not torch's.

    Its `forward` is replaced, not `apply`, which users keep under names of their own.
    """
    own = [
        function
        for function in _subclasses(torch.autograd.Function)
        if not function.__module__.startswith("torch.")
    ]
    before = {function: vars(function)["forward"] for function in own if "forward" in vars(function)}

    def noting(function: type, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            given = args if _has_context_apart(function) else args[1:]
            noticed.calls.setdefault(function, _FunctionCall(function, tuple(map(_described, given))))
            return forward(*args, **kwargs)

        return noted

    for function in before:
        setattr(function, "forward", staticmethod(noting(function, function.forward)))  # noqa: B010 - mypy: a method
    try:
        yield
    finally:
        for function, forward in before.items():
            setattr(function, "forward", forward)  # noqa: B010 - mypy: a method


def _subclasses(root: Any) -> set[type[torch.autograd.Function]]:
    children: list[Any] = root.__subclasses__()
    return {*children, *(descendant for child in children for descendant in _subclasses(child))}


def _has_context_apart(function: Any) -> bool:
    """True where `forward` takes no context, as `setup_context` does."""
    return function.setup_context is not torch.autograd.Function.setup_context


def _described(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return _GivenInput(tuple(argument.shape), argument.dtype, argument.is_floating_point())


def _lost_backward(call: _FunctionCall) -> str | None:
    """Return why the graph would not have the backward of a call; None where autograd makes the same of its forward."""
    elements = sum(
        torch.Size(argument.shape).numel() for argument in call.arguments if isinstance(argument, _GivenInput)
    )
    most = None if elements <= _LARGEST_CALL else _FEW
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(0)
        given = [
            _tensor(argument, most) if isinstance(argument, _GivenInput) else argument
            for argument in call.arguments
        ]
        try:
            own = _gradients(call.function.apply, given)
            plain = _gradients(lambda *args: _forward(call.function, args), given)
        except Exception as error:  # whatever its forward or backward raises
            return f"has a backward of its own that cannot be compared ({type(error).__name__})"
    same = all(
        torch.allclose(own_gradient, plain_gradient, _TOLERANCE, _TOLERANCE, equal_nan=True)
        for own_gradient, plain_gradient in zip(own, plain, strict=True)
    )
    return None if same else "has a backward of its own"


def _tensor(given: _GivenInput, most: int | None) -> torch.Tensor:
    shape = [size if most is None else min(size, most) for size in given.shape]
    if not given.differentiated:
        return torch.zeros(shape, dtype=given.dtype)
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def _gradients(function: Callable[..., Any], given: Sequence[Any]) -> list[torch.Tensor]:
    """Return the gradients of a random sum of a function's results, by tensors among its arguments."""
    results = function(*given)
    outputs = [
        result
        for result in (results if isinstance(results, tuple) else (results,))
        if isinstance(result, torch.Tensor) and result.requires_grad
    ]
    inputs = [argument for argument in given if isinstance(argument, torch.Tensor) and argument.requires_grad]
    if not outputs or not inputs:
        return [torch.zeros_like(tensor) for tensor in inputs]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(result.shape, dtype=result.dtype, generator=generator) for result in outputs]
    gradients = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(inputs, gradients, strict=True)
    ]


class _Context:
    """Takes what a forward keeps for its backward, and keeps nothing."""

    needs_input_grad = (True,) * 64

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


def _forward(function: Any, args: Sequence[Any]) -> Any:
    return function.forward(*args) if _has_context_apart(function) else function.forward(_Context(), *args)
