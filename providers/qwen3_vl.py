"""Qwen3-VL: a vision tower whose features of several depths (DeepStack) go to the first layers of a Qwen3 decoder.

The decoder is dense or has experts.

Images have any size, and rotary positions of the decoder have three axes, which are interleaved. Sizes come from flags
(the defaults are those of Qwen3-VL-8B) or from a Hugging Face `Qwen3VLConfig` or `Qwen3VLMoeConfig` (`--hf-config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo.protocols import ImageProcessing, VideoProcessing
from providers.common import hf_qwen3_vl
from providers.common.checks import Problems
from providers.common.decoder import check_multimodal_decoder
from providers.common.qwen_vision import Qwen3VisionConfig, check_qwen_vision, temporal_patch_grid
from providers.common.qwen_vl import QwenVlConfig, QwenVlProvider, check_token_ids

HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Config(Qwen3VisionConfig, QwenVlConfig):
    """Model family: Qwen3-VL."""

    interleaved_sections: ClassVar[bool] = True

    mrope_section: tuple[int, ...] = (24, 20, 20)
    num_layers: int = 36
    hidden_size: int = 4096
    num_attention_heads: int = 32
    num_query_groups: int = 8
    ffn_hidden_size: int = 12288
    kv_channels: int = 128
    vocab_size: int = 151936
    max_position_embeddings: int = 262144
    rotary_base: float = 5e6
    norm_epsilon: float = 1e-6
    qk_layernorm: bool = True


def check_levels(config: Config, problems: Problems) -> None:
    """Note a decoder with fewer layers than levels."""
    levels = config.vision_deepstack_layers
    if len(levels) > config.num_layers:
        problems.add(f"--vision-deepstack-layers {' '.join(map(str, levels))}: --num-layers {config.num_layers} must "
                     f"be at least {len(levels)}, because each of these goes to another layer")


class Qwen3VlProvider(QwenVlProvider):
    """The `mimo.protocols.ModelProvider` of Qwen3-VL. Each temporal patch of a video is an item of its text."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = (hf_qwen3_vl.DENSE.architecture, hf_qwen3_vl.MOE.architecture)
    # Images of 64 to 16,384 language tokens.
    processing = ImageProcessing("smart_resize", HALF, HALF, min_patches=256, max_patches=65536,
                                 source="the image processor of Qwen3-VL")
    of_videos = VideoProcessing(
        "qwen3_vl", HALF, HALF, fps=2.0, min_frames=4, max_frames=768, min_pixels=4096, max_pixels=25165824,
        temporal_patch_size=2, timestamps=True, source="the video processor of Qwen3-VL")
    processor = "Qwen3VL"
    checks = (check_token_ids, check_qwen_vision, check_multimodal_decoder, check_levels)
    cuts_videos = True
    grid_of_video = staticmethod(temporal_patch_grid)
    sizes_of_hf = staticmethod(hf_qwen3_vl.qwen3_vl_sizes)
    config_of_sizes = staticmethod(hf_qwen3_vl.qwen3_vl_config)
    model_types = tuple(hf_qwen3_vl.KINDS)

    def num_levels(self, config: Config, module: str) -> int:
        return len(self.resolved(config).vision_deepstack_layers)


provider = Qwen3VlProvider()
from_hf = provider.from_hf
