"""Runs the command line in this process, against a database of the test's own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from tests.shared_files import made_once


@dataclass(frozen=True)
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    output: str
    errors: str

    @property
    def document(self) -> Any:
        """Standard output as JSON; a command that printed none is shown with what it said."""
        assert self.output, f"exit {self.code}: {self.errors}"
        return json.loads(self.output)


Command = Callable[..., Outcome]

REPOSITORY = Path(__file__).parents[2]

# A module of a user's own, to which a test adds its factories.
USERS_NETWORK = """
import os, signal, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.b(torch.relu(self.a(x))), y)
def fine(batch_size=6):
    return Net(), (torch.randn(batch_size, 8), torch.randint(4, (batch_size,))), {}
"""


def store_results(path: Path, *commands: Sequence[str]) -> None:
    """Run commands on a database that several tests are to read; for a fixture of a module, which has no `command`."""
    from app.cli.main import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{path}")
        for arguments in commands:
            patch.setattr(sys, "argv", ["app", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 0, arguments


@contextmanager
def unchanged_imports() -> Iterator[None]:
    """Forget the user's own modules of the current folder, as the end of the process does for a real command."""
    finders, known = list(sys.meta_path), set(sys.modules)
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        here = Path.cwd()
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            # Started in the repository, Soapstone's own and those of an environment within are not the user's.
            if file is not None and here in Path(file).parents and REPOSITORY not in Path(file).parents:
                del sys.modules[name]


# Enough sizes for a line, and few times of each.
BRIEF_PROBE: dict[str, Any] = {
    "p2p_sizes": (2**10, 2**16, 2**20),
    "all_reduce_sizes": (2**10, 2**20, 2**22),
    "exchange_sizes": (2**10, 2**22),
    "overlap_rounds": 1,
    "most_again": 0,
    "fewest": 2,
    "most": 3,
}


@contextmanager
def brief_measurements(samples: int = 3) -> Iterator[None]:
    """Take few samples of operators and links, whatever works beside the tests: they look at what is done with them."""
    from app.services.costs import exchange_overhead
    from profiler import device_consistency, links, repeated_sampling, workers
    from profiler.measure import MeasureOptions

    brief = MeasureOptions(
        warm_ups=1, maximum_warm_ups=1, repetitions=samples, budget_s=0.001, maximum_s=0.02
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "COLLECTIVES_S", 0.1)
        patch.setattr(exchange_overhead, "WARM_UP_STEPS", 1)
        patch.setattr(exchange_overhead, "RECORDED_STEPS", 2)
        # Not the class: its objects go to other processes, by its name.
        brief_sizes = tuple(BRIEF_PROBE.get(field.name, field.default) for field in fields(links.LinkOptions))
        patch.setattr(links.LinkOptions.__init__, "__defaults__", brief_sizes)
        patch.setattr(workers, "MeasureOptions", lambda: brief)
        patch.setattr(device_consistency, "OPTIONS", brief)
        patch.setattr(repeated_sampling, "LATER_ROUND", brief)
        patch.setattr(repeated_sampling, "ROUNDS", 2)
        yield


@pytest.fixture(scope="module", autouse=True)
def measured_briefly() -> Iterator[None]:
    """Measure briefly here, and not in the packages whose tests come after."""
    with brief_measurements():
        yield


@pytest.fixture(scope="session")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that knows the links between two CPU devices, and nothing else; to be copied."""
    from app.db.store import Store
    from app.services.costs.link_costs import local_links
    from app.services.costs.machine import describe, local_devices
    from app.services.progress import Progress

    def make(path: Path) -> None:
        with brief_measurements(), Store.open(path) as store:
            local_links(store, describe(store, local_devices("cpu", 2)), Progress())

    return made_once(tmp_path_factory, "links.sqlite", make)


@pytest.fixture
def known_links(database: Path, probed: Path) -> None:
    """Let `database` know the links between two CPU devices: measuring them is what most of a small run would take."""
    shutil.copy(probed, database)


@pytest.fixture
def run(stored: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`app` on the database `stored` of the test's module."""
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{stored}")
    return command


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a database that does not exist yet; commands use it by default."""
    path = tmp_path / "test.sqlite"
    monkeypatch.setenv("SOAPSTONE_DATABASE_URL", f"sqlite:///{path}")
    return path


@pytest.fixture
def command(database: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`app` as a function of its arguments."""
    from app.cli.main import main

    def invoke(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["app", *arguments])
        capfd.readouterr()
        code = 0
        with unchanged_imports():
            try:
                main()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
        printed = capfd.readouterr()
        return Outcome(code, printed.out, printed.err)

    return invoke
