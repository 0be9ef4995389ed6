"""The fields of a configuration that decide what a model computes, and their keys in Hugging Face's."""

from __future__ import annotations

import dataclasses
from typing import Any

from mimo.protocols import LANGUAGE
from providers.common.decoder import DecoderConfig
from providers.common.hybrid import ATTENTION, MAMBA, MLP, MOE, HybridConfig
from providers.common.mla import UNUSED as UNUSED_BY_LATENT_ATTENTION
from providers.common.mla import LatentDecoderConfig
from providers.radio import RadioConfig

# Origin of a model, training, storage and the length of sequences. Every other field decides what it computes.
NOT_COMPUTED = frozenset({
    "hf_config", "load_nemotron_checkpoint", "training_stage", "hidden_dropout", "attention_dropout",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor",
    "make_vocab_size_divisible_by", "max_position_embeddings", "ignored_mtp_layers", "vision_num_unused_layers",
    "vision_cpe_augmentation", "video_token_id", "vision_start_token_id",
    "vision_end_token_id",
})
VISION_PREFIXES = ("vision_", "projector_")
YARN = frozenset({"rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
                  "mscale_all_dim"})
# Fields that only layers of one kind use, by the symbol of the kind.
HYBRID_PREFIXES = {MAMBA: ("mamba_",), MOE: ("moe_", "num_experts"), MLP: ("ffn_hidden_size",),
                   ATTENTION: ("num_attention_heads", "num_query_groups", "kv_channels")}
# Field -> key of a Hugging Face configuration with the same meaning, for messages. Families with other keys have
# tables of their own (`FamilyProvider.hf_keys`).
HF_KEYS = {
    "mrope_section": "rope_scaling.mrope_section",
    "rotary_base": "rope_theta", "use_rope_scaling": "rope_scaling", "rope_scaling_factor": "rope_scaling.factor",
    "rotary_scaling_factor": "rope_scaling.factor", "rope_type": "rope_scaling.rope_type",
    "norm_epsilon": "rms_norm_eps", "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim",
    "num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size", "moe_router_topk": "num_experts_per_tok",
    "moe_router_pre_softmax": "norm_topk_prob", "untie_embeddings_and_output_weights": "tie_word_embeddings",
    "moe_router_num_groups": "n_group", "moe_router_group_topk": "topk_group", "qk_layernorm": "model_type",
    "add_qkv_bias": "model_type",
    "vision_hidden_size": "vision_config.hidden_size", "vision_ffn_hidden_size": "vision_config.intermediate_size",
    "vision_num_channels": "vision_config.num_channels",
    "vision_hidden_act": "vision_config.hidden_act", "vision_norm_epsilon": "vision_config.layer_norm_eps",
    **dict.fromkeys(("vision_class_token", "vision_patch_bias", "vision_pre_layernorm"), "vision_config.model_type"),
    "vision_num_layers": "vision_feature_layer", "vision_num_attention_heads": "vision_config.num_attention_heads",
    "vision_image_size": "vision_config.image_size", "vision_patch_size": "vision_config.patch_size",
    "image_token_id": "image_token_index", "vision_pixel_shuffle": "downsample_ratio",
    "vision_window_size": "vision_config.window_size",
    "vision_full_attention_layers": "vision_config.fullatt_block_indexes",
    "vision_image_grid_pinpoints": "image_grid_pinpoints",
    "vision_tokens_per_second": "vision_config.tokens_per_second",
    "vision_num_position_embeddings": "vision_config.num_position_embeddings",
    "vision_deepstack_layers": "vision_config.deepstack_visual_indexes",
}


def computed_fields(config: Any, module: str) -> dict[str, Any]:
    """Return the fields of a resolved configuration that decide what a module computes.

    A field whose default refers to another one (no query groups means as many as heads) has that value. Fields without
    effect, such as those of experts in a dense model, are left out. So equal results mean equal functions.

    Args:
        config: the configuration, with the sizes of `--hf-config` in its fields.
        module: `language`, or the encoder's module, to which the projector belongs.
    """
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)
              if field.name not in NOT_COMPUTED
              and field.name.startswith(VISION_PREFIXES) == (module != LANGUAGE)}
    # A checkpoint's fields come from JSON, which has no tuples.
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    if module != LANGUAGE:
        if "projector_hidden_size" in values:
            values["projector_hidden_size"] = config.projector_hidden_size or config.hidden_size
        if isinstance(config, RadioConfig):
            values["vision_image_width"] = config.image_shape[1]
            unused = {"vision_image_size", "vision_image_width"} if config.vision_dynamic_resolution else set()
            values = {name: value for name, value in values.items() if name not in unused}
        return values
    if isinstance(config, LatentDecoderConfig):
        unused = {*UNUSED_BY_LATENT_ATTENTION, *(YARN if config.rope_type == "rope" else ())}
    elif isinstance(config, DecoderConfig):
        values |= {"num_query_groups": config.query_groups, "kv_channels": config.head_dim}
        unused = set() if config.use_rope_scaling else {"rope_scaling_factor"}
        unused |= {"ffn_hidden_size"} if config.num_experts else {
            name for name in values if name.startswith("moe_")}
    elif isinstance(config, HybridConfig):
        # A model without multi-token prediction can take the weights of one that has it, and computes the same logits.
        values["hybrid_layer_pattern"] = config.layers
        unused = {name for name in values for symbol, prefixes in HYBRID_PREFIXES.items()
                  if name.startswith(prefixes) and symbol not in config.layers}
    else:
        unused = set()
    return {name: value for name, value in values.items() if name not in unused}
