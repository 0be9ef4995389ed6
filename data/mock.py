"""Random tokens and images of any size without end, for benchmarks and for tests of uneven batches.

Lengths, image counts and image positions vary from sample to sample on purpose. There is nothing to learn. Samples may
be packed into rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from data.indexed import IndexedStream
from mimo.protocols import LANGUAGE, Lane, Sample, TokenSpec

SPLITS = ("train", "valid")
# Areas of images are clipped at this multiple of --mock-image-size squared.
LARGEST_AREA = 4.0


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
    mock_images_mean: float | None = None
    """Mean number of images of a sample that has some, log-normal with --mock-images-cv, rounded, from 1 to
    --mock-images-max. Default: uniform from 1 to --mock-images-max."""
    mock_images_cv: float = 0.0
    """Coefficient of variation of the number of images; 0: every sample has the mean. Needs --mock-images-mean."""
    mock_image_size: int = 32
    """Pixels a side of an image for encoders that take any size."""
    mock_image_size_cv: float = 0.0
    """Coefficient of variation of the area of such images, log-normal around --mock-image-size, of any shape up to 2:1
    and at most 4 times as large; 0: all are squares of one size. --seq-length has to hold the largest sample."""
    mock_packed_length: int = 0
    """Pack samples into rows of at most this many tokens of text and images: a row takes samples until the next one
    does not fit. It has to hold the largest sample. 0: every row is one sample."""


def check(config: Config, tokens: TokenSpec) -> None:
    """Raise ValueError, with flags and values, if the configuration cannot work."""
    if not 2 <= config.mock_min_length <= config.mock_max_length:
        given = f"--mock-min-length {config.mock_min_length} --mock-max-length {config.mock_max_length}"
        raise ValueError(f"{given}: need 2 <= min <= max")
    for name in ("mock_images_cv", "mock_image_size_cv"):
        if not getattr(config, name) >= 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: must not be negative")
    if config.mock_images_mean is None and config.mock_images_cv:
        raise ValueError(f"--mock-images-cv {config.mock_images_cv} needs --mock-images-mean")
    if config.mock_images_mean is not None and not 1 <= config.mock_images_mean <= config.mock_images_max:
        raise ValueError(f"--mock-images-mean {config.mock_images_mean}: must be from 1 to --mock-images-max "
                         f"{config.mock_images_max}")
    if config.mock_image_size_cv and tokens.image_token_id >= 0 and tokens.image_size:
        raise ValueError(f"--mock-image-size-cv {config.mock_image_size_cv}: the encoder takes images of one size, "
                         f"{tokens.image_shape[0]}x{tokens.image_shape[1]}")
    if config.mock_images_max < 0:
        raise ValueError(f"--mock-images-max {config.mock_images_max}: must not be negative")
    if not 0 <= config.mock_text_only_fraction <= 1:
        raise ValueError(f"--mock-text-only-fraction {config.mock_text_only_fraction}: must be between 0 and 1")
    if tokens.image_token_id >= 0 and not tokens.image_size and config.mock_image_size < 1:
        raise ValueError(f"--mock-image-size {config.mock_image_size}: must be at least 1 pixel")
    if config.mock_packed_length:
        _check_packing(config, tokens)
    if tokens.vocab_size < 3:
        raise ValueError(f"--vocab-size {tokens.vocab_size}: the mock data set needs a padding, an image and a word id")


def _check_packing(config: Config, tokens: TokenSpec) -> None:
    flag = f"--mock-packed-length {config.mock_packed_length}"
    takes_images = tokens.image_token_id >= 0 and config.mock_images_max > 0 and config.mock_text_only_fraction < 1
    if takes_images and not tokens.packs_patches:
        raise ValueError(f"{flag}: the tokens of an image are known only for encoders of packed patches; use "
                         "--vision-dynamic-resolution, or --mock-images-max 0")
    largest = config.mock_max_length
    if takes_images:
        side, tokens_of_image = config.mock_image_size / tokens.size_multiple, 0.0
        if config.mock_image_size_cv:
            # Images of 2:1 gain most when both sides are rounded to whole tokens.
            side *= math.sqrt(LARGEST_AREA)
            tokens_of_image = (side * 2**0.5 + 0.5) * (side / 2**0.5 + 0.5)
        largest += config.mock_images_max * int(max(tokens_of_image, side**2))
    if largest > config.mock_packed_length:
        raise ValueError(f"{flag}: the largest sample may have {largest} tokens (--mock-max-length, --mock-images-max, "
                         "--mock-image-size)")


def build_sample(config: Config, tokens: TokenSpec, lane: Lane, index: int) -> Sample:
    """Build the row at a global index, a pure function of (seed, split, index)."""
    seed = [lane.seed, SPLITS.index(lane.split), index]
    key = f"mock/{lane.split}/{index:06d}"
    if config.mock_packed_length:
        return _build_pack(config, tokens, lane, key, seed)
    rng = np.random.default_rng(seed)
    return _with_pixels(_build_text(config, tokens, key, rng), tokens, lane, rng)


def _build_pack(config: Config, tokens: TokenSpec, lane: Lane, key: str, seed: list[int]) -> Sample:
    """Build samples until one does not fit, and join the others."""
    parts: list[Sample] = []
    left = config.mock_packed_length
    while True:
        # Each has a generator of its own, so that lanes that make no pixels draw the same samples.
        rng = np.random.default_rng([*seed, len(parts)])
        part = _build_text(config, tokens, f"{key}.{len(parts)}", rng)
        images = [height * width // tokens.size_multiple**2 for height, width in part.image_sizes]
        # With context parallelism every sample is padded.
        left -= -(-(len(part.tokens) - len(images) + sum(images)) // lane.sequence_multiple) * lane.sequence_multiple
        if left < 0 and parts:
            break
        parts.append(_with_pixels(part, tokens, lane, rng))
    return Sample(
        key=" ".join(part.key for part in parts), tokens=np.concatenate([part.tokens for part in parts]),
        target_mask=np.concatenate([part.target_mask for part in parts]),
        image_sizes=[size for part in parts for size in part.image_sizes],
        images=None if lane.module == LANGUAGE else [image for part in parts for image in part.images or []],
        lengths=tuple(len(part.tokens) for part in parts))


def _build_text(config: Config, tokens: TokenSpec, key: str, rng: np.random.Generator) -> Sample:
    """Build a sample without pixels."""
    no_images = tokens.image_token_id < 0 or config.mock_images_max == 0
    text_only = no_images or rng.random() < config.mock_text_only_fraction
    num_images = 0 if text_only else _number_of_images(config, rng)
    length = int(rng.integers(config.mock_min_length, config.mock_max_length + 1))
    # Any id except 0, which pads, and the image placeholder.
    text = rng.integers(1, tokens.vocab_size - (0 < tokens.image_token_id < tokens.vocab_size), size=length)
    text += (tokens.image_token_id > 0) & (text >= tokens.image_token_id)
    answer = int(rng.integers(1, length))
    places = rng.integers(0, length - answer + 1, size=num_images)
    return Sample(
        key=key,
        tokens=np.insert(text, places, tokens.image_token_id),
        target_mask=np.arange(length + num_images) >= length + num_images - answer,
        image_sizes=[_image_size(config, tokens, rng) for _ in range(num_images)],
    )


def _with_pixels(sample: Sample, tokens: TokenSpec, lane: Lane, rng: np.random.Generator) -> Sample:
    if lane.module != LANGUAGE:
        sample.images = [rng.standard_normal((tokens.num_channels, *size), dtype=np.float32)
                         for size in sample.image_sizes]
    return sample


def _number_of_images(config: Config, rng: np.random.Generator) -> int:
    if config.mock_images_mean is None:
        return int(rng.integers(1, config.mock_images_max + 1))
    drawn = round(config.mock_images_mean * _log_normal(config.mock_images_cv, rng))
    return min(max(drawn, 1), config.mock_images_max)


def _image_size(config: Config, tokens: TokenSpec, rng: np.random.Generator) -> tuple[int, int]:
    """Height and width of an image in pixels."""
    if tokens.image_size:
        return tokens.image_shape
    if not config.mock_image_size_cv:
        return config.mock_image_size, config.mock_image_size
    side = config.mock_image_size * math.sqrt(min(_log_normal(config.mock_image_size_cv, rng), LARGEST_AREA))
    stretch, unit = 2.0 ** rng.uniform(-0.5, 0.5), tokens.size_multiple
    height, width = (max(unit, round(length / unit) * unit) for length in (side * stretch, side / stretch))
    return height, width


def _log_normal(variation: float, rng: np.random.Generator) -> float:
    """Draw from a log-normal distribution of mean 1 with this coefficient of variation."""
    variance = math.log1p(variation**2)
    return math.exp(rng.normal(-variance / 2, math.sqrt(variance)))


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
