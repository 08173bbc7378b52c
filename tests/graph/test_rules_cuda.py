"""The same parts on a CUDA device: dropout draws the same bits, cells and statistics agree with the CPU."""

from __future__ import annotations

import random

import pytest
import torch

from graph.intervals import full_region
from graph.rules import local_calls
from profiler.operators import ExecutionContext, compile_call, random_inputs
from profiler.operators.counter_rng import keep_mask
from tests.reference.cells import recurrent_cell
from tests.reference.randoms import floats
from tests.reference.rules import Case, one_operator, random_degrees

pytestmark = pytest.mark.cuda


def test_draws_are_the_same_bits() -> None:
    region = (((1, 3),), ((0, 2), (5, 40)), ((3, 700),))
    for region_, shape in ((region, (4, 50, 900)), (full_region((70, 33)), (70, 33))):
        masks = [keep_mask(region_, shape, 0.3, (5, 6, 7), torch.device(name)) for name in ("cpu", "cuda")]
        assert torch.equal(masks[0], masks[1].cpu())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["lstm_cell", "gru_cell", "rnn_tanh_cell"])
def test_parts_of_recurrent_cells(seed: int, name: str) -> None:
    generator = random.Random(seed)
    _compare(recurrent_cell(generator, seed, name), generator)


def test_batch_norm_in_parts() -> None:
    image = floats(4, 3, 5, 5, seed=0)
    dims = (0, 2, 3)
    moments = Case(
        "soapstone.moments",
        {"input": image},
        (image,),
        lambda x: torch.stack((x.sum(dims), (x * x).sum(dims))),
    )
    _compare(moments, random.Random(1))


def _compare(case: Case, generator: random.Random) -> None:
    """Execute every part on both devices, forward and backward."""
    outputs = case.reference(*case.tensors)
    graph = one_operator(case, (outputs,) if isinstance(outputs, torch.Tensor) else outputs, None)
    degrees = random_degrees(graph.operators[0].space, generator)
    for call in local_calls(graph, graph.operators[0], degrees):
        results = []
        for device in ("cpu", "cuda"):
            inputs = [
                tensor.detach().to(device).requires_grad_(tensor.requires_grad)
                for tensor in random_inputs(call, "cpu", seed=1)
            ]
            made = compile_call(call)(inputs, ExecutionContext(device=torch.device(device)))
            needed = [tensor for tensor in inputs if tensor.requires_grad]
            gradients = torch.autograd.grad(made, needed, [torch.ones_like(output) for output in made])
            results.append([tensor.detach().cpu() for tensor in (*made, *gradients)])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs)
