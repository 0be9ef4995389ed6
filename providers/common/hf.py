"""Sizes from a Hugging Face `LlavaConfig`, without importing transformers.

A saved config.json leaves out what equals the class default, so the defaults of each supported class stand here; a test
holds them against the installed transformers. A value that the model here cannot reproduce is an error that names its
key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    },
    "siglip_vision_model": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_channels": 3, "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
}
# The encoder of a LlavaConfig that has no vision_config: CLIP ViT-L/14 at 336 pixels.
LLAVA_VISION: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
    },
}
DEFAULT_ROPE_THETA = 10000.0
ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
# Keys whose other values change the computation in a way that the decoder here does not follow.
TEXT_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False, None),
    "decoder_sparse_step": (1,), "mlp_only_layers": (None, []), "partial_rotary_factor": (1, 1.0, None),
}


def load(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """A configuration as a dict, from a dict, a config.json or the folder that holds one.

    Raises:
        ValueError: there is no such file, or it is not a JSON object.
    """
    if isinstance(source, dict):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"--hf-config {source}: there is no file {path}")
    try:
        loaded = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--hf-config {source}: {path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"--hf-config {source}: {path} does not hold a JSON object")
    return loaded


def _allow(section: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"--hf-config: {section}{key} = {value!r} is not supported; supported: {choices}")


def _section(config: dict[str, Any], key: str, default_type: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A sub-configuration with its class defaults filled in."""
    given = config.get(key) or {}
    model_type = given.get("model_type", default_type)
    _allow(f"{key}.", "model_type", model_type, tuple(known))
    return {**known[model_type], **given, "model_type": model_type}


def llava_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of the `llava` provider's `Config` that a `LlavaConfig` sets.

    Args:
        config: the configuration as a dict, keys left at their default may be absent.

    Raises:
        ValueError: a value the model cannot reproduce; the message names the key.
    """
    _allow("", "model_type", config.get("model_type", "llava"), ("llava",))
    _allow("", "projector_hidden_act", config.get("projector_hidden_act", "gelu"), ("gelu",))
    _allow("", "multimodal_projector_bias", config.get("multimodal_projector_bias", True), (True,))
    if not config.get("vision_config"):
        config = {**config, "vision_config": LLAVA_VISION}
    vision = _section(config, "vision_config", "clip_vision_model", VISION_DEFAULTS)
    text = _section(config, "text_config", "llama", TEXT_DEFAULTS)
    sizes = _vision_sizes(vision, config) | _text_sizes(text)
    # Either place may tie; transformers takes the text model's word where the outer config says nothing.
    tied = bool(config.get("tie_word_embeddings", False)) or bool(text["tie_word_embeddings"])
    sizes["untie_embeddings_and_output_weights"] = not tied
    sizes["image_token_id"] = config.get("image_token_index", config.get("image_token_id", 32000))
    sizes["projector_hidden_size"] = 0
    return sizes


def _square(key: str, value: Any) -> int:
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int):
        raise ValueError(f"--hf-config: vision_config.{key} = {value!r} is not supported; supported: one number")
    return value


def _vision_sizes(vision: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    clip = vision["model_type"] == "clip_vision_model"
    # `default` drops the first token: CLIP's class token. SigLIP has none to drop.
    strategy = config.get("vision_feature_select_strategy", "default")
    _allow("", "vision_feature_select_strategy", strategy, ("default",) if clip else ("full",))
    _allow("vision_config.", "hidden_act", vision["hidden_act"], tuple(ACTIVATIONS))
    return {
        "vision_image_size": _square("image_size", vision["image_size"]),
        "vision_patch_size": _square("patch_size", vision["patch_size"]),
        "vision_num_channels": vision["num_channels"],
        "vision_hidden_size": vision["hidden_size"],
        "vision_num_layers": _feature_layers(config.get("vision_feature_layer", -2), vision["num_hidden_layers"]),
        "vision_num_attention_heads": vision["num_attention_heads"],
        "vision_ffn_hidden_size": vision["intermediate_size"],
        "vision_class_token": clip,
        "vision_patch_bias": not clip,
        "vision_pre_layernorm": clip,
        # transformers hands out a layer's output before post_layernorm, that of the last layer too.
        "vision_final_layernorm": False,
        "vision_hidden_act": ACTIVATIONS[vision["hidden_act"]],
        "vision_norm_epsilon": vision["layer_norm_eps"],
    }


def _feature_layers(index: Any, num_layers: int) -> int:
    """Layers to run for the `index`-th of the hidden states; number 0 is the embedding."""
    if not isinstance(index, int):
        raise ValueError(f"--hf-config: vision_feature_layer = {index!r} is not supported; supported: one layer number")
    count = index if index >= 0 else num_layers + 1 + index
    if not 1 <= count <= num_layers:
        raise ValueError(f"--hf-config: vision_feature_layer = {index} with vision_config.num_hidden_layers = "
                         f"{num_layers} leaves {count} layers to run")
    return count


def _text_sizes(text: dict[str, Any]) -> dict[str, Any]:
    model_type = text["model_type"]
    for key, allowed in TEXT_FIXED.items():
        if key in text:
            _allow("text_config.", key, text[key], allowed)
    if set(text.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise ValueError(f"--hf-config: text_config.layer_types = {text['layer_types']!r} is not supported; supported: "
                         f"'full_attention' in every layer")
    sizes = {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_query_groups": text["num_key_value_heads"] or text["num_attention_heads"],
        "ffn_hidden_size": text["intermediate_size"],
        "kv_channels": text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rotary_base": _rope_theta(text),
        "norm_epsilon": text["rms_norm_eps"],
        "qk_layernorm": model_type in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": model_type == "qwen2",
        "num_experts": 0,
    }
    if model_type == "qwen3_moe":
        sizes |= {
            # transformers 5 saves it under the second name.
            "num_experts": text.get("num_local_experts", text["num_experts"]),
            "moe_router_topk": text["num_experts_per_tok"],
            "moe_ffn_hidden_size": text["moe_intermediate_size"],
            "moe_router_pre_softmax": not text["norm_topk_prob"],
        }
    return sizes


def _rope_theta(text: dict[str, Any]) -> float:
    """Base of the rotary frequencies; transformers 4 spells it rope_theta, transformers 5 rope_parameters."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = text.get(key) or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        _allow("text_config.", f"{key}.rope_type", kind, ("default",))
        _allow("text_config.", f"{key}.partial_rotary_factor", scaling.get("partial_rotary_factor"), (None, 1, 1.0))
    return float((text.get("rope_parameters") or {}).get("rope_theta") or text.get("rope_theta") or DEFAULT_ROPE_THETA)
