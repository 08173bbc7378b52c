"""What the wheel holds: every module and data file of the packages, the migrations, nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = ("app", "graph", "profiler", "runtime", "search")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
SOURCES = (*TOP_LEVEL, "migrations", "pyproject.toml", "README.md", "LICENSE")


def shipped_files() -> list[Path]:
    """Return the project's files that git would take in, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SOURCES],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build the wheel from a copy, without a network, and return the names in it."""
    source = tmp_path_factory.mktemp("source")
    for file in shipped_files():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes((ROOT / file).read_bytes())
    built = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, check=True, capture_output=True)
    (wheel,) = built.glob("soapstone-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_file_of_the_packages_is_in_the_wheel(wheel_names: set[str]) -> None:
    expected = {file.as_posix() for file in shipped_files() if file.parts[0] in TOP_LEVEL}
    assert expected - wheel_names == set()


def test_migrations_are_in_the_wheel_as_part_of_app(wheel_names: set[str]) -> None:
    migrations = [file for file in shipped_files() if file.parts[0] == "migrations"]
    expected = {f"app/_migrations/{file.relative_to('migrations').as_posix()}" for file in migrations}
    assert {"app/_migrations/env.py", "app/_migrations/script.py.mako"} <= expected
    assert expected - wheel_names == set()


def test_nothing_else_is_in_the_wheel(wheel_names: set[str]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in wheel_names if ".dist-info/" not in name}
    assert tops == set(TOP_LEVEL)
