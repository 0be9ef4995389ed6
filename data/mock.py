"""Random tokens and images of any size without end, for benchmarks and for tests of uneven batches.

Lengths, image counts and image positions vary from sample to sample on purpose. There is nothing to learn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from data.indexed import IndexedStream
from mimo.protocols import LANGUAGE, Lane, Sample, TokenSpec

SPLITS = ("train", "valid")


@dataclass(frozen=True)
class Config:
    """Data set `mock`: random tokens and images."""

    mock_min_length: int = 8
    """Fewest text tokens of a sample."""
    mock_max_length: int = 32
    """Most text tokens of a sample."""
    mock_images_max: int = 3
    """Most images of a sample; one that has images has 1 to this many. A text model gets none."""
    mock_text_only_fraction: float = 0.25
    """Share of samples without an image."""
    mock_image_size: int = 32
    """Pixels a side of an image for encoders that take any size."""


def check(config: Config, tokens: TokenSpec) -> None:
    """Raise ValueError, with flags and values, if the configuration cannot work."""
    if not 2 <= config.mock_min_length <= config.mock_max_length:
        given = f"--mock-min-length {config.mock_min_length} --mock-max-length {config.mock_max_length}"
        raise ValueError(f"{given}: need 2 <= min <= max")
    if config.mock_images_max < 0:
        raise ValueError(f"--mock-images-max {config.mock_images_max}: must not be negative")
    if not 0 <= config.mock_text_only_fraction <= 1:
        raise ValueError(f"--mock-text-only-fraction {config.mock_text_only_fraction}: must be between 0 and 1")
    if tokens.image_token_id >= 0 and not tokens.image_size and config.mock_image_size < 1:
        raise ValueError(f"--mock-image-size {config.mock_image_size}: must be at least 1 pixel")
    if tokens.vocab_size < 3:
        raise ValueError(f"--vocab-size {tokens.vocab_size}: the mock data set needs a padding, an image and a word id")


def build_sample(config: Config, tokens: TokenSpec, lane: Lane, index: int) -> Sample:
    """Build the sample at a global index, a pure function of (seed, split, index)."""
    rng = np.random.default_rng([lane.seed, SPLITS.index(lane.split), index])
    no_images = tokens.image_token_id < 0 or config.mock_images_max == 0
    text_only = no_images or rng.random() < config.mock_text_only_fraction
    num_images = 0 if text_only else int(rng.integers(1, config.mock_images_max + 1))
    length = int(rng.integers(config.mock_min_length, config.mock_max_length + 1))
    # Any id except 0, which pads, and the image placeholder.
    text = rng.integers(1, tokens.vocab_size - (0 < tokens.image_token_id < tokens.vocab_size), size=length)
    text += (tokens.image_token_id > 0) & (text >= tokens.image_token_id)
    answer = int(rng.integers(1, length))
    places = rng.integers(0, length - answer + 1, size=num_images)
    size = tokens.image_shape if tokens.image_size else (config.mock_image_size, config.mock_image_size)
    sample = Sample(
        key=f"mock/{lane.split}/{index:06d}",
        tokens=np.insert(text, places, tokens.image_token_id),
        target_mask=np.arange(length + num_images) >= length + num_images - answer,
        image_sizes=[size] * num_images,
    )
    if lane.module != LANGUAGE:
        shape = (tokens.num_channels, *size)
        sample.images = [rng.standard_normal(shape, dtype=np.float32) for _ in range(num_images)]
    return sample


class MockProvider:
    """The `mock` data set; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def validate(self, config: Any, tokens: TokenSpec) -> None:
        """Raise ValueError, with the flag, if the configuration cannot work."""
        check(config, tokens)

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        """Open one lane. Raises ValueError, with the flag, if the configuration cannot work."""
        check(config, tokens)
        return IndexedStream(lane, partial(build_sample, config, tokens, lane))

    def num_samples(self, config: Any, split: str) -> int | None:
        """Return None, because neither split has an end."""
        return None

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Write token ids, separated by spaces."""
        return " ".join(str(token) for token in tokens)


provider = MockProvider()
