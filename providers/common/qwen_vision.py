"""The vision towers of the Qwen-VL families with their mergers as plain data: flags, checks, parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from mimo.grid.spec import GridSpec
from mimo.protocols import ParameterShape, VideoSize
from mimo.visual import TokenGrid
from providers.common.checks import Problems
from providers.common.vision import layer_shapes, norm_shapes

NUM_CHANNELS = 3
NORM_EPSILON = 1e-6
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class QwenVisionConfig:
    """Vision transformer, and the mergers that turn a block of patches into a language token.

    Attributes:
        vision_dynamic_resolution: whether images have any size and are packed.
        vision_num_channels: red, green and blue.
        vision_sizes: names of the fields that are sizes of the tower.
    """

    vision_dynamic_resolution: ClassVar[bool] = True
    vision_num_channels: ClassVar[int] = NUM_CHANNELS
    vision_sizes: ClassVar[tuple[str, ...]] = (
        "vision_patch_size", "vision_temporal_patch_size", "vision_spatial_merge_size", "vision_hidden_size",
        "vision_num_layers", "vision_num_attention_heads", "vision_ffn_hidden_size")

    vision_patch_size: int = 14
    """Side length of a patch, in pixels."""
    vision_temporal_patch_size: int = 2
    """Frames in a patch. An image is repeated this many times."""
    vision_spatial_merge_size: int = 2
    """N by N neighbouring patches become one language token."""
    vision_hidden_size: int = 1280
    """Width of the vision transformer."""
    vision_num_layers: int = 32
    """Layers."""
    vision_num_attention_heads: int = 16
    """Attention heads."""
    vision_ffn_hidden_size: int = 3420
    """Inner width of the MLP."""

    @property
    def size_multiple(self) -> int:
        """Pixels a side of the square that becomes one language token."""
        return self.vision_patch_size * self.vision_spatial_merge_size

    @property
    def feature_size(self) -> int:
        """Width of a token before and inside a merger."""
        return self.vision_hidden_size * self.vision_spatial_merge_size**2


@dataclass(frozen=True)
class Qwen25VisionConfig(QwenVisionConfig):
    """Tower of Qwen2.5-VL: gated MLPs, window attention. The defaults are those of the published models."""

    vision_window_size: int = 112
    """Side length in pixels of the windows within which most layers attend."""
    vision_full_attention_layers: tuple[int, ...] = (7, 15, 23, 31)
    """Numbers, from 0, of the layers that attend within whole images and frames."""
    vision_tokens_per_second: int = 2
    """Number of time positions in a second of video."""

    @property
    def window_side(self) -> int:
        """Language tokens a side of a window."""
        return self.vision_window_size // self.vision_spatial_merge_size // self.vision_patch_size


@dataclass(frozen=True)
class Qwen3VisionConfig(QwenVisionConfig):
    """Tower of Qwen3-VL: learned positions, levels (DeepStack). The defaults are those of the 8B model."""

    vision_sizes: ClassVar[tuple[str, ...]] = (*QwenVisionConfig.vision_sizes, "vision_num_position_embeddings")

    vision_patch_size: int = 16
    vision_hidden_size: int = 1152
    vision_num_layers: int = 27
    vision_ffn_hidden_size: int = 4304
    vision_num_position_embeddings: int = 2304
    """Number of learned positions, a square grid that is interpolated for each image."""
    vision_hidden_act: Literal["quick_gelu", "gelu", "gelu_tanh"] = "gelu_tanh"
    """Activation of the MLP."""
    vision_deepstack_layers: tuple[int, ...] = (8, 16, 24)
    """Numbers, from 0, of the layers whose outputs also go to the language model: the first to its first layer, the
    second to its second layer, and so on."""

    @property
    def num_mergers(self) -> int:
        """Number of mergers: one for the output of the tower, and one for each level."""
        return 1 + len(self.vision_deepstack_layers)


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


def whole_video_grid(config: Qwen25VisionConfig, size: VideoSize) -> TokenGrid:
    """Return the language tokens of a video of Qwen2.5-VL. Raises ValueError for a wrong size or number of frames."""
    together = config.vision_temporal_patch_size
    frame = token_grid(config, size.height, size.width)
    if size.frames % together:
        raise ValueError(f"a video of {size.frames} frames: must be a multiple of --vision-temporal-patch-size "
                         f"{together}")
    if not size.frame_seconds > 0:
        raise ValueError(f"a video whose frames are {size.frame_seconds} seconds apart: positions of its tokens need "
                         "the time")
    # Processors pass the seconds of a temporal patch on in float32, which decides some positions.
    seconds = float(np.float32(together * size.frame_seconds))
    return TokenGrid(frame.rows, frame.columns, size.frames // together, config.vision_tokens_per_second * seconds)


def temporal_patch_grid(config: Qwen3VisionConfig, size: VideoSize) -> TokenGrid:
    """Return the language tokens of a temporal patch of Qwen3-VL, positioned as an image.

    Raises:
        ValueError: wrong size in pixels, or a video that is not cut into temporal patches.
    """
    if size.frames != config.vision_temporal_patch_size:
        raise ValueError(f"a video of {size.frames} frames: the family has a placeholder for every "
                         f"{config.vision_temporal_patch_size} frames (--vision-temporal-patch-size), each behind text "
                         "that says its time")
    return token_grid(config, size.height, size.width)


def check_qwen_vision(config: QwenVisionConfig, problems: Problems) -> None:
    """Note encoder sizes that no layout can hold."""
    for name in config.vision_sizes:
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
    if isinstance(config, Qwen25VisionConfig):
        _check_windows(config, problems)
    elif isinstance(config, Qwen3VisionConfig):
        _check_positions_and_levels(config, problems)


def _check_windows(config: Qwen25VisionConfig, problems: Problems) -> None:
    if config.window_side < 1:
        problems.add(f"--vision-window-size {config.vision_window_size} is smaller than a language token; it must be "
                     f"at least {config.size_multiple} (--vision-patch-size {config.vision_patch_size} times "
                     f"--vision-spatial-merge-size {config.vision_spatial_merge_size})")
    outside = [layer for layer in config.vision_full_attention_layers if not 0 <= layer < config.vision_num_layers]
    if outside:
        problems.add(f"--vision-full-attention-layers {' '.join(map(str, config.vision_full_attention_layers))}: "
                     f"--vision-num-layers {config.vision_num_layers} has no layer {outside[0]}")


def _check_positions_and_levels(config: Qwen3VisionConfig, problems: Problems) -> None:
    side = math.isqrt(config.vision_num_position_embeddings)
    if side**2 != config.vision_num_position_embeddings:
        problems.add(f"--vision-num-position-embeddings {config.vision_num_position_embeddings} is not a square; "
                     f"nearest: {side**2} or {(side + 1)**2}")
    levels = config.vision_deepstack_layers
    if list(levels) != sorted(set(levels)) or any(not 0 <= layer < config.vision_num_layers for layer in levels):
        problems.add(f"--vision-deepstack-layers {' '.join(map(str, levels))}: needs numbers of layers in ascending "
                     f"order, from 0 to --vision-num-layers {config.vision_num_layers} less one")


def check_qwen_vision_grid(config: QwenVisionConfig, grid: GridSpec, problems: Problems) -> None:
    """Note sizes that the encoder grid cannot hold."""
    problems.divides("vision_num_layers", config.vision_num_layers, "encoder_pp", grid.pp)
    problems.divides("vision_num_attention_heads", config.vision_num_attention_heads, "encoder_tp", grid.tp)
    problems.divides("vision_ffn_hidden_size", config.vision_ffn_hidden_size, "encoder_tp", grid.tp)


def qwen_vision_shapes(config: QwenVisionConfig, language_size: int) -> list[ParameterShape]:
    """Return every parameter of tower and mergers; `language_size` is the width of the language model."""
    hidden, patch, merged = config.vision_hidden_size, config.vision_patch_size, config.feature_size
    prefix, mergers, first = "projector", 1, list[ParameterShape]()
    norms = norm_shapes("projector.norm", hidden, 1, "last", has_bias=False)
    # Qwen3-VL has biases in norms and patch embedding, Qwen2.5-VL has RMSNorm and gated MLPs.
    is_third = isinstance(config, Qwen3VisionConfig)
    if isinstance(config, Qwen3VisionConfig):
        prefix, mergers = "mergers", config.num_mergers
        first = [ParameterShape("conv1.bias", (hidden,), 1, "none", "first"),
                 ParameterShape("position_embeddings.weight", (config.vision_num_position_embeddings, hidden), 1,
                                "none", "first")]
        norms = [*norm_shapes("merger.norm", hidden, 1, "last"),
                 *norm_shapes("level_merger.norm", merged, mergers - 1, "last")]
    return [
        ParameterShape("conv1.weight", (hidden, NUM_CHANNELS, config.vision_temporal_patch_size, patch, patch), 1,
                       "none", "first"),
        *first,
        *layer_shapes(hidden, config.vision_num_layers, config.vision_ffn_hidden_size, gated=not is_third,
                      norm_bias=is_third),
        *norms,
        ParameterShape(f"{prefix}.linear_fc1.weight", (merged, merged), mergers, "tp", "last"),
        ParameterShape(f"{prefix}.linear_fc1.bias", (merged,), mergers, "tp", "last"),
        ParameterShape(f"{prefix}.linear_fc2.weight", (language_size, merged), mergers, "tp", "last"),
        ParameterShape(f"{prefix}.linear_fc2.bias", (language_size,), mergers, "none", "last"),
    ]
