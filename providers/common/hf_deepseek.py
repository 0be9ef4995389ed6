"""Convert between a Hugging Face `DeepseekV3Config` and the decoder's flags, without importing transformers."""

from __future__ import annotations

from typing import Any

from providers.common.checks import NO_FACTOR
from providers.common.hf_text import allow, rope_of, with_defaults
from providers.common.mla import LatentDecoderConfig

# Class defaults, which a saved config.json leaves out; a test compares them with the installed transformers.
DEEPSEEK_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_interleave": True, "attention_bias": False,
        # As in transformers 5.19. 5.12 does not know this key, and also ignores the published model's layer.
        "num_nextn_predict_layers": 1,
    },
}
DEFAULT_ROPE_THETA = 10000.0
# transformers uses this epsilon for the norms on compressed queries and keys, whatever rms_norm_eps is.
LATENT_NORM_EPSILON = 1e-6
# Keys of which the decoder here supports only these values. The last four
# are DeepSeek's own, unknown to transformers, and moe_router_dtype is vLLM's.
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",), "attention_bias": (False,), "norm_topk_prob": (True,), "rope_interleave": (True,),
    "partial_rotary_factor": (None, 1, 1.0), "moe_router_dtype": (None, "float32"), "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
}
# Keys that have the same name in both.
RENAMED = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size", "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads", "num_experts": "n_routed_experts",
    "moe_router_topk_scaling_factor": "routed_scaling_factor", "kv_lora_rank": "kv_lora_rank",
    "qk_pos_emb_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim", "qk_head_dim": "qk_nope_head_dim",
    "moe_router_topk": "num_experts_per_tok", "first_k_dense_replace": "first_k_dense_replace",
    "max_position_embeddings": "max_position_embeddings", "norm_epsilon": "rms_norm_eps",
}

# Fields -> keys that other families do not have. Without a key of its own, a value belongs to the type.
HF_KEYS = {
    **RENAMED, "moe_shared_expert_intermediate_size": "n_shared_experts", "moe_router_score_function": "scoring_func",
    "latent_norm_epsilon": "model_type", "moe_router_enable_expert_bias": "model_type",
    **{name: f"rope_scaling.{name}" for name in (
        "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
}


def deepseek_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `LatentDecoderConfig` that a `DeepseekV3Config` sets.

    Args:
        config: the configuration as a dict, keys with their default values may be missing.

    Raises:
        ValueError: a value that the model cannot reproduce, such as quantized weights; the message names the key.
    """
    config = with_defaults(config, "", "deepseek_v3", DEEPSEEK_DEFAULTS)
    for key, allowed in FIXED.items():
        if key in config:
            allow("", key, config[key], allowed)
    if not config["routed_scaling_factor"]:
        raise ValueError(f"--hf-config: routed_scaling_factor = {config['routed_scaling_factor']}: {NO_FACTOR}")
    heads = config["num_attention_heads"]
    allow("", "num_key_value_heads", config.get("num_key_value_heads", heads), (heads, None))
    return {
        **{ours: config[theirs] for ours, theirs in RENAMED.items()},
        "q_lora_rank": config["q_lora_rank"] or 0,
        "latent_norm_epsilon": LATENT_NORM_EPSILON,
        "moe_shared_expert_intermediate_size": config["n_shared_experts"] * config["moe_intermediate_size"],
        "moe_router_num_groups": config["n_group"] or 1,
        "moe_router_group_topk": config["topk_group"] or 1,
        "moe_router_enable_expert_bias": True,
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "ignored_mtp_layers": config["num_nextn_predict_layers"] or 0,
        **_rope_sizes(config),
    }


def _rope_sizes(config: dict[str, Any]) -> dict[str, Any]:
    key, scaling = rope_of(config, "", DEFAULT_ROPE_THETA)
    kind = scaling["rope_type"]
    allow("", f"{key}.rope_type", kind, ("default", "yarn"))
    allow("", f"{key}.partial_rotary_factor", scaling.get("partial_rotary_factor"), (None, 1, 1.0))
    sizes: dict[str, Any] = {"rotary_base": scaling["rope_theta"], "rope_type": "rope"}
    if kind == "default":
        return sizes
    allow("", f"{key}.attention_factor", scaling.get("attention_factor"), (None,))
    allow("", f"{key}.truncate", scaling.get("truncate", True), (True,))
    original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
    mscale, mscale_all_dim = scaling.get("mscale") or 0.0, scaling.get("mscale_all_dim") or 0.0
    if mscale_all_dim and not mscale:
        allow("", f"{key}.mscale", scaling.get("mscale"), ("above 0 with mscale_all_dim",))
    return sizes | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(scaling.get("factor") or config["max_position_embeddings"] / original),
        "original_max_position_embeddings": original,
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        # transformers ignores both unless both are given; the defaults then are 1 and 0.
        "mscale": float(mscale) if mscale_all_dim else 1.0,
        "mscale_all_dim": float(mscale_all_dim),
    }


def deepseek_config(config: LatentDecoderConfig) -> dict[str, Any]:
    """Return the decoder as a `DeepseekV3Config`, in the spelling of the published checkpoints.

    Raises:
        ValueError: a value that transformers' model cannot have.
    """
    if config.latent_norm_epsilon != LATENT_NORM_EPSILON:
        raise ValueError(f"--latent-norm-epsilon {config.latent_norm_epsilon}: DeepseekV3ForCausalLM has "
                         f"{LATENT_NORM_EPSILON} built in")
    if not config.moe_router_enable_expert_bias:
        raise ValueError("--no-moe-router-enable-expert-bias: DeepseekV3ForCausalLM always reads a bias")
    result: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{theirs: getattr(config, ours) for ours, theirs in RENAMED.items()},
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank or None,
        "n_shared_experts": config.moe_shared_expert_intermediate_size // config.moe_ffn_hidden_size,
        "n_group": config.moe_router_num_groups,
        "topk_group": config.moe_router_group_topk,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "hidden_act": "silu", "attention_bias": False, "rope_interleave": True, "num_nextn_predict_layers": 0,
        # Without it, vLLM rounds the router's logits to the model's dtype and chooses other experts than the trainer
        # and transformers, which always route in float32.
        "moe_router_dtype": "float32",
        "rope_theta": config.rotary_base, "rope_scaling": None,
    }
    if config.rope_type == "yarn":
        result["rope_scaling"] = {
            "type": "yarn", "rope_type": "yarn", "factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "beta_fast": config.beta_fast, "beta_slow": config.beta_slow,
            "mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim,
        }
    return result
