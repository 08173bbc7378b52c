"""The problem of a setting: the input of search algorithms, bounds, and baselines that need costs."""

from __future__ import annotations

from app.services.predict.predict import Setting
from search.cost.calls_to_profile import rule_calls
from search.cost.cost_table import CostTable
from search.problem import Problem


def problem_of(setting: Setting, costs: CostTable | None = None) -> Problem:
    """Return the problem that the algorithms solve, with the setting's costs if none are given."""
    from graph.rules import first_call
    from graph.rules.least import least_work

    return Problem(
        setting.model.graph,
        setting.topology,
        costs if costs is not None else setting.table,
        setting.training,
        setting.target.link_costs,
        rule_calls(),
        first_call,
        least_work,
        setting.builder if costs is None else None,
        setting.model.request.micro_batches,
        setting.schedule,
        setting.gradients,
        setting.shares_weights,
    )
