"""Megatron configurations and specs of the shared parts. Imports torch: providers import it inside their methods."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mimo.grid.spec import GridSpec
from mimo.model.language import LanguageModel
from mimo.model.layer_ops import activation
from mimo.model.layer_specs import (
    decoder_layer_spec,
    mixed_decoder_spec,
    mlp_linears,
    norm_builder,
    vit_layer_spec,
)
from mimo.model.radio import RadioEncoder
from mimo.model.submodule import Projector, VisionSubmodule, squared_relu
from mimo.model.vit import ViT
from mimo.protocols import LANGUAGE, BuildContext
from providers.common.decoder import DecoderConfig, LanguageConfig, MultimodalDecoderConfig
from providers.common.mla import LatentDecoderConfig
from providers.common.vision import VisionConfig
from providers.radio import RadioConfig

if TYPE_CHECKING:
    from providers.common.hybrid import HybridConfig
    from providers.common.qwen_vision import QwenVisionConfig


def transformer_config(context: BuildContext | None, kind: type[TransformerConfig] = TransformerConfig,
                       *, shares_rows: bool = False, **sizes: object) -> TransformerConfig:
    """Return a TransformerConfig with the fields that every module shares.

    Args:
        context: the module's grid, groups and precision; None gives a single-process float32 configuration, for ranks
            that only read sizes.
        kind: the configuration's class.
        shares_rows: whether every layer of a language model gives the right result if context-parallel ranks have
            parts of each row. Otherwise --llm-cp above 1 is refused.
        sizes: fields of the particular module.
    """
    grid = GridSpec(LANGUAGE) if context is None else context.grid
    dtype = torch.float32 if context is None else context.params_dtype
    impl = "local" if context is None else context.transformer_impl
    fused = impl == "transformer_engine"
    shared = shares_rows and grid.name == LANGUAGE
    _check_recomputed(sizes, kind, impl)
    if sizes.get("moe_shared_expert_overlap"):
        if not sizes.get("moe_shared_expert_intermediate_size"):
            raise ValueError("--moe-shared-expert-overlap: the model has no shared experts; leave it out")
        if sizes.get("moe_latent_size"):
            raise ValueError(f"--moe-shared-expert-overlap with --moe-latent-size {sizes['moe_latent_size']}: Megatron "
                             "Core cannot overlap shared experts with latent ones; leave it out")
    # Latent attention has positions only on a part of its channels, in another order. Megatron Core's fused path counts
    # positions itself, from the start of each packed sequence, which is wrong for positions of three axes. These go
    # through `mimo.model.layer_ops.apply_rotary`.
    fused_rotary = fused and kind is TransformerConfig and "mrope_section" not in sizes
    if fused and context is not None and context.fp8 is not None:
        sizes |= {"fp8": context.fp8.format, "fp8_recipe": context.fp8.recipe}
    # Megatron Core refuses to gather tokens if lengths vary. Here, rows all have --seq-length tokens where tokens are
    # gathered (`mimo.config.validate.row_multiple`).
    gathers = sizes.pop("moe_token_dispatcher_type", "alltoall") == "allgather"
    built = kind(
        tensor_model_parallel_size=grid.tp, pipeline_model_parallel_size=grid.pp,
        # Context-parallel ranks of a homogeneous layout each run the whole encoder.
        context_parallel_size=grid.cp if shared else 1,
        cp_comm_type="p2p" if context is None else context.cp_comm_type,
        params_dtype=dtype, pipeline_dtype=dtype, autocast_dtype=dtype, bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True, transformer_impl=impl,
        deterministic_mode=context is not None and context.deterministic,
        variable_seq_lengths=not gathers, moe_token_dispatcher_type="allgather" if gathers else "alltoall",
        # The weight gradient of the output layer is added straight to main_grad if apex's kernel is installed. Those of
        # other layers always are (mimo.model.layer_ops).
        gradient_accumulation_fusion=fused and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        # PyTorch compiles this kernel, and a call takes the host a quarter of a millisecond. Without dropout, only the
        # residual is left to add: decoders have no biases, and products add those of encoders (mimo.model.layer_ops).
        bias_dropout_fusion=fused and sizes.get("hidden_dropout", kind.hidden_dropout) > 0,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused_rotary,
        cross_entropy_loss_fusion=fused, cross_entropy_fusion_impl="te",
        **sizes)  # type: ignore[arg-type]
    built.variable_seq_lengths = True
    return built


def _check_recomputed(sizes: Mapping[str, Any], kind: type[TransformerConfig], impl: str) -> None:
    """Raise ValueError for parts that Megatron Core cannot recompute in layers of this kind."""
    parts = sizes.get("recompute_modules", ())
    if "moe_act" in parts and not sizes.get("moe_grouped_gemm"):
        why = ("local layers compute experts one by one; use moe" if sizes.get("num_moe_experts") and impl == "local"
               else "the model has no experts in Transformer Engine's layers; leave moe_act out")
        raise ValueError(f"--recompute-modules {','.join(parts)}: {why}")
    if "mla_up_proj" in parts and not issubclass(kind, MLATransformerConfig):
        raise ValueError(f"--recompute-modules {','.join(parts)}: the model has no latent attention; leave mla_up_proj "
                         "out")


def recompute_fields(context: BuildContext | None) -> dict[str, object]:
    """Return Megatron's fields for --recompute and its companions."""
    if context is None or context.recompute == "none":
        return {}
    if context.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(context.recompute_modules)}
    if context.recompute_num_layers is not None:
        return {"recompute_granularity": "full", "recompute_method": "block",
                "recompute_num_layers": context.recompute_num_layers}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def decoder_config(config: DecoderConfig, context: BuildContext | None,
                   kind: type[TransformerConfig] = TransformerConfig, **sizes: object) -> TransformerConfig:
    """Return Megatron's configuration of the decoder.

    Args:
        config: its sizes.
        context: None on ranks that do not build it.
        kind: the configuration's class.
        sizes: fields of a particular family, which override those that all families share.
    """
    fused = context is not None and context.transformer_impl == "transformer_engine"
    shared = language_fields(config, context) | {
        "activation_func": torch.nn.functional.silu, "gated_linear_unit": True, "bias_activation_fusion": fused,
        "add_qkv_bias": config.add_qkv_bias, "qk_layernorm": config.qk_layernorm}
    if isinstance(config, MultimodalDecoderConfig):
        shared["mrope_section"] = list(config.mrope_section)
    if context is not None and context.grid.stage_layers:
        shared |= {"num_layers_in_first_pipeline_stage": context.grid.stage_layers[0],
                   "num_layers_in_last_pipeline_stage": context.grid.stage_layers[-1]}
    if config.num_experts:
        shared |= expert_fields(config, context) | {
            "moe_router_pre_softmax": config.moe_router_pre_softmax, "moe_grouped_gemm": fused}
    return transformer_config(context, kind, shares_rows=True, **(shared | sizes))


def language_fields(config: DecoderConfig | HybridConfig, context: BuildContext | None) -> dict[str, object]:
    """Return the fields of a TransformerConfig that the language models of all families set."""
    return {
        "num_layers": config.num_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads, "num_query_groups": config.query_groups,
        "ffn_hidden_size": config.ffn_hidden_size, "kv_channels": config.head_dim, "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_epsilon, "add_bias_linear": False, "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "sequence_parallel": context is not None and context.sequence_parallel, **recompute_fields(context)}


def expert_fields(config: DecoderConfig | HybridConfig, context: BuildContext | None) -> dict[str, object]:
    """Return the fields of a TransformerConfig that routers and experts of all families set."""
    fields: dict[str, object] = {
        "num_moe_experts": config.num_experts, "moe_router_topk": config.moe_router_topk,
        "moe_ffn_hidden_size": config.moe_ffn_hidden_size, "moe_aux_loss_coeff": config.moe_aux_loss_coeff,
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type, "moe_router_dtype": "fp32"}
    if context is not None:
        fields |= {
            "expert_model_parallel_size": context.grid.ep, "expert_tensor_parallel_size": context.grid.expt_tp,
            "moe_permute_fusion": context.moe_permute_fusion, "moe_router_fusion": context.moe_router_fusion,
            "moe_token_dispatcher_type": context.moe_token_dispatcher_type,
            "moe_shared_expert_overlap": context.moe_shared_expert_overlap}
    return fields


def decoder_spec(config: DecoderConfig, context: BuildContext | None) -> ModuleSpec:
    """Return the spec of a decoder of the Llama, Qwen and Mixtral families.

    Raises:
        ValueError: there are experts on a tensor-parallel grid without sequence parallelism.
    """
    megatron_config = decoder_config(config, context)
    layers = None if context is None else decoder_layer_spec(
        megatron_config, context.transformer_impl, context.groups.pp.rank())
    return language_model_spec(config, context, megatron_config, layers)


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


def language_model_spec(config: DecoderConfig, context: BuildContext | None, megatron_config: TransformerConfig,
                        layers: TransformerBlockSubmodules | None) -> ModuleSpec:
    """Return the spec of a `LanguageModel`.

    Args:
        config: vocabulary, positions and tying.
        context: None on ranks that only read `params["config"]`.
        megatron_config: sizes of the layers.
        layers: this stage's layers; None where `context` is.

    Raises:
        ValueError: there are experts on a tensor-parallel grid without sequence parallelism.
    """
    if context is None:
        return ModuleSpec(module=LanguageModel, params={"config": megatron_config})
    tp = context.grid.tp
    if config.num_experts and tp > 1 and not context.sequence_parallel:
        raise ValueError(f"--num-experts {config.num_experts} with --llm-tp {tp} needs --sequence-parallel")
    multimodal = isinstance(config, MultimodalDecoderConfig)
    return ModuleSpec(module=LanguageModel, params=language_params(config, context) | {
        "config": megatron_config,
        "transformer_layer_spec": layers,
        "position_embedding_type": "mrope" if multimodal else "rope",
        "interleaved_sections": multimodal and config.interleaved_sections,
        "rotary_base": config.rotary_base,
        "rope_scaling": config.use_rope_scaling,
        "rope_scaling_factor": config.rope_scaling_factor,
    })


def language_params(config: LanguageConfig, context: BuildContext) -> dict[str, Any]:
    """Return the arguments that all language models take: vocabulary, stage and groups."""
    return {
        "vocab_size": config.padded_vocab_size(context.grid.tp),
        "true_vocab_size": config.vocab_size,
        "max_sequence_length": context.seq_length,
        "pre_process": context.pre_process,
        "post_process": context.post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not config.untie_embeddings_and_output_weights,
        # MimoModel scatters the merged sequence itself, not only the text tokens.
        "scatter_embedding_sequence_parallel": False,
        "pg_collection": context.groups,
    }


def vision_spec(config: VisionConfig, name: str, projector_size: int, language_size: int,
                context: BuildContext) -> ModuleSpec:
    """Return the spec of a `VisionSubmodule`: a ViT and its projector.

    Args:
        config: encoder sizes.
        name: name of the encoder inside the module.
        projector_size: inner width of the projector.
        language_size: width of the language model.
        context: the encoder's grid, groups and precision.
    """
    impl = context.transformer_impl
    vit_config = tower_config(config, context, normalization="LayerNorm", layernorm_epsilon=config.vision_norm_epsilon,
                              activation_func=activation(config.vision_hidden_act, impl))
    encoder = ModuleSpec(module=ViT, params={
        "config": vit_config, "layer_spec": vit_layer_spec(vit_config, impl), "norm": norm_builder(impl),
        "image_size": config.vision_image_size, "patch_size": config.vision_patch_size,
        "num_channels": config.vision_num_channels, "patch_bias": config.vision_patch_bias,
        "class_token": config.vision_class_token, "pre_layernorm": config.vision_pre_layernorm,
        "final_layernorm": config.vision_final_layernorm, "pg_collection": context.groups,
        "pre_process": context.pre_process, "post_process": context.post_process,
        "dynamic_resolution": config.vision_dynamic_resolution, "pixel_shuffle": config.vision_pixel_shuffle})
    projector = projector_spec(projector_config(context, language_size, projector_size), config.feature_size, context)
    return submodule_spec(name, encoder, projector, context)


def radio_spec(config: RadioConfig, name: str, language_size: int, context: BuildContext) -> ModuleSpec:
    """Return the spec of a `VisionSubmodule`: RADIO, then RMSNorm and an MLP with squared ReLU and without biases.

    Args:
        config: sizes of encoder and projector.
        name: name of the encoder inside the module.
        language_size: width of the language model.
        context: the encoder's grid, groups and precision.
    """
    impl = context.transformer_impl
    encoder_config = tower_config(
        config, context, normalization="LayerNorm", layernorm_epsilon=config.vision_norm_epsilon,
        activation_func=activation(config.vision_hidden_act, impl),
        # 0 prediction layers and None differ. Only with 0 does Megatron Core put the final norm after the last layer of
        # a block that is not built as a model's last stage, as RADIO's is not.
        mtp_num_layers=0 if config.vision_final_layernorm else None)
    encoder = ModuleSpec(module=RadioEncoder, params={
        "config": encoder_config, "layer_spec": vit_layer_spec(encoder_config, impl),
        "patch_size": config.vision_patch_size, "image_size": config.image_shape,
        "max_image_size": config.vision_max_image_size, "class_token_len": config.vision_class_token_len,
        "pg_collection": context.groups, "dynamic_resolution": config.vision_dynamic_resolution,
        "pixel_shuffle": config.vision_pixel_shuffle, "cpe_augmentation": config.vision_cpe_augmentation})
    projector = projector_config(
        context, language_size, config.projector_hidden_size, activation_func=squared_relu, add_bias_linear=False,
        normalization="RMSNorm", layernorm_epsilon=config.projector_norm_epsilon)
    return submodule_spec(name, encoder, projector_spec(projector, config.feature_size, context,
                                                        norm=norm_builder(impl)), context)


def tower_config(config: VisionConfig | RadioConfig | QwenVisionConfig, context: BuildContext,
                 **sizes: object) -> TransformerConfig:
    """Return Megatron's configuration of an encoder's layers. `sizes` are fields in which the encoders differ."""
    return transformer_config(
        context, num_layers=config.vision_num_layers, hidden_size=config.vision_hidden_size,
        num_attention_heads=config.vision_num_attention_heads, ffn_hidden_size=config.vision_ffn_hidden_size,
        add_bias_linear=True, add_qkv_bias=True, hidden_dropout=0.0, attention_dropout=0.0,
        **sizes, **recompute_fields(context))


def projector_config(context: BuildContext, language_size: int, inner_size: int, **sizes: object) -> TransformerConfig:
    """Return Megatron's configuration of a projector, by default one with GELU and biases."""
    return transformer_config(context, **{
        "num_layers": context.grid.pp, "hidden_size": language_size, "num_attention_heads": context.grid.tp,
        "ffn_hidden_size": inner_size, "activation_func": torch.nn.functional.gelu, "add_bias_linear": True, **sizes})


def projector_spec(config: TransformerConfig, feature_size: int, context: BuildContext, **params: object) -> ModuleSpec:
    """Return the spec of a `Projector` of tokens with `feature_size` channels. `params` are further arguments of it."""
    # build_module passes a spec's `submodules` on as a keyword of that name.
    return ModuleSpec(module=Projector, submodules=mlp_linears(context.transformer_impl), params={
        "config": config, "input_size": feature_size, "pg_collection": context.groups, **params})


def submodule_spec(name: str, encoder: ModuleSpec, projector: ModuleSpec, context: BuildContext) -> ModuleSpec:
    """Return the spec of a `VisionSubmodule` of one encoder, called `name` in it, and what projects its output."""
    return ModuleSpec(module=VisionSubmodule, params={"pg_collection": context.groups},
                      submodules={"encoders": {name: encoder}, "input_projections": [projector]})
