"""Base of the providers of the Qwen-VL families: images of any size, videos, three axes of rotary positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mimo.observability.flops import FlopComponent
from mimo.protocols import (
    LANGUAGE,
    BuildContext,
    ImageProcessing,
    ParameterShape,
    TokenSpec,
    VideoProcessing,
    VideoSize,
)
from mimo.visual import TokenGrid
from providers.common.checks import Problems
from providers.common.decoder import MultimodalDecoderConfig, check_decoder_grid, decoder_shapes
from providers.common.family import VISION, VisionLanguageProvider
from providers.common.flops import decoder_components, qwen_vision_components
from providers.common.hf_qwen_vl import HF_KEYS, TOKEN_DEFAULTS, module_sizes
from providers.common.qwen_processor import (
    check_special_tokens,
    read_qwen_processing,
    read_qwen_video_processing,
    write_qwen,
    write_qwen_processing,
    write_qwen_tokenizer,
    write_qwen_video_processing,
)
from providers.common.qwen_vision import (
    QwenVisionConfig,
    check_qwen_vision_grid,
    image_tokens,
    qwen_vision_shapes,
    token_grid,
)

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.weights.rules import WeightMap

ENCODER = "tower"


@dataclass(frozen=True)
class QwenVlConfig(MultimodalDecoderConfig):
    """A decoder with the special tokens of the Qwen-VL families."""

    image_token_id: int = 151655
    """Token id that stands for an image."""
    video_token_id: int = 151656
    """Token id that stands for a video or, in Qwen3-VL, for a temporal patch of one."""
    vision_start_token_id: int = 151652
    """Token id before an image or a video, which the data set writes."""
    vision_end_token_id: int = 151653
    """Token id after an image or a video, which the data set writes."""
    hf_config: str = ""
    """Hugging Face config.json, or the folder that holds one. Its sizes replace those of the flags."""


def check_token_ids(config: QwenVlConfig, problems: Problems) -> None:
    """Note placeholders of images and videos that are the same."""
    if config.image_token_id == config.video_token_id:
        problems.add(f"--image-token-id {config.image_token_id} --video-token-id {config.video_token_id}: must differ")


class QwenVlProvider(VisionLanguageProvider):
    """Methods of `mimo.protocols.ModelProvider` that the Qwen-VL families share; the configuration may be unresolved.

    Attributes:
        processing: the image processor of the published models.
        of_videos: the video processor of the published models.
        processor: name of the image processor's class in transformers, without its end.
        cuts_videos: whether each temporal patch of a video has a placeholder of its own.
        grid_of_video: returns the language tokens of a video as a grid, or raises ValueError.
        model_types: values of `model_type` in a config.json of the family.
        config_of_sizes: returns the whole config.json of a decoder, a tower and token ids.
    """

    processing: ClassVar[ImageProcessing]
    of_videos: ClassVar[VideoProcessing]
    processor: ClassVar[Literal["Qwen2_5_VL", "Qwen3VL"]]
    cuts_videos: ClassVar[bool]
    grid_of_video: ClassVar[Callable[[Any, VideoSize], TokenGrid]]
    model_types: ClassVar[tuple[str, ...]]
    config_of_sizes: ClassVar[Callable[[Any, Any, dict[str, int]], dict[str, Any]]]
    check_language_grid = staticmethod(check_decoder_grid)
    check_encoder_grid = staticmethod(check_qwen_vision_grid)
    image_tokens = staticmethod(image_tokens)
    language_shapes = staticmethod(decoder_shapes)

    def language_spec(self, config: Any, context: BuildContext | None) -> ModuleSpec:
        from providers.common.qwen_build import qwen_decoder_spec

        return qwen_decoder_spec(self.resolved(config), context)

    def encoder_spec(self, config: Any, module: str, context: BuildContext) -> ModuleSpec:
        from providers.common.qwen_build import qwen_vision_spec

        self.check_module(module)
        config = self.resolved(config)
        return qwen_vision_spec(config, ENCODER, config.hidden_size, context)

    def weight_map(self, config: Any, module: str) -> WeightMap:
        """Return the names of the family's checkpoint. For a dense language model, a text model's works too."""
        from providers.common import qwen_weights

        self.check_module(module)
        config = self.resolved(config)
        return (qwen_weights.qwen_decoder_map(config) if module == LANGUAGE
                else qwen_weights.qwen_vision_map(config, ENCODER))

    def flop_components(self, config: Any) -> list[FlopComponent]:
        config = self.resolved(config)
        return [*qwen_vision_components(config, config.hidden_size), *decoder_components(config)]

    def with_hf(self, config: Any, values: Mapping[str, Any], module: str) -> Any:
        return dataclasses.replace(config, **module_sizes(dict(values), module, self.model_types, self.sizes_of_hf))

    def hf_keys(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return HF_KEYS

    def hf_config(self, config: Any) -> dict[str, Any]:
        """Return the model as a config.json of the family. Raises ValueError if none has all its parts."""
        config = self.resolved(config)
        return self.config_of_sizes(config, config, {key: getattr(config, key) for key in TOKEN_DEFAULTS})

    def vision_shapes(self, config: QwenVisionConfig) -> list[ParameterShape]:
        return qwen_vision_shapes(config, self.hidden_size(config))

    def token_spec(self, config: Any) -> TokenSpec:
        config = self.resolved(config)
        return TokenSpec(config.vocab_size, config.image_token_id, 0, config.vision_num_channels,
                         patch_size=config.vision_patch_size, size_multiple=config.size_multiple,
                         merge_size=config.vision_spatial_merge_size,
                         temporal_patch_size=config.vision_temporal_patch_size, video_token_id=config.video_token_id,
                         placeholder_frames=config.vision_temporal_patch_size if self.cuts_videos else 0)

    def token_grid(self, config: Any, module: str, height: int, width: int) -> TokenGrid:
        return token_grid(self.resolved(config), height, width)

    def video_token_ids(self, config: Any) -> dict[str, int]:
        return {VISION: self.resolved(config).video_token_id}

    def video_grid(self, config: Any, module: str, size: VideoSize) -> TokenGrid:
        return self.grid_of_video(self.resolved(config), size)

    def image_processing(self, config: Any, folder: str = "") -> ImageProcessing | None:
        """Return how images become pixels: as a folder's files say, or as in the published models."""
        return read_qwen_processing(folder, self.resolved(config)) if folder else self.processing

    def write_image_processing(self, config: Any, folder: Path, processing: ImageProcessing) -> str:
        return write_qwen_processing(folder, self.resolved(config), processing)

    def video_processing(self, config: Any, folder: str = "") -> VideoProcessing | None:
        """Return how videos become pixels: as a folder's files say, or as in the published models."""
        if not folder:
            return self.of_videos
        return read_qwen_video_processing(folder, self.resolved(config), self.of_videos.rule)

    def write_video_processing(self, config: Any, folder: Path, processing: VideoProcessing) -> None:
        write_qwen_video_processing(folder, self.resolved(config), processing)

    def check_processor(self, config: Any) -> None:
        """Raise ValueError unless the special tokens of the family's processor are ids of the vocabulary."""
        check_special_tokens(self.resolved(config))

    def write_processor(self, config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        write_qwen(self.resolved(config), folder, mean, std, self.processor)

    def write_video_processor(self, config: Any, folder: Path, processing: VideoProcessing, tokenizer: Any) -> None:
        """Write the processor that turns 8-bit frames into pixels, and texts that say the time into tokens."""
        config = self.resolved(config)
        # The engine takes videos if this file is there.
        write_qwen_video_processing(folder, config, processing, always=True)
        if processing.timestamps:
            write_qwen_tokenizer(config, folder, tokenizer)
