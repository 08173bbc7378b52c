"""Runs a function as every rank of a group of processes, as torchrun would, and returns what each returned."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from profiler.processes import starting_processes


def run_ranks(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Return what `function(*arguments)` returned in each of `size` processes, by rank; results must be portable."""
    with starting_processes() as context:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=context.get_start_method(),
            logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
        )
        results: dict[int, Any] = elastic_launch(config, function)(*arguments)
    return [results[rank] for rank in range(size)]
