"""Several calls that a device executes as one compiled function (`graph.compiled_calls`): the sum of their work."""

from __future__ import annotations

from graph.calls import LocalCall
from graph.compiled_calls import COMPILED, parts_of
from graph.rules.generic import WholeRule
from graph.rules.registry import rule_for


class CompiledRule(WholeRule):
    """What its parts compute; what is read and written between them stays within the function, at best."""

    def flops(self, call: LocalCall) -> float:
        """Return the floating-point operations of all parts."""
        return sum(rule_for(part.call.target).flops(part.call) for part in parts_of(call))

    def backward_flops(self, call: LocalCall) -> float:
        """Return the floating-point operations of the backwards of all parts."""
        return sum(rule_for(part.call.target).backward_flops(part.call) for part in parts_of(call))


RULES = {COMPILED: CompiledRule("runs as one compiled function")}
