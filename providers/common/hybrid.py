"""A Nemotron-H-style decoder as plain data: Mamba-2, attention, MoE and dense layers in the order of a pattern.

Every symbol of the pattern is one layer with a norm before it and a residual connection around it (arXiv:2504.03624).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from mimo.grid.spec import GridSpec
from mimo.protocols import LANGUAGE, MegatronSource, ParameterShape
from providers.common.checks import NO_FACTOR, Problems
from providers.common.decoder import BALANCING, LanguageConfig, check_groups_and_length, check_language, note_unused

MAMBA, ATTENTION, MOE, MLP = "M", "*", "E", "-"
SYMBOLS = {MAMBA: "Mamba-2", ATTENTION: "attention", MOE: "mixture of experts", MLP: "dense MLP"}
CONV_KERNEL = 4  # Megatron Core's MambaMixer supports no other value
CHECKPOINT_FLAG = "--load-nemotron-checkpoint"
# Keys of Megatron checkpoints that a run does not use, with the reason.
CHECKPOINT_IGNORED = ((r"\._extra_state$", "state of Transformer Engine's layers"),)
CHECKPOINT_MTP = (
    r"^language_model\.mtp\.", "layers of multi-token prediction, which --hybrid-layer-pattern does not have")
CHECKPOINT_ENCODER = (r"^vision_(model|projection)\.", "encoder and projector, which a text model does not have")


@dataclass(frozen=True)
class HybridConfig(LanguageConfig):
    """Language model: layers of Mamba-2, attention without positions, experts with squared ReLU; RMSNorm."""

    hybrid_layer_pattern: str = "MEMEM*EMEMEM*EMEMEM*"
    """One symbol for each layer: M Mamba-2, * attention, E mixture of experts, - dense MLP. A slash starts the layers
    of one depth of multi-token prediction; for every further depth, the slash and these layers are repeated."""
    hidden_size: int = 2688
    num_query_groups: int = 8
    """Key and value heads, shared by groups of query heads."""
    kv_channels: int = 128
    """Channels of a head."""
    ffn_hidden_size: int = 1856
    """Inner width of a dense MLP."""
    vocab_size: int = 131072
    max_position_embeddings: int = 262144
    mamba_num_heads: int = 64
    """Heads of a Mamba-2 layer."""
    mamba_head_dim: int = 64
    """Channels of a Mamba-2 head."""
    mamba_num_groups: int = 8
    """Groups of heads that share B and C. The norm after the scan has the same groups."""
    mamba_state_dim: int = 128
    """Size of the state of a channel."""
    num_experts: int = 128
    """Routed experts of an E layer."""
    moe_router_topk: int = 6
    """Experts each token is sent to. The weight of a single one is its score; those of several are normalized."""
    moe_ffn_hidden_size: int = 1856
    """Inner width of a routed expert."""
    moe_shared_expert_intermediate_size: int = 3712
    """Inner width of the shared expert, which sees every token."""
    moe_latent_size: int = 0
    """Latent MoE: project tokens to this width before the routed experts and back after them; 0: no projection."""
    moe_router_enable_expert_bias: bool = True
    """Add a float32 bias to the scores that choose experts. It moves towards an even load after every step
    (arXiv:2408.15664)."""
    moe_router_bias_update_rate: float = 1e-3
    """Step size of the expert bias; 0 keeps the bias as it is."""
    moe_router_topk_scaling_factor: float = 2.5
    """Factor of the chosen experts' weights."""
    moe_aux_loss_coeff: float = 1e-4
    moe_router_force_load_balancing: bool = False
    """Send tokens evenly to random experts. For benchmarks only, because the model does not learn."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the loss of multi-token prediction."""

    @property
    def layers(self) -> str:
        """Symbols of the decoder's layers, without those of multi-token prediction."""
        return self.hybrid_layer_pattern.split("/")[0]

    @property
    def mtp_layers(self) -> str:
        """Symbols of one depth of multi-token prediction; empty without it."""
        return self.hybrid_layer_pattern.split("/")[1] if self.num_mtp_depths else ""

    @property
    def num_mtp_depths(self) -> int:
        return self.hybrid_layer_pattern.count("/")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_routed_experts(self) -> int:
        """Number of routed experts of an E layer, 0 without one."""
        return self.num_experts if MOE in self.hybrid_layer_pattern else 0

    @property
    def counts(self) -> Counter[str]:
        """Number of layers of each kind, without those of multi-token prediction."""
        return Counter(self.layers)

    @property
    def head_dim(self) -> int:
        return self.kv_channels

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.num_query_groups

    @property
    def mamba_inner_size(self) -> int:
        """Inner channels of a Mamba-2 layer, the size of z and of x."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_conv_size(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.mamba_inner_size + 2 * self.mamba_num_groups * self.mamba_state_dim

    @property
    def mamba_in_proj_rows(self) -> tuple[int, ...]:
        """Rows of the input projection: z, x, B, C, dt."""
        state = self.mamba_num_groups * self.mamba_state_dim
        return (self.mamba_inner_size, self.mamba_inner_size, state, state, self.mamba_num_heads)

    @property
    def expert_size(self) -> int:
        """Width of the tokens that routed experts see."""
        return self.moe_latent_size or self.hidden_size


def check_hybrid(config: HybridConfig, problems: Problems) -> None:
    """Note decoder sizes that no layout can hold."""
    _check_pattern(config, problems)
    names = ["hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size",
             "make_vocab_size_divisible_by", "max_position_embeddings", "mamba_num_heads", "mamba_head_dim",
             "mamba_num_groups", "mamba_state_dim"]
    if MLP in config.hybrid_layer_pattern:
        names.append("ffn_hidden_size")
    if MOE in config.hybrid_layer_pattern:
        names += ["num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
    for name in names:
        problems.positive(name, getattr(config, name))
    check_language(config, problems)
    for name in ("moe_latent_size", "moe_router_bias_update_rate", "mtp_loss_scaling_factor"):
        problems.least(name, getattr(config, name), 0)
    if not config.num_mtp_depths:
        note_unused(config, ("mtp_loss_scaling_factor",), "a depth of multi-token prediction in "
                    "--hybrid-layer-pattern", problems)
    if MOE not in config.hybrid_layer_pattern:
        # Not the sizes of experts, which every config.json has.
        note_unused(config, BALANCING, "a layer with experts (E) in --hybrid-layer-pattern", problems)
    if problems.found:
        return
    problems.divides("num_attention_heads", config.num_attention_heads, "num_query_groups", config.num_query_groups)
    problems.divides("mamba_num_heads", config.mamba_num_heads, "mamba_num_groups", config.mamba_num_groups)
    if MOE in config.hybrid_layer_pattern:
        if config.moe_router_topk > config.num_experts:
            problems.add(f"--moe-router-topk {config.moe_router_topk} exceeds --num-experts {config.num_experts}")
        if not config.moe_router_topk_scaling_factor:
            problems.add(f"--moe-router-topk-scaling-factor {config.moe_router_topk_scaling_factor}: {NO_FACTOR}")


def _check_pattern(config: HybridConfig, problems: Problems) -> None:
    pattern = config.hybrid_layer_pattern
    for index, symbol in enumerate(pattern):
        if symbol not in SYMBOLS and symbol != "/":
            known = ", ".join(f"{symbol} ({name})" for symbol, name in SYMBOLS.items())
            problems.add(f"--hybrid-layer-pattern {pattern}: symbol {symbol!r} at position {index + 1} is unknown; "
                         f"layers are {known}")
            return
    main, *depths = pattern.split("/")
    if not main:
        problems.add(f"--hybrid-layer-pattern {pattern!r} has no layers")
    if depths and (not depths[0] or set(depths) != {depths[0]}):
        problems.add(f"--hybrid-layer-pattern {pattern}: every depth of multi-token prediction has the same layers, at "
                     f"least one; these are {', '.join(repr(depth) for depth in depths)}")


def _check_mamba_cp(config: HybridConfig, grid: GridSpec, problems: Problems) -> None:
    """Note heads and groups that context-parallel ranks cannot split. Each rank scans whole rows of some heads."""
    heads, groups, parts = config.mamba_num_heads, config.mamba_num_groups, f"--llm-tp {grid.tp} * --llm-cp {grid.cp}"
    if heads % (grid.tp * grid.cp):
        problems.add(f"--mamba-num-heads {heads} is not divisible by {parts}")
    own = max(groups // grid.tp, 1)
    if own % grid.cp and grid.cp % own:
        problems.add(f"--mamba-num-groups {groups} over {parts}: of the {own} groups of a tensor-parallel rank and "
                     f"--llm-cp {grid.cp}, one must divide the other")


def check_hybrid_grid(config: HybridConfig, grid: GridSpec, seq_length: int, problems: Problems) -> None:
    """Note sizes that the language grid cannot hold."""
    layers = config.num_layers
    if grid.stage_layers:
        problems.add(f"--llm-pp-layout {','.join(map(str, grid.stage_layers))}: all stages of a hybrid model need "
                     "the same number of layers; leave it out")
    elif layers % grid.pp:
        fits = [stages for stages in range(1, layers + 1) if layers % stages == 0]
        problems.add(f"--hybrid-layer-pattern {config.hybrid_layer_pattern} has {layers} layers, not divisible by "
                     f"--llm-pp {grid.pp}; --llm-pp that fit: {', '.join(map(str, fits))}")
    for name in ("num_attention_heads", "mamba_num_heads", "mamba_num_groups"):
        problems.divides(name, getattr(config, name), "llm_tp", grid.tp)
    if MAMBA in config.hybrid_layer_pattern and grid.cp > 1:
        _check_mamba_cp(config, grid, problems)
    check_groups_and_length(config.num_query_groups, config.max_position_embeddings, grid, seq_length, problems)
    if MLP in config.hybrid_layer_pattern:
        problems.divides("ffn_hidden_size", config.ffn_hidden_size, "llm_tp", grid.tp)
    if MOE in config.hybrid_layer_pattern:
        problems.divides("num_experts", config.num_experts, "llm_ep", grid.ep)
        problems.divides("moe_ffn_hidden_size", config.moe_ffn_hidden_size, "llm_expt_tp", grid.expt_tp)
        problems.divides("moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size, "llm_tp",
                         grid.tp)
    elif grid.ep > 1 or grid.expt_tp > 1:
        problems.add(f"--llm-ep {grid.ep} and --llm-expt-tp {grid.expt_tp} need layers with experts; "
                     f"--hybrid-layer-pattern {config.hybrid_layer_pattern} has no E")


def hybrid_shapes(config: HybridConfig) -> list[ParameterShape]:
    """Return every parameter of the decoder. The vocabulary has its padding rows, and tied embeddings count once."""
    hidden, rows = config.hidden_size, config.padded_vocab_size()
    # The last stage has a copy of a tied embedding for the logits, and of any embedding for multi-token prediction.
    is_copied = config.num_mtp_depths > 0 or not config.untie_embeddings_and_output_weights
    shapes = [ParameterShape("embedding.word_embeddings.weight", (rows, hidden), 1, "tp",
                             "ends" if is_copied else "first"),
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


def _linear_shape(name: str, rows: int, columns: int, count: int, split: str = "tp") -> ParameterShape:
    return ParameterShape(f"{name}.weight", (rows, columns), count, split)


def mamba_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    """Return every parameter of `count` Mamba-2 layers."""
    hidden, heads = config.hidden_size, config.mamba_num_heads
    return [
        ParameterShape("mixer.in_proj.layer_norm_weight", (hidden,), count),
        _linear_shape("mixer.in_proj", sum(config.mamba_in_proj_rows), hidden, count),
        ParameterShape("mixer.conv1d.weight", (config.mamba_conv_size, 1, CONV_KERNEL), count, "tp"),
        ParameterShape("mixer.conv1d.bias", (config.mamba_conv_size,), count, "tp"),
        *(ParameterShape(f"mixer.{name}", (heads,), count, "tp") for name in ("A_log", "D", "dt_bias")),
        ParameterShape("mixer.norm.weight", (config.mamba_inner_size,), count, "tp"),
        _linear_shape("mixer.out_proj", hidden, config.mamba_inner_size, count),
    ]


def _attention_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    return [ParameterShape("self_attention.linear_qkv.layer_norm_weight", (config.hidden_size,), count),
            _linear_shape("self_attention.linear_qkv", config.qkv_size, config.hidden_size, count),
            _linear_shape("self_attention.linear_proj", config.hidden_size,
                          config.num_attention_heads * config.head_dim, count)]


def _mlp_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    return [ParameterShape("mlp.linear_fc1.layer_norm_weight", (config.hidden_size,), count),
            _linear_shape("mlp.linear_fc1", config.ffn_hidden_size, config.hidden_size, count),
            _linear_shape("mlp.linear_fc2", config.hidden_size, config.ffn_hidden_size, count)]


def _moe_shapes(config: HybridConfig, count: int) -> list[ParameterShape]:
    hidden, width, inner = config.hidden_size, config.expert_size, config.moe_ffn_hidden_size
    shared, experts = config.moe_shared_expert_intermediate_size, count * config.num_experts
    shapes = [ParameterShape("pre_mlp_layernorm.weight", (hidden,), count),
              _linear_shape("mlp.router", config.num_experts, hidden, count, "none"),
              _linear_shape("mlp.experts.linear_fc1", inner, width, experts, "expert"),
              _linear_shape("mlp.experts.linear_fc2", width, inner, experts, "expert"),
              _linear_shape("mlp.shared_experts.linear_fc1", shared, hidden, count),
              _linear_shape("mlp.shared_experts.linear_fc2", hidden, shared, count)]
    if config.moe_latent_size:
        shapes += [_linear_shape("mlp.fc1_latent_proj", config.moe_latent_size, hidden, count, "none"),
                   _linear_shape("mlp.fc2_latent_proj", hidden, config.moe_latent_size, count, "none")]
    return shapes


def _mtp_shapes(config: HybridConfig) -> list[ParameterShape]:
    """Return the parameters of multi-token prediction."""
    hidden, depths = config.hidden_size, config.num_mtp_depths
    inner = layer_shapes(replace(config, hybrid_layer_pattern=config.mtp_layers))
    names = ("enorm", "hnorm", "final_layernorm")
    return [*(ParameterShape(f"mtp.layers.{name}.weight", (hidden,), depths, "none", "last") for name in names),
            ParameterShape("mtp.layers.eh_proj.weight", (hidden, 2 * hidden), depths, "tp", "last"),
            *(ParameterShape(f"mtp.layers.mtp_model_layer.{shape.name}", shape.shape, depths * shape.count, shape.split,
                             "last") for shape in inner)]


def nemotron_source(path: str, config: HybridConfig, vision: dict[str, dict[str, str]] | None = None) -> MegatronSource:
    """Return where the parts of a model are in a Megatron checkpoint of a whole Nemotron model.

    Args:
        path: value of --load-nemotron-checkpoint.
        config: resolved sizes.
        vision: `prefixes` of the encoder's module; None for a text model, which skips encoder and projector.
    """
    ignored = [*CHECKPOINT_IGNORED]
    if not config.num_mtp_depths:
        ignored.append(CHECKPOINT_MTP)
    if not vision:
        ignored.append(CHECKPOINT_ENCODER)
    return MegatronSource(path, CHECKPOINT_FLAG, {**(vision or {}), LANGUAGE: {"": "language_model."}},
                          tuple(ignored))
