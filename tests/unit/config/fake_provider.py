"""A small model provider and data provider, loaded as `fake_provider:attr`: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from mimo.grid.spec import Layout
from mimo.protocols import LANGUAGE, ParameterShape, TokenSpec


@dataclass(frozen=True)
class FakeModelConfig:
    """Fake family: a linear encoder and a toy decoder."""

    hidden_size: int = 8
    """Width of the language model."""
    num_layers: int = 4
    """Decoder layers."""
    num_experts: int = 0
    """Experts of a layer; 0 is dense."""
    patch_sizes: tuple[int, ...] = (2, 2)
    """Patch height and width."""
    rope_base: float | None = 10000.0
    """Base of the rotary embedding; none: no rotary embedding."""


@dataclass(frozen=True)
class FakeDataConfig:
    """Fake data: nothing to read."""

    num_digits: int = 4
    """Digits of a number."""
    answer: str = "a \"quoted\" \\ text"
    """Any text."""


class FakeModel:
    """One encoder called vision; a sequence must be even, an image becomes one token per patch."""

    Config = FakeModelConfig

    def encoders(self, config: FakeModelConfig) -> tuple[str, ...]:
        return ("vision",)

    def validate(self, config: FakeModelConfig, layout: Layout, seq_length: int) -> None:
        if seq_length % 2:
            raise ValueError(f"--seq-length {seq_length} is odd")

    def token_spec(self, config: FakeModelConfig) -> TokenSpec:
        return TokenSpec(vocab_size=16, image_token_id=15, image_size=8, num_channels=1)

    def num_image_tokens(self, config: FakeModelConfig, module: str, height: int, width: int) -> int:
        return height // config.patch_sizes[0] * (width // config.patch_sizes[1])

    def hidden_size(self, config: FakeModelConfig) -> int:
        return config.hidden_size

    def num_experts(self, config: FakeModelConfig) -> int:
        return config.num_experts

    def parameter_shapes(self, config: FakeModelConfig, module: str) -> list[ParameterShape]:
        width, layers = config.hidden_size, config.num_layers
        if module != LANGUAGE:
            return [ParameterShape("projection", (4, width), split="none", stage="first")]
        shapes = [ParameterShape("embedding", (16, width), split="tp", stage="first"),
                  ParameterShape("layers.attention", (width, width), layers, "tp"),
                  ParameterShape("layers.norm", (width,), layers),
                  ParameterShape("output", (16, width), split="tp", stage="last")]
        if config.num_experts:
            shapes.append(ParameterShape("layers.experts", (width, width), layers * config.num_experts, "expert"))
        return shapes


class FakeData:
    """A provider that has only a Config, because these tests open no stream."""

    Config = FakeDataConfig


@dataclass(frozen=True)
class ClashingConfig:
    """A family with a field that the run has too."""

    seq_length: int = 1
    """Clashes with the run's."""


@dataclass(frozen=True)
class RequiredConfig:
    """A family with a field without default."""

    width: int = field()


class Clashing(FakeModel):
    Config = ClashingConfig


class Required(FakeModel):
    Config = RequiredConfig


class NoConfig:
    """Not a provider."""


model, dataset = FakeModel(), FakeData()
clashing, required, no_config = Clashing(), Required(), NoConfig()
