"""The store's methods for device kinds, environments, operator costs and link costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from app.db import models
from app.db.failures import damaged_row, row_name
from app.db.records import (
    CostKeyRecord,
    CostSummary,
    DeviceKindRecord,
    EnvironmentRecord,
    LinkCostRecord,
    LinkFitRecord,
    OpCostMedian,
    OpCostRecord,
)
from app.db.references import Referred
from app.db.sql import (
    StorePart,
    batches,
    insert_ignoring,
    put_named,
    read_all,
    record_of,
    row_of,
    upsert_newer,
)
from graph.calls import CostPhase

_OP_COST_KEY = ("signature_id", "device_kind_id", "environment_id", "phase")
_LINK_FIT_KEY = ("device_kind_id", "environment_id", "pattern", "group_size")
_LINK_COST_KEY = (*_LINK_FIT_KEY, "size_bytes")


class CostStore(StorePart):
    """Measured costs, by kind of device and environment."""

    def put_device_kind(self, kind: DeviceKindRecord) -> int:
        """Store a device kind under its name, replacing an earlier one; return its id."""
        table = models.device_kinds
        row = row_of(kind)
        with self.write() as connection:
            number = put_named(connection, table, row, "name")
            connection.execute(table.update().where(table.c.id == number).values(row))
        return number

    def device_kind(self, name: str) -> DeviceKindRecord | None:
        """Return the device kind of that name, or None."""
        return self._first(DeviceKindRecord, name=name)

    def device_kinds(self) -> list[DeviceKindRecord]:
        """Return all device kinds, by name."""
        return self._all(DeviceKindRecord, "name")

    def put_environment(self, environment: EnvironmentRecord) -> int:
        """Store an environment under its fingerprint, once; return its id."""
        row = {**row_of(environment), "fingerprint": environment.fingerprint}
        with self.write() as connection:
            return put_named(connection, models.environments, row, "fingerprint")

    def environment(self, environment_id: int) -> EnvironmentRecord | None:
        """Return the environment with that id, or None."""
        return self._first(EnvironmentRecord, id=environment_id)

    def environments(self) -> list[EnvironmentRecord]:
        """Return all environments, by fingerprint."""
        return self._all(EnvironmentRecord, "fingerprint")

    def put_op_costs(self, device_kind_id: int, environment_id: int, costs: Iterable[OpCostRecord]) -> int:
        """Store operator costs with their cost keys, in one transaction; return how many distinct ones were given.

        A cost of the same cost key and phase that was measured later stays; `device_kind_id` and
        `environment_id` of the records are not looked at.
        """
        given = list(costs)
        if not given:
            return 0
        rows = [_measured_row(cost, device_kind_id, environment_id) for cost in given]
        with self.write() as connection:
            ids = _put_cost_keys(connection, [cost.cost_key for cost in given])
            for row, cost in zip(rows, given, strict=True):
                row["signature_id"] = ids[cost.cost_key.digest]
            return upsert_newer(connection, models.op_costs, rows, _OP_COST_KEY, "measured_at")

    def op_costs(
        self,
        device_kind_id: int,
        environments: int | Collection[int] | None,
        digests: Iterable[str] | None = None,
    ) -> dict[tuple[str, CostPhase], OpCostRecord]:
        """Return the stored costs of cost keys, by (cost key's digest, phase); missing ones are left out.

        Failed measurements are returned too. Of several `environments` the newest cost is returned; None: of all of
        them. `digests` None: all cost keys.
        """
        costs, cost_keys = models.op_costs, models.op_signatures
        query = sa.select(costs, *(column.label(f"op_signature_{column.name}") for column in cost_keys.c))
        cost_of: dict[tuple[str, CostPhase], OpCostRecord] = {}
        with self.read() as connection:
            for selected in _of_cost_keys(query, device_kind_id, environments, digests):
                for row in connection.execute(selected).mappings():
                    cost_key = record_of(
                        connection,
                        CostKeyRecord,
                        {column.name: row[f"op_signature_{column.name}"] for column in cost_keys.c},
                    )
                    cost = record_of(connection, OpCostRecord, {**row, "cost_key": cost_key})
                    cost_of[cost_key.digest, cost.phase] = cost
        return cost_of

    def op_cost_medians(
        self,
        device_kind_id: int,
        environments: int | Collection[int] | None,
        digests: Iterable[str] | None = None,
    ) -> dict[tuple[str, CostPhase], float | None]:
        """Return the median of each cost that `op_costs` returns, at usual speed; None where the measurement failed."""
        medians = self._op_cost_medians(device_kind_id, environments, digests)
        return {(cost.digest, cost.phase): cost.median_s for cost in medians}

    def usual_reference_s(self, device_kind_id: int, environment_id: int) -> float | None:
        """Return the seconds of the reference kernel at the speed that a kind's costs in an environment are given at.

        That of the first cost there was (`OpCostRecord.speed`); None without any.
        """
        costs = models.op_costs
        query = (
            sa.select(costs.c.reference_s * costs.c.speed)
            .where(costs.c.device_kind_id == device_kind_id, costs.c.environment_id == environment_id)
            .where(costs.c.reference_s.is_not(None), costs.c.speed.is_not(None))
            .order_by(costs.c.id)
            .limit(1)
        )
        with self.read() as connection:
            return connection.execute(query).scalar()

    def op_launches(
        self,
        device_kind_id: int,
        environments: int | Collection[int] | None,
        digests: Iterable[str] | None = None,
    ) -> dict[tuple[str, CostPhase], float]:
        """Return the seconds in which the host issues each call that `op_costs` returns, where they were measured."""
        medians = self._op_cost_medians(device_kind_id, environments, digests)
        return {(cost.digest, cost.phase): cost.launch_s for cost in medians if cost.launch_s is not None}

    def _op_cost_medians(
        self,
        device_kind_id: int,
        environments: int | Collection[int] | None,
        digests: Iterable[str] | None,
    ) -> list[OpCostMedian]:
        """Return costs without samples, keys and the rest, so that a network's thousands are read at once."""
        costs, cost_keys = models.op_costs, models.op_signatures
        query = sa.select(
            costs.c.id,
            cost_keys.c.digest,
            costs.c.phase,
            (costs.c.median_s * sa.func.coalesce(costs.c.speed, 1.0)).label("median_s"),
            costs.c.launch_s,
        )
        queries = _of_cost_keys(query, device_kind_id, environments, digests)
        with self.read() as connection:
            return [cost for selected in queries for cost in read_all(connection, OpCostMedian, selected)]

    def put_link_costs(
        self, device_kind_id: int, environment_id: int, costs: Iterable[LinkCostRecord]
    ) -> int:
        """Store link costs in one transaction, the later measured replacing the earlier; return how many."""
        rows = [_measured_row(cost, device_kind_id, environment_id) for cost in costs]
        with self.write() as connection:
            return upsert_newer(connection, models.link_costs, rows, _LINK_COST_KEY, "measured_at")

    def link_costs(self, device_kind_id: int, environment_id: int) -> list[LinkCostRecord]:
        """Return all link costs of a device kind in an environment, by pattern, group size and size."""
        of = {"device_kind_id": device_kind_id, "environment_id": environment_id}
        return self._all(LinkCostRecord, "pattern", "group_size", "size_bytes", **of)

    def put_link_fits(self, device_kind_id: int, environment_id: int, fits: Iterable[LinkFitRecord]) -> int:
        """Store lines fitted to link costs, the later replacing the earlier; return how many."""
        rows = [
            {**row_of(fit), "device_kind_id": device_kind_id, "environment_id": environment_id}
            for fit in fits
        ]
        with self.write() as connection:
            return upsert_newer(connection, models.link_fits, rows, _LINK_FIT_KEY, "measured_at")

    def link_fits(self, device_kind_id: int, environment_id: int) -> list[LinkFitRecord]:
        """Return all link fits of a device kind in an environment, by pattern and group size."""
        of = {"device_kind_id": device_kind_id, "environment_id": environment_id}
        return self._all(LinkFitRecord, "pattern", "group_size", **of)

    def newest_cost_environments(self, device_kind_id: int, environments: Collection[int]) -> dict[int, int]:
        """Return of how many measured costs, of each the newest in some environments, each environment is the one."""
        costs = models.op_costs
        query = (
            sa.select(costs.c.signature_id, costs.c.phase, costs.c.environment_id)
            .where(costs.c.device_kind_id == device_kind_id)
            .where(costs.c.environment_id.in_(environments), costs.c.failure.is_(None))
            .order_by(costs.c.measured_at, costs.c.id)
        )
        with self.read() as connection:
            newest = {(row[0], row[1]): row[2] for row in connection.execute(query)}
        return dict(Counter(newest.values()))

    def cost_summaries(self) -> list[CostSummary]:
        """Return, per device kind and environment, what is held and how old it is, newest first."""
        costs, fits = models.op_costs, models.link_fits
        zero = sa.literal(0)
        held = sa.union_all(
            _held(costs, sa.func.count(costs.c.minimum_s), sa.func.count(costs.c.failure), zero),
            _held(fits, zero, zero, sa.func.count(fits.c.id)),
        )
        with self.read() as connection:
            rows = connection.execute(held).all()
            kinds = read_all(connection, DeviceKindRecord, sa.select(models.device_kinds))
            environments = read_all(connection, EnvironmentRecord, sa.select(models.environments))
        kind_of = Referred("device_kinds", ((kind.id, kind) for kind in kinds))
        environment_of = Referred(
            "environments", ((environment.id, environment) for environment in environments)
        )
        groups: dict[tuple[int, int], list[sa.Row[Any]]] = {}
        for row in rows:
            if not isinstance(row.oldest, datetime) or not isinstance(row.newest, datetime):
                name = row_name(self.database.name, "op_costs or link_fits", "-", "measured_at")
                raise damaged_row(name, f"{row.newest!r} is no moment")
            groups.setdefault((row.device_kind_id, row.environment_id), []).append(row)
        summaries = [
            CostSummary(
                device_kind=kind_of[kind_id],
                environment=environment_of[environment_id],
                measured=sum(row.measured for row in group),
                failed=sum(row.failed for row in group),
                oldest=min(row.oldest for row in group),
                newest=max(row.newest for row in group),
                link_fits=sum(row.link_fits for row in group),
            )
            for (kind_id, environment_id), group in groups.items()
        ]
        summaries.sort(key=lambda summary: (summary.device_kind.id, summary.environment.id))
        return sorted(summaries, key=lambda summary: summary.newest, reverse=True)


def _held(table: sa.Table, measured: Any, failed: Any, link_fits: Any) -> sa.Select[Any]:
    return sa.select(
        table.c.device_kind_id,
        table.c.environment_id,
        measured.label("measured"),
        failed.label("failed"),
        link_fits.label("link_fits"),
        sa.func.min(table.c.measured_at).label("oldest"),
        sa.func.max(table.c.measured_at).label("newest"),
    ).group_by(table.c.device_kind_id, table.c.environment_id)


def _measured_row(
    cost: OpCostRecord | LinkCostRecord, device_kind_id: int, environment_id: int
) -> dict[str, Any]:
    return {
        **row_of(cost, without=("cost_key",)),
        "device_kind_id": device_kind_id,
        "environment_id": environment_id,
        "sample_count": cost.sample_count,
    }


def _of_cost_keys(
    query: sa.Select[Any],
    device_kind_id: int,
    environments: int | Collection[int] | None,
    digests: Iterable[str] | None,
) -> list[sa.Select[Any]]:
    """Return a query of operator costs and cost keys for these alone, oldest first: one for each batch of digests."""
    costs, cost_keys = models.op_costs, models.op_signatures
    query = (
        query.join(cost_keys, costs.c.signature_id == cost_keys.c.id)
        .where(costs.c.device_kind_id == device_kind_id)
        .order_by(costs.c.measured_at, costs.c.id)
    )
    if environments is not None:
        ids = (environments,) if isinstance(environments, int) else environments
        query = query.where(costs.c.environment_id.in_(ids))
    if digests is None:
        return [query]
    return [query.where(cost_keys.c.digest.in_(batch)) for batch in batches(sorted(set(digests)))]


def _put_cost_keys(connection: sa.Connection, cost_keys: Sequence[CostKeyRecord]) -> dict[str, int]:
    """Store cost keys, each once; return their ids by digest."""
    table = models.op_signatures
    insert_ignoring(connection, table, [row_of(cost_key) for cost_key in cost_keys], "digest")
    ids: dict[str, int] = {}
    for batch in batches(sorted({cost_key.digest for cost_key in cost_keys})):
        for row in connection.execute(sa.select(table.c.digest, table.c.id).where(table.c.digest.in_(batch))):
            ids[row.digest] = row.id
    return ids
