"""The vision tower of Qwen3-VL and its mergers as plain data: flags, checks, parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape
from providers.common.checks import Problems
from providers.common.decoder import MultimodalDecoderConfig, check_multimodal_decoder
from providers.common.qwen_vision import NUM_CHANNELS


@dataclass(frozen=True)
class Qwen3VisionConfig:
    """Vision transformer, and the mergers that make a language token of a block of patches; the defaults are those of
    the 8B model.

    Attributes:
        vision_dynamic_resolution: images have any size and are packed.
        vision_num_channels: red, green and blue.
    """

    vision_dynamic_resolution: ClassVar[bool] = True
    vision_num_channels: ClassVar[int] = NUM_CHANNELS

    vision_patch_size: int = 16
    """Pixels a side of a patch."""
    vision_temporal_patch_size: int = 2
    """Frames of a patch. An image is repeated as often."""
    vision_spatial_merge_size: int = 2
    """N by N neighbouring patches become one language token."""
    vision_num_position_embeddings: int = 2304
    """Learned positions, a square grid that is stretched over each image."""
    vision_hidden_size: int = 1152
    """Width of the vision transformer."""
    vision_num_layers: int = 27
    """Layers."""
    vision_num_attention_heads: int = 16
    """Attention heads."""
    vision_ffn_hidden_size: int = 4304
    """Inner width of the MLP."""
    vision_hidden_act: Literal["quick_gelu", "gelu", "gelu_tanh"] = "gelu_tanh"
    """Activation of the MLP."""
    vision_deepstack_layers: tuple[int, ...] = (8, 16, 24)
    """Numbers, from 0, of the layers whose outputs go to the language model too: the first of them to its first layer,
    the second to its second, and so on."""

    @property
    def size_multiple(self) -> int:
        """Pixels a side of the square that becomes one language token."""
        return self.vision_patch_size * self.vision_spatial_merge_size

    @property
    def feature_size(self) -> int:
        """Width of a token before and inside a merger."""
        return self.vision_hidden_size * self.vision_spatial_merge_size**2

    @property
    def num_mergers(self) -> int:
        """Mergers: one for the output of the tower, one for each level."""
        return 1 + len(self.vision_deepstack_layers)


def check_qwen3_decoder(config: MultimodalDecoderConfig, problems: Problems) -> None:
    """Note sizes of the decoder that no layout can hold. There is a decoder layer for each level."""
    check_multimodal_decoder(config, problems)
    assert isinstance(config, Qwen3VisionConfig), "the decoder is checked with its tower"
    levels = config.vision_deepstack_layers
    if len(levels) > config.num_layers:
        problems.add(f"--vision-deepstack-layers {_listed(levels)}: --num-layers {config.num_layers} must be at least "
                     f"{len(levels)}, because each of these goes to a layer of its own")


def check_qwen3_vision(config: Qwen3VisionConfig, problems: Problems) -> None:
    """Note encoder sizes that no layout can hold."""
    for name in ("vision_patch_size", "vision_temporal_patch_size", "vision_spatial_merge_size",
                 "vision_num_position_embeddings", "vision_hidden_size", "vision_num_layers",
                 "vision_num_attention_heads", "vision_ffn_hidden_size"):
        problems.positive(name, getattr(config, name))
    if problems.found:
        return
    problems.divides("vision_hidden_size", config.vision_hidden_size, "vision_num_attention_heads",
                     config.vision_num_attention_heads)
    channels = config.vision_hidden_size // config.vision_num_attention_heads
    if channels % 4:
        problems.add(f"--vision-hidden-size {config.vision_hidden_size} --vision-num-attention-heads "
                     f"{config.vision_num_attention_heads}: heads of {channels} channels; rotary positions of rows and "
                     "columns need a multiple of 4")
    side = math.isqrt(config.vision_num_position_embeddings)
    if side**2 != config.vision_num_position_embeddings:
        problems.add(f"--vision-num-position-embeddings {config.vision_num_position_embeddings} is not a square; "
                     f"nearest: {side**2} or {(side + 1)**2}")
    levels = config.vision_deepstack_layers
    if list(levels) != sorted(set(levels)) or any(not 0 <= layer < config.vision_num_layers for layer in levels):
        problems.add(f"--vision-deepstack-layers {_listed(levels)}: needs numbers of layers in ascending order, from 0 "
                     f"to --vision-num-layers {config.vision_num_layers} less one")


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def check_qwen3_vision_grid(config: Qwen3VisionConfig, grid: GridSpec, problems: Problems) -> None:
    """Note sizes that the encoder grid cannot hold."""
    problems.divides("vision_num_layers", config.vision_num_layers, "encoder_pp", grid.pp)
    problems.divides("vision_num_attention_heads", config.vision_num_attention_heads, "encoder_tp", grid.tp)
    problems.divides("vision_ffn_hidden_size", config.vision_ffn_hidden_size, "encoder_tp", grid.tp)


def qwen3_vision_shapes(config: Qwen3VisionConfig, language_size: int) -> list[ParameterShape]:
    """Return every parameter of tower and mergers; `language_size` is the width of the language model."""
    hidden, layers, inner = config.vision_hidden_size, config.vision_num_layers, config.vision_ffn_hidden_size
    patch, merged = config.vision_patch_size, config.feature_size
    levels, mergers = len(config.vision_deepstack_layers), config.num_mergers

    def affine(name: str, width: int, count: int, stage: str = "layer") -> list[ParameterShape]:
        return [ParameterShape(f"{name}.{kind}", (width,), count, "none", stage) for kind in ("weight", "bias")]

    return [
        ParameterShape("conv1.weight", (hidden, NUM_CHANNELS, config.vision_temporal_patch_size, patch, patch), 1,
                       "none", "first"),
        ParameterShape("conv1.bias", (hidden,), 1, "none", "first"),
        ParameterShape("position_embeddings.weight", (config.vision_num_position_embeddings, hidden), 1, "none",
                       "first"),
        *affine("input_layernorm", hidden, layers), *affine("pre_mlp_layernorm", hidden, layers),
        ParameterShape("self_attention.linear_qkv.weight", (3 * hidden, hidden), layers, "tp"),
        ParameterShape("self_attention.linear_qkv.bias", (3 * hidden,), layers, "tp"),
        ParameterShape("self_attention.linear_proj.weight", (hidden, hidden), layers, "tp"),
        ParameterShape("self_attention.linear_proj.bias", (hidden,), layers),
        ParameterShape("mlp.linear_fc1.weight", (inner, hidden), layers, "tp"),
        ParameterShape("mlp.linear_fc1.bias", (inner,), layers, "tp"),
        ParameterShape("mlp.linear_fc2.weight", (hidden, inner), layers, "tp"),
        ParameterShape("mlp.linear_fc2.bias", (hidden,), layers),
        *affine("merger.norm", hidden, 1, "last"), *affine("level_merger.norm", merged, levels, "last"),
        ParameterShape("mergers.linear_fc1.weight", (merged, merged), mergers, "tp", "last"),
        ParameterShape("mergers.linear_fc1.bias", (merged,), mergers, "tp", "last"),
        ParameterShape("mergers.linear_fc2.weight", (language_size, merged), mergers, "tp", "last"),
        ParameterShape("mergers.linear_fc2.bias", (language_size,), mergers, "none", "last"),
    ]
