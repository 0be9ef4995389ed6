"""Weight map of a Nemotron-H-style decoder. Imports torch: providers import it inside their methods.

Rules use the names of published checkpoints of `NemotronHForCausalLM` (`backbone.layers.0.mixer...`), where a layer of
any kind is a `mixer` after a norm. Megatron names are those of Transformer Engine layers, as in
`providers.common.weights`. A Mamba layer's projection and convolution are one tensor each on the Hugging Face side;
Megatron's checkpoints have separate tensors for z, x, B, C and dt.
"""

from __future__ import annotations

from collections.abc import Sequence

from mimo.weights.rules import Direct, Fused, NamingScheme, PaddedRows, Rule, WeightMap, split_rules
from providers.common.hybrid import ATTENTION, MAMBA, MLP, MOE, HybridConfig
from providers.common.weights import TIED_OUTPUT

TEXT = (
    NamingScheme("NemotronHForCausalLM"),
    # transformers 5 maps `embeddings` back to the name of the first checkpoints when it saves.
    NamingScheme("NemotronHForCausalLM as transformers 5 saves it",
                 ((r"^backbone\.embeddings\.", "backbone.embedding."),)),
)
VLM = (NamingScheme("NemotronH_Nano_VL_V2", ((r"^", "language_model."),)),)
NO_MTP = (r"^(language_model\.)?mtp\.", "the configuration has no multi-token prediction")
VLM_PARTS = (r"^(vision_model|mlp1|sound_encoder|sound_projection)\.", "a text model has no encoder")
# z, x, B, C, dt: `mamba_in_proj_rows`.
PROJECTION_PARTS = ("z", "x", "B", "C", "dt")
CONVOLUTION_PARTS = PROJECTION_PARTS[1:4]


def text_map(config: HybridConfig) -> WeightMap:
    """Map every tensor of the decoder as a text model. The language part of a VLM's checkpoint works too."""
    return _hybrid_map(config, (*TEXT, *VLM), (VLM_PARTS,))


def language_map(config: HybridConfig) -> WeightMap:
    """Map every tensor of the decoder inside a VLM. A text model's checkpoint works too."""
    return _hybrid_map(config, (*VLM, *TEXT))


def _hybrid_map(config: HybridConfig, schemes: Sequence[NamingScheme],
                ignored: tuple[tuple[str, str], ...] = ()) -> WeightMap:
    vocabulary = PaddedRows(config.vocab_size, config.padded_vocab_size())
    rules = [Rule("embedding.word_embeddings.weight", ("backbone.embeddings.weight",), vocabulary),
             Rule("decoder.final_norm.weight", ("backbone.norm_f.weight",))]
    if config.untie_embeddings_and_output_weights:
        rules.append(Rule("output_layer.weight", ("lm_head.weight",), vocabulary))
    for layer, symbol in enumerate(config.layers):
        rules += _layer_rules(config, symbol, f"decoder.layers.{layer}.", f"backbone.layers.{layer}.")
    for depth in range(config.num_mtp_depths):
        rules += _mtp_rules(config, depth)
    if not config.num_mtp_depths:
        ignored = (*ignored, NO_MTP)
    repeated = () if config.untie_embeddings_and_output_weights else (TIED_OUTPUT,)
    return WeightMap(tuple(rules), tuple(schemes), ignored, repeated, stacked_layers=False)


def _layer_rules(config: HybridConfig, symbol: str, megatron: str, hf: str) -> list[Rule]:
    """Return the rules of a layer with the norm before it. The prefixes have a dot at the end."""
    kinds = {MAMBA: _mamba_rules, ATTENTION: _attention_rules, MOE: _moe_rules,
             MLP: lambda config, megatron, hf: _two_layers(megatron + "mlp.", hf)}
    norms = {MAMBA: "mixer.in_proj.layer_norm_weight", ATTENTION: "self_attention.linear_qkv.layer_norm_weight",
             MOE: "pre_mlp_layernorm.weight", MLP: "mlp.linear_fc1.layer_norm_weight"}
    return [Rule(megatron + norms[symbol], (hf + "norm.weight",)),
            *kinds[symbol](config, megatron, hf + "mixer.")]


def _mamba_rules(config: HybridConfig, megatron: str, hf: str) -> list[Rule]:
    mixer, rows = megatron + "mixer.", config.mamba_in_proj_rows
    rules = split_rules([f"{mixer}in_proj.weight.{part}" for part in PROJECTION_PARTS], hf + "in_proj.weight", rows)
    for kind in ("weight", "bias"):
        rules += split_rules([f"{mixer}conv1d.{kind}.{part}" for part in CONVOLUTION_PARTS], f"{hf}conv1d.{kind}",
                             rows[1:4])
    names = ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    return [*rules, *(Rule(mixer + name, (hf + name,)) for name in names)]


def _attention_rules(config: HybridConfig, megatron: str, hf: str) -> list[Rule]:
    queries = config.num_attention_heads // config.query_groups * config.head_dim
    fused = Fused(config.query_groups, (queries, config.head_dim, config.head_dim))
    parts, attention = tuple(f"{hf}{part}_proj.weight" for part in "qkv"), megatron + "self_attention."
    return [Rule(attention + "linear_qkv.weight", parts, fused),
            Rule(attention + "linear_proj.weight", (hf + "o_proj.weight",))]


def _two_layers(megatron: str, hf: str) -> list[Rule]:
    """Return the rules of an MLP without a gate."""
    return [Rule(megatron + "linear_fc1.weight", (hf + "up_proj.weight",)),
            Rule(megatron + "linear_fc2.weight", (hf + "down_proj.weight",))]


def _moe_rules(config: HybridConfig, megatron: str, hf: str) -> list[Rule]:
    mlp = megatron + "mlp."
    rules = [Rule(mlp + "router.weight", (hf + "gate.weight",)),
             *_two_layers(mlp + "shared_experts.", hf + "shared_experts.")]
    if config.moe_router_enable_expert_bias:
        # This buffer is not among the planned parameters, so its shape is given here.
        shape = (config.num_experts,)
        rules.append(Rule(mlp + "router.expert_bias", (hf + "gate.e_score_correction_bias",), Direct(shape, shape),
                          keep_fp32=True))
    if config.moe_latent_size:
        names = [f"{name}_latent_proj.weight" for name in ("fc1", "fc2")]
        rules += [Rule(mlp + name, (hf + name,)) for name in names]
    for expert in range(config.num_experts):
        rules += _two_layers(f"{mlp}experts.{expert}.", f"{hf}experts.{expert}.")
    return rules


def _mtp_rules(config: HybridConfig, depth: int) -> list[Rule]:
    """Return the rules of one depth of multi-token prediction.

    In Hugging Face checkpoints, layers are numbered through all depths. The first layer of a depth also has the weights
    that join embedding and hidden state, and the last one the final norm.
    """
    count, megatron = len(config.mtp_layers), f"mtp.layers.{depth}."
    first, last = f"mtp.layers.{depth * count}.", f"mtp.layers.{(depth + 1) * count - 1}."
    rules = [Rule(f"{megatron}{name}.weight", (f"{first}{name}.weight",)) for name in ("enorm", "hnorm", "eh_proj")]
    rules.append(Rule(megatron + "final_layernorm.weight", (last + "final_layernorm.weight",)))
    for layer, symbol in enumerate(config.mtp_layers):
        rules += _layer_rules(config, symbol, f"{megatron}mtp_model_layer.layers.{layer}.",
                              f"mtp.layers.{depth * count + layer}.")
    return rules
