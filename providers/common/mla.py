"""A DeepSeek-V3-style decoder as plain data: latent attention, dense layers before MoE layers with shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mimo.config.toml_file import flag_name
from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape
from providers.common.checks import NO_FACTOR, Problems
from providers.common.decoder import DecoderConfig, check_decoder_grid, check_language, note_unused

# Flags of other decoders that latent attention does not use.
UNUSED = ("num_query_groups", "kv_channels", "add_qkv_bias", "use_rope_scaling", "rope_scaling_factor",
          "moe_router_pre_softmax")
# Flags of YaRN.
OF_YARN = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
           "mscale_all_dim")
# Megatron Core scores a group by its best topk / group_topk experts, DeepSeek-V3 by its best two.
EXPERTS_THAT_SCORE_A_GROUP = 2


@dataclass(frozen=True)
class LatentDecoderConfig(DecoderConfig):
    """Language model: latent attention, dense layers, then MoE layers with shared experts; the sizes of DeepSeek-V3."""

    num_layers: int = 61
    hidden_size: int = 7168
    num_attention_heads: int = 128
    ffn_hidden_size: int = 18432
    """Inner width of a dense layer's MLP."""
    vocab_size: int = 129280
    max_position_embeddings: int = 163840
    norm_epsilon: float = 1e-6
    qk_layernorm: bool = True
    """RMSNorm on compressed queries and keys; latent attention has no other form here."""
    num_experts: int = 256
    """Routed experts of a MoE layer's MLP."""
    moe_router_topk: int = 8
    moe_ffn_hidden_size: int = 2048
    moe_aux_loss_coeff: float = 1e-4
    latent_norm_epsilon: float = 1e-6
    """Epsilon of the RMSNorms on compressed queries and keys."""
    q_lora_rank: int = 1536
    """Width of a compressed query; 0: queries are projected from the hidden states."""
    kv_lora_rank: int = 512
    """Width of a compressed key and value."""
    qk_head_dim: int = 128
    """Channels of a query or key head without rotary positions."""
    qk_pos_emb_head_dim: int = 64
    """Channels of a query or key head with rotary positions; the key's are shared by all heads."""
    v_head_dim: int = 128
    """Channels of a value head."""
    rope_type: Literal["yarn", "rope"] = "yarn"
    """Rotary positions: YaRN (arXiv:2309.00071), or without scaling."""
    rotary_scaling_factor: float = 40.0
    """YaRN: how many times longer sequences are than those of the original training."""
    original_max_position_embeddings: int = 4096
    """YaRN: longest sequence of the original training."""
    beta_fast: float = 32.0
    """YaRN: rotations over the original length from which a frequency stays as it is."""
    beta_slow: float = 1.0
    """YaRN: rotations over the original length up to which a frequency is divided by the factor."""
    mscale: float = 1.0
    """YaRN: weight of log(factor) in the scale of the rotary channels."""
    mscale_all_dim: float = 1.0
    """YaRN: weight of log(factor) in the scale of all channels."""
    first_k_dense_replace: int = 3
    """Dense layers before the first MoE layer."""
    moe_shared_expert_intermediate_size: int = 2048
    """Inner width of the shared experts, all together."""
    moe_router_score_function: Literal["sigmoid"] = "sigmoid"
    """Score of an expert for a token, from the router's logit."""
    moe_router_enable_expert_bias: bool = True
    """Add a bias to the scores that choose experts. It moves towards an even load after every step
    (arXiv:2408.15664)."""
    moe_router_bias_update_rate: float = 1e-3
    """Step size of the expert bias; 0 keeps the bias as it is."""
    moe_router_num_groups: int = 8
    """Groups of experts; a token's experts come from its best groups. 1: no groups."""
    moe_router_group_topk: int = 4
    """Groups from which a token's experts come."""
    moe_router_topk_scaling_factor: float = 2.5
    """Factor of the chosen experts' normalized weights."""
    ignored_mtp_layers: int = 0
    """Multi-token prediction layers that a Hugging Face checkpoint has after the last layer; they are not loaded."""

    @property
    def head_dim(self) -> int:
        """Channels of a value head, and so of a head's output."""
        return self.v_head_dim

    @property
    def query_size(self) -> int:
        """Columns of all queries."""
        return self.num_attention_heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)

    @property
    def compressed_kv_size(self) -> int:
        """Columns of a compressed key and value and of the rotary key."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all values and of the keys without rotary positions."""
        return self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def moe_layer_freq(self) -> list[int]:
        """Kinds of layers: 0 for a dense layer, 1 for a MoE layer."""
        return [int(layer >= self.first_k_dense_replace) for layer in range(self.num_layers)]

    @property
    def limits_groups(self) -> bool:
        """Whether tokens go only to some of the groups of experts."""
        return self.moe_router_group_topk < self.moe_router_num_groups


def check_latent(config: LatentDecoderConfig, problems: Problems) -> None:
    """Note decoder sizes that no layout can hold."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size",
                 "make_vocab_size_divisible_by", "max_position_embeddings", "num_experts", "moe_ffn_hidden_size",
                 "moe_shared_expert_intermediate_size", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
                 "v_head_dim", "moe_router_num_groups", "moe_router_group_topk"):
        problems.positive(name, getattr(config, name))
    check_language(config, problems)
    for name in ("rotary_base", "latent_norm_epsilon"):
        problems.above_zero(name, getattr(config, name))
    for name in ("q_lora_rank", "moe_router_bias_update_rate", "ignored_mtp_layers"):
        problems.least(name, getattr(config, name), 0)
    defaults = LatentDecoderConfig()
    for name in UNUSED:
        if getattr(config, name) != getattr(defaults, name):
            problems.add(f"{flag_name(name)} {getattr(config, name)} has no effect in latent attention: leave it out")
    if not config.qk_layernorm:
        problems.add("--no-qk-layernorm: latent attention always has norms on compressed queries and keys")
    if config.qk_pos_emb_head_dim % 2:
        problems.add(f"--qk-pos-emb-head-dim {config.qk_pos_emb_head_dim} is odd; rotary positions need pairs")
    if not 0 <= config.first_k_dense_replace < config.num_layers:
        problems.add(f"--first-k-dense-replace {config.first_k_dense_replace} must lie between 0 and --num-layers "
                     f"{config.num_layers} less one: some layer has experts")
    if config.rope_type != "yarn":
        note_unused(config, OF_YARN, "--rope-type yarn", problems)
    else:
        problems.positive("original_max_position_embeddings", config.original_max_position_embeddings)
        problems.least("rotary_scaling_factor", config.rotary_scaling_factor, 1)
    if not problems.found:
        _check_router(config, problems)


def _check_router(config: LatentDecoderConfig, problems: Problems) -> None:
    topk, groups, chosen = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    if not 2 <= topk <= config.num_experts:
        problems.add(f"--moe-router-topk {topk} must lie between 2 and --num-experts {config.num_experts}")
    if not config.moe_router_topk_scaling_factor:
        problems.add(f"--moe-router-topk-scaling-factor {config.moe_router_topk_scaling_factor}: {NO_FACTOR}")
    problems.divides("num_experts", config.num_experts, "moe_router_num_groups", groups)
    problems.divides("moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size,
                     "moe_ffn_hidden_size", config.moe_ffn_hidden_size)
    if chosen > groups:
        problems.add(f"--moe-router-group-topk {chosen} exceeds --moe-router-num-groups {groups}")
    if problems.found or not config.limits_groups:
        return
    if topk // chosen != EXPERTS_THAT_SCORE_A_GROUP:
        problems.add(f"--moe-router-topk {topk} and --moe-router-group-topk {chosen}: a group is scored by its best "
                     f"{EXPERTS_THAT_SCORE_A_GROUP} experts, so that --moe-router-topk must be "
                     f"{EXPERTS_THAT_SCORE_A_GROUP * chosen} or {EXPERTS_THAT_SCORE_A_GROUP * chosen + 1}"
                     if chosen > 1 else
                     f"--moe-router-topk {topk} with --moe-router-group-topk 1 must be {EXPERTS_THAT_SCORE_A_GROUP}")
    if topk > config.num_experts // groups * chosen:
        problems.add(f"--moe-router-topk {topk} exceeds the {config.num_experts // groups * chosen} experts of "
                     f"--moe-router-group-topk {chosen} groups")


def check_latent_grid(config: LatentDecoderConfig, grid: GridSpec, seq_length: int, problems: Problems) -> None:
    """Note sizes that the language grid cannot hold."""
    check_decoder_grid(config, grid, seq_length, problems)
    problems.divides("ffn_hidden_size", config.ffn_hidden_size, "llm_tp", grid.tp)
    problems.divides("moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size, "llm_tp",
                     grid.tp)
    # Layers without Transformer Engine also split the down projections.
    problems.divides("q_lora_rank", config.q_lora_rank, "llm_tp", grid.tp)
    if config.compressed_kv_size % grid.tp:
        problems.add(f"--kv-lora-rank {config.kv_lora_rank} + --qk-pos-emb-head-dim {config.qk_pos_emb_head_dim} = "
                     f"{config.compressed_kv_size} is not divisible by --llm-tp {grid.tp}")


def latent_shapes(config: LatentDecoderConfig) -> list[ParameterShape]:
    """Return every parameter of the decoder. The vocabulary has its padding rows, and tied embeddings count once."""
    layers, hidden, rows = config.num_layers, config.hidden_size, config.padded_vocab_size()
    shapes = [
        ParameterShape("embedding.word_embeddings.weight", (rows, hidden), 1, "tp",
                       # The last stage has a copy of a tied embedding for the logits.
                       "first" if config.untie_embeddings_and_output_weights else "ends"),
        ParameterShape("input_layernorm.weight", (hidden,), layers),
        ParameterShape("self_attention.linear_kv_down_proj.weight", (config.compressed_kv_size, hidden), layers, "tp"),
        ParameterShape("self_attention.kv_layernorm.weight", (config.kv_lora_rank,), layers),
        ParameterShape("self_attention.linear_kv_up_proj.weight", (config.kv_size, config.kv_lora_rank), layers, "tp"),
        ParameterShape("self_attention.linear_proj.weight", (hidden, config.num_attention_heads * config.v_head_dim),
                       layers, "tp"),
        ParameterShape("pre_mlp_layernorm.weight", (hidden,), layers),
        ParameterShape("final_layernorm.weight", (hidden,), 1, "none", "last"),
    ]
    if config.q_lora_rank:
        shapes += [
            ParameterShape("self_attention.linear_q_down_proj.weight", (config.q_lora_rank, hidden), layers, "tp"),
            ParameterShape("self_attention.q_layernorm.weight", (config.q_lora_rank,), layers),
            ParameterShape("self_attention.linear_q_up_proj.weight", (config.query_size, config.q_lora_rank), layers,
                           "tp"),
        ]
    else:
        shapes.append(ParameterShape("self_attention.linear_q_proj.weight", (config.query_size, hidden), layers, "tp"))
    shapes += _mlp_shapes(config)
    if config.untie_embeddings_and_output_weights:
        shapes.append(ParameterShape("output_layer.weight", (rows, hidden), 1, "tp", "last"))
    return shapes


def _mlp_shapes(config: LatentDecoderConfig) -> list[ParameterShape]:
    """Return the parameters of the MLPs. Planning spreads dense and MoE layers evenly over the pipeline stages."""
    hidden, sparse = config.hidden_size, sum(config.moe_layer_freq)

    def mlp(name: str, inner: int, count: int, split: str) -> list[ParameterShape]:
        return [ParameterShape(f"{name}.linear_fc1.weight", (2 * inner, hidden), count, split),
                ParameterShape(f"{name}.linear_fc2.weight", (hidden, inner), count, split)] if count else []

    return [
        *mlp("mlp", config.ffn_hidden_size, config.num_layers - sparse, "tp"),
        ParameterShape("mlp.router.weight", (config.num_experts, hidden), sparse),
        *mlp("mlp.experts", config.moe_ffn_hidden_size, sparse * config.num_experts, "expert"),
        *mlp("mlp.shared_experts", config.moe_shared_expert_intermediate_size, sparse, "tp"),
    ]
