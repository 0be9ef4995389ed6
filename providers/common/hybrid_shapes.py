"""Parameters of a Nemotron-H-style decoder, for planning."""

from __future__ import annotations

from dataclasses import replace

from mimo.protocols import ParameterShape
from providers.common.hybrid import ATTENTION, CONV_KERNEL, MAMBA, MLP, MOE, HybridConfig


def hybrid_shapes(config: HybridConfig) -> list[ParameterShape]:
    """Return every parameter of the decoder. The vocabulary has its padding rows, and tied embeddings count once."""
    hidden, rows = config.hidden_size, config.padded_vocab_size()
    shapes = [ParameterShape("embedding.word_embeddings.weight", (rows, hidden), 1, "tp", "first"),
              *layer_shapes(config),
              ParameterShape("decoder.final_norm.weight", (hidden,), 1, "none", "last")]
    if config.num_mtp_depths:
        shapes += _mtp_shapes(config)
    if config.untie_embeddings_and_output_weights:
        shapes.append(ParameterShape("output_layer.weight", (rows, hidden), 1, "tp", "last"))
    return shapes


def layer_shapes(config: HybridConfig) -> list[ParameterShape]:
    """Return every parameter of the decoder's layers. Planning spreads layers of each kind evenly over the stages."""
    kinds = {MAMBA: mamba_shapes, ATTENTION: _attention_shapes, MOE: _moe_shapes, MLP: _mlp_shapes}
    return [shape for symbol, shapes in kinds.items() if config.counts[symbol]
            for shape in shapes(config, config.counts[symbol])]


def _linear(name: str, rows: int, columns: int, count: int, split: str = "tp") -> ParameterShape:
    return ParameterShape(f"{name}.weight", (rows, columns), count, split)


def mamba_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    """Return every parameter of `count` Mamba-2 layers."""
    hidden, heads = config.hidden_size, config.mamba_num_heads
    return [
        ParameterShape("mixer.in_proj.layer_norm_weight", (hidden,), count),
        _linear("mixer.in_proj", sum(config.mamba_in_proj_rows), hidden, count),
        ParameterShape("mixer.conv1d.weight", (config.mamba_conv_size, 1, CONV_KERNEL), count, "tp"),
        ParameterShape("mixer.conv1d.bias", (config.mamba_conv_size,), count, "tp"),
        *(ParameterShape(f"mixer.{name}", (heads,), count, "tp") for name in ("A_log", "D", "dt_bias")),
        ParameterShape("mixer.norm.weight", (config.mamba_inner_size,), count, "tp"),
        _linear("mixer.out_proj", hidden, config.mamba_inner_size, count),
    ]


def _attention_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    return [ParameterShape("self_attention.linear_qkv.layer_norm_weight", (config.hidden_size,), count),
            _linear("self_attention.linear_qkv", config.qkv_size, config.hidden_size, count),
            _linear("self_attention.linear_proj", config.hidden_size, config.num_attention_heads * config.head_dim,
                    count)]


def _mlp_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    return [ParameterShape("mlp.linear_fc1.layer_norm_weight", (config.hidden_size,), count),
            _linear("mlp.linear_fc1", config.ffn_hidden_size, config.hidden_size, count),
            _linear("mlp.linear_fc2", config.hidden_size, config.ffn_hidden_size, count)]


def _moe_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    hidden, width, inner = config.hidden_size, config.expert_size, config.moe_ffn_hidden_size
    shared, experts = config.moe_shared_expert_intermediate_size, count * config.num_experts
    shapes = [ParameterShape("pre_mlp_layernorm.weight", (hidden,), count),
              _linear("mlp.router", config.num_experts, hidden, count, "none"),
              _linear("mlp.experts.linear_fc1", inner, width, experts, "expert"),
              _linear("mlp.experts.linear_fc2", width, inner, experts, "expert"),
              _linear("mlp.shared_experts.linear_fc1", shared, hidden, count),
              _linear("mlp.shared_experts.linear_fc2", hidden, shared, count)]
    if config.moe_latent_size:
        shapes += [_linear("mlp.fc1_latent_proj", config.moe_latent_size, hidden, count, "none"),
                   _linear("mlp.fc2_latent_proj", hidden, config.moe_latent_size, count, "none")]
    return shapes


def _mtp_shapes(config: HybridConfig) -> list[ParameterShape]:
    """Return the parameters of multi-token prediction, without the last stage's copy of the embedding."""
    hidden, depths = config.hidden_size, config.num_mtp_depths
    inner = layer_shapes(replace(config, hybrid_layer_pattern=config.mtp_layers))
    names = ("enorm", "hnorm", "final_layernorm")
    return [*(ParameterShape(f"mtp.layers.{name}.weight", (hidden,), depths, "none", "last") for name in names),
            ParameterShape("mtp.layers.eh_proj.weight", (hidden, 2 * hidden), depths, "tp", "last"),
            *(ParameterShape(f"mtp.layers.mtp_model_layer.{shape.name}", shape.shape, depths * shape.count, shape.split,
                             "last") for shape in inner)]
