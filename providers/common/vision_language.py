"""Base of every vision-language provider: one encoder, `vision`, whose tokens replace placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, ParameterShape, TokenSpec
from providers.common.checks import Problems, image_flags
from providers.common.computed import FamilyProvider

VISION = "vision"


class VisionLanguageProvider(FamilyProvider):
    """Methods of `mimo.protocols.ModelProvider` that do not depend on the family.

    The provider of a family adds the other methods, and `sizes_of_hf`.
    The configuration has the flags of an encoder (`vision_...`) with its `image_shape` and `num_tokens`, the flags of a
    decoder, and `image_token_id`.

    Attributes:
        checks: each notes sizes of a part that no layout can hold.
        check_language_grid: notes sizes that the language grid and `--seq-length` cannot hold.
        check_encoder_grid: notes sizes that the encoder grid cannot hold.
        image_tokens: returns the language tokens of an image of (height, width) pixels, or raises ValueError.
        language_shapes: returns every parameter of `language`.
        vision_shapes: returns every parameter of `vision`, with its projector.
        hf_architectures: Hugging Face classes of the family.
    """

    checks: ClassVar[tuple[Callable[[Any, Problems], None], ...]]
    check_language_grid: ClassVar[Callable[[Any, GridSpec, int, Problems], None]]
    check_encoder_grid: ClassVar[Callable[[Any, GridSpec, Problems], None]]
    image_tokens: ClassVar[Callable[[Any, int, int], int]]
    language_shapes: ClassVar[Callable[[Any], list[ParameterShape]]]
    vision_shapes: ClassVar[Callable[[Any], list[ParameterShape]]]
    hf_architectures: tuple[str, ...] = ()

    def encoders(self, config: Any) -> tuple[str, ...]:
        """Return the name of the encoder, `vision`."""
        return (VISION,)

    def validate_sizes(self, config: Any) -> None:
        """Check sizes against each other.

        Raises:
            ValueError: sizes do not fit; the message has a line for each, with flags, values and what would fit.
        """
        source, config, problems = config.hf_config, self.resolved(config), Problems()
        for check in self.checks:
            check(config, problems)
        if not 0 <= config.image_token_id < config.vocab_size:
            problems.add(f"--image-token-id {config.image_token_id} must lie between 0 and --vocab-size "
                         f"{config.vocab_size} less one")
        problems.report(f"--hf-config {source}" if source else "")

    def validate(self, config: Any, layout: Layout, seq_length: int) -> None:
        """Check sizes against each other, the grids and the sequence. Raises the errors of `validate_sizes`."""
        self.validate_sizes(config)
        source, config, problems = config.hf_config, self.resolved(config), Problems()
        self.check_language_grid(config, layout.language, seq_length, problems)
        for grid in layout.encoders:
            self.check_encoder_grid(config, grid, problems)
            if not config.vision_dynamic_resolution and config.num_tokens >= seq_length:
                problems.add(f"an image becomes {config.num_tokens} tokens ({image_flags(*config.image_shape)}, "
                             f"--vision-patch-size {config.vision_patch_size}, "
                             f"--vision-pixel-shuffle {config.vision_pixel_shuffle}), which leaves no room in "
                             f"--seq-length {seq_length}; it must be above {config.num_tokens}")
        problems.report(f"--hf-config {source}" if source else "")

    def token_spec(self, config: Any) -> TokenSpec:
        config = self.resolved(config)
        if config.vision_dynamic_resolution:
            return TokenSpec(config.vocab_size, config.image_token_id, 0, config.vision_num_channels,
                             patch_size=config.vision_patch_size, size_multiple=config.size_multiple)
        height, width = config.image_shape
        return TokenSpec(config.vocab_size, config.image_token_id, height, config.vision_num_channels,
                         image_width=width)

    def special_token_ids(self, config: Any) -> dict[str, int]:
        """Return the placeholder of the encoder's tokens."""
        return {VISION: self.resolved(config).image_token_id}

    def num_image_tokens(self, config: Any, module: str, height: int, width: int) -> int:
        """Return the language tokens that encoder `module` makes of an image of `height` by `width` pixels.

        Raises:
            ValueError: the encoder does not take this size.
        """
        return self.image_tokens(self.resolved(config), height, width)

    def parameter_shapes(self, config: Any, module: str) -> list[ParameterShape]:
        """Return every parameter of `language`, or of `vision` with its projector."""
        self.check_module(module)
        return (self.language_shapes if module == LANGUAGE else self.vision_shapes)(self.resolved(config))

    def check_processor(self, config: Any) -> None:
        """Raise ValueError if the family's image processor is unknown, or images are not red, green and blue."""
        if not {"LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"} & {*self.hf_architectures}:
            raise ValueError("image processors for rollouts exist only for --model-provider llava, llava_next, "
                             "qwen2_5_vl, qwen3_vl and nemotron-moe-vlm-*, not for "
                             f"{', '.join(self.hf_architectures) or 'this one'}")
        channels = self.resolved(config).vision_num_channels
        if channels != 3:
            raise ValueError(f"--vision-num-channels {channels}: image processors of Hugging Face and vLLM take images "
                             "of 3 channels, red, green and blue")

    def write_processor(self, config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        """Write the processor that turns 8-bit images into pixels beside the config.json of this model.

        Args:
            config: the family's flags.
            folder: folder of the config.json.
            mean: mean of each channel.
            std: deviation of each channel; pixels are (value / 255 - mean) / std.
        """
        from providers.common.hf_processor import write_llava  # takes seconds to import

        self.check_processor(config)
        write_llava(self.resolved(config), folder, mean, std)

    @staticmethod
    def check_module(module: str) -> None:
        """Raise an error for a module other than `vision` and `language`."""
        assert module in (VISION, LANGUAGE), f"the model has the modules {VISION} and {LANGUAGE}, not {module}"
