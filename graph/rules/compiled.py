"""Several calls that a device executes as one compiled function (`graph.compiled_calls`): the sum of their work."""

from __future__ import annotations

from graph.calls import LocalCall
from graph.compiled_calls import COMPILED, parts_of
from graph.rules.generic import WholeRule
from graph.rules.registry import rule_for


class CompiledRule(WholeRule):
    """The work of a compiled call: the arithmetic of its parts, and the bytes of its own inputs and outputs."""

    def flops(self, call: LocalCall) -> float:
        """Return the floating-point operations of all parts."""
        return sum(rule_for(part.call.target).flops(part.call) for part in parts_of(call))

    def backward_flops(self, call: LocalCall) -> float:
        """Return the floating-point operations of the backwards of all parts."""
        return sum(rule_for(part.call.target).backward_flops(part.call) for part in parts_of(call))

    def bytes_moved(self, call: LocalCall) -> int:
        """Return the bytes of all inputs read and outputs written: what is between the parts may stay in registers."""
        return sum(spec.size_bytes for spec in (*call.inputs, *call.outputs))


RULES = {COMPILED: CompiledRule("runs as one compiled function")}
