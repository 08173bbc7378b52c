"""The examples run as their own texts say, on any number of processes with the same result."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from graph.axes import AxisKind
from graph.importer import import_module
from graph.strategy import strategy_text
from profiler.pinning import child_variables
from tests.runtime.strategies import by_kind, in_turn

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "train.py"


def run(*command: str, folder: Path) -> list[str]:
    """Run the example in a folder of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **child_variables()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_training_example_prints_the_same_on_one_process_and_on_two(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    module, args, kwargs = example.example()
    graph = import_module(module, args, kwargs, name="example")
    for name, strategy in (
        ("one", in_turn(graph, [0])),
        ("two", by_kind(graph, [AxisKind.SAMPLE, AxisKind.PARAMETER], [0, 1])),
    ):
        (tmp_path / f"{name}.json").write_text(strategy_text(strategy, graph))
    alone = run(str(EXAMPLE), "one.json", folder=tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    together = run(*launcher, str(EXAMPLE), "two.json", folder=tmp_path)
    assert together == alone
    assert [line.partition(":")[0] for line in alone] == [
        *(f"epoch {number}" for number in range(5)),
        "right",
    ]
    assert float(alone[4].rpartition(" ")[2]) < 0.5 * float(alone[0].rpartition(" ")[2])
