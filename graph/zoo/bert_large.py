"""BERT-large with its masked language model loss.

Source: Devlin et al., arXiv:1810.04805: 24 layers, hidden size 1024, 16 heads, 512 positions, batch 256; WordPiece
vocabulary 30,522. About 335 million parameters with the head, whose weight is the token embedding. Sequences have 128
tokens, as in 90 % of its pre-training steps. Next-sentence prediction is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built

IGNORED = -100
# About the paper's 15 %, at fixed places: a small random batch could have no target at all.
MASK_PERIOD = 7


class SelfAttention(nn.Module):
    """Attention over the whole sequence, in both directions."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def _split(self, x: Tensor) -> Tensor:
        """Return [batch, heads, sequence, head size] from [batch, sequence, hidden]."""
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(x)),
            self._split(self.value(x)),
            dropout_p=dropout,
        )
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by dropout, addition and normalization."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, dropout)
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout2 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout1(self.attention(x)))
        return self.norm2(x + self.dropout2(self.down(functional.gelu(self.up(x)))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Embeddings, encoder layers and the masked language model head; forward returns the mean cross entropy."""

    def __init__(
        self,
        *,
        sequence: int,
        layers: int,
        hidden: int,
        heads: int,
        vocabulary: int,
        positions: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, hidden)
        self.position_embedding = nn.Embedding(positions, hidden)
        self.type_embedding = nn.Embedding(2, hidden)
        self.register_buffer("position_ids", torch.arange(sequence))
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(EncoderLayer(hidden, heads, dropout) for _ in range(layers)))
        self.transform = nn.Linear(hidden, hidden)
        self.transform_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.decoder = nn.Linear(hidden, vocabulary)
        self.apply(initialize)
        self.decoder.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor, types: Tensor, targets: Tensor) -> Tensor:
        embedded = self.token_embedding(tokens) + self.type_embedding(types)
        x = self.dropout(self.norm(embedded + self.position_embedding(self.position_ids)))
        x = self.transform_norm(functional.gelu(self.transform(self.layers(x))))
        return functional.cross_entropy(self.decoder(x).flatten(0, 1), targets.flatten())


def initialize(module: nn.Module) -> None:
    """Draw weights of a linear layer or embedding from a normal distribution of deviation 0.02, as BERT and GPT-2."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def bert_large(
    batch_size: int,
    *,
    sequence: int = 128,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    vocabulary: int = 30_522,
    positions: int = 512,
    dropout: float = 0.1,
) -> Built:
    """Return BERT-large with random tokens, segment types and targets, all [batch, sequence]."""
    module = Bert(
        sequence=sequence,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        positions=positions,
        dropout=dropout,
    )
    tokens = torch.randint(0, vocabulary, (batch_size, sequence))
    types = torch.randint(0, 2, (batch_size, sequence))
    masked = torch.arange(sequence) % MASK_PERIOD == MASK_PERIOD // 2
    targets = torch.where(masked, torch.randint(0, vocabulary, (batch_size, sequence)), IGNORED)
    return module, (tokens, types, targets), {}
