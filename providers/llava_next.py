"""LLaVA-NeXT (LLaVA 1.6): a LLaVA that takes an image as tiles of any resolution and joins their tokens.

The tiles of an image are the whole image, then those of the grid that fits it best (`image_grid_pinpoints`). Tokens of
the borders that fill the grid are dropped, and a learned token ends each row. Everything else is LLaVA's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mimo.protocols import LANGUAGE, BuildContext, ImageProcessing, ParameterShape, TokenSpec
from mimo.visual import Tiles
from providers import llava
from providers.common import hf, hf_processor
from providers.common.checks import Problems
from providers.common.decoder import check_decoder
from providers.common.vision import check_vision, vision_shapes

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from mimo.weights.rules import WeightMap

NEWLINE = "image_newline"


@dataclass(frozen=True)
class Config(llava.Config):
    """Model family: LLaVA-NeXT."""

    vision_image_grid_pinpoints: tuple[str, ...] = ("336x672", "672x336", "672x672", "1008x336", "336x1008")
    """Grids of tiles that an image may be cut into, each as HEIGHTxWIDTH in pixels. The one is used that holds most of
    the image and wastes least."""


def pinpoints_of(config: Config) -> tuple[tuple[int, int], ...]:
    """Return the grids in pixels. Raises ValueError for a text that is none."""
    found = [re.fullmatch(r"(\d+)x(\d+)", text) for text in config.vision_image_grid_pinpoints]
    wrong = [text for text, match in zip(config.vision_image_grid_pinpoints, found, strict=True) if match is None]
    if wrong:
        raise ValueError(f"--vision-image-grid-pinpoints {wrong[0]}: expected HEIGHTxWIDTH, such as 336x672")
    return tuple((int(match[1]), int(match[2])) for match in found if match is not None)


def tiles_of(config: Config) -> Tiles:
    """Return how a resolved configuration cuts images."""
    side = config.vision_image_size // config.vision_patch_size
    return Tiles(config.image_shape, pinpoints_of(config), (side, side))


def check_tiles(config: Config, problems: Problems) -> None:
    """Note flags that contradict tiles of one size."""
    if config.vision_dynamic_resolution or config.vision_pixel_shuffle != 1:
        problems.add("llava_next cuts images into tiles of one size, whose patches are tokens: it has neither "
                     "--vision-dynamic-resolution nor --vision-pixel-shuffle")
    try:
        pinpoints = pinpoints_of(config)
    except ValueError as error:
        problems.add(str(error))
        return
    side = config.vision_image_size
    wrong = [f"{height}x{width}" for height, width in pinpoints
             if not height or not width or side < 1 or height % side or width % side]
    if wrong or not pinpoints:
        problems.add(f"--vision-image-grid-pinpoints {' '.join(wrong) or '(none)'}: need grids of tiles, multiples of "
                     f"--vision-image-size {side}, such as {side}x{2 * side}")


def image_tokens(config: Config, height: int, width: int) -> int:
    """Return the language tokens of an image of `height` by `width` pixels. Raises ValueError for an empty one."""
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height} x {width} pixels (height x width)")
    return tiles_of(config).num_joined(height, width)


class LlavaNextProvider(llava.LlavaProvider):
    """The `mimo.protocols.ModelProvider` of LLaVA-NeXT."""

    Config: ClassVar[type] = Config
    hf_architectures: ClassVar[tuple[str, ...]] = ("LlavaNextForConditionalGeneration",)
    sizes_of_hf = staticmethod(hf.llava_next_sizes)
    checks = (check_decoder, check_vision, check_tiles)
    image_tokens = staticmethod(image_tokens)

    def with_hf(self, config: Any, values: Mapping[str, Any], module: str) -> Any:
        config = super().with_hf(config, values, module)
        if module == LANGUAGE or values.get("model_type") != "llava_next":
            return config
        return dataclasses.replace(config, vision_image_grid_pinpoints=hf.llava_pinpoints(values))

    def token_spec(self, config: Any) -> TokenSpec:
        return dataclasses.replace(super().token_spec(config), tiles=tiles_of(self.resolved(config)))

    def vision_shapes(self, config: Any) -> list[ParameterShape]:
        return [*vision_shapes(config, self._projector_size(config), config.hidden_size),
                ParameterShape(f"projector.{NEWLINE}", (1, config.hidden_size), 1, "none", "last")]

    # The newline is copied, without arithmetic.
    flop_components = llava.LlavaProvider.flop_components

    def encoder_spec(self, config: Any, module: str, context: BuildContext) -> ModuleSpec:
        from mimo.model.submodule import TiledProjector, TiledVision

        spec = super().encoder_spec(config, module, context)
        (projector,) = spec.submodules["input_projections"]
        spec.module, projector.module = TiledVision, TiledProjector
        spec.params["tiles"] = tiles_of(self.resolved(config))
        return spec

    def weight_map(self, config: Any, module: str) -> WeightMap:
        """Return the names of a LLaVA-NeXT checkpoint. For one module, a model of its own works too."""
        from mimo.weights.rules import Direct, Rule

        found, size = super().weight_map(config, module), self.resolved(config).hidden_size
        if module == LANGUAGE:
            return found
        newline = Rule(f"input_projections.0.{NEWLINE}.weight", (NEWLINE,), Direct((size,), (1, size)))
        return dataclasses.replace(found, rules=(*found.rules, newline))

    def hf_config(self, config: Any) -> dict[str, Any]:
        """Return the model as a `LlavaNextConfig`. Raises ValueError if none has all its parts."""
        config = self.resolved(config)
        return hf.llava_config(config, config, config.image_token_id) | {
            "architectures": list(self.hf_architectures), "model_type": "llava_next",
            "image_grid_pinpoints": [list(each) for each in pinpoints_of(config)]}

    def image_processing(self, config: Any, folder: str = "") -> ImageProcessing | None:
        """Return how images become pixels: as a folder's files say, or as LlavaNextImageProcessor does."""
        config = self.resolved(config)
        if folder:
            return hf_processor.read_processing(folder, config.vision_image_size, any_size=False,
                                                pinpoints=pinpoints_of(config))
        return dataclasses.replace(hf_processor.CLIP, tiling="anyres", source="LlavaNextImageProcessor")

    def write_image_processing(self, config: Any, folder: Path, processing: ImageProcessing) -> str:
        config = self.resolved(config)
        return hf_processor.write_processing(folder, config.vision_image_size, processing,
                                             pinpoints=pinpoints_of(config))

    def write_processor(self, config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        """Write the processor with which an engine cuts whole images as the data set does."""
        self.check_processor(config)
        config = self.resolved(config)
        hf_processor.write_llava(config, folder, mean, std, pinpoints=pinpoints_of(config))


provider = LlavaNextProvider()
from_hf = provider.from_hf
