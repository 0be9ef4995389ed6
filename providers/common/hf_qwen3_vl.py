"""Convert between a Hugging Face `Qwen3VLConfig` or `Qwen3VLMoeConfig` and the flags. Does not import transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from providers.common.decoder import MultimodalDecoderConfig
from providers.common.hf import ACTIVATIONS
from providers.common.hf_qwen_vl import (
    ROPE_KEYS,
    mrope_section,
    tied_outside,
    token_ids,
    tower_sizes,
    whole_config,
)
from providers.common.hf_text import (
    allow,
    refuse_quantized,
    rope_of,
    section_of,
    text_config,
    text_sizes,
    with_defaults,
)
from providers.common.qwen_vision import Qwen3VisionConfig


@dataclass(frozen=True)
class Kind:
    """Names of the dense models, or of the mixtures of experts, in configurations.

    Attributes:
        architecture: class of the whole model.
        model_type: type of the whole model. The types of its parts begin with it.
        text_type: type of a text model with the same decoder.
    """

    architecture: str
    model_type: str
    text_type: str


DENSE = Kind("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3")
MOE = Kind("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_moe")
KINDS = {kind.model_type: kind for kind in (DENSE, MOE)}
# Class defaults, which a saved file leaves out.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_text": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 128000, "rms_norm_eps": 1e-6},
    # The class has no norm_topk_prob: weights of experts are always normalized.
    "qwen3_vl_moe_text": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu", "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6, "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
        "norm_topk_prob": True},
}
VISION_DEFAULTS: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
}
ROTARY_BASE_OF_TEXT = 5e5
SECTIONS = (24, 20, 20)


def qwen3_vl_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the `qwen3_vl` provider's `Config` that a `Qwen3VLConfig` or a `Qwen3VLMoeConfig` sets.

    Args:
        config: the configuration as a dict. Keys with their default values may be missing.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    allow("", "model_type", config.get("model_type", DENSE.model_type), tuple(KINDS))
    allow("", "per_layer_config", config.get("per_layer_config") or None, (None,))
    refuse_quantized(config, "")
    language = language_sizes(config)
    return language | vision_sizes(config, language["hidden_size"]) | token_ids(config)


def language_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's fields. Raises the errors of `qwen3_vl_sizes`."""
    section, kind = "text_config.", KINDS[config.get("model_type", DENSE.model_type)]
    own_type = f"{kind.model_type}_text"
    text = with_defaults(config.get("text_config") or {}, section, own_type, {own_type: TEXT_DEFAULTS[own_type]})
    if kind is MOE:
        allow(section, "norm_topk_prob", text["norm_topk_prob"], (True,))
    key, rope = rope_of(text, section, ROTARY_BASE_OF_TEXT)
    allow(section, f"{key}.rope_type", rope["rope_type"], ("default",))
    # The family's models interleave the axes whatever the key says, so another value would be misleading.
    allow(section, f"{key}.mrope_interleaved", rope.get("mrope_interleaved", True), (True,))
    allow(section, f"{key}.partial_rotary_factor", rope.get("partial_rotary_factor"), (None, 1, 1.0))
    plain = {name: value for name, value in text.items() if name not in ROPE_KEYS}
    return text_sizes(plain | {"model_type": kind.text_type, "rope_theta": rope["rope_theta"]}, section) | {
        "mrope_section": mrope_section(rope, f"{section}{key}.", SECTIONS),
        # The text model's own value has no effect in transformers.
        "untie_embeddings_and_output_weights": not tied_outside(config)}


def vision_sizes(config: dict[str, Any], language_size: int) -> dict[str, Any]:
    """Return the tower's fields. Raises the errors of `qwen3_vl_sizes`."""
    section, given = "vision_config.", dict(section_of(config, "vision_config"))
    whole = config.get("model_type", DENSE.model_type)
    own_type = f"{whole}_vision"
    if given.get("model_type") == whole:  # as in the published files
        given["model_type"] = own_type
    vision = with_defaults(given, section, own_type, {own_type: VISION_DEFAULTS})
    allow(section, "hidden_act", vision["hidden_act"], tuple(ACTIVATIONS))
    if vision["out_hidden_size"] != language_size:
        raise ValueError(f"--hf-config: text_config.hidden_size = {language_size}, but {section}out_hidden_size = "
                         f"{vision['out_hidden_size']} is not supported; supported: text_config.hidden_size")
    levels = tuple(vision["deepstack_visual_indexes"])
    if list(levels) != sorted(set(levels)):
        raise ValueError(f"--hf-config: {section}deepstack_visual_indexes = {list(levels)} is not supported; "
                         "supported: numbers in ascending order")
    return tower_sizes(vision, section) | {
        "vision_num_position_embeddings": vision["num_position_embeddings"],
        "vision_hidden_act": ACTIVATIONS[vision["hidden_act"]],
        # The class's default names layers that a smaller tower does not have.
        "vision_deepstack_layers": tuple(layer for layer in levels if layer < vision["depth"]),
    }


def qwen3_vl_config(decoder: MultimodalDecoderConfig, vision: Qwen3VisionConfig,
                    tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return a model as a config.json.

    Args:
        decoder: the language model.
        vision: the tower.
        tokens: values of the keys of `TOKEN_DEFAULTS`.

    Raises:
        ValueError: the decoder has parts that the family does not have.
    """
    text, kind = text_config(decoder), MOE if decoder.num_experts else DENSE
    if text["model_type"] != kind.text_type or decoder.moe_router_pre_softmax:
        raise ValueError(f"{kind.architecture} has a Qwen3 decoder: --qk-layernorm, --no-add-qkv-bias and "
                         "--no-moe-router-pre-softmax")
    text |= {"model_type": f"{kind.model_type}_text", "rope_scaling": {
        "rope_type": "default", "mrope_interleaved": True, "mrope_section": list(decoder.mrope_section)}}
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[vision.vision_hidden_act]
    return whole_config(kind.architecture, kind.model_type, text, vision, {
        "hidden_act": activation, "num_position_embeddings": vision.vision_num_position_embeddings,
        "deepstack_visual_indexes": list(vision.vision_deepstack_layers)}, tokens)
