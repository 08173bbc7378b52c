"""The choice of GPUs, wherever devices are chosen."""

from __future__ import annotations

import pytest

from app.services.costs.machine import local_devices
from app.services.run.cluster import own_devices
from graph.errors import UsageError
from tests.app.commands import all_parameters
from tests.gpu.virtual_device import Virtual


def test_every_command_that_takes_a_device_takes_gpus() -> None:
    by_option = {
        option: {parameter.command for parameter in all_parameters() if parameter.option == option}
        for option in ("--device", "--gpus")
    }
    assert by_option["--gpus"] == by_option["--device"] == {
        "profile", "run", "search", "topology probe", "topology show"
    }  # fmt: skip


def test_gpus_are_those_named_in_their_order(gpus: Virtual) -> None:
    assert [device.label for device in local_devices(None, None, "6,2-3")] == ["cuda:6", "cuda:2", "cuda:3"]
    assert [device.label for device in local_devices("cuda", 2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(UsageError, match="--gpus: was given with --device cpu"):
        local_devices("cpu", None, "0")
    with pytest.raises(UsageError, match="--gpus: was given with --devices"):
        local_devices(None, 2, "0-1")
    with pytest.raises(UsageError, match="--gpus 8: this machine has 8 GPUs"):
        local_devices(None, None, "8")


def test_the_ranks_of_a_host_are_the_gpus_named(gpus: Virtual, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [device.index for device in own_devices(None, "4,1")] == [4, 1]
    with pytest.raises(UsageError, match="names 3 GPUs, must name 2"):
        own_devices(None, "0-2")
