"""Networks of the zoo, small presets, on two processes, all under --all: equal to one device, three steps long."""

from __future__ import annotations

import pytest

from graph.zoo import zoo_names
from tests.quick import FEW_NETWORKS, few
from tests.runtime.networks import cases, check_network
from tests.runtime.pool import LocalPool


@pytest.mark.parametrize("choice", cases(1, 20))
@pytest.mark.parametrize("name", few((*FEW_NETWORKS, "bert-large", "resnext50", "xdl"), zoo_names()))
def test_zoo_network(pool: LocalPool, name: str, choice: str | int) -> None:
    check_network(pool, name, choice)
