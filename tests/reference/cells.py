"""Cases of recurrent cells."""

from __future__ import annotations

import random

import torch

from tests.reference.randoms import floats
from tests.reference.rules import Case


def recurrent_cell(generator: random.Random, seed: int, name: str) -> Case:
    """Return a case of a recurrent cell of ATen, by name."""
    batch, features, hidden = generator.randint(1, 4), generator.randint(1, 5), generator.randint(1, 6)
    gates = {"lstm_cell": 4, "gru_cell": 3}.get(name, 1)
    x, state = floats(batch, features, seed=seed), floats(batch, hidden, seed=seed + 1)
    weights = [
        floats(gates * hidden, features, seed=seed + 2),
        floats(gates * hidden, hidden, seed=seed + 3),
        floats(gates * hidden, seed=seed + 4),
        floats(gates * hidden, seed=seed + 5),
    ]
    function = getattr(torch, name)
    named = dict(zip(("w_ih", "w_hh", "b_ih", "b_hh"), weights, strict=True))
    if name != "lstm_cell":
        return Case(
            f"aten.{name}.default", {"input": x, "hx": state, **named}, (x, state, *weights), function
        )
    cell = floats(batch, hidden, seed=seed + 6)
    return Case(
        "aten.lstm_cell.default",
        {"input": x, "hx": (state, cell), **named},
        (x, state, cell, *weights),
        lambda x, h, c, *w: function(x, (h, c), *w),
    )
