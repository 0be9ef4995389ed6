"""The weight map of a DeepSeek-V3-style decoder. Imports torch: providers import it inside their methods."""

from __future__ import annotations

from mimo.weights.rules import NamingScheme, Rule, WeightMap
from providers.common.mla import LatentDecoderConfig
from providers.common.weights import GATED_MLP, ROTARY_BUFFERS, TIED_OUTPUT, gated_mlp_rules, outer_rules


def latent_map(config: LatentDecoderConfig) -> WeightMap:
    """Map every tensor of the decoder to the names of `DeepseekV3ForCausalLM`."""
    rules = outer_rules(config)
    for layer, is_moe in enumerate(config.moe_layer_freq):
        megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rules += _attention_rules(config, megatron, hf)
        if is_moe:
            rules += _moe_rules(config, megatron, hf)
        else:
            norm = Rule(megatron + "mlp.linear_fc1.layer_norm_weight", (hf + "post_attention_layernorm.weight",))
            rules += [norm, *_mlp_rules(megatron + "mlp.", hf + "mlp.", config.ffn_hidden_size)]
    ignored = [ROTARY_BUFFERS]
    repeated = () if config.untie_embeddings_and_output_weights else (TIED_OUTPUT,)
    for layer in range(config.num_layers, config.num_layers + config.ignored_mtp_layers):
        ignored.append((rf"^model\.layers\.{layer}\.", "multi-token prediction is not built"))
    return WeightMap(tuple(rules), (NamingScheme("DeepseekV3ForCausalLM"),), tuple(ignored), repeated)


def _attention_rules(config: LatentDecoderConfig, megatron: str, hf: str) -> list[Rule]:
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


def _moe_rules(config: LatentDecoderConfig, megatron: str, hf: str) -> list[Rule]:
    rules = [Rule(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
             Rule(megatron + "mlp.router.weight", (hf + "mlp.gate.weight",)),
             *_mlp_rules(megatron + "mlp.shared_experts.", hf + "mlp.shared_experts.",
                         config.moe_shared_expert_intermediate_size)]
    if config.moe_router_enable_expert_bias:
        rules.append(Rule(megatron + "mlp.router.expert_bias", (hf + "mlp.gate.e_score_correction_bias",),
                          keep_fp32=True))
    for expert in range(config.num_experts):
        rules += _mlp_rules(f"{megatron}mlp.experts.{expert}.", f"{hf}mlp.experts.{expert}.",
                            config.moe_ffn_hidden_size)
    return rules


def _mlp_rules(megatron: str, hf: str, inner: int) -> list[Rule]:
    return gated_mlp_rules(megatron, [f"{hf}{part}_proj.weight" for part in GATED_MLP], inner)
