"""The choice of GPUs, wherever devices are chosen, and what is known of each."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.services.costs.machine import local_devices
from app.services.run.cluster import own_devices
from graph.errors import UsageError
from profiler import clocks, exclusive
from profiler.devices import available_devices
from profiler.environment import environment
from profiler.estimate import PhaseWork, roofline_s
from profiler.kinds import cuda_kind_of
from profiler.process_groups import NCCL_VARIABLES
from tests.app.commands import all_parameters
from tests.gpu.virtual_device import IDLE_CLOCK_HZ, Virtual
from tests.profiler.kinds import datasheet_kind


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


def test_a_gpu_is_locked_by_what_it_is_and_not_by_its_number(
    gpus: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (exclusive._name(device) for device in available_devices("cuda")[:2])
    assert first != second
    properties = torch.cuda.get_device_properties
    # As under CUDA_VISIBLE_DEVICES=1,0.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties(1 - index))
    assert [exclusive._name(device) for device in available_devices("cuda")[:2]] == [second, first]


def test_the_clock_of_a_slice_of_a_gpu_is_that_of_the_gpu(
    gpus: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = clocks._nvml()

    def handle(name: str) -> int:
        if name.startswith("GPU-"):
            raise library.NVMLError("not found")
        return 100 + int(name.rpartition("-")[2])

    monkeypatch.setattr(library, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(
        library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", lambda part: part - 100, raising=False
    )
    with clocks.ClockWatch(available_devices("cuda")[3]) as clock:
        pass
    assert clock.clock_hz == IDLE_CLOCK_HZ


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (11, 0)])
def test_a_card_without_a_data_sheet_multiplies_16_bits_in_its_matrix_units(
    capability: tuple[int, int],
) -> None:
    major, minor = capability
    properties = SimpleNamespace(multi_processor_count=100, clock_rate=1_500_000, major=major, minor=minor)
    kind = cuda_kind_of("NVIDIA Something", 2**35, properties)
    peaks = dict(kind.peak_flops)
    half = "bfloat16" if capability >= (8, 0) else "float16"
    product = PhaseWork(1e15, 1.0, half)
    assert roofline_s(product, kind) < 0.3 * roofline_s(PhaseWork(1e15, 1.0), kind)
    assert ("tf32" in peaks) is (capability >= (8, 0))


def test_a_slice_of_a_gpu_has_not_the_whole_one_s_data_sheet() -> None:
    properties = SimpleNamespace(multi_processor_count=16, major=9, minor=0)
    kind = cuda_kind_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * 2**30, properties)
    assert kind.peak_flops_per_s("float32") < 0.2 * datasheet_kind("H100-SXM5-80GB").peak_flops_per_s(
        "float32"
    )


NVIDIA_SMI = """#!/bin/sh
case "$1" in *{unknown}*) echo 'Field is not a valid field to query.'; exit 2;; esac
echo "$1" | sed 's/--query-gpu=//; s/,/, /g'
"""


@pytest.mark.parametrize("unknown", ["nothing", "mig.mode.current"])
def test_modes_of_the_card_and_of_nccl_are_part_of_the_environment(
    gpus: Virtual, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI.format(unknown=unknown))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", **NCCL_VARIABLES}.items():
        monkeypatch.setenv(name, value)
    facts = environment("cuda").facts
    assert facts["nccl_variables"] == {"NCCL_ALGO": "Ring"}
    assert "nccl" in facts
    (card,) = facts["driver"]
    assert card["driver_version"] == "driver_version"
    assert ("mig.mode.current" in card) is ("ecc.mode.current" in card) is (unknown == "nothing")
