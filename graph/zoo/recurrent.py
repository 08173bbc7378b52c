"""LSTM layers of the recurrent networks, unrolled step by step, all steps with the same weights.

Unrolled by cell, so that the steps of one layer can sit on different devices.

Source: FlexFlow (arXiv:1807.05358), which unrolls its recurrent networks over 40 steps.
Shape letters: B batch, H hidden, S steps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

State = tuple[Tensor, Tensor]


class UnrolledLstm(nn.Module):
    """LSTM layers of one width, run step by step."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.cells = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(layers))

    def zero_states(self, batch: int, like: Tensor) -> list[State]:
        """Return a zero hidden and cell state [B, H] per layer, of the dtype and device of `like`."""
        zeros = torch.zeros(batch, self.hidden, dtype=like.dtype, device=like.device)
        return [(zeros, zeros) for _ in self.cells]

    def forward(
        self, steps_BH: Sequence[Tensor], states: Sequence[State]
    ) -> tuple[list[Tensor], list[State]]:
        """Return the last layer's output [B, H] at every step, and the states after the last step."""
        outputs, current = [], list(states)
        for step in steps_BH:
            x = step
            for layer, cell in enumerate(self.cells):
                current[layer] = cell(x, current[layer])
                x = current[layer][0]
            outputs.append(x)
        return outputs, current


def embed_steps(embedding: nn.Embedding, tokens_BS: Tensor) -> list[Tensor]:
    """Return the embedding [B, H] of every step's tokens, one lookup a step."""
    return [embedding(tokens_BS[:, step]) for step in range(tokens_BS.shape[1])]


def mean_cross_entropy(logits_BV: Sequence[Tensor], targets_BS: Tensor) -> Tensor:
    """Return the cross entropy, averaged over batch and steps, of one tensor of logits a step."""
    total = functional.cross_entropy(logits_BV[0], targets_BS[:, 0])
    for step in range(1, len(logits_BV)):
        total = total + functional.cross_entropy(logits_BV[step], targets_BS[:, step])
    return total / len(logits_BV)


def token_batch(batch_size: int, steps: int, vocabulary: int) -> Tensor:
    """Return random token ids [B, S]."""
    return torch.randint(0, vocabulary, (batch_size, steps))
