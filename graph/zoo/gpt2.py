"""GPT-2, the smallest of its four sizes; its largest is the preset xl.

Source: Radford et al. (2019), table 2: 12 layers, hidden size 768; 1,024 positions, vocabulary 50,257, batch 512; 124.4
million parameters, the output weight being the token embedding. XL: 48 layers, hidden size 1,600, 25 heads of 64.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from graph.zoo.bert_large import initialize


class CausalAttention(nn.Module):
    """Attention of every position to those up to it, from one fused projection."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.projection = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        projected = self.projection(x).view(batch, sequence, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalized before and added after."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = CausalAttention(hidden, heads, dropout)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        y = self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return x + cast(Tensor, self.dropout2(y))


class Gpt2(nn.Module):
    """Embeddings, decoder layers and the tied output layer; forward returns the mean cross entropy."""

    def __init__(
        self, *, sequence: int, layers: int, hidden: int, heads: int, vocabulary: int, dropout: float
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(sequence, hidden)
        self.register_buffer("position_ids", torch.arange(sequence))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(DecoderLayer(hidden, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.output = nn.Linear(hidden, vocabulary, bias=False)
        self.apply(initialize)
        self.output.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding(self.position_ids)
        logits = self.output(self.norm(self.layers(self.dropout(x))))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2(
    batch_size: int,
    *,
    sequence: int = 1024,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocabulary: int = 50_257,
    dropout: float = 0.1,
) -> Built:
    """Return GPT-2 with random tokens and next tokens, both [batch, sequence]."""
    module = Gpt2(
        sequence=sequence, layers=layers, hidden=hidden, heads=heads, vocabulary=vocabulary, dropout=dropout
    )
    tokens, targets = (torch.randint(0, vocabulary, (batch_size, sequence)) for _ in range(2))
    return module, (tokens, targets), {}
