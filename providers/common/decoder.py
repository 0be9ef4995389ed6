"""A Llama- or Qwen-style decoder as plain data: its flags, checks and parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from mimo.config.checks import is_least
from mimo.config.toml_file import flag_name
from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape
from providers.common.checks import Problems

# Flags of the loss that balances the load of experts.
BALANCING = ("moe_aux_loss_coeff", "moe_router_load_balancing_type")
# Values with which a flag has no effect in any model.
OFF = {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none", "mtp_loss_scaling_factor": 0.0}


@dataclass(frozen=True)
class LanguageConfig:
    """Flags of the language models of all families. Each has `head_dim` and `query_groups` besides."""

    hidden_size: int = 4096
    """Width of the decoder."""
    num_attention_heads: int = 32
    """Query heads."""
    vocab_size: int = 32064
    """Number of tokens."""
    make_vocab_size_divisible_by: int = 128
    """Round the number of rows of embedding and output up to a multiple of this (and of --llm-tp). If --llm-tp divides
    it, checkpoints of all layouts have the same rows."""
    max_position_embeddings: int = 4096
    """Longest sequence; --seq-length must not exceed it."""
    norm_epsilon: float = 1e-5
    """Epsilon of the RMSNorms."""
    untie_embeddings_and_output_weights: bool = True
    """Separate weights for the input embedding and the output layer."""
    moe_router_load_balancing_type: Literal["seq_aux_loss", "aux_loss", "global_aux_loss", "none"] = "seq_aux_loss"
    """Load-balancing loss of the router. seq_aux_loss balances each sequence, and its gradients are the same in every
    layout. Gradients of aux_loss depend on --micro-batch-size (and, if that is above 1, on --llm-dp), those of
    global_aux_loss on --micro-batch-size and --llm-dp. In train_rl.py all depend on --max-tokens-per-microbatch and
    --llm-dp."""
    moe_aux_loss_coeff: float = 1e-3
    """Weight of the load-balancing loss; 0: off. In train_hetero.py Megatron multiplies it by the number of tokens
    without padding, and the gradient is divided by the target tokens, so it weighs more if there are few targets. In
    train_rl.py the loss is the mean over all tokens except padding."""
    hidden_dropout: float = 0.0
    """Dropout on the residual branches."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value weight."""
        return self.head_dim * (self.num_attention_heads + 2 * self.query_groups)

    def padded_vocab_size(self, llm_tp: int = 1) -> int:
        """Return the number of rows of embedding and output, padding included."""
        unit = math.lcm(self.make_vocab_size_divisible_by, llm_tp)
        return -(-self.vocab_size // unit) * unit


@dataclass(frozen=True)
class DecoderConfig(LanguageConfig):
    """Language model: RMSNorm, RoPE, grouped-query attention, SwiGLU or a mixture of SwiGLU experts."""

    num_layers: int = 32
    """Decoder layers."""
    num_query_groups: int = 0
    """Key and value heads, shared by groups of query heads; 0: as many as query heads."""
    ffn_hidden_size: int = 11008
    """Inner width of the dense MLP; unused with experts."""
    kv_channels: int = 0
    """Channels of a head; 0: hidden size divided by heads."""
    rotary_base: float = 10000.0
    """Base of the rotary position frequencies."""
    use_rope_scaling: bool = False
    """Llama 3's scaling of the rotary frequencies, for training at 8192 positions."""
    rope_scaling_factor: float = 8.0
    """Divisor of the lowest rotary frequencies; used with --use-rope-scaling."""
    qk_layernorm: bool = False
    """RMSNorm on each head's query and key (Qwen3)."""
    add_qkv_bias: bool = False
    """Biases on query, key and value (Qwen2)."""
    num_experts: int = 0
    """Experts of every layer's MLP; 0: dense."""
    moe_router_topk: int = 2
    """Experts each token is sent to."""
    moe_ffn_hidden_size: int = 768
    """Inner width of an expert."""
    moe_router_pre_softmax: bool = False
    """Apply softmax over all experts before choosing, and do not normalize the weights again. Needed if each token has
    one expert."""

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups or self.num_attention_heads


@dataclass(frozen=True)
class MultimodalDecoderConfig(DecoderConfig):
    """Language model of the Qwen-VL families, whose rotary positions have three axes: time, row and column.

    Attributes:
        interleaved_sections: whether the axes take turns among the frequencies.
    """

    interleaved_sections: ClassVar[bool] = False

    mrope_section: tuple[int, ...] = (16, 24, 24)
    """Rotary frequencies that follow time, row and column; they sum to half of the channels of a head."""


def check_language(config: LanguageConfig, problems: Problems) -> None:
    """Note numbers with which no language model can compute."""
    problems.above_zero("norm_epsilon", config.norm_epsilon)
    problems.least("moe_aux_loss_coeff", config.moe_aux_loss_coeff, 0)
    for name in ("hidden_dropout", "attention_dropout"):
        problems.probability(name, getattr(config, name))


def check_multimodal_decoder(config: MultimodalDecoderConfig, problems: Problems) -> None:
    """Note sizes of a decoder with positions of three axes that no layout can hold."""
    check_decoder(config, problems)
    if problems.found:
        return
    sections, half = config.mrope_section, config.head_dim // 2
    given = f"--mrope-section {' '.join(map(str, sections))}"
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != half:
        problems.add(f"{given}: needs three numbers (time, row, column) that sum to {half}, half of the "
                     f"{config.head_dim} channels of a head")
    elif config.interleaved_sections and (3 * sections[1] > half + 1 or 3 * sections[2] > half):
        problems.add(f"{given}: axes that take turns among {half} frequencies have at most {(half + 1) // 3} for rows "
                     f"and {half // 3} for columns")
    if config.use_rope_scaling:
        problems.add("--use-rope-scaling is not defined for positions of three axes; leave it out")


def check_decoder(config: DecoderConfig, problems: Problems) -> None:
    """Note decoder sizes that no layout can hold."""
    check_language(config, problems)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "make_vocab_size_divisible_by",
                 "max_position_embeddings"):
        problems.positive(name, getattr(config, name))
    for name in ("num_query_groups", "kv_channels"):
        problems.least(name, getattr(config, name), 0)
    problems.above_zero("rotary_base", config.rotary_base)
    if config.use_rope_scaling and not is_least(config.rope_scaling_factor, 1):
        problems.add(f"--rope-scaling-factor {config.rope_scaling_factor} must be at least 1")
    if not config.use_rope_scaling:
        note_unused(config, ("rope_scaling_factor",), "--use-rope-scaling", problems)
    if not config.num_experts:
        note_unused(config, ("moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax", *BALANCING),
                    "--num-experts", problems)
    problems.positive("moe_ffn_hidden_size" if config.num_experts else "ffn_hidden_size",
                      config.moe_ffn_hidden_size if config.num_experts else config.ffn_hidden_size)
    if problems.found:
        return
    if not config.kv_channels:
        problems.divides("hidden_size", config.hidden_size, "num_attention_heads", config.num_attention_heads,
                         hint="or give --kv-channels")
    problems.divides("num_attention_heads", config.num_attention_heads, "num_query_groups", config.query_groups)
    if config.head_dim % 2:
        problems.add(f"--kv-channels {config.head_dim} is odd; rotary positions need an even number of channels a head")
    if config.num_experts:
        if not 1 <= config.moe_router_topk <= config.num_experts:
            problems.add(f"--moe-router-topk {config.moe_router_topk} must lie between 1 and --num-experts "
                         f"{config.num_experts}")
        if config.moe_router_topk == 1 and not config.moe_router_pre_softmax:
            problems.add("--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one has no gradient")


def note_unused(config: LanguageConfig, names: tuple[str, ...], needed: str, problems: Problems) -> None:
    """Note values that have no effect because a flag is not given. Those that say so themselves may stay."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in names:
        if getattr(config, name) not in (defaults[name], OFF.get(name, defaults[name])):
            problems.add(f"{flag_name(name)} {getattr(config, name)} needs {needed}")


def check_decoder_grid(config: DecoderConfig, grid: GridSpec, seq_length: int, problems: Problems) -> None:
    """Note sizes that the language grid cannot hold.

    There may be fewer query groups than tensor-parallel ranks if they divide the ranks. Megatron Core then gathers the
    fused projection, and each rank takes its group.
    """
    if not grid.stage_layers:
        problems.divides("num_layers", config.num_layers, "llm_pp", grid.pp, hint="or give --llm-pp-layout")
    elif sum(grid.stage_layers) != config.num_layers:
        problems.add(f"--llm-pp-layout {','.join(map(str, grid.stage_layers))} has {sum(grid.stage_layers)} layers, "
                     f"--num-layers {config.num_layers}")
    problems.divides("num_attention_heads", config.num_attention_heads, "llm_tp", grid.tp)
    check_groups_and_length(config.query_groups, config.max_position_embeddings, grid, seq_length, problems)
    if config.num_experts:
        problems.divides("num_experts", config.num_experts, "llm_ep", grid.ep)
        problems.divides("moe_ffn_hidden_size", config.moe_ffn_hidden_size, "llm_expt_tp", grid.expt_tp)
    else:
        problems.divides("ffn_hidden_size", config.ffn_hidden_size, "llm_tp", grid.tp)
        if grid.ep > 1 or grid.expt_tp > 1:
            problems.add(f"--llm-ep {grid.ep} and --llm-expt-tp {grid.expt_tp} need --num-experts above 0")


def check_groups_and_length(groups: int, max_positions: int, grid: GridSpec, seq_length: int,
                            problems: Problems) -> None:
    """Note query groups and a length of samples that the language grid cannot hold."""
    if groups % grid.tp and grid.tp % groups:
        problems.add(f"--num-query-groups {groups} and --llm-tp {grid.tp}: one must divide the other")
    problems.divides("seq_length", seq_length, "llm_tp", grid.tp, multiples=True)
    problems.shared_rows(seq_length, grid.cp, grid.tp)
    if seq_length > max_positions:
        problems.add(f"--seq-length {seq_length} exceeds --max-position-embeddings {max_positions}")


def decoder_shapes(config: DecoderConfig) -> list[ParameterShape]:
    """Return every parameter of the decoder. The vocabulary has its padding rows, and tied embeddings count once."""
    layers, hidden, rows = config.num_layers, config.hidden_size, config.padded_vocab_size()
    shapes = [
        ParameterShape("embedding.word_embeddings.weight", (rows, hidden), 1, "tp",
                       # The last stage has a copy of a tied embedding for the logits.
                       "first" if config.untie_embeddings_and_output_weights else "ends"),
        ParameterShape("input_layernorm.weight", (hidden,), layers),
        ParameterShape("self_attention.linear_qkv.weight", (config.qkv_size, hidden), layers, "tp"),
        ParameterShape("self_attention.linear_proj.weight", (hidden, config.num_attention_heads * config.head_dim),
                       layers, "tp"),
        ParameterShape("pre_mlp_layernorm.weight", (hidden,), layers),
        ParameterShape("final_layernorm.weight", (hidden,), 1, "none", "last"),
    ]
    if config.add_qkv_bias:
        shapes.append(ParameterShape("self_attention.linear_qkv.bias", (config.qkv_size,), layers, "tp"))
    if config.qk_layernorm:
        shapes.append(ParameterShape("self_attention.q_layernorm.weight", (config.head_dim,), layers))
        shapes.append(ParameterShape("self_attention.k_layernorm.weight", (config.head_dim,), layers))
    if config.num_experts:
        experts, inner = layers * config.num_experts, config.moe_ffn_hidden_size
        shapes += [
            ParameterShape("mlp.router.weight", (config.num_experts, hidden), layers),
            ParameterShape("mlp.experts.linear_fc1.weight", (2 * inner, hidden), experts, "expert"),
            ParameterShape("mlp.experts.linear_fc2.weight", (hidden, inner), experts, "expert"),
        ]
    else:
        shapes += [
            ParameterShape("mlp.linear_fc1.weight", (2 * config.ffn_hidden_size, hidden), layers, "tp"),
            ParameterShape("mlp.linear_fc2.weight", (hidden, config.ffn_hidden_size), layers, "tp"),
        ]
    if config.untie_embeddings_and_output_weights:
        shapes.append(ParameterShape("output_layer.weight", (rows, hidden), 1, "tp", "last"))
    return shapes
