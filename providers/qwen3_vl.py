"""Qwen3-VL: a vision tower whose features of several depths (DeepStack) go to the first layers of a Qwen3 decoder.

The decoder is dense or has experts.

Images have any size, and rotary positions of the decoder have three axes, which are interleaved. Sizes come from flags
(the defaults are those of Qwen3-VL-8B) or from a Hugging Face `Qwen3VLConfig` or `Qwen3VLMoeConfig` (`--hf-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mimo.data.positions import TokenGrid
from mimo.observability.flops import FlopComponent
from mimo.protocols import LANGUAGE, BuildContext, ImageProcessing, ParameterShape, TokenSpec
from providers.common import hf, hf_qwen3_vl
from providers.common.decoder import MultimodalDecoderConfig, check_decoder_grid, decoder_shapes
from providers.common.flops import decoder_components, qwen3_vision_components
from providers.common.qwen3_vision import (
    Qwen3VisionConfig,
    check_qwen3_decoder,
    check_qwen3_vision,
    check_qwen3_vision_grid,
    qwen3_vision_shapes,
)
from providers.common.qwen_processor import (
    check_special_tokens,
    read_qwen_processing,
    write_qwen,
    write_qwen_processing,
)
from providers.common.qwen_vision import image_tokens, token_grid
from providers.common.vision_language import VisionLanguageProvider

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.weights.rules import WeightMap

ENCODER = "tower"
# Images of 64 to 16,384 language tokens.
HALF = (0.5, 0.5, 0.5)
PROCESSING = ImageProcessing("smart_resize", HALF, HALF, min_patches=256, max_patches=65536,
                             source="the image processor of Qwen3-VL")


@dataclass(frozen=True)
class Config(Qwen3VisionConfig, MultimodalDecoderConfig):
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
    image_token_id: int = 151655
    """Token id that stands for an image."""
    video_token_id: int = 151656
    """Token id that stands for a frame of a video in config.json. Video is not supported yet."""
    vision_start_token_id: int = 151652
    """Token id before an image, which the data set writes."""
    vision_end_token_id: int = 151653
    """Token id behind an image, which the data set writes."""
    hf_config: str = ""
    """Hugging Face config.json, or the folder that holds one. Its sizes replace those of the flags."""


def from_hf(source: str | Path | dict[str, Any], base: Config | None = None) -> Config:
    """Return the configuration of a Hugging Face `Qwen3VLConfig`.

    Args:
        source: a config.json, its folder, or the configuration as a dict.
        base: source of the fields that it does not set (dropout); default `Config()`.

    Raises:
        ValueError: no such file, or a value that this model cannot reproduce; the message names the key.
    """
    base = Config() if base is None else base
    return dataclasses.replace(base, **hf_qwen3_vl.qwen3_vl_sizes(hf.load(source)), hf_config="")


class Qwen3VlProvider(VisionLanguageProvider):
    """The `mimo.protocols.ModelProvider` of Qwen3-VL. Every method also takes unresolved configurations."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = (hf_qwen3_vl.DENSE.architecture, hf_qwen3_vl.MOE.architecture)
    checks = (check_qwen3_vision, check_qwen3_decoder)
    check_language_grid = staticmethod(check_decoder_grid)
    check_encoder_grid = staticmethod(check_qwen3_vision_grid)
    image_tokens = staticmethod(image_tokens)
    language_shapes = staticmethod(decoder_shapes)

    def resolved(self, config: Config) -> Config:
        """Return `config` with the sizes of its `hf_config`, if it has one. Raises the errors of `from_hf`."""
        return from_hf(config.hf_config, config) if config.hf_config else config

    def with_hf(self, config: Config, values: Mapping[str, Any], module: str) -> Config:
        """Return a resolved configuration with the values of a config.json for a module; see `mimo.protocols`."""
        return dataclasses.replace(config, **hf_qwen3_vl.module_sizes(values, module))

    def vision_shapes(self, config: Config) -> list[ParameterShape]:
        """Return every parameter of tower and mergers."""
        return qwen3_vision_shapes(config, config.hidden_size)

    def token_spec(self, config: Config) -> TokenSpec:
        """Return what a data set must produce."""
        config = self.resolved(config)
        return TokenSpec(config.vocab_size, config.image_token_id, 0, config.vision_num_channels,
                         patch_size=config.vision_patch_size, size_multiple=config.size_multiple,
                         merge_size=config.vision_spatial_merge_size,
                         temporal_patch_size=config.vision_temporal_patch_size)

    def token_grid(self, config: Config, module: str, height: int, width: int) -> TokenGrid:
        """Return the language tokens of an image as a grid. Raises ValueError for a wrong size in pixels."""
        return token_grid(self.resolved(config), height, width)

    def num_levels(self, config: Config, module: str) -> int:
        """Count the layers of the tower whose outputs the language model gets beside that of the last one."""
        return len(self.resolved(config).vision_deepstack_layers)

    def num_experts(self, config: Config) -> int:
        """Return the number of experts of every decoder layer, 0 for a dense one."""
        return self.resolved(config).num_experts

    def flop_components(self, config: Config) -> list[FlopComponent]:
        """Return the FLOPs of tower, mergers and decoder."""
        config = self.resolved(config)
        return [*qwen3_vision_components(config, config.hidden_size), *decoder_components(config)]

    def language_spec(self, config: Config, context: BuildContext | None) -> ModuleSpec:
        """Return the spec of the decoder. `context` is None on ranks that only read its width.

        Raises:
            ValueError: there are experts on a tensor-parallel grid without sequence parallelism.
        """
        from providers.common.qwen3_build import qwen3_decoder_spec

        return qwen3_decoder_spec(self.resolved(config), context)

    def encoder_spec(self, config: Config, module: str, context: BuildContext) -> ModuleSpec:
        """Return the spec of the vision module, a `mimo.model.submodule.VisionSubmodule`."""
        from providers.common.qwen3_build import qwen3_vision_spec

        self.check_module(module)
        config = self.resolved(config)
        return qwen3_vision_spec(config, ENCODER, config.hidden_size, context)

    def weight_map(self, config: Config, module: str) -> WeightMap:
        """Return the names of a Qwen3-VL checkpoint. For a dense language model, a Qwen3 checkpoint works too."""
        from providers.common import qwen3_weights

        config = self.resolved(config)
        if module == LANGUAGE:
            return qwen3_weights.qwen3_decoder_map(config)
        self.check_module(module)
        return qwen3_weights.qwen3_vision_map(config, ENCODER)

    def hf_config(self, config: Config) -> dict[str, Any]:
        """Return the model as a `Qwen3VLConfig`. Raises ValueError if none has all its parts."""
        config = self.resolved(config)
        return hf_qwen3_vl.qwen3_vl_config(
            config, config, {key: getattr(config, key) for key in hf_qwen3_vl.TOKEN_DEFAULTS})

    def image_processing(self, config: Config, folder: str = "") -> ImageProcessing | None:
        """Return how images become pixels: as a folder's files say, or as in the published models."""
        return read_qwen_processing(folder, self.resolved(config)) if folder else PROCESSING

    def write_image_processing(self, config: Config, folder: Path, processing: ImageProcessing) -> str:
        """Write preprocessor_config.json, or return the reason why no processor makes the pixels of training."""
        return write_qwen_processing(folder, self.resolved(config), processing)

    def check_processor(self, config: Config) -> None:
        """Raise ValueError unless the special tokens of the family's processor are ids of the vocabulary."""
        check_special_tokens(self.resolved(config))

    def write_processor(self, config: Config, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        """Write the processor that turns 8-bit images into pixels; see `mimo.protocols`."""
        write_qwen(self.resolved(config), folder, mean, std, "Qwen3VL")


provider = Qwen3VlProvider()
