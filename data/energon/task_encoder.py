"""Turn WebDataset samples into rows, in Energon's workers.

When a sample is read, it is parsed, written as a conversation and tokenised. For the sizes, only the headers of its
images and the packets and first frames of its videos are read. Other pixels are decoded when the sample becomes part of
a row. So a packing buffer holds compressed images, and each image is decoded once. An entry of a buffer depends only on
its sample, because Energon restores it by key.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.energon import Cooker, SkipSample, TaskEncoder, WorkerConfig, edataclass, stateless
from megatron.energon import Sample as EnergonSample
from megatron.energon.errors import FatalSampleError
from megatron.energon.state import FlexState
from megatron.energon.wrappers import MapDataset, PackingDataset
from megatron.energon.wrappers.base import BaseWrapperDataset
from PIL import Image

from data.bad_samples import ErrorLog, reason_of, sample_name
from data.conversations import FrameList, Video
from data.energon import compat
from data.energon.cookers import TextDecoder, conversation_of, cook
from data.energon.provider import shared_normalisation, video_processing_of
from data.image_tiling import (
    Tiling,
    oriented_size,
    tile_image,
    tile_pictures,
    tile_sizes,
    tiling_of,
    upright_image,
)
from data.packing import select_from_buffer
from data.prompts import Tokenizer
from data.video import VideoInfo, VideoPlan, plan_video, probe, read_frames, video_pixels
from mimo.protocols import DataRequest, ImageSize, Question, Sample
from mimo.text import counted
from mimo.visual import Normalisation

if TYPE_CHECKING:
    from data.energon.provider import Config

logger = logging.getLogger("mimo.data")
# --max-image-pixels is checked instead, and its error names the sample.
Image.MAX_IMAGE_PIXELS = None
# Formats whose decoder starts a program, such as EPS, are left out.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# Errors of Pillow's decoders for bytes that are not the image they claim to be. SyntaxError would end Energon's worker.
UNDECODABLE = (OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, EOFError, struct.error, zlib.error)


@edataclass
class Row(EnergonSample):
    """Row of a worker: one sample, or a pack of several. See `mimo.protocols.Sample`.

    Attributes:
        tokens: int64 `[T]`, one placeholder for each image or tile, and for each video or temporal patch of one.
        target_mask: bool `[T]`.
        image_sizes: height and width in pixels of each image or tile, and sizes of videos, in the placeholders' order.
        images: `[C, height, width]` of each image, `[frames, C, height, width]` of each video, `[tiles, C, height,
            width]` of an image whose tiles are one item; uint8 with a `normalisation`, float32 without.
        lengths: in a pack, the number of tokens of each sample; empty without packing.
        skipped: bad samples since the worker's last row.
        unbalanced_encoded_tokens: in a balanced pack, the encoded tokens that the pack would have without balancing.
        normalisation: how the encoder's rank normalises the images.
        worker: global worker id.
    """

    tokens: torch.Tensor
    target_mask: torch.Tensor
    image_sizes: tuple[ImageSize, ...]
    images: list[torch.Tensor]
    lengths: tuple[int, ...] = ()
    skipped: tuple[str, ...] = ()
    unbalanced_encoded_tokens: int | None = None
    normalisation: Normalisation | None = None
    worker: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Send all pixels from a worker to the trainer as one tensor.

        Each tensor that crosses would keep a file handle open on both sides, and a row may have dozens of images.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        images = fields.pop("images")
        fields |= {"shapes": [tuple(image.shape) for image in images],
                   "tokens": self.tokens.numpy(), "target_mask": self.target_mask.numpy()}
        return _unpack_row, (fields, torch.cat([image.flatten() for image in images]) if images else None)


def _unpack_row(fields: dict[str, Any], pixels: torch.Tensor | None) -> Row:
    """Rebuild a row from the parts of `Row.__reduce__`. Its images share the memory of `pixels`."""
    fields |= {name: torch.from_numpy(fields[name]) for name in ("tokens", "target_mask")}
    shapes = fields.pop("shapes")
    if pixels is None:
        return Row(images=[], **fields)
    parts = pixels.split([math.prod(shape) for shape in shapes])
    return Row(images=[part.view(shape) for part, shape in zip(parts, shapes, strict=True)], **fields)


def to_sample(row: Row) -> Sample:
    """Convert a row for the trainer. The arrays share the row's memory."""
    return Sample(
        key=row.__key__,
        tokens=row.tokens.numpy(),
        target_mask=row.target_mask.numpy(),
        image_sizes=list(row.image_sizes),
        images=[image.numpy() for image in row.images],
        lengths=row.lengths,
        skipped=row.skipped,
        unbalanced_encoded_tokens=row.unbalanced_encoded_tokens,
        normalisation=row.normalisation,
    )


@dataclasses.dataclass(frozen=True)
class PlannedVideo:
    """A video whose frames are chosen but not yet decoded: its name, content, header and frames."""

    name: str
    content: Video
    info: VideoInfo
    plan: VideoPlan


@edataclass
class EncodedSample(EnergonSample):
    """Tokenised sample with compressed images, as an entry of a packing buffer.

    Attributes:
        tokens: int64 `[T]`, one placeholder for each image or tile.
        target_mask: bool `[T]`.
        images: name and compressed bytes of each image.
        videos: the videos.
        image_sizes: sizes of images or tiles and of videos, in the placeholders' order.
        length: tokens once images are expanded.
        image_tokens: how many of them are tokens of images and videos.
        encoded_tokens: tokens of images and videos in the encoder's layers, in units of language tokens. They are the
            `image_tokens` unless the model joins the tokens of tiles.
    """

    tokens: np.ndarray
    target_mask: np.ndarray
    images: list[tuple[str, bytes]]
    videos: list[PlannedVideo]
    image_sizes: tuple[ImageSize, ...]
    length: int
    image_tokens: int
    encoded_tokens: int


def open_image(name: str, data: Any) -> Image.Image:
    """Open an image without reading its pixels. Raises ValueError, with its name, if it is no image."""
    if not isinstance(data, bytes):
        raise ValueError(f"image {name} is {type(data).__name__}, expected the bytes of an image file")
    try:
        return Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except UNDECODABLE as error:
        raise ValueError(f"undecodable image {name}: no header of {', '.join(IMAGE_FORMATS)}") from error


def global_worker_id() -> int:
    """Return the number of the active worker among all workers of the run, also in the training process."""
    worker = WorkerConfig.active_worker_config
    assert worker is not None
    return int(worker.global_worker_id() if worker.num_workers else worker.rank)


class VlmTaskEncoder(TaskEncoder):
    """Turn samples into rows for one model; see the docstring of this module.

    Args:
        config: the data set's flags.
        request: the run's model and sizes.
        errors: the error handler of the `WorkerConfig` that the data set is built with.

    Attributes:
        normalisation: how the encoder's rank normalises the 8-bit images of rows; None if rows have float images.

    Raises:
        ValueError: the flags cannot work; the message names them.
    """

    # Energon would end a worker after this many bad samples in a row. `ErrorLog` counts them instead.
    __default_failure_tolerance__ = 0
    decoder = TextDecoder()
    cookers = (Cooker(cook),)

    def __init__(self, config: Config, request: DataRequest, errors: ErrorLog) -> None:
        self.tokenizer = Tokenizer(
            config.tokenizer, config.prompt_format, config.image_tag_type, request.tokens, append_eos=config.append_eos
        )
        self._config = config
        self._request = request
        self.errors = errors
        self._tiling = tiling_of(config, request.tokens) if request.tokens.image_token_id >= 0 else None
        self._video = video_processing_of(config, request.tokens)
        self.normalisation = shared_normalisation(self._tiling, self._video)
        self._sound_is_told = False

    def _image_sizes(self, name: str, data: Any) -> list[tuple[int, int]]:
        """Return the sizes of the tiles of an image, from its header."""
        if self._tiling is None:
            raise ValueError(f"has image {name}, but the model takes no images")
        image = open_image(name, data)
        height, width = oriented_size(image)
        limit = self._config.max_image_pixels
        if height * width > limit:
            raise ValueError(f"image {name} has {height}x{width} pixels, more than --max-image-pixels {limit}")
        return tile_sizes(height, width, self._tiling)

    def question(self, messages: Sequence[Mapping[str, Any]], images: Sequence[tuple[str, bytes]],
                 tools: Sequence[Any] | None = None, videos: Sequence[PlannedVideo] = (), *,
                 pixels: bool = True, thinks: bool = False) -> Question:
        """Return the turns before an answer as a question, without its images and videos if `pixels` is False.

        `thinks` says whether the answer has thoughts.

        Raises:
            ValueError: the turns or an image cannot be used; the message says why.
        """
        tiles = [self._image_sizes(name, data) for name, data in images]
        tokens, ends = self.tokenizer.encode_question(messages, [len(sizes) for sizes in tiles], tools,
                                                      [video.plan.texts for video in videos], thinks=thinks)
        sizes = self._sizes_as_shown(tokens, tiles, videos)
        drawn = self.drawn(tokens, images, videos, normalise=self.normalisation is None) if pixels else None
        originals = self.originals(images) if pixels and self._request.tokens.tiles is not None else None
        return Question(Sample("the question", tokens, np.zeros(len(tokens), np.bool_), sizes, drawn,
                               normalisation=self.normalisation), ends, originals)

    def drawn(self, tokens: np.ndarray, images: Sequence[tuple[str, bytes]], videos: Sequence[PlannedVideo], *,
              normalise: bool) -> list[np.ndarray]:
        """Decode images and videos in the order of the placeholders in `tokens`.

        Returns:
            `[channels, height, width]` of each image or tile, `[tiles, channels, height, width]` of each image whose
            tiles are one item, and `[frames, channels, height, width]` of each part of a video, float32 if they are
            normalised and else uint8.

        Raises:
            ValueError: one of them cannot be decoded.
        """
        tiles = [tile for name, data in images for tile in self._tiles(name, data, normalise=normalise)]
        parts: list[np.ndarray] = []
        for video in videos:
            assert self._video is not None, "checked with the plan"
            parts += video_pixels(self._frames(video), video.plan, self._video, normalise=normalise)
        return self._as_shown(tokens, tiles, parts)

    def originals(self, images: Sequence[tuple[str, bytes]]) -> list[np.ndarray]:
        """Decode images as they are, uint8 `[height, width, channels]`. Raises ValueError if one cannot be decoded."""
        return [np.array(picture) for name, data in images for picture in self._decoded(
            lambda image, tiling: [np.asarray(upright_image(image, tiling.num_channels))], name, data)]

    def _tiles(self, name: str, data: Any, *, normalise: bool) -> list[np.ndarray]:
        if normalise:
            tiles = self._decoded(tile_image, name, data)
        else:
            # Copies, because the memory of an image that keeps its size cannot be written to.
            tiles = [np.array(picture.transpose(2, 0, 1), order="C")
                     for picture in self._decoded(tile_pictures, name, data)]
        return [np.stack(tiles)] if self._request.tokens.tiles is not None else tiles

    def _decoded(self, tile: Callable[[Image.Image, Tiling], list[np.ndarray]], name: str,
                 data: Any) -> list[np.ndarray]:
        assert self._tiling is not None, "checked with the sizes"
        try:
            return tile(open_image(name, data), self._tiling)
        except UNDECODABLE as error:
            raise ValueError(f"undecodable image {name}: {reason_of(error)}") from error

    def planned(self, name: str, content: Video, info: VideoInfo | None = None) -> PlannedVideo:
        """Choose the frames of a video, from its header or, if that has been read before, from `info`.

        Raises ValueError if it cannot be used.
        """
        if self._video is None and self._request.tokens.video_token_id >= 0:
            raise ValueError(f"has video {name}, but the model's video processor is not supported; a start with "
                             "--video-fps 2 says why")
        if self._video is None:
            raise ValueError(f"has video {name}, but the model takes no videos; --model-provider qwen2_5_vl and "
                             "qwen3_vl do")
        if info is None:
            info = self._frame_list_info(name, content) if isinstance(content, FrameList) else probe(name, content)
        limit = self._config.max_image_pixels
        if info.height * info.width > limit:
            raise ValueError(f"video {name} has frames of {info.height}x{info.width} pixels, more than "
                             f"--max-image-pixels {limit}")
        # One worker of the run logs it once.
        if info.has_sound and not self._sound_is_told and WorkerConfig.active_worker_config is not None:
            self._sound_is_told = True
            if global_worker_id() == 0:
                logger.info("videos have sound, such as %s: it is not read", name)
        try:
            plan = plan_video(info, self._video, self._request.tokens.size_multiple,
                              is_sampled=isinstance(content, FrameList))
        except ValueError as error:
            raise ValueError(f"video {name}: {error}") from error
        return PlannedVideo(name, content, info, plan)

    def _frame_list_info(self, name: str, video: FrameList) -> VideoInfo:
        """Describe a video that is given as images, which must have the same size."""
        sizes = {oriented_size(open_image(*frame)) for frame in video.frames}
        if len(sizes) > 1:
            raise ValueError(f"video {name}: the images have different sizes, such as "
                             f"{' and '.join(f'{height}x{width}' for height, width in sorted(sizes)[:2])}")
        ((height, width),) = sizes
        return VideoInfo(height, width, len(video.frames), video.rate, has_sound=False, times=(), key_times=())

    @stateless
    def preencode_sample(self, sample: EnergonSample) -> EncodedSample:
        """Tokenise a sample and read the headers of its images. Raises ValueError if it cannot be used."""
        conversation = conversation_of(sample)
        tiles = [self._image_sizes(name, data) for name, data in conversation.images]
        videos = [self.planned(name, content) for name, content in conversation.videos]
        counts = [len(sizes) for sizes in tiles]
        if conversation.messages is not None:
            tokens, mask = self.tokenizer.encode(conversation.messages, counts, conversation.tools,
                                                 [video.plan.texts for video in videos])
        else:
            if videos:
                raise ValueError("a text without turns has a video; write it as a turn of `messages`")
            tokens, mask = self.tokenizer.encode_document(conversation.document, counts)
        image_sizes = tuple(self._sizes_as_shown(tokens, tiles, videos))
        image_tokens = sum(self._request.num_image_tokens(*size) for size in image_sizes)
        length, joined = len(tokens) - len(image_sizes) + image_tokens, self._request.tokens.tiles
        if length > self._request.seq_length:
            and_videos = f" and {counted(len(videos), 'video')}" if videos else ""
            advice = "; --video-fps, --video-max-frames and --video-max-pixels make fewer" if videos else ""
            raise ValueError(
                f"{length} tokens, {image_tokens} of them from {counted(len(tiles), 'image')}{and_videos}, are more "
                f"than --seq-length {self._request.seq_length}{advice}"
            )
        return EncodedSample.derive_from(
            sample,
            tokens=tokens,
            target_mask=mask,
            images=conversation.images,
            videos=videos,
            image_sizes=image_sizes,
            length=length,
            image_tokens=image_tokens,
            encoded_tokens=(image_tokens if joined is None
                            else sum(joined.num_encoded(*size[:2]) for size in image_sizes)),
        )

    def _sizes_as_shown(self, tokens: np.ndarray, tiles: Sequence[Sequence[tuple[int, int]]],
                        videos: Sequence[PlannedVideo]) -> list[ImageSize]:
        """Return the sizes of images and of parts of videos in the order of the placeholders in `tokens`."""
        parts: list[ImageSize] = [size for video in videos for size in video.plan.sizes]
        return self._as_shown(tokens, [size for sizes in tiles for size in sizes], parts)

    def _as_shown[T](self, tokens: np.ndarray, images: Sequence[T], videos: Sequence[T]) -> list[T]:
        """Merge values for each image and for each part of a video, in the order of the placeholders in `tokens`."""
        spec, left = self._request.tokens, (iter(images), iter(videos))
        return [next(left[token == spec.video_token_id]) for token in tokens.tolist()
                if token in (spec.image_token_id, spec.video_token_id) and token >= 0]

    def _frames(self, video: PlannedVideo) -> Iterator[np.ndarray]:
        if not isinstance(video.content, FrameList):
            yield from read_frames(video.name, video.content, video.info, video.plan.indices)
            return
        for index in video.plan.indices:
            name, data = video.content.frames[index]
            try:
                yield np.asarray(upright_image(open_image(name, data), num_channels=3))
            except UNDECODABLE as error:
                raise ValueError(f"undecodable image {name} of video {video.name}: {reason_of(error)}") from error

    @stateless
    def postencode_sample(self, sample: EncodedSample) -> Row:
        """Decode the images and videos of a sample. Raises ValueError if one cannot be decoded."""
        images = [torch.from_numpy(pixels) for pixels in self.drawn(
            sample.tokens, sample.images, sample.videos, normalise=self.normalisation is None)]
        shapes = [tuple(image.shape) for image in images]
        expected = [self._request.tokens.pixel_shape(size) for size in sample.image_sizes]
        assert shapes == expected, (sample.__key__, shapes, expected)
        self.errors.row_made()
        row = Row.derive_from(
            sample,
            tokens=torch.from_numpy(sample.tokens),
            target_mask=torch.from_numpy(sample.target_mask),
            image_sizes=sample.image_sizes,
            images=images,
            # With packing, the pack carries them.
            skipped=() if self._config.packing_buffer_size else self.errors.take(),
            normalisation=self.normalisation,
            worker=global_worker_id(),
        )
        # Shards may use the same keys, so a sample of a blend is named by set, shard and key.
        row.__key__ = sample_name(sample, None).replace(" ", "/", 1)
        return row

    def select_packs(self, samples: Sequence[EncodedSample], num_waiting: int | None
                     ) -> tuple[list[list[EncodedSample]], list[int], list[EncodedSample]]:
        """Choose the samples of each pack, and those that wait for the next buffer.

        With balancing, also return the encoded tokens of each pack without it. The result depends only on worker and
        buffer, not on how many workers share the process. `select_from_buffer` explains `num_waiting`.
        """
        worker = WorkerConfig.active_worker_config
        assert worker is not None
        # Energon numbers buffers over the workers of its loader. A routed loader has the workers of several lanes.
        buffer = (self.current_sample_index - worker.rank_worker_id()) // max(worker.num_workers, 1)
        rng = np.random.default_rng([self._request.seed, global_worker_id(), buffer])
        multiple = self._request.sequence_multiple
        lengths = [-(-sample.length // multiple) * multiple for sample in samples]
        encoded = [sample.encoded_tokens for sample in samples] if self._config.packing_balance else None
        packs, unbalanced, waiting = select_from_buffer(lengths, encoded, self._request.seq_length, rng, num_waiting)
        return ([[samples[index] for index in pack] for pack in packs], unbalanced,
                [samples[index] for index in waiting])

    def select_samples_to_pack(self, samples: list[EncodedSample]) -> list[list[EncodedSample]]:
        return self.select_packs(samples, None)[0]

    @stateless
    def pack_selected_samples(self, samples: list[Row]) -> Row:
        """Join rows of single samples into one. Skips a pack if no sample's images could be decoded."""
        if not samples:
            raise SkipSample
        return Row(
            __key__=" ".join(row.__key__ for row in samples),
            __restore_key__=(),  # Energon sets it
            __subflavors__=None,
            __sources__=tuple(source for row in samples for source in row.__sources__ or ()),
            tokens=torch.cat([row.tokens for row in samples]),
            target_mask=torch.cat([row.target_mask for row in samples]),
            image_sizes=tuple(size for row in samples for size in row.image_sizes),
            images=[image for row in samples for image in row.images],
            lengths=tuple(len(row.tokens) for row in samples),
            skipped=self.errors.take(),
            normalisation=self.normalisation,
            worker=samples[0].worker,
        )

    def build_encode_sample(self, dataset: Any, *, worker_config: WorkerConfig) -> Any:
        """Build Energon's data set, whose shard reader reports bad samples like every other stage."""
        without_tolerance(dataset)
        return super().build_encode_sample(dataset, worker_config=worker_config)

    def build_batch(
        self, dataset: Any, *, batch_size: int | None, batch_drop_last: bool = False,
        packing_buffer_size: int | None = None, worker_config: WorkerConfig,
    ) -> Any:
        """Build Energon's data set, whose packs record what they would have been without balancing."""
        assert batch_size is None, batch_size
        assert (packing_buffer_size or 0) == self._config.packing_buffer_size, packing_buffer_size
        if packing_buffer_size:
            return PackedRows(dataset, packing_buffer_size, self, worker_config)
        return super().build_batch(
            dataset, batch_size=None, batch_drop_last=batch_drop_last, worker_config=worker_config
        )


def without_tolerance(dataset: Any) -> None:
    """Keep every stage of a pipeline from ending a worker after many bad samples in a row. Energon allows 100."""
    if isinstance(dataset, MapDataset):
        compat.tolerate_any_failure(dataset)
    if isinstance(dataset, BaseWrapperDataset):
        for inner in dataset.datasets:
            without_tolerance(inner)


class PackedRows(PackingDataset):
    """Energon's packing without its progress bar, which records what each pack would be without balancing.

    Energon packs all samples of a buffer, so that the last row of each has much padding. Here the samples of the
    emptiest row go back to the next buffer.

    Energon reads the next buffer while it delivers the packs of the current one. Bad samples are reported with the
    packs of the buffer for which they were read, because the run has not skipped them before.
    """

    _savable_fields = (*compat.PACKING_STATE, "_unbalanced", "_skipped", "_skipped_ahead", "_num_waiting")

    def __init__(self, dataset: Any, buffer_size: int, encoder: VlmTaskEncoder, worker_config: WorkerConfig) -> None:
        self._encoder = encoder
        self._failure: FatalSampleError | None = None
        self._has_ended = False
        super().__init__(
            dataset,
            buffer_size=buffer_size,
            pre_packer=self._select,
            final_packer=encoder.pack_selected_samples,
            final_packer_stateless=True,
            sample_encoder=encoder.postencode_sample,
            sample_encoder_stateless=True,
            pre_packer_failure_tolerance=0,
            final_packer_failure_tolerance=0,
            sample_encoder_failure_tolerance=0,
            worker_config=worker_config,
        )

    def reset_state_own(self) -> None:
        super().reset_state_own()
        self._unbalanced: list[int] = []
        self._skipped: list[str] = []
        self._skipped_ahead: list[str] = []
        self._num_waiting = 0

    def restore_state(self, state: FlexState) -> None:
        """Restore Energon's state. States of earlier versions have no skipped samples and none that wait."""
        super().restore_state(FlexState({"_skipped": [], "_skipped_ahead": [], "_num_waiting": 0, **state}))

    def _select(self, samples: list[EncodedSample]) -> list[list[EncodedSample]]:
        packs, self._unbalanced, waiting = self._encoder.select_packs(
            samples, None if self._has_ended else self._num_waiting)
        self._num_waiting = len(waiting)
        self._reading_buffer.extend(waiting)
        self._skipped += self._skipped_ahead
        self._skipped_ahead = []
        return packs

    def _fill_reading_buffer(self, source_iter: Iterator[Any], log_progress: bool = False) -> bool:
        self._skipped += self._encoder.errors.take()  # images of the last pack that could not be decoded
        try:
            self._has_ended = not super()._fill_reading_buffer(source_iter, log_progress=False)
        except FatalSampleError as error:
            self._failure = error  # raised after the packs that were read before it
            self._has_ended = True
        finally:
            self._skipped_ahead += self._encoder.errors.take()
        return not self._has_ended

    def __iter__(self) -> Iterator[Row]:
        for row in super().__iter__():
            if self._unbalanced:
                # The remaining packs are at the end.
                row.unbalanced_encoded_tokens = self._unbalanced[-1 - compat.packs_left(self)]
            row.skipped = (*self._skipped, *row.skipped)
            self._skipped = []
            yield row
        if self._failure is not None:
            raise self._failure
