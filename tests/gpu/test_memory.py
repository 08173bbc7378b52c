"""What a GPU's memory holds beside the tensors of a step."""

from __future__ import annotations

import pytest
import torch

from graph.intervals import full_region
from profiler.devices import available_devices
from profiler.kinds import RESERVED_BYTES
from profiler.operators.counter_rng import keep_mask, random_numbers
from tests.gpu.virtual_device import MEMORY_BYTES, Virtual

ROWS, COLUMNS = 2**13, 2**11  # 16 Mi elements: 64 MiB in words of 32 bits
SHAPE = (ROWS, COLUMNS)
GPU = torch.device("cuda", 0)
KEY = (1, 2, 3)


def test_a_mask_of_dropout_takes_little_memory_beside_itself(gpus: Virtual) -> None:
    gpus.reset_peak()
    before = gpus.allocated()
    mask = keep_mask(full_region(SHAPE), SHAPE, 0.5, KEY, GPU)
    assert mask.sum().item() == pytest.approx(ROWS * COLUMNS / 2, rel=0.01)
    assert gpus.peak() - before - mask.nbytes < ROWS * COLUMNS * 4


def test_chunks_draw_what_the_whole_draws(gpus: Virtual) -> None:
    rows = slice(ROWS // 2, ROWS // 2 + 4)
    region = (((rows.start, rows.stop),), ((0, COLUMNS),))
    whole = random_numbers("uniform", full_region(SHAPE), SHAPE, KEY, (torch.float32, GPU))
    part = random_numbers("uniform", region, SHAPE, KEY, (torch.float32, GPU))
    assert torch.equal(whole[rows], part)


def test_predictions_keep_memory_free_for_what_is_no_tensor(gpus: Virtual) -> None:
    assert available_devices("cuda")[0].kind.memory_bytes == MEMORY_BYTES - RESERVED_BYTES
