"""Run under torchrun: checks generated files one after another, in one process group.

Prints, on rank 0, one line for each file: its name and whether it equals the plain module.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    for file in sys.argv[1:]:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None
        assert spec.loader is not None
        generated = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(generated)
        equal = generated.check(generated.make_mesh())
        if dist.get_rank() == 0:
            sys.stdout.write(f"checked {Path(file).name} {equal}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as the generated files end: a thread of gloo may still hold a tensor
