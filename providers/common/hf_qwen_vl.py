"""Convert between a Hugging Face `Qwen2_5_VLConfig` and the flags, without importing transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mimo.protocols import LANGUAGE
from providers.common.decoder import MultimodalDecoderConfig
from providers.common.hf import causal_lm_sizes
from providers.common.hf_text import (
    allow,
    channels_of,
    check_kind,
    refuse_quantized,
    rope_of,
    section_of,
    text_config,
    text_sizes,
    with_defaults,
)
from providers.common.qwen_vision import NUM_CHANNELS, ROTARY_BASE, Qwen25VisionConfig, QwenVisionConfig

ARCHITECTURE, MODEL_TYPE = "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"
TEXT_TYPE, VISION_TYPE = "qwen2_5_vl_text", "qwen2_5_vl_vision"
# Class defaults, which a saved file leaves out.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}
VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
    "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 4,
    "window_size": 112, "out_hidden_size": 3584, "fullatt_block_indexes": (7, 15, 23, 31),
}
TOKEN_DEFAULTS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
                  "vision_end_token_id": 151653}
ROTARY_BASE_OF_TEXT = 1e6
SECTIONS = (16, 24, 24)
# Spellings of rotary positions in a configuration.
ROPE_KEYS = ("rope_scaling", "rope_parameters")


def qwen2_5_vl_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the `qwen2_5_vl` provider's `Config` that a `Qwen2_5_VLConfig` sets.

    Args:
        config: the configuration as a dict. Keys with their default values may be missing, and the keys of the text
            model may be at the top, as in the published files, or in `text_config`.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    allow("", "model_type", config.get("model_type", MODEL_TYPE), (MODEL_TYPE,))
    allow("", "per_layer_config", config.get("per_layer_config") or None, (None,))
    refuse_quantized(config, "")
    language = language_sizes(config)
    return language | vision_sizes(config, language["hidden_size"]) | token_ids(config)


def token_ids(config: dict[str, Any]) -> dict[str, int]:
    """Return the fields of the special tokens. Raises ValueError, naming the key, for what is no token id."""
    found = {key: config.get(key, default) for key, default in TOKEN_DEFAULTS.items()}
    for key, token in found.items():
        check_kind("", key, token, int)
    return found


def tied_outside(config: dict[str, Any]) -> bool:
    """Return `tie_word_embeddings` of a whole model. Raises ValueError for what is neither true nor false."""
    tied: bool = config.get("tie_word_embeddings") or False
    check_kind("", "tie_word_embeddings", tied, bool)
    return tied


def mrope_section(rope: dict[str, Any], section: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the frequencies of each axis. Raises ValueError, with the key inside of `section`, for other values."""
    found = rope.get("mrope_section") or default
    check_kind(section, "mrope_section", found, tuple)
    return tuple(found)


def module_sizes(config: dict[str, Any], module: str, model_types: Sequence[str],
                 sizes_of: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that a configuration sets for one module.

    Args:
        config: configuration of the whole model, or for `language` of a text model.
        module: `language` or `vision`.
        model_types: types of the family's whole models.
        sizes_of: returns the fields of both modules.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    if module == LANGUAGE and config.get("model_type", model_types[0]) not in model_types:
        # Positions of text are the same on every axis, so that any sections compute what a text model does.
        return causal_lm_sizes(config)
    names = {*MultimodalDecoderConfig.__dataclass_fields__, "image_token_id"}
    return {name: value for name, value in sizes_of(config).items() if (name in names) == (module == LANGUAGE)}


def language_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's fields. Raises the errors of `qwen2_5_vl_sizes`."""
    nested = section_of(config, "text_config")
    section = "text_config." if nested else ""
    given = nested or {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    text = with_defaults({"model_type": TEXT_TYPE, **given}, section, TEXT_TYPE, {TEXT_TYPE: TEXT_DEFAULTS})
    channels = channels_of(text, section)
    allow(section, "head_dim", text.get("head_dim") or channels, (channels,))
    key, rope = rope_of(text | {name: _plain(text.get(name)) for name in ROPE_KEYS}, section, ROTARY_BASE_OF_TEXT)
    allow(section, f"{key}.rope_type", rope["rope_type"], ("default",))
    allow(section, f"{key}.mrope_interleaved", rope.get("mrope_interleaved", False), (False,))
    plain = {name: value for name, value in text.items() if name not in (*ROPE_KEYS, "rope_theta")}
    tied = tied_outside(config) or bool(text["tie_word_embeddings"])
    return text_sizes(plain | {"model_type": "qwen2", "rope_theta": rope["rope_theta"]}, section) | {
        "kv_channels": 0,  # they follow from width and heads
        "mrope_section": mrope_section(rope, f"{section}{key}.", SECTIONS),
        "untie_embeddings_and_output_weights": not tied}


def _plain(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a spelling of rotary positions with the type `mrope` under its present name, `default`."""
    if not isinstance(scaling, dict):
        return scaling
    return {name: "default" if name in ("type", "rope_type") and value == "mrope" else value
            for name, value in scaling.items()}


def vision_sizes(config: dict[str, Any], language_size: int) -> dict[str, Any]:
    """Return the tower's fields. Raises the errors of `qwen2_5_vl_sizes`."""
    section, given = "vision_config.", dict(section_of(config, "vision_config"))
    if given.get("model_type") == MODEL_TYPE:  # as in the published files
        given["model_type"] = VISION_TYPE
    vision = with_defaults(given, section, VISION_TYPE, {VISION_TYPE: VISION_DEFAULTS})
    for key, allowed in (("hidden_act", "silu"), ("out_hidden_size", language_size)):
        allow(section, key, vision[key], (allowed,))
    # Other names in the published files, which transformers ignores.
    allow(section, "in_chans", vision.get("in_chans", NUM_CHANNELS), (NUM_CHANNELS,))
    allow(section, "spatial_patch_size", vision.get("spatial_patch_size", vision["patch_size"]),
          (vision["patch_size"],))
    return tower_sizes(vision, section) | {
        "vision_window_size": vision["window_size"],
        # The class's default names layers that a smaller tower does not have.
        "vision_full_attention_layers": tuple(
            layer for layer in vision["fullatt_block_indexes"] if layer < vision["depth"]),
        "vision_tokens_per_second": vision["tokens_per_second"],
    }


# Keys of `vision_config` that the towers of both families have -> fields.
TOWER_FIELDS = {
    "patch_size": "vision_patch_size", "temporal_patch_size": "vision_temporal_patch_size",
    "spatial_merge_size": "vision_spatial_merge_size", "hidden_size": "vision_hidden_size",
    "depth": "vision_num_layers", "num_heads": "vision_num_attention_heads",
    "intermediate_size": "vision_ffn_hidden_size"}

# Fields -> keys that other families do not have.
HF_KEYS = {**{key: key for key in TOKEN_DEFAULTS},
           **{field: f"vision_config.{key}" for key, field in TOWER_FIELDS.items()}}


def tower_sizes(vision: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the fields that both families' towers have, of a `vision_config` with its defaults.

    Raises:
        ValueError: a value that the towers cannot reproduce; the message names the key, which is in `section`.
    """
    allow(section, "in_channels", vision["in_channels"], (NUM_CHANNELS,))
    for key in ("patch_size", "temporal_patch_size"):
        if not isinstance(vision[key], int):
            raise ValueError(f"--hf-config: {section}{key} = {vision[key]!r} is not supported; supported: one number")
    _, rope = rope_of({"rope_parameters": vision.get("rope_parameters")}, section, ROTARY_BASE)
    allow(section, "rope_parameters.rope_theta", rope["rope_theta"], (ROTARY_BASE,))
    allow(section, "rope_parameters.rope_type", rope["rope_type"], ("default", "axial"))
    return {field: vision[key] for key, field in TOWER_FIELDS.items()}


def whole_config(architecture: str, model_type: str, text: dict[str, Any], vision: QwenVisionConfig,
                 own: dict[str, Any], token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a model as a config.json.

    Args:
        architecture: class of the model.
        model_type: type of the model, with which the type of its tower begins.
        text: its `text_config`.
        vision: the tower.
        own: keys of `vision_config` that only this family has.
        token_ids: values of the keys of `TOKEN_DEFAULTS`.
    """
    return {
        "architectures": [architecture], "model_type": model_type, **token_ids,
        "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text,
        "vision_config": {"model_type": f"{model_type}_vision", "in_channels": NUM_CHANNELS,
                          "out_hidden_size": text["hidden_size"],
                          **{key: getattr(vision, field) for key, field in TOWER_FIELDS.items()}, **own}}


def qwen2_5_vl_config(decoder: MultimodalDecoderConfig, vision: Qwen25VisionConfig,
                      token_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a model as a config.json, with the text model in `text_config`.

    Args:
        decoder: the language model.
        vision: the tower.
        token_ids: values of the keys of `TOKEN_DEFAULTS`.

    Raises:
        ValueError: the decoder has parts that the family does not have.
    """
    text = text_config(decoder)
    channels = decoder.hidden_size // decoder.num_attention_heads
    if text["model_type"] != "qwen2" or text.pop("head_dim") != channels:
        raise ValueError(f"{ARCHITECTURE} has a Qwen2 decoder: --add-qkv-bias, --no-qk-layernorm, --num-experts 0 and "
                         f"--kv-channels {channels} (--hidden-size / --num-attention-heads)")
    text |= {"model_type": TEXT_TYPE, "use_sliding_window": False,
             "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": list(decoder.mrope_section)}}
    return whole_config(ARCHITECTURE, MODEL_TYPE, text, vision, {
        "hidden_act": "silu", "tokens_per_second": vision.vision_tokens_per_second,
        "window_size": vision.vision_window_size,
        "fullatt_block_indexes": list(vision.vision_full_attention_layers)}, token_ids)
