"""Prompts with noise as images and videos, of one size or several; as a data set for `--dataset-provider`, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mimo.protocols import ImageSize, TokenSpec, VideoSize
from mimo.rl.prompts import Prompt
from mimo.visual import Normalisation

IMAGE_TOKEN, VIDEO_TOKEN, SIDE = 60, 59, 16
# Height and width of images in turn, for encoders that take any size in blocks of 8 pixels.
SIZES = ((8, 16), (24, 8), (16, 16))
# One image first, none, two side by side, one in the middle.
PROMPTS = ((IMAGE_TOKEN, 4), (5, 6), (7, IMAGE_TOKEN, IMAGE_TOKEN), (11, IMAGE_TOKEN, 12))
# The same with a video before or behind an image, and one alone.
VIDEO_PROMPTS = ((IMAGE_TOKEN, 4), (VIDEO_TOKEN, 6), (7, VIDEO_TOKEN, 8, IMAGE_TOKEN),
                 (11, IMAGE_TOKEN, VIDEO_TOKEN, VIDEO_TOKEN, 12))


@dataclass(frozen=True)
class Config:
    """Data set: pictures of noise."""


class PictureSet:
    """A `mimo.rl.prompts.ImagePromptSet`. Place `n` holds prompt `n % 4`.

    Args:
        sizes: height and width of images, in turn.
        image_token: stands for an image.
        shift: added to the other tokens of every prompt, as by a set that differs from rank to rank.
        frames: numbers of frames of videos, in turn; without any, there are no videos.

    Attributes:
        drawn: places whose pictures were asked for.
    """

    end_token_id, pad_token_id = 1, 0
    normalisation = Normalisation((0.3, 0.4, 0.5), (0.2, 0.3, 0.4))

    def __init__(self, sizes: Sequence[tuple[int, int]] = ((SIDE, SIDE),), image_token: int = IMAGE_TOKEN,
                 shift: int = 0, frames: Sequence[int] = ()) -> None:
        self.drawn: list[int] = []
        self._sizes, self._image_token, self._shift, self._frames = sizes, image_token, shift, frames

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at a place."""
        words = (VIDEO_PROMPTS if self._frames else PROMPTS)[index % len(PROMPTS)]
        ids = tuple(self._image_token if token == IMAGE_TOKEN else token + self._shift * (token != VIDEO_TOKEN)
                    for token in words)
        sizes: list[ImageSize] = []
        for token in words:
            number = index + len(sizes)
            if token == IMAGE_TOKEN:
                sizes.append(self._sizes[number % len(self._sizes)])
            elif token == VIDEO_TOKEN:
                sizes.append(VideoSize(*self._sizes[number % len(self._sizes)],
                                       self._frames[number % len(self._frames)], 0.5))
        return Prompt(f"prompt {index}", "", ids, "", {}, tuple(sizes), lambda: self._pictures(index, sizes))

    def decode(self, token_ids: Any) -> str:
        """Ids as text."""
        return " ".join(map(str, token_ids))

    def _pictures(self, index: int, sizes: Sequence[ImageSize]) -> list[np.ndarray]:
        self.drawn.append(index)
        rng = np.random.default_rng(index)
        shapes = [(size.frames, *size[:2], 3) if isinstance(size, VideoSize) else (*size, 3) for size in sizes]
        return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


class PicturePrompts:
    """A `mimo.rl.prompts.PromptProvider`."""

    Config: ClassVar[type] = Config

    def validate(self, config: Config, tokens: TokenSpec) -> None:
        """Accept any model whose images have any size."""

    def open(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> PictureSet:
        """Open a split; both are the same."""
        return PictureSet(SIZES, tokens.image_token_id)


provider = PicturePrompts()
