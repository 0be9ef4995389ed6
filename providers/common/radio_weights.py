"""Weight map of a RADIO encoder and its projector.

Rules use the names of a `NemotronH_Nano_VL_V2` checkpoint (`vision_model.radio_model.model.blocks.0...`, `mlp1.1...`).
A separate RADIO model has the same names without `vision_model.` and no projector. Imports torch: providers import it
inside their methods.
"""

from __future__ import annotations

from mimo.weights.rules import NamingScheme, Rule, WeightMap
from providers.common.weights import affine, head_major_layer
from providers.radio import RadioConfig

RADIO = "vision_model.radio_model."
RADIO_SCHEMES = (
    NamingScheme("NemotronH_Nano_VL_V2"),
    NamingScheme("RADIOModel", ((r"^vision_model\.", ""),), optional=(r"^mlp1\.",)),
)
# Tensors that change features (layer scale, feature normalizers) are not among these, so checkpoints with them are
# refused.
RADIO_IGNORED = (
    (r"^(vision_model\.)?radio_model\.input_conditioner\.norm_(mean|std)$",
     "pixels are normalized by the data set"),
    (r"^(vision_model\.)?radio_model\.summary_idxs$", "class tokens are dropped"),
    (r"^(vision_model\.)?radio_model\.model\.patch_generator\.video_embedder\.", "video frames are not embedded"),
    (r"^(vision_model\.)?radio_model\.adaptors\.", "heads that imitate the teachers' features"),
    (r"^sound_(encoder|projection)\.", "the audio side of an omni model"),
)


def radio_map(config: RadioConfig, name: str) -> WeightMap:
    """Map every tensor of the encoder and of its projector.

    The norm after the last layer is `model.norm` of the published definition, which has it only if the encoder's
    arguments have `model_norm`. A model with --vision-final-layernorm refuses a checkpoint without it, and a model
    without refuses one with it, because their features differ even if the norm's weights are ones and zeros.

    Args:
        config: its sizes.
        name: name of the encoder inside the module.
    """
    encoder, model = f"encoders.{name}.", RADIO + "model."
    rules = [Rule(encoder + "embedder.weight", (model + "patch_generator.embedder.weight",)),
             Rule(encoder + "position_embeddings", (model + "patch_generator.pos_embed",))]
    if config.vision_class_token_len:
        rules.append(Rule(encoder + "class_token", (model + "patch_generator.cls_token.token",)))
    if config.vision_final_layernorm:
        rules += affine(encoder + "decoder.final_layernorm.", model + "norm.")
    for layer in range(config.vision_num_layers):
        rules += head_major_layer(config, f"{encoder}decoder.layers.{layer}.", f"{model}blocks.{layer}.", "fc")
    projector = "input_projections.0."
    rules += [Rule(projector + "linear_fc1.layer_norm_weight", ("mlp1.0.weight",)),
              Rule(projector + "linear_fc1.weight", ("mlp1.1.weight",)),
              Rule(projector + "linear_fc2.weight", ("mlp1.3.weight",))]
    return WeightMap(tuple(rules), RADIO_SCHEMES, RADIO_IGNORED)
