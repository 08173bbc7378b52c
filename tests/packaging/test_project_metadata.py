"""The metadata promise what ships and what was tested: packages, pins, the command."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from graph.packages import PACKAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    names_and_versions = [line.split("==") for line in lines]
    return {canonicalize_name(name): version for name, version in names_and_versions}


def packages_in_tree() -> set[str]:
    modules = [path for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    return {".".join(path.parent.relative_to(ROOT).parts) for path in modules}


def test_every_package_of_the_tree_is_listed(project: dict[str, Any]) -> None:
    listed = {name for name in project["tool"]["setuptools"]["packages"] if "._migrations" not in name}
    assert listed == packages_in_tree()


def test_migrations_ship_inside_app(project: dict[str, Any]) -> None:
    setuptools = project["tool"]["setuptools"]
    assert {"app._migrations", "app._migrations.versions"} <= set(setuptools["packages"])
    assert setuptools["package-dir"] == {"app._migrations": "migrations"}


def test_every_pin_is_a_public_version_and_no_address() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert [line for line in pinned if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)] == []


def test_every_requirement_is_pinned_within_its_range(project: dict[str, Any], pins: dict[str, str]) -> None:
    extras = project["project"]["optional-dependencies"]
    texts = [*project["project"]["dependencies"], *(text for extra in extras.values() for text in extra)]
    requirements = [Requirement(text) for text in texts if not text.startswith("soapstone")]
    outside = [
        str(requirement)
        for requirement in requirements
        if pins.get(canonicalize_name(requirement.name), "0") not in requirement.specifier
    ]
    assert outside == []


def test_development_extra_holds_all_others(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    (everything,) = (Requirement(text) for text in extras["dev"])
    assert everything.extras == set(extras) - {"dev"}


def test_readme_starts_with_the_two_commands() -> None:
    first, second = (ROOT / "README.md").read_text().splitlines()[:2]
    assert (first.split()[0], second.split()[0]) == ("scripts/demo", "scripts/test")
