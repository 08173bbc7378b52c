"""Names for testbeds; tests that take one are skipped where there are no network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from scripts.testbeds.__main__ import main


@pytest.fixture(scope="module")
def name() -> Iterator[str]:
    """A name for a testbed of this test alone; what is up under it is taken away."""
    chosen = f"test{os.getpid()}"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no iproute2")
    made = subprocess.run(["ip", "netns", "add", chosen], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "delete", chosen], check=True)
    yield chosen
    main(["down", "--name", chosen])


@pytest.fixture
def absent(name: str) -> Iterator[str]:
    """A name under which nothing is up."""
    main(["down", "--name", name])
    yield name
    main(["down", "--name", name])
