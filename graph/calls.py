"""A local call: one task's operator call, on dense local tensors.

It is what the profiler measures and what the runtime runs. Its `key` holds exactly what its cost depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

from graph.canonical import canonical_json
from graph.operators import FLOATING, Argument, Slot, TensorSpec, argument_from_json, argument_to_json

CostPhase = Literal["forward", "backward", "update"]
"""Which part of a training step the cost of a call is of."""


@dataclass(frozen=True)
class LocalCall:
    """An operator rewritten for one region.

    `arguments` hold slots for `inputs` (local specs). `gradients` tells which inputs need a gradient: it decides
    what the backward does. `bindings` are integers known only in a plan (the global offsets and operator number
    from which dropout draws); they change no cost and so are not in the key. `warm`: it reads weights that another
    call has just read (`OperatorGraph.rereads_weights`), so that they may be in the caches still.
    """

    target: str
    arguments: tuple[tuple[str, Argument], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    gradients: tuple[bool, ...]
    bindings: tuple[tuple[str, Any], ...] = ()
    warm: bool = False

    def argument(self, name: str) -> Argument:
        """Return the argument called `name`; raises KeyError where there is none."""
        return dict(self.arguments)[name]

    @cached_property
    def document(self) -> dict[str, Any]:
        """The cost key as JSON: operator type, attributes, shapes, dtypes, differentiated inputs, if it is warm."""
        return {
            "target": self.target,
            "arguments": [[name, argument_to_json(value)] for name, value in self.arguments],
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
            "gradients": list(self.gradients),
            **({"warm": True} if self.warm else {}),
        }

    @property
    def key(self) -> str:
        """Return the cost key: the canonical text of `document`, which has all that the cost depends on."""
        arguments = ",".join([f'["{name}",{_text(value)}]' for name, value in self.arguments])
        inputs, outputs = _specs_text(self.inputs), _specs_text(self.outputs)
        warm = ',"warm":true' if self.warm else ""
        return (
            f'{{"arguments":[{arguments}],"gradients":{_text(self.gradients)},"inputs":{inputs},'
            f'"outputs":{outputs},"target":"{self.target}"{warm}}}'
        )

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the cost key."""
        return sha256(self.key.encode()).hexdigest()

    def __hash__(self) -> int:
        """Return a hash that is quick to ask for again: a search keeps calls in tables of several kinds."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle: all but the hash, since texts hash otherwise in another process."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @cached_property
    def _hash(self) -> int:
        return hash((self.target, self.arguments, self.inputs, self.outputs, self.bindings))

    @cached_property
    def has_backward(self) -> bool:
        """True where something is differentiated."""
        return any(self.gradients) and any(spec.dtype in FLOATING for spec in self.outputs)


def _text(argument: Argument) -> str:
    """Return the canonical text of an argument, as the encoder has it: a search makes thousands of calls."""
    kind = type(argument)
    if kind is int:
        return str(argument)
    if kind is Slot:
        return f'{{"slot":{argument.index}}}'
    if kind is tuple:
        return f"[{','.join([_text(item) for item in argument])}]"
    if argument is None:
        return "null"
    if kind is bool:
        return "true" if argument else "false"
    return canonical_json(argument_to_json(argument))


def _specs_text(specs: tuple[TensorSpec, ...]) -> str:
    """Return the canonical text of the specs of some tensors."""
    texts = [f'["{spec.dtype}",[{",".join(map(str, spec.shape))}]]' for spec in specs]
    return f"[{','.join(texts)}]"


def call_from_json(document: dict[str, Any]) -> LocalCall:
    """Return the call of a `document` (without bindings)."""
    return LocalCall(
        target=document["target"],
        arguments=tuple((name, argument_from_json(value)) for name, value in document["arguments"]),
        inputs=tuple(TensorSpec(tuple(shape), dtype) for dtype, shape in document["inputs"]),
        outputs=tuple(TensorSpec(tuple(shape), dtype) for dtype, shape in document["outputs"]),
        gradients=tuple(bool(flag) for flag in document["gradients"]),
        warm=bool(document.get("warm", False)),
    )
