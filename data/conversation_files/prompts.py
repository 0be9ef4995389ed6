"""Prompts `conversations`: the files of the data set of that name, without each record's last answer.

The last answer of a record is the answer against which completions are scored. Everything before it is the prompt,
written as in supervised training, with its images.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from data.conversation_files import provider as files
from data.conversation_files.provider import Config
from data.energon.provider import path_of
from data.indexed import ShuffledRecords
from mimo.protocols import DataRequest, ImageProcessing, TokenSpec
from mimo.rl.prompts import Normalisation, Prompt


class ConversationPrompts:
    """One split; a `mimo.rl.prompts.FinitePromptSet` and `ImagePromptSet`. Every pass has another order.

    Attributes:
        end_token_id: ends a completion.
        pad_token_id: fills rows.
        normalisation: mean and deviation of pictures, as in supervised training.
    """

    def __init__(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> None:
        """Open the files.

        Raises:
            ValueError: flags or files cannot work; the message names them.
        """
        # Energon and torch take seconds to import, and --help needs neither of them.
        from data.conversation_files.files import images_of
        from data.conversation_files.sources import RecordReader, check_named_columns, sources_of
        from data.energon.task_encoder import ErrorLog, VlmTaskEncoder
        from data.prompts import load_tokenizer

        flag, path = path_of(config, split)
        sources = sources_of(config, split)
        if len(sources) > 1:
            raise ValueError(f"{flag} {path}: mixes {len(sources)} data sets, but train_rl.py reads one file or folder")
        self._flag = flag
        (source,) = sources
        self._reader, self._images = RecordReader(source, None), images_of(source.images, source.cache)
        self._columns = source.columns
        check_named_columns(flag, source, self._reader)
        # Only the model's tokens are read; lengths are checked by the run.
        request = DataRequest(tokens=tokens, num_image_tokens=lambda height, width: 1, num_lanes=1, micro_batch_size=1,
                              seq_length=1, seed=seed, split=split)
        self._encoder = VlmTaskEncoder(config, request, ErrorLog(config.max_bad_samples))
        self._tokenizer = load_tokenizer(config.tokenizer)
        channels = tokens.num_channels
        mean, std = (tuple(values) * (channels if len(values) == 1 else 1)
                     for values in (config.image_mean, config.image_std))
        self.normalisation = Normalisation(mean, std)
        self._records = ShuffledRecords(len(self._reader), seed, split)
        _, ends = self._encoder.tokenizer.encode_question([{"role": "user", "content": "A"}])
        if not ends:
            raise ValueError(f"--tokenizer {config.tokenizer}: has no token that ends an answer (eos_token)")
        self.end_token_id = ends[0]
        padding = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.end_token_id if padding is None else padding

    @property
    def num_prompts(self) -> int:
        """Number of records of a pass."""
        return len(self._records)

    def leave_out(self, keys: Collection[str]) -> None:
        """Leave out the records of these names. The others keep their names."""
        self._records.leave_out(keys, self._key)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index. Raises ValueError, with file and line, if its record cannot be used."""
        from data.conversation_files.sources import conversation_of_record

        number = self._records[index]
        file, _ = self._reader.place(number)
        try:
            found = conversation_of_record(file.parse(self._reader[number]["raw"]), self._images, self._columns)
            if found.videos:
                raise ValueError("has a video; prompts of train_rl.py may have images, but no videos")
            *before, last = found.messages or [{}]
            if not before or last.get("role") != "assistant":
                raise ValueError("has no answer at its end, against which completions are scored")
            question = self._encoder.question(before, found.images, found.tools, pixels=False)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self._flag} {self._key(number)}: {error}") from error
        sizes = tuple((size[0], size[1]) for size in question.sample.image_sizes)
        ids = tuple(question.sample.tokens.tolist())
        return Prompt(self._key(number), str(self._tokenizer.decode(ids)), ids, _text(last["content"]), {}, sizes,
                      partial(self._pictures, found.images))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode a completion, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _key(self, number: int) -> str:
        """Return file and place of a record."""
        file, place = self._reader.place(int(number))
        return f"{file.path} {file.name(place)}"

    def _pictures(self, images: Sequence[tuple[str, bytes]]) -> list[np.ndarray]:
        """Return the images at the encoder's sizes, uint8 `[height, width, channels]` each."""
        return [tile for name, data in images for tile in self._encoder.pictures(name, data)]


def _text(content: Any) -> str:
    """Return the text of an answer."""
    parts = content if isinstance(content, list) else [content]
    return "".join(part.get("text", "") if isinstance(part, Mapping) else str(part or "") for part in parts).strip()


class ConversationPromptsProvider:
    """The prompts `conversations`; see the docstring of this module."""

    Config: ClassVar[type] = Config

    def validate(self, config: Config, tokens: TokenSpec) -> None:
        """Raise ValueError, with flags, files and lines, if the flags or the first record cannot work."""
        self.open(config, tokens, "train", 0).prompt(0)

    def with_tokenizer(self, config: Config, folders: Sequence[str]) -> Config:
        """Return the flags with the tokenizer of the model, unless they name one."""
        filled: Config = files.provider.with_tokenizer(config, folders)
        return filled

    def with_image_processing(self, config: Config, find: Callable[[], Sequence[ImageProcessing]]) -> Config:
        """Return the flags with the model's values filled in, as in supervised training."""
        filled: Config = files.provider.with_image_processing(config, find)
        return filled

    def image_processing(self, config: Config, tokens: TokenSpec) -> ImageProcessing:
        """Return how images become pixels, as in supervised training."""
        return files.provider.image_processing(config, tokens)

    def stream_fields(self, config: Config) -> dict[str, Any]:
        """Return the fields that decide the prompts, as in supervised training."""
        return files.provider.stream_fields(config)

    def open(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> ConversationPrompts:
        """Open a split, `train` or `valid`. Raises the errors of `validate`."""
        return ConversationPrompts(config, tokens, split, seed)


provider = ConversationPromptsProvider()
