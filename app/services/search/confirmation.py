"""Confirmation of a search's winner: what decides between the best strategies is measured again before it is reported.

A search finds the strategies whose costs are too low: of many costs that scatter, those that helped a strategy win are
mostly below their truth (the winner's curse). So the calls in which the best strategies and the best baseline differ
are measured once more, interleaved, so that a disturbance meets all of them alike, and the new costs replace the old.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from app.services.predict.predict import Setting, executions_by_kind, with_costs_read_again
from graph.calls import LocalCall
from graph.strategy import Strategy
from graph.texts import counted
from search.algorithms.algorithm import AlgorithmResult
from search.evaluate.evaluator import outcome
from search.orders import Order
from search.outcome import Outcome

# Strategies that are compared: the fastest ones found, and the best baseline.
MOST_FOUND = 3
# Of the time in which they differ, the share that is measured again: the many short calls beyond decide nothing.
COVERED_SHARE = 0.99
# A winner that takes more than so much longer by its new costs was found because of its old ones, and one that takes
# so much longer than another is none. Costs of a step that are measured twice do not agree better.
TOLERANCE = 0.02

# A device kind and a call.
_Call = tuple[str, LocalCall]


@dataclass(frozen=True, slots=True)
class Finalist:
    """A strategy that is compared: its name, and its simulated step."""

    name: str
    strategy: Strategy
    predicted: Outcome


@dataclass(frozen=True, slots=True)
class ConfirmedStep:
    """The simulated step of a finalist in seconds, by the costs of the search, and by those measured again."""

    name: str
    digest: str
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The measurements made again after a search. `steps`: of the finalists, the winner's first.

    calls: number of calls that were measured again. seconds: that it took.
    """

    search_id: int
    calls: int
    seconds: float
    steps: tuple[ConfirmedStep, ...]

    @property
    def holds(self) -> bool:
        """Whether the winner is not much slower than the fastest, nor than it was found to be."""
        winner = self.steps[0]
        fastest_s = min(step.after_s for step in self.steps)
        return winner.after_s <= (1 + TOLERANCE) * min(fastest_s, winner.before_s)

    @property
    def doubt(self) -> str:
        """Why the winner does not hold, in words."""
        winner = self.steps[0]
        fastest = min(self.steps, key=lambda step: step.after_s)
        if winner.after_s > (1 + TOLERANCE) * fastest.after_s:
            return f"{fastest.name} is faster than the winner, {winner.name}"
        slower = winner.after_s / winner.before_s - 1
        return f"the winner, {winner.name}, takes {slower * 100:.1f} % longer than it was found to"

    def says(self) -> str:
        """Return the steps before and after in words."""
        steps = [
            f"{step.name} {step.before_s * 1e3:.2f} -> {step.after_s * 1e3:.2f} ms" for step in self.steps
        ]
        return (
            f"{counted(self.calls, 'call')} in which the best strategies differ {'was' if self.calls == 1 else 'were'} "
            f"measured again in {self.seconds:.1f} s: {', '.join(steps)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the confirmation as a JSON document."""
        return {**asdict(self), "holds": self.holds}


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The setting with the new costs, the finalists as simulated with these, fastest first, and the report."""

    setting: Setting
    compared: tuple[Finalist, ...]
    confirmation: Confirmation


def finalists(
    setting: Setting,
    winner: Strategy,
    results: Sequence[AlgorithmResult],
    baselines: Mapping[str, Strategy],
    order: Order,
) -> list[Finalist]:
    """Return the strategies to compare, if they fit: the winner, the next best found, and the best other baseline."""
    names = {strategy: name for name, strategy in baselines.items()}
    of_results = [chain.strategy for result in results for chain in result.chains]
    of_results += [result.strategy for result in results]
    best = _simulated(setting, names.get(winner, "found"), winner, order)
    also_found, named = (
        sorted(
            (
                _simulated(setting, names.get(strategy, "also found"), strategy, order)
                for strategy in strategies
            ),
            key=lambda finalist: finalist.predicted,
        )
        for strategies in (dict.fromkeys(of_results), names)
    )
    baseline = [finalist for finalist in named if finalist.strategy != winner][:1]
    others = [finalist for finalist in (*also_found[:MOST_FOUND], *baseline) if finalist.strategy != winner]
    compared = {finalist.strategy: finalist for finalist in (best, *others)}
    return [finalist for finalist in compared.values() if not finalist.predicted.excess_bytes]


def confirm(setting: Setting, search_id: int, compared: Sequence[Finalist], order: Order) -> Confirmed | None:
    """Measure again what decides between some strategies, the winner first.

    None where nothing is to be measured: the strategies execute the same calls, this machine has none of the devices,
    or their costs were measured together already (`Measurer.measured_together`).

    Raises:
        RuntimeFailure: no worker can be started.
        DatabaseError: a result cannot be stored.
    """
    calls = {
        kind_name: of_kind
        for kind_name, of_kind in _deciding_calls(setting, compared).items()
        if kind_name in setting.measurers and not setting.measurers[kind_name].measured_together(of_kind)
    }
    if not calls:
        return None
    began = time.monotonic()
    for kind_name, of_kind in calls.items():
        setting.measurers[kind_name].measure_again(of_kind)
    measured = with_costs_read_again(setting, calls)
    resimulated = [_simulated(measured, finalist.name, finalist.strategy, order) for finalist in compared]
    confirmation = Confirmation(
        search_id,
        sum(map(len, calls.values())),
        time.monotonic() - began,
        tuple(
            ConfirmedStep(
                before.name, before.strategy.digest, before.predicted.seconds, after.predicted.seconds
            )
            for before, after in zip(compared, resimulated, strict=True)
        ),
    )
    return Confirmed(
        measured, tuple(sorted(resimulated, key=lambda finalist: finalist.predicted)), confirmation
    )


def _simulated(setting: Setting, name: str, strategy: Strategy, order: Order) -> Finalist:
    state = setting.builder.layout(strategy)
    return Finalist(name, strategy, outcome(state, order))


def _deciding_calls(setting: Setting, compared: Sequence[Finalist]) -> dict[str, list[LocalCall]]:
    """Return, by device kind, the calls that not all of the strategies execute equally often, but for the shortest."""
    from profiler.estimate import estimate

    executions = [
        {
            (kind_name, call): count
            for kind_name, counts in executions_by_kind(setting, finalist.strategy).items()
            for call, count in counts.items()
        }
        for finalist in compared
    ]
    # By their costs, and by data sheets: a cost that is far too low hides its call from the first.
    spent_s: dict[_Call, float] = {}
    expected_s: dict[_Call, float] = {}
    for key in dict.fromkeys(key for of_strategy in executions for key in of_strategy):
        numbers = [of_strategy.get(key, 0) for of_strategy in executions]
        if min(numbers) < max(numbers):
            kind_name, call = key
            (cost,) = setting.table.costs([call], kind_name)
            more = max(numbers) - min(numbers)
            spent_s[key] = more * (cost.forward_ns + cost.backward_ns) / 1e9
            expected_s[key] = more * sum(estimate(call, setting.topology.kind(kind_name)))
    calls: dict[str, list[LocalCall]] = {}
    for kind_name, call in dict.fromkeys((*_largest(expected_s), *_largest(spent_s))):
        calls.setdefault(kind_name, []).append(call)
    return calls


def _largest(times_s: Mapping[_Call, float]) -> list[_Call]:
    """Return the calls that make up `COVERED_SHARE` of all times, the longest first."""
    longest = sorted(times_s, key=lambda key: (-times_s[key], key[1].digest))
    before_s = itertools.accumulate((times_s[key] for key in longest), initial=0.0)
    enough_s = COVERED_SHARE * sum(times_s.values())
    return [key for key, shorter_s in zip(longest, before_s, strict=False) if shorter_s < enough_s]
