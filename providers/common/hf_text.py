"""Convert between a Hugging Face text configuration and a decoder's flags, without importing transformers.

Rotary positions are written as transformers 4 and serving engines read them. transformers 5 accepts that spelling too.

A saved config.json leaves out values that equal the class default, so the defaults of each supported class are here. A
test compares them with the installed transformers. A value that the decoder cannot reproduce is an error that names its
key.
"""

from __future__ import annotations

import math
from typing import Any

from providers.common.decoder import DecoderConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
                 "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
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
    # Without its sliding window it is a Llama, and is exported as one.
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
    },
    "mixtral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": None, "num_experts_per_tok": 2,
        "num_local_experts": 8, "router_jitter_noise": 0.0,
    },
}
# Aliases that transformers accepts for a key, and may have saved. A test compares them with it.
ALIASES: dict[str, dict[str, str]] = {
    "qwen3_moe": {"num_local_experts": "num_experts"}, "mixtral": {"num_experts": "num_local_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    "nemotron_h": {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    "llava": {"image_token_id": "image_token_index"}, "llava_next": {"image_token_id": "image_token_index"},
    "qwen2_5_vl_vision": {"num_attention_heads": "num_heads"},
    "qwen3_vl_vision": {"num_attention_heads": "num_heads"},
    "qwen3_vl_moe_vision": {"num_attention_heads": "num_heads"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
}
DEFAULT_ROPE_THETA = {"mixtral": 1e6}
OTHER_ROPE_THETA = 10000.0
# Megatron's rotary embedding has these numbers of Llama 3's scaling built in. Only the factor is free.
LLAMA3_ROPE: dict[str, Any] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Fields of a Mixtral -> its keys, which are not those of other mixtures of experts.
MIXTRAL_KEYS = {"num_experts": "num_local_experts", "moe_ffn_hidden_size": "intermediate_size"}
# Keys of which the decoder here supports only these values.
TEXT_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False, None),
    "decoder_sparse_step": (1,), "mlp_only_layers": (None, []), "partial_rotary_factor": (1, 1.0, None),
    "router_jitter_noise": (0, 0.0),
}


# Kinds of values, by a type, and their names in messages.
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string",
         tuple: "a list of whole numbers"}
# Sizes that may be null although their class has a default.
NULLABLE = ("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "n_group", "topk_group",
            "num_nextn_predict_layers")
# Sizes without a default.
OPTIONAL = ("head_dim", "num_key_value_heads")
ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
                "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "partial_rotary_factor")


def check_kind(section: str, key: str, value: Any, kind: type) -> None:
    """Raise ValueError, naming the key, for a value that is not of a kind of `KINDS`. For `section` see `allow`."""
    if kind is tuple:
        fits = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    elif kind is float:
        fits = type(value) in (int, float) and math.isfinite(value)
    else:
        fits = type(value) is kind or kind is bool and value in (0, 1)
    if not fits:
        raise ValueError(f"--hf-config: {section}{key} = {value!r} is not {KINDS[kind]}")


def allow(section: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError, naming the key, for a value that is not in `allowed`.

    Args:
        section: section of the key, with a dot at its end: `text_config.`; empty at the top.
        key: the key.
        value: its value in the configuration.
        allowed: values that the model here can reproduce.
    """
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        by, advice = "", ""
        if (section, key) == ("", "model_type"):
            by = " by this model family"
            advice = ". --model-provider chooses the family; without it, `architectures` in the file does"
        raise ValueError(f"--hf-config: {section}{key} = {value!r} is not supported{by}; supported: {choices}{advice}")


def refuse_quantized(config: dict[str, Any], section: str) -> None:
    """Raise ValueError for a configuration of quantized weights. For `section` see `allow`."""
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ValueError(f"--hf-config: {section}quantization_config.quant_method = {method!r}: the weights are "
                         "quantized, which is not supported; convert them to bfloat16 first")


def renamed(config: dict[str, Any], section: str, aliases: dict[str, str]) -> dict[str, Any]:
    """Return a configuration with the names of keys that this module reads.

    Raises:
        ValueError: two names of one key have different values.
    """
    result = {key: value for key, value in config.items() if key not in aliases}
    for alias, key in aliases.items():
        if alias not in config:
            continue
        if key in result and result[key] != config[alias]:
            raise ValueError(f"--hf-config: {section}{alias} = {config[alias]!r} and {section}{key} = {result[key]!r} "
                             "are two names of one value and contradict each other: remove the wrong one")
        result[key] = config[alias]
    return result


def with_defaults(config: dict[str, Any], section: str, default_type: str, known: dict[str, dict[str, Any]],
                  lists: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a configuration with its class defaults filled in.

    Args:
        config: keys with their default values may be missing.
        section: see `allow`.
        default_type: `model_type` if `config` has none.
        known: defaults of each supported `model_type`.
        lists: keys of sizes whose value may also be a list, which the caller looks at.

    Raises:
        ValueError: another `model_type`, quantized weights, layers whose sizes differ, a value of another kind than its
            default, or an error of `renamed`.
    """
    if not isinstance(config, dict):
        raise ValueError(f"--hf-config: {section[:-1]} = {config!r} is not an object")
    model_type = config.get("model_type", default_type)
    allow(section, "model_type", model_type, tuple(known))
    refuse_quantized(config, section)
    # Sizes of single layers, which in transformers 5.19 override the model's.
    allow(section, "per_layer_config", config.get("per_layer_config") or None, (None,))
    result = {**known[model_type], **renamed(config, section, ALIASES.get(model_type, {})), "model_type": model_type}
    for key, default in {**dict.fromkeys(OPTIONAL), **known[model_type]}.items():
        value = result.get(key)
        may_be_null = default is None or isinstance(default, bool) or key in NULLABLE
        if not (value is None and may_be_null or key in lists and isinstance(value, list)):
            check_kind(section, key, value, int if default is None else type(default))
    return result


def section_of(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a configuration inside of another one, empty if it is not there. Raises ValueError if it is no object."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"--hf-config: {key} = {found!r} is not an object")
    return found


def channels_of(text: dict[str, Any], section: str) -> int:
    """Return `hidden_size` divided by `num_attention_heads`. Raises ValueError if there are no heads."""
    size, heads = text["hidden_size"], text["num_attention_heads"]
    if heads < 1:
        raise ValueError(f"--hf-config: {section}num_attention_heads = {heads} must be at least 1")
    return int(size // heads)


def text_sizes(text: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig` that a text configuration sets, without tying.

    Args:
        text: the configuration, defaults filled in.
        section: see `allow`.

    Raises:
        ValueError: a value that the decoder cannot reproduce.
    """
    model_type = text["model_type"]
    _check_fixed(text, section)
    sizes = {
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_query_groups": text["num_key_value_heads"] or text["num_attention_heads"],
        "ffn_hidden_size": text["intermediate_size"],
        "kv_channels": text.get("head_dim") or channels_of(text, section),
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "norm_epsilon": text["rms_norm_eps"],
        "qk_layernorm": model_type in ("qwen3", "qwen3_moe"),
        "add_qkv_bias": model_type == "qwen2",
        "num_experts": 0,
        **rope_sizes(text, section),
    }
    if model_type == "qwen3_moe":
        sizes |= {
            "num_experts": text["num_experts"],
            "moe_router_topk": text["num_experts_per_tok"],
            "moe_ffn_hidden_size": text["moe_intermediate_size"],
            "moe_router_pre_softmax": not text["norm_topk_prob"],
        }
    if model_type == "mixtral":
        sizes |= {
            **{field: text[key] for field, key in MIXTRAL_KEYS.items()},
            "moe_router_topk": text["num_experts_per_tok"],
            "moe_router_pre_softmax": False,
        }
    return sizes


def _check_fixed(text: dict[str, Any], section: str) -> None:
    for key, allowed in TEXT_FIXED.items():
        if key in text:
            allow(section, key, text[key], allowed)
    if text["model_type"] in ("mistral", "mixtral"):
        allow(section, "sliding_window", text["sliding_window"], (None,))
    layer_types = text.get("layer_types") or ["full_attention"]
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise ValueError(f"--hf-config: {section}layer_types = {text['layer_types']!r} is not supported; supported: "
                         f"'full_attention' in every layer")


def rope_of(config: dict[str, Any], section: str, default_theta: float) -> tuple[str, dict[str, Any]]:
    """Return the rotary positions of a configuration.

    transformers 4 spells them rope_theta and rope_scaling, transformers 5 rope_parameters. A file may have both
    spellings if they agree.

    Args:
        config: the configuration, defaults filled in.
        section: see `allow`.
        default_theta: the base if neither spelling has one.

    Returns:
        The key that holds the scaling, and its values with `rope_type` and `rope_theta` always among them.

    Raises:
        ValueError: the two spellings contradict each other, layers have different positions, or a value is no number.
    """
    theta = config.get("rope_theta")
    if theta is not None:
        check_kind(section, "rope_theta", theta, float)
    found: dict[str, dict[str, Any]] = {}
    for key in ("rope_scaling", "rope_parameters"):
        scaling = _scaling(config, section, key)
        if not scaling:
            continue
        kind = scaling.pop("type", None)
        if kind is not None and scaling.setdefault("rope_type", kind) != kind:
            raise ValueError(f"--hf-config: {section}{key}.type = {kind!r} and {section}{key}.rope_type = "
                             f"{scaling['rope_type']!r} contradict each other: remove the wrong one")
        scaling.setdefault("rope_type", "default")
        own = scaling.get("rope_theta")
        if own is not None and theta is not None and own != theta:
            raise ValueError(f"--hf-config: {section}rope_theta = {theta} and {section}{key}.rope_theta = {own} "
                             "contradict each other: remove the wrong one")
        scaling["rope_theta"] = float(own or theta or default_theta)
        # transformers takes the outer value in place of the one inside.
        name, is_scaled = "original_max_position_embeddings", scaling["rope_type"] in ("llama3", "yarn")
        outer = config.get(name)
        if is_scaled and outer is not None and scaling.setdefault(name, outer) != outer:
            raise ValueError(f"--hf-config: {section}{name} = {outer} and {section}{key}.{name} = {scaling[name]} "
                             "contradict each other: remove the wrong one")
        found[key] = scaling
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        both = " and ".join(f"{section}{key} = {config[key]}" for key in found)
        raise ValueError(f"--hf-config: {both} contradict each other: remove the wrong one")
    for key, scaling in found.items():
        return key, scaling
    return "rope_parameters", {"rope_type": "default", "rope_theta": float(theta or default_theta)}


def _scaling(config: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    """Return a copy of one spelling of rotary positions, empty if it is not there. Raises the errors of `rope_of`."""
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        raise ValueError(f"--hf-config: {section}{key} = {scaling!r} is not an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(f"--hf-config: {section}{key} differs between layers, which is not supported")
    for name in ROPE_NUMBERS:
        if scaling.get(name) is not None:
            check_kind(f"{section}{key}.", name, scaling[name], float)
    return dict(scaling)


def rope_sizes(text: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the fields of a `DecoderConfig` for rotary positions.

    Raises:
        ValueError: a scaling that the decoder cannot reproduce, or an error of `rope_of`.
    """
    default_theta = DEFAULT_ROPE_THETA.get(text["model_type"], OTHER_ROPE_THETA)
    key, scaling = rope_of(text, section, default_theta)
    allow(section, f"{key}.rope_type", scaling["rope_type"], ("default", "llama3"))
    allow(section, f"{key}.partial_rotary_factor", scaling.get("partial_rotary_factor"), (None, 1, 1.0))
    sizes = {"rotary_base": scaling["rope_theta"], "use_rope_scaling": False, "rope_scaling_factor": 8.0}
    if scaling["rope_type"] == "default":
        return sizes
    given = {"original_max_position_embeddings": text["max_position_embeddings"], **scaling}
    for name, value in LLAMA3_ROPE.items():
        allow(section, f"{key}.{name}", given.get(name), (value,))
    if scaling.get("factor") is None:
        raise ValueError(f"--hf-config: {section}{key}.factor is missing")
    return sizes | {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}


def model_type(config: DecoderConfig) -> str:
    """Return the Hugging Face family that has the decoder's parts.

    Raises:
        ValueError: no family has all of them.
    """
    kind = {(False, False): "llama", (False, True): "qwen3", (True, False): "mixtral", (True, True): "qwen3_moe"}[
        bool(config.num_experts), config.qk_layernorm]
    if config.add_qkv_bias:
        if kind != "llama":
            raise ValueError("no Hugging Face family has --add-qkv-bias together with "
                             f"{'--qk-layernorm' if config.qk_layernorm else f'--num-experts {config.num_experts}'}")
        return "qwen2"
    if kind == "mixtral" and config.moe_router_pre_softmax:
        raise ValueError("no Hugging Face family has --moe-router-pre-softmax without --qk-layernorm")
    return kind


def text_config(config: DecoderConfig) -> dict[str, Any]:
    """Return a decoder as a text configuration. Raises the errors of `model_type`."""
    kind = model_type(config)
    text: dict[str, Any] = {
        "model_type": kind,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.moe_ffn_hidden_size if kind == "mixtral" else config.ffn_hidden_size,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": None,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
    }
    if config.use_rope_scaling:
        text["rope_scaling"] = {"rope_type": "llama3", "factor": config.rope_scaling_factor, **LLAMA3_ROPE}
    if kind == "mixtral":
        text |= {"num_local_experts": config.num_experts, "num_experts_per_tok": config.moe_router_topk,
                 "sliding_window": None}
    if kind == "qwen3_moe":
        text |= {"num_experts": config.num_experts, "num_experts_per_tok": config.moe_router_topk,
                 "moe_intermediate_size": config.moe_ffn_hidden_size,
                 "norm_topk_prob": not config.moe_router_pre_softmax}
    return text


def causal_lm_config(config: DecoderConfig) -> dict[str, Any]:
    """Return a text model as a config.json. Raises the errors of `model_type`."""
    text = text_config(config)
    return {"architectures": [ARCHITECTURES[text["model_type"]]], **text}
