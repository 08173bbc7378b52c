"""Networks from outside of the zoo at sizes for which a step takes some 0.1 to 2 s on one core.

As `--model scripts.benchmarks.outside:NAME`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph.zoo import Built
from scripts.architectures import plain
from scripts.architectures.catalog import Architecture

VOCABULARY, CLASSES = 1000, 10


def unet(batch_size: int = 4) -> Built:
    """Return a U-Net of 32 to 64 channels and images of 128 x 128."""
    return plain.unet(batch_size, width=32, image_size=128)


class GruClassifier(nn.Module):
    """Words, two layers of GRU, and a class from the last hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.gru = nn.GRU(256, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, CLASSES)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        _, last = self.gru(self.embedding(words))
        return functional.cross_entropy(self.head(last[-1]), targets)


def gru(batch_size: int = 32) -> Built:
    """Return the classifier and sentences of 12 words."""
    words = torch.randint(0, VOCABULARY, (batch_size, 12))
    return GruClassifier(), (words, torch.randint(0, CLASSES, (batch_size,))), {}


def _following(batch_size: int) -> dict[str, Tensor]:
    words = torch.randint(0, VOCABULARY, (batch_size, 64))
    return {"input_ids": words, "labels": words.clone()}


def moe(batch_size: int = 8) -> Built:
    """Return a transformer of 4 layers with 8 experts each, of which each word takes 2 (Qwen3-MoE)."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "experts_implementation": "grouped_mm",
    }  # fmt: skip
    return Architecture("Qwen3MoeForCausalLM", sizes, _following).build(batch_size)
