"""Make hosts of this machine, run a command on all of them, take them away. Exit code 2: a wrong option."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from graph.errors import SoapstoneError, UsageError
from profiler.pinning import usable_cores
from scripts.testbeds import network, running
from scripts.testbeds.hosts import (
    MOST_DEVICES,
    MOST_HOSTS,
    EmulatedHosts,
    bits_per_s,
    checked_name,
    divided_cores,
    read_state,
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all of Soapstone's."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments ask for, and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, command = _divided(given)
    try:
        with running.signals_raised():
            return _execute(_parser().parse_args(own), command)
    except running.Interrupted as interruption:
        print("interrupted", file=sys.stderr)
        return interruption.exit_code
    except SoapstoneError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code


def _divided(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options before "--", and the command behind it."""
    if "--" not in given:
        return list(given), []
    place = given.index("--")
    return list(given[:place]), list(given[place + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="scripts/testbed", description="Hosts made of this machine; see docs/testbed.md.")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    actions = parser.add_subparsers(dest="action", required=True, parser_class=_Parser)
    up = actions.add_parser("up", help="make the hosts")
    up.add_argument("--hosts", type=int, default=2, help=f"how many, up to {MOST_HOSTS}; default: 2")
    up.add_argument(
        "--devices", type=int, default=1, help="of each host: ranks that a run starts; default: 1"
    )
    up.add_argument("--bandwidth", default="1gbit", help="of each host's link, both ways; default: 1gbit")
    run = actions.add_parser(
        "run",
        help="run a command on every host, under torchrun: scripts/testbed run -- app run --model alexnet",
    )
    status = actions.add_parser("status", help="show the hosts and their processes")
    down = actions.add_parser("down", help="end all processes on the hosts, and take the hosts away")
    for action in (up, run, status, down):
        action.add_argument("--name", default="soapstone", help="of the testbed; default: soapstone")
    return parser


def _execute(options: argparse.Namespace, command: Sequence[str]) -> int:
    name = checked_name(options.name)
    if bool(command) != (options.action == "run"):
        raise UsageError(
            f"testbed {options.action}: the command behind -- is {' '.join(command)!a}, must be given to run, and to "
            "run alone; as in scripts/testbed run -- app run --model alexnet"
        )
    # Before the rest: what is asked for may be wrong, whoever asks.
    wanted = _wanted(options) if options.action == "up" else None
    network.check_requirements()
    if wanted is not None:
        network.make(wanted)
        print(f"testbed {name}: {wanted}")
        return 0
    if options.action == "down":
        removed = network.remove(name)
        print(f"testbed {name}: {'is down' if removed else 'was not up'}")
        return 0
    hosts = read_state(name)
    if hosts is None:
        half = " completely" if network.namespaces_of(name) else ""
        raise UsageError(
            f"testbed {name}: is not up{half}, must be; scripts/testbed down, then up --hosts 2 --bandwidth 1gbit"
        )
    if options.action == "run":
        return running.run(hosts, command, options.folder)
    _show(hosts)
    return 0


def _wanted(options: argparse.Namespace) -> EmulatedHosts:
    for option, value, least, most in (
        ("--hosts", options.hosts, 2, MOST_HOSTS),
        ("--devices", options.devices, 1, MOST_DEVICES),
    ):
        if not least <= value <= most:
            raise UsageError(f"{option}: is {value}, must be {least} to {most}; choose another number")
    return EmulatedHosts(
        options.name,
        options.devices,
        bits_per_s(options.bandwidth),
        divided_cores(usable_cores(), options.hosts),
    )


def _show(hosts: EmulatedHosts) -> None:
    print(f"testbed {hosts.name}: {hosts}")
    for host, namespace in enumerate(hosts.namespaces):
        count = len(network.processes_in([namespace]))
        print(f"  host {host}: namespace {namespace}, address {network.address(host)}, processes: {count}")


if __name__ == "__main__":
    sys.exit(main())
