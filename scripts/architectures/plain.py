"""Architectures written in plain PyTorch, tiny, as a user without any library of models writes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from graph.zoo import Built

CLASSES = 5


class UNet(nn.Module):
    """Two levels down and up again, with skips: segmentation. `width`: channels of the first level."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = self._block(3, width)
        self.second = self._block(width, 2 * width)
        self.bottom = self._block(2 * width, 2 * width)
        self.up_second = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.back_second = self._block(4 * width, width)
        self.up_first = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.back_first = self._block(2 * width, width)
        self.head = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        first = self.first(images)
        second = self.second(functional.max_pool2d(first, 2))
        x = self.bottom(functional.max_pool2d(second, 2))
        x = self.back_second(torch.cat([self.up_second(x), second], 1))
        x = self.back_first(torch.cat([self.up_first(x), first], 1))
        return functional.cross_entropy(self.head(x), targets)


def unet(batch_size: int = 4, width: int = 8, image_size: int = 16) -> Built:
    images = torch.randn(batch_size, 3, image_size, image_size)
    return UNet(width), (images, torch.randint(0, CLASSES, (batch_size, image_size, image_size))), {}


class InvertedResidual(nn.Module):
    """A block of MobileNet: expanded, depthwise, projected."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU6(inplace=True),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.Hardswish(inplace=True),
            nn.Conv2d(2 * width, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layers(x)
        return result


class ImageClassifier(nn.Module):
    """A body of layers, pooled, dropped and classified."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = functional.adaptive_avg_pool2d(self.body(images), 1).flatten(1)
        return functional.cross_entropy(self.head(self.dropout(x)), targets, label_smoothing=0.1)


def _classified(body: nn.Module, width: int, batch_size: int) -> Built:
    images = torch.randn(batch_size, 3, 16, 16)
    return ImageClassifier(body, width), (images, torch.randint(0, CLASSES, (batch_size,))), {}


def depthwise(batch_size: int = 4) -> Built:
    body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), InvertedResidual(8), InvertedResidual(8))
    return _classified(body, 8, batch_size)


class DropPath(nn.Module):
    """Stochastic depth: a residual branch is dropped for some samples."""

    def __init__(self, branch: nn.Module, rate: float) -> None:
        super().__init__()
        self.branch = branch
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.branch(x)
        if not self.training:
            return x + branch
        keep = 1 - self.rate
        mask = (torch.rand(x.shape[0], 1, 1, 1, device=x.device, dtype=x.dtype) + keep).floor()
        return x + branch / keep * mask


def stochastic_depth(batch_size: int = 4) -> Built:
    blocks = [
        DropPath(nn.Sequential(nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1)), 0.3)
        for _ in "ab"
    ]
    return _classified(nn.Sequential(nn.Conv2d(3, 8, 3), *blocks), 8, batch_size)


class VAE(nn.Module):
    """A variational autoencoder: reconstruction and divergence, of a reparametrized draw."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 16)
        self.mean = nn.Linear(16, 4)
        self.log_variance = nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        loss: Tensor = functional.binary_cross_entropy_with_logits(self.decoder(latent), x) + 0.1 * divergence
        return loss


def vae(batch_size: int = 4) -> Built:
    return VAE(), (torch.rand(batch_size, 12),), {}


class Tagger(nn.Module):
    """Two bidirectional LSTM layers with dropout between them, a tag for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return functional.cross_entropy(self.head(states).flatten(0, 1), tags.flatten(), ignore_index=-100)


def lstm_tagger(batch_size: int = 4) -> Built:
    tokens = torch.randint(1, 20, (batch_size, 5))
    return Tagger(), (tokens, torch.randint(0, CLASSES, (batch_size, 5))), {}


class GruForecaster(nn.Module):
    """A GRU whose last state forecasts the next values."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, series: Tensor, targets: Tensor) -> Tensor:
        _, last = self.gru(series)
        return functional.smooth_l1_loss(self.head(last[-1]), targets)


def gru_forecaster(batch_size: int = 4) -> Built:
    return GruForecaster(), (torch.randn(batch_size, 6, 3), torch.randn(batch_size, 3)), {}


class EncoderClassifier(nn.Module):
    """`nn.TransformerEncoder` in training, with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor, padding: Tensor, targets: Tensor) -> Tensor:
        x = self.encoder(self.embedding(tokens), src_key_padding_mask=padding)
        return functional.cross_entropy(self.head(x.mean(1)), targets)


def transformer_encoder(batch_size: int = 4) -> Built:
    padding = torch.zeros(batch_size, 6, dtype=torch.bool)
    tokens = torch.randint(0, 20, (batch_size, 6))
    return EncoderClassifier(), (tokens, padding, torch.randint(0, CLASSES, (batch_size,))), {}


class TransformerTranslator(nn.Module):
    """`nn.Transformer` with a causal mask that the forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        x = self.transformer(self.embedding(source), self.embedding(target[:, :-1]), tgt_mask=mask)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target[:, 1:].flatten())


def translator(batch_size: int = 4) -> Built:
    return (
        TransformerTranslator(),
        (torch.randint(0, 20, (batch_size, 5)), torch.randint(0, 20, (batch_size, 6))),
        {},
    )


class Discriminator(nn.Module):
    """DCGAN's discriminator with spectral normalization, hinge loss of real and false images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            spectral_norm(nn.Conv2d(3, 8, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(8, 8, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            spectral_norm(nn.Linear(8 * 4 * 4, 1)),
        )

    def forward(self, real: Tensor, false: Tensor) -> Tensor:
        return functional.relu(1 - self.layers(real)).mean() + functional.relu(1 + self.layers(false)).mean()


def dcgan_discriminator(batch_size: int = 4) -> Built:
    return Discriminator(), (torch.randn(batch_size, 3, 16, 16), torch.randn(batch_size, 3, 16, 16)), {}


class MixerBlock(nn.Module):
    """A block of MLP-Mixer: over places, then over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(places, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, places))
        self.channels = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.channels(self.norm2(x))
        return result


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.Sequential(MixerBlock(16, 8), MixerBlock(16, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return functional.cross_entropy(self.head(self.blocks(x).mean(1)), targets)


def mlp_mixer(batch_size: int = 4) -> Built:
    return Mixer(), (torch.randn(batch_size, 3, 16, 16), torch.randint(0, CLASSES, (batch_size,))), {}


class GraphConvolution(nn.Module):
    """Two layers that add up neighbours by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
        x = nodes
        for layer in (self.first, self.second):
            messages = layer(x)
            x = torch.relu(messages + torch.zeros_like(messages).index_add(0, targets, messages[sources]))
        return functional.cross_entropy(x, classes)


def graph_convolution(batch_size: int = 12) -> Built:
    edges = [torch.randint(0, batch_size, (20,)) for _ in range(2)]
    classes = torch.randint(0, CLASSES, (batch_size,))
    return GraphConvolution(), (torch.randn(batch_size, 6), *edges, classes), {}


class Queries(nn.Module):
    """As DETR: a convolutional backbone, and queries that attend to it; the assignment of boxes is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(3, 16))
        self.places = nn.Parameter(torch.randn(16, 16))
        layer = nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1)
        self.classes, self.boxes = nn.Linear(16, CLASSES), nn.Linear(16, 4)

    def forward(self, images: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
        memory = self.backbone(images).flatten(2).transpose(1, 2) + self.places
        x = self.decoder(self.queries.expand(images.shape[0], -1, -1), memory)
        matched = functional.l1_loss(self.boxes(x).sigmoid(), boxes)
        return matched + functional.cross_entropy(self.classes(x).flatten(0, 1), classes.flatten())


def detr_like(batch_size: int = 4) -> Built:
    classes = torch.randint(0, CLASSES, (batch_size, 3))
    return Queries(), (torch.randn(batch_size, 3, 16, 16), classes, torch.rand(batch_size, 3, 4)), {}


class TemporalConvolutions(nn.Module):
    """Dilated causal convolutions with weight normalization, as WaveNet's."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.first = normed(nn.Conv1d(2, 8, 2))
        self.second = normed(nn.Conv1d(8, 8, 2, dilation=2))
        self.gate = normed(nn.Conv1d(8, 8, 2, dilation=2))
        self.head = nn.Conv1d(8, 2, 1)

    def forward(self, series: Tensor) -> Tensor:
        x = torch.relu(self.first(functional.pad(series[..., :-1], (1, 0))))
        padded = functional.pad(x, (2, 0))
        x = x + torch.tanh(self.second(padded)) * torch.sigmoid(self.gate(padded))
        return functional.mse_loss(self.head(x), series[..., 1:])


def temporal_convolutions(batch_size: int = 4) -> Built:
    return TemporalConvolutions(), (torch.randn(batch_size, 2, 12),), {}


FACTORIES: dict[str, Callable[..., Built]] = {
    factory.__name__: factory
    for factory in (
        unet, depthwise, stochastic_depth, vae, lstm_tagger, gru_forecaster, transformer_encoder, translator,
        dcgan_discriminator, mlp_mixer, graph_convolution, detr_like, temporal_convolutions,
    )
}  # fmt: skip
