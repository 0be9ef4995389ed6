"""Base of every vision-language provider: one encoder, `vision`, whose tokens replace placeholders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, ParameterShape, TokenSpec
from providers.common.checks import Problems, image_flags
from providers.common.computed import Computed

VISION = "vision"


class VisionLanguageProvider(Computed):
    """The methods of `mimo.protocols.ModelProvider` that do not depend on the family.

    A provider of a family gives `resolved`, its configuration with the sizes of `--hf-config`, and the rest. The
    configuration has the flags of an encoder (`vision_...`) with its `image_shape` and
    `num_tokens`, those of a decoder, and `image_token_id`.

    Attributes:
        checks: each notes what is wrong with the sizes of a part on any layout.
        check_language_grid: notes what the language grid and `--seq-length` cannot hold.
        check_encoder_grid: notes what the encoder grid cannot hold.
        image_tokens: language tokens of an image of (height, width) pixels; ValueError for a size it cannot take.
        language_shapes: every parameter of `language`.
        vision_shapes: every parameter of `vision`, with its projector.
        hf_architectures: Hugging Face classes of the family.
    """

    checks: ClassVar[tuple[Callable[[Any, Problems], None], ...]]
    check_language_grid: ClassVar[Callable[[Any, GridSpec, int, Problems], None]]
    check_encoder_grid: ClassVar[Callable[[Any, GridSpec, Problems], None]]
    image_tokens: ClassVar[Callable[[Any, int, int], int]]
    language_shapes: ClassVar[Callable[[Any], list[ParameterShape]]]
    vision_shapes: ClassVar[Callable[[Any], list[ParameterShape]]]
    hf_architectures: tuple[str, ...] = ()

    def resolved(self, config: Any) -> Any:
        """`config` with the sizes of its `hf_config`, if it names one."""
        raise AssertionError("a family resolves its own configuration")

    def encoders(self, config: Any) -> tuple[str, ...]:
        """The one encoder, `vision`."""
        return (VISION,)

    def validate_sizes(self, config: Any) -> None:
        """Check sizes against each other.

        Raises:
            ValueError: everything that does not fit, one line each, with flags, values and what would fit.
        """
        source, config, problems = config.hf_config, self.resolved(config), Problems()
        for check in self.checks:
            check(config, problems)
        if not 0 <= config.image_token_id < config.vocab_size:
            problems.add(f"--image-token-id {config.image_token_id} must lie between 0 and --vocab-size "
                         f"{config.vocab_size} less one")
        problems.report(f"--hf-config {source}" if source else "")

    def validate(self, config: Any, layout: Layout, seq_length: int) -> None:
        """Check sizes against each other, the grids and the sequence. Raises as `validate_sizes`."""
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
        """Return what a data set must produce."""
        config = self.resolved(config)
        if config.vision_dynamic_resolution:
            return TokenSpec(config.vocab_size, config.image_token_id, 0, config.vision_num_channels,
                             patch_size=config.vision_patch_size, size_multiple=config.size_multiple)
        height, width = config.image_shape
        return TokenSpec(config.vocab_size, config.image_token_id, height, config.vision_num_channels,
                         image_width=width)

    def special_token_ids(self, config: Any) -> dict[str, int]:
        """Placeholder of the encoder's tokens."""
        return {VISION: self.resolved(config).image_token_id}

    def num_image_tokens(self, config: Any, module: str, height: int, width: int) -> int:
        """Language tokens that encoder `module` makes of an image of `height` by `width` pixels.

        Raises:
            ValueError: the encoder does not take this size.
        """
        return self.image_tokens(self.resolved(config), height, width)

    def hidden_size(self, config: Any) -> int:
        """Width of the language model."""
        size: int = self.resolved(config).hidden_size
        return size

    def parameter_shapes(self, config: Any, module: str) -> list[ParameterShape]:
        """Every parameter of `language`, or of `vision` with its projector."""
        self.check_module(module)
        return (self.language_shapes if module == LANGUAGE else self.vision_shapes)(self.resolved(config))

    def check_processor(self, config: Any) -> None:
        """Raise ValueError for a family whose image processor is not known, or images that are not red, green, blue."""
        if "LlavaForConditionalGeneration" not in self.hf_architectures:
            raise ValueError("an image processor for rollouts is made for --model-provider llava alone, not for "
                             f"{', '.join(self.hf_architectures) or 'this one'}")
        channels = self.resolved(config).vision_num_channels
        if channels != 3:
            raise ValueError(f"--vision-num-channels {channels}: image processors of Hugging Face and vLLM take images "
                             "of 3 channels, red, green and blue")

    def write_processor(self, config: Any, folder: Path, mean: Sequence[float], std: Sequence[float]) -> None:
        """Write what turns 8-bit images into pixels beside the config.json of this model.

        Args:
            config: the family's flags.
            folder: of the config.json.
            mean: of each channel.
            std: of each channel; pixels are (value / 255 - mean) / std.
        """
        from providers.common.hf_processor import write_llava  # what writes the files takes seconds to import

        self.check_processor(config)
        write_llava(self.resolved(config), folder, mean, std)

    @staticmethod
    def check_module(module: str) -> None:
        """Only `vision` and `language` are asked for."""
        assert module in (VISION, LANGUAGE), f"the model has the modules {VISION} and {LANGUAGE}, not {module}"
