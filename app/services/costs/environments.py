"""The environments of the stored costs, their differences from this machine's, and the messages about these.

A cost holds for its environment: the driver, torch, the processor. Costs of this machine's devices are taken from its
own environment alone. Costs of devices that are not here are taken from any, of each the newest, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from app.db.records import CostSummary, EnvironmentRecord, utc_now
from app.db.store import Store
from app.services.costs.precisions import environments_of, is_measured_in
from app.services.progress import Progress

if TYPE_CHECKING:
    from app.services.costs.machine import DeviceGroup

# The facts that change most often come first; the others in the order of their names.
FIRST_FACTS = ("torch", "cuda", "cudnn", "driver", "python", "operating_system", "processor", "cores")
MOST_DIFFERENCES = 4
SECONDS_A_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class HeldCosts:
    """The costs of one device kind in one environment, as a database holds them.

    `is_current`: it is that of this machine's devices now. `differences`: from it to the current one, see
    `differences`; None where this machine has no device of that processor to compare with.
    """

    summary: CostSummary
    is_current: bool
    differences: tuple[str, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the costs as a JSON document."""
        summary = self.summary
        return {
            "device_kind": summary.device_kind.name,
            "environment": summary.environment.fingerprint,
            "facts": dict(summary.environment.facts),
            "measured": summary.measured,
            "failed": summary.failed,
            "link_fits": summary.link_fits,
            "oldest": summary.oldest.isoformat(),
            "newest": summary.newest.isoformat(),
            "oldest_days": age_days(summary.oldest),
            "newest_days": age_days(summary.newest),
            "current": self.is_current,
            "differences": None if self.differences is None else list(self.differences),
        }


def age_days(moment: datetime) -> float:
    """Return the age of a moment in days; 0 for a moment of a clock that is ahead of this one's."""
    return max(0.0, (utc_now() - moment).total_seconds() / SECONDS_A_DAY)


def held_costs(store: Store) -> list[HeldCosts]:
    """Return the costs of a database, by device kind and environment, the newest first."""
    held = []
    for summary in store.cost_summaries():
        facts = summary.environment.facts
        current = _facts_here(facts)
        held.append(
            HeldCosts(
                summary,
                current is not None and dict(current) == dict(facts),
                None if current is None else differences(facts, current),
            )
        )
    return held


def _facts_here(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the facts of this machine's devices of the same processor and precision; None without such devices."""
    from profiler.devices import available_devices
    from profiler.environment import environment

    processor = facts.get("device_type")
    if processor not in ("cpu", "cuda") or not available_devices(processor):
        return None
    return environment(processor, tf32=is_measured_in(facts, "tf32")).facts


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, ...]:
    """Return each fact in which two environments differ, as text such as "torch 2.12.0 -> 2.13.0"."""
    old, new = _flat(before), _flat(now)
    names = sorted(old.keys() | new.keys(), key=lambda name: (_rank(name), name))
    return tuple(
        f"{name} {old.get(name, 'unknown')} -> {new.get(name, 'unknown')}"
        for name in names
        if old.get(name) != new.get(name)
    )


def shortened(parts: Sequence[str]) -> str:
    """Return the first few of some differences in one line."""
    more = len(parts) - MOST_DIFFERENCES
    return "; ".join([*parts[:MOST_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])])


def _rank(name: str) -> int:
    first = name.split(" ")[0]
    plain = [fact.replace("_", " ").split(" ")[0] for fact in FIRST_FACTS]
    return plain.index(first) if first in plain else len(plain)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return facts as text by name; the facts of each entry of a list of named things, such as drivers."""
    texts: dict[str, str] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            texts |= _flat(value, f"{name} ")
        elif isinstance(value, list | tuple) and all(isinstance(entry, Mapping) for entry in value):
            for entry in value:
                rest = {inner: text for inner, text in entry.items() if inner != "name"}
                texts |= _flat(rest, f"{name} of {entry.get('name', 'unnamed')}: ")
        else:
            texts[name] = str(value)
    return texts


def say_unused(store: Store, group: DeviceGroup, precision: str, progress: Progress) -> None:
    """Say that the stored costs of a kind are all of other environments than this one, and so are not used."""
    summaries = [
        summary
        for summary in store.cost_summaries()
        if summary.device_kind.name == group.kind.name
        and summary.measured
        and is_measured_in(summary.environment.facts, precision)
    ]
    if not summaries or any(summary.environment.id == group.environment_id for summary in summaries):
        return
    current = store.environment(group.environment_id)
    differing = shortened(differences(summaries[0].environment.facts, current.facts if current else {}))
    where = "another environment" if len(summaries) == 1 else f"{len(summaries)} other environments"
    progress.say(
        f"{sum(summary.measured for summary in summaries):,} stored costs of {group.kind.name} are not used: they are "
        f"of {where} ({differing})"
    )


def used_environments(
    store: Store, kind_name: str, environment_id: int | None, precision: str
) -> list[tuple[EnvironmentRecord, int]]:
    """Return the environments whose costs of a kind predictions use, each with its number of costs, the most first.

    With `environment_id` None they are taken from all environments of a precision, of each cost the newest.
    """
    kind = store.device_kind(kind_name)
    if kind is None:
        return []
    ids = environments_of(store, precision) if environment_id is None else (environment_id,)
    counted = store.newest_cost_environments(kind.id, ids)
    used = [
        (environment, counted[environment.id])
        for environment in store.environments()
        if environment.id in counted
    ]
    return sorted(used, key=lambda entry: -entry[1])


def say_used(store: Store, kind_name: str, precision: str, progress: Progress) -> None:
    """Say of which environments the used costs of a kind are that this machine lacks; warn where they are mixed."""
    used = used_environments(store, kind_name, None, precision)
    if not used:
        return
    total = sum(count for _, count in used)
    if len(used) == 1:
        progress.say(f"{total:,} stored costs of {kind_name} are used, all of {_label(used[0][0])}")
        return
    parts = ", ".join(f"{count:,} of {_label(environment)}" for environment, count in used)
    newest, *others = sorted(
        (environment for environment, _ in used), key=lambda environment: environment.created_at, reverse=True
    )
    differing = shortened([text for other in others for text in differences(other.facts, newest.facts)])
    progress.warn(
        f"{total:,} stored costs of {kind_name} are used, of {len(used)} environments, of each cost the newest: "
        f"{parts}; {differing}"
    )


def _label(environment: EnvironmentRecord) -> str:
    return f"torch {environment.facts.get('torch', 'unknown')} ({environment.fingerprint[:12]})"
