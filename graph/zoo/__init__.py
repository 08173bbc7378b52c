"""The networks that come with Soapstone: plain modules whose sizes are parameters.

A factory takes a batch size and sizes and returns (module, args, kwargs); `module(*args, **kwargs)` is the scalar
training loss, or has it as its `.loss`. Tensors are made on the current default device, so that
`with torch.device("meta")` costs nothing. Every network has two presets: `paper`, the published sizes, and `small`, for
tests; gpt2 has `xl`, its largest published ones. Reading this list imports no torch. The networks of Hugging Face's
transformers (`hf-...`) need an extra.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from graph.errors import UsageError
from graph.texts import meant, shown

if TYPE_CHECKING:
    from torch import nn

Built = tuple["nn.Module", tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """One network: its name, where it comes from, its published batch size, and its sizes.

    `presets` maps a preset to the keywords of the factory; `factory` is "package.module:function"; `extra` is the
    extra of our package that it needs, "" where it needs none.
    """

    name: str
    title: str
    paper: str
    batch_size: int
    presets: Mapping[str, Mapping[str, Any]]
    factory: str
    extra: str = ""

    def load_factory(self) -> Callable[..., Built]:
        """Import the network's module, and with it torch; return the factory."""
        module_name, function_name = self.factory.split(":")
        factory: Callable[..., Built] = getattr(importlib.import_module(module_name), function_name)
        return factory


def _entry(
    name: str,
    title: str,
    paper: str,
    batch_size: int,
    small_sizes: dict[str, Any],
    **other_sizes: dict[str, Any],
) -> ZooEntry:
    # The published sizes are the defaults of the factory.
    presets = {"paper": {}, "small": {"batch_size": 4, **small_sizes}, **other_sizes}
    module = name.replace("-", "_")
    factory, extra = f"graph.zoo.{module}:{module}", ""
    if name.startswith("hf-"):
        factory, extra = f"graph.zoo.huggingface:{name.removeprefix('hf-')}", "hf"
    return ZooEntry(
        name,
        title,
        paper,
        batch_size,
        MappingProxyType({preset: MappingProxyType(sizes) for preset, sizes in presets.items()}),
        factory,
        extra,
    )


# Batch sizes of the first six: FlexFlow (arXiv:1807.05358), evaluation.
_ENTRIES = (
    _entry(
        "alexnet",
        "AlexNet, one tower",
        "Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv:1404.5997",
        256,
        {"image_size": 127, "width": 1 / 16, "pooled_size": 2, "hidden": 24, "classes": 10},
    ),
    _entry(
        "inception",
        "Inception-v3",
        "Szegedy et al., Rethinking the Inception Architecture for Computer Vision, arXiv:1512.00567",
        64,
        {"image_size": 107, "width": 1 / 16, "classes": 10},
    ),
    _entry(
        "resnet101",
        "ResNet-101",
        "He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385",
        64,
        {"image_size": 33, "width": 1 / 8, "blocks": (1, 2, 1, 1), "classes": 10},
    ),
    _entry(
        "rnntc",
        "RNN text classification: 4 LSTM layers, unrolled",
        "FlexFlow, arXiv:1807.05358",
        64,
        {"steps": 3, "layers": 2, "hidden": 12, "vocabulary": 50},
    ),
    _entry(
        "rnnlm",
        "RNN language model: 2 LSTM layers, unrolled",
        "FlexFlow, arXiv:1807.05358",
        64,
        {"steps": 3, "layers": 2, "hidden": 12, "vocabulary": 50},
    ),
    _entry(
        "nmt",
        "Neural machine translation: 4 LSTM layers with attention, unrolled",
        "FlexFlow, arXiv:1807.05358; attention of Luong et al., arXiv:1508.04025",
        64,
        {"steps": 3, "layers": 2, "hidden": 12, "vocabulary": 50},
    ),
    _entry(
        "vgg16",
        "VGG-16",
        "Simonyan and Zisserman, Very Deep Convolutional Networks, arXiv:1409.1556",
        256,
        {"image_size": 64, "width": 1 / 16, "pooled_size": 2, "hidden": 24, "classes": 10},
    ),
    _entry(
        "densenet121",
        "DenseNet-121",
        "Huang et al., Densely Connected Convolutional Networks, arXiv:1608.06993",
        256,
        {"image_size": 64, "growth": 4, "blocks": (2, 2, 2, 2), "classes": 10},
    ),
    _entry(
        "bert-large",
        "BERT-large, masked language model",
        "Devlin et al., BERT, arXiv:1810.04805",
        256,
        {"sequence": 10, "layers": 2, "hidden": 16, "heads": 4, "vocabulary": 50, "positions": 12},
    ),
    _entry(
        "gpt2",
        "GPT-2, 12 layers",
        "Radford et al., Language Models are Unsupervised Multitask Learners (2019)",
        512,
        {"sequence": 10, "layers": 2, "hidden": 16, "heads": 4, "vocabulary": 50},
        xl={"layers": 48, "hidden": 1600, "heads": 25},
    ),
    _entry(
        "dlrm",
        "DLRM, recommendation from dense and categorical features",
        "Naumov et al., Deep Learning Recommendation Model, arXiv:1906.00091",
        2048,
        {"tables": 3, "rows": 20, "dense_features": 6, "bottom": (12, 8), "top": (16, 12)},
    ),
    _entry(
        "candle-uno",
        "CANDLE Uno, response of tumours to pairs of drugs",
        "Unity (OSDI 2022), sizes of its public code; CANDLE benchmark Pilot1/Uno",
        64,
        {
            "cell_features": 14,
            "descriptors": 18,
            "fingerprints": 10,
            "tower": (12, 12),
            "trunk": (16, 16, 16),
        },
    ),
    _entry(
        "resnext50",
        "ResNeXt-50, 32x4d: grouped convolutions",
        "Xie et al., Aggregated Residual Transformations for Deep Neural Networks, arXiv:1611.05431",
        256,
        {
            "image_size": 33,
            "width": 1 / 8,
            "blocks": (1, 1),
            "groups": 4,
            "group_width": 2,
            "classes": 10,
        },
    ),
    _entry(
        "xdl",
        "XDL, advertisements: tables and linear layers",
        "Unity (OSDI 2022), sizes of its public code; Jiang et al., XDL, DLP-KDD 2019",
        64,
        {"tables": 3, "rows": 20, "embedding": 6, "bag": 2, "layers": (12, 10, 2)},
    ),
    _entry("mlp", "Multilayer perceptron", "none; sizes of our own", 64, {"widths": (12, 24, 24, 10)}),
)

_TEXT = {"sequence": 10, "layers": 2, "hidden": 24, "vocabulary": 53}
_GROUPED_HEADS = {"heads": 6, "key_value_heads": 2, "intermediate": 20}

# Batch sizes are of our own: those that a node of eight accelerators would train at once.
_HUGGING_FACE = (
    _entry(
        "hf-bert",
        "BERT-base, masked language model",
        "Devlin et al., BERT, arXiv:1810.04805",
        128,
        {**_TEXT, "heads": 3, "intermediate": 20},
    ),
    _entry(
        "hf-gpt2",
        "GPT-2 small",
        "Radford et al., Language Models are Unsupervised Multitask Learners (2019)",
        64,
        {**_TEXT, "heads": 3, "dropout": 0.0},
    ),
    _entry(
        "hf-llama",
        "Llama-3-8B: grouped-query attention, RMSNorm, rotary positions",
        "Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783",
        8,
        {**_TEXT, **_GROUPED_HEADS},
    ),
    _entry(
        "hf-t5",
        "T5-base, text to text",
        "Raffel et al., Exploring the Limits of Transfer Learning, arXiv:1910.10683",
        128,
        {**_TEXT, "target_sequence": 7, "heads": 3, "head_size": 4, "intermediate": 20, "dropout": 0.0},
    ),
    _entry(
        "hf-vit",
        "ViT-B/16",
        "Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv:2010.11929",
        256,
        {
            "image_size": 30,
            "patch_size": 10,
            "layers": 2,
            "hidden": 24,
            "heads": 3,
            "intermediate": 20,
            "classes": 10,
        },
    ),
    _entry(
        "hf-resnet",
        "ResNet-50",
        "He et al., Deep Residual Learning for Image Recognition, arXiv:1512.03385",
        256,
        {"image_size": 33, "stem": 6, "widths": (12, 20), "blocks": (1, 2), "classes": 10},
    ),
    _entry(
        "hf-convnext",
        "ConvNeXt-T",
        "Liu et al., A ConvNet for the 2020s, arXiv:2201.03545",
        256,
        {"image_size": 44, "widths": (6, 10), "blocks": (1, 2), "classes": 10},
    ),
    _entry(
        "hf-mixtral",
        "Mixtral-8x7B: a mixture of experts",
        "Jiang et al., Mixtral of Experts, arXiv:2401.04088",
        8,
        {**_TEXT, **_GROUPED_HEADS, "experts": 5},
    ),
)
_OWN = tuple(entry.name for entry in _ENTRIES)
_BY_NAME = MappingProxyType({entry.name: entry for entry in (*_ENTRIES, *_HUGGING_FACE)})


def zoo_names() -> tuple[str, ...]:
    """Return the names of our own networks, those of the FlexFlow study first."""
    return _OWN


def hugging_face_names() -> tuple[str, ...]:
    """Return the names of the networks of Hugging Face's transformers, which the extra `hf` installs."""
    return tuple(entry.name for entry in _HUGGING_FACE)


def zoo_entry(name: str) -> ZooEntry:
    """Return the entry of the network called `name`.

    Raises:
        UsageError: there is no such network.
    """
    if name not in _BY_NAME:
        raise UsageError(
            f"model {shown(name) or 'without a name'}: is unknown, must be {', '.join(_BY_NAME)}, or a function of "
            f"your own, package.module:factory; {meant(name, _BY_NAME)}"
        )
    return _BY_NAME[name]


def build(name: str, preset: str = "paper", batch_size: int | None = None, **overrides: Any) -> Built:
    """Return (module, args, kwargs) of the network `name` on the current default device, in training mode.

    `batch_size` defaults to the preset's; `overrides` replace sizes of the preset.

    Raises:
        UsageError: unknown network, preset or size, or a batch size below 1.
    """
    entry = zoo_entry(name)
    if preset not in entry.presets:
        raise UsageError(
            f"model {name}: preset {shown(preset)} is unknown, must be {', '.join(entry.presets)}; choose one"
        )
    factory = entry.load_factory()
    own_sizes = [size for size in inspect.signature(factory).parameters if size != "batch_size"]
    for size in overrides:
        if size not in own_sizes:
            raise UsageError(f"model {name}: size {size} is unknown, known are {', '.join(own_sizes)}")
    sizes = {"batch_size": entry.batch_size, **entry.presets[preset], **overrides}
    if batch_size is not None:
        sizes["batch_size"] = batch_size
    if sizes["batch_size"] < 1:
        raise UsageError(
            f"model {name}: batch size is {shown(sizes['batch_size'])}, must be at least 1; choose another"
        )
    return factory(**sizes)
