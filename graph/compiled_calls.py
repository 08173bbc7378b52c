"""A compiled call: several local calls that a device executes as one compiled function, with one cost key.

It is a `LocalCall` of the target `soapstone.compiled`, so that it is measured, keyed and stored as any other. Its
arguments hold its parts; the tensors that these read and make are numbered: first the inputs of the whole, then the
outputs of the parts in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from graph.calls import LocalCall
from graph.operators import Argument, TensorSpec

COMPILED = "soapstone.compiled"


@dataclass(frozen=True, slots=True)
class PartCall:
    """A call within another: the numbers of the tensors that it reads, one for each of its inputs.

    constants: positions of the outputs that carry no gradient though autograd would give them one.
    """

    call: LocalCall
    sources: tuple[int, ...]
    constants: tuple[int, ...] = ()


def compiled_call(
    inputs: Sequence[TensorSpec], parts: Sequence[PartCall], results: Sequence[int]
) -> LocalCall:
    """Return the call that executes `parts` in order on some inputs and returns the tensors numbered `results`."""
    made = [*inputs, *(spec for part in parts for spec in part.call.outputs)]
    wanted = {
        source
        for part in parts
        for source, gradient in zip(part.sources, part.call.gradients, strict=True)
        if gradient
    }
    return LocalCall(
        COMPILED,
        (("parts", tuple(_document(part) for part in parts)), ("results", tuple(results))),
        tuple(inputs),
        tuple(made[number] for number in results),
        tuple(number in wanted for number in range(len(inputs))),
        (("parts", tuple(part.call.bindings for part in parts)),),
    )


def parts_of(call: LocalCall) -> tuple[PartCall, ...]:
    """Return the parts of a compiled call, in order; one read back from its key has no bindings."""
    parts = parts_in(call.arguments)
    bindings = dict(call.bindings).get("parts", ((),) * len(parts))
    return tuple(
        replace(part, call=replace(part.call, bindings=bound))
        for part, bound in zip(parts, bindings, strict=True)
    )


def parts_in(arguments: Sequence[tuple[str, Argument]]) -> tuple[PartCall, ...]:
    """Return the parts, without bindings, that the arguments of a compiled call or of a fused operator hold."""
    return tuple(map(_part, dict(arguments)["parts"]))


def _document(part: PartCall) -> tuple[Any, ...]:
    call = part.call
    return (
        call.target,
        call.arguments,
        tuple((spec.dtype, spec.shape) for spec in call.inputs),
        tuple((spec.dtype, spec.shape) for spec in call.outputs),
        call.gradients,
        part.sources,
        part.constants,
    )


def _part(document: tuple[Any, ...]) -> PartCall:
    target, arguments, inputs, outputs, gradients, sources, constants = document
    call = LocalCall(target, arguments, _specs(inputs), _specs(outputs), gradients)
    return PartCall(call, sources, constants)


def _specs(documents: tuple[Any, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(shape, dtype) for dtype, shape in documents)
