"""Packs on every backend: what is written is what is taken in, and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from app.db.records import LinkCostRecord, LinkFitRecord, OpCostRecord
from app.db.store import Store
from app.services.costs import packs
from app.services.costs.operator_costs import cost_key_record
from app.services.costs.packs import PackCounts, PackGroup, merge_pack, read_pack, stored_groups, write_pack
from graph.calls import CostPhase, LocalCall
from graph.errors import UsageError
from graph.operators import Slot, TensorSpec
from profiler.updates import update_call
from tests.app.db import samples


def call(size: int) -> LocalCall:
    """A square matrix product."""
    spec = TensorSpec((size, size), "float32")
    arguments = (("self", Slot(0)), ("mat2", Slot(1)))
    return LocalCall("aten.mm.default", arguments, (spec, spec), (spec,), (True, True))


def cost(size: int, phase: CostPhase, generator: random.Random, at: int) -> OpCostRecord:
    times = sorted(generator.uniform(1e-6, 1e-2) for _ in range(5))
    cost_key = cost_key_record(update_call("sgd") if phase == "update" else call(size))
    if generator.random() < 0.2:
        return OpCostRecord(
            cost_key, phase, None, None, None, failure="out of memory", measured_at=samples.moment(at)
        )
    peak = generator.choice([None, size])
    return OpCostRecord(
        cost_key, phase, times[0], times[1], times[2], tuple(times), peak, None, samples.moment(at),
        *generator.choice([(None, None, None), (times[0], 1.5e9, "power limit")]),
    )  # fmt: skip


def fill(store: Store, seed: int) -> None:
    """Store random costs of two kinds of devices in two environments."""
    generator = random.Random(seed)
    for name in ("cpu", "gpu"):
        kind = store.put_device_kind(samples.device_kind(name))
        for number in (1, 2):
            environment = store.put_environment(samples.environment(number))
            chosen = generator.sample(range(1, 40), 12)
            phases: list[CostPhase] = ["forward", "backward"]
            costs = [
                cost(size, phase, generator, generator.randint(0, 99)) for size in chosen for phase in phases
            ]
            update = cost(1, "update", generator, generator.randint(0, 99))
            store.put_op_costs(kind, environment, [*costs, update])
            links = [
                LinkCostRecord(
                    "p2p", 2, 2**power, 1e-6 * power, 2e-6 * power, (1e-6, 2e-6), samples.moment(seed)
                )
                for power in range(1, 4)
            ]
            store.put_link_costs(kind, environment, links)
            fit = LinkFitRecord("p2p", 2, 1e-6, generator.uniform(1e8, 1e9), None, samples.moment(seed), 0.1)
            contention = LinkFitRecord("contention", 2, None, None, 0.5, samples.moment(seed))
            store.put_link_fits(kind, environment, [fit, contention])


def content(store: Store) -> dict[tuple[str, str], PackGroup]:
    """What a store holds, without the database's own numbers."""

    def plain(record: Any) -> Any:
        numbers = {name: 0 for name in ("id", "device_kind_id", "environment_id") if hasattr(record, name)}
        plain_record = replace(record, **numbers)
        if isinstance(record, OpCostRecord):
            plain_record = replace(plain_record, cost_key=replace(record.cost_key, id=0))
        return plain_record

    return {
        (group.kind.name, group.environment.fingerprint): PackGroup(
            plain(group.kind),
            plain(group.environment),
            tuple(plain(one) for one in group.op_costs),
            tuple(plain(one) for one in group.link_costs),
            tuple(plain(one) for one in group.link_fits),
        )
        for group in stored_groups(store)
    }


@pytest.fixture
def other(tmp_path: Path) -> Callable[[int], Store]:
    """Another database, filled by a seed."""

    def make(seed: int) -> Store:
        store = Store.open(tmp_path / f"other-{seed}.sqlite")
        fill(store, seed)
        return store

    return make


def test_what_was_exported_is_imported_and_twice_is_as_good_as_once(
    store: Store, other: Callable[[int], Store], tmp_path: Path
) -> None:
    file = tmp_path / "pack.parquet"
    with other(0) as source:
        written = write_pack(source, file)
        expected = content(source)
    assert written == PackCounts.of(tuple(expected.values())) == PackCounts(100, 12, 8)
    assert merge_pack(store, read_pack(file)) == written
    assert content(store) == expected
    assert merge_pack(store, read_pack(file)) == PackCounts(0, 0, 0)
    assert content(store) == expected


@pytest.mark.parametrize("seed", range(3))
def test_packs_merge_in_any_order_and_the_later_measurement_stays(
    store: Store, other: Callable[[int], Store], tmp_path: Path, seed: int
) -> None:
    files = [tmp_path / f"{number}.parquet" for number in range(2)]
    latest: dict[tuple[object, ...], datetime] = {}
    for number, file in enumerate(files):
        with other(2 * seed + number) as source:
            write_pack(source, file)
            for key, group in content(source).items():
                for one in group.op_costs:
                    name = (key, one.cost_key.digest, one.phase)
                    latest[name] = max(latest.get(name, one.measured_at), one.measured_at)
    with Store.open(tmp_path / "backwards.sqlite") as backwards:
        for file in files:
            merge_pack(store, read_pack(file))
        for file in reversed(files):
            merge_pack(backwards, read_pack(file))
        found = content(store)
        left = set(latest)
        # Of two measured at the same moment either may stay.
        for key, group in content(backwards).items():
            mine = {(one.cost_key.digest, one.phase): one for one in found[key].op_costs}
            for one in group.op_costs:
                name = (key, one.cost_key.digest, one.phase)
                left.remove(name)
                assert one.measured_at == mine[one.cost_key.digest, one.phase].measured_at == latest[name]
        assert left == set()


def test_a_device_kind_that_is_known_stays_as_it_is(
    store: Store, other: Callable[[int], Store], tmp_path: Path
) -> None:
    store.put_device_kind(replace(samples.device_kind("gpu"), memory_bytes=7))
    with other(0) as source:
        write_pack(source, tmp_path / "pack.parquet", "gpu")
    merge_pack(store, read_pack(tmp_path / "pack.parquet"))
    assert [(kind.name, kind.memory_bytes) for kind in store.device_kinds()] == [("gpu", 7)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a few hundred rows."""
    folder = tmp_path_factory.mktemp("pack")
    with Store.open(folder / "source.sqlite") as source:
        fill(source, 1)
        write_pack(source, folder / "pack.parquet")
    return folder / "pack.parquet"


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_is_noticed_or_means_nothing(pack: Path, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    content = bytearray(pack.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(content[: generator.choice([len(content), len(content) // 2])])
    found, message = None, f"pack {damaged}: "
    try:
        found = read_pack(damaged)
    except UsageError as error:
        message = str(error)
    assert found in (None, read_pack(pack))
    assert message.startswith(f"pack {damaged}: ")
    assert "\n" not in message


FUTURE = datetime.now(UTC) + timedelta(days=30)
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "another record": ("op_cost", {"record": "os_cost"}),
    "a call that is none": ("op_cost", {"key": "{}"}),
    "a call in other words": ("op_cost", {"key": " {}"}),
    "a call of no rule's shapes": ("op_cost", {"key": '{"arguments":[],"gradients":[],"inputs":[],"outputs":[],'
                                                      '"target":"aten.mm.default"}'}),
    "a phase that is none": ("op_cost", {"phase": "sideways"}),
    "a time below 0": ("op_cost", {"minimum_s": -1.0}),
    "a time that is no number": ("op_cost", {"median_s": float("nan")}),
    "a median below the minimum": ("op_cost", {"median_s": 0.0}),
    "a time and a failure": ("op_cost", {"failure": "x"}),
    "no samples": ("op_cost", {"samples_s": []}),
    "a sample that is none": ("op_cost", {"samples_s": [1.0, None]}),
    "the future": ("op_cost", {"measured_at": FUTURE}),
    "no moment": ("op_cost", {"measured_at": None}),
    "no device kind": ("op_cost", {"device_kind": ""}),
    "two descriptions of a kind": ("op_cost", {"memory_bytes": 5}),
    "memory below 0": ("op_cost", {"memory_bytes": -5}),
    "an environment that is a list": ("op_cost", {"environment": "[]"}),
    "an environment that is nothing": ("op_cost", {"environment": None}),
    "a message of no bytes": ("link_cost", {"size_bytes": 0}),
    "a group of one": ("link_cost", {"group_size": 1}),
    "a line without end": ("link_fit", {"bandwidth_bytes_per_s": float("inf")}),
    "a residual below 0": ("link_fit", {"residual": -0.1}),
    "a clock that stands still": ("op_cost", {"clock_hz": 0.0}),
    "an endless launch": ("op_cost", {"launch_s": float("inf")}),
    "a reference of no time": ("op_cost", {"reference_s": 0.0}),
    "a speed that is none": ("op_cost", {"speed": float("nan")}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_row_that_cannot_be_a_measurement_refuses_the_pack(pack: Path, tmp_path: Path, name: str) -> None:
    record, changes = CHANGES[name]
    rows = parquet.read_table(pack).to_pylist()
    place = next(
        number for number, row in enumerate(rows) if row["record"] == record and row["failure"] is None
    )
    rows[place].update(changes)
    forged = tmp_path / "forged.parquet"
    table = pa.Table.from_pylist(rows, parquet.read_schema(pack).remove_metadata())
    # Somebody who writes packs by hand can write the digest, too.
    metadata = {packs.FORMAT: packs.VERSION, packs.DIGEST: packs._digest(table.to_pylist())}
    parquet.write_table(table.replace_schema_metadata(metadata), forged)
    with pytest.raises(UsageError, match=r"forged.parquet: row \d+: .*; export it again"):
        read_pack(forged)


def test_a_pack_of_the_first_version_is_read_without_what_it_lacks(pack: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.parquet"
    table = parquet.read_table(pack).drop_columns(list(packs.SINCE))
    metadata = {packs.FORMAT: b"1", packs.DIGEST: packs._digest(table.to_pylist())}
    parquet.write_table(table.replace_schema_metadata(metadata), old)
    before, now = read_pack(old), read_pack(pack)
    assert [one.median_s for group in before for one in group.op_costs] == [
        one.median_s for group in now for one in group.op_costs
    ]
    assert {one.residual for group in before for one in group.link_fits} == {None}
    assert {one.clock_hz for group in before for one in group.op_costs} == {None}


def test_other_files_are_no_packs(tmp_path: Path) -> None:
    for name, write in {
        "missing": None,
        "text": lambda path: path.write_text("cost\n1\n"),
        "table": lambda path: parquet.write_table(pa.table({"cost": [1]}), path),
    }.items():
        file = tmp_path / name
        if write is not None:
            write(file)
        advice = "export" if write is not None else "check the path"
        with pytest.raises(UsageError, match=rf"pack .*{name}: .*; {advice}"):
            read_pack(file)


def test_a_pack_goes_neither_over_the_database_nor_out_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "own.sqlite"
    with Store.open(path) as store:
        with pytest.raises(UsageError, match="belongs to a database"):
            write_pack(store, path)
        with pytest.raises(UsageError, match="holds no costs"):
            write_pack(store, tmp_path / "pack.parquet")
        fill(store, 0)
        with pytest.raises(UsageError, match="--device-kind: is tpu, must be one that is stored: cpu, gpu"):
            write_pack(store, tmp_path / "pack.parquet", "tpu")
    assert not (tmp_path / "pack.parquet").exists()
