"""Megatron's configuration and spec of a DeepSeek-V3-style decoder. Imports torch."""

from __future__ import annotations

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mimo.model.layer_specs import mixed_decoder_spec
from mimo.protocols import BuildContext
from providers.common.build import decoder_config, language_model_spec
from providers.common.mla import LatentDecoderConfig


def latent_decoder_config(config: LatentDecoderConfig, context: BuildContext | None) -> MLATransformerConfig:
    """Return Megatron's configuration of the decoder. `context` is None on ranks that do not build it."""
    groups: dict[str, object] = {}
    if config.limits_groups:
        groups = {"moe_router_num_groups": config.moe_router_num_groups,
                  "moe_router_group_topk": config.moe_router_group_topk}
    # The scale of the softmax uses the factor and mscale_all_dim also without rope scaling.
    factor = config.rotary_scaling_factor if config.rope_type == "yarn" else 1.0
    built = decoder_config(
        config, context, MLATransformerConfig,
        q_lora_rank=config.q_lora_rank or None, kv_lora_rank=config.kv_lora_rank, qk_head_dim=config.qk_head_dim,
        qk_pos_emb_head_dim=config.qk_pos_emb_head_dim, v_head_dim=config.v_head_dim, rope_type=config.rope_type,
        rotary_base=config.rotary_base, rotary_scaling_factor=factor,
        original_max_position_embeddings=config.original_max_position_embeddings, beta_fast=config.beta_fast,
        beta_slow=config.beta_slow, mscale=config.mscale, mscale_all_dim=config.mscale_all_dim,
        # A list would give each layer its own checkpoint keys, which equal layers do not need.
        moe_layer_freq=config.moe_layer_freq if config.first_k_dense_replace else 1,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_router_score_function=config.moe_router_score_function,
        moe_router_enable_expert_bias=config.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=config.moe_router_bias_update_rate,
        moe_router_topk_scaling_factor=config.moe_router_topk_scaling_factor, **groups)
    assert isinstance(built, MLATransformerConfig)
    return built


def latent_decoder_spec(config: LatentDecoderConfig, context: BuildContext | None) -> ModuleSpec:
    """Return the spec of the decoder.

    Raises:
        ValueError: a tensor-parallel grid without sequence parallelism.
    """
    built, layers = latent_decoder_config(config, context), None
    if context is not None:
        layers = mixed_decoder_spec(built, context.transformer_impl, context.groups.pp.rank(),
                                    config.latent_norm_epsilon)
    return language_model_spec(config, context, built, layers)
