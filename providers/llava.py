"""LLaVA: a CLIP or SigLIP encoder, a two-layer projector, a Llama, Qwen2, Qwen3 or Qwen3-MoE decoder.

Sizes come from flags (the defaults are those of llava-1.5-7b) or from a Hugging Face `LlavaConfig` (`--hf-config`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mimo.grid.spec import GridSpec
from mimo.observability.flops import FlopComponent
from mimo.protocols import LANGUAGE, BuildContext, ImageProcessing, ParameterShape
from providers.common import hf, hf_processor
from providers.common.checks import Problems
from providers.common.decoder import DecoderConfig, check_decoder, check_decoder_grid, decoder_shapes
from providers.common.family import DecoderProvider, VisionLanguageProvider
from providers.common.flops import decoder_components, projector_components, vision_components
from providers.common.vision import VisionConfig, check_vision, check_vision_grid, image_tokens, vision_shapes

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.weights.rules import WeightMap

ENCODER = "vit"


@dataclass(frozen=True)
class Config(VisionConfig, DecoderConfig):
    """Model family: LLaVA."""

    image_token_id: int = 32000
    """Token id that stands for an image."""
    hf_config: str = ""
    """Hugging Face config.json, or the folder that holds one. Its sizes replace those of the flags."""


class LlavaProvider(DecoderProvider, VisionLanguageProvider):
    """The `mimo.protocols.ModelProvider` of LLaVA. Every method also takes unresolved configurations."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = ("LlavaForConditionalGeneration",)
    sizes_of_hf = staticmethod(hf.llava_sizes)
    checks = (check_decoder, check_vision)
    check_language_grid = staticmethod(check_decoder_grid)
    image_tokens = staticmethod(image_tokens)
    language_shapes = staticmethod(decoder_shapes)

    def with_hf(self, config: Config, values: Mapping[str, Any], module: str) -> Config:
        sizes = hf.module_sizes(values, module)
        kind = values.get("model_type", "llava" if "text_config" in values else "")
        if module == LANGUAGE and kind in hf.LLAVA_KINDS:
            sizes["image_token_id"] = hf.llava_image_token(dict(values))
        return dataclasses.replace(config, **sizes)

    def check_encoder_grid(self, config: Config, grid: GridSpec, problems: Problems) -> None:
        check_vision_grid(config, self._projector_size(config), grid, problems)

    def vision_shapes(self, config: Config) -> list[ParameterShape]:
        return vision_shapes(config, self._projector_size(config), config.hidden_size)

    def flop_components(self, config: Config) -> list[FlopComponent]:
        config = self.resolved(config)
        return [*vision_components(config, num_extra=int(config.vision_class_token), parallel_patches=False),
                *projector_components(config.feature_size, self._projector_size(config), config.hidden_size,
                                      has_norm=False),
                *decoder_components(config)]

    def encoder_spec(self, config: Config, module: str, context: BuildContext) -> ModuleSpec:
        from providers.common.build import vision_spec

        self.check_module(module)
        config = self.resolved(config)
        return vision_spec(config, ENCODER, self._projector_size(config), config.hidden_size, context)

    def weight_map(self, config: Config, module: str) -> WeightMap:
        """Return the names of a LLaVA checkpoint. For one module, a text or vision model's own checkpoint works too."""
        from providers.common import weights

        config = self.resolved(config)
        if module == LANGUAGE:
            return weights.decoder_map(config, (*weights.LLAVA_LANGUAGE, weights.CAUSAL_LM))
        self.check_module(module)
        return weights.vision_map(config, ENCODER)

    def hf_config(self, config: Config) -> dict[str, Any]:
        """Return the model as a `LlavaConfig`. Raises ValueError if none has all its parts."""
        config = self.resolved(config)
        return hf.llava_config(config, config, config.image_token_id)

    def image_processing(self, config: Config, folder: str = "") -> ImageProcessing | None:
        """Return how images become pixels: as a folder's files say, or as in CLIP (cropped) or SigLIP (stretched)."""
        config = self.resolved(config)
        if folder:
            return hf_processor.read_processing(folder, config.vision_image_size,
                                                any_size=config.vision_dynamic_resolution)
        own = hf_processor.CLIP if config.vision_class_token else hf_processor.SIGLIP
        return dataclasses.replace(own, tiling="dynamic") if config.vision_dynamic_resolution else own

    def write_image_processing(self, config: Config, folder: Path, processing: ImageProcessing) -> str:
        return hf_processor.write_processing(folder, self.resolved(config).vision_image_size, processing)

    @staticmethod
    def _projector_size(config: Config) -> int:
        return config.projector_hidden_size or config.hidden_size


provider = LlavaProvider()
from_hf = provider.from_hf
