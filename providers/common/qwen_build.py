"""Megatron specs of the Qwen-VL families. Imports torch: providers import it inside their methods."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from mimo.model.deepstack import LevelProjectors, decoder_with_levels, encoder_with_levels
from mimo.model.layer_ops import activation
from mimo.model.layer_specs import norm_builder, vit_layer_spec
from mimo.model.qwen_vision import Qwen3VisionTower, Qwen25VisionTower, WindowedLayer
from mimo.protocols import BuildContext
from providers.common.build import decoder_spec, projector_config, projector_spec, submodule_spec, tower_config
from providers.common.decoder import MultimodalDecoderConfig
from providers.common.qwen_vision import (
    NORM_EPSILON,
    NUM_CHANNELS,
    ROTARY_BASE,
    Qwen3VisionConfig,
    Qwen25VisionConfig,
    QwenVisionConfig,
)


def qwen_decoder_spec(config: MultimodalDecoderConfig, context: BuildContext | None) -> ModuleSpec:
    """Return the spec of the decoder. The first layers of Qwen3-VL's add the levels of the tower.

    Raises:
        ValueError: there are experts on a tensor-parallel grid without sequence parallelism.
    """
    spec = decoder_spec(config, context)
    if context is None or not isinstance(config, Qwen3VisionConfig):
        return spec
    layers = decoder_with_levels(spec.params["transformer_layer_spec"])
    return replace(spec, params={**spec.params, "transformer_layer_spec": layers})


def qwen_vision_spec(config: Qwen25VisionConfig | Qwen3VisionConfig, name: str, language_size: int,
                     context: BuildContext) -> ModuleSpec:
    """Return the spec of a `VisionSubmodule`.

    Args:
        config: sizes of tower and mergers.
        name: name of the encoder inside the module.
        language_size: width of the language model.
        context: the encoder's grid, groups and precision.
    """
    build = _qwen3_vision_spec if isinstance(config, Qwen3VisionConfig) else _qwen25_vision_spec
    return build(config, name, language_size, context)


def _qwen25_vision_spec(config: Qwen25VisionConfig, name: str, language_size: int,
                        context: BuildContext) -> ModuleSpec:
    """Return the tower, then RMSNorm of each patch and an MLP of each token."""
    tower, merger = _transformers(config, language_size, context, normalization="RMSNorm",
                                  activation_func=torch.nn.functional.silu, gated_linear_unit=True)
    layers = vit_layer_spec(tower, context.transformer_impl)
    windowed = [replace(layer, module=WindowedLayer, params={
        **layer.params, "whole_image_layers": frozenset(config.vision_full_attention_layers)})
        for layer in layers.layer_specs]
    encoder = ModuleSpec(module=Qwen25VisionTower, params=_tower_params(config, tower, context) | {
        "layer_spec": replace(layers, layer_specs=windowed), "window_side": config.window_side})
    return submodule_spec(name, encoder, _merger(config, merger, config.vision_hidden_size, context), context)


def _qwen3_vision_spec(config: Qwen3VisionConfig, name: str, language_size: int, context: BuildContext) -> ModuleSpec:
    """Return the tower, then a merger for its output and one for each level."""
    impl = context.transformer_impl
    tower, merger = _transformers(config, language_size, context, normalization="LayerNorm",
                                  activation_func=activation(config.vision_hidden_act, impl))
    levels = config.vision_deepstack_layers
    encoder = ModuleSpec(module=Qwen3VisionTower, params=_tower_params(config, tower, context) | {
        "layer_spec": encoder_with_levels(vit_layer_spec(tower, impl), levels), "num_levels": len(levels),
        "position_side": isqrt(config.vision_num_position_embeddings), "conv_bias": True})
    # The patches of the output are normalized one by one, and the patches of a level as one token.
    mergers = [_merger(config, merger, norm_size, context)
               for norm_size in (config.vision_hidden_size, *[config.feature_size] * len(levels))]
    projectors = ModuleSpec(module=LevelProjectors, params={"config": merger, "projectors": mergers})
    return submodule_spec(name, encoder, projectors, context)


def _transformers(config: QwenVisionConfig, language_size: int, context: BuildContext, *, normalization: str,
                  **mlp: object) -> tuple[TransformerConfig, TransformerConfig]:
    """Return the configurations of a tower and of its mergers.

    `normalization` is that of both, `mlp` are fields of the tower's MLPs.
    """
    norm = {"normalization": normalization, "layernorm_epsilon": NORM_EPSILON}
    # Megatron Core's fused path counts positions itself, and has none of rows and columns; `apply_rotary` takes them.
    tower = replace(tower_config(config, context, **norm, **mlp), apply_rope_fusion=False)
    merger = projector_config(context, language_size, config.feature_size, **norm)
    return tower, merger


def _tower_params(config: QwenVisionConfig, transformer: TransformerConfig, context: BuildContext) -> dict[str, Any]:
    return {"config": transformer, "patch_size": config.vision_patch_size,
            "temporal_patch_size": config.vision_temporal_patch_size, "merge_size": config.vision_spatial_merge_size,
            "num_channels": NUM_CHANNELS, "rotary_base": ROTARY_BASE, "pg_collection": context.groups,
            "pre_process": context.pre_process, "post_process": context.post_process}


def _merger(config: QwenVisionConfig, transformer: TransformerConfig, norm_size: int, context: BuildContext) -> (
        ModuleSpec):
    return projector_spec(transformer, config.feature_size, context, norm=norm_builder(context.transformer_impl),
                          norm_size=norm_size)
