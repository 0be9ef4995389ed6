"""Weight maps of Qwen2.5-VL: the tower and merger, and the naming schemes of its checkpoints.

Rules use the names of published checkpoints (`model.layers.0...`, `visual.blocks.0...`), which transformers
also writes. Imports torch: providers import it inside their methods.
"""

from __future__ import annotations

from mimo.weights.rules import Fused, NamingScheme, Rule, WeightMap
from providers.common.qwen_vision import Qwen25VisionConfig, QwenVisionConfig
from providers.common.weights import HeadMajor, affine

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
# A text model of its own, such as Qwen2ForCausalLM, has the names of the first scheme.
LANGUAGE_SCHEMES = (
    NamingScheme(ARCHITECTURE),
    NamingScheme(f"{ARCHITECTURE} of transformers 5 in memory", ((r"^model\.", "model.language_model."),)),
)
VISION_SCHEMES = (
    NamingScheme(ARCHITECTURE),
    NamingScheme(f"{ARCHITECTURE} of transformers 5 in memory", ((r"^visual\.", "model.visual."),)),
)
IGNORED = ((r"(^|\.)rotary_pos_emb\.inv_freq$", "rotary frequencies follow from the configuration"),)


def qwen_vision_map(config: Qwen25VisionConfig, name: str) -> WeightMap:
    """Map every tensor of the tower and of its merger.

    Args:
        config: its sizes.
        name: name of the encoder inside the module.
    """
    encoder, merger = f"encoders.{name}.", "input_projections.0."
    rules = [Rule(encoder + "conv1.weight", ("visual.patch_embed.proj.weight",))]
    for layer in range(config.vision_num_layers):
        rules += _layer_rules(config, f"{encoder}decoder.layers.{layer}.", f"visual.blocks.{layer}.")
    rules += [Rule(merger + "linear_fc1.layer_norm_weight", ("visual.merger.ln_q.weight",)),
              *affine(merger + "linear_fc1.", "visual.merger.mlp.0."),
              *affine(merger + "linear_fc2.", "visual.merger.mlp.2.")]
    return WeightMap(tuple(rules), VISION_SCHEMES, IGNORED)


def attention_rules(config: QwenVisionConfig, megatron: str, hf: str) -> list[Rule]:
    """Map the attention of a layer of either family's tower, without its norm."""
    heads = config.vision_num_attention_heads
    fused = HeadMajor(heads, config.vision_hidden_size // heads)
    return [*(Rule(f"{megatron}self_attention.linear_qkv.{kind}", (f"{hf}attn.qkv.{kind}",), fused)
              for kind in ("weight", "bias")),
            *affine(megatron + "self_attention.linear_proj.", hf + "attn.proj.")]


def _layer_rules(config: Qwen25VisionConfig, megatron: str, hf: str) -> list[Rule]:
    inner = config.vision_ffn_hidden_size
    return [
        Rule(megatron + "self_attention.linear_qkv.layer_norm_weight", (hf + "norm1.weight",)),
        *attention_rules(config, megatron, hf),
        Rule(megatron + "mlp.linear_fc1.layer_norm_weight", (hf + "norm2.weight",)),
        *(Rule(f"{megatron}mlp.linear_fc1.{kind}", tuple(f"{hf}mlp.{part}_proj.{kind}" for part in ("gate", "up")),
               Fused(1, (inner, inner))) for kind in ("weight", "bias")),
        *affine(megatron + "mlp.linear_fc2.", hf + "mlp.down_proj."),
    ]
