"""Generated files, run by ranks of gloo: loss and every gradient equal the plain module's.

Under torchrun itself they run in `tests/app/test_export.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from graph.operators import OperatorGraph
from graph.strategy import Strategy
from runtime.launch.torchrun import call_on_ranks
from search.space import baselines
from tests.runtime.dtensor_cases import (
    Network,
    by_head,
    by_operator,
    feed_forward,
    own,
    sequence,
    write_plan,
    zoo,
)
from tests.runtime.dtensor_runner import check_files
from tests.runtime.programs import outputs_on_ranks

ROOT = Path(__file__).parents[2]
BERT = zoo("bert-large")

Case = tuple[Network, Callable[[OperatorGraph], Strategy]]

ON_TWO: dict[str, Case] = {
    "mlp_data": (zoo("mlp"), lambda graph: baselines.data_parallel(graph, 2)),
    "mlp_columns_rows": (zoo("mlp"), lambda graph: baselines.megatron(graph, 2)),
    "mlp_expert": (zoo("mlp"), lambda graph: baselines.expert(graph, 2)),
    "bert_data": (BERT, lambda graph: baselines.data_parallel(graph, 2)),
    "bert_columns_rows": (BERT, lambda graph: baselines.megatron(graph, 2)),
    "gpt2_feed_forward": (zoo("gpt2"), lambda graph: by_head(graph, feed_forward, 2)),
    "convolutions_expert": (zoo("alexnet"), lambda graph: baselines.expert(graph, 2)),
    "uneven_targets": (own("block"), lambda graph: baselines.data_parallel(graph, 2)),
    "likelihood": (own("likelihood"), lambda graph: baselines.data_parallel(graph, 2)),
    "sequence": (own("block"), lambda graph: by_operator(graph, sequence, 2)),
    "sum": (own("summed"), lambda graph: baselines.data_parallel(graph, 2)),
    "joined_samples": (own("normalized"), lambda graph: baselines.data_parallel(graph, 2)),
    "scaled_sum": (own("summed", scale=0.5), lambda graph: baselines.data_parallel(graph, 2)),
    "containers": (own("contained"), lambda graph: baselines.data_parallel(graph, 2)),
    "shifted_data": (own("shifted"), lambda graph: baselines.data_parallel(graph, 2)),
    "shifted_columns_rows": (own("shifted"), lambda graph: baselines.megatron(graph, 2)),
    "place_in_the_batch": (own("placed"), lambda graph: baselines.data_parallel(graph, 2)),
    "llama_data": (zoo("hf-llama"), lambda graph: baselines.data_parallel(graph, 2)),
    "t5_columns_rows": (zoo("hf-t5"), lambda graph: baselines.megatron(graph, 2)),
    "hostile": (own("hostile"), lambda graph: baselines.megatron(graph, 2)),
}
ON_FOUR: dict[str, Case] = {
    "mlp_grid": (zoo("mlp"), lambda graph: baselines.megatron(graph, 2, 2)),
    "mlp_data": (zoo("mlp"), lambda graph: baselines.data_parallel(graph, 4)),
    "bert_grid": (BERT, lambda graph: baselines.megatron(graph, 2, 2)),
    "bert_columns_rows": (BERT, lambda graph: baselines.megatron(graph, 4)),
    "llama_grid": (zoo("hf-llama"), lambda graph: baselines.megatron(graph, 2, 2)),
    "sequence_grid": (own("block"), lambda graph: by_operator(graph, sequence, 2, 2)),
    "tensor_outside": (
        own("block"),
        lambda graph: by_operator(graph, feed_forward, 2, 2, tensor_outside=True),
    ),
}


def check_all(cases: Mapping[str, Case], processes: int, folder: Path) -> None:
    """Write the file of every case and check all of them in one start."""
    files = [write_plan(network, choose, folder / f"{name}.py") for name, (network, choose) in cases.items()]
    assert call_on_ranks(processes, check_files, (files,)) == [dict.fromkeys(cases, True)] * processes


def test_two_processes_equal_the_module(tmp_path: Path) -> None:
    """Data parallel, columns and rows, the sequence; tied weights, uneven ignored targets, a hostile name."""
    check_all(ON_TWO, 2, tmp_path)


@pytest.mark.slow
def test_four_processes_equal_the_module(tmp_path: Path) -> None:
    """Grids of data and tensor parallel ranks, and one dim of four."""
    check_all(ON_FOUR, 4, tmp_path)


def test_a_plan_that_is_wrong_is_found_out(tmp_path: Path) -> None:
    """A file in which a person doubles the gradients prints them, and ends with exit code 1."""
    network, choose = ON_TWO["uneven_targets"]
    file = write_plan(network, choose, tmp_path / "edited.py")
    text = file.read_text()
    assert text.count("set_gradient_divide_factor(1.0)") == 1
    file.write_text(text.replace("set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(0.5)"))
    (code, output), (other_code, _) = outputs_on_ranks(2, str(file), folder=tmp_path)
    assert (code, other_code) == (1, 1)
    assert "1.00e+00  BAD  up.weight" in output
    assert "1 of 11 (loss and gradients) equal" in output


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    network, choose = ON_TWO["sum"]
    file = write_plan(network, choose, tmp_path / "alone.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("WORLD_SIZE", None)
    ran = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1
    assert ran.stderr.strip() == "must run as 2 processes; start it with torchrun --nproc-per-node 2"
