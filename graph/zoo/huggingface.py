"""Networks of Hugging Face's transformers, built from their configurations: nothing is downloaded.

Each factory takes the sizes of its network and leaves all else to the configuration class, so that a network is what a
user of transformers trains. transformers is optional: `pip install 'soapstone[hf]'`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graph.errors import UsageError
from graph.zoo import Built


def _transformers() -> Any:
    """Return the package.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"Hugging Face models: package {error.name} is not installed, must be; "
            "install it with pip install 'soapstone[hf]'"
        ) from None


@contextmanager
def _quiet() -> Iterator[Any]:
    """Give the package, hushed: it warns of configurations without a tokenizer, and of parts of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = _transformers()
        verbosity = package.logging.get_verbosity()
        package.logging.set_verbosity_error()
        try:
            yield package
        finally:
            package.logging.set_verbosity(verbosity)


def _network(network: str, configuration: str, **settings: Any) -> nn.Module:
    """Return a network of random weights, in training mode, with the loss that its name stands for."""
    with _quiet() as package:
        config = getattr(package, configuration)(**settings)
        module: nn.Module = getattr(package, network)(config)
    return module.train()


def _tokens(vocabulary: int, batch_size: int, sequence: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch_size, sequence))


def _following(module: nn.Module, vocabulary: int, batch_size: int, sequence: int) -> Built:
    """Return a language model with random tokens [batch, sequence], which are their own targets, one place on."""
    tokens = _tokens(vocabulary, batch_size, sequence)
    return module, (), {"input_ids": tokens, "labels": tokens.clone()}


def _images(batch_size: int, size: int, classes: int) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(batch_size, 3, size, size),
        "labels": torch.randint(0, classes, (batch_size,)),
    }


def bert(
    batch_size: int,
    *,
    sequence: int = 512,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    intermediate: int = 3072,
    vocabulary: int = 30_522,
    dropout: float = 0.1,
) -> Built:
    """Return BERT-base, masked language model, with random tokens of two segments and targets, [batch, sequence]."""
    module = _network(
        "BertForMaskedLM",
        "BertConfig",
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=sequence,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    tokens, targets = (_tokens(vocabulary, batch_size, sequence) for _ in range(2))
    segments = torch.randint(0, 2, (batch_size, sequence))
    return module, (), {"input_ids": tokens, "token_type_ids": segments, "labels": targets}


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
    """Return GPT-2 small with random tokens [batch, sequence], which are their own targets, one place on."""
    module: Any = _network(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=vocabulary,
        n_positions=sequence,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
    )
    module.loss_type = "ForCausalLM"  # the package reads it from names that end so; this one does not
    return _following(module, vocabulary, batch_size, sequence)


def llama(
    batch_size: int,
    *,
    sequence: int = 8192,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    key_value_heads: int = 8,
    intermediate: int = 14_336,
    vocabulary: int = 128_256,
) -> Built:
    """Return Llama-3-8B with random tokens [batch, sequence], which are their own targets, one place on."""
    module = _network(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=sequence,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    return _following(module, vocabulary, batch_size, sequence)


def mixtral(  # noqa: PLR0913 - the network's sizes, which `--model` takes by name
    batch_size: int,
    *,
    sequence: int = 4096,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    key_value_heads: int = 8,
    intermediate: int = 14_336,
    experts: int = 8,
    experts_per_token: int = 2,
    vocabulary: int = 32_000,
    implementation: str = "grouped_mm",
) -> Built:
    """Return Mixtral-8x7B with its balancing loss, and random tokens [batch, sequence], one place on their own targets.

    Of the implementations of experts in transformers, "grouped_mm" is the one to plan with: "eager" has sizes that
    depend on data and cannot be exported, "batched_mm" copies an expert's weights for every token.
    """
    module = _network(
        "MixtralForCausalLM",
        "MixtralConfig",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        num_local_experts=experts,
        num_experts_per_tok=experts_per_token,
        max_position_embeddings=sequence,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        output_router_logits=True,
        experts_implementation=implementation,
    )
    return _following(module, vocabulary, batch_size, sequence)


def t5(  # noqa: PLR0913 - the network's sizes, which `--model` takes by name
    batch_size: int,
    *,
    sequence: int = 512,
    target_sequence: int = 114,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    head_size: int = 64,
    intermediate: int = 3072,
    vocabulary: int = 32_128,
    dropout: float = 0.1,
) -> Built:
    """Return T5-base with random tokens [batch, sequence] and targets [batch, target sequence]."""
    module = _network(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=vocabulary,
        d_model=hidden,
        d_kv=head_size,
        d_ff=intermediate,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    return (
        module,
        (),
        {
            "input_ids": _tokens(vocabulary, batch_size, sequence),
            "labels": _tokens(vocabulary, batch_size, target_sequence),
        },
    )


def vit(
    batch_size: int,
    *,
    image_size: int = 224,
    patch_size: int = 16,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    intermediate: int = 3072,
    classes: int = 1000,
) -> Built:
    """Return ViT-B/16 with random images [batch, 3, size, size] and classes [batch]."""
    module = _network(
        "ViTForImageClassification",
        "ViTConfig",
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        num_labels=classes,
    )
    return module, (), _images(batch_size, image_size, classes)


def resnet(
    batch_size: int,
    *,
    image_size: int = 224,
    stem: int = 64,
    widths: tuple[int, ...] = (256, 512, 1024, 2048),
    blocks: tuple[int, ...] = (3, 4, 6, 3),
    classes: int = 1000,
) -> Built:
    """Return ResNet-50 with random images [batch, 3, size, size] and classes [batch]."""
    module = _network(
        "ResNetForImageClassification",
        "ResNetConfig",
        embedding_size=stem,
        hidden_sizes=list(widths),
        depths=list(blocks),
        num_labels=classes,
    )
    return module, (), _images(batch_size, image_size, classes)


def convnext(
    batch_size: int,
    *,
    image_size: int = 224,
    widths: tuple[int, ...] = (96, 192, 384, 768),
    blocks: tuple[int, ...] = (3, 3, 9, 3),
    classes: int = 1000,
) -> Built:
    """Return ConvNeXt-T with random images [batch, 3, size, size] and classes [batch]."""
    module = _network(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        num_stages=len(widths),
        hidden_sizes=list(widths),
        depths=list(blocks),
        num_labels=classes,
    )
    return module, (), _images(batch_size, image_size, classes)
