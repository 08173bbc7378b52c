"""The store's methods for device kinds, environments, operator costs and link costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import sqlalchemy as sa

from app.db import models
from app.db.records import (
    CostSummary,
    DeviceKindRecord,
    EnvironmentRecord,
    LinkCostRecord,
    LinkFitRecord,
    OpCostRecord,
    OpSignatureRecord,
    Phase,
)
from app.db.sql import (
    StorePart,
    batches,
    insert_ignoring,
    put_named,
    read_all,
    read_one,
    record_of,
    row_of,
    upsert_newer,
)

_OP_COST_KEY = ("signature_id", "device_kind_id", "environment_id", "phase")
_LINK_FIT_KEY = ("device_kind_id", "environment_id", "pattern", "group_size")
_LINK_COST_KEY = (*_LINK_FIT_KEY, "size_bytes")


class CostStore(StorePart):
    """What was measured, on which kind of device, in which environment."""

    def put_device_kind(self, kind: DeviceKindRecord) -> int:
        """Store a device kind under its name, replacing what was known of it; return its id."""
        table = models.device_kinds
        row = row_of(kind)
        with self.write() as connection:
            number = put_named(connection, table, row, "name")
            connection.execute(table.update().where(table.c.id == number).values(row))
        return number

    def device_kind(self, name: str) -> DeviceKindRecord | None:
        """Return the device kind of that name, or None."""
        table = models.device_kinds
        with self.read() as connection:
            return read_one(connection, DeviceKindRecord, sa.select(table).where(table.c.name == name))

    def device_kinds(self) -> list[DeviceKindRecord]:
        """Return all device kinds, by name."""
        table = models.device_kinds
        with self.read() as connection:
            return read_all(connection, DeviceKindRecord, sa.select(table).order_by(table.c.name))

    def put_environment(self, environment: EnvironmentRecord) -> int:
        """Store an environment under its fingerprint, once; return its id."""
        row = {**row_of(environment), "fingerprint": environment.fingerprint}
        with self.write() as connection:
            return put_named(connection, models.environments, row, "fingerprint")

    def environment(self, environment_id: int) -> EnvironmentRecord | None:
        """Return the environment with that id, or None."""
        table = models.environments
        with self.read() as connection:
            return read_one(
                connection, EnvironmentRecord, sa.select(table).where(table.c.id == environment_id)
            )

    def environments(self) -> list[EnvironmentRecord]:
        """Return all environments, by fingerprint."""
        table = models.environments
        with self.read() as connection:
            return read_all(connection, EnvironmentRecord, sa.select(table).order_by(table.c.fingerprint))

    def put_op_costs(self, device_kind_id: int, environment_id: int, costs: Iterable[OpCostRecord]) -> int:
        """Store operator costs with their signatures, in one transaction; return how many distinct ones were given.

        A cost of the same signature and phase that was measured later stays; `device_kind_id` and
        `environment_id` of the records are not looked at.
        """
        given = list(costs)
        if not given:
            return 0
        rows = [
            {
                **row_of(cost, without=("signature",)),
                "device_kind_id": device_kind_id,
                "environment_id": environment_id,
                "sample_count": cost.sample_count,
            }
            for cost in given
        ]
        with self.write() as connection:
            ids = _put_signatures(connection, [cost.signature for cost in given])
            for row, cost in zip(rows, given, strict=True):
                row["signature_id"] = ids[cost.signature.digest]
            return upsert_newer(connection, models.op_costs, rows, _OP_COST_KEY, "measured_at")

    def op_costs(
        self, device_kind_id: int, environment_id: int | None, digests: Iterable[str] | None = None
    ) -> dict[tuple[str, Phase], OpCostRecord]:
        """Return the stored costs of signatures, by (signature digest, phase); what is not there is left out.

        Failed measurements are returned too. `environment_id` None: of any environment, the newest. `digests` None:
        all signatures.
        """
        costs, signatures = models.op_costs, models.op_signatures
        query = (
            sa.select(costs, *(column.label(f"op_signature_{column.name}") for column in signatures.c))
            .join(signatures, costs.c.signature_id == signatures.c.id)
            .where(costs.c.device_kind_id == device_kind_id)
            .order_by(costs.c.measured_at, costs.c.id)
        )
        if environment_id is not None:
            query = query.where(costs.c.environment_id == environment_id)
        found: dict[tuple[str, Phase], OpCostRecord] = {}
        with self.read() as connection:
            queries = [query]
            if digests is not None:
                queries = [
                    query.where(signatures.c.digest.in_(batch)) for batch in batches(sorted(set(digests)))
                ]
            for selected in queries:
                for row in connection.execute(selected).mappings():
                    signature = record_of(
                        OpSignatureRecord,
                        {column.name: row[f"op_signature_{column.name}"] for column in signatures.c},
                    )
                    cost = record_of(OpCostRecord, {**row, "signature": signature})
                    found[signature.digest, cost.phase] = cost
        return found

    def op_cost_medians(
        self, device_kind_id: int, environment_id: int | None, digests: Iterable[str] | None = None
    ) -> dict[tuple[str, Phase], float | None]:
        """Return the median of the samples of each cost that `op_costs` returns, None where the measurement failed.

        Without samples, keys and the rest, so that a network's thousands of costs are read at once.
        """
        costs, signatures = models.op_costs, models.op_signatures
        query = (
            sa.select(signatures.c.digest, costs.c.phase, costs.c.median_s)
            .join(signatures, costs.c.signature_id == signatures.c.id)
            .where(costs.c.device_kind_id == device_kind_id)
            .order_by(costs.c.measured_at, costs.c.id)
        )
        if environment_id is not None:
            query = query.where(costs.c.environment_id == environment_id)
        queries = [query]
        if digests is not None:
            queries = [query.where(signatures.c.digest.in_(batch)) for batch in batches(sorted(set(digests)))]
        with self.read() as connection:
            return {
                (digest, phase): median_s
                for selected in queries
                for digest, phase, median_s in connection.execute(selected).all()
            }

    def put_link_costs(
        self, device_kind_id: int, environment_id: int, costs: Iterable[LinkCostRecord]
    ) -> int:
        """Store link costs in one transaction, the later measured replacing the earlier; return how many."""
        rows = [
            {
                **row_of(cost),
                "device_kind_id": device_kind_id,
                "environment_id": environment_id,
                "sample_count": cost.sample_count,
            }
            for cost in costs
        ]
        with self.write() as connection:
            return upsert_newer(connection, models.link_costs, rows, _LINK_COST_KEY, "measured_at")

    def link_costs(self, device_kind_id: int, environment_id: int) -> list[LinkCostRecord]:
        """Return all link costs of a device kind in an environment, by pattern, group size and size."""
        table = models.link_costs
        query = (
            sa.select(table)
            .where(table.c.device_kind_id == device_kind_id, table.c.environment_id == environment_id)
            .order_by(table.c.pattern, table.c.group_size, table.c.size_bytes)
        )
        with self.read() as connection:
            return read_all(connection, LinkCostRecord, query)

    def put_link_fits(self, device_kind_id: int, environment_id: int, fits: Iterable[LinkFitRecord]) -> int:
        """Store what was fitted to link costs, the later replacing the earlier; return how many."""
        rows = [
            {**row_of(fit), "device_kind_id": device_kind_id, "environment_id": environment_id}
            for fit in fits
        ]
        with self.write() as connection:
            return upsert_newer(connection, models.link_fits, rows, _LINK_FIT_KEY, "measured_at")

    def link_fits(self, device_kind_id: int, environment_id: int) -> list[LinkFitRecord]:
        """Return all link fits of a device kind in an environment, by pattern and group size."""
        table = models.link_fits
        query = (
            sa.select(table)
            .where(table.c.device_kind_id == device_kind_id, table.c.environment_id == environment_id)
            .order_by(table.c.pattern, table.c.group_size)
        )
        with self.read() as connection:
            return read_all(connection, LinkFitRecord, query)

    def cost_summaries(self) -> list[CostSummary]:
        """Return, per device kind and environment, how many operator costs there are and how old, newest first."""
        costs, kinds, environments = models.op_costs, models.device_kinds, models.environments
        newest = sa.func.max(costs.c.measured_at)
        query = (
            sa.select(
                costs.c.device_kind_id,
                costs.c.environment_id,
                sa.func.count(costs.c.minimum_s).label("measured"),
                sa.func.count(costs.c.failure).label("failed"),
                sa.func.min(costs.c.measured_at).label("oldest"),
                newest.label("newest"),
            )
            .group_by(costs.c.device_kind_id, costs.c.environment_id)
            .order_by(newest.desc(), costs.c.device_kind_id, costs.c.environment_id)
        )
        with self.read() as connection:
            groups = connection.execute(query).all()
            kind_of = {kind.id: kind for kind in read_all(connection, DeviceKindRecord, sa.select(kinds))}
            environment_of = {
                environment.id: environment
                for environment in read_all(connection, EnvironmentRecord, sa.select(environments))
            }
        return [
            CostSummary(
                device_kind=kind_of[group.device_kind_id],
                environment=environment_of[group.environment_id],
                measured=group.measured,
                failed=group.failed,
                oldest=group.oldest,
                newest=group.newest,
            )
            for group in groups
        ]


def _put_signatures(connection: sa.Connection, signatures: Sequence[OpSignatureRecord]) -> dict[str, int]:
    """Store signatures, each once; return their ids by digest."""
    table = models.op_signatures
    insert_ignoring(connection, table, [row_of(signature) for signature in signatures], "digest")
    ids: dict[str, int] = {}
    for batch in batches(sorted({signature.digest for signature in signatures})):
        for row in connection.execute(sa.select(table.c.digest, table.c.id).where(table.c.digest.in_(batch))):
            ids[row.digest] = row.id
    return ids
