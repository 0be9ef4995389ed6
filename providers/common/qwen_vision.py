"""The vision tower of Qwen2.5-VL with its merger as plain data: flags, checks, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo.data.positions import TokenGrid
from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape
from providers.common.checks import Problems

NUM_CHANNELS = 3
NORM_EPSILON = 1e-6
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class QwenVisionConfig:
    """Vision transformer with window attention, and the merger that makes a language token of a block of patches; the
    defaults are those of the published models.

    Attributes:
        vision_dynamic_resolution: images have any size and are packed.
        vision_num_channels: red, green and blue.
    """

    vision_dynamic_resolution: ClassVar[bool] = True
    vision_num_channels: ClassVar[int] = NUM_CHANNELS

    vision_patch_size: int = 14
    """Pixels a side of a patch."""
    vision_temporal_patch_size: int = 2
    """Frames of a patch. An image is repeated as often."""
    vision_spatial_merge_size: int = 2
    """N by N neighbouring patches become one language token."""
    vision_hidden_size: int = 1280
    """Width of the vision transformer."""
    vision_num_layers: int = 32
    """Layers."""
    vision_num_attention_heads: int = 16
    """Attention heads."""
    vision_ffn_hidden_size: int = 3420
    """Inner width of the gated MLP."""
    vision_window_size: int = 112
    """Pixels a side of the windows within which most layers attend."""
    vision_full_attention_layers: tuple[int, ...] = (7, 15, 23, 31)
    """Numbers, from 0, of the layers that attend within whole images."""
    vision_tokens_per_second: int = 2
    """Time positions of a second of video. It has no effect, because video is not supported yet."""

    @property
    def size_multiple(self) -> int:
        """Pixels a side of the square that becomes one language token."""
        return self.vision_patch_size * self.vision_spatial_merge_size

    @property
    def feature_size(self) -> int:
        """Width of a token before and inside the merger."""
        return self.vision_hidden_size * self.vision_spatial_merge_size**2

    @property
    def window_side(self) -> int:
        """Language tokens a side of a window."""
        return self.vision_window_size // self.vision_spatial_merge_size // self.vision_patch_size


def token_grid(config: QwenVisionConfig, height: int, width: int) -> TokenGrid:
    """Return the language tokens of an image of `height` by `width` pixels. Raises ValueError for other sizes."""
    multiple = config.size_multiple
    if height < 1 or width < 1 or height % multiple or width % multiple:
        raise ValueError(f"an image of {height} x {width} pixels (height x width): both must be multiples of "
                         f"{multiple} (--vision-patch-size {config.vision_patch_size} times "
                         f"--vision-spatial-merge-size {config.vision_spatial_merge_size})")
    return TokenGrid(height // multiple, width // multiple)


def image_tokens(config: QwenVisionConfig, height: int, width: int) -> int:
    """Count the language tokens of an image. Raises the errors of `token_grid`."""
    return token_grid(config, height, width).size


def check_qwen_vision(config: QwenVisionConfig, problems: Problems) -> None:
    """Note encoder sizes that no layout can hold."""
    for name in ("vision_patch_size", "vision_temporal_patch_size", "vision_spatial_merge_size", "vision_hidden_size",
                 "vision_num_layers", "vision_num_attention_heads", "vision_ffn_hidden_size"):
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
    if config.window_side < 1:
        problems.add(f"--vision-window-size {config.vision_window_size} is smaller than a language token; it must be "
                     f"at least {config.size_multiple} (--vision-patch-size {config.vision_patch_size} times "
                     f"--vision-spatial-merge-size {config.vision_spatial_merge_size})")
    outside = [layer for layer in config.vision_full_attention_layers if not 0 <= layer < config.vision_num_layers]
    if outside:
        problems.add(f"--vision-full-attention-layers {' '.join(map(str, config.vision_full_attention_layers))}: "
                     f"--vision-num-layers {config.vision_num_layers} has no layer {outside[0]}")


def check_qwen_vision_grid(config: QwenVisionConfig, grid: GridSpec, problems: Problems) -> None:
    """Note sizes that the encoder grid cannot hold."""
    problems.divides("vision_num_layers", config.vision_num_layers, "encoder_pp", grid.pp)
    problems.divides("vision_num_attention_heads", config.vision_num_attention_heads, "encoder_tp", grid.tp)
    problems.divides("vision_ffn_hidden_size", config.vision_ffn_hidden_size, "encoder_tp", grid.tp)


def qwen_vision_shapes(config: QwenVisionConfig, language_size: int) -> list[ParameterShape]:
    """Return every parameter of encoder and merger; `language_size` is the width of the language model."""
    hidden, layers, inner = config.vision_hidden_size, config.vision_num_layers, config.vision_ffn_hidden_size
    patch, merged = config.vision_patch_size, config.feature_size
    return [
        ParameterShape("conv1.weight", (hidden, NUM_CHANNELS, config.vision_temporal_patch_size, patch, patch), 1,
                       "none", "first"),
        ParameterShape("input_layernorm.weight", (hidden,), layers),
        ParameterShape("pre_mlp_layernorm.weight", (hidden,), layers),
        ParameterShape("self_attention.linear_qkv.weight", (3 * hidden, hidden), layers, "tp"),
        ParameterShape("self_attention.linear_qkv.bias", (3 * hidden,), layers, "tp"),
        ParameterShape("self_attention.linear_proj.weight", (hidden, hidden), layers, "tp"),
        ParameterShape("self_attention.linear_proj.bias", (hidden,), layers),
        ParameterShape("mlp.linear_fc1.weight", (2 * inner, hidden), layers, "tp"),
        ParameterShape("mlp.linear_fc1.bias", (2 * inner,), layers, "tp"),
        ParameterShape("mlp.linear_fc2.weight", (hidden, inner), layers, "tp"),
        ParameterShape("mlp.linear_fc2.bias", (hidden,), layers),
        ParameterShape("projector.norm.weight", (hidden,), 1, "none", "last"),
        ParameterShape("projector.linear_fc1.weight", (merged, merged), 1, "tp", "last"),
        ParameterShape("projector.linear_fc1.bias", (merged,), 1, "tp", "last"),
        ParameterShape("projector.linear_fc2.weight", (language_size, merged), 1, "tp", "last"),
        ParameterShape("projector.linear_fc2.bias", (language_size,), 1, "none", "last"),
    ]
