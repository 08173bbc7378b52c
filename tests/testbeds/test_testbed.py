"""`scripts/testbed`: hosts in network namespaces, a link of a limited rate for each, and commands on all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scripts.testbeds.__main__ import main
from scripts.testbeds.hosts import bits_per_s, divided_cores, state_file
from scripts.testbeds.network import burst_bytes, namespaces_of, processes_in
from tests.testbeds.commands import WAIT_S, is_alive, outcome, start, wait_for

# Receives from so many senders; prints when the first may send, and when the last byte is there.
RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 4321))
print("ready", flush=True)
senders = [server.accept()[0] for _ in range(int(sys.argv[1]))]
began = time.monotonic()
remaining = int(sys.argv[1]) * int(sys.argv[2])
for sender in senders:
    sender.sendall(b"go")
for sender in senders:
    while received := len(sender.recv(1 << 20)):
        remaining -= received
assert remaining == 0, remaining
print(began, time.monotonic())
"""
# Sends to each address, to all at once.
SEND = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def send(address):
    with socket.create_connection((address, 4321)) as connection:
        assert connection.recv(2) == b"go"
        connection.sendall(bytes(int(sys.argv[1])))
with ThreadPoolExecutor(8) as pool:
    list(pool.map(send, sys.argv[2:]))
"""


def is_written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


@pytest.fixture(scope="module")
def slow_hosts(name: str) -> Iterator[str]:
    """The name of a testbed of three hosts at 20 Mbit/s."""
    chosen = f"{name}-slow"
    assert outcome("up", "--hosts", "3", "--bandwidth", "20mbit", "--name", chosen)[0] == 0
    yield chosen
    assert outcome("down", "--name", chosen)[0] == 0


@pytest.fixture(scope="module")
def two_hosts(name: str) -> Iterator[str]:
    """The name of a testbed of two hosts at 1 Gbit/s."""
    chosen = f"{name}-two"
    assert outcome("up", "--hosts", "2", "--bandwidth", "1gbit", "--name", chosen)[0] == 0
    yield chosen
    assert outcome("down", "--name", chosen)[0] == 0


# ---- arguments


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("2.5gbit", 25 * 10**8), ("1500kbit", 15 * 10**5)],
)
def test_rates_are_in_bits_per_second(text: str, rate: int) -> None:
    assert bits_per_s(text) == rate


def test_hosts_get_equal_shares_of_the_cores_or_take_turns() -> None:
    assert divided_cores([0, 1], 2) == ((0,), (1,))
    assert divided_cores([0, 2, 4, 6, 8], 2) == ((0, 2), (4, 6))
    assert divided_cores([3], 2) == ((3,), (3,))


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--hosts", "1"],
        ["up", "--hosts", "many"],
        ["up", "--devices", "0"],
        ["up", "--bandwidth", "1"],
        ["up", "--bandwidth", "1kbit"],
        ["up", "--bandwidth", "9999gbit"],
        ["up", "--name", "../up"],
        ["up", "--name", "x" * 40],
        ["up", "--", "app", "run"],
        ["run"],
        ["run", "--"],
        ["sideways"],
        [],
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(arguments)
    shown = capsys.readouterr()
    assert (code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith("error: ")


def test_without_iproute2_it_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["up"]) == 2
    assert capsys.readouterr().err == "error: testbed: ip is not on PATH, must be; install iproute2 (Linux)\n"


def test_without_root_it_is_one_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["up"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: testbed: the user has id 1000, must be root")


# ---- up and down


def test_a_machines_own_network_stays_as_it_is(absent: str) -> None:
    def network() -> list[str]:
        return [
            subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout
            for what in (
                ["-o", "-4", "address"],
                ["-o", "-6", "address", "show", "permanent"],
                ["route"],
                ["-br", "link"],
            )
        ]

    before = network()
    assert outcome("up", "--hosts", "2", "--name", absent)[0] == 0
    assert network() == before
    routes = subprocess.run(["ip", "-n", f"{absent}-0", "route"], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in routes.stdout.splitlines()] == ["10.77.0.0/24"]
    assert namespaces_of(absent) == (f"{absent}-0", f"{absent}-1", f"{absent}-switch")
    code, output, errors = outcome("down", "--name", absent)
    assert (code, output, errors) == (0, f"testbed {absent}: is down\n", "")
    assert (network(), namespaces_of(absent), state_file(absent).exists()) == (before, (), False)


def test_up_a_second_time_is_one_line_and_changes_nothing(two_hosts: str) -> None:
    before = state_file(two_hosts).read_bytes()
    code, output, errors = outcome("up", "--hosts", "4", "--name", two_hosts)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"error: testbed {two_hosts}: is up already, must be down;")
    assert (state_file(two_hosts).read_bytes(), len(namespaces_of(two_hosts))) == (before, 3)


def test_down_of_nothing_says_so(absent: str) -> None:
    assert outcome("down", "--name", absent) == (0, f"testbed {absent}: was not up\n", "")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Return a PATH on which tc is a shell script, from its lines."""

    def write(lines: str) -> str:
        (tmp_path / "tc").write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "tc").chmod(0o755)
        return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    return write


def test_what_up_made_is_taken_away_where_the_system_refuses(
    absent: str, program: Callable[[str], str]
) -> None:
    path = program("echo 'Error: Specified qdisc kind is unknown.' >&2; exit 2")
    code, output, errors = outcome("up", "--name", absent, path=path)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert "failed (Error: Specified qdisc kind is unknown.)" in errors
    assert (namespaces_of(absent), state_file(absent).exists()) == ((), False)


def test_down_takes_away_what_a_killed_up_made(
    absent: str, program: Callable[[str], str], tmp_path: Path
) -> None:
    # In the middle, up waits for this.
    path = program(f"echo $$ >{tmp_path}/waiting; exec sleep 600")
    with start("up", "--name", absent, path=path) as process:
        wait_for(lambda: is_written(tmp_path / "waiting"))
        process.kill()
    waiting = int((tmp_path / "waiting").read_text())
    wait_for(lambda: not is_alive(waiting))
    assert namespaces_of(absent)
    code, _, errors = outcome("run", "--name", absent, "--", "true")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"error: testbed {absent}: is not up completely, must be;")
    assert outcome("down", "--name", absent) == (0, f"testbed {absent}: is down\n", "")
    assert namespaces_of(absent) == ()


def test_an_interrupted_up_takes_away_what_it_made(
    absent: str, program: Callable[[str], str], tmp_path: Path
) -> None:
    path = program(f"echo $$ >{tmp_path}/waiting; exec sleep 600")
    with start("up", "--name", absent, path=path) as process:
        wait_for(lambda: is_written(tmp_path / "waiting"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (143, "interrupted\n")
    assert namespaces_of(absent) == ()
    # It ends with its parent, and may take a moment.
    waiting = int((tmp_path / "waiting").read_text())
    wait_for(lambda: not is_alive(waiting))


def test_a_damaged_description_is_one_line_and_down_needs_none(absent: str) -> None:
    assert outcome("up", "--name", absent)[0] == 0
    state_file(absent).write_text('{"name": 1')
    code, output, errors = outcome("status", "--name", absent)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert errors.startswith(f"error: {state_file(absent)}: is damaged")
    assert outcome("down", "--name", absent) == (0, f"testbed {absent}: is down\n", "")
    assert namespaces_of(absent) == ()


def test_status_names_hosts_addresses_and_cores(two_hosts: str) -> None:
    code, output, errors = outcome("status", "--name", two_hosts)
    cores = "; ".join(",".join(map(str, own)) for own in divided_cores(sorted(os.sched_getaffinity(0)), 2))
    assert (code, errors) == (0, "")
    assert output.splitlines() == [
        f"testbed {two_hosts}: 2 hosts of 1 device each at 1000 Mbit/s, on cores {cores}",
        f"  host 0: namespace {two_hosts}-0, address 10.77.0.1, processes: 0",
        f"  host 1: namespace {two_hosts}-1, address 10.77.0.2, processes: 0",
    ]


# ---- the wire


def transfer(name: str, senders: Sequence[int], receivers: Sequence[int], size: int) -> float:
    """Send `size` bytes from each sender to each receiver, all at once; return the seconds that took."""
    host = [["ip", "netns", "exec", f"{name}-{number}", sys.executable, "-c"] for number in range(3)]
    receiving = [
        subprocess.Popen(
            [*host[number], RECEIVE, str(len(senders)), str(size)], stdout=subprocess.PIPE, text=True
        )
        for number in receivers
    ]
    for process in receiving:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    addresses = [f"10.77.0.{number + 1}" for number in receivers]
    sending = [subprocess.Popen([*host[number], SEND, str(size), *addresses]) for number in senders]
    # On the clock of the machine, which all processes share.
    shown = [process.communicate(timeout=WAIT_S)[0].split() for process in receiving]
    assert [process.wait(WAIT_S) for process in sending] == [0] * len(sending)
    return max(float(ended) for _, ended in shown) - min(float(began) for began, _ in shown)


@pytest.mark.parametrize(
    ("senders", "receivers"),
    [((0,), (1,)), ((1,), (0,)), ((0,), (1, 2)), ((0, 1), (2,))],
    ids=["there", "back", "one to two", "two to one"],
)
def test_bytes_take_at_least_their_time_at_the_rate(
    slow_hosts: str, senders: tuple[int, ...], receivers: tuple[int, ...]
) -> None:
    size, rate = 2**20, 20e6 / 8
    total = size * len(senders) * len(receivers)
    # What a link lets pass at once, at the most.
    burst = burst_bytes(20_000_000)
    assert transfer(slow_hosts, senders, receivers, size) >= (total - burst * len(senders)) / rate


# ---- run


@pytest.mark.slow  # another network's always: in test_gone_hosts.py, before its host goes away
def test_a_step_on_two_hosts_is_equal_to_one_on_one_device(two_hosts: str, tmp_path: Path) -> None:
    options = ["--strategy", "data-parallel", "--device", "cpu", "--on-miss", "estimate", "--iterations", "2"]
    brief = ["python", "-m", "tests.app.brief_app", "run"]
    command = [*brief, "--model", "mlp", "--preset", "small", *options, "--verify", "--json"]
    database = ["--database", str(tmp_path / "test.sqlite")]
    code, output, errors = outcome("run", "--name", two_hosts, "--", *command, *database, folder=tmp_path)
    assert code == 0, errors
    report = json.loads(output)
    assert (report["devices"], report["verified"], report["failure"]) == (2, True, None)
    assert processes_in([f"{two_hosts}-0", f"{two_hosts}-1"]) == ()


@pytest.mark.slow
def test_a_probe_finds_the_rate_of_the_wire(two_hosts: str, tmp_path: Path) -> None:
    command = ["app", "topology", "probe", "--device", "cpu", "--name", "wire", "--json"]
    database = ["--database", str(tmp_path / "test.sqlite")]
    code, output, errors = outcome("run", "--name", two_hosts, "--", *command, *database, folder=tmp_path)
    assert code == 0, errors
    document = json.loads(output)
    assert [device["node"] for device in document["devices"]] == [0, 1]
    (fit,) = [fit for fit in document["measured"] if fit["pattern"] == "p2p"]
    # What a link lets pass at once after a pause makes small messages faster, and the line through all steeper.
    assert 0 < fit["bandwidth_bytes_per_s"] <= 1.2 * 1e9 / 8


def test_ranks_have_the_cores_of_their_host_and_the_first_failure_ends_all(
    two_hosts: str, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(
        "import json, os, sys, time\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'GROUP_RANK', 'GLOO_SOCKET_IFNAME')\n"
        "print('hello from', os.environ['RANK'], flush=True)\n"
        "facts = [*(os.environ[name] for name in names), sorted(os.sched_getaffinity(0))]\n"
        "open(f\"rank{os.environ['RANK']}.json\", 'w').write(json.dumps(facts))\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit(3)\n"
        "while not os.path.exists('rank1.json'):\n"
        "    time.sleep(0.1)\n"
    )
    code, output, errors = outcome("run", "--name", two_hosts, "--", "python", "rank.py", folder=tmp_path)
    assert (code, output) == (1, "hello from 0\n")
    assert "host 1: hello from 1" in errors.splitlines()
    assert "testbed: host 1 exited with code 1" in errors.splitlines()
    cores = divided_cores(sorted(os.sched_getaffinity(0)), 2)
    for rank in (0, 1):
        facts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert facts == [str(rank), "2", "0", str(rank), "eth0", list(cores[rank])]


def sleeping(name: str) -> tuple[int, ...]:
    """Return the ids of all processes of a testbed, where a sleep is on both hosts, else none."""
    namespaces = (f"{name}-0", f"{name}-1")
    ids = [processes_in([namespace]) for namespace in namespaces]
    names = [
        {Path(f"/proc/{process}/comm").read_text() for process in host if is_alive(process)} for host in ids
    ]
    return (
        tuple(process for host in ids for process in host) if all("sleep\n" in host for host in names) else ()
    )


def test_ctrl_c_ends_all_hosts(two_hosts: str) -> None:
    with start("run", "--name", two_hosts, "--", "sleep", "600") as process:
        wait_for(lambda: bool(sleeping(two_hosts)))
        started = sleeping(two_hosts)
        code, _, errors = outcome("run", "--name", two_hosts, "--", "true")
        assert (code, errors.count("\n")) == (2, 1)
        assert errors.startswith(f"error: testbed {two_hosts}: runs another command, must be free;")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert [is_alive(child) for child in started] == [False] * len(started)


def test_down_ends_what_a_killed_run_left(absent: str) -> None:
    assert outcome("up", "--name", absent)[0] == 0
    with start("run", "--name", absent, "--", "sh", "-c", "trap '' TERM; sleep 600") as process:
        wait_for(lambda: bool(sleeping(absent)))
        started = sleeping(absent)
        process.kill()
        assert outcome("down", "--name", absent) == (0, f"testbed {absent}: is down\n", "")
        process.communicate(timeout=WAIT_S)
    assert namespaces_of(absent) == ()
    assert [is_alive(child) for child in started] == [False] * len(started)
