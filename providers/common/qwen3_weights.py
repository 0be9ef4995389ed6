"""Weight maps of Qwen3-VL: the tower and its mergers, and the naming schemes of its checkpoints.

Rules use the names of a text model of its own (`model.layers.0...`) and those of the tower inside the model
(`visual.blocks.0...`). Imports torch: providers import it inside their methods.
"""

from __future__ import annotations

from mimo.weights.rules import NamingScheme, Rule, WeightMap
from providers.common.qwen3_vision import Qwen3VisionConfig
from providers.common.weights import CAUSAL_LM, HeadMajor, affine

NAME = "Qwen3VLForConditionalGeneration"
LANGUAGE_SCHEMES = (NamingScheme(NAME, ((r"^model\.", "model.language_model."),)), CAUSAL_LM)
VISION_SCHEMES = (NamingScheme(NAME, ((r"^visual\.", "model.visual."),)),)
IGNORED = ((r"(^|\.)rotary_pos_emb\.inv_freq$", "rotary frequencies follow from the configuration"),)


def qwen3_vision_map(config: Qwen3VisionConfig, name: str) -> WeightMap:
    """Map every tensor of the tower and of its mergers.

    Args:
        config: its sizes.
        name: name of the encoder inside the module.
    """
    encoder = f"encoders.{name}."
    rules = [*affine(encoder + "conv1.", "visual.patch_embed.proj."),
             Rule(encoder + "position_embeddings.weight", ("visual.pos_embed.weight",))]
    for layer in range(config.vision_num_layers):
        rules += _layer_rules(config, f"{encoder}decoder.layers.{layer}.", f"visual.blocks.{layer}.")
    for merger in range(config.num_mergers):
        megatron = f"input_projections.0.projectors.{merger}."
        hf = f"visual.deepstack_merger_list.{merger - 1}." if merger else "visual.merger."
        rules += [*affine(megatron + "linear_fc1.layer_norm_", hf + "norm."),
                  *(rule for number in (1, 2)
                    for rule in affine(f"{megatron}linear_fc{number}.", f"{hf}linear_fc{number}."))]
    return WeightMap(tuple(rules), VISION_SCHEMES, IGNORED)


def _layer_rules(config: Qwen3VisionConfig, megatron: str, hf: str) -> list[Rule]:
    heads = config.vision_num_attention_heads
    fused = HeadMajor(heads, config.vision_hidden_size // heads)
    return [
        *affine(megatron + "self_attention.linear_qkv.layer_norm_", hf + "norm1."),
        *(Rule(f"{megatron}self_attention.linear_qkv.{kind}", (f"{hf}attn.qkv.{kind}",), fused)
          for kind in ("weight", "bias")),
        *affine(megatron + "self_attention.linear_proj.", hf + "attn.proj."),
        *affine(megatron + "mlp.linear_fc1.layer_norm_", hf + "norm2."),
        *(rule for number in (1, 2)
          for rule in affine(f"{megatron}mlp.linear_fc{number}.", f"{hf}mlp.linear_fc{number}.")),
    ]
