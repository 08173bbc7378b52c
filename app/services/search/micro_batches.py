"""The strategies of a search with micro-batches, and the options that do not go with micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from app.services.predict.predict import Setting
from graph.errors import StrategyError, UsageError
from graph.schedule import Schedule
from graph.strategy import Strategy
from graph.synchronization import Policy, read_synchronization

if TYPE_CHECKING:
    from app.services.search.request import SearchRequest

DEFAULT_ALGORITHM = "pipeline"
"""Of a search with several micro-batches."""
ALGORITHMS = frozenset({DEFAULT_ALGORITHM, "greedy", "random", "recomputation", "sharding"})
"""Those that simulate strategies with several micro-batches."""
# Of these, those whose stages take turns on groups of devices.
INTERLEAVED = frozenset({DEFAULT_ALGORITHM, "sharding"})
_AUTO = "auto"


def check_options(request: SearchRequest, names: Iterable[str]) -> None:
    """Refuse options that do not go with micro-batches, or need several of them, before anything is imported.

    names: of the algorithms.

    Raises:
        UsageError: naming the option.
    """
    count = request.model.micro_batches
    if count == 1:
        for option, value in (("--schedule", request.schedule), ("--gradients", request.gradients)):
            if value is not None:
                raise UsageError(
                    f"{option}: is {value}, must be left out for a step in one batch; give --micro-batches"
                )
        return
    if request.compile_stretches:
        raise UsageError(
            f"--compile: compiles operators, must be left out with {count} micro-batches; leave one of the two out"
        )
    if request.policy == _AUTO or read_synchronization(request.policy, "--policy").policy is not Policy.FIFO:
        raise UsageError(
            f"--policy: is {request.policy}, must be fifo with {count} micro-batches; leave it out"
        )
    able = INTERLEAVED if request.schedule is Schedule.INTERLEAVED else ALGORITHMS
    for name in names:
        if name not in able:
            of = f"{count} micro-batches" + (" in schedule interleaved" if able is INTERLEAVED else "")
            raise UsageError(
                f"--algorithm: is {name}, must be one of {', '.join(sorted(able))} for {of}; choose one of them"
            )


def in_micro_batches(setting: Setting, strategy: Strategy) -> Strategy | None:
    """Return a strategy with the micro-batches of a setting's model; None where it cannot have them."""
    if setting.model.request.micro_batches == 1:
        return strategy
    divided = setting.in_micro_batches(strategy)
    with suppress(StrategyError):  # stages that do not take turns, or cannot gather weights
        divided.validate(setting.model.graph, len(setting.topology.devices))
        return divided
    return None
