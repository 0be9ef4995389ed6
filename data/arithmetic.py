"""Generated sums in the format of GSM8K: a question, and an answer that ends with `#### 42`.

train_rl.py gets them as prompts to complete, train_hetero.py the same sums at the same indices with their answers as
targets. Each is a pure function of seed, split and index. The held-out sums are fixed. They never occur in the train
split, whatever the seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from data import character_tokenizer
from data.digests import TOKENIZER_FILES, content_of_folder
from data.indexed import IndexedStream
from mimo.protocols import Lane, Sample, TokenSpec
from mimo.rl.prompts import Prompt

SPLITS = ("train", "valid")
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
# Sums are held out by their checksum modulo this.
SHARES = 1000


@dataclass(frozen=True)
class Config:
    """Prompts `arithmetic`: generated sums."""

    arithmetic_form: Literal["sum", "words"] = "sum"
    """sum: "17+25="; words: "Ann has 17 apples and gets 25 more. How many apples does Ann have?"."""
    arithmetic_max: int = 99
    """Largest number that is added."""
    arithmetic_valid_fraction: float = 0.1
    """Share of the sums that is held out."""
    arithmetic_slip_fraction: float = 0.0
    """Share of the answers to learn from (train_hetero.py) that are one too many; held-out ones are right. Completions
    are scored by right answers."""
    tokenizer: str = ""
    """Folder of a Hugging Face tokenizer. Default: one token for each character (data/character_tokenizer.py)."""


def is_held_out(config: Config, first: int, second: int) -> bool:
    """Return whether a sum belongs to the held-out split, in either order of its numbers."""
    low, high = sorted((first, second))
    return zlib.crc32(f"{low}+{high}".encode()) % SHARES < round(SHARES * config.arithmetic_valid_fraction)


class Arithmetic:
    """One split; a `mimo.rl.prompts.PromptSet`.

    Attributes:
        end_token_id: ends a completion.
        pad_token_id: fills rows.
    """

    def __init__(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> None:
        """Open the tokenizer.

        Raises:
            ValueError: the flags cannot work; the message names them and their values.
        """
        _check(config)
        self._config, self._split, self._seed = config, split, seed
        self._tokenizer = _tokenizer(config.tokenizer)
        name = f"--tokenizer {config.tokenizer}" if config.tokenizer else "the tokenizer of characters"
        largest = max(self._tokenizer.get_vocab().values())
        if largest >= tokens.vocab_size:
            raise ValueError(f"{name} has token ids up to {largest}, the model's --vocab-size is {tokens.vocab_size}")
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"{name} has no token that ends a text (eos_token)")
        self.end_token_id: int = self._tokenizer.eos_token_id
        padding = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.end_token_id if padding is None else padding

    def prompt(self, index: int) -> Prompt:
        rng = np.random.default_rng([self._seed, SPLITS.index(self._split), index])
        while True:
            first, second = (int(number) for number in rng.integers(0, self._config.arithmetic_max + 1, size=2))
            if is_held_out(self._config, first, second) == (self._split == "valid"):
                break
        if self._config.arithmetic_form == "sum":
            text = f"{first}+{second}="
        else:
            name, thing = str(rng.choice(NAMES)), str(rng.choice(THINGS))
            text = (f"Question: {name} has {first} {thing} and gets {second} more. How many {thing} does {name} have?\n"
                    "Answer: ")
        # A tokenizer may put tokens around a text. Those at its beginning belong to a prompt, those at its end do not.
        ids = self._tokenizer(text)["input_ids"]
        if ids[-1] == self.end_token_id:
            ids = ids[:-1]
        return Prompt(f"arithmetic/{self._split}/{index:06d}", text, tuple(ids), f"#### {first + second}",
                      {"numbers": (first, second)})

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def sample(self, index: int) -> Sample:
        """Return the sum at an index. The targets are its answer and the end token."""
        prompt = self.prompt(index)
        answer = [*self._tokenizer(self._written(index, prompt), add_special_tokens=False)["input_ids"],
                  self.end_token_id]
        return Sample(prompt.key, np.array([*prompt.token_ids, *answer], np.int64),
                      np.arange(len(prompt.token_ids) + len(answer)) >= len(prompt.token_ids))

    def _written(self, index: int, prompt: Prompt) -> str:
        """Return the answer to learn from at an index, which may be wrong."""
        rng = np.random.default_rng([self._seed, len(SPLITS), index])
        if self._split == "valid" or rng.random() >= self._config.arithmetic_slip_fraction:
            return prompt.ground_truth
        return f"#### {sum(prompt.metadata['numbers']) + 1}"


class ArithmeticProvider:
    """The `arithmetic` sums, for both programs; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def stream_fields(self, config: Config) -> dict[str, Any]:
        """Return all fields, with a digest of the tokenizer in place of its path."""
        return vars(config) | {"tokenizer": content_of_folder(config.tokenizer, TOKENIZER_FILES)}

    def validate(self, config: Config, tokens: TokenSpec) -> None:
        """Raise ValueError, with flags and values, if the flags cannot work."""
        self.open(config, tokens, "train", 0)

    def open(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> Arithmetic:
        """Open a split, `train` or `valid`. Raises the errors of `validate`."""
        return Arithmetic(config, tokens, split, seed)

    def stream(self, config: Config, tokens: TokenSpec, lane: Lane) -> IndexedStream:
        """Open one lane of sums with their answers. Raises the errors of `validate`."""
        sums = self.open(config, tokens, lane.split, lane.seed)
        return IndexedStream(lane, sums.sample)

    def num_samples(self, config: Config, split: str) -> int | None:
        """Return None, because sums are drawn without end."""
        return None

    def decode(self, config: Config, tokens: list[int]) -> str:
        tokenizer = _tokenizer(config.tokenizer)
        end = tokenizer.eos_token_id
        return str(tokenizer.decode(tokens[: tokens.index(end) if end in tokens else None], skip_special_tokens=True))


def _check(config: Config) -> None:
    if config.arithmetic_max < 9:
        raise ValueError(f"--arithmetic-max {config.arithmetic_max} is below 9: too few sums to hold some out")
    if not 0.01 <= config.arithmetic_valid_fraction <= 0.9:
        raise ValueError(f"--arithmetic-valid-fraction {config.arithmetic_valid_fraction}: must be between 0.01 and "
                         "0.9")
    if not 0 <= config.arithmetic_slip_fraction <= 1:
        raise ValueError(f"--arithmetic-slip-fraction {config.arithmetic_slip_fraction}: must be between 0 and 1")
    # Larger numbers need no check: a hundredth of their sums is never empty.
    numbers = range(min(config.arithmetic_max, 99) + 1)
    if not any(is_held_out(config, first, second) for first in numbers for second in numbers):
        raise ValueError(f"--arithmetic-valid-fraction {config.arithmetic_valid_fraction} holds out none of the sums "
                         f"up to --arithmetic-max {config.arithmetic_max}")


@lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Any:
    """Load the tokenizer of a folder, or build the character tokenizer if there is none."""
    if not folder:
        return character_tokenizer.build()
    from data.hf_tokenizer import load_tokenizer  # seconds to import, and --help needs none of it

    return load_tokenizer(folder)


provider = ArithmeticProvider()
