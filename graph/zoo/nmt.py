"""NMT: translation by an LSTM encoder and decoder with attention, unrolled.

Source: FlexFlow (arXiv:1807.05358), evaluation: 4 recurrent layers followed by an attention and a softmax layer, hidden
size 1024, 40 steps; half of the layers encode, half decode here. Attention: Luong et al. (arXiv:1508.04025), dot score.
The vocabulary of 32,000, that of translation systems with subwords, is ours.
Shape letters: B batch, H hidden, S source steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graph.zoo import Built
from graph.zoo.recurrent import UnrolledLstm, embed_steps, mean_cross_entropy, token_batch


class Attention(nn.Module):
    """Attention of one decoder step over all encoder states, with the dot score."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, decoder_BH: Tensor, encoder_BSH: Tensor) -> Tensor:
        """Return tanh of the combined context and decoder state, [B, H]."""
        scores = torch.bmm(decoder_BH.unsqueeze(1), encoder_BSH.transpose(1, 2))
        context = torch.bmm(torch.softmax(scores, -1), encoder_BSH).squeeze(1)
        return torch.tanh(self.combine(torch.cat([context, decoder_BH], 1)))


class Translator(nn.Module):
    """Encoder, decoder, attention and a linear layer at every step; forward returns the mean cross entropy."""

    def __init__(self, *, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary, hidden)
        self.target_embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = UnrolledLstm(layers // 2, hidden)
        self.decoder = UnrolledLstm(layers // 2, hidden)
        self.attention = Attention(hidden)
        self.linear = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor, next_target: Tensor) -> Tensor:
        zeros = self.encoder.zero_states(source.shape[0], self.source_embedding.weight)
        encoded, states = self.encoder(embed_steps(self.source_embedding, source), zeros)
        decoded, _ = self.decoder(embed_steps(self.target_embedding, target), states)
        encoder_states = torch.stack(encoded, 1)
        logits = [self.linear(self.attention(output, encoder_states)) for output in decoded]
        return mean_cross_entropy(logits, next_target)


def nmt(
    batch_size: int, *, steps: int = 40, layers: int = 4, hidden: int = 1024, vocabulary: int = 32_000
) -> Built:
    """Return NMT with random source, target and next target tokens, all [batch, steps]; `layers` is even."""
    module = Translator(layers=layers, hidden=hidden, vocabulary=vocabulary)
    source, target, next_target = (token_batch(batch_size, steps, vocabulary) for _ in range(3))
    return module, (source, target, next_target), {}
