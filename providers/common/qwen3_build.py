"""Megatron specs of Qwen3-VL. Imports torch: providers import it inside their methods."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from megatron.core.transformer.spec_utils import ModuleSpec

from mimo.model.deepstack import LevelProjectors, decoder_with_levels, encoder_with_levels
from mimo.model.layer_ops import activation
from mimo.model.layer_specs import mlp_linears, norm_builder, vit_layer_spec
from mimo.model.qwen3_vision import Qwen3VisionTower
from mimo.model.submodule import Projector, VisionSubmodule
from mimo.protocols import BuildContext
from providers.common.build import decoder_spec
from providers.common.decoder import MultimodalDecoderConfig
from providers.common.qwen_build import qwen_vision_configs
from providers.common.qwen_vision import NUM_CHANNELS, ROTARY_BASE, Qwen3VisionConfig


def qwen3_decoder_spec(config: MultimodalDecoderConfig, context: BuildContext | None) -> ModuleSpec:
    """Return the spec of the decoder, whose first layers add the levels of the tower.

    Raises:
        ValueError: there are experts on a tensor-parallel grid without sequence parallelism.
    """
    spec = decoder_spec(config, context)
    if context is None:
        return spec
    layers = decoder_with_levels(spec.params["transformer_layer_spec"])
    return replace(spec, params={**spec.params, "transformer_layer_spec": layers})


def qwen3_vision_spec(config: Qwen3VisionConfig, name: str, language_size: int, context: BuildContext) -> ModuleSpec:
    """Return the spec of a `VisionSubmodule`: the tower, then a merger for its output and one for each level.

    Args:
        config: sizes of tower and mergers.
        name: name of the encoder inside the module.
        language_size: width of the language model.
        context: the encoder's grid, groups and precision.
    """
    impl = context.transformer_impl
    tower_config, merger_config = qwen_vision_configs(config, language_size, context, normalization="LayerNorm",
                                                      activation_func=activation(config.vision_hidden_act, impl))
    levels = config.vision_deepstack_layers
    encoder = ModuleSpec(module=Qwen3VisionTower, params={
        "config": tower_config, "layer_spec": encoder_with_levels(vit_layer_spec(tower_config, impl), levels),
        "num_levels": len(levels), "patch_size": config.vision_patch_size,
        "temporal_patch_size": config.vision_temporal_patch_size, "merge_size": config.vision_spatial_merge_size,
        "position_side": isqrt(config.vision_num_position_embeddings), "num_channels": NUM_CHANNELS,
        "rotary_base": ROTARY_BASE, "pg_collection": context.groups, "pre_process": context.pre_process,
        "post_process": context.post_process})
    # The patches of the output are normalized one by one, those of a level as a token.
    mergers = [ModuleSpec(module=Projector, submodules=mlp_linears(impl), params={
        "config": merger_config, "input_size": config.feature_size, "pg_collection": context.groups,
        "norm": norm_builder(impl), "norm_size": norm_size})
        for norm_size in (config.vision_hidden_size, *[config.feature_size] * len(levels))]
    projectors = ModuleSpec(module=LevelProjectors, params={"config": merger_config, "projectors": mergers})
    return ModuleSpec(module=VisionSubmodule, params={"pg_collection": context.groups},
                      submodules={"encoders": {name: encoder}, "input_projections": [projectors]})
