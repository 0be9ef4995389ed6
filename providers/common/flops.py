"""Floating-point operations of the model families: matrix products of a forward pass, and of training.

A product of `[m, k]` and `[k, n]` counts 2 m k n. Norms, activations, softmax and embeddings do not count, nor does
what is computed twice (recomputation) or for padding. Causal products count the half that is needed. So these are model
FLOPs in the sense of Chowdhery et al. (PaLM, arXiv:2204.02311, appendix B), whatever the kernels do.

Lengths may be means: everything but attention is linear in them, and attention over sequences of unlike lengths costs
more than over as many equally long ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from providers.common.decoder import DecoderConfig
from providers.common.hybrid import ATTENTION, CONV_KERNEL, MAMBA, MLP, MOE, HybridConfig
from providers.common.vision import VisionConfig

if TYPE_CHECKING:
    from providers.radio import RadioConfig

# Tokens of a chunk of the scan (the wheel's MambaMixer).
SSD_CHUNK = 128
PROJECTOR = "projector"


def linear_flops(tokens: float, *sizes: tuple[int, int]) -> float:
    """Of linear layers, each with its inputs and outputs, for `tokens` tokens."""
    return sum(2.0 * tokens * inputs * outputs for inputs, outputs in sizes)


def attention_flops(length: float, channels: int, *, causal: bool) -> float:
    """Of scores and weighted values of one sequence; `channels` are those of all query heads."""
    return 4.0 * length**2 * channels / (2 if causal else 1)


def ssd_flops(config: HybridConfig, length: float) -> float:
    """Of the scan of a Mamba-2 layer over one sequence (Dao and Gu, arXiv:2405.21060, section 6).

    In chunks of Q tokens, with G groups, H heads of P channels and states of N, a token: `C B^T` inside its chunk
    (2 Q N G) and the product of that with x (2 Q P H), both causal; its part of the chunk's state (2 N P H) and what it
    reads of the state before (2 N P H).
    """
    chunk, state = min(length, SSD_CHUNK), config.mamba_state_dim
    inside = chunk * (config.mamba_num_groups * state + config.mamba_inner_size)
    return length * (inside + 4.0 * state * config.mamba_inner_size)


def hybrid_layer_flops(config: HybridConfig, symbol: str, length: float) -> float:
    """Of one layer of a pattern over one sequence; of a MoE layer, the experts that a token is sent to."""
    hidden = config.hidden_size
    if symbol == MAMBA:
        conv = 2.0 * length * CONV_KERNEL * config.mamba_conv_size
        return conv + ssd_flops(config, length) + linear_flops(
            length, (hidden, sum(config.mamba_in_proj_rows)), (config.mamba_inner_size, hidden))
    if symbol == ATTENTION:
        channels = config.num_attention_heads * config.head_dim
        return attention_flops(length, channels, causal=True) + linear_flops(
            length, (hidden, config.qkv_size), (channels, hidden))
    if symbol == MLP:
        return linear_flops(length, (hidden, config.ffn_hidden_size), (config.ffn_hidden_size, hidden))
    assert symbol == MOE, symbol
    width, shared = config.expert_size, config.moe_shared_expert_intermediate_size
    routed = linear_flops(length * config.moe_router_topk, (width, config.moe_ffn_hidden_size),
                          (config.moe_ffn_hidden_size, width))
    latent = [(hidden, width), (width, hidden)] if config.moe_latent_size else []
    return routed + linear_flops(length, (hidden, config.num_experts), (hidden, shared), (shared, hidden), *latent)


def hybrid_flops(config: HybridConfig, lengths: Iterable[float]) -> float:
    """Of a forward pass of a Nemotron-H-style decoder over sequences, logits and multi-token prediction included."""
    logits, depths = (config.hidden_size, config.padded_vocab_size()), config.num_mtp_depths
    total = 0.0
    for length in lengths:
        layers = config.layers + config.mtp_layers * depths
        total += sum(hybrid_layer_flops(config, symbol, length) for symbol in layers)
        total += linear_flops(length, *[logits] * (1 + depths), *[(2 * logits[0], logits[0])] * depths)
    return total


def decoder_flops(config: DecoderConfig, lengths: Iterable[float]) -> float:
    """Of a forward pass of a Llama- or Qwen-style decoder over sequences, logits included."""
    hidden, channels = config.hidden_size, config.num_attention_heads * config.head_dim
    layer = [(hidden, config.qkv_size), (channels, hidden)]
    if config.num_experts:
        expert = [(hidden, 2 * config.moe_ffn_hidden_size), (config.moe_ffn_hidden_size, hidden)]
        layer += [(hidden, config.num_experts), *expert * config.moe_router_topk]
    else:
        layer += [(hidden, 2 * config.ffn_hidden_size), (config.ffn_hidden_size, hidden)]
    sizes = [*layer * config.num_layers, (hidden, config.padded_vocab_size())]
    return sum(linear_flops(length, *sizes) + config.num_layers * attention_flops(length, channels, causal=True)
               for length in lengths)


def vision_flops(config: VisionConfig | RadioConfig, num_extra: int, image_tokens: Iterable[float]) -> float:
    """Of a forward pass of a vision transformer, without its projector.

    Args:
        config: its sizes.
        num_extra: class tokens before the patches of each image.
        image_tokens: language tokens that each image becomes.
    """
    hidden, inner = config.vision_hidden_size, config.vision_ffn_hidden_size
    pixels = config.vision_num_channels * config.vision_patch_size**2
    layer = [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
    total = 0.0
    for tokens in image_tokens:
        patches = tokens * config.vision_pixel_shuffle**2
        length = patches + num_extra
        total += linear_flops(patches, (pixels, hidden)) + config.vision_num_layers * (
            linear_flops(length, *layer) + attention_flops(length, hidden, causal=False))
    return total


def projector_flops(feature_size: int, inner: int, language_size: int, image_tokens: Iterable[float]) -> float:
    """Of a forward pass of a two-layer projector."""
    return linear_flops(sum(image_tokens), (feature_size, inner), (inner, language_size))


def training_flops(parts: Mapping[str, float], frozen: frozenset[str]) -> float:
    """Of forward and backward pass.

    A part costs its forward pass again for the gradients of its weights, unless it is frozen, and once more for those
    of its input, where it or a part before it trains.

    Args:
        parts: forward FLOPs of each part, from input to output.
        frozen: parts that do not train.
    """
    total, upstream_trains = 0.0, False
    for name, flops in parts.items():
        trains = name not in frozen
        upstream_trains = upstream_trains or trains
        total += flops * (1 + trains + upstream_trains)
    return total

