"""Bases of the providers: of every family, of text models, of vision-language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mimo.grid.spec import GridSpec, Layout
from mimo.protocols import LANGUAGE, BuildContext, ParameterShape, TokenSpec
from providers.common import computed, hf
from providers.common.checks import Problems, image_flags

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

VISION = "vision"


class FamilyProvider:
    """Methods of `mimo.protocols.ModelProvider` that do not depend on the family, and `ComparableProvider`.

    The provider of a family adds the other methods. Methods that take a configuration resolve it first.

    Attributes:
        Config: the family's flags, with a field `hf_config`.
        hf_architectures: Hugging Face classes of the family.
        sizes_of_hf: returns the fields of `Config` that a config.json sets, or raises ValueError with the key.
        checks: each notes sizes of a part that no layout can hold.
        check_language_grid: notes sizes that the language grid and `--seq-length` cannot hold.
        language_shapes: returns every parameter of `language`.
    """

    Config: type
    hf_architectures: tuple[str, ...] = ()
    sizes_of_hf: ClassVar[Callable[[dict[str, Any]], dict[str, Any]]]
    checks: ClassVar[tuple[Callable[[Any, Problems], None], ...]]
    check_language_grid: ClassVar[Callable[[Any, GridSpec, int, Problems], None]]
    language_shapes: ClassVar[Callable[[Any], list[ParameterShape]]]

    def from_hf(self, source: str | Path | dict[str, Any], base: Any = None) -> Any:
        """Return the configuration of a Hugging Face model.

        Args:
            source: a config.json, its folder, or the configuration as a dict.
            base: source of the fields that it does not set (dropout, load balancing); None: the defaults.

        Raises:
            ValueError: no such file, or a value that this model cannot reproduce; the message names the key.
        """
        base = self.Config() if base is None else base
        return dataclasses.replace(base, **self.sizes_of_hf(hf.load(source)), hf_config="")

    def resolved(self, config: Any) -> Any:
        """Return `config` with the sizes of its `hf_config`, if it has one. Raises the errors of `from_hf`."""
        return self.from_hf(config.hf_config, config) if config.hf_config else config

    def validate_sizes(self, config: Any) -> None:
        """Check sizes against each other.

        Raises:
            ValueError: sizes do not fit; the message has a line for each, with flags, values and what would fit.
        """
        problems = Problems()
        self.check_sizes(self.resolved(config), problems)
        problems.report(config.hf_config)

    def check_sizes(self, config: Any, problems: Problems) -> None:
        """Note sizes that no layout can hold."""
        for check in self.checks:
            check(config, problems)

    def validate(self, config: Any, layout: Layout, seq_length: int) -> None:
        """Check sizes against each other, the grids and the sequence. Raises the errors of `validate_sizes`."""
        self.validate_sizes(config)
        problems = Problems()
        self.check_layout(self.resolved(config), layout, seq_length, problems)
        problems.report(config.hf_config)

    def check_layout(self, config: Any, layout: Layout, seq_length: int, problems: Problems) -> None:
        """Note sizes that the grids and the sequence cannot hold."""
        self.check_language_grid(config, layout.language, seq_length, problems)

    def hidden_size(self, config: Any) -> int:
        size: int = self.resolved(config).hidden_size
        return size

    def num_experts(self, config: Any) -> int:
        number: int = self.resolved(config).num_experts
        return number

    def computed_fields(self, config: Any, module: str) -> dict[str, Any]:
        return computed.computed_fields(config, module)

    def hf_keys(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the key of each field in the config.json `values`, where `computed.HF_KEYS` has another or none."""
        return {}

    def hf_key(self, field: str, values: Mapping[str, Any]) -> str:
        return self.hf_keys(values).get(field) or computed.HF_KEYS.get(field, field)


class DecoderProvider(FamilyProvider):
    """Base of the providers whose language model is that of a `DecoderConfig`."""

    def hf_keys(self, values: Mapping[str, Any]) -> Mapping[str, str]:
        return hf.decoder_keys(values)

    def language_spec(self, config: Any, context: BuildContext | None) -> ModuleSpec:
        from providers.common.build import decoder_spec

        return decoder_spec(self.resolved(config), context)


class HybridProvider(FamilyProvider):
    """Base of the providers whose language model is that of a `HybridConfig`."""

    def num_experts(self, config: Any) -> int:
        number: int = self.resolved(config).num_routed_experts
        return number

    def language_spec(self, config: Any, context: BuildContext | None) -> ModuleSpec:
        from providers.common.hybrid_build import hybrid_spec

        return hybrid_spec(self.resolved(config), context)


class TextProvider(FamilyProvider):
    """Base of every text model's provider: no encoder, no images, one module."""

    def encoders(self, config: Any) -> tuple[str, ...]:
        return ()

    def parameter_shapes(self, config: Any, module: str) -> list[ParameterShape]:
        self.check_module(module)
        return self.language_shapes(self.resolved(config))

    def token_spec(self, config: Any) -> TokenSpec:
        return TokenSpec(self.resolved(config).vocab_size, image_token_id=-1, image_size=0, num_channels=0)

    def special_token_ids(self, config: Any) -> dict[str, int]:
        return {}

    def num_image_tokens(self, config: Any, module: str, height: int, width: int) -> int:
        raise ValueError(f"an image of {height} x {width} pixels: a text model takes no images")

    def encoder_spec(self, config: Any, module: str, context: BuildContext) -> Any:
        raise ValueError(f"a text model has no encoder {module}")

    @staticmethod
    def check_module(module: str) -> None:
        assert module == LANGUAGE, f"a text model has the module {LANGUAGE}, not {module}"


class VisionLanguageProvider(FamilyProvider):
    """Base of every vision-language provider: one encoder, `vision`, whose tokens replace placeholders.

    The configuration has the flags of an encoder (`vision_...`) with its `image_shape` and `num_tokens`, the flags of a
    decoder, and `image_token_id`.

    Attributes:
        check_encoder_grid: notes sizes that the encoder grid cannot hold.
        image_tokens: returns the language tokens of an image of (height, width) pixels, or raises ValueError.
        vision_shapes: returns every parameter of `vision`, with its projector.
    """

    check_encoder_grid: ClassVar[Callable[[Any, GridSpec, Problems], None]]
    image_tokens: ClassVar[Callable[[Any, int, int], int]]
    vision_shapes: ClassVar[Callable[[Any], list[ParameterShape]]]

    def encoders(self, config: Any) -> tuple[str, ...]:
        return (VISION,)

    def check_sizes(self, config: Any, problems: Problems) -> None:
        super().check_sizes(config, problems)
        if not 0 <= config.image_token_id < config.vocab_size:
            problems.add(f"--image-token-id {config.image_token_id} must lie between 0 and --vocab-size "
                         f"{config.vocab_size} less one")

    def check_layout(self, config: Any, layout: Layout, seq_length: int, problems: Problems) -> None:
        super().check_layout(config, layout, seq_length, problems)
        for grid in layout.encoders:
            self.check_encoder_grid(config, grid, problems)
            if not config.vision_dynamic_resolution and config.num_tokens >= seq_length:
                problems.add(f"an image becomes {config.num_tokens} tokens ({image_flags(*config.image_shape)}, "
                             f"--vision-patch-size {config.vision_patch_size}, "
                             f"--vision-pixel-shuffle {config.vision_pixel_shuffle}), which leaves no room in "
                             f"--seq-length {seq_length}; it must be above {config.num_tokens}")

    def token_spec(self, config: Any) -> TokenSpec:
        config = self.resolved(config)
        if config.vision_dynamic_resolution:
            return TokenSpec(config.vocab_size, config.image_token_id, 0, config.vision_num_channels,
                             patch_size=config.vision_patch_size, size_multiple=config.size_multiple)
        height, width = config.image_shape
        return TokenSpec(config.vocab_size, config.image_token_id, height, config.vision_num_channels,
                         image_width=width)

    def special_token_ids(self, config: Any) -> dict[str, int]:
        return {VISION: self.resolved(config).image_token_id}

    def num_image_tokens(self, config: Any, module: str, height: int, width: int) -> int:
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
        from providers.common.hf_processor import write_llava  # takes seconds to import

        self.check_processor(config)
        write_llava(self.resolved(config), folder, mean, std)

    @staticmethod
    def check_module(module: str) -> None:
        assert module in (VISION, LANGUAGE), f"the model has the modules {VISION} and {LANGUAGE}, not {module}"
