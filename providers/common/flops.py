"""Count the FLOPs of the model families for `mimo.observability.flops`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mimo.observability.flops import FlopComponent
from mimo.protocols import LANGUAGE
from providers.common.decoder import DecoderConfig, LanguageConfig
from providers.common.family import VISION
from providers.common.hybrid import ATTENTION, CONV_KERNEL, MAMBA, MLP, MOE, HybridConfig
from providers.common.mla import LatentDecoderConfig
from providers.common.qwen_vision import Qwen3VisionConfig, Qwen25VisionConfig, QwenVisionConfig
from providers.common.vision import VisionConfig

if TYPE_CHECKING:
    from providers.radio import RadioConfig

PROJECTOR = "projector"
# The fused first layer of a gated MLP computes the gate beside the inner values.
GATED = 2


def linear(*sizes: tuple[int, int]) -> float:
    """Count the FLOPs per token of linear layers, given as inputs and outputs."""
    return sum(2.0 * inputs * outputs for inputs, outputs in sizes)


def mlp(hidden: int, inner: int, gates: int = 1) -> float:
    """Count the FLOPs per token of a two-layer MLP whose first layer is `gates` times as wide as the second."""
    return linear((hidden, gates * inner), (inner, hidden))


def scores(query_channels: int, value_channels: int) -> float:
    """Count the FLOPs per pair of tokens of an attention layer, over the channels of all query heads."""
    return 2.0 * (query_channels + value_channels)


def output_layer(config: LanguageConfig) -> FlopComponent:
    """Count the logits of every token, over the vocabulary with its padding rows."""
    return FlopComponent(name="output layer", module=LANGUAGE, part=LANGUAGE, makes_logits=True,
                         linear=linear((config.hidden_size, config.padded_vocab_size())))


def decoder_components(config: DecoderConfig) -> list[FlopComponent]:
    """Return the components of a Llama-, Qwen- or Mixtral-style decoder."""
    hidden, channels = config.hidden_size, config.num_attention_heads * config.head_dim
    layer = linear((hidden, config.qkv_size), (channels, hidden))
    if config.num_experts:
        layer += linear((hidden, config.num_experts))
        layer += config.moe_router_topk * mlp(hidden, config.moe_ffn_hidden_size, GATED)
    else:
        layer += mlp(hidden, config.ffn_hidden_size, GATED)
    layers = FlopComponent(name="layers", module=LANGUAGE, part=LANGUAGE, linear=config.num_layers * layer,
                           attention=config.num_layers * scores(channels, channels), causal=True, recomputed=True)
    return [layers, output_layer(config)]


def latent_components(config: LatentDecoderConfig) -> list[FlopComponent]:
    """Return the components of a DeepSeek-V3-style decoder, whose keys and values are unfolded as in training."""
    hidden, values = config.hidden_size, config.num_attention_heads * config.v_head_dim
    attention = linear((hidden, config.compressed_kv_size), (config.kv_lora_rank, config.kv_size), (values, hidden))
    if config.q_lora_rank:
        attention += linear((hidden, config.q_lora_rank), (config.q_lora_rank, config.query_size))
    else:
        attention += linear((hidden, config.query_size))
    experts = linear((hidden, config.num_experts))
    experts += config.moe_router_topk * mlp(hidden, config.moe_ffn_hidden_size, GATED)
    experts += mlp(hidden, config.moe_shared_expert_intermediate_size, GATED)
    sparse, layers = sum(config.moe_layer_freq), config.num_layers
    per_token = layers * attention + sparse * experts + (layers - sparse) * mlp(hidden, config.ffn_hidden_size, GATED)
    return [FlopComponent(name="layers", module=LANGUAGE, part=LANGUAGE, linear=per_token,
                          attention=layers * scores(config.query_size, values), causal=True, recomputed=True),
            output_layer(config)]


def hybrid_components(config: HybridConfig) -> list[FlopComponent]:
    """Return the components of a Nemotron-H-style decoder, with all depths of multi-token prediction."""
    hidden, logits, depths = config.hidden_size, output_layer(config), config.num_mtp_depths
    found = [_hybrid_layers("layers", config, config.layers)]
    for depth in range(1, depths + 1):
        found += [FlopComponent(name=f"mtp {depth} projection", module=LANGUAGE, part=LANGUAGE,
                                linear=linear((2 * hidden, hidden))),
                  _hybrid_layers(f"mtp {depth} layers", config, config.mtp_layers)]
    # The logits of every depth use the same output layer.
    return [*found, *[logits] * (1 + depths)]


def _hybrid_layers(name: str, config: HybridConfig, symbols: str) -> FlopComponent:
    """Return the components of the layers. The scan of Mamba-2 (arXiv:2405.21060, section 6) runs in chunks.

    There are G groups, H heads of P channels, and states of N. A pair of tokens of a chunk costs 2 G N in `C B^T` and
    2 H P in its product with x, both causal. A token costs 2 N H P to add to its chunk's state, and 2 N H P to read the
    state before it.
    """
    mamba, attention = symbols.count(MAMBA), symbols.count(ATTENTION)
    inner, state = config.mamba_inner_size, config.mamba_state_dim
    channels = config.num_attention_heads * config.head_dim
    return FlopComponent(
        name=name, module=LANGUAGE, part=LANGUAGE, recomputed=True,
        linear=sum(hybrid_layer_flops(config, symbol) for symbol in symbols),
        convolution=mamba * 2.0 * CONV_KERNEL * config.mamba_conv_size,
        attention=attention * scores(channels, channels), causal=True,
        scan=mamba * 4.0 * state * inner, scan_pairs=mamba * 2.0 * (config.mamba_num_groups * state + inner))


def hybrid_layer_flops(config: HybridConfig, symbol: str) -> float:
    """Count the FLOPs per token of a layer's linear layers, in a MoE layer those of the experts of a token."""
    hidden = config.hidden_size
    if symbol == MAMBA:
        return linear((hidden, sum(config.mamba_in_proj_rows)), (config.mamba_inner_size, hidden))
    if symbol == ATTENTION:
        return linear((hidden, config.qkv_size), (config.num_attention_heads * config.head_dim, hidden))
    if symbol == MLP:
        return mlp(hidden, config.ffn_hidden_size)
    assert symbol == MOE, symbol
    width = config.expert_size
    found = linear((hidden, config.num_experts)) + mlp(hidden, config.moe_shared_expert_intermediate_size)
    found += config.moe_router_topk * mlp(width, config.moe_ffn_hidden_size)
    return found + (linear((hidden, width), (width, hidden)) if config.moe_latent_size else 0.0)


def vision_components(config: VisionConfig | RadioConfig, *, num_extra: int, parallel_patches: bool) -> Iterable[
        FlopComponent]:
    """Return the components of a vision transformer. A language token is `vision_pixel_shuffle ** 2` patches.

    Args:
        config: its sizes.
        num_extra: class and register tokens before the patches of each image.
        parallel_patches: whether the patch embedding is one of Megatron's linear layers.
    """
    hidden, layers, patches = config.vision_hidden_size, config.vision_num_layers, config.vision_pixel_shuffle**2
    pixels = config.vision_num_channels * config.vision_patch_size**2
    layer = linear((hidden, 3 * hidden), (hidden, hidden)) + mlp(hidden, config.vision_ffn_hidden_size)
    yield FlopComponent(name="patch embedding", module=VISION, part=VISION, linear=linear((pixels, hidden)),
                        opens_part=True, parallel_linear=parallel_patches, tokens_per_token=patches)
    yield FlopComponent(name="layers", module=VISION, part=VISION, linear=layers * layer,
                        attention=layers * scores(hidden, hidden), tokens_per_token=patches, extra_tokens=num_extra,
                        recomputed=True)


def qwen_vision_components(config: QwenVisionConfig, language_size: int) -> Iterable[FlopComponent]:
    """Return the components of a tower of Qwen-VL and of its mergers; `language_size` is the width of their output.

    Every window of Qwen2.5-VL counts as a whole one.
    """
    hidden, layers, patches = config.vision_hidden_size, config.vision_num_layers, config.vision_spatial_merge_size**2
    pixels = config.vision_num_channels * config.vision_temporal_patch_size * config.vision_patch_size**2
    products, inner = layers * linear((hidden, 3 * hidden), (hidden, hidden)), config.vision_ffn_hidden_size
    whole, mergers = layers, 1
    if isinstance(config, Qwen25VisionConfig):
        products += layers * mlp(hidden, inner, GATED)
        whole = len(config.vision_full_attention_layers)
        products += (layers - whole) * scores(hidden, hidden) * config.window_side**2 * patches
    elif isinstance(config, Qwen3VisionConfig):
        products += layers * mlp(hidden, inner)
        mergers = config.num_mergers
    yield FlopComponent(name="patch embedding", module=VISION, part=VISION, linear=linear((pixels, hidden)),
                        opens_part=True, parallel_linear=False, tokens_per_token=patches)
    yield FlopComponent(name="layers", module=VISION, part=VISION, linear=products,
                        attention=whole * scores(hidden, hidden), tokens_per_token=patches, recomputed=True)
    for _ in range(mergers):
        yield from projector_components(config.feature_size, config.feature_size, language_size, has_norm=True)


def projector_components(feature_size: int, inner: int, language_size: int, *, has_norm: bool) -> Iterable[
        FlopComponent]:
    """Return the components of a two-layer projector of single tokens.

    Args:
        feature_size: width of its input.
        inner: its inner width.
        language_size: width of its output.
        has_norm: whether a norm with weights comes before it.
    """
    yield FlopComponent(name="projector, first layer", module=VISION, part=PROJECTOR,
                        linear=linear((feature_size, inner)), opens_part=not has_norm)
    yield FlopComponent(name="projector, second layer", module=VISION, part=PROJECTOR,
                        linear=linear((inner, language_size)))
