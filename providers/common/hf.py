"""Convert between the Hugging Face configuration of a LLaVA and the flags, without importing transformers.

The sizes of text models and of single modules are read here, too.

The defaults of the vision classes are here, those of the text classes in `hf_text`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimo.protocols import LANGUAGE
from providers.common.decoder import DecoderConfig
from providers.common.hf_text import (
    ALIASES,
    ARCHITECTURES,
    MIXTRAL_KEYS,
    TEXT_DEFAULTS,
    allow,
    check_kind,
    refuse_quantized,
    renamed,
    text_config,
    text_sizes,
    with_defaults,
)
from providers.common.vision import VisionConfig

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
# Encoder of a LlavaConfig without vision_config: CLIP ViT-L/14 at 336 pixels.
LLAVA_VISION: dict[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 336, "patch_size": 14,
}
# Sizes that may be a list of two equal numbers.
SIDES = ("image_size", "patch_size")
# Kinds of whole models with these parts. A LlavaNextConfig has the grids of tiles besides.
LLAVA_KINDS = ("llava", "llava_next")
LLAVA_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def config_path(source: str | Path) -> Path:
    """Return the config.json of a folder. Any other path is taken as the file itself."""
    path = Path(source)
    return path / "config.json" if path.is_dir() else path


def load(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Load a configuration as a dict, from a dict, a config.json or its folder.

    Raises:
        ValueError: there is no such file, or it is not a JSON object.
    """
    if isinstance(source, dict):
        return source
    path = config_path(source)
    if not path.is_file():
        raise ValueError(f"--hf-config {source}: there is no file {path}")
    try:
        loaded = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--hf-config {source}: {path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"--hf-config {source}: {path} does not hold a JSON object")
    return loaded


def llava_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the `llava` provider's `Config` that a `LlavaConfig` sets.

    Args:
        config: the configuration as a dict, keys with their default values may be missing.

    Raises:
        ValueError: a value the model cannot reproduce; the message names the key.
    """
    return _llava_sizes(config, "llava")


def llava_next_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the `llava_next` provider's `Config` that a `LlavaNextConfig` sets; see `llava_sizes`."""
    return _llava_sizes(config, "llava_next") | {"vision_image_grid_pinpoints": llava_pinpoints(config)}


def _llava_sizes(config: dict[str, Any], kind: str) -> dict[str, Any]:
    allow("", "model_type", config.get("model_type", kind), (kind,))
    allow("", "per_layer_config", config.get("per_layer_config") or None, (None,))
    refuse_quantized(config, "")
    return llava_vision(config) | llava_language(config) | {"image_token_id": llava_image_token(config)}


def llava_pinpoints(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the grids of a `LlavaNextConfig`, each as HEIGHTxWIDTH. Raises ValueError for a value that is no list."""
    found = config.get("image_grid_pinpoints") or LLAVA_PINPOINTS
    if not isinstance(found, list) or not all(isinstance(each, list | tuple) and len(each) == 2 for each in found):
        raise ValueError(f"--hf-config: image_grid_pinpoints = {found!r} is not supported; supported: a list of "
                         "[height, width]")
    return tuple(f"{height}x{width}" for height, width in found)


def llava_language(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's fields of `llava_sizes`. Raises its errors."""
    text = with_defaults(config.get("text_config") or {}, "text_config.", "llama", TEXT_DEFAULTS)
    # Both configurations of a LlavaConfig may tie, as in transformers. Of a LlavaNextConfig only the outer one does.
    tied = config.get("tie_word_embeddings") or False
    check_kind("", "tie_word_embeddings", tied, bool)
    tied = tied or (config.get("model_type") != "llava_next" and bool(text["tie_word_embeddings"]))
    return text_sizes(text, "text_config.") | {"untie_embeddings_and_output_weights": not tied}


def llava_image_token(config: dict[str, Any]) -> int:
    """Return the token of a LLaVA's vocabulary that stands for an image."""
    token: int = renamed(config, "", ALIASES["llava"]).get("image_token_index", 32000)
    check_kind("", "image_token_index", token, int)
    return token


def llava_vision(config: dict[str, Any]) -> dict[str, Any]:
    """Return the encoder's and the projector's fields of `llava_sizes`. Raises its errors."""
    config = renamed(config, "", ALIASES["llava"])
    allow("", "projector_hidden_act", config.get("projector_hidden_act", "gelu"), ("gelu",))
    allow("", "multimodal_projector_bias", config.get("multimodal_projector_bias", True), (True,))
    vision = with_defaults(config.get("vision_config") or LLAVA_VISION, "vision_config.", "clip_vision_model",
                           VISION_DEFAULTS, SIDES)
    return _vision_sizes(vision, config) | {
        "projector_hidden_size": 0,
    }


# Default tower of a model whose vision_config does not name one.
TOWERS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model", "llava": "clip_vision_model"}


def module_sizes(values: Mapping[str, Any], module: str) -> dict[str, Any]:
    """Return the fields of the `llava` provider's `Config` that a configuration sets for one module.

    Args:
        values: configuration of a LLaVA, of a text model, of a CLIP or SigLIP model or its tower, or of another model
            with a `text_config` or `vision_config` of one of these kinds.
        module: `language` or `vision`.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    config = dict(values)
    refuse_quantized(config, "")
    kind = config.get("model_type", "llava" if "text_config" in config else "")
    if kind in LLAVA_KINDS:
        return llava_language(config) if module == LANGUAGE else llava_vision(config)
    if module == LANGUAGE:
        return causal_lm_sizes(config.get("text_config") or config)
    tower, section = (config["vision_config"], "vision_config.") if config.get("vision_config") else (config, "")
    return _tower_sizes(with_defaults(tower, section, TOWERS.get(kind, kind), VISION_DEFAULTS, SIDES), section)


def causal_lm_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig` that the configuration of a text model (`...ForCausalLM`) sets.

    Args:
        config: the configuration as a dict, keys with their default values may be missing; `model_type` must be there.

    Raises:
        ValueError: a value the model cannot reproduce; the message names the key.
    """
    text = with_defaults(config, "", "", TEXT_DEFAULTS)
    return text_sizes(text, "") | {"untie_embeddings_and_output_weights": not text["tie_word_embeddings"]}


def decoder_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a configuration by field, where they depend on the kind of its text model."""
    text = values.get("text_config") or values
    return MIXTRAL_KEYS if text.get("model_type") == "mixtral" else {}


def _square(key: str, value: Any) -> int:
    if isinstance(value, (list, tuple)) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int):
        raise ValueError(f"--hf-config: vision_config.{key} = {value!r} is not supported; supported: one number")
    return value


def _vision_sizes(vision: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    layers = _feature_layers(config.get("vision_feature_layer", -2), vision["num_hidden_layers"])
    # `default` drops the first token, which is CLIP's class token. SigLIP has none to drop.
    strategy = config.get("vision_feature_select_strategy", "default")
    clip = vision["model_type"] == "clip_vision_model"
    allow("", "vision_feature_select_strategy", strategy, ("default",) if clip else ("full",))
    return {
        **_tower_sizes(vision, "vision_config."),
        "vision_num_layers": layers,
        "vision_num_unused_layers": vision["num_hidden_layers"] - layers,
        # transformers returns a layer's output before post_layernorm, also for the last layer.
        "vision_final_layernorm": False,
    }


def _tower_sizes(vision: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the fields that a tower sets, except the number of layers that run."""
    clip = vision["model_type"] == "clip_vision_model"
    allow(section, "hidden_act", vision["hidden_act"], tuple(ACTIVATIONS))
    return {
        "vision_image_size": _square("image_size", vision["image_size"]),
        "vision_patch_size": _square("patch_size", vision["patch_size"]),
        "vision_num_channels": vision["num_channels"],
        "vision_hidden_size": vision["hidden_size"],
        "vision_num_attention_heads": vision["num_attention_heads"],
        "vision_ffn_hidden_size": vision["intermediate_size"],
        "vision_class_token": clip,
        "vision_patch_bias": not clip,
        "vision_pre_layernorm": clip,
        "vision_hidden_act": ACTIVATIONS[vision["hidden_act"]],
        "vision_norm_epsilon": vision["layer_norm_eps"],
    }


def _feature_layers(index: Any, num_layers: int) -> int:
    """Return the number of layers to run for hidden state `index`. Number 0 is the embedding."""
    if not isinstance(index, int):
        raise ValueError(f"--hf-config: vision_feature_layer = {index!r} is not supported; supported: one layer number")
    count = index if index >= 0 else num_layers + 1 + index
    if not 1 <= count <= num_layers:
        raise ValueError(f"--hf-config: vision_feature_layer = {index} with vision_config.num_hidden_layers = "
                         f"{num_layers} leaves {count} layers to run")
    return count


def vision_config(config: VisionConfig) -> dict[str, Any]:
    """Return a tower as the configuration of a CLIP or SigLIP vision model in which every layer runs.

    Raises:
        ValueError: neither of them has all its parts.
    """
    clip = config.vision_class_token
    if (config.vision_pre_layernorm, config.vision_patch_bias) != (clip, not clip):
        flags = [name for name in ("vision_class_token", "vision_pre_layernorm", "vision_patch_bias")
                 if vars(config)[name]]
        given = ", ".join("--" + name.replace("_", "-") for name in flags) or "none of them"
        raise ValueError("CLIP has --vision-class-token and --vision-pre-layernorm, SigLIP --vision-patch-bias; this "
                         f"encoder has {given}")
    if config.vision_final_layernorm:
        raise ValueError("a LlavaConfig takes the features before the last norm; this encoder has "
                         "--vision-final-layernorm")
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.vision_hidden_act]
    vision: dict[str, Any] = {
        "model_type": "clip_vision_model" if clip else "siglip_vision_model",
        "hidden_size": config.vision_hidden_size,
        "intermediate_size": config.vision_ffn_hidden_size,
        "num_hidden_layers": config.vision_num_layers,
        "num_attention_heads": config.vision_num_attention_heads,
        "num_channels": config.vision_num_channels,
        "image_size": config.vision_image_size,
        "patch_size": config.vision_patch_size,
        "hidden_act": activation,
        "layer_norm_eps": config.vision_norm_epsilon,
    }
    # The pooling head is not part of the model here.
    return vision if clip else vision | {"vision_use_head": False}


def llava_config(decoder: DecoderConfig, vision: VisionConfig, image_token_id: int) -> dict[str, Any]:
    """Return a LLaVA model as a config.json. Its tower has only the layers that run.

    Raises:
        ValueError: no LlavaConfig has all its parts; see `model_type` and `vision_config`.
    """
    if vision.vision_dynamic_resolution or vision.vision_pixel_shuffle > 1:
        given = "--vision-dynamic-resolution" if vision.vision_dynamic_resolution else (
            f"--vision-pixel-shuffle {vision.vision_pixel_shuffle}")
        raise ValueError(f"{given}: a LlavaConfig takes images of one size and makes every patch a token")
    if vision.projector_hidden_size not in (0, decoder.hidden_size):
        raise ValueError(f"--projector-hidden-size {vision.projector_hidden_size}: a LlavaConfig's projector is as "
                         f"wide as the language model, --hidden-size {decoder.hidden_size}")
    text = text_config(decoder)
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": image_token_id,
        "image_seq_length": vision.num_patches,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if vision.vision_class_token else "full",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {"architectures": [ARCHITECTURES[text["model_type"]]], **text},
        "vision_config": vision_config(vision),
    }
