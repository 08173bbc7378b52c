"""scripts/lib/environment.sh, run on a copy of the project whose one dependency is a package made here.

`PIP_NO_INDEX` keeps pip off the network; the project is built with the setuptools of this environment. The first start
makes its virtual environment itself; for the others, whose matter is what they do about one, Python copies one that was
made before, in place of unpacking pip again.
"""

import os
import shutil
import subprocess
import sys
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "sample"
version = "{version}"
"""
# The smallest build backend: an editable wheel with a command, and a record of each installation.
BACKEND = """\
import os, pathlib, time, zipfile

METADATA = "Metadata-Version: 2.1\\nName: sample\\nVersion: 1.0\\nProvides-Extra: dev\\n"
WHEEL = "Wheel-Version: 1.0\\nGenerator: sample\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"

def get_requires_for_build_editable(config_settings=None):
    return []

def build_editable(directory, config_settings=None, metadata_directory=None):
    with open("installations", "a") as log:
        log.write("begin\\n")
    time.sleep(float(os.environ.get("SAMPLE_BUILD_S", "0")))
    name = "sample-1.0-py3-none-any.whl"
    info = "sample-1.0.dist-info"
    with zipfile.ZipFile(pathlib.Path(directory) / name, "w") as wheel:
        wheel.writestr("sample.py", "def main(): print('sample runs')\\n")
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", WHEEL)
        wheel.writestr(f"{info}/entry_points.txt", "[console_scripts]\\napp = sample:main\\n")
        wheel.writestr(f"{info}/RECORD", "")
    with open("installations", "a") as log:
        log.write("end\\n")
    return name
"""
START = 'source scripts/lib/environment.sh && "$root/.venv/bin/app"'


# A Python that makes virtual environments as copies.
COPYING = """\
#!/bin/sh
if [ "$1" = -m ] && [ "$2" = venv ]; then exec cp -a "{made}/." "$3"; fi
exec "{python}" "$@"
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip, to be copied."""
    folder = tmp_path_factory.mktemp("made") / "venv"
    venv.create(folder, with_pip=True)
    return folder


@pytest.fixture(scope="module")
def copying_python(made: Path) -> str:
    """The path of a Python whose `-m venv` copies `made`."""
    file = made.with_name("python")
    file.write_text(COPYING.format(made=made, python=sys.executable))
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a small project that has our environment script, in a folder whose name has a blank."""
    folder = tmp_path / "a project"
    (folder / "scripts/lib").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/lib/environment.sh", folder / "scripts/lib")
    (folder / "pyproject.toml").write_text(PROJECT.format(version="1.0"))
    (folder / "backend.py").write_text(BACKEND)
    (folder / "constraints.txt").write_text("# none\n")
    return folder


def environment(python: str, **extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": python, "PIP_NO_INDEX": "1", **extra}


def start(project: Path, python: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", START],
        cwd=project,
        env=environment(python, **extra),
        capture_output=True,
        text=True,
        timeout=120,
    )


def installations(project: Path) -> list[str]:
    return (project / "installations").read_text().split()


def test_first_start_installs_and_says_so_once_and_later_ones_only_what_has_changed(project: Path) -> None:
    first, second = (start(project, sys.executable, PYTHONDONTWRITEBYTECODE="1") for _ in range(2))
    assert (first.returncode, first.stdout) == (0, "sample runs\n")
    assert first.stderr.count("\n") == 1
    assert "installing" in first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, "sample runs\n", "")
    assert installations(project) == ["begin", "end"]
    # By the installation: the command, as in many containers, writes none.
    assert list(project.glob(".venv/lib/python*/site-packages/__pycache__/sample.*.pyc"))
    for count, name in enumerate(("pyproject.toml", "constraints.txt"), start=2):
        with (project / name).open("a") as changed:
            changed.write("# changed\n")
        start(project, sys.executable)
        assert installations(project) == ["begin", "end"] * count


def test_moved_project_gets_an_environment_of_its_own(project: Path, copying_python: str) -> None:
    start(project, copying_python)
    moved = project.rename(project.with_name("moved"))
    leftover = moved / ".venv/leftover"
    leftover.touch()
    assert start(moved, copying_python).stdout == "sample runs\n"
    assert not leftover.exists()


def test_two_starts_at_once_install_once(project: Path, copying_python: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(start, project, copying_python, SAMPLE_BUILD_S="1") for _ in range(2)]
    assert [started.result().stdout for started in both] == ["sample runs\n"] * 2
    assert installations(project) == ["begin", "end"]


def test_interrupted_installation_is_made_from_scratch(project: Path, copying_python: str) -> None:
    first = subprocess.Popen(
        ["bash", "-c", START],
        cwd=project,
        env=environment(copying_python, SAMPLE_BUILD_S="60"),
        start_new_session=True,
    )
    while not (project / "installations").exists():
        time.sleep(0.05)
    os.killpg(first.pid, 9)
    first.wait()
    leftover = project / ".venv/leftover"
    leftover.touch()
    assert start(project, copying_python).stdout == "sample runs\n"
    assert not leftover.exists()


def test_failed_installation_is_one_error_line_and_can_be_tried_again(
    project: Path, copying_python: str
) -> None:
    missing = "Provides-Extra: dev\\nRequires-Dist: soapstone-has-no-such-dependency"
    (project / "backend.py").write_text(BACKEND.replace("Provides-Extra: dev", missing))
    failed = start(project, copying_python)
    assert failed.returncode == 1
    assert [line.partition(":")[0] for line in failed.stderr.splitlines()] == ["soapstone", "error"]
    assert "soapstone-has-no-such-dependency" in failed.stderr
    assert ".venv-install.log" in failed.stderr
    (project / "backend.py").write_text(BACKEND)
    assert start(project, copying_python).stdout == "sample runs\n"


def test_no_usable_python_is_one_line(project: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "git"):
        (tools / name).symlink_to(str(shutil.which(name)))
    refused = start(project, "", PATH=str(tools))
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: python: none on PATH is 3.11 or newer and has pip")
    assert refused.stderr.count("\n") == 1


def test_environment_without_a_stamp_is_kept(project: Path, made: Path, copying_python: str) -> None:
    shutil.copytree(made, project / ".venv", symlinks=True)
    kept = project / ".venv/kept"
    kept.touch()
    assert start(project, copying_python).stdout == "sample runs\n"
    assert kept.exists()
