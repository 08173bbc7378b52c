"""What each rank does: check generated files one after another, in one process group."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist


def check_files(files: Sequence[Path]) -> dict[str, bool]:
    """Return, by name, whether each file's network equals the plain module."""
    equal = {}
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        generated = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(generated)
        equal[file.stem] = generated.check(generated.make_mesh())
    dist.destroy_process_group()
    return equal
