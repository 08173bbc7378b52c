"""Architectures of Hugging Face's transformers in tiny sizes, built from their configurations: nothing is downloaded.

A factory of this module is named as its architecture: `app run --model scripts.architectures.catalog:bert`. Rates of
dropout and the like are those of the configuration class. Those of `scripts.architectures.plain` are named here too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from graph.zoo import Built
from scripts.architectures import plain

VOCABULARY = 64
SEQUENCE = 8
IMAGE = 32
CLASSES = 10
BATCH = 4

Inputs = Callable[[int], dict[str, Any]]


def _tokens(batch_size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, SEQUENCE))


def _following(batch_size: int) -> dict[str, Any]:
    tokens = _tokens(batch_size)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked(batch_size: int) -> dict[str, Any]:
    return {"input_ids": _tokens(batch_size), "labels": _tokens(batch_size)}


def _padded(batch_size: int) -> dict[str, Any]:
    return {**_masked(batch_size), "attention_mask": torch.ones(batch_size, SEQUENCE, dtype=torch.int64)}


def _images(batch_size: int) -> dict[str, Any]:
    labels = torch.randint(0, CLASSES, (batch_size,))
    return {"pixel_values": torch.randn(batch_size, 3, IMAGE, IMAGE), "labels": labels}


def _segments(batch_size: int) -> dict[str, Any]:
    labels = torch.randint(0, CLASSES, (batch_size, IMAGE, IMAGE))
    return {"pixel_values": torch.randn(batch_size, 3, IMAGE, IMAGE), "labels": labels}


def _captions(batch_size: int) -> dict[str, Any]:
    images = torch.randn(batch_size, 3, IMAGE, IMAGE)
    mask = torch.ones(batch_size, SEQUENCE, dtype=torch.int64)
    return {
        "input_ids": _tokens(batch_size),
        "pixel_values": images,
        "attention_mask": mask,
        "return_loss": True,
    }


def _spectrograms(batch_size: int) -> dict[str, Any]:
    return {"input_features": torch.randn(batch_size, 8, 20), "labels": _tokens(batch_size)}


def _waves(batch_size: int) -> dict[str, Any]:
    return {
        "input_values": torch.randn(batch_size, 400),
        "labels": torch.randint(1, VOCABULARY, (batch_size, 4)),
    }


def _spoken_classes(batch_size: int) -> dict[str, Any]:
    return {"input_values": torch.randn(batch_size, 400), "labels": torch.randint(0, CLASSES, (batch_size,))}


def _videos(batch_size: int) -> dict[str, Any]:
    labels = torch.randint(0, CLASSES, (batch_size,))
    return {"pixel_values": torch.randn(batch_size, 4, 3, 16, 16), "labels": labels}


@dataclass(frozen=True)
class Architecture:
    """A network class of transformers, its configuration, and its inputs."""

    network: str
    configuration: str
    settings: dict[str, Any]
    inputs: Inputs

    def build(self, batch_size: int = BATCH) -> Built:
        """Return the network in training mode, of random weights, and its inputs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
            config = getattr(transformers, self.configuration)(**self.settings)
            module = getattr(transformers, self.network)(config)
        if self.network.endswith("LMHeadModel"):
            module.loss_type = "ForCausalLM"  # the package reads it from names that end so; these do not
        return module.train(), (), self.inputs(batch_size)


# As most configurations name their sizes.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}
_DECODER = {**_SIZES, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_VISION: dict[str, Any] = {
    "image_size": IMAGE,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_labels": CLASSES,
}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_WAVES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "conv_dim": (8, 8, 8),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "num_labels": CLASSES,
    "classifier_proj_size": 8,
}
_TEXT_AND_IMAGE = {
    "text_config": {**_SIZES, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 8},
    "vision_config": {key: value for key, value in _VISION.items() if key != "num_labels"},
    "projection_dim": 8,
}


def _of(network: str, configuration: str, settings: dict[str, Any], inputs: Inputs) -> Architecture:
    return Architecture(network, configuration, settings, inputs)


ARCHITECTURES: dict[str, Architecture] = {
    "bert": _of("BertForMaskedLM", "BertConfig", _SIZES, _masked),
    "roberta": _of("RobertaForMaskedLM", "RobertaConfig", _SIZES, _masked),
    "albert": _of("AlbertForMaskedLM", "AlbertConfig", {**_SIZES, "embedding_size": 8}, _masked),
    "electra": _of("ElectraForMaskedLM", "ElectraConfig", {**_SIZES, "embedding_size": 8}, _masked),
    "distilbert": _of(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32},
        _masked,
    ),
    "deberta_v2": _of(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        _masked,
    ),
    "mpnet": _of("MPNetForMaskedLM", "MPNetConfig", _SIZES, _masked),
    "modernbert": _of("ModernBertForMaskedLM", "ModernBertConfig", _DECODER, _padded),
    "gpt2": _of(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
            "eos_token_id": 2,
        },
        _following,
    ),
    "gpt_neo": _of(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "intermediate_size": 32,
            "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 24,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        _following,
    ),
    "gpt_neox": _of("GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER, _following),
    "opt": _of(
        "OPTForCausalLM", "OPTConfig", {**_DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16}, _following
    ),
    "bloom": _of(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        _following,
    ),
    "llama": _of("LlamaForCausalLM", "LlamaConfig", _GROUPED, _following),
    "mistral": _of("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}, _following),
    "qwen2": _of("Qwen2ForCausalLM", "Qwen2Config", _GROUPED, _following),
    "qwen3_moe": _of(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_GROUPED, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "experts_implementation": "grouped_mm",
        },
        _following,
    ),
    "gemma2": _of("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "head_dim": 4}, _following),
    "phi": _of("PhiForCausalLM", "PhiConfig", _DECODER, _following),
    "falcon": _of("FalconForCausalLM", "FalconConfig", _DECODER, _following),
    "mixtral": _of(
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
            "experts_implementation": "grouped_mm",
        },
        _following,
    ),
    "mamba": _of(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        _following,
    ),
    "rwkv": _of(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            "vocab_size": VOCABULARY, "context_length": 24, "hidden_size": 16, "num_hidden_layers": 2,
            "attention_hidden_size": 16, "intermediate_size": 32,
        },
        _following,
    ),
    "t5": _of(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2,
            "num_heads": 4, "decoder_start_token_id": 0,
        },
        _masked,
    ),
    "bart": _of("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ, _masked),
    "pegasus": _of("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ, _masked),
    "whisper": _of(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 24},
        _spectrograms,
    ),
    "wav2vec2": _of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _WAVES, _spoken_classes),
    "wav2vec2_ctc": _of("Wav2Vec2ForCTC", "Wav2Vec2Config", _WAVES, _waves),
    "hubert": _of("HubertForSequenceClassification", "HubertConfig", _WAVES, _spoken_classes),
    "vit": _of("ViTForImageClassification", "ViTConfig", _VISION, _images),
    "deit": _of("DeiTForImageClassification", "DeiTConfig", _VISION, _images),
    "beit": _of("BeitForImageClassification", "BeitConfig", _VISION, _images),
    "swin": _of(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": IMAGE, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
            "window_size": 4, "num_labels": CLASSES,
        },
        _images,
    ),
    "segformer": _of(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
            "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16, "num_labels": CLASSES,
        },
        _segments,
    ),
    "convnext": _of(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            "num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": CLASSES, "drop_path_rate": 0.1
        },
        _images,
    ),
    "resnet": _of(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "num_labels": CLASSES},
        _images,
    ),
    "regnet": _of(
        "RegNetForImageClassification",
        "RegNetConfig",
        {
            "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4, "num_labels": CLASSES
        },
        _images,
    ),
    "mobilenet_v2": _of(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": IMAGE, "depth_multiplier": 0.25, "num_labels": CLASSES},
        _images,
    ),
    "efficientnet": _of(
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        {
            "image_size": IMAGE, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320,
            "num_labels": CLASSES,
        },
        _images,
    ),
    "clip": _of("CLIPModel", "CLIPConfig", _TEXT_AND_IMAGE, _captions),
    "siglip": _of("SiglipModel", "SiglipConfig", _TEXT_AND_IMAGE, _captions),
    "blip": _of("BlipModel", "BlipConfig", _TEXT_AND_IMAGE, _captions),
    "videomae": _of(
        "VideoMAEForVideoClassification",
        "VideoMAEConfig",
        {**_VISION, "image_size": 16, "num_frames": 4, "tubelet_size": 2},
        _videos,
    ),
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Return the names of all architectures."""
    return (*ARCHITECTURES, *plain.FACTORIES)


def __getattr__(name: str) -> Callable[..., Built]:
    if name in ARCHITECTURES:
        return partial(Architecture.build, ARCHITECTURES[name])
    if name in plain.FACTORIES:
        return plain.FACTORIES[name]
    raise AttributeError(f"module {__name__} has no attribute {name}")
