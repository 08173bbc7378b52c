"""The examples run as their own texts say, on any number of processes with the same result."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from graph.axes import AxisKind
from graph.importer import import_module
from graph.strategy import strategy_text
from tests.runtime.programs import output_of
from tests.runtime.strategies import by_kind, in_turn

EXAMPLE = Path(__file__).parents[2] / "scripts" / "examples" / "train.py"


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
    alone = output_of(str(EXAMPLE), "one.json", folder=tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    together = output_of(*launcher, str(EXAMPLE), "two.json", folder=tmp_path)
    assert together == alone
    assert [line.partition(":")[0] for line in alone] == [
        *(f"epoch {number}" for number in range(5)),
        "right",
    ]
    assert float(alone[4].rpartition(" ")[2]) < 0.5 * float(alone[0].rpartition(" ")[2])
