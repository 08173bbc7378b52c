"""Hugging Face networks, small presets, on two processes, all under --all: equal to one device, three steps long."""

from __future__ import annotations

import pytest

from graph.zoo import hugging_face_names
from tests.quick import few
from tests.runtime.networks import cases, check_network
from tests.runtime.pool import LocalPool

pytest.importorskip("transformers", reason="the extra hf is not installed")


@pytest.mark.parametrize("choice", cases(1, 20))
@pytest.mark.parametrize("name", few(("hf-llama", "hf-mixtral", "hf-vit"), hugging_face_names()))
def test_hugging_face_network(pool: LocalPool, name: str, choice: str | int) -> None:
    check_network(pool, name, choice)
