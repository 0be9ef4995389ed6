"""Weight maps of Qwen2.5-VL and Qwen3-VL: towers, mergers, experts in one tensor, and naming schemes of checkpoints.

Rules use the names of a text model (`model.layers.0...`) and those of the tower inside the model
(`visual.blocks.0...`). Imports torch: providers import it inside their methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mimo.weights.rules import Fused, NamingScheme, Rows, Rule, Segment, WeightMap
from providers.common.decoder import DecoderConfig
from providers.common.qwen_vision import Qwen3VisionConfig, Qwen25VisionConfig
from providers.common.weights import CAUSAL_LM, affine, decoder_map, head_major_attention, head_major_layer

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
QWEN3_NAME = "Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration"
QWEN3_LANGUAGE_SCHEMES = (NamingScheme(QWEN3_NAME, ((r"^model\.", "model.language_model."),)), CAUSAL_LM)
QWEN3_VISION_SCHEMES = (NamingScheme(QWEN3_NAME, ((r"^visual\.", "model.visual."),)),)
IGNORED = ((r"(^|\.)rotary_pos_emb\.inv_freq$", "rotary frequencies follow from the configuration"),)


def qwen_vision_map(config: Qwen25VisionConfig | Qwen3VisionConfig, name: str) -> WeightMap:
    """Map every tensor of the tower and of its mergers.

    Args:
        config: its sizes.
        name: name of the encoder inside the module.
    """
    return _qwen3_vision_map(config, name) if isinstance(config, Qwen3VisionConfig) else (
        _qwen25_vision_map(config, name))


def _qwen25_vision_map(config: Qwen25VisionConfig, name: str) -> WeightMap:
    encoder, merger = f"encoders.{name}.", "input_projections.0."
    rules = [Rule(encoder + "conv1.weight", ("visual.patch_embed.proj.weight",))]
    for layer in range(config.vision_num_layers):
        rules += _layer_rules(config, f"{encoder}decoder.layers.{layer}.", f"visual.blocks.{layer}.")
    rules += [Rule(merger + "linear_fc1.layer_norm_weight", ("visual.merger.ln_q.weight",)),
              *affine(merger + "linear_fc1.", "visual.merger.mlp.0."),
              *affine(merger + "linear_fc2.", "visual.merger.mlp.2.")]
    return WeightMap(tuple(rules), VISION_SCHEMES, IGNORED)


def _layer_rules(config: Qwen25VisionConfig, megatron: str, hf: str) -> list[Rule]:
    inner = config.vision_ffn_hidden_size
    return [
        Rule(megatron + "self_attention.linear_qkv.layer_norm_weight", (hf + "norm1.weight",)),
        *head_major_attention(config, megatron, hf),
        Rule(megatron + "mlp.linear_fc1.layer_norm_weight", (hf + "norm2.weight",)),
        *(Rule(f"{megatron}mlp.linear_fc1.{kind}", tuple(f"{hf}mlp.{part}_proj.{kind}" for part in ("gate", "up")),
               Fused(1, (inner, inner))) for kind in ("weight", "bias")),
        *affine(megatron + "mlp.linear_fc2.", hf + "mlp.down_proj."),
    ]


@dataclass(frozen=True)
class ExpertInStack:
    """An expert's matrix in a tensor of all experts, where published files have it transposed.

    transformers 5 saves the matrices as they are, `[experts, rows, columns]`. Both forms are read. The published one is
    written, because transformers and vLLM read it.

    Attributes:
        rows: rows of the matrix here.
        columns: its columns.
    """

    rows: int
    columns: int

    def forms(self) -> list[tuple[int, ...]]:
        """Return the shape of an expert in published files, then in those of transformers 5."""
        return [(1, self.columns, self.rows), (1, self.rows, self.columns)]

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the matrix. Raises ValueError if the shape does not tell whether it is transposed."""
        (part,) = parts
        shape = tuple(part.shape)
        if self.rows == self.columns and shape == (1, self.rows, self.columns):
            raise ValueError(f"experts of {self.rows} x {self.columns} may be transposed or not, and their shape does "
                             "not tell which")
        if shape not in self.forms():
            raise ValueError(f"an expert of shape {list(shape[1:])} is not {self.columns} x {self.rows}")
        return part[0].t() if shape[2] == self.rows else part[0]

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the published form."""
        if tuple(tensor.shape) != (self.rows, self.columns):
            raise ValueError(f"shape {list(tensor.shape)} is not {[self.rows, self.columns]}")
        return [tensor.t().contiguous()[None]]

    def segments(self, rows: int) -> list[Segment] | None:
        """Return None, because rows become columns."""
        return None


def qwen_decoder_map(config: DecoderConfig) -> WeightMap:
    """Map every tensor of the decoder.

    Files of Qwen3-VL hold the experts of a layer in two tensors; engines take them one by one. A text model of its own,
    such as Qwen3MoeForCausalLM, has the names of engines.
    """
    if not isinstance(config, Qwen3VisionConfig):
        return decoder_map(config, LANGUAGE_SCHEMES)
    found = decoder_map(config, QWEN3_LANGUAGE_SCHEMES)
    if not config.num_experts:
        return found
    rules = [rule for rule in found.rules if ".mlp.experts." not in rule.megatron]
    inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
    for layer in range(config.num_layers):
        for name, rows, columns, hf in (("linear_fc1", 2 * inner, hidden, "gate_up_proj"),
                                        ("linear_fc2", hidden, inner, "down_proj")):
            rules += [Rule(f"decoder.layers.{layer}.mlp.experts.{expert}.{name}.weight",
                           (f"model.layers.{layer}.mlp.experts.{hf}",), ExpertInStack(rows, columns),
                           rows=Rows(expert, 1, config.num_experts)) for expert in range(config.num_experts)]
    return replace(found, rules=tuple(rules), engine_rules=found.rules)


def _qwen3_vision_map(config: Qwen3VisionConfig, name: str) -> WeightMap:
    encoder = f"encoders.{name}."
    rules = [*affine(encoder + "conv1.", "visual.patch_embed.proj."),
             Rule(encoder + "position_embeddings.weight", ("visual.pos_embed.weight",))]
    for layer in range(config.vision_num_layers):
        rules += head_major_layer(config, f"{encoder}decoder.layers.{layer}.", f"visual.blocks.{layer}.",
                                  "linear_fc")
    for merger in range(config.num_mergers):
        megatron = f"input_projections.0.projectors.{merger}."
        hf = f"visual.deepstack_merger_list.{merger - 1}." if merger else "visual.merger."
        rules += [*affine(megatron + "linear_fc1.layer_norm_", hf + "norm."),
                  *(rule for number in (1, 2)
                    for rule in affine(f"{megatron}linear_fc{number}.", f"{hf}linear_fc{number}."))]
    return WeightMap(tuple(rules), QWEN3_VISION_SCHEMES, IGNORED)
