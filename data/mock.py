"""Random tokens, images of any size and videos without end, for benchmarks and for tests of uneven batches.

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
from mimo.visual import ImageSize, VideoSize, num_pictures

SPLITS = ("train", "valid")
# Areas of images are clipped at this multiple of --mock-image-size squared.
LARGEST_AREA = 4.0
# Drawn numbers of an image or a video. Further ones repeat them, because drawing those of a long video takes minutes.
DRAWN = 1 << 20
SECONDS_OF_FRAME = 0.5


@dataclass(frozen=True)
class Config:
    """Data set `mock`: random tokens and images."""

    mock_min_length: int = 8
    """Smallest number of text tokens in a sample."""
    mock_max_length: int = 32
    """Largest number of text tokens in a sample."""
    mock_images_max: int = 3
    """Largest number of images in a sample. A sample that has images has at least one. A text model gets none."""
    mock_text_only_fraction: float = 0.25
    """Share of samples without an image."""
    mock_images_mean: float | None = None
    """Mean number of images of the samples that have some: log-normal with --mock-images-cv, rounded, from 1 to
    --mock-images-max. Default: uniform from 1 to --mock-images-max."""
    mock_images_cv: float = 0.0
    """Coefficient of variation of the number of images; 0: every sample has the mean. Needs --mock-images-mean."""
    mock_image_size: int = 32
    """Side length in pixels of an image, for models that take any size."""
    mock_image_size_cv: float = 0.0
    """Coefficient of variation of the area of these images. Areas are log-normal around --mock-image-size and at most 4
    times as large, and shapes reach 2:1. 0: all images are squares of one size. --seq-length has to hold the largest
    sample."""
    mock_video_fraction: float = 0.0
    """Share of images that are replaced by videos of their size."""
    mock_video_min_frames: int = 1
    """Smallest number of frames of a video, which has whole temporal patches and at least one."""
    mock_video_frames: int = 8
    """Largest number of frames of a video. There is half a second between frames."""
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
    if config.mock_image_size_cv and tokens.image_token_id >= 0 and tokens.image_size and tokens.tiles is None:
        raise ValueError(f"--mock-image-size-cv {config.mock_image_size_cv}: the encoder takes images of one size, "
                         f"{tokens.image_shape[0]}x{tokens.image_shape[1]}")
    if config.mock_images_max < 0:
        raise ValueError(f"--mock-images-max {config.mock_images_max}: must not be negative")
    for name in ("mock_text_only_fraction", "mock_video_fraction"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(config, name)}: must be between 0 and 1")
    if tokens.image_token_id >= 0 and (not tokens.image_size or tokens.tiles) and config.mock_image_size < 1:
        raise ValueError(f"--mock-image-size {config.mock_image_size}: must be at least 1 pixel")
    _check_videos(config, tokens)
    _check_packing(config, tokens)
    if tokens.vocab_size < 3:
        raise ValueError(f"--vocab-size {tokens.vocab_size}: the mock data set needs a padding, an image and a word id")


def _check_videos(config: Config, tokens: TokenSpec) -> None:
    if not config.mock_video_fraction or tokens.image_token_id < 0:
        return
    flag = f"--mock-video-fraction {config.mock_video_fraction}"
    if tokens.video_token_id < 0:
        raise ValueError(f"{flag}: the model takes no videos; --model-provider qwen2_5_vl and qwen3_vl do")
    if tokens.video_token_id >= tokens.vocab_size:
        raise ValueError(f"{flag}: --video-token-id {tokens.video_token_id} is not below --vocab-size "
                         f"{tokens.vocab_size}")
    if config.mock_video_frames < tokens.temporal_patch_size:
        raise ValueError(f"--mock-video-frames {config.mock_video_frames}: must be at least "
                         f"--vision-temporal-patch-size {tokens.temporal_patch_size}")
    largest = config.mock_video_frames // tokens.temporal_patch_size * tokens.temporal_patch_size
    if not 1 <= config.mock_video_min_frames <= largest:
        raise ValueError(f"--mock-video-min-frames {config.mock_video_min_frames}: must be from 1 to {largest}, the "
                         f"whole temporal patches of --mock-video-frames {config.mock_video_frames}")


def _check_packing(config: Config, tokens: TokenSpec) -> None:
    if not config.mock_packed_length:
        return
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
        frames = config.mock_video_frames // tokens.temporal_patch_size if config.mock_video_fraction else 1
        largest += config.mock_images_max * int(max(tokens_of_image, side**2)) * frames
    if largest > config.mock_packed_length:
        raise ValueError(f"{flag}: the largest sample may have {largest} tokens (--mock-max-length, --mock-images-max, "
                         "--mock-image-size, --mock-video-frames)")


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
        # Each has a separate generator, so that ranks that make no pixels draw the same samples.
        rng = np.random.default_rng([*seed, len(parts)])
        part = _build_text(config, tokens, f"{key}.{len(parts)}", rng)
        images = [size[0] * size[1] // tokens.size_multiple**2 * num_pictures(size, tokens.temporal_patch_size)
                  for size in part.image_sizes]
        # With context parallelism, every sample is padded to a multiple.
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
    no_images = tokens.image_token_id < 0 or config.mock_images_max == 0
    text_only = no_images or rng.random() < config.mock_text_only_fraction
    num_images = 0 if text_only else _number_of_images(config, rng)
    length = int(rng.integers(config.mock_min_length, config.mock_max_length + 1))
    # Any id except 0, which pads, and the placeholders.
    placeholders = sorted(each for each in {tokens.image_token_id, tokens.video_token_id}
                          if 0 < each < tokens.vocab_size)
    text = rng.integers(1, tokens.vocab_size - len(placeholders), size=length)
    for placeholder in placeholders:
        text += text >= placeholder
    answer = int(rng.integers(1, length))
    positions = np.sort(rng.integers(0, length - answer + 1, size=num_images))
    items = [_items(config, tokens, rng) for _ in range(num_images)]
    sizes = [size for each in items for size in each]
    own = [tokens.video_token_id if isinstance(size, VideoSize) else tokens.image_token_id for size in sizes]
    return Sample(
        key=key,
        tokens=np.insert(text, np.repeat(positions, [len(each) for each in items]), own),
        target_mask=np.arange(length + len(sizes)) >= length + len(sizes) - answer,
        image_sizes=sizes,
    )


def _items(config: Config, tokens: TokenSpec, rng: np.random.Generator) -> list[ImageSize]:
    """Draw an image or the parts of a video that have placeholders of their own."""
    height, width = _image_size(config, tokens, rng)
    if not config.mock_video_fraction or rng.random() >= config.mock_video_fraction:
        return [(height, width)]
    together = tokens.temporal_patch_size
    fewest = -(-config.mock_video_min_frames // together)
    frames = together * int(rng.integers(fewest, config.mock_video_frames // together + 1))
    each = tokens.placeholder_frames or frames
    return [VideoSize(height, width, each, SECONDS_OF_FRAME)] * (frames // each)


def _with_pixels(sample: Sample, tokens: TokenSpec, lane: Lane, rng: np.random.Generator) -> Sample:
    if lane.module != LANGUAGE:
        sample.images = [_pixels(tokens.pixel_shape(size), rng) for size in sample.image_sizes]
    return sample


def _pixels(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    drawn = rng.standard_normal(min(math.prod(shape), DRAWN), dtype=np.float32)
    return np.resize(drawn, shape)


def _number_of_images(config: Config, rng: np.random.Generator) -> int:
    if config.mock_images_mean is None:
        return int(rng.integers(1, config.mock_images_max + 1))
    drawn = round(config.mock_images_mean * _log_normal(config.mock_images_cv, rng))
    return min(max(drawn, 1), config.mock_images_max)


def _image_size(config: Config, tokens: TokenSpec, rng: np.random.Generator) -> tuple[int, int]:
    """Draw the height and width of an image in pixels."""
    if tokens.image_size and tokens.tiles is None:
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
        check(config, tokens)

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        check(config, tokens)
        return IndexedStream(lane, partial(build_sample, config, tokens, lane))

    def num_samples(self, config: Any, split: str) -> int | None:
        """Return None, because neither split has an end."""
        return None

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Write token ids, separated by spaces."""
        return " ".join(str(token) for token in tokens)


provider = MockProvider()
