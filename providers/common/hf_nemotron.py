"""Convert between the family's Hugging Face configurations and the flags, without importing transformers.

`NemotronHConfig` is the text model's; `NemotronH_Nano_VL_V2` wraps one in `llm_config`, beside an encoder (`hf_radio`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from providers.common.checks import NO_FACTOR
from providers.common.hf_radio import radio_config, radio_keys, radio_sizes
from providers.common.hf_text import allow, check_kind, refuse_quantized, renamed, with_defaults
from providers.common.hybrid import ATTENTION, CONV_KERNEL, MAMBA, MLP, MOE, HybridConfig

if TYPE_CHECKING:
    from providers.nemotron_moe_vlm import Config

# In the published code, Megatron and vLLM this is the least initial time step, and later ones are not limited.
# transformers 5 limits all time steps to it, so a larger value describes a model that the others do not compute.
TIME_STEP_MIN = 1e-3
# Value in exported configurations. transformers 5 takes its logarithm, so it must not be 0.
NO_TIME_STEP_MIN = 1e-20
# Class defaults, which a saved config.json may leave out; a test compares them with the installed transformers.
NEMOTRON_DEFAULTS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "vocab_size": 131072, "hidden_size": 4096, "tie_word_embeddings": False, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "attention_bias": False,
        "sliding_window": None, "intermediate_size": 21504, "mlp_hidden_act": "relu2", "mlp_bias": False,
        "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8,
        "conv_kernel": 4, "use_conv_bias": True, "mamba_proj_bias": False, "n_routed_experts": 8,
        "n_shared_experts": 1, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "num_nextn_predict_layers": 0, "use_bias": False, "layer_norm_epsilon": 1e-5,
        "residual_in_fp32": False, "time_step_min": TIME_STEP_MIN,
    },
}
# Epsilon of the gated norm in Megatron Core's MambaMixer.
MIXER_NORM_EPSILON = 1e-5
DEFAULT_MTP = "*E"
# The second has the same language and vision parts and a sound encoder, which is ignored.
VLM_TYPES = ("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3")
# Names that every version of transformers reads, and names that later ones save, up to 5.19.
BLOCKS = {"mamba": MAMBA, "attention": ATTENTION, "moe": MOE, "mlp": MLP}
LATER_BLOCKS = {"linear_attention": MAMBA, "full_attention": ATTENTION}
# Names of the published code, which transformers accepts too.
OLD_NAMES = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
             "mamba_dt_limit": "time_step_limit", "mamba_dt_min": "time_step_min"}
# Keys of which the decoder here supports only these values, for all layers and for layers of one kind.
FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {"tie_word_embeddings": (False,), "use_bias": (False,), "residual_in_fp32": (False,)},
    MAMBA: {"conv_kernel": (CONV_KERNEL,), "use_conv_bias": (True,), "mamba_hidden_act": ("silu",),
            "mamba_proj_bias": (False,), "layer_norm_epsilon": (MIXER_NORM_EPSILON,)},
    ATTENTION: {"attention_bias": (False,), "sliding_window": (None,)},
    # Engines multiply the shared expert's width by the number of shared experts. transformers does not.
    MOE: {"n_shared_experts": (1,), "n_group": (1,), "topk_group": (1,),
          "mlp_hidden_act": ("relu2",), "mlp_bias": (False,)},
    MLP: {"mlp_hidden_act": ("relu2",), "mlp_bias": (False,)},
}
# Keys that have the same name in both.
RENAMED = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "kv_channels": "head_dim", "num_query_groups": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings", "norm_epsilon": "layer_norm_epsilon",
    "mamba_num_heads": "mamba_num_heads", "mamba_head_dim": "mamba_head_dim", "mamba_num_groups": "n_groups",
    "mamba_state_dim": "ssm_state_size", "num_experts": "n_routed_experts", "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}


def nemotron_sizes(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Return the fields of a `HybridConfig` that a `NemotronHConfig` sets.

    Multi-token prediction is built if the configuration has it (`num_nextn_predict_layers`).

    Args:
        values: the configuration as a dict, keys with their default values may be missing.
        section: its key in a larger configuration, with a dot at its end: `llm_config.`.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    if not isinstance(values, dict):
        raise ValueError(f"--hf-config: {section[:-1]} = {values!r} is not an object")
    values = renamed(values, section, OLD_NAMES)
    values = with_defaults(values, section, "nemotron_h", NEMOTRON_DEFAULTS, ("intermediate_size",))
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    pattern = _pattern(values, section, "layers_block_type", "hybrid_override_pattern")
    if not pattern:
        raise ValueError(f"--hf-config: {section}layers_block_type is missing, and so is "
                         f"{section}hybrid_override_pattern")
    depths = values["num_nextn_predict_layers"] or 0
    if depths:
        mtp = _pattern(values, section, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        pattern += f"/{mtp or DEFAULT_MTP}" * depths
    _check_fixed(values, section, pattern)
    return {
        "hybrid_layer_pattern": pattern,
        **{ours: values[theirs] for ours, theirs in RENAMED.items()},
        "moe_latent_size": values["moe_latent_size"] or 0,
        "moe_router_enable_expert_bias": True,
        "untie_embeddings_and_output_weights": True,
    }


def _pattern(values: dict[str, Any], section: str, list_key: str, text_key: str) -> str:
    """Return the layers as symbols, empty without either key. transformers prefers the list, vLLM the text."""
    blocks, pattern = values.get(list_key) or [], values.get(text_key) or ""
    if not isinstance(blocks, list | tuple):
        raise ValueError(f"--hf-config: {section}{list_key} = {blocks!r} is not a list of layers")
    check_kind(section, text_key, pattern, str)
    symbols = BLOCKS | LATER_BLOCKS
    for block in blocks:
        allow(section, f"{list_key}[]", block, tuple(symbols))
    for symbol in pattern:
        if symbol not in BLOCKS.values():
            raise ValueError(f"--hf-config: {section}{text_key} = {pattern!r}: symbol {symbol!r} is not supported; "
                             f"supported: {' '.join(BLOCKS.values())}")
    listed = "".join(symbols[block] for block in blocks)
    if listed and pattern and listed != pattern:
        raise ValueError(f"--hf-config: {section}{list_key} = {blocks} and {section}{text_key} = {pattern!r} "
                         "contradict each other: remove the wrong one")
    return listed or pattern


def _check_fixed(values: dict[str, Any], section: str, pattern: str) -> None:
    for kind, fixed in FIXED.items():
        for key, allowed in fixed.items():
            if kind in pattern and key in values:
                allow(section, key, values[key], allowed)
    if MOE in pattern:
        _check_router(values, section)
    if MLP in pattern:
        allow(section, "intermediate_size", type(values["intermediate_size"]).__name__, ("int",))
    limit = values.get("time_step_limit") or (0.0, math.inf)
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        raise ValueError(f"--hf-config: {section}time_step_limit = {limit!r} is not a list of two numbers")
    low, high = limit
    # transformers 5 writes infinity as {"__float__": "Infinity"}.
    high = float(high["__float__"] if isinstance(high, dict) else high)
    if MAMBA in pattern and (low > 0 or high != math.inf):
        raise ValueError(f"--hf-config: {section}time_step_limit = {[low, high]} is not supported; supported: "
                         "[0.0, inf]")
    least = values["time_step_min"]
    if MAMBA in pattern and least > TIME_STEP_MIN:
        raise ValueError(f"--hf-config: {section}time_step_min = {least} is not supported: transformers limits time "
                         f"steps to it and other programs do not; supported: at most {TIME_STEP_MIN}")


def _check_router(values: dict[str, Any], section: str) -> None:
    # Megatron normalizes the weights of several experts, but never a single weight.
    topk, normalized = values["num_experts_per_tok"], values["norm_topk_prob"]
    if topk > 1:
        allow(section, "norm_topk_prob", normalized, (True,))
    elif normalized:
        raise ValueError(f"--hf-config: {section}norm_topk_prob = {normalized} with {section}num_experts_per_tok = "
                         f"{topk} is not supported: it would make every weight 1, from which the router learns "
                         f"nothing; supported: {section}num_experts_per_tok of at least 2, or {section}norm_topk_prob "
                         "= False")
    if not values["routed_scaling_factor"]:
        raise ValueError(f"--hf-config: {section}routed_scaling_factor = {values['routed_scaling_factor']}: "
                         f"{NO_FACTOR}")


def nemotron_config(config: HybridConfig) -> dict[str, Any]:
    """Return the decoder as a `NemotronHConfig`. It has both spellings of the layers; engines read only the text.

    Raises:
        ValueError: a value that transformers' model cannot have.
    """
    if not config.untie_embeddings_and_output_weights:
        raise ValueError("--no-untie-embeddings-and-output-weights: NemotronHForCausalLM has an output layer of its "
                         "own")
    if MOE in config.hybrid_layer_pattern and not config.moe_router_enable_expert_bias:
        raise ValueError("--no-moe-router-enable-expert-bias: NemotronHForCausalLM always reads a bias")
    if MAMBA in config.hybrid_layer_pattern and config.norm_epsilon != MIXER_NORM_EPSILON:
        raise ValueError(f"--norm-epsilon {config.norm_epsilon}: the norms inside of Mamba layers are built with "
                         f"{MIXER_NORM_EPSILON}, and a NemotronHConfig has one value for all norms")
    names = {symbol: name for name, symbol in BLOCKS.items()}
    result: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "num_hidden_layers": config.num_layers,
        "layers_block_type": [names[symbol] for symbol in config.layers],
        "hybrid_override_pattern": config.layers,
        **{theirs: getattr(config, ours) for ours, theirs in RENAMED.items()},
        "moe_latent_size": config.moe_latent_size or None,
        "num_nextn_predict_layers": config.num_mtp_depths,
        "tie_word_embeddings": False, "use_bias": False, "residual_in_fp32": False, "attention_bias": False,
        "sliding_window": None, "conv_kernel": CONV_KERNEL, "use_conv_bias": True, "mamba_hidden_act": "silu",
        "mamba_proj_bias": False, "mlp_hidden_act": "relu2", "mlp_bias": False, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": config.moe_router_topk > 1, "time_step_min": NO_TIME_STEP_MIN,
    }
    if config.num_mtp_depths:
        result |= {"mtp_layers_block_type": [names[symbol] for symbol in config.mtp_layers],
                   "mtp_hybrid_override_pattern": config.mtp_layers}
    return result


def vlm_sizes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a VLM that a `NemotronH_Nano_VL_V2` configuration sets: decoder, encoder, placeholder.

    Args:
        values: the configuration as a dict.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    allow("", "model_type", values.get("model_type", VLM_TYPES[0]), VLM_TYPES)
    refuse_quantized(values, "")
    section = "text_config" if "text_config" in values else "llm_config"
    if not values.get(section):
        raise ValueError(f"--hf-config: {section} is missing")
    token = values.get("img_context_token_id")
    if not isinstance(token, int):
        raise ValueError(f"--hf-config: img_context_token_id = {token!r} is not the token id that stands for an image")
    return {**nemotron_sizes(values[section], f"{section}."), **radio_sizes(values),
            "image_token_id": token}


def language_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `HybridConfig` that the configuration of a VLM or of a text model sets.

    Raises the errors of `nemotron_sizes`.
    """
    refuse_quantized(dict(values), "")
    section = next((name for name in ("text_config", "llm_config") if values.get(name)), None)
    return nemotron_sizes(dict(values)) if section is None else nemotron_sizes(values[section], f"{section}.")


def nemotron_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a text model's or a VLM's configuration by field, where other families have others."""
    text = values.get("text_config") or values.get("llm_config") or values
    layers = next((key for key in ("layers_block_type", "layer_types", "hybrid_override_pattern") if text.get(key)),
                  "layers_block_type")
    return {**RENAMED, "hybrid_layer_pattern": layers, "moe_router_enable_expert_bias": "model_type",
            "image_token_id": "img_context_token_id", **radio_keys(values)}


def encoder_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `RadioConfig` that the configuration of a VLM or of a RADIO encoder sets.

    Raises:
        ValueError: a value that the model cannot reproduce; the message names the key.
    """
    if "vision_config" in values:
        sizes = vlm_sizes(dict(values))
        return {name: value for name, value in sizes.items()
                if name.startswith(("vision_", "projector_"))}
    sizes = radio_sizes({"vision_config": dict(values)})
    # The configuration of an encoder alone does not describe the model around it.
    return {name: value for name, value in sizes.items() if name not in (
        "vision_image_size", "vision_image_width", "vision_dynamic_resolution", "vision_pixel_shuffle",
        "projector_hidden_size", "projector_norm_epsilon")}


def vlm_config(config: Config) -> dict[str, Any]:
    """Return the VLM as a `NemotronH_Nano_VL_V2` configuration.

    Raises:
        ValueError: a value that the published model cannot have.
    """
    return {
        "architectures": [VLM_TYPES[0]],
        "model_type": VLM_TYPES[0],
        "max_sequence_length": config.max_position_embeddings,
        "img_context_token_id": config.image_token_id,
        "img_context_token": "<image>", "img_start_token": "<img>", "img_end_token": "</img>",
        "image_tag_type": "internvl", "use_thumbnail": True, "template": None, "video_pruning_rate": 0.0,
        **radio_config(config),
        "llm_config": nemotron_config(config),
    }
