"""Read samples of a data set as training does, and record the sizes of their text, images and videos."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.energon import stateless
from megatron.energon.errors import FatalSampleError

from data.energon.open import split_sizes
from data.energon.provider import Config, check
from data.energon.reader import Encoding, EnergonReader
from data.energon.task_encoder import (
    EncodedSample,
    ErrorLog,
    Row,
    VlmTaskEncoder,
    open_image,
    reason_of,
    sample_name,
)
from data.hf_tokenizer import load_tokenizer
from data.image_tiling import Size, oriented_size, tile_sizes, tiling_of
from data.prompts import IMAGE_TOKENS
from mimo.protocols import DataRequest

KEPT_ROWS = 8  # of each source, to be shown


@dataclass(frozen=True)
class ImageRecord:
    """An image before and after tiling: height and width in pixels, and the language tokens that it becomes."""

    size: Size
    tiles: tuple[Size, ...]
    tokens: int

    def patches(self, patch_size: int) -> int:
        return sum((height // patch_size) * (width // patch_size) for height, width in self.tiles)


@dataclass(frozen=True)
class VideoRecord:
    """A video.

    Attributes:
        size: height and width of its frames in pixels.
        resized: the same as the model gets them.
        num_frames: number of its frames.
        sampled: number of frames that the model gets.
        tokens: language tokens that these become.
    """

    size: Size
    resized: Size
    num_frames: int
    sampled: int
    tokens: int


@dataclass(frozen=True)
class Record:
    """One sample's share of the model's input.

    Attributes:
        source: path of its data set, and subflavors as JSON.
        name: shard and key.
        text_tokens: tokens without placeholders.
        image_tokens: language tokens that images and videos become.
        encoded_tokens: their tokens in the encoder's layers; see `EncodedSample`.
        target_tokens: tokens to learn.
        images: its images, in order.
        videos: its videos, in order.
    """

    source: tuple[str, str]
    name: str
    text_tokens: int
    image_tokens: int
    encoded_tokens: int
    target_tokens: int
    images: tuple[ImageRecord, ...]
    videos: tuple[VideoRecord, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of a row that the sample takes."""
        return self.text_tokens + self.image_tokens


@dataclass
class Collected:
    """Result of reading.

    Attributes:
        sizes: samples in one pass over each source.
        records: good samples, in the order of training.
        rows: the first few rows of each source, with the index of their record.
        bad: how often each bad sample was met, by (shard and key, reason).
    """

    sizes: list[int]
    records: list[Record] = field(default_factory=list)
    rows: dict[tuple[str, str], list[tuple[int, Row]]] = field(default_factory=dict)
    bad: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def num_read(self) -> int:
        return len(self.records) + self.bad.total()


class BadSampleLog(ErrorLog):
    """Records bad samples instead of ending a run that has too many, and stops reading after enough samples."""

    def __init__(self, collected: Collected, wanted: int, advance: Callable[[], object]) -> None:
        super().__init__(wanted)
        self._collected, self._wanted, self._advance = collected, wanted, advance

    def handler(self, exception: Exception, sample: Any, sources: Any) -> None:
        """Record a bad sample.

        Raises:
            FatalSampleError: as many samples as wanted were read. It is raised here because the reader does not return
                before a good sample, and there may be none.
        """
        if isinstance(exception, AssertionError) or isinstance(sample, list):
            raise exception
        self._collected.bad[sample_name(sample, sources), reason_of(exception)] += 1
        self._advance()
        if self._collected.num_read >= self._wanted:
            raise FatalSampleError("enough samples were read") from exception


class RecordingEncoder(VlmTaskEncoder):
    """The task encoder of training, which records what goes through it."""

    def __init__(self, config: Config, request: DataRequest, errors: ErrorLog, collected: Collected) -> None:
        super().__init__(config, request, errors)
        self._tile = tiling_of(config, request.tokens) if request.tokens.image_token_id >= 0 else None
        self._num_image_tokens = request.num_image_tokens
        self._collected = collected

    @stateless
    def postencode_sample(self, sample: EncodedSample) -> Row:
        """Encode as in training, and record the sample once its images are decoded."""
        row = super().postencode_sample(sample)
        images = [oriented_size(open_image(name, data)) for name, data in sample.images]
        source = source_of(row)
        self._collected.records.append(Record(
            source=source,
            name=sample_name(sample, None),
            text_tokens=sample.length - sample.image_tokens,
            image_tokens=sample.image_tokens,
            encoded_tokens=sample.encoded_tokens,
            target_tokens=int(sample.target_mask.sum()),
            images=tuple(self._image(size) for size in images),
            videos=tuple(VideoRecord(
                (video.info.height, video.info.width), video.plan.sizes[0][:2], video.info.num_frames,
                len(video.plan.indices), sum(self._num_image_tokens(*size) for size in video.plan.sizes))
                for video in sample.videos),
        ))
        rows = self._collected.rows.setdefault(source, [])
        if len(rows) < KEPT_ROWS:
            rows.append((len(self._collected.records) - 1, row))
        return row

    def _image(self, size: Size) -> ImageRecord:
        assert self._tile is not None, "images of a model that takes none are bad samples"
        tiles = tuple(tile_sizes(*size, self._tile))
        tokens = sum(self._num_image_tokens(*tile) for tile in tiles)
        if self._tile.is_joined:
            tiles = (self._tile.tile_size,) * self._request.tokens.tiles.count(*size)
        return ImageRecord(size, tiles, tokens)


def source_of(row: Row) -> tuple[str, str]:
    """Return the path of a row's data set, relative if it is below this folder, and its subflavors as JSON or ""."""
    path = str(row.__sources__[0].dataset_path) if row.__sources__ else ""
    flavors = json.dumps(row.__subflavors__, sort_keys=True, default=str) if row.__subflavors__ else ""
    return path.removeprefix(f"{Path.cwd()}/"), flavors


def tokenizer_image_token(folder: str) -> tuple[int, int]:
    """Return the id of a tokenizer's placeholder for an image, or -1 if it has none, and its highest id."""
    tokenizer = load_tokenizer(folder)
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    return next((special[name] for name in IMAGE_TOKENS if name in special), -1), max(tokenizer.get_vocab().values())


def collect(config: Config, request: DataRequest, samples: int, advance: Callable[[], object]) -> Collected:
    """Read samples of the training split in this process, in the order of training.

    Args:
        config: the data set's flags.
        request: what the model asks of the data set, in one lane.
        samples: number of samples to read, bad ones included; at most one pass over the data set is read.
        advance: called after each sample.

    Raises:
        ValueError: flags do not fit each other or the model. The message names them and their values.
    """
    check(config, request)
    collected = Collected(split_sizes(config, "train"))
    wanted = min(samples, sum(collected.sizes))
    errors = BadSampleLog(collected, wanted, advance)
    # Single samples are read. Packing is tried out later, with several sizes of its buffer.
    config = replace(config, num_workers=0, packing_buffer_size=0, packing_balance=False)
    encoder = RecordingEncoder(config, request, errors, collected)
    reader = EnergonReader(config, request, [0], Encoding(encoder, errors.handler, lambda row: row))
    reader.start()
    try:
        while collected.num_read < wanted:
            reader.read(0)
            advance()
    except FatalSampleError:
        if collected.num_read < wanted:
            raise
    finally:
        reader.close()
    return collected
