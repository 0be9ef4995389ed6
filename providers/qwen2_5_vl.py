"""Qwen2.5-VL: a vision tower for images of any size, a Qwen2 decoder with rotary positions of three axes.

Sizes come from flags (the defaults are those of Qwen2.5-VL-7B) or from a Hugging Face `Qwen2_5_VLConfig`
(`--hf-config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo.protocols import ImageProcessing, VideoProcessing
from providers.common import hf_qwen_vl
from providers.common.decoder import check_multimodal_decoder
from providers.common.hf_processor import CLIP_MEAN, CLIP_STD
from providers.common.qwen_vision import Qwen25VisionConfig, check_qwen_vision, whole_video_grid
from providers.common.qwen_vl import QwenVlConfig, QwenVlProvider, check_token_ids


@dataclass(frozen=True)
class Config(Qwen25VisionConfig, QwenVlConfig):
    """Model family: Qwen2.5-VL."""

    num_layers: int = 28
    hidden_size: int = 3584
    num_attention_heads: int = 28
    num_query_groups: int = 4
    ffn_hidden_size: int = 18944
    vocab_size: int = 152064
    max_position_embeddings: int = 128000
    rotary_base: float = 1e6
    norm_epsilon: float = 1e-6
    add_qkv_bias: bool = True


class Qwen25VlProvider(QwenVlProvider):
    """The `mimo.protocols.ModelProvider` of Qwen2.5-VL. A video is one item of its text."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = (hf_qwen_vl.ARCHITECTURE,)
    # Images of 4 to 16,384 language tokens.
    processing = ImageProcessing("smart_resize", CLIP_MEAN, CLIP_STD, min_patches=16, max_patches=65536,
                                 source="the image processor of Qwen2.5-VL")
    # The published models have no video processor: transformers takes all frames, with the limits of images.
    of_videos = VideoProcessing(
        "qwen2_5_vl", CLIP_MEAN, CLIP_STD, fps=0.0, min_frames=4, max_frames=768, min_pixels=3136, max_pixels=12845056,
        temporal_patch_size=2, timestamps=False, source="the image processor of Qwen2.5-VL")
    processor = "Qwen2_5_VL"
    checks = (check_token_ids, check_multimodal_decoder, check_qwen_vision)
    cuts_videos = False
    grid_of_video = staticmethod(whole_video_grid)
    sizes_of_hf = staticmethod(hf_qwen_vl.qwen2_5_vl_sizes)
    config_of_sizes = staticmethod(hf_qwen_vl.qwen2_5_vl_config)
    model_types = (hf_qwen_vl.MODEL_TYPE,)


provider = Qwen25VlProvider()
from_hf = provider.from_hf
