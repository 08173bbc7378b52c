"""Operator costs for the search: from the database, else measured now, else estimated and marked so."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Literal

from app.db.records import CostKeyRecord, OpCostRecord
from app.db.store import Store
from app.services.costs.precisions import environments_of
from graph.calls import CostPhase, LocalCall, call_from_json
from graph.canonical import digest
from graph.errors import CostError
from graph.topology import DeviceKind
from search.cost.cost_table import OperatorCost, Origin, UpdateCost

if TYPE_CHECKING:
    from graph.rules.least import LeastWork, WorkPhase
    from profiler.estimate import Estimator, Observation
    from profiler.workers import CallResult

OnMiss = Literal["measure", "estimate", "fail"]
ON_MISS: tuple[OnMiss, ...] = ("measure", "estimate", "fail")

# By call: its cost as it was given out, and how wrong estimates like it are.
Given = tuple[dict[str, str], dict[str, float]]
# Measures calls on a real device of the kind that is asked for, storing each as it comes; returns the digests of calls
# whose stored costs were replaced besides.
Measure = Callable[[Sequence[LocalCall]], Collection[str]]


def cost_key_record(call: LocalCall) -> CostKeyRecord:
    """Return the row that names a call's cost."""
    from graph.rules import bytes_moved, flops
    from profiler.updates import is_update, update_bytes, update_flops

    count, size = (update_flops, update_bytes) if is_update(call) else (flops, bytes_moved)
    return CostKeyRecord(call.digest, call.target, call.key, _whole(count(call)), _whole(size(call)))


def _whole(number: float) -> int:
    # Calls that no device can execute have numbers that no column can hold; they fail, and that is stored.
    return min(int(number), 2**63 - 1)


def cost_records(result: CallResult) -> list[OpCostRecord]:
    """Return the rows of one measured call: one a phase, a failure with its reason."""
    from profiler.measure import FailedMeasurement

    cost_key = cost_key_record(result.call)
    records = []
    for outcome in result.outcomes:
        if isinstance(outcome, FailedMeasurement):
            records.append(OpCostRecord(cost_key, outcome.phase, None, None, None, failure=outcome.reason))
        else:
            records.append(
                OpCostRecord(
                    cost_key,
                    outcome.phase,
                    outcome.minimum_s,
                    outcome.p10_s,
                    outcome.median_s,
                    samples_s=outcome.samples_s,
                    peak_bytes=outcome.peak_bytes,
                    launch_s=outcome.launch_s,
                    clock_hz=outcome.clock_hz,
                    throttle=outcome.throttle,
                    reference_s=outcome.reference_s,
                )
            )
    return records


def model_time_s(record: OpCostRecord) -> float | None:
    """Return the seconds of a measurement that predictions use: the median at usual speed; None where it failed."""
    return None if record.median_s is None else record.median_s * (record.speed or 1.0)


def observation_of(record: OpCostRecord) -> Observation | None:
    """Return a stored cost as estimates are fitted to it; None where its measurement failed."""
    from profiler.estimate import Observation

    time_s = model_time_s(record)
    if time_s is None:
        return None
    return Observation(call_from_json(json.loads(record.cost_key.key)), record.phase, time_s)


class DatabaseCosts:
    """Costs of one device kind, in one environment (None: in any of the precision), for
    `search.cost.cost_table.CostTable`.

    Everything the database holds for the kind is read once, so that a search meets no SQL. What is not there is
    measured (`measure`), estimated from what is there or from the data sheet, or refused, as `on_miss` says. A
    measurement that failed counts as not there, except that it is not tried again.
    """

    def __init__(
        self,
        store: Store,
        kind: DeviceKind,
        kind_id: int | None,
        environment_id: int | None,
        on_miss: OnMiss,
        measure: Measure | None = None,
        precision: str = "float32",
    ) -> None:
        self._store = store
        self._kind = kind
        self._estimated_kind = kind.multiplying_in(precision)
        self._environments = (
            environments_of(store, precision) if environment_id is None else (environment_id,)
        )
        self._kind_id = kind_id
        self._on_miss = on_miss
        self._measure = measure
        self._measured: dict[tuple[str, CostPhase], float] = {}
        self._launches: dict[tuple[str, CostPhase], float] = {}
        self._usual_launches: dict[CostPhase, float] = {}
        self._failed: set[str] = set()
        self._least_measured_s = float("inf")
        self._estimator: Estimator | None = None
        self._used: dict[str, str] = {}
        self._errors: dict[str, float] = {}
        # The numbers of costs and errors when this process was forked.
        self._copied = 0, 0
        self._load()

    def _load(self, digests: Iterable[str] | None = None) -> None:
        if self._kind_id is None:
            return
        # As in `model_time_s`.
        stored = self._store.op_cost_medians(self._kind_id, self._environments, digests)
        for (name, phase), time_s in stored.items():
            if time_s is None:
                self._failed.add(name)
            else:
                self._measured[name, phase] = time_s
                self._least_measured_s = min(self._least_measured_s, time_s)
        if self._kind.processor == "cuda":
            self._launches.update(self._store.op_launches(self._kind_id, self._environments, digests))

    def read_again(self, digests: Collection[str]) -> None:
        """Read the stored costs of these calls again: they were measured since. Estimates then rest on these."""
        renewed = set(digests)
        for name in renewed:
            self._failed.discard(name)
            self._errors.pop(name, None)
        self._measured = {key: time_s for key, time_s in self._measured.items() if key[0] not in renewed}
        self._estimator = None
        self._usual_launches = {}
        self._load(renewed)

    @property
    def _measures(self) -> bool:
        """Whether this source measures missing costs."""
        return self._on_miss == "measure" and self._measure is not None

    def copies(self) -> bool:
        """Prepare for a fork; return whether forked copies may be asked for costs: not where it measures."""
        if self._measures:
            return False
        self._fitted()  # a copy must leave the database alone
        self._copied = len(self._used), len(self._errors)
        return True

    def given(self) -> Given:
        """Return, in a forked copy, the costs and errors given out since the fork."""
        used, errors = self._copied
        return dict(islice(self._used.items(), used, None)), dict(islice(self._errors.items(), errors, None))

    def take(self, costs: Given) -> None:
        """Add the costs and errors that a forked copy has given out."""
        used, errors = costs
        self._used.update(used)
        self._errors.update(errors)

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost]:
        """Return a cost for each call, in order.

        Raises:
            CostError: a cost is missing and `on_miss` is "fail", or the kind is another than this source's.
        """
        self._obtain(calls, kind_name)
        return [self._cost(call) for call in calls]

    def least_s(self, call: LocalCall, phase: WorkPhase, work: LeastWork, kind_name: str) -> float:
        """Return seconds, measured or estimated, that the calls into which a call may be cut take together at least."""
        # A measurement of zero seconds bounds nothing, and what is still to be measured may be faster than all was.
        if kind_name != self._kind.name or self._least_measured_s <= 0 or self._measures:
            return 0.0
        return self._fitted().least_s(call, phase, work)

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the cost of an optimizer's updates of weights of a dtype."""
        from profiler.updates import update_call, update_s_per_element

        call = update_call(optimizer, dtype=dtype)
        self._obtain([call], kind_name)
        time_s = self._measured.get((call.digest, "update"))
        launch_s = self._launches.get((call.digest, "update"), self._usual_launch_s("update"))
        if time_s is None:
            estimate = self._fitted().estimate(call, "update")
            return UpdateCost(update_s_per_element(estimate.time_s), Origin(estimate.origin), launch_s)
        return UpdateCost(update_s_per_element(time_s), Origin.MEASURED, launch_s)

    def _obtain(self, calls: Sequence[LocalCall], kind_name: str) -> None:
        """Measure missing costs, or refuse them, as `on_miss` says."""
        if kind_name != self._kind.name:
            raise CostError(
                f"costs: are of {self._kind.name}, must be of {kind_name}; profile devices of that kind"
            )
        missing = [call for call in calls if not self._has(call) and call.digest not in self._failed]
        if missing and self._on_miss == "measure" and self._measure is not None:
            replaced = self._measure(missing)
            # What was given out already stays, or one search would have two costs of a call.
            fresh = {digest for digest in replaced if digest not in self._used}
            self._load({*fresh, *(call.digest for call in missing)})
            missing = []
        if missing and self._on_miss == "fail":
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise CostError(
                f"{missing[0].target} {shapes(missing[0])}: not measured on {kind_name}, must be{more}; run app "
                "profile with the same --topology, or choose --on-miss estimate"
            )

    def used_costs(self, digests: Iterable[str]) -> list[tuple[str, str]]:
        """Return (call digest, cost) of the calls for which this source gave a cost, in order of digest."""
        return [(name, self._used[name]) for name in sorted(set(digests)) if name in self._used]

    @property
    def estimate_errors(self) -> tuple[float, ...]:
        """The median error of the estimates like each estimated cost that was given out, ascending."""
        return tuple(sorted(self._errors.values()))

    def _has(self, call: LocalCall) -> bool:
        from profiler.measure import phases

        return all((call.digest, phase) in self._measured for phase in phases(call))

    def _cost(self, call: LocalCall) -> OperatorCost:
        from profiler.measure import phases

        wanted = phases(call)
        if self._has(call):
            backward_s = self._measured[call.digest, "backward"] if "backward" in wanted else 0.0
            cost = OperatorCost(
                self._measured[call.digest, "forward"], backward_s, Origin.MEASURED, *self._launch_s(call)
            )
        else:
            estimates = [self._fitted().estimate(call, phase) for phase in wanted]
            origin = Origin.DATASHEET if any(e.origin == "datasheet" for e in estimates) else Origin.ESTIMATED
            cost = OperatorCost(
                estimates[0].time_s,
                estimates[1].time_s if len(estimates) > 1 else 0.0,
                origin,
                *self._launch_s(call),
            )
            # Of the larger phase, which is most of the call's time.
            error = max(estimates, key=lambda estimate: estimate.time_s).error
            if origin is Origin.ESTIMATED and error is not None:
                self._errors[call.digest] = error
        used = [cost.forward_s, cost.backward_s]
        if cost.forward_launch_s or cost.backward_launch_s:
            used += [cost.forward_launch_s, cost.backward_launch_s]
        self._used[call.digest] = " ".join(map(repr, used))
        return cost

    def _launch_s(self, call: LocalCall) -> tuple[float, float]:
        """Return the seconds in which a GPU's host issues a call's forward and backward; on a CPU 0.

        What was not measured takes the median of all calls that were: it depends on how many kernels, not on sizes.
        """
        from profiler.measure import phases

        launches: dict[CostPhase, float] = {
            phase: self._launches.get((call.digest, phase), self._usual_launch_s(phase))
            for phase in phases(call)
        }
        return launches.get("forward", 0.0), launches.get("backward", 0.0)

    def _usual_launch_s(self, phase: CostPhase) -> float:
        if phase not in self._usual_launches:
            of_phase = [time_s for (_, other), time_s in self._launches.items() if other == phase]
            self._usual_launches[phase] = median(of_phase) if of_phase else 0.0
        return self._usual_launches[phase]

    def _fitted(self) -> Estimator:
        """The estimator, calibrated on every measurement of the kind and environment that the database holds."""
        from profiler.estimate import Estimator

        if self._estimator is None:
            stored = {}
            if self._kind_id is not None:
                stored = self._store.op_costs(self._kind_id, self._environments, None)
            observations = (observation_of(record) for _, record in sorted(stored.items()))
            self._estimator = Estimator.fit(
                self._estimated_kind, [observation for observation in observations if observation is not None]
            )
        return self._estimator


class CostsByKind:
    """A source for topologies of several device kinds."""

    def __init__(self, sources: dict[str, DatabaseCosts]) -> None:
        self._sources = sources

    def read_again(self, kind_name: str, digests: Collection[str]) -> None:
        """Read the stored costs of these calls on a device kind again."""
        self._sources[kind_name].read_again(digests)

    def copies(self) -> bool:
        """Prepare for a fork; return whether forked copies of all sources may be asked for costs."""
        return all(source.copies() for source in self._sources.values())

    def given(self) -> dict[str, Given]:
        """Return, in a forked copy, the costs and errors that each source has given out since the fork."""
        return {name: source.given() for name, source in self._sources.items()}

    def take(self, costs: dict[str, Given]) -> None:
        """Add the costs and errors that the sources of a forked copy have given out."""
        for name, of_kind in costs.items():
            self._sources[name].take(of_kind)

    def resolve(self, calls: Sequence[LocalCall], kind_name: str) -> list[OperatorCost]:
        """Return a cost for each call on devices of one kind."""
        return self._sources[kind_name].resolve(calls, kind_name)

    def least_s(self, call: LocalCall, phase: WorkPhase, work: LeastWork, kind_name: str) -> float:
        """Return seconds that the calls into which a call may be cut take together at least on devices of one kind."""
        return self._sources[kind_name].least_s(call, phase, work, kind_name)

    def update_cost(self, optimizer: str, dtype: str, kind_name: str) -> UpdateCost:
        """Return the cost of an optimizer's updates on a device of one kind."""
        return self._sources[kind_name].update_cost(optimizer, dtype, kind_name)

    @property
    def estimate_errors(self) -> tuple[float, ...]:
        """The median error of the estimates like each estimated cost that was given out, ascending."""
        return tuple(sorted(error for source in self._sources.values() for error in source.estimate_errors))

    def cost_digest(self, digests: Iterable[str]) -> str:
        """Return the digest of the costs that were given out for some calls."""
        wanted = list(digests)
        return digest([[name, self._sources[name].used_costs(wanted)] for name in sorted(self._sources)])


def shapes(call: LocalCall) -> str:
    """Return the shapes of a call's inputs, as a message shows them."""
    return " x ".join("[" + ", ".join(map(str, spec.shape)) + "]" for spec in call.inputs)
