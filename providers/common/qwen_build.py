"""Megatron spec of the vision tower of Qwen2.5-VL. Imports torch: providers import it inside their methods."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from mimo.model.layer_specs import mlp_linears, norm_builder, vit_layer_spec
from mimo.model.qwen_vision import Qwen25VisionTower, WindowedLayer
from mimo.model.submodule import Projector, VisionSubmodule
from mimo.protocols import BuildContext
from providers.common.build import recompute_fields, transformer_config
from providers.common.qwen_vision import NORM_EPSILON, NUM_CHANNELS, ROTARY_BASE, Qwen25VisionConfig, QwenVisionConfig


def qwen_vision_configs(config: QwenVisionConfig, language_size: int, context: BuildContext, *,
                        normalization: str, **mlp: object) -> tuple[TransformerConfig, TransformerConfig]:
    """Return the configurations of a tower and of its mergers.

    Args:
        config: sizes of tower and mergers.
        language_size: width of the language model.
        context: the encoder's grid, groups and precision.
        normalization: of both, as in `TransformerConfig`.
        mlp: fields of the tower's MLPs.
    """
    norm = {"normalization": normalization, "layernorm_epsilon": NORM_EPSILON}
    # The fused rotary kernel computes positions itself, and knows none of rows and columns.
    tower = replace(transformer_config(
        context, num_layers=config.vision_num_layers, hidden_size=config.vision_hidden_size,
        num_attention_heads=config.vision_num_attention_heads, ffn_hidden_size=config.vision_ffn_hidden_size,
        add_bias_linear=True, add_qkv_bias=True, hidden_dropout=0.0, attention_dropout=0.0, **norm, **mlp,
        **recompute_fields(context)), apply_rope_fusion=False)
    merger = transformer_config(
        context, num_layers=context.grid.pp, hidden_size=language_size, num_attention_heads=context.grid.tp,
        ffn_hidden_size=config.feature_size, activation_func=torch.nn.functional.gelu, add_bias_linear=True, **norm)
    return tower, merger


def qwen_vision_spec(config: Qwen25VisionConfig, name: str, language_size: int, context: BuildContext) -> ModuleSpec:
    """Return the spec of a `VisionSubmodule`: the tower, then RMSNorm of each patch and an MLP of each token.

    Args:
        config: sizes of tower and merger.
        name: name of the encoder inside the module.
        language_size: width of the language model.
        context: the encoder's grid, groups and precision.
    """
    impl = context.transformer_impl
    tower_config, merger_config = qwen_vision_configs(config, language_size, context, normalization="RMSNorm",
                                                      activation_func=torch.nn.functional.silu, gated_linear_unit=True)
    layers = vit_layer_spec(tower_config, impl)
    windowed = [replace(layer, module=WindowedLayer, params={
        **layer.params, "whole_image_layers": frozenset(config.vision_full_attention_layers)})
        for layer in layers.layer_specs]
    encoder = ModuleSpec(module=Qwen25VisionTower, params={
        "config": tower_config, "layer_spec": replace(layers, layer_specs=windowed),
        "patch_size": config.vision_patch_size, "temporal_patch_size": config.vision_temporal_patch_size,
        "merge_size": config.vision_spatial_merge_size, "window_side": config.window_side,
        "num_channels": NUM_CHANNELS, "rotary_base": ROTARY_BASE, "pg_collection": context.groups,
        "pre_process": context.pre_process, "post_process": context.post_process})
    # build_module passes a spec's `submodules` on as a keyword of that name.
    merger = ModuleSpec(module=Projector, submodules=mlp_linears(impl), params={
        "config": merger_config, "input_size": config.feature_size, "pg_collection": context.groups,
        "norm": norm_builder(impl), "norm_size": config.vision_hidden_size})
    return ModuleSpec(module=VisionSubmodule, params={"pg_collection": context.groups},
                      submodules={"encoders": {name: encoder}, "input_projections": [merger]})
