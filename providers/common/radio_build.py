"""Megatron spec of a RADIO encoder and its projector. Imports torch: providers import it inside their methods."""

from __future__ import annotations

from megatron.core.transformer.spec_utils import ModuleSpec

from mimo.model.layer_ops import activation
from mimo.model.layer_specs import norm_builder, vit_layer_spec
from mimo.model.radio import RadioEncoder
from mimo.model.submodule import squared_relu
from mimo.protocols import BuildContext
from providers.common.build import projector_config, projector_spec, submodule_spec, tower_config
from providers.radio import RadioConfig


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
