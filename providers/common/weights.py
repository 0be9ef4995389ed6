"""Weight maps: decoders of the Llama, Qwen, Mixtral and DeepSeek families, the towers of CLIP, SigLIP and RADIO.

Rules use the names of a text model (`model.layers.0...`, `lm_head.weight`) and of a `CLIPModel` beside LLaVA's
projector (`vision_model.encoder...`, `multi_modal_projector.linear_1...`). Those of RADIO and its projector use the
names of `NemotronH_Nano_VL_V2` (`vision_model.radio_model.model.blocks.0...`, `mlp1.1...`); a separate RADIO model has
no `vision_model.` and no projector. Naming schemes give the names of other checkpoints.

Megatron names are those of Transformer Engine layers, which the local layers also use in checkpoints: the norm before
attention belongs to `self_attention.linear_qkv`, and the norm before a dense MLP to `mlp.linear_fc1`. An expert's layer
is called `mlp.experts.3.linear_fc1.weight` here, whether the model stacks experts or not.

Imports torch: providers import it inside their methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mimo.weights.rules import Direct, Fused, NamingScheme, PaddedRows, Repeated, Rule, Segment, WeightMap
from providers.common.decoder import DecoderConfig
from providers.common.mla import LatentDecoderConfig
from providers.common.qwen_vision import QwenVisionConfig
from providers.common.vision import VisionConfig
from providers.radio import RadioConfig

CAUSAL_LM = NamingScheme("a text model (ForCausalLM)")
LLAVA_LANGUAGE = (
    NamingScheme("LlavaForConditionalGeneration", ((r"^model\.", "language_model.model."),
                                                   (r"^lm_head\.", "language_model.lm_head."))),
    NamingScheme("LlavaForConditionalGeneration of transformers 5 in memory",
                 ((r"^model\.", "model.language_model."),)),
)
# Older checkpoints contain values that are computed from the configuration.
ROTARY_BUFFERS = (r"\brotary_emb\.inv_freq$", "rotary frequencies follow from the configuration")
TIED_OUTPUT = Repeated(
    r"(^|\.)lm_head\.weight$", "embedding.word_embeddings.weight",
    "the output layer is tied to the embedding here, and transformers would take both as they are: set "
    "\"tie_word_embeddings\": false in config.json (in text_config too, where there is one), or without --hf-config "
    "give --untie-embeddings-and-output-weights")
LLAVA_VISION_TENSORS = (r"^(model\.)?(vision_tower\.|multi_modal_projector\.|image_newline$)",
                        "a text model has no encoder")

# The token that ends a row of tokens belongs to LLaVA-NeXT alone.
IN_MEMORY = ((r"^multi_modal_projector\.", "model.multi_modal_projector."), (r"^image_newline$", "model.image_newline"))
LLAVA_VISION = (
    NamingScheme("LlavaForConditionalGeneration", ((r"^vision_model\.", "vision_tower.vision_model."),)),
    NamingScheme("LlavaForConditionalGeneration of transformers 5", ((r"^vision_model\.", "vision_tower."),)),
    NamingScheme("LlavaForConditionalGeneration of transformers 5 in memory", (
        (r"^vision_model\.", "model.vision_tower."), *IN_MEMORY)),
    NamingScheme("LlavaForConditionalGeneration of transformers 4 in memory", (
        (r"^vision_model\.", "model.vision_tower.vision_model."), *IN_MEMORY)),
)
PROJECTOR_MISSING = (r"^multi_modal_projector\.", r"^image_newline$")
VISION_ONLY = (
    NamingScheme("CLIPModel, SiglipModel or a vision model of transformers 4", optional=PROJECTOR_MISSING),
    NamingScheme("CLIPVisionModel or SiglipVisionModel of transformers 5", ((r"^vision_model\.", ""),),
                 optional=PROJECTOR_MISSING),
)
VISION_IGNORED = (
    (r"^text_model\.", "the text side of a CLIP or SigLIP model"),
    (r"^((visual|text)_projection\.weight|logit_scale|logit_bias)$", "CLIP's and SigLIP's joint space"),
    (r"(^|\.)embeddings\.position_ids$", "positions follow from the configuration"),
)


@dataclass(frozen=True)
class HeadMajor:
    """Reorder stacked query, key and value so that they follow each other head by head.

    The tensor of timm and of the Qwen-VL towers has `3 * heads * channels` rows, all queries first. Megatron's tensor
    has query, key and value of head 0, then those of head 1. This applies to axis 0 of weights and biases.

    Attributes:
        heads: attention heads.
        channels: channels of a head.
    """

    heads: int
    channels: int

    def to_megatron(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows in head order."""
        (part,) = parts
        return self._swapped(part, 3, self.heads)

    def to_hf(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows in the order query, key, value."""
        return [self._swapped(tensor, self.heads, 3)]

    def segments(self, rows: int) -> list[Segment]:
        """Return the segments of query, key and value of each head."""
        return [Segment((head * 3 + kind) * self.channels, self.channels, 0, (kind * self.heads + head) * self.channels)
                for head in range(self.heads) for kind in range(3)]

    def _swapped(self, tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
        rows = outer * inner * self.channels
        if tensor.ndim == 0 or tensor.shape[0] != rows:
            raise ValueError(f"shape {list(tensor.shape)} does not have {rows} rows")
        blocks = tensor.reshape(outer, inner, self.channels, *tensor.shape[1:])
        return blocks.transpose(0, 1).flatten(0, 2)


def decoder_map(config: DecoderConfig, schemes: Sequence[NamingScheme]) -> WeightMap:
    """Map every tensor of a decoder of the Llama, Qwen and Mixtral families.

    Mixture-of-experts layers have Qwen's names if queries and keys are normalized, else Mixtral's.

    Args:
        config: its sizes.
        schemes: naming schemes of its checkpoints; the first one is used for export.
    """
    rules = []
    for layer in range(config.num_layers):
        megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rules += attention_rules(config, megatron, hf)
        if config.num_experts:
            rules += moe_rules(config, megatron, hf)
        else:
            rules.append(Rule(megatron + "mlp.linear_fc1.layer_norm_weight", (hf + "post_attention_layernorm.weight",)))
            rules += gated_mlp_rules(megatron + "mlp.", hf + "mlp.", config.ffn_hidden_size)
    repeated = () if config.untie_embeddings_and_output_weights else (TIED_OUTPUT,)
    return WeightMap((*outer_rules(config), *rules), tuple(schemes), (ROTARY_BUFFERS,), repeated)


def outer_rules(config: DecoderConfig) -> list[Rule]:
    """Return the rules of embedding, final norm and, unless it is tied, output layer.

    The number of padding rows assumes a tensor-parallel size that divides --make-vocab-size-divisible-by. Loads and
    exports use the number of the model or the checkpoint.
    """
    vocabulary = PaddedRows(config.vocab_size, config.padded_vocab_size())
    rules = [Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary),
             Rule("decoder.final_layernorm.weight", ("model.norm.weight",))]
    if config.untie_embeddings_and_output_weights:
        rules.append(Rule("output_layer.weight", ("lm_head.weight",), vocabulary))
    return rules


def attention_rules(config: DecoderConfig, megatron: str, hf: str) -> list[Rule]:
    """Return the rules of attention and the norm before it. The prefixes are the layer's, with a dot at the end."""
    head = config.head_dim
    fused = Fused(config.query_groups, (config.num_attention_heads // config.query_groups * head, head, head))
    rules = [Rule(megatron + "self_attention.linear_qkv.layer_norm_weight", (hf + "input_layernorm.weight",)),
             Rule(megatron + "self_attention.linear_proj.weight", (hf + "self_attn.o_proj.weight",))]
    for kind in ("weight", "bias") if config.add_qkv_bias else ("weight",):
        parts = tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv")
        rules.append(Rule(f"{megatron}self_attention.linear_qkv.{kind}", parts, fused))
    if config.qk_layernorm:
        rules += [Rule(f"{megatron}self_attention.{part}_layernorm.weight", (f"{hf}self_attn.{part}_norm.weight",))
                  for part in "qk"]
    return rules


# Names of gate, up and down.
GATED_MLP = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERT = ("w1", "w3", "w2")


def gated_mlp_rules(megatron: str, hf: str, inner: int, parts: Sequence[str] = GATED_MLP) -> list[Rule]:
    """Return the rules of an MLP with a gate.

    Args:
        megatron: prefix of `linear_fc1` and `linear_fc2`.
        hf: prefix of the layers in Hugging Face's names.
        inner: rows of the gate.
        parts: names of gate, up and down there.
    """
    gate, up, down = (f"{hf}{part}.weight" for part in parts)
    return [Rule(megatron + "linear_fc1.weight", (gate, up), Fused(1, (inner, inner))),
            Rule(megatron + "linear_fc2.weight", (down,))]


def moe_rules(config: DecoderConfig, megatron: str, hf: str) -> list[Rule]:
    """Return the rules of router, experts and the norm before them. Prefixes are the layer's, with a dot at the end."""
    block = hf + ("mlp." if config.qk_layernorm else "block_sparse_moe.")
    rules = [Rule(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
             Rule(megatron + "mlp.router.weight", (block + "gate.weight",))]
    for expert in range(config.num_experts):
        rules += gated_mlp_rules(f"{megatron}mlp.experts.{expert}.", f"{block}experts.{expert}.",
                                 config.moe_ffn_hidden_size, GATED_MLP if config.qk_layernorm else MIXTRAL_EXPERT)
    return rules


def latent_map(config: LatentDecoderConfig) -> WeightMap:
    """Map every tensor of the decoder to the names of `DeepseekV3ForCausalLM`."""
    rules = outer_rules(config)
    for layer, is_moe in enumerate(config.moe_layer_freq):
        megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rules += _latent_attention_rules(config, megatron, hf)
        if is_moe:
            rules += _latent_moe_rules(config, megatron, hf)
        else:
            norm = Rule(megatron + "mlp.linear_fc1.layer_norm_weight", (hf + "post_attention_layernorm.weight",))
            rules += [norm, *gated_mlp_rules(megatron + "mlp.", hf + "mlp.", config.ffn_hidden_size)]
    ignored = [ROTARY_BUFFERS]
    repeated = () if config.untie_embeddings_and_output_weights else (TIED_OUTPUT,)
    for layer in range(config.num_layers, config.num_layers + config.ignored_mtp_layers):
        ignored.append((rf"^model\.layers\.{layer}\.", "multi-token prediction is not built"))
    return WeightMap(tuple(rules), (NamingScheme("DeepseekV3ForCausalLM"),), tuple(ignored), repeated)


def _latent_attention_rules(config: LatentDecoderConfig, megatron: str, hf: str) -> list[Rule]:
    """Return the rules of attention.

    The norm before it is a separate layer. The norms of compressed queries, keys and values belong to the layers after
    them. Rotary channels are in pairs on both sides.
    """
    names = {"linear_kv_down_proj.weight": "kv_a_proj_with_mqa",
             "linear_kv_up_proj.layer_norm_weight": "kv_a_layernorm",
             "linear_kv_up_proj.weight": "kv_b_proj", "linear_proj.weight": "o_proj"}
    if config.q_lora_rank:
        names |= {"linear_q_down_proj.weight": "q_a_proj", "linear_q_up_proj.layer_norm_weight": "q_a_layernorm",
                  "linear_q_up_proj.weight": "q_b_proj"}
    else:
        names["linear_q_proj.weight"] = "q_proj"
    return [Rule(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",)),
            *(Rule(f"{megatron}self_attention.{ours}", (f"{hf}self_attn.{theirs}.weight",))
              for ours, theirs in names.items())]


def _latent_moe_rules(config: LatentDecoderConfig, megatron: str, hf: str) -> list[Rule]:
    rules = [Rule(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
             Rule(megatron + "mlp.router.weight", (hf + "mlp.gate.weight",)),
             *gated_mlp_rules(megatron + "mlp.shared_experts.", hf + "mlp.shared_experts.",
                              config.moe_shared_expert_intermediate_size)]
    if config.moe_router_enable_expert_bias:
        rules.append(Rule(megatron + "mlp.router.expert_bias", (hf + "mlp.gate.e_score_correction_bias",),
                          keep_fp32=True))
    for expert in range(config.num_experts):
        rules += gated_mlp_rules(f"{megatron}mlp.experts.{expert}.", f"{hf}mlp.experts.{expert}.",
                                 config.moe_ffn_hidden_size)
    return rules


def vision_map(config: VisionConfig, name: str) -> WeightMap:
    """Map every tensor of a CLIP or SigLIP tower and of its projector.

    Args:
        config: its sizes.
        name: name of the encoder inside the module.
    """
    encoder, hf = f"encoders.{name}.", "vision_model."
    rules = [Rule(encoder + "conv1.weight", (hf + "embeddings.patch_embedding.weight",)),
             Rule(encoder + "position_embeddings.weight", (hf + "embeddings.position_embedding.weight",))]
    if config.vision_patch_bias:
        rules.append(Rule(encoder + "conv1.bias", (hf + "embeddings.patch_embedding.bias",)))
    if config.vision_class_token:
        size = config.vision_hidden_size
        rules.append(Rule(encoder + "class_token", (hf + "embeddings.class_embedding",), Direct((size,), (1, 1, size))))
    if config.vision_pre_layernorm:
        rules += affine(encoder + "ln_pre.", hf + "pre_layrnorm.")  # the name has this spelling
    if config.vision_final_layernorm:
        rules += affine(encoder + "ln_post.", hf + "post_layernorm.")
    for layer in range(config.vision_num_layers):
        rules += _vision_layer(config, f"{encoder}decoder.layers.{layer}.", f"{hf}encoder.layers.{layer}.")
    for number in (1, 2):
        rules += affine(f"input_projections.0.linear_fc{number}.", f"multi_modal_projector.linear_{number}.")
    return WeightMap(tuple(rules), (*LLAVA_VISION, *VISION_ONLY), (*VISION_IGNORED, *_unused_parts(config)))


def _vision_layer(config: VisionConfig, megatron: str, hf: str) -> list[Rule]:
    heads = config.vision_num_attention_heads
    fused = Fused(heads, (config.vision_hidden_size // heads,) * 3)
    rules = affine(megatron + "self_attention.linear_qkv.layer_norm_", hf + "layer_norm1.")
    rules += [Rule(f"{megatron}self_attention.linear_qkv.{kind}",
                   tuple(f"{hf}self_attn.{part}_proj.{kind}" for part in "qkv"), fused) for kind in ("weight", "bias")]
    rules += affine(megatron + "self_attention.linear_proj.", hf + "self_attn.out_proj.")
    rules += affine(megatron + "mlp.linear_fc1.layer_norm_", hf + "layer_norm2.")
    for number in (1, 2):
        rules += affine(f"{megatron}mlp.linear_fc{number}.", f"{hf}mlp.fc{number}.")
    return rules


def head_major_layer(config: RadioConfig | QwenVisionConfig, megatron: str, hf: str, mlp: str) -> list[Rule]:
    """Return the rules of a layer of RADIO and of Qwen3-VL's tower.

    Args:
        config: sizes of the tower.
        megatron: prefix of the layer.
        hf: its prefix in Hugging Face's names.
        mlp: name of the linear layers of the MLP there, without their numbers.
    """
    return [
        *affine(megatron + "self_attention.linear_qkv.layer_norm_", hf + "norm1."),
        *head_major_attention(config, megatron, hf),
        *affine(megatron + "mlp.linear_fc1.layer_norm_", hf + "norm2."),
        *(rule for number in (1, 2) for rule in affine(f"{megatron}mlp.linear_fc{number}.", f"{hf}mlp.{mlp}{number}.")),
    ]


def head_major_attention(config: RadioConfig | QwenVisionConfig, megatron: str, hf: str) -> list[Rule]:
    """Map the attention of a layer, whose fused projection is stored head by head, without its norm."""
    heads = config.vision_num_attention_heads
    fused = HeadMajor(heads, config.vision_hidden_size // heads)
    return [*(Rule(f"{megatron}self_attention.linear_qkv.{kind}", (f"{hf}attn.qkv.{kind}",), fused)
              for kind in ("weight", "bias")),
            *affine(megatron + "self_attention.linear_proj.", hf + "attn.proj.")]


def affine(megatron: str, hf: str) -> list[Rule]:
    """Return the rules of weight and bias under two prefixes."""
    return [Rule(megatron + kind, (hf + kind,)) for kind in ("weight", "bias")]


def _unused_parts(config: VisionConfig) -> list[tuple[str, str]]:
    """Return the tensors of a pretrained tower after the features that the language model uses."""
    tower = r"^((model\.)?vision_tower\.)?(vision_model\.)?"
    first, count = config.vision_num_layers, config.vision_num_unused_layers
    unused = [(tower + r"head\.", "SigLIP's pooling head")]
    if not config.vision_final_layernorm:
        unused.append((tower + r"post_layernorm\.", "the features are taken before the last norm"))
    if count:
        numbers = "|".join(str(layer) for layer in range(first, first + count))
        unused.append((rf"{tower}encoder\.layers\.({numbers})\.", "layers after the one whose features are taken"))
    return unused


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
