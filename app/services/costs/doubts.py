"""Doubts about stored operator costs: which of them others make unlikely, and their settling by measuring again.

Unlikely costs are measured again, later than the first time, together and interleaved; those that are unlikely still,
once more. Then they are settled: taken for true, so that what is out of order with them is unlikely now, until nothing
is that is not settled.

Settled costs have their moment in common with others (`Measurer.measure_again`): so that a run knows which ones an
earlier one that was ended has left to it, and a later one measures none of them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import log
from typing import TYPE_CHECKING

from app.db.records import utc_now
from app.db.store import Store
from app.services.costs.machine import DeviceGroup
from app.services.costs.operator_costs import observation_of, shapes
from graph.calls import CostPhase, LocalCall

if TYPE_CHECKING:
    from datetime import datetime

    from profiler.plausibility import UnlikelyCost

# So often a cost is measured again at most: a machine may be busy once more.
MOST_TIMES = 2
# So many costs are named.
MOST_NAMED = 3


class Doubts:
    """The stored costs of one device kind in one environment, as far as they say something about each other."""

    def __init__(self, store: Store, group: DeviceGroup) -> None:
        from profiler.plausibility import CostFamilies

        self._store = store
        self._group = group
        self._families = CostFamilies(group.kind)
        self._moments: dict[tuple[str, CostPhase], datetime] = {}
        self._asked: set[str] = set()

    def settle(
        self, calls: Sequence[LocalCall], measure_again: Callable[[Sequence[LocalCall]], object]
    ) -> set[str]:
        """Measure again what is unlikely among the costs of some calls, and what contradicts these.

        Return the digests of the calls that were measured again. `measure_again` replaces what is stored of calls, and
        has it read (`read`).
        """
        names = {call.digest for call in calls}
        # A search asks after each call that it meets: all stored costs are read the first time only.
        self.read(names if self._asked else None)
        self._asked |= names
        settled = self._measured_together()
        times: Counter[str] = Counter()
        while unlikely := self._families.unlikely(names, trusted=settled):
            doubtful = {cost.call.digest: cost.call for cost in unlikely}
            if len(doubtful) == 1:
                # Together with another one: of those settled each would leave the others that it was measured with.
                others = unlikely[0].others
                beside = next((other for other in others if other not in settled), others[0])
                doubtful[beside] = self._families.call(beside)
            measure_again(list(doubtful.values()))
            times.update(doubtful.keys())
            settled |= {digest for digest, count in times.items() if count >= MOST_TIMES}
        if times:
            self._share_moment(set(times))
        return set(times)

    def stays(self) -> list[UnlikelyCost]:
        """Return the costs of all calls that were asked about that are unlikely, the most unlikely first."""
        stays = [cost for cost in self._families.unlikely(self._asked) if cost.call.digest in self._asked]
        return sorted(stays, key=lambda cost: -abs(log(cost.factor)))

    def read(self, digests: Collection[str] | None) -> None:
        """Read the stored costs of calls, or of all."""
        group = self._group
        stored = self._store.op_costs(group.kind_id, group.environment_id, digests)
        for key, record in sorted(stored.items()):
            observation = observation_of(record)
            if observation is not None:
                self._families.put(observation)
                self._moments[key] = record.measured_at

    def _share_moment(self, digests: Collection[str]) -> None:
        """Give calls one moment: some were measured together with others that were measured once more since."""
        group, moment = self._group, utc_now()
        stored = self._store.op_costs(group.kind_id, group.environment_id, digests)
        together = [replace(record, measured_at=moment) for record in stored.values()]
        self._store.put_op_costs(group.kind_id, group.environment_id, together)
        self._moments |= dict.fromkeys(stored, moment)

    def _measured_together(self) -> set[str]:
        """Return the digests of calls that share a moment with another call."""
        calls_at: dict[datetime, set[str]] = {}
        for (digest, _), moment in self._moments.items():
            calls_at.setdefault(moment, set()).add(digest)
        return set().union(*(calls for calls in calls_at.values() if len(calls) > 1))


def describe_unlikely(stays: Sequence[UnlikelyCost]) -> str:
    """Return in one line which costs stayed unlikely when they had been measured again."""
    named = ", ".join(
        f"{cost.call.target} {shapes(cost.call)} {cost.phase} takes {cost.time_s * 1e3:.3g} ms, "
        f"{cost.factor:.2f} x what others say"
        for cost in stays[:MOST_NAMED]
    )
    more = f", and {len(stays) - MOST_NAMED} more" if len(stays) > MOST_NAMED else ""
    return f"costs stay unlikely beside others of their operators, though measured again: {named}{more}"
