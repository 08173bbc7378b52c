"""Which rule an operator has, by target: whatever the modules beside this one offer in `RULES`.

What an operator keeps for its backward is not the rule's: `search/simulate/saved_tensors.py` lists those that keep
less than their inputs and outputs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules

import graph.rules
from graph.rules.common import BaseRule
from graph.rules.generic import WholeRule

UNKNOWN = WholeRule("runs whole: {target} has no rule")


@lru_cache(maxsize=1)
def rules() -> dict[str, BaseRule]:
    """Return all rules by target."""
    names = [f"graph.rules.{module.name}" for module in iter_modules(graph.rules.__path__)]
    tables = [getattr(import_module(name), "RULES", {}) for name in names if name != __name__]
    return {target: rule for table in tables for target, rule in table.items()}


def rule_for(target: str) -> BaseRule:
    """Return the rule of an operator type; an unknown one runs whole."""
    return rules().get(target, UNKNOWN)


def is_known(target: str) -> bool:
    """True where an operator type has a rule of its own."""
    return target in rules()


def rule_name(target: str) -> str:
    """Return the name of an operator type's rule for a report; "none" where it has no rule."""
    if not is_known(target):
        return "none"
    words = re.findall("[A-Z][a-z]*", type(rule_for(target)).__name__.removesuffix("Rule"))
    return " ".join(words).lower()
