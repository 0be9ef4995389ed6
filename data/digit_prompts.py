"""Prompts `digits`: numbers to read from scans of handwritten digits, shown as in `data.digits` but without the answer.

Images are 8-bit pictures. Numbers of the train split are a pure function of seed and index. The held-out split is the
fixed list of `data.digits`, whose scans never occur in the train split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import numpy as np

from data import digits
from data.digits import Config
from mimo.protocols import ImageProcessing, TokenSpec
from mimo.rl.prompts import Normalisation, Prompt

# Random streams of their own: prompts differ from the samples of supervised training, and pixels from numbers.
NUMBERS, PIXELS = 2, 3


class DigitPrompts:
    """One split; a `mimo.rl.prompts.ImagePromptSet`.

    Attributes:
        end_token_id: ends a completion.
        pad_token_id: fills rows.
        normalisation: mean and deviation of pictures, as in supervised training.
    """

    end_token_id = digits.EOS
    pad_token_id = digits.PAD

    def __init__(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> None:
        """Check the configuration.

        Raises:
            ValueError: the flags cannot work; the message names them and their values.
        """
        digits.check(config, tokens, split)
        if config.digits_words_fraction:
            raise ValueError(f"--digits-words-fraction {config.digits_words_fraction} is for train_hetero.py: prompts "
                             "have no answers; leave it out")
        self._config, self._tokens, self._split, self._seed = config, tokens, split, seed
        channels = tokens.num_channels
        self.normalisation = Normalisation((digits.PIXEL_MEAN,) * channels, (digits.PIXEL_STD,) * channels)

    def prompt(self, index: int) -> Prompt:
        config, tokens = self._config, self._tokens
        rng = np.random.default_rng([self._seed, index, NUMBERS])
        scans, text_only = digits.choose_scans(config, self._split, index, rng)
        number = [int(digits.load_scans()[1][scan]) for scan in scans]
        answer = "".join(map(str, number))
        ids = digits.question(config, tokens, number, text_only)
        num_images = ids.count(tokens.image_token_id)
        return Prompt(
            f"digits/{self._split}/{index:06d}", self._text(ids), tuple(ids), answer, {"digits": tuple(number)},
            (digits.image_size(config, tokens),) * num_images,
            partial(self._pictures, () if text_only else scans, index))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode a completion: its digits as one number, other words separated by spaces."""
        return digits.provider.decode(self._config, list(token_ids))

    def _pictures(self, scans: Sequence[int], index: int) -> list[np.ndarray]:
        """Draw the images of a prompt, uint8 `[height, width, channels]` each."""
        changed = self._config.digits_augment and self._split == "train"
        rng = np.random.default_rng([self._seed, index, PIXELS]) if changed else None
        drawn = digits.draw_number(self._config, self._tokens, scans, rng)
        return [np.repeat(np.rint(image * 255).astype(np.uint8)[..., None], self._tokens.num_channels, axis=2)
                for image in drawn]

    def _text(self, ids: Sequence[int]) -> str:
        image = self._tokens.image_token_id
        names = {identifier: word for word, identifier in digits.WORDS.items()} | {image: "<image>"}
        return " ".join(names[token] for token in ids if token != digits.BOS)


class DigitPromptsProvider:
    """The prompts `digits`; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def validate(self, config: Config, tokens: TokenSpec) -> None:
        """Raise ValueError, with flags and values, if the flags cannot work."""
        for split in ("train", "valid"):
            self.open(config, tokens, split, 0)

    def with_image_processing(self, config: Config, find: Callable[[], Sequence[ImageProcessing]]) -> Config:
        """Return the flags unchanged, as in supervised training."""
        return digits.provider.with_image_processing(config, find)

    def image_processing(self, config: Config, tokens: TokenSpec) -> ImageProcessing:
        """Return the settings by which an engine processes images of the encoder's size."""
        return digits.provider.image_processing(config, tokens)

    def open(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> DigitPrompts:
        """Open a split, `train` or `valid`. Raises the errors of `validate`."""
        return DigitPrompts(config, tokens, split, seed)


provider = DigitPromptsProvider()
