"""This machine's links, measured once for a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.db.store import Store
from app.services.machine import describe, local_devices, stored_links, topology_of
from app.services.predicting import Target


def test_what_a_probe_measured_is_what_predictions_take(probed: Path) -> None:
    with Store.open(probed) as store:
        machine = describe(store, local_devices("cpu", 2))
        links = stored_links(store, machine)
        assert links is not None
        fits = {fit.pattern: fit for fit in store.link_fits(machine.kind_id, machine.environment_id)}
    assert set(fits) == {"p2p", "all_reduce", "large all_reduce", "contention", "exchange"}
    costs = Target(topology_of(machine, links), machine, links).link_costs
    for known, fit in (
        (costs.all_reduce, fits["all_reduce"]),
        (costs.large_all_reduce, fits["large all_reduce"]),
    ):
        assert fit.latency_s is not None
        assert fit.bandwidth_bytes_per_s is not None
        assert list(known) == [2]
        assert known[2] == pytest.approx((fit.latency_s, 1 / fit.bandwidth_bytes_per_s))
