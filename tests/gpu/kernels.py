"""Kernels that torch has for CUDA alone, of operators that Soapstone calls by name on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    enter, forget, new, leave = gates.chunk(4, 1)
    kept = torch.cat((enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()), 1)
    enter, forget, new, leave = kept.chunk(4, 1)
    made = forget * cell + enter * new
    return leave * made.tanh(), made, kept


def _lstm_cell_backward(
    by_hidden: torch.Tensor | None,
    by_cell: torch.Tensor | None,
    cell: torch.Tensor,
    made: torch.Tensor,
    kept: torch.Tensor,
    has_bias: bool,  # noqa: FBT001 - torch's signature
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    enter, forget, new, leave = kept.chunk(4, 1)
    by_hidden = torch.zeros_like(made) if by_hidden is None else by_hidden
    by_made = by_hidden * leave * (1 - made.tanh() ** 2) + (0 if by_cell is None else by_cell)
    by_gates = torch.cat(
        (
            by_made * new * enter * (1 - enter),
            by_made * cell * forget * (1 - forget),
            by_made * enter * (1 - new**2),
            by_hidden * made.tanh() * leave * (1 - leave),
        ),
        1,
    )
    return by_gates, by_made * forget, by_gates.sum(0) if has_bias else None


CUDA_ONLY: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
}
