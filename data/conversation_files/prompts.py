"""Prompts `conversations`: the files of the data set of that name, without each record's last answer.

The last answer of a record is the answer against which completions are scored. Everything before it is the prompt,
written as in supervised training, with its images and videos.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from data.conversation_files import provider as files
from data.conversation_files.provider import Config
from data.conversations import FORMS, VIDEO_KEYS
from data.energon.provider import path_of
from data.indexed import ShuffledRecords
from mimo.config.toml_file import flag_words
from mimo.protocols import DataRequest, TokenSpec
from mimo.rl.prompts import BadPromptError, Prompt, PromptVideo, without_ends
from mimo.visual import Normalisation

if TYPE_CHECKING:
    from data.conversation_files.sources import Source
    from data.energon.task_encoder import PlannedVideo
    from data.video import VideoInfo


# Frames of videos whose headers are kept, about 40 bytes each.
KEPT_FRAMES = 5_000_000
BINARY = (bytes, bytearray, memoryview)
# Flags of packing and of shuffling by a buffer. Prompts are read one by one, without either.
UNUSED_FLAGS = frozenset({"packing_buffer_size", "packing_balance", "shuffle_buffer_size", "max_samples_per_sequence"})


def blocks_of(source: Source) -> list[int]:
    """Return the sizes of a source's blocks (row groups of Parquet); none if a reader keeps all blocks in memory."""
    from data.conversation_files.sources import PARALLEL_BLOCKS, open_file

    opened = [open_file(path) for path in source.files]
    if sum(max(0, len(file.block_starts) - 1) for file in opened) <= PARALLEL_BLOCKS:
        return []
    # Where other files have row groups, a file that can be read record by record has blocks of one record.
    return [size for file in opened
            for size in (np.diff(file.block_starts).tolist() if file.block_starts else [1] * len(file))]


class ConversationPrompts:
    """One split; a `mimo.rl.prompts.SkippingPromptSet` and `VideoPromptSet`.

    Every pass has another order, or the stored one with --no-shuffle. If Parquet files have many row groups, a
    pass shuffles the groups and mixes the records of some of them, as supervised training does. Otherwise nearly every
    prompt would read a whole row group.

    Attributes:
        end_token_id: ends a completion.
        end_token_ids: all tokens that do: the one of the prompt format, and the tokenizer's end of a text.
        pad_token_id: fills rows.
        normalisation: mean and deviation of pictures, as in supervised training.
        max_bad_samples: --max-bad-samples.
        video_processing: how videos become pixels, as in supervised training; None if model or chat template take none.
        tokenizer: the Hugging Face tokenizer.
    """

    def __init__(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> None:
        """Open the files.

        Raises:
            ValueError: flags or files cannot work; the message names them.
        """
        # Energon and torch take seconds to import, and --help needs neither of them.
        from data.conversation_files.files import images_of
        from data.conversation_files.sources import PARALLEL_BLOCKS, RecordReader, check_named_columns, sources_of
        from data.energon.task_encoder import ErrorLog, VlmTaskEncoder, video_processing_of
        from data.hf_tokenizer import load_tokenizer

        for field in fields(config):
            value = getattr(config, field.name)
            if field.name in UNUSED_FLAGS and value != field.default:
                raise ValueError(f"{' '.join(flag_words(field.name, value))} has no effect on the prompts of "
                                 "train_rl.py, which are neither packed nor read through a buffer; leave it out")
        if config.max_bad_samples < 0:
            raise ValueError(f"--max-bad-samples {config.max_bad_samples}: must be at least 0")
        flag, path = path_of(config, split)
        sources = sources_of(config, split)
        if len(sources) > 1:
            raise ValueError(f"{flag} {path}: mixes {len(sources)} data sets, but train_rl.py reads one file or folder")
        self._flag, self.max_bad_samples = flag, config.max_bad_samples
        (source,) = sources
        self._reader, self._images = RecordReader(source, None), images_of(source.images, source.cache)
        self._columns = source.columns
        check_named_columns(flag, source, self._reader)
        # Only the model's tokens are read; lengths are checked by the run.
        request = DataRequest(tokens=tokens, num_image_tokens=lambda *size: 1, num_lanes=1, micro_batch_size=1,
                              seq_length=1, seed=seed, split=split)
        self._encoder = VlmTaskEncoder(config, request, ErrorLog(config.max_bad_samples))
        self.tokenizer = load_tokenizer(config.tokenizer)
        channels = tokens.num_channels
        mean, std = (tuple(values) * (channels if len(values) == 1 else 1)
                     for values in (config.image_mean, config.image_std))
        self.normalisation = Normalisation(mean, std)
        self.video_processing = video_processing_of(config, tokens) if self._encoder.tokenizer.video_text else None
        self._video_token, self._has_tiles = tokens.video_token_id, tokens.tiles is not None
        # Of videos, by record and place in it, so that a file whose header was read is opened again only for pixels.
        self._infos: dict[tuple[int, int], VideoInfo] = {}
        self._kept_frames = 0
        self._records = ShuffledRecords(len(self._reader), seed, split, shuffle=config.shuffle,
                                        blocks=blocks_of(source), window=PARALLEL_BLOCKS)
        _, self.end_token_ids = self._encoder.tokenizer.encode_question([{"role": "user", "content": "A"}])
        if not self.end_token_ids:
            raise ValueError(f"--tokenizer {config.tokenizer}: has no token that ends an answer (eos_token)")
        self.end_token_id = self.end_token_ids[0]
        padding = self.tokenizer.pad_token_id
        self.pad_token_id: int = self.end_token_id if padding is None else padding

    @property
    def num_prompts(self) -> int:
        return len(self._records)

    def leave_out(self, keys: Collection[str]) -> None:
        """Leave out the records of these names. The others keep their names."""
        self._records.leave_out(keys, self._key)

    def in_stored_order(self, indices: Sequence[int]) -> list[int]:
        """Sort indices by the places of their records, so that each row group of a Parquet file is read once."""
        return sorted(indices, key=self._records.__getitem__)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index.

        Raises:
            BadPromptError: its record cannot be used; names file and line. The functions of the prompt raise it if an
                image or a video cannot be decoded.
            ValueError: the file system fails to read it.
        """
        return self._prompt(self._records[index])

    def check_first(self) -> None:
        """Read the first records until one can be used. Raises ValueError, with file and line, if none can be."""
        from data.conversation_files.sources import FIRST_RECORDS

        first, errors = min(FIRST_RECORDS, len(self._reader)), list[BadPromptError]()
        for number in range(first):
            try:
                self._prompt(number)
            except BadPromptError as error:
                errors.append(error)
                continue
            return
        others = f" (and none of the first {first} records can be used)" if first > 1 else ""
        raise ValueError(f"{errors[0]}{others}")

    def _prompt(self, number: int) -> Prompt:
        from data.conversation_files.sources import conversation_of_record

        file, _ = self._reader.place(number)
        try:
            record = file.parse(self._reader[number]["raw"])
            found = conversation_of_record(record, self._images, self._columns)
            *before, last = found.messages or [{}]
            if not before or last.get("role") != "assistant":
                raise ValueError("has no answer at its end, against which completions are scored")
            if last.get("tool_calls"):
                raise ValueError("its last answer calls a tool, and completions are scored against text alone")
            if not (truth := _text(last["content"])):
                raise ValueError("its last answer, against which completions are scored, has no text")
            planned = [self._encoder.planned(name, content, self._infos.get((int(number), place)))
                       for place, (name, content) in enumerate(found.videos)]
            question = self._encoder.question(before, found.images, found.tools, planned, pixels=False,
                                              thinks="</think>" in truth)
            tokens = question.sample.tokens
            videos = self._prompt_videos(tokens, planned)
        except OSError as error:  # of the file system, so that other records would fail, too
            raise ValueError(f"{self._flag} {self._key(number)}: {error}") from error
        except ValueError as error:
            raise self._bad(number, error) from error
        for place, video in enumerate(planned):
            if (int(number), place) not in self._infos and self._kept_frames < KEPT_FRAMES:
                self._infos[int(number), place] = video.info
                self._kept_frames += video.info.num_frames
        ids = tuple(tokens.tolist())
        pictures = partial(self._decoded, number, partial(self._pictures, tokens, found.images, planned))
        originals = partial(self._decoded, number, partial(self._encoder.originals, found.images))
        return Prompt(self._key(number), str(self.tokenizer.decode(ids)), ids, truth,
                      _other_fields(record, self._columns), tuple(question.sample.image_sizes), pictures,
                      videos, originals if self._has_tiles else None)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(without_ends(token_ids, self.end_token_ids), skip_special_tokens=True))

    def _key(self, number: int) -> str:
        file, place = self._reader.place(int(number))
        return f"{file.path} {file.name(place)}"

    def _bad(self, number: int, error: Exception) -> BadPromptError:
        key = self._key(number)
        return BadPromptError(f"{self._flag} {key}: {error}", key)

    def _decoded(self, number: int, decode: Callable[[], list[np.ndarray]]) -> list[np.ndarray]:
        """Return what `decode` does. Its errors name the image or video, and get the name of the record."""
        try:
            return decode()
        except ValueError as error:
            raise self._bad(number, error) from error

    def _pictures(self, tokens: np.ndarray, images: Sequence[tuple[str, bytes]],
                  videos: Sequence[PlannedVideo]) -> list[np.ndarray]:
        """Return images and parts of videos as the encoder takes them, in 8 bits and with the channels last."""
        return [np.ascontiguousarray(np.moveaxis(pixels, -3, -1))
                for pixels in self._encoder.drawn(tokens, images, videos, normalise=False)]

    def _prompt_videos(self, tokens: np.ndarray, videos: Sequence[PlannedVideo]) -> tuple[PromptVideo, ...]:
        """Find the videos of a prompt among its tokens.

        Raises:
            ValueError: the tokens are not those that the engine writes for a video, which tokenises each text alone.
        """
        places, found = iter(np.flatnonzero(tokens == self._video_token).tolist()), []
        for video in videos:
            own = [next(places) for _ in video.plan.sizes]
            start, stop = own[0], own[-1] + 1
            if any(video.plan.texts):
                texts = [self.tokenizer.encode(text, add_special_tokens=False) for text in video.plan.texts]
                start, stop = start - 1 - len(texts[0]), stop + 1
                written = [token for text in texts for token in (*text, *tokens[own[0] - 1:own[0] + 2])]
                if tokens[start:stop].tolist() != written:
                    raise ValueError(f"video {video.name}: the tokenizer writes {video.plan.texts[0]!r} between other "
                                     "texts with other tokens than alone, as the rollout engine writes it")
            # The last frame is repeated to fill a temporal patch.
            sampled = video.plan.num_sampled
            found.append(PromptVideo(start, stop, self._video_token, len(own), video.plan.indices[:sampled],
                                     video.info.num_frames, video.info.rate))
        return tuple(found)


def _other_fields(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a record that are not part of its conversation, for rewards, as values that JSON has.

    Bytes are left out, and other values that JSON does not have, such as dates of a table, become text.
    """
    from data.conversation_files.sources import renamed

    read = renamed(record, columns)
    form = next(key for key in FORMS if read.get(key) is not None)
    keys = {form, "image", "images", *VIDEO_KEYS, "system", "tools"}
    if form == "question":
        keys |= {"answer", "answers"}
    own = {columns.get(key, key) for key in keys}
    return _plain({key: value for key, value in record.items() if key not in own})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if not isinstance(each, BINARY)}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value if not isinstance(each, BINARY)]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [content]
    return "".join(part.get("text", "") if isinstance(part, Mapping) else str(part or "") for part in parts).strip()


class ConversationPromptsProvider:
    """The prompts `conversations`; see the docstring of this module."""

    Config: ClassVar[type] = Config
    # As in supervised training.
    with_tokenizer = staticmethod(files.provider.with_tokenizer)
    with_image_processing = staticmethod(files.provider.with_image_processing)
    image_processing = staticmethod(files.provider.image_processing)
    with_video_processing = staticmethod(files.provider.with_video_processing)
    video_processing = staticmethod(files.provider.video_processing)

    def stream_fields(self, config: Config) -> dict[str, Any]:
        """Return the fields that decide the prompts and their order."""
        from data.conversation_files.sources import sources_of

        found = files.provider.stream_fields(config)
        if config.shuffle and any(map(blocks_of, sources_of(config, "train"))):
            # Checkpoints of older versions, which shuffled all records of such files together, have True here.
            found["shuffle"] = "by row groups"
        return found

    def validate(self, config: Config, tokens: TokenSpec) -> None:
        """Raise ValueError, with flags, files and lines, if the flags or the first records cannot work."""
        self.open(config, tokens, "train", 0).check_first()

    def open(self, config: Config, tokens: TokenSpec, split: str, seed: int) -> ConversationPrompts:
        """Open a split, `train` or `valid`. Raises the errors of `validate`."""
        return ConversationPrompts(config, tokens, split, seed)


provider = ConversationPromptsProvider()
