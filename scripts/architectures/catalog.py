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
    """A network class of transformers, the settings of its configuration, and its inputs."""

    network: str
    settings: dict[str, Any]
    inputs: Inputs

    def build(self, batch_size: int = BATCH) -> Built:
        """Return the network in training mode, of random weights, and its inputs."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
            network = getattr(transformers, self.network)
            module = network(network.config_class(**self.settings))
        if self.network.endswith("LMHeadModel"):
            module.loss_type = "ForCausalLM"  # the package reads it from names that end so; these do not
        return module.train(), (), self.inputs(batch_size)


# As most configurations name their sizes.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "max_position_embeddings": 24, "pad_token_id": 0,
}  # fmt: skip
_DECODER = {**_SIZES, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_VISION: dict[str, Any] = {
    "image_size": IMAGE, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "num_labels": CLASSES,
}  # fmt: skip
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 24,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_WAVES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 32, "conv_dim": (8, 8, 8), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
    "num_labels": CLASSES, "classifier_proj_size": 8,
}  # fmt: skip
_TEXT_AND_IMAGE = {
    "text_config": {**_SIZES, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 8},
    "vision_config": {key: value for key, value in _VISION.items() if key != "num_labels"},
    "projection_dim": 8,
}


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("BertForMaskedLM", _SIZES, _masked),
    "roberta": Architecture("RobertaForMaskedLM", _SIZES, _masked),
    "albert": Architecture("AlbertForMaskedLM", {**_SIZES, "embedding_size": 8}, _masked),
    "electra": Architecture("ElectraForMaskedLM", {**_SIZES, "embedding_size": 8}, _masked),
    "distilbert": Architecture("DistilBertForMaskedLM", {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2,
        "n_heads": 4, "hidden_dim": 32}, _masked),
    "deberta_v2": Architecture("DebertaV2ForMaskedLM", {**_SIZES, "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}, _masked),
    "mpnet": Architecture("MPNetForMaskedLM", _SIZES, _masked),
    "modernbert": Architecture("ModernBertForMaskedLM", _DECODER, _padded),
    "gpt2": Architecture("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 16,
        "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}, _following),
    "gpt_neo": Architecture("GPTNeoForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2,
        "num_heads": 4, "intermediate_size": 32, "attention_types": [[["global", "local"], 1]], "window_size": 4,
        "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2}, _following),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", _DECODER, _following),
    "opt": Architecture("OPTForCausalLM", {**_DECODER, "ffn_dim": 32, "word_embed_proj_dim": 16}, _following),
    "bloom": Architecture("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2,
        "n_head": 4}, _following),
    "llama": Architecture("LlamaForCausalLM", _GROUPED, _following),
    "mistral": Architecture("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}, _following),
    "qwen2": Architecture("Qwen2ForCausalLM", _GROUPED, _following),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", {**_GROUPED, "head_dim": 4, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "grouped_mm"}, _following),
    "gemma2": Architecture("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 4}, _following),
    "phi": Architecture("PhiForCausalLM", _DECODER, _following),
    "falcon": Architecture("FalconForCausalLM", _DECODER, _following),
    "mixtral": Architecture("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "experts_implementation": "grouped_mm"}, _following),
    "mamba": Architecture("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2,
        "state_size": 4}, _following),
    "rwkv": Architecture("RwkvForCausalLM", {"vocab_size": VOCABULARY, "context_length": 24, "hidden_size": 16,
        "num_hidden_layers": 2, "attention_hidden_size": 16, "intermediate_size": 32}, _following),
    "t5": Architecture("T5ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4,
        "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        _masked),
    "bart": Architecture("BartForConditionalGeneration", _SEQ2SEQ, _masked),
    "pegasus": Architecture("PegasusForConditionalGeneration", _SEQ2SEQ, _masked),
    "whisper": Architecture("WhisperForConditionalGeneration", {**_SEQ2SEQ, "num_mel_bins": 8,
        "max_source_positions": 10, "max_target_positions": 24}, _spectrograms),
    "wav2vec2": Architecture("Wav2Vec2ForSequenceClassification", _WAVES, _spoken_classes),
    "wav2vec2_ctc": Architecture("Wav2Vec2ForCTC", _WAVES, _waves),
    "hubert": Architecture("HubertForSequenceClassification", _WAVES, _spoken_classes),
    "vit": Architecture("ViTForImageClassification", _VISION, _images),
    "deit": Architecture("DeiTForImageClassification", _VISION, _images),
    "beit": Architecture("BeitForImageClassification", _VISION, _images),
    "swin": Architecture("SwinForImageClassification", {"image_size": IMAGE, "patch_size": 4, "embed_dim": 8,
        "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": CLASSES}, _images),
    "segformer": Architecture("SegformerForSemanticSegmentation", {"num_encoder_blocks": 2, "depths": [1, 1],
        "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
        "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": CLASSES},
        _segments),
    "convnext": Architecture("ConvNextForImageClassification", {"num_stages": 2, "hidden_sizes": [8, 16],
        "depths": [1, 2], "num_labels": CLASSES, "drop_path_rate": 0.1}, _images),
    "resnet": Architecture("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16],
        "depths": [1, 2], "num_labels": CLASSES}, _images),
    "regnet": Architecture("RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16],
        "depths": [1, 2], "groups_width": 4, "num_labels": CLASSES}, _images),
    "mobilenet_v2": Architecture("MobileNetV2ForImageClassification", {"image_size": IMAGE,
        "depth_multiplier": 0.25, "num_labels": CLASSES}, _images),
    "efficientnet": Architecture("EfficientNetForImageClassification", {"image_size": IMAGE,
        "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "num_labels": CLASSES}, _images),
    "clip": Architecture("CLIPModel", _TEXT_AND_IMAGE, _captions),
    "siglip": Architecture("SiglipModel", _TEXT_AND_IMAGE, _captions),
    "blip": Architecture("BlipModel", _TEXT_AND_IMAGE, _captions),
    "videomae": Architecture("VideoMAEForVideoClassification", {**_VISION, "image_size": 16, "num_frames": 4,
        "tubelet_size": 2}, _videos),
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
