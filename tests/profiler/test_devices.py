"""Device lists, what this machine has, and what kinds they are."""

import os
import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph.errors import UsageError
from graph.topology import load_topology, packaged_topologies
from profiler.devices import (
    PhysicalDevice,
    available_devices,
    cpu_devices,
    device_warnings,
    format_device_list,
    parse_device_list,
    select_devices,
)
from profiler.environment import Environment, environment
from profiler.kinds import RESERVED_BYTES, cpu_kind, cuda_kind_of, datasheet_kinds
from profiler.pinning import child_variables, pin_to_core, started_with, usable_cores
from profiler.processors import ProcessorFacts, core_fields, core_sort, frequency_hz, processor_name
from tests.profiler.kinds import datasheet_kind

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("0", (0,)),
        ("0-7,9", (0, 1, 2, 3, 4, 5, 6, 7, 9)),
        (" 3 , 1 - 2 ", (3, 1, 2)),
        ("5-5", (5,)),
    ],
)
def test_device_list_is_read(text: str, indexes: tuple[int, ...]) -> None:
    assert parse_device_list(text) == indexes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is no device"),
        ("0,,1", "'' is no device"),
        ("gpu0", "'gpu0' is no device"),
        ("-1", "'-1' is no device"),
        ("1.5", "'1.5' is no device"),
        ("\u0661", "is no device"),
        ("7-0", "range 7-0 runs backwards; write 0-7"),
        ("0-3,2", "device 2 is named twice"),
        ("0-99999999999", "index 99999999999 is too large"),
    ],
)
def test_device_list_is_refused_in_one_line(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device_list(text, "--devices")
    assert told in str(caught.value)
    assert str(caught.value).startswith("--devices ")
    assert "\n" not in str(caught.value)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
def test_device_list_reads_what_it_writes(indexes: list[int]) -> None:
    assert parse_device_list(format_device_list(indexes)) == tuple(indexes)


def test_absent_gpus_are_refused_with_what_is_there() -> None:
    count = len(available_devices("cuda"))
    with pytest.raises(UsageError) as caught:
        select_devices("cuda", range(count + 8))
    message = str(caught.value)
    assert message.startswith(f"--gpus 0-{count + 7}: this machine has {count} GPUs")
    assert "must name GPUs that are present" in message
    assert "--device cpu" in message
    assert "\n" not in message


def test_absent_cores_are_refused_with_what_is_there() -> None:
    count = len(usable_cores())
    with pytest.raises(UsageError, match=rf"--cores {count}: this machine has {count} CPU devices"):
        select_devices("cpu", (count,), "--cores")


def test_selected_devices_keep_their_order() -> None:
    count = len(available_devices("cpu"))
    chosen = select_devices("cpu", tuple(reversed(range(count))))
    assert [device.index for device in chosen] == list(reversed(range(count)))
    assert [device.core for device in chosen] == list(reversed(usable_cores()))


def test_more_cpu_devices_than_cores_share_them_and_warn() -> None:
    count = len(usable_cores())
    devices = cpu_devices(count + 1)
    assert [device.index for device in devices] == list(range(count + 1))
    assert devices[-1].core == devices[0].core
    (warning,) = [text for text in device_warnings(devices) if "share" in text]
    assert f"{count + 1} share {count} core(s)" in warning
    assert not [text for text in device_warnings(cpu_devices(count)) if "share" in text]


def test_no_cpu_device_is_refused() -> None:
    with pytest.raises(UsageError, match="0 asked for, must be at least 1"):
        cpu_devices(0)


def _facts(**changes: object) -> ProcessorFacts:
    values: dict[str, object] = {
        "name": "Some Processor 1",
        "cores": 4,
        "flags": frozenset({"avx2"}),
        "frequency_hz": 2e9,
        "cache_bytes": 2**20,
        "memory_bytes": 8 * GIB,
    }
    return ProcessorFacts(**(values | changes))  # type: ignore[arg-type]


def test_cpu_kind_is_one_core_with_its_share() -> None:
    kind = cpu_kind(_facts())
    assert kind.name == "Some Processor 1 (1 core)"
    assert kind.memory_bytes == 2 * GIB
    # 8 lanes x 2 units x 2 operations x 2 GHz
    assert kind.peak_flops_per_s("float32") == 64e9


@pytest.mark.parametrize(
    ("flags", "flops_a_cycle"), [({"avx", "avx2", "avx512f"}, 64), ({"avx"}, 16), ({"asimd"}, 16), (set(), 8)]
)
def test_cpu_peak_follows_the_instruction_set(flags: set[str], flops_a_cycle: int) -> None:
    assert cpu_kind(_facts(flags=frozenset(flags))).peak_flops_per_s("float32") == flops_a_cycle * 2e9


def test_efficiency_cores_are_a_kind_of_their_own() -> None:
    performance, efficiency = cpu_kind(_facts(sort="P-core")), cpu_kind(_facts(sort="E-core"))
    assert [kind.name for kind in (performance, efficiency)] == [
        "Some Processor 1 (1 P-core)",
        "Some Processor 1 (1 E-core)",
    ]
    assert efficiency.peak_flops_per_s("float32") == performance.peak_flops_per_s("float32") / 2


def test_sorts_of_cores_are_told_by_the_kernels_lists(tmp_path: Path) -> None:
    listed = {"P-core": tmp_path / "core", "E-core": tmp_path / "atom"}
    assert core_sort(0, listed) == "core"
    listed["P-core"].write_text("0-3\n")
    listed["E-core"].write_text("4,6-7\n")
    sorts = [core_sort(core, listed) for core in range(9)]
    assert sorts == ["P-core"] * 4 + ["E-core", "core", "E-core", "E-core", "core"]
    assert core_sort(None, listed) == "core"


def test_each_core_has_its_own_fields(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nCPU part\t: 0xd05\n\nprocessor\t: 4\nCPU part\t: 0xd0b\n\nHardware\t: x\n"
    )
    assert [core_fields(file, core)["CPU part"] for core in (0, 4, None, 9)] == [
        "0xd05",
        "0xd0b",
        "0xd05",
        "0xd05",
    ]
    assert core_fields(tmp_path / "none", 0) == {}


def test_nameless_generations_are_told_apart() -> None:
    fields = {"model name": "AMD EPYC", "cpu family": "26", "model": "2"}
    assert processor_name(fields) == "AMD EPYC family 26 model 2"
    assert processor_name(fields | {"model name": "AMD EPYC 7763  64-Core"}) == "AMD EPYC 7763 64-Core"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="BogoMIPS mean something else elsewhere")
def test_frequency_is_the_configured_or_the_nominal_one(tmp_path: Path) -> None:
    assert frequency_hz({"bogomips": "5192.24", "cpu MHz": "800.0"}, tmp_path) == 2.6e9
    (tmp_path / "cpufreq").mkdir()
    (tmp_path / "cpufreq" / "cpuinfo_max_freq").write_text("3700000\n")
    assert frequency_hz({"bogomips": "5192.24"}, tmp_path) == 3.7e9


def test_data_sheets_agree_with_packaged_topologies() -> None:
    sheets = {kind.name: kind for kind in datasheet_kinds()}
    # A processor's figures come from its flags and its clock (`profiler.kinds.cpu_kind`), not from a sheet of its own.
    packaged = {
        kind.name: kind
        for name in packaged_topologies()
        for kind in load_topology(name).kinds
        if kind.processor == "cuda"
    }
    assert packaged
    for name, kind in packaged.items():
        sheet = sheets[name]
        assert dict(sheet.peak_flops) == pytest.approx(dict(kind.peak_flops))
        assert sheet.memory_bytes == kind.memory_bytes
        assert sheet.memory_bandwidth_bytes_per_s == pytest.approx(kind.memory_bandwidth_bytes_per_s)
        assert sheet.launch_latency_s == pytest.approx(kind.launch_latency_s)


def test_known_gpu_gets_its_data_sheet_and_its_own_memory() -> None:
    kind = cuda_kind_of("NVIDIA H200", 140 * GIB)
    assert kind.name == "H200-SXM5-141GB"
    assert kind.memory_bytes == 140 * GIB - RESERVED_BYTES
    assert kind.peak_flops == datasheet_kind("H200-SXM5-141GB").peak_flops


def test_unknown_gpu_keeps_its_name_and_gets_figures_from_its_properties() -> None:
    class Properties:
        multi_processor_count = 10
        clock_rate = 1_000_000  # kHz
        memory_clock_rate = 1_000_000
        memory_bus_width = 256  # bits

    kind = cuda_kind_of("Some GPU", GIB, Properties())
    assert kind.name == "Some GPU"
    assert kind.peak_flops_per_s("float32") == 10 * 128 * 2 * 1e9
    assert kind.memory_bandwidth_bytes_per_s == 2 * 1e9 * 256 / 8


def test_environment_is_stable_and_names_no_host() -> None:
    first = environment("cpu")
    environment.cache_clear()
    second = environment("cpu")
    assert first is not second
    assert first.digest == second.digest
    host = platform.node()
    assert not [value for value in first.facts.values() if host and value == host]
    assert first.facts["threads_a_device"] == 1


def test_environments_differ_by_their_software() -> None:
    facts = dict(environment("cpu").facts)
    assert Environment(facts).digest == environment("cpu").digest
    assert Environment(facts | {"torch": "0.0.1"}).digest != environment("cpu").digest


def test_child_variables_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with started_with(child_variables()):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "PYTHONSAFEPATH" not in os.environ


def test_overlapping_starts_in_threads_leave_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    first, second = started_with(child_variables()), started_with(child_variables())
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["PYTHONSAFEPATH"] == "1"
    second.__exit__(None, None, None)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "PYTHONSAFEPATH" not in os.environ


def test_no_core_to_pin_to_changes_nothing() -> None:
    before = usable_cores()
    assert not pin_to_core(None)
    assert usable_cores() == before


def test_device_names() -> None:
    kind = datasheet_kind("K80")
    assert PhysicalDevice("cuda", 3, kind).torch_name == "cuda:3"
    assert PhysicalDevice("cpu", 3, kind, 1).torch_name == "cpu"
    assert PhysicalDevice("cpu", 3, kind, 1).label == "cpu:3"


@pytest.mark.cuda
def test_gpus_are_found() -> None:
    devices = available_devices("cuda")
    assert [device.index for device in devices] == list(range(len(devices)))
    assert devices[0].kind.memory_bytes > 0
    assert environment("cuda").facts["cuda"]
