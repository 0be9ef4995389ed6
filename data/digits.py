"""Read a number: the 1,797 handwritten digit scans (8x8 pixels, 17 grey levels) bundled with scikit-learn.

A sample shows the digits of a number, one image each or all in one strip, asks to "read the number" and answers with
its digits. A text-only sample writes the number in words instead. Which scans are held out is fixed: they never occur
in the train split, whatever the seed. train_rl.py gets the numbers as prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from data.indexed import IndexedStream
from mimo.protocols import LANGUAGE, ImageProcessing, Lane, Sample, TokenSpec
from mimo.rl.prompts import Prompt
from mimo.visual import Normalisation

PAD, BOS, EOS = 0, 1, 2
FIRST_DIGIT = 4
PROMPT = ("read", "the", "number")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = {word: FIRST_DIGIT + 10 + position for position, word in enumerate(PROMPT + NAMES)}
NUM_WORDS = FIRST_DIGIT + 10 + len(WORDS)

SCAN_SIDE = 8
# Mean and standard deviation of all pixels of the 1,797 scans in 0..1.
PIXEL_MEAN, PIXEL_STD = 0.30526, 0.37605
# Random streams of prompts, besides those of samples: of numbers, and of pixels.
NUMBERS, PIXELS = 2, 3
# Fixes the held-out split and the validation numbers, which --seed must not change.
SPLIT_SEED = 1797


@dataclass(frozen=True)
class Config:
    """Data set `digits`: handwritten numbers to read."""

    digits_min: int = 1
    """Smallest number of digits in a number."""
    digits_max: int = 4
    """Largest number of digits in a number."""
    digits_strip: bool = False
    """Put all digits of a number side by side in one image, blank after the last. Otherwise each digit has its own
    image."""
    digits_text_only_fraction: float = 0.3
    """Share of train samples without an image, with the number in words instead. They teach the language model to copy
    in order. At 1, validation is text too."""
    digits_words_fraction: float = 0.0
    """Share of train samples whose answer is in words, "four two", not in digits."""
    digits_augment: bool = True
    """Shift train scans by up to one scan pixel and vary their intensity by up to 10 percent."""
    digits_valid_fraction: float = 0.15
    """Share of the scans of each digit that is held out for validation."""
    digits_image_size: int = 32
    """Side length of a digit in pixels, for encoders that take any size; a multiple of 8."""


@lru_cache(maxsize=1)
def load_scans() -> tuple[np.ndarray, np.ndarray]:
    """Load all scans, float32 `[1797, 8, 8]` in 0..1, and their digits, int64 `[1797]`."""
    from sklearn.datasets import load_digits  # takes a second to import, and --help does not need it

    bundle = load_digits()
    return (bundle.images / 16).astype(np.float32), bundle.target.astype(np.int64)


@lru_cache(maxsize=8)
def split_scans(valid_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the scan numbers of the train split and of the held-out split, stratified by digit."""
    rng = np.random.default_rng(SPLIT_SEED)
    _, digits = load_scans()
    train, valid = [], []
    for digit in range(10):
        scans = rng.permutation(np.flatnonzero(digits == digit))
        held_out = round(valid_fraction * len(scans))
        valid.append(scans[:held_out])
        train.append(scans[held_out:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(valid))


@lru_cache(maxsize=8)
def valid_numbers(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the validation numbers as tuples of held-out scans.

    Each scan is used once; the last number may reuse a few.
    """
    rng = np.random.default_rng([SPLIT_SEED, 1])
    scans = rng.permutation(split_scans(config.digits_valid_fraction)[1])
    numbers, used = [], 0
    while used < len(scans):
        length = int(rng.integers(config.digits_min, config.digits_max + 1))
        numbers.append(tuple(int(scans[position % len(scans)]) for position in range(used, used + length)))
        used += length
    return tuple(numbers)


def check(config: Config, tokens: TokenSpec, split: str) -> None:
    """Raise ValueError, with flags and values, if the configuration cannot work."""
    if not 1 <= config.digits_min <= config.digits_max:
        raise ValueError(f"--digits-min {config.digits_min} --digits-max {config.digits_max}: need 1 <= min <= max")
    if not 0 <= config.digits_text_only_fraction <= 1:
        raise ValueError(f"--digits-text-only-fraction {config.digits_text_only_fraction}: must be between 0 and 1")
    if not 0 <= config.digits_words_fraction <= 1:
        raise ValueError(f"--digits-words-fraction {config.digits_words_fraction}: must be between 0 and 1")
    if not 0 <= config.digits_valid_fraction <= 0.9:
        raise ValueError(f"--digits-valid-fraction {config.digits_valid_fraction}: must be between 0 and 0.9")
    if split == "valid" and len(split_scans(config.digits_valid_fraction)[1]) == 0:
        raise ValueError(f"--digits-valid-fraction {config.digits_valid_fraction}: no scan is held out to evaluate on")
    if tokens.vocab_size < NUM_WORDS:
        raise ValueError(f"--vocab-size {tokens.vocab_size}: the digits data set uses {NUM_WORDS} token ids")
    image = tokens.image_token_id
    if image < 0:
        if config.digits_text_only_fraction < 1:
            raise ValueError(f"--digits-text-only-fraction {config.digits_text_only_fraction}: the model takes no "
                             "images; set it to 1")
        return
    if image != FIRST_DIGIT - 1 and not NUM_WORDS <= image < tokens.vocab_size:
        free = f"3 or {NUM_WORDS} to {tokens.vocab_size - 1}" if tokens.vocab_size > NUM_WORDS else "3"
        raise ValueError(f"--image-token-id {image}: a word of the digits data set or no token id; free: {free}")
    check_sides(config, tokens)


def check_sides(config: Config, tokens: TokenSpec) -> None:
    """Raise ValueError, with flags and values, if the scans do not fit in the images."""
    if tokens.tiles is not None:
        raise ValueError("--dataset-provider digits draws images of one size, but the model cuts images of any size "
                         "into tiles; use --dataset-provider conversations or energon")
    height, width = tokens.image_shape
    sides = {"--vision-image-size": height, "--vision-image-width": width}
    if height == width:
        sides = {"--vision-image-size": height} if height else {"--digits-image-size": config.digits_image_size}
    for flag, side in sides.items():
        if side < SCAN_SIDE or side % SCAN_SIDE:
            raise ValueError(f"{flag} {side}: must be a multiple of {SCAN_SIDE}, the pixels a side of a digit scan")
    if config.digits_strip and tokens.image_size and width < SCAN_SIDE * config.digits_max:
        raise ValueError(
            f"--digits-strip with --digits-max {config.digits_max} needs {list(sides)[-1]} of at least "
            f"{SCAN_SIDE * config.digits_max}, got {width}"
        )


def image_size(config: Config, tokens: TokenSpec) -> tuple[int, int]:
    """Return height and width in pixels of every image.

    For an encoder of one fixed size, a strip is drawn inside it.
    """
    if tokens.image_size:
        return tokens.image_shape
    width = config.digits_max if config.digits_strip else 1
    return config.digits_image_size, config.digits_image_size * width


def augment(scan: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shift a scan `[8, 8]` by up to one pixel each way and scale its intensity by 0.9 to 1.1, kept in 0..1."""
    top, left = rng.integers(0, 3, size=2)
    shifted = np.pad(scan, 1)[top : top + SCAN_SIDE, left : left + SCAN_SIDE]
    return np.clip(shifted * rng.uniform(0.9, 1.1), 0, 1)


def lay_out(scans: list[np.ndarray], cells: int, size: tuple[int, int]) -> np.ndarray:
    """Lay scans side by side on black, enlarged by an integer factor: float32 `[height, width]` in 0..1.

    Args:
        scans: `[8, 8]` each, in 0..1; at most `cells` of them.
        cells: scans that must fit beside each other.
        size: height and width in pixels.
    """
    height, width = size
    factor = min(height, width // cells) // SCAN_SIDE
    canvas = np.zeros(size, np.float32)
    top, side = (height - factor * SCAN_SIDE) // 2, factor * SCAN_SIDE
    for cell, scan in enumerate(scans):
        canvas[top : top + side, cell * side : (cell + 1) * side] = np.kron(scan, np.ones((factor, factor), np.float32))
    return canvas


def draw(scans: list[np.ndarray], cells: int, size: tuple[int, int], num_channels: int) -> np.ndarray:
    """Draw `lay_out`'s picture, normalised: float32 `[num_channels, height, width]`."""
    return normalise(lay_out(scans, cells, size), num_channels)


def draw_number(config: Config, tokens: TokenSpec, scans: Sequence[int], rng: np.random.Generator | None) -> (
        list[np.ndarray]):
    """Draw the images of a number, float32 `[height, width]` in 0..1: one strip, or one for each digit.

    Args:
        config: the data set's flags.
        tokens: size and channels of the model's images.
        scans: scan numbers of the digits; without any there is no image.
        rng: augments the scans; None leaves them as they are.
    """
    pixels, _ = load_scans()
    shapes = [pixels[scan] if rng is None else augment(pixels[scan], rng) for scan in scans]
    groups = [shapes] if config.digits_strip and shapes else [[shape] for shape in shapes]
    cells = config.digits_max if config.digits_strip else 1
    return [lay_out(group, cells, image_size(config, tokens)) for group in groups]


def normalise(image: np.ndarray, num_channels: int) -> np.ndarray:
    """Normalise a grey image `[height, width]` in 0..1 and repeat it: float32 `[num_channels, height, width]`."""
    normalised = (image - np.float32(PIXEL_MEAN)) / np.float32(PIXEL_STD)
    return np.repeat(normalised[None], num_channels, axis=0)


def choose_scans(config: Config, split: str, index: int, rng: np.random.Generator) -> tuple[tuple[int, ...], bool]:
    """Return the scan numbers of the sample at an index, and whether it shows them only in words.

    Args:
        config: the data set's flags.
        split: `train` draws them from `rng`; `valid` takes them from the fixed list.
        index: global sample index.
        rng: random generator of this sample.
    """
    if split == "valid":
        numbers = valid_numbers(config)
        return numbers[index % len(numbers)], config.digits_text_only_fraction == 1
    text_only = bool(rng.random() < config.digits_text_only_fraction)
    length = rng.integers(config.digits_min, config.digits_max + 1)
    scans = rng.choice(split_scans(config.digits_valid_fraction)[0], size=length)
    return tuple(int(scan) for scan in scans), text_only


def question(config: Config, tokens: TokenSpec, number: Sequence[int], text_only: bool) -> list[int]:
    """Return the token ids that ask for a number: one placeholder for each image, or its digits in words."""
    num_images = 1 if config.digits_strip else len(number)
    shown = [WORDS[NAMES[digit]] for digit in number] if text_only else [tokens.image_token_id] * num_images
    return [BOS, *shown, *(WORDS[word] for word in PROMPT)]


def answer_words(config: Config, lane: Lane, index: int, number: Sequence[int]) -> list[int]:
    """Return the token ids of a number: its digits or, for some train samples, their names."""
    if config.digits_words_fraction and lane.split == "train":
        # A separate random stream, so that the flag does not change which numbers are shown. A 0 at the end of the seed
        # would give the sample's own stream again.
        if np.random.default_rng([lane.seed, index, 1]).random() < config.digits_words_fraction:
            return [WORDS[NAMES[digit]] for digit in number]
    return [FIRST_DIGIT + digit for digit in number]


def build_sample(config: Config, tokens: TokenSpec, lane: Lane, index: int) -> Sample:
    """Return the sample at a global index, a pure function of (seed, index) or, for validation, of the index."""
    rng = np.random.default_rng([lane.seed, index])
    if lane.split == "valid":
        index %= len(valid_numbers(config))
    scans, text_only = choose_scans(config, lane.split, index, rng)
    number = [int(load_scans()[1][scan]) for scan in scans]
    prompt = question(config, tokens, number, text_only)
    answer = [*answer_words(config, lane, index, number), EOS]
    num_images = 0 if text_only else 1 if config.digits_strip else len(number)
    sample = Sample(
        key=f"digits/{lane.split}/{index:06d}",
        tokens=np.array(prompt + answer, np.int64),
        target_mask=np.array([False] * len(prompt) + [True] * len(answer)),
        image_sizes=[image_size(config, tokens)] * num_images,
    )
    if lane.module != LANGUAGE:
        # Drawn last, so that ranks that read no pixels see the same numbers.
        changed = rng if config.digits_augment and lane.split == "train" else None
        drawn = draw_number(config, tokens, () if text_only else scans, changed)
        sample.images = [normalise(image, tokens.num_channels) for image in drawn]
    return sample


class DigitsProvider:
    """The `digits` data set; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def validate(self, config: Any, tokens: TokenSpec) -> None:
        check(config, tokens, "train")

    def stream(self, config: Any, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        """Open one lane. Raises ValueError, with the flag, if the configuration cannot work."""
        check(config, tokens, lane.split)
        return IndexedStream(lane, partial(build_sample, config, tokens, lane))

    def with_image_processing(self, config: Config, find: Callable[[], Sequence[ImageProcessing]]) -> Config:
        """Return the flags unchanged: scans have the encoder's size and their own mean and deviation."""
        return config

    def image_processing(self, config: Config, tokens: TokenSpec) -> ImageProcessing:
        """Return the settings by which an engine sees images of the encoder's size as training does."""
        return ImageProcessing("dynamic" if tokens.packs_patches else "stretch", (PIXEL_MEAN,), (PIXEL_STD,),
                               min_patches=1, max_patches=1024, source="the digits data set")

    def num_samples(self, config: Any, split: str) -> int | None:
        """Return the length of validation's fixed list. Training combines scans without end."""
        return len(valid_numbers(config)) if split == "valid" else None

    def decode(self, config: Any, tokens: list[int]) -> str:
        """Decode the tokens before the end: digits become one number, other words are separated by spaces."""
        names = {identifier: word for word, identifier in WORDS.items()} | {FIRST_DIGIT - 1: "<image>"}
        text = ""
        for token in tokens[: tokens.index(EOS) if EOS in tokens else None]:
            if FIRST_DIGIT <= token < FIRST_DIGIT + 10:
                text += str(token - FIRST_DIGIT) if text[-1:].isdigit() or not text else f" {token - FIRST_DIGIT}"
            elif token not in (PAD, BOS):
                text += f" {names.get(token, f'<{token}>')}"
        return text.strip()


provider = DigitsProvider()


class DigitPrompts:
    """The numbers of one split as prompts without answers; a `mimo.rl.prompts.ImagePromptSet`.

    Images are 8-bit pictures. Prompts of the train split are a pure function of seed and index. The held-out split is
    the fixed list of supervised training.

    Attributes:
        end_token_id: ends a completion.
        pad_token_id: fills rows.
        normalisation: mean and deviation of pictures, as in supervised training.
    """

    end_token_id = EOS
    pad_token_id = PAD

    def __init__(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> None:
        """Check the configuration.

        Raises:
            ValueError: the flags cannot work; the message names them and their values.
        """
        check(config, tokens, split)
        if config.digits_words_fraction:
            raise ValueError(f"--digits-words-fraction {config.digits_words_fraction} is for train_hetero.py: prompts "
                             "have no answers; leave it out")
        self._config, self._tokens, self._split, self._seed = config, tokens, split, seed
        channels = tokens.num_channels
        self.normalisation = Normalisation((PIXEL_MEAN,) * channels, (PIXEL_STD,) * channels)

    def prompt(self, index: int) -> Prompt:
        config, tokens = self._config, self._tokens
        rng = np.random.default_rng([self._seed, index, NUMBERS])
        scans, text_only = choose_scans(config, self._split, index, rng)
        number = [int(load_scans()[1][scan]) for scan in scans]
        answer = "".join(map(str, number))
        ids = question(config, tokens, number, text_only)
        num_images = ids.count(tokens.image_token_id)
        return Prompt(
            f"digits/{self._split}/{index:06d}", self._text(ids), tuple(ids), answer, {"digits": tuple(number)},
            (image_size(config, tokens),) * num_images,
            partial(self._pictures, () if text_only else scans, index))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode a completion: its digits as one number, other words separated by spaces."""
        return provider.decode(self._config, list(token_ids))

    def _pictures(self, scans: Sequence[int], index: int) -> list[np.ndarray]:
        """Draw the images of a prompt, uint8 `[height, width, channels]` each."""
        changed = self._config.digits_augment and self._split == "train"
        rng = np.random.default_rng([self._seed, index, PIXELS]) if changed else None
        drawn = draw_number(self._config, self._tokens, scans, rng)
        return [np.repeat(np.rint(image * 255).astype(np.uint8)[..., None], self._tokens.num_channels, axis=2)
                for image in drawn]

    def _text(self, ids: Sequence[int]) -> str:
        image = self._tokens.image_token_id
        names = {identifier: word for word, identifier in WORDS.items()} | {image: "<image>"}
        return " ".join(names[token] for token in ids if token != BOS)


class DigitPromptsProvider:
    """The prompts `digits`."""

    Config: ClassVar[type] = Config
    # As in supervised training.
    with_image_processing = staticmethod(provider.with_image_processing)
    image_processing = staticmethod(provider.image_processing)

    def validate(self, config: Config, tokens: TokenSpec) -> None:
        for split in ("train", "valid"):
            self.open(config, tokens, split, 0)

    def open(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> DigitPrompts:
        """Open a split, `train` or `valid`. Raises the errors of `validate`."""
        return DigitPrompts(config, tokens, split, seed)


prompt_provider = DigitPromptsProvider()
